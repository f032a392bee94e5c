/*
 * internal.h - what the files of libtreeverify-client share; not installed.
 */
#ifndef TV_CLIENT_INTERNAL_H
#define TV_CLIENT_INTERNAL_H

#include <pthread.h>

#include "clients/c/treeverify-client.h"
#include "proto/json_read.h"
#include "proto/limits.h"
#include "proto/response.h"

/* --- http.c --- */

enum tv_client_reading {
    TV_CLIENT_STRICT = 0, /* a status of 400 and more is a refusal, whatever its body */
    TV_CLIENT_PLAIN,      /* but for JSON that is no problem document */
    TV_CLIENT_TEXT,       /* the body is text and is not parsed */
};

/* A call on another thread, as its owner sees it; all members are under *lock. */
struct tv_client_watch {
    pthread_mutex_t *lock;
    pthread_cond_t *changed;
    int sent;    /* the request has been written whole, or never will be */
    int give_up; /* the owner wants no answer any more */
};

struct tv_client_call {
    const char *method, *path;
    const char *body; /* [body_bytes], or NULL */
    size_t body_bytes;
    const char *key; /* Idempotency-Key, or NULL */
    enum tv_client_reading reading;
    int32_t wait_ms;               /* that the server may take longer than an attempt's deadline */
    int hasty;                     /* a server that restarts is not waited for */
    int32_t limit_ms;              /* of the call, in place of the client's total_ms; 0: none */
    struct tv_client_watch *watch; /* or NULL */
};

/* One call with its retries. *ret_answer is set on 0, and on -EPROTO (then it is the refusal's, its
 * doc maybe NULL): the caller finishes it. */
int tv_client_exchange(struct tv_client *client, const struct tv_client_call *call,
                       struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem);
/* HTTP exchanges so far, and some more of a twin. */
int64_t tv_client_attempts(const struct tv_client *client);
void tv_client_attempts_add(struct tv_client *client, int64_t count);
/* A client of the same options with a connection of its own. 0; -ENOMEM. */
int tv_client_twin(const struct tv_client *client, struct tv_client **ret_twin);
const struct tv_client_options *tv_client_options_of(const struct tv_client *client);
/* The client's curl handle set up for a GET of path whose body goes to on_data; for who drives it
 * himself (events.c). header "": none. *ret_headers are the caller's (curl_slist_free_all), and
 * must outlive the transfer. 0; -ENOMEM. */
struct curl_slist;
int tv_client_stream_begin(struct tv_client *client, const char *path, const char *header,
                           size_t (*on_body)(char *, size_t, size_t, void *), void *user,
                           struct curl_slist **ret_headers);
void *tv_client_curl(struct tv_client *client);
/* What the end of a transfer means; body: what came. 0 or a negative errno, with its words. */
int tv_client_transfer_end(struct tv_client *client, int curl_code, struct tv_buf *body,
                           struct tv_client_problem *ret_problem);
int64_t tv_client_now_us(void);

/* --- retry.c --- */

/* What a client knows of its server, and the generator of its pauses. */
struct tv_client_server {
    uint64_t jitter; /* never 0 */
    int answered;    /* it was there, whatever it said */
    int refused;     /* no connection could be made the last time, or a proxy could make none */
};

/* Of one call so far; all zeros at its beginning. */
struct tv_client_failures {
    int hasty;               /* the call's */
    int counted;             /* against retries_max */
    int refused;             /* while the server restarts */
    int64_t refused_from_ms; /* the first of those */
};

struct tv_client_server *tv_client_server_of(struct tv_client *client);
/* Counts this failure. Milliseconds to wait before the next attempt, or -1: there is none. */
int64_t tv_client_next_pause(struct tv_client *client, int error,
                             struct tv_client_failures *failures, int64_t deadline_ms,
                             const struct tv_client_problem *problem);

/* --- answer.c --- */

