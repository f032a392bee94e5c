/*
 * treeverify-client.h - libtreeverify-client: calls to a treeverify server, over libcurl.
 *
 *     cc drafter.c $(pkg-config --cflags --libs treeverify-client)
 *
 * Owns the connection, deadlines, retries, the client's side of a session and its recovery, and the
 * reading of answers. Refuses answers that do not follow the contract (proto/README.md of the
 * source has it); drafts nothing and prints nothing. A client, its sessions and what they made
 * belong to one thread at a time; different clients are independent of each other. Before threads
 * make clients at the same moment, the program calls curl_global_init once, as libcurl asks.
 *
 * Every call returns 0 or a negative errno:
 *   -EPROTO           the server refused: *ret_problem is its problem, with code and HTTP status
 *   -EBADMSG          the answer is not what the contract says
 *   -ECONNREFUSED     no connection could be made
 *   -EIO              the connection was lost and the retries did not help; no random bytes
 *   -ETIMEDOUT        no complete answer within the deadline
 *   -ESTALE           somebody else moved the session: its text does not continue the one that was
 *                     handed out here. The server's state is adopted; the round was not done.
 *   -ENOTRECOVERABLE  the server's tokens are not this session's, or its model is another one now
 *   -EINVAL           an argument out of range
 *   -EBUSY            rounds sent ahead are under way: receive them first
 *   -ENOMEM
 * On any failure ret_problem->detail says in words what happened, and other outputs are untouched;
 * after a success the problem is empty.
 *
 * Retries: a call whose connection is lost, and one refused with "retryable": true, is sent again
 * unchanged (a numbered round with the same seq, so the server answers it once) after a growing
 * pause with jitter, never shorter than Retry-After, while retries and deadline allow. So is an
 * answer without a problem document (an intermediary's) with status 408, 429, 502, 503 or 504.
 * A create carries an Idempotency-Key: repeated, it is one session. A server that has answered the
 * client before, and to which no connection can be made now (or by a proxy, which says 502, 503 or
 * 504 without a problem document), is starting again: it is waited for restart_ms, whatever
 * retries_max says (but for 0: never), within the deadline. Probes and the end of a session wait
 * for nobody; nor does a client that nobody has answered yet.
 *
 * Recovery of a session, within the call that meets the refusal:
 *   - the server is elsewhere (an answer was lost for good, or somebody used the session): its
 *     state is adopted when it continues the text handed out here, and what was missed is the
 *     round's result, with recovered = TV_CLIENT_RESYNC;
 *   - the server has forgotten the session (restart, lease over, deleted): it is made anew from the
 *     tokens here with the same seed, the pending token handed out stays, and the round is sent
 *     again, with recovered = TV_CLIENT_RESUMED;
 *   - a round is held whose proposal never arrived: it is discarded; nothing of it was handed out;
 *   - a choice that a commit or commit_prev made stays, also when the session is made anew.
 *
 * The digest over all committed tokens is computed here too, and every answer is held against it.
 *
 * Units are in the names: _ms, _us, _s, _bytes; counts are of tokens or nodes. Token ids, lengths
 * and node indices are int32_t; [n] beside a pointer is its shape. Text is UTF-8 and ends with NUL.
 */
#ifndef TREEVERIFY_CLIENT_H
#define TREEVERIFY_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#define TV_CLIENT_VERSION_MAJOR 0
#define TV_CLIENT_VERSION_MINOR 1
#define TV_CLIENT_VERSION_PATCH 0
/* One number that grows with versions: 0.1.0 is 100. */
#define TV_CLIENT_VERSION                                                                          \
    (TV_CLIENT_VERSION_MAJOR * 10000 + TV_CLIENT_VERSION_MINOR * 100 + TV_CLIENT_VERSION_PATCH)

