/*
 * treeverify-client.h - libtreeverify-client: calls to a treeverify server, over libcurl.
 *
 * Owns the connection, deadlines, retries and the reading of answers. Keeps the client's side of a
 * session in step. Refuses answers that do not follow the contract; drafts nothing and prints
 * nothing. A client and what it made belong to one thread at a time.
 *
 * Every call returns 0 or a negative errno:
 *   -EPROTO        the server refused: *ret_problem is its problem, with code and HTTP status
 *   -EBADMSG       the answer is not what the contract says
 *   -ECONNREFUSED  no connection could be made
 *   -EIO           the connection was lost and the retries did not help
 *   -ETIMEDOUT     no complete answer within the deadline
 *   -EINVAL        an argument out of range
 *   -ENOMEM
 * On any failure ret_problem->detail says in words what happened, and other outputs are untouched.
 *
 * Retries: a call whose connection is lost, and one refused with "retryable": true, is sent again
 * unchanged (a numbered round with the same seq, so the server answers it once) after a growing
 * pause, never shorter than Retry-After, while retries and deadline allow. A create carries an
 * Idempotency-Key; a server that ignores it may open a second session, which its lease ends.
 */
#ifndef TREEVERIFY_CLIENT_H
#define TREEVERIFY_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct tv_client;
struct tv_json;

struct tv_client_options {
    const char *url;    /* http://HOST:PORT, no path; copied */
    const char *key;    /* secret of a bearer key, sent with every call; copied; NULL: none */
    int32_t connect_ms; /* deadline of one connection attempt */
    int32_t attempt_ms; /* deadline of one attempt */
    int32_t total_ms;   /* deadline of a call with all its retries and pauses */
    int32_t retries_max;
    int32_t backoff_ms; /* first pause; doubles, at most 5 s */
};

struct tv_client_problem {
    int32_t http_status; /* 0: no answer */
    char code[32];       /* "tree-invalid"; "" when the server sent none */
    char detail[256];
    char pointer[96];      /* into the request, or "" */
    int32_t node;          /* offending tree node, or -1 */
    int32_t committed;     /* did the call change state: 1, 0, or -1 for unknown */
    int32_t retryable;     /* the same request may succeed later */
    int32_t retry_after_s; /* 0 when not given */
};

/* An answer as text and as a document; free with tv_client_answer_finish. */
struct tv_client_answer {
    int32_t http_status;
    char *text; /* [bytes], NUL-terminated, owned */
    size_t bytes;
    struct tv_json *doc; /* owned; NULL for an answer without a body */
};

struct tv_client_model {
    char name[128], architecture[64], backend[16], device[128];
    int32_t vocab, max_len, max_nodes, max_depth;
};

struct tv_client_sampling {
    const char *rule;   /* "target_walk" or "greedy" */
    double temperature; /* ignored by greedy, as top_p and min_p */
    double top_p, min_p;
    int32_t top_k;
    const char *seed; /* decimal; NULL: the server picks one */
};

/* The client's side of a session; every call that commits moves it on. Plain value. */
struct tv_client_session {
    char id[32], epoch[17], digest[33];
    char finish[8]; /* "", "stop" or "length" */
    int32_t next_seq, committed_len, pending;
    int32_t max_nodes, max_depth; /* of a draft tree, node 0 counted in max_nodes */
};

/* What one round gave. Free with tv_client_round_finish. */
struct tv_client_round {
    int32_t *nodes;  /* [node_count], owned: accepted nodes, node 0 first; none after a decode */
    int32_t *tokens; /* [token_count], owned: the new text; its last token is the server's own */
    int32_t node_count, token_count;
    int32_t replayed; /* the server had already done this round */
    int64_t server_us;
};

/* Defaults: connect 5 s, attempt 30 s, total 120 s, 4 retries from 100 ms; url NULL. */
void tv_client_options_init(struct tv_client_options *ret_options);
/* Makes no connection yet. 0; -EINVAL: not an http(s) URL of host and port, or a key with
 * bytes that no header can have, or above 256 of them; -ENOMEM. */
int tv_client_create(const struct tv_client_options *options, struct tv_client **ret_client);
void tv_client_destroy(struct tv_client *client); /* NULL is fine */

/* Any call. body may be NULL (then no body is sent). A status of 400 and more with a problem body
 * is -EPROTO; other answers of JSON or of nothing are 0 (the probes answer 503 that way). */
int tv_client_request(struct tv_client *client, const char *method, const char *path,
                      const char *body, size_t body_bytes, struct tv_client_answer *ret_answer,
                      struct tv_client_problem *ret_problem);
void tv_client_answer_finish(struct tv_client_answer *answer);

int tv_client_health(struct tv_client *client, struct tv_client_answer *ret_answer,
                     struct tv_client_problem *ret_problem);
int tv_client_ready(struct tv_client *client, int deep, struct tv_client_answer *ret_answer,
                    struct tv_client_problem *ret_problem);
int tv_client_model(struct tv_client *client, struct tv_client_model *ret_model,
                    struct tv_client_problem *ret_problem);
int tv_client_parity_totals(struct tv_client *client, struct tv_client_answer *ret_answer,
                            struct tv_client_problem *ret_problem);
/* body NULL: the server's built-in case. */
int tv_client_parity_run(struct tv_client *client, const char *body, size_t body_bytes,
                         struct tv_client_answer *ret_answer,
                         struct tv_client_problem *ret_problem);
/* The session-less verify of one JSON body. */
int tv_client_oneshot(struct tv_client *client, const char *body, size_t body_bytes,
                      struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem);

/* tokens [token_count], stop_ids [stop_count] (at most 16). */
int tv_client_session_create(struct tv_client *client, const int32_t *tokens, int32_t token_count,
                             const struct tv_client_sampling *sampling, const int32_t *stop_ids,
                             int32_t stop_count, struct tv_client_session *ret_session,
                             struct tv_client_problem *ret_problem);
int tv_client_session_delete(struct tv_client *client, const struct tv_client_session *session,
                             struct tv_client_problem *ret_problem);
/* One verify round of the tree tokens [count], parents [count]; tokens[0] is session->pending. */
int tv_client_verify(struct tv_client *client, struct tv_client_session *session,
                     const int32_t *tokens, const int32_t *parents, int32_t count,
                     struct tv_client_round *ret_round, struct tv_client_problem *ret_problem);
/* The server decodes up to tokens_max (1 to 1,024) tokens alone. */
int tv_client_decode(struct tv_client *client, struct tv_client_session *session,
                     int32_t tokens_max, struct tv_client_round *ret_round,
                     struct tv_client_problem *ret_problem);
/* Append known tokens; keep_pending puts the pending token before them, else it is dropped. */
int tv_client_extend(struct tv_client *client, struct tv_client_session *session,
                     const int32_t *tokens, int32_t count, int keep_pending,
                     struct tv_client_problem *ret_problem);
void tv_client_round_finish(struct tv_client_round *round);

#ifdef __cplusplus
}
#endif

#endif