/* Empty problem with a printf-style detail; committed -1, node -1. */
void tv_client_problem_set(struct tv_client_problem *problem, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The end of a public call: a success leaves nothing of what was met on the way. Returns error. */
int tv_client_end(int error, struct tv_client_problem *ret_problem);
/* Map a problem document; members that are absent or of another type keep their defaults. */
void tv_client_problem_read(const struct tv_json *doc, int32_t http_status,
                            struct tv_client_problem *ret_problem);
/* Says what does not follow the contract; -EBADMSG. */
int tv_client_not_the_contract(const char *what, struct tv_client_problem *ret_problem);

const struct tv_json *tv_client_json(const struct tv_client_answer *answer);
/* A 2xx answer with an object in it. */
int tv_client_is_object(const struct tv_client_answer *answer);

/* Members of an answer. 0, or -EBADMSG when absent, of another type, or too large. A string longer
 * than its field is cut only by _text_cut. */
int tv_client_get_int32(const struct tv_json *doc, const struct tv_json_value *object,
                        const char *name, int32_t *ret);
int tv_client_get_text(const struct tv_json_value *object, const char *name, char *ret,
                       size_t ret_bytes);
void tv_client_get_text_cut(const struct tv_json_value *object, const char *name, char *ret,
                            size_t ret_bytes);
/* An array of int32 that must be there. 0, -EBADMSG, -ENOMEM; *ret_items is the caller's. */
int tv_client_get_ints(const struct tv_json *doc, const struct tv_json_value *object,
                       const char *name, int32_t **ret_items, int32_t *ret_count);

/* --- digest.c: the chain over committed tokens (proto/README.md, "Digest") --- */

struct tv_client_digest {
    uint8_t bytes[16];
};

/* 0; -EBADMSG: model_id is not 64 hex digits. */
int tv_client_digest_start(const char *model_id, const char *salt,
                           struct tv_client_digest *ret_digest);
void tv_client_digest_push(struct tv_client_digest *digest, const int32_t *tokens, int32_t count);
void tv_client_digest_text(const struct tv_client_digest *digest, char ret_text[33]);

/* --- session.c, round.c --- */

struct tv_client_session {
    struct tv_client *client;      /* not owned */
    struct tv_client_state state;  /* state.tokens is the array below */
    struct tv_client_model model;  /* as it was when the session was made */
    struct tv_client_digest chain; /* over state.tokens */
    int32_t *tokens;               /* [capacity], owned */
    int32_t capacity;
    /* what a create sends, to make the session anew; the seed is in state */
    char rule[16];
    double temperature, top_p, min_p;
    int32_t top_k, max_len, lease_s;
    int32_t stop_ids[TV_CLIENT_STOP_IDS_MAX];
    int32_t stop_count;
    char salt[TV_CLIENT_SALT_BYTES_MAX + 1];
    /* the tree of the held round state.held_seq */
    int32_t held_tokens[TV_CLIENT_NODES_MAX], held_parents[TV_CLIENT_NODES_MAX];
    int32_t held_count;
    int32_t unsure;      /* number of a verify to be held whose answer has not come, or 0 */
    int32_t server_held; /* the held round of the server's state adopted last, or 0 */
    struct tv_client_ahead *ahead; /* rounds under way; owned; NULL: never any */
};

/* How a held round ends, and the tokens of its path: kept apart from the session, which may have to
 * be made anew. */
struct tv_client_settling {
    int32_t seq; /* of the held round; 0: nothing is settled */
    int32_t path_count;
    int32_t next; /* -1: the round is discarded */
    int32_t path[TV_CLIENT_NODES_MAX], tokens[TV_CLIENT_NODES_MAX];
};

/* What every answer says of the session. */
struct tv_client_progress {
    int32_t next_seq, committed_len, pending;
    char digest[33], finish[8];
};

#define TV_CLIENT_PATH_BYTES 128

/* "/v1/sessions/ID" and what follows; always fits (ids are bounded and checked when they come). */
void tv_client_session_path(const struct tv_client_session *session, const char *rest,
                            char ret_path[TV_CLIENT_PATH_BYTES]);
int tv_client_read_progress(const struct tv_json *doc, const struct tv_json_value *object,
                            struct tv_client_progress *ret_progress);
/* Room for count tokens in all. 0, -ENOMEM. */
int tv_client_session_reserve(struct tv_client_session *session, int32_t count);
void tv_client_session_follow(struct tv_client_session *session,
                              const struct tv_client_progress *progress);
/* POST /v1/sessions from the session's own tokens and settings, which it then is; prefix: the id of
 * a session that begins with them, or NULL. On a failure nothing of it has changed. */
int tv_client_session_open(struct tv_client_session *session, const char *prefix,
                           struct tv_client_problem *ret_problem);
/* Become what a create or fork answered. 0; -EBADMSG, and nothing has changed. */
int tv_client_session_opened(struct tv_client_session *session,
                             const struct tv_client_answer *answer);
/* Tokens of the held round's path and next, as the session's own; -ENOMEM: nothing has changed. */
int tv_client_session_settle(struct tv_client_session *session,
                             const struct tv_client_settling *settling);
/* The state's digest, as the chain has it after tokens were put in or taken. */
void tv_client_session_digest(struct tv_client_session *session);
/* A key for Idempotency-Key. 0; -EIO: no random bytes. */
int tv_client_random_key(char ret_key[33]);
/* Was the refusal that the session is no more? */
int tv_client_is_forgotten(const char *code);
/* A copy with an array of its own. 0, -ENOMEM. */
int tv_client_session_copy(const struct tv_client_session *session,
                           struct tv_client_session *ret_copy);
/* Take the state that the server says, if its tail and digest fit what is here. 1: done; 0: it does
 * not fit; -EBADMSG, -ENOMEM. */
int tv_client_session_adopt(struct tv_client_session *session, const struct tv_json *doc,
                            const struct tv_json_value *object);

void tv_client_put_ints(struct tv_buf *buf, const char *name, const int32_t *items, int32_t count);
int tv_client_buf_error(const struct tv_buf *buf, struct tv_client_problem *ret_problem);

/* One round as the caller wants it. */
struct tv_client_ask {
    enum {
        TV_CLIENT_VERIFY,
        TV_CLIENT_DECODE,
        TV_CLIENT_EXTEND,
        TV_CLIENT_ROLLBACK,
        TV_CLIENT_COMMIT
    } kind;
    const int32_t *tokens;  /* [count] of the tree, or to append */
    const int32_t *parents; /* [count] of the tree */
    int32_t count;
    int32_t tokens_max;   /* of a decode */
    int32_t keep_pending; /* of an extend */
    int32_t len, pending; /* of a rollback; pending -1: the one that stood there */
    /* of a verify */
    const char *rule; /* NULL: the session's */
    int32_t holds;
    enum tv_client_rows logits;
    int32_t deadline_ms, lease_s; /* 0: not said */
    /* of a commit, or a verify's commit_prev; forgotten when it has been done */
    struct tv_client_settling settling;
};

/* {"tokens":[...],"parents":[...]} */
void tv_client_put_tree(struct tv_buf *body, const int32_t *tokens, const int32_t *parents,
                        int32_t count);
/* Hold what a round answered against the session, then move on. 0; -EBADMSG; -ENOMEM: the session
 * is as it was, and *ret_round untouched. */
int tv_client_round_take(struct tv_client_session *session, const struct tv_json *doc,
                         const struct tv_json_value *object, const struct tv_client_ask *ask,
                         struct tv_client_round *ret_round, struct tv_client_problem *ret_problem);
/* One exchange at the present state, with retries and without recovery. On -EPROTO *ret_refusal is
 * the refusal (finish it), else it is empty. */
int tv_client_round_once(struct tv_client_session *session, const struct tv_client_ask *ask,
                         struct tv_client_round *ret_round, struct tv_client_answer *ret_refusal,
                         struct tv_client_problem *ret_problem);
/* recover.c: the round with everything that may be needed on its way. */
int tv_client_round_run(struct tv_client_session *session, struct tv_client_ask *ask,
                        struct tv_client_round *ret_round, struct tv_client_problem *ret_problem);
/* Bring the client to where the server is, or the server to where the client is: 0 and which of the
 * two (enum tv_client_recovered). A refusal that neither helps is given back as it came. */
int tv_client_recover(struct tv_client_session *session, const struct tv_client_ask *ask,
                      const struct tv_client_answer *refusal, int32_t *ret_recovered,
                      struct tv_client_problem *problem);

/* --- rows.c --- */

/* The answer's rows of logits into *round; none asked for is fine. 0; -EBADMSG; -ENOMEM. */
int tv_client_read_logits(const struct tv_json *doc, const struct tv_json_value *object,
                          const struct tv_client_ask *ask, struct tv_client_round *round);

/* --- verify.c, ahead.c --- */

/* A tree whose node 0 is pending. 0; -EINVAL with its words. */
int tv_client_check_tree(const int32_t *tokens, const int32_t *parents, int32_t count,
                         int32_t pending, struct tv_client_problem *ret_problem);
/* Nothing is under way; else -EBUSY with its words. */
int tv_client_check_idle(const struct tv_client_session *session,
                         struct tv_client_problem *ret_problem);
/* Give up what is under way, and free it. */
void tv_client_ahead_end(struct tv_client_session *session);

#endif