#if defined(__GNUC__)
#define TV_CLIENT_API __attribute__((visibility("default")))
#else
#define TV_CLIENT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Limits of the contract; a server may have smaller ones (its model and sessions say). */
#define TV_CLIENT_NODES_MAX         1024 /* of a tree, node 0 included */
#define TV_CLIENT_STOP_IDS_MAX      16
#define TV_CLIENT_DECODE_TOKENS_MAX 1024
#define TV_CLIENT_SEED_DIGITS_MAX   20
#define TV_CLIENT_SALT_BYTES_MAX    64
#define TV_CLIENT_GUESSES_MAX       32
#define TV_CLIENT_COSTS_MAX         4 /* sizes whose cost an answer tells */
#define TV_CLIENT_BODY_BYTES_MAX    (16u << 20)

struct tv_client;
struct tv_client_session;
struct tv_client_document; /* a parsed answer */
struct tv_client_value;    /* a JSON value inside one; lives as long as the answer */

struct tv_client_options {
    const char *url;     /* http://HOST:PORT or https://HOST:PORT, no path; copied */
    const char *key;     /* secret of a bearer key, sent with every call; copied; NULL: none */
    const char *ca_file; /* https: PEM file of who is trusted; copied; NULL: the system's */
    int32_t connect_ms;  /* deadline of one connection attempt */
    int32_t attempt_ms;  /* deadline of one attempt */
    int32_t total_ms;    /* deadline of a call with all its retries and pauses */
    int32_t retries_max;
    int32_t backoff_ms; /* the first pause at most; doubles, at most 5 s; half of it is jitter */
    int32_t restart_ms; /* how long a server that restarts is waited for; 0: as retries_max says */
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

/* An answer as text and, when it is JSON, as a document; free with tv_client_answer_finish. */
struct tv_client_answer {
    int32_t http_status;
    char *text; /* [bytes], NUL-terminated, owned */
    size_t bytes;
    struct tv_client_document *doc; /* owned; NULL for an answer that has no body, or plain text */
};

enum tv_client_type {
    TV_CLIENT_NULL,
    TV_CLIENT_FALSE,
    TV_CLIENT_TRUE,
    TV_CLIENT_NUMBER,
    TV_CLIENT_STRING,
    TV_CLIENT_ARRAY,
    TV_CLIENT_OBJECT,
};

struct tv_client_model {
    char name[128], architecture[64], backend[16], device[128];
    char model_id[65]; /* hex; the same for the same weights */
    int32_t vocab, max_len, max_nodes, max_depth;
};

struct tv_client_sampling {
    const char *rule;   /* "target_walk", "greedy", "typical", or "client": every verify is held */
    double temperature; /* 0 to 100; ignored by greedy, as what follows */
    double top_p;       /* above 0, at most 1; 1: off */
    double min_p;       /* 0 to 1; 0: off */
    int32_t top_k;      /* 0: off */
    const char *seed;   /* decimal; NULL: the server picks one */
};

struct tv_client_session_options {
    const int32_t *tokens; /* [token_count] the prompt, not empty; copied, as everything here */
    int32_t token_count;
    const struct tv_client_session *prefix; /* instead of tokens: this one's first prefix_len (0:
                                               all) committed tokens are the prompt, named to the
                                               server, and sent only if it has forgotten them */
    int32_t prefix_len;
    struct tv_client_sampling sampling;
    const int32_t *stop_ids; /* [stop_count] end the text */
    int32_t stop_count;      /* at most TV_CLIENT_STOP_IDS_MAX */
    int32_t max_len;         /* committed and pending tokens at most; 0: the model's limit */
    int32_t lease_s;         /* closed when unused for so long; 0: the server's default, 120 */
    const char *cache_salt;  /* sessions of different salts share no cache; NULL: none */
};

/* What the client knows of a session without asking. */
struct tv_client_state {
    const int32_t *tokens; /* [committed_len] the prompt and all that was committed */
    int32_t committed_len;
    int32_t prompt_len;
    int32_t pending; /* drawn, not yet committed: node 0 of the next tree */
    int32_t next_seq;
    int32_t max_nodes, max_depth; /* of a draft tree, node 0 counted in max_nodes */
    int32_t max_len;              /* of the model */
    int32_t cached_len;           /* prompt tokens that needed no pass of the model */
    int32_t resumed;              /* how often the session was made anew */
    int32_t held_seq;             /* the round that waits for tv_client_commit; 0: none */
    int32_t under_way;            /* rounds sent and not yet received: 0, 1 or 2 */
    char id[32], epoch[17], digest[33];
    char finish[8]; /* "", "stop" or "length" */
    char seed[24];  /* decimal: the one in use; "" under greedy */
};

enum tv_client_recovered { TV_CLIENT_NOT_RECOVERED = 0, TV_CLIENT_RESYNC, TV_CLIENT_RESUMED };

/* How a held round ends: a path of its tree from node 0 on [path_count] and the token pending
 * behind it; with path_count 0 and next -1 the round is discarded. */
struct tv_client_settle {
    const int32_t *path;
    int32_t path_count;
    int32_t next;
};

/* Of which nodes the logits are wanted: none, the one where the walk ended, the accepted ones, all.
 */
enum tv_client_rows {
    TV_CLIENT_ROWS_NONE = 0,
    TV_CLIENT_ROWS_STOP,
    TV_CLIENT_ROWS_PATH,
    TV_CLIENT_ROWS_ALL,
};

/* What a verify may ask for besides its tree; all zero asks for nothing. */
struct tv_client_verify_options {
    const char *rule; /* for this round alone; NULL: the session's */
    int32_t hold;     /* 1: propose, and commit nothing (always so under rule "client") */
    const struct tv_client_settle *commit_prev; /* how the held round ends, in the same call: node 0
                                                   is its next; NULL: none is held */
    enum tv_client_rows logits;
    int32_t deadline_ms; /* give up when not started by then (sent again); 0: the server's 10,000 */
    int32_t lease_s;     /* renew the lease; 0: as it was */
};

/* One guess of how the round under way ends, and the tree to verify if it is right. */
struct tv_client_guess {
    int32_t leaf;                    /* node of the tree under way, the last one accepted */
    int32_t pending;                 /* the token drawn behind it: node 0 of the tree */
    const int32_t *tokens, *parents; /* [count] */
    int32_t count;
};

/* What one round gave. Free with tv_client_round_finish. */
struct tv_client_round {
    int32_t *nodes;  /* [node_count], owned: accepted nodes, node 0 first; none after a decode, an
                        extend, a rollback or a resync */
    int32_t *tokens; /* [token_count], owned: the new text; its last token is pending now. None
                        after a rollback. */
    int32_t node_count, token_count;
    int32_t replayed;     /* the server had already done this round */
    int32_t recovered;    /* enum tv_client_recovered */
    int32_t attempts;     /* HTTP exchanges that the call took, those of a recovery included */
    int32_t useful_nodes; /* the server's hint: nodes worth sending; 0 when not given */
    int32_t batch;        /* rounds in the launch; 0 when not given */
    int64_t queue_us, gpu_us, server_us; /* at the server: waiting, computing, all; 0 if unknown */
    int64_t rtt_us;                      /* of the whole call, here */
    int32_t held;  /* 1: a proposal, nothing was committed; nodes and tokens are none under rule
                      "client" */
    int32_t guess; /* tv_client_receive: which guess was right, so that its round is under way now;
                      -1: none */
    int32_t *row_nodes; /* [row_count], owned: nodes whose logits were asked for */
    float *logits;      /* [row_count][vocab], owned: raw, before temperature and filters */
    int32_t row_count, vocab;
    /* the server's hint: what launches of up to so many nodes take there, ascending [cost_count] */
    int32_t cost_nodes[TV_CLIENT_COSTS_MAX];
    int64_t cost_us[TV_CLIENT_COSTS_MAX];
    int32_t cost_count; /* 0: not given */
};

struct tv_client_events; /* a followed session */

/* One event; its members and data are the stream's and hold until its next call. */
struct tv_client_event {
    char name[16]; /* "state", "commit", "rollback", "missed", "lease", "parity", "draining", "end"
                    */
    int32_t id;    /* number of the round; -1: the event has none */
    const struct tv_client_answer *data; /* an object, as the contract lists it */
};

/* The version of the library that runs, "0.1.0"; compare with TV_CLIENT_VERSION_MAJOR and so on. */
TV_CLIENT_API const char *tv_client_version(void);

/* Defaults: connect 5 s, attempt 30 s, total 120 s, 7 retries from 50 ms; url NULL. */
TV_CLIENT_API void tv_client_options_init(struct tv_client_options *ret_options);
/* Makes no connection yet. 0; -EINVAL: not an http(s) URL of host and port, or a key with
 * bytes that no header can have, or above 256 of them; -ENOMEM. */
TV_CLIENT_API int tv_client_create(const struct tv_client_options *options,
                                   struct tv_client **ret_client);
/* NULL is fine. The client's sessions are destroyed before. */
TV_CLIENT_API void tv_client_destroy(struct tv_client *client);

/* Any call with a JSON answer. method: 1 to 16 capital letters; path: "/" and more, a query with
 * it, as a URL has it (no blanks, no "#", ASCII). body may be NULL (then no body is sent). A status
 * of 400 and more is -EPROTO, but for plain JSON that is no problem document (the probes answer 503
 * that way). */
TV_CLIENT_API int tv_client_request(struct tv_client *client, const char *method, const char *path,
                                    const char *body, size_t body_bytes,
                                    struct tv_client_answer *ret_answer,
                                    struct tv_client_problem *ret_problem);
TV_CLIENT_API void tv_client_answer_finish(struct tv_client_answer *answer);

/* Reading a JSON answer. NULL is a value like any other that is not there. */
TV_CLIENT_API const struct tv_client_value *
tv_client_answer_root(const struct tv_client_answer *answer);
/* Member of an object; NULL when there is none, or object is none. */
TV_CLIENT_API const struct tv_client_value *
tv_client_value_member(const struct tv_client_value *object, const char *name);
/* First child of an object or array, and the next one. An array of more than 16 numbers has no
 * children: read it with tv_client_value_ints. */
TV_CLIENT_API const struct tv_client_value *
tv_client_value_first(const struct tv_client_value *container);
TV_CLIENT_API const struct tv_client_value *
tv_client_value_next(const struct tv_client_value *child);
/* Name of a child of an object. */
TV_CLIENT_API const char *tv_client_value_name(const struct tv_client_value *child);
/* TV_CLIENT_NULL for NULL. */
TV_CLIENT_API enum tv_client_type tv_client_value_type(const struct tv_client_value *value);
/* NULL unless a string. It may hold control characters: not for a terminal as it is. */
TV_CLIENT_API const char *tv_client_value_text(const struct tv_client_value *value);
/* 0; -EINVAL: not a number of that kind; -ERANGE. */
TV_CLIENT_API int tv_client_value_int(const struct tv_client_answer *answer,
                                      const struct tv_client_value *value, int64_t *ret);
TV_CLIENT_API int tv_client_value_real(const struct tv_client_answer *answer,
                                       const struct tv_client_value *value, double *ret);
/* *ret_items [*ret_count] is malloc'd and the caller's; NULL when empty. 0; -EINVAL; -ERANGE;
 * -ENOMEM. */
TV_CLIENT_API int tv_client_value_ints(const struct tv_client_answer *answer,
                                       const struct tv_client_value *value, int32_t **ret_items,
                                       int32_t *ret_count);

/* The probes, the model, the metrics (Prometheus text), the comparison with the oracle. */
TV_CLIENT_API int tv_client_health(struct tv_client *client, struct tv_client_answer *ret_answer,
                                   struct tv_client_problem *ret_problem);
TV_CLIENT_API int tv_client_ready(struct tv_client *client, int deep,
                                  struct tv_client_answer *ret_answer,
                                  struct tv_client_problem *ret_problem);
TV_CLIENT_API int tv_client_model(struct tv_client *client, struct tv_client_model *ret_model,
                                  struct tv_client_problem *ret_problem);
TV_CLIENT_API int tv_client_metrics(struct tv_client *client, struct tv_client_answer *ret_answer,
                                    struct tv_client_problem *ret_problem);
TV_CLIENT_API int tv_client_parity_totals(struct tv_client *client,
                                          struct tv_client_answer *ret_answer,
                                          struct tv_client_problem *ret_problem);
/* body NULL: the server's built-in case. */
TV_CLIENT_API int tv_client_parity_run(struct tv_client *client, const char *body,
                                       size_t body_bytes, struct tv_client_answer *ret_answer,
                                       struct tv_client_problem *ret_problem);
/* The session-less verify of one JSON body. */
TV_CLIENT_API int tv_client_oneshot(struct tv_client *client, const char *body, size_t body_bytes,
                                    struct tv_client_answer *ret_answer,
                                    struct tv_client_problem *ret_problem);

/* Rule greedy and no prompt yet. */
TV_CLIENT_API void tv_client_session_options_init(struct tv_client_session_options *ret_options);
/* Prefills the prompt and draws the first pending token. *ret_session is the caller's; it keeps
 * using client. */
TV_CLIENT_API int tv_client_session_create(struct tv_client *client,
                                           const struct tv_client_session_options *options,
                                           struct tv_client_session **ret_session,
                                           struct tv_client_problem *ret_problem);
/* Ends the session at the server; one that it does not know is fine. */
TV_CLIENT_API int tv_client_session_delete(struct tv_client_session *session,
                                           struct tv_client_problem *ret_problem);
/* The same, with all its retries within limit_ms (1 or more): for who ends, and does not wait for a
 * server that may be gone. The lease ends what this does not. */
TV_CLIENT_API int tv_client_session_delete_within(struct tv_client_session *session,
                                                  int32_t limit_ms,
                                                  struct tv_client_problem *ret_problem);
/* Frees the memory; the server's side stays until its lease ends. NULL is fine. */
TV_CLIENT_API void tv_client_session_destroy(struct tv_client_session *session);
/* The session's own; changed by its next call, tokens may move. */
TV_CLIENT_API const struct tv_client_state *
tv_client_session_state(const struct tv_client_session *session);

/* One verify round of the tree tokens [count], parents [count]: parents[0] is -1, parents[i] < i,
 * tokens[0] the pending token. count 1 is a round without drafts. */
TV_CLIENT_API int tv_client_verify(struct tv_client_session *session, const int32_t *tokens,
                                   const int32_t *parents, int32_t count,
                                   struct tv_client_round *ret_round,
                                   struct tv_client_problem *ret_problem);
/* The same with more asked for; options NULL: nothing. Logits come whole, as f32. */
TV_CLIENT_API int tv_client_verify_with(struct tv_client_session *session, const int32_t *tokens,
                                        const int32_t *parents, int32_t count,
                                        const struct tv_client_verify_options *options,
                                        struct tv_client_round *ret_round,
                                        struct tv_client_problem *ret_problem);
/* Settle the held round; -EINVAL: none is held, or settle is no path of its tree. What is committed
 * is the round's nodes and tokens. ret_round may be NULL. */
TV_CLIENT_API int tv_client_commit(struct tv_client_session *session,
                                   const struct tv_client_settle *settle,
                                   struct tv_client_round *ret_round,
                                   struct tv_client_problem *ret_problem);
/* The server decodes up to tokens_max (1 to TV_CLIENT_DECODE_TOKENS_MAX) tokens alone. */
TV_CLIENT_API int tv_client_decode(struct tv_client_session *session, int32_t tokens_max,
                                   struct tv_client_round *ret_round,
                                   struct tv_client_problem *ret_problem);
/* Append known tokens [count]; keep_pending puts the pending token before them, else it is dropped.
 * The round's one token is the new pending one. ret_round may be NULL. */
TV_CLIENT_API int tv_client_extend(struct tv_client_session *session, const int32_t *tokens,
                                   int32_t count, int keep_pending,
                                   struct tv_client_round *ret_round,
                                   struct tv_client_problem *ret_problem);
/* Back to the first len tokens (1 to committed_len). pending >= 0 becomes the pending token, else
 * it is the one that stood there. ret_round may be NULL. */
TV_CLIENT_API int tv_client_rollback(struct tv_client_session *session, int32_t len,
                                     int32_t pending, struct tv_client_round *ret_round,
                                     struct tv_client_problem *ret_problem);
TV_CLIENT_API void tv_client_round_finish(struct tv_client_round *round);
/* A session of its own behind the first len (1 to committed_len; 0: all) committed tokens: no pass
 * of the model, pages are shared. Its pending token is the one that stands there. seed (decimal):
 * what follows differs; NULL: the same. lease_s 0: this one's. *ret_session is the caller's. */
TV_CLIENT_API int tv_client_fork(struct tv_client_session *session, int32_t len, const char *seed,
                                 int32_t lease_s, struct tv_client_session **ret_session,
                                 struct tv_client_problem *ret_problem);

/* Rounds sent ahead, for links whose round trip is not small beside a round: send a tree, draft
 * behind guesses of where it will end and send those, then receive. A guess that is right runs at
 * the server without waiting for the network; a wrong one costs what a round without one does.
 *
 *     tv_client_send(session, tree)
 *     for (;;) {
 *         tv_client_send_if(session, guesses)       // or not
 *         tv_client_receive(session, &round)
 *         if (round.guess < 0) tv_client_send(session, the next tree)
 *     }
 *
 * The exchanges run on threads of the library; the session changes in tv_client_receive alone.
 * Arrays are copied. Until all is received, the other calls of the session are -EBUSY, but for
 * delete and destroy, which give up what is under way. Nothing may be held. */

/* As tv_client_verify, without waiting. -EBUSY: a round is under way. -EAGAIN: no thread. */
TV_CLIENT_API int tv_client_send(struct tv_client_session *session, const int32_t *tokens,
                                 const int32_t *parents, int32_t count,
                                 struct tv_client_problem *ret_problem);
/* The round behind the one under way, if that one ends as guesses [count] (1 to
 * TV_CLIENT_GUESSES_MAX, no two the same) say. -EBUSY: two rounds are under way; -EINVAL: none is,
 * or what verify refuses. */
TV_CLIENT_API int tv_client_send_if(struct tv_client_session *session,
                                    const struct tv_client_guess *guesses, int32_t count,
                                    struct tv_client_problem *ret_problem);
/* The end of the first round under way, with every recovery of a verify. With ret_round->guess >= 0
 * the round of that guess is under way now; else nothing is, also on a failure. -EINVAL: nothing
 * was sent. */
TV_CLIENT_API int tv_client_receive(struct tv_client_session *session,
                                    struct tv_client_round *ret_round,
                                    struct tv_client_problem *ret_problem);

/* Follow the session id, somebody else's perhaps: what its rounds do, as it happens. after: begin
 * behind this round (0: the beginning); -1: with the session's state. Makes no connection yet;
 * options are the client's, *ret_events the caller's and of one thread, client may go before it. */
TV_CLIENT_API int tv_client_events_open(const struct tv_client *client, const char *id,
                                        int32_t after, struct tv_client_events **ret_events,
                                        struct tv_client_problem *ret_problem);
/* The next event, within wait_ms: 0; -EAGAIN: none came; -ENODATA: "end" was the last one. A lost
 * connection is opened again where it was lost, as often as a call is retried. */
TV_CLIENT_API int tv_client_events_next(struct tv_client_events *events, int32_t wait_ms,
                                        struct tv_client_event *ret_event,
                                        struct tv_client_problem *ret_problem);
/* NULL is fine. */
TV_CLIENT_API void tv_client_events_close(struct tv_client_events *events);

#ifdef __cplusplus
}
#endif

#endif
