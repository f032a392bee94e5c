/*
 * status.h - the closed list of error codes, and the problem a refused call answers with.
 *
 * Owns what can be said about a failure (RFC 9457 members and ours); the encoder is response.h.
 */
#ifndef TV_PROTO_STATUS_H
#define TV_PROTO_STATUS_H

#include <stdint.h>

enum tv_code {
    TV_OK = 0,
    TV_BAD_REQUEST,
    TV_BAD_JSON,
    TV_UNKNOWN_FIELD,
    TV_MISSING_FIELD,
    TV_WRONG_TYPE,
    TV_UNAUTHENTICATED,
    TV_FORBIDDEN,
    TV_SESSION_NOT_FOUND,
    TV_NOT_FOUND,
    TV_ROUND_NOT_FOUND,
    TV_METHOD_NOT_ALLOWED,
    TV_TIMEOUT,
    TV_LENGTH_MISMATCH,
    TV_DIGEST_MISMATCH,
    TV_PENDING_MISMATCH,
    TV_SEQ_GAP,
    TV_EPOCH_CHANGED,
    TV_SESSION_BUSY,
    TV_SESSION_FINISHED,
    TV_ROUND_HELD,
    TV_PARITY_MISMATCH,
    TV_SESSION_EXPIRED,
    TV_ROUND_EVICTED,
    TV_BODY_TOO_LARGE,
    TV_MEDIA_TYPE,
    TV_WRONG_VALUE,
    TV_TREE_INVALID,
    TV_TREE_TOO_LARGE,
    TV_CONTEXT_FULL,
    TV_SEQ_REUSED,
    TV_RATE_LIMITED,
    TV_WORK_BUDGET,
    TV_KERNEL_FAULT,
    TV_INTERNAL,
    TV_NUMERIC_FAULT,
    TV_LOADING,
    TV_DRAINING,
    TV_OVERLOADED,
    TV_KV_FULL,
    TV_PARITY_QUARANTINE,
    TV_DEADLINE,
    TV_CODE_COUNT,
};

/* Fixed facts of a code: its JSON name ("tree-invalid"), HTTP status, title, and whether the same
 * request may succeed later unchanged. */
struct tv_code_info {
    const char *name;
    const char *title;
    int http_status;
    int retryable;
};
const struct tv_code_info *tv_code_info(enum tv_code code);

struct tv_session_state;

/* One refusal. detail quotes and bounds foreign text. Plain value, except `state`: owned by the
 * problem when not NULL (tv_problem_finish frees it). */
struct tv_problem {
    enum tv_code code;
    char detail[240];
    char pointer[96];                 /* JSON Pointer into the request body, or "" */
    int32_t node;                     /* offending tree node, or -1 */
    int committed;                    /* did this call change state; 0 for every refusal so far */
    int32_t retry_after_s;            /* > 0: also the Retry-After header */
    int64_t pages_needed, pages_free; /* kv-full only; -1 elsewhere */
    const char *rate_name;            /* rate-limited: what is limited, for the RateLimit fields */
    int64_t rate_quota, rate_left;    /* of it */
    const char *allow;                /* method-not-allowed: the Allow header; static text */
    struct tv_session_state *state;   /* owned; NULL when it does not apply */
};

/* Fill *problem with code and a printf-style detail; pointer may be NULL. */
void tv_problem_set(struct tv_problem *problem, enum tv_code code, const char *pointer,
                    const char *format, ...) __attribute__((format(printf, 4, 5)));
/* The same, naming tree node `node` (pointer "/tree/<array>/<node>"). */
void tv_problem_set_node(struct tv_problem *problem, enum tv_code code, const char *array,
                         int32_t node, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
void tv_problem_finish(struct tv_problem *problem);

#endif
