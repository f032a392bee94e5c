/*
 * internal.h - what the files of libtreeverify-client share; not installed.
 */
#ifndef TV_CLIENT_INTERNAL_H
#define TV_CLIENT_INTERNAL_H

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

struct tv_client_call {
    const char *method, *path;
    const char *body; /* [body_bytes], or NULL */
    size_t body_bytes;
    const char *key; /* Idempotency-Key, or NULL */
    enum tv_client_reading reading;
    int32_t wait_ms; /* that the server may take longer than an attempt's deadline */
};

/* One call with its retries. *ret_answer is set on 0, and on -EPROTO (then it is the refusal's, its
 * doc maybe NULL): the caller finishes it. */
int tv_client_exchange(struct tv_client *client, const struct tv_client_call *call,
                       struct tv_client_answer *ret_answer, struct tv_client_problem *ret_problem);
/* HTTP exchanges so far. */
int64_t tv_client_attempts(const struct tv_client *client);
int64_t tv_client_now_us(void);

/* --- answer.c --- */

/* Empty problem with a printf-style detail; committed -1, node -1. */
void tv_client_problem_set(struct tv_client_problem *problem, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
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
/* POST /v1/sessions from the session's own tokens and settings, which it then is. On a failure
 * nothing of it has changed. */
int tv_client_session_open(struct tv_client_session *session,
                           struct tv_client_problem *ret_problem);
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
    enum { TV_CLIENT_VERIFY, TV_CLIENT_DECODE, TV_CLIENT_EXTEND, TV_CLIENT_ROLLBACK } kind;
    const int32_t *tokens;  /* [count] of the tree, or to append */
    const int32_t *parents; /* [count] of the tree */
    int32_t count;
    int32_t tokens_max;   /* of a decode */
    int32_t keep_pending; /* of an extend */
    int32_t len, pending; /* of a rollback; pending -1: the one that stood there */
};

/* One exchange at the present state, with retries and without recovery. On -EPROTO *ret_refusal is
 * the refusal (finish it), else it is empty. */
int tv_client_round_once(struct tv_client_session *session, const struct tv_client_ask *ask,
                         struct tv_client_round *ret_round, struct tv_client_answer *ret_refusal,
                         struct tv_client_problem *ret_problem);
/* recover.c: the round with everything that may be needed on its way. */
int tv_client_round_run(struct tv_client_session *session, const struct tv_client_ask *ask,
                        struct tv_client_round *ret_round, struct tv_client_problem *ret_problem);

#endif
