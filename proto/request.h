/*
 * request.h - decoded requests, and the decoder that makes them from JSON text.
 *
 * The decoder checks everything that needs no session state: JSON, schema, ranges, the tree. It
 * rejects, never repairs, and a refusal leaves nothing behind. Fields of the contract that this
 * version does not serve are unknown fields (proto/CHANGES.md lists them).
 */
#ifndef TV_PROTO_REQUEST_H
#define TV_PROTO_REQUEST_H

#include <stddef.h>
#include <stdint.h>

#include "proto/limits.h"
#include "proto/status.h"
#include "proto/tree.h"

enum tv_call_kind {
    TV_CALL_CREATE,           /* POST   /v1/sessions */
    TV_CALL_LIST,             /* GET    /v1/sessions */
    TV_CALL_STATE,            /* GET    /v1/sessions/{id}?tail=N */
    TV_CALL_DELETE,           /* DELETE /v1/sessions/{id} */
    TV_CALL_VERIFY,           /* POST   /v1/sessions/{id}/verify */
    TV_CALL_EXTEND,           /* POST   /v1/sessions/{id}/extend */
    TV_CALL_DECODE,           /* POST   /v1/sessions/{id}/decode */
    TV_CALL_COMMIT,           /* POST   /v1/sessions/{id}/commit */
    TV_CALL_ROLLBACK,         /* POST   /v1/sessions/{id}/rollback */
    TV_CALL_FORK,             /* POST   /v1/sessions/{id}/fork */
    TV_CALL_RENEW,            /* POST   /v1/sessions/{id}/renew */
    TV_CALL_ROUND,            /* GET    /v1/sessions/{id}/rounds/{seq}?wait_ms= */
    TV_CALL_TENSOR,           /* GET    /v1/sessions/{id}/rounds/{seq}/tensor */
    TV_CALL_EVENTS,           /* GET    /v1/sessions/{id}/events */
    TV_CALL_ONESHOT,          /* POST   /v1/verify */
    TV_CALL_SCORE,            /* POST   /v1/score */
    TV_CALL_BATCH,            /* POST   /v1/verify:batch */
    TV_CALL_PARITY,           /* POST   /v1/parity?strict=1 */
    TV_CALL_PARITY_TOTALS,    /* GET /v1/parity */
    TV_CALL_PARITY_VIOLATION, /* GET /v1/parity/violations/{n} */
    TV_CALL_MODEL,            /* GET    /v1/model */
    TV_CALL_METRICS,          /* GET    /metrics */
    TV_CALL_HEALTH,           /* GET    /healthz and aliases */
    TV_CALL_READY,            /* GET    /readyz?deep=1 and alias */
    TV_CALL_STATUS,           /* GET    /v1/admin/status */
    TV_CALL_DRAIN,            /* POST   /v1/admin/drain */
    TV_CALL_UNDRAIN,          /* POST   /v1/admin/undrain */
    TV_CALL_PAGE,             /* GET    / of the admin listener */
};

enum tv_rule {
    TV_RULE_TARGET_WALK = 0,
    TV_RULE_GREEDY,
    TV_RULE_RATIO_WOR,
    TV_RULE_TYPICAL,
    TV_RULE_CLIENT, /* nothing is drawn: the client settles the round */
    TV_RULE_COUNT,
};
const char *tv_rule_name(enum tv_rule rule);
/* 1: what it draws has the target's distribution. */
int tv_rule_lossless(enum tv_rule rule);

/* Sampling of a session or one call, as asked; has_seed 0 means the server picks one. */
struct tv_sampling_request {
    enum tv_rule rule;
    double temperature, top_p, min_p;
    int32_t top_k;
    int has_seed;
    uint64_t seed;
    int has_typical; /* it was named, be it with the defaults */
    double typical_epsilon, typical_delta;
};

enum tv_rows_kind { TV_ROWS_PATH = 0, TV_ROWS_STOP, TV_ROWS_ALL, TV_ROWS_LIST };
struct tv_rows {
    enum tv_rows_kind kind;
    int32_t count;
    int32_t *nodes; /* [count], owned, for TV_ROWS_LIST; each below the tree's node count */
};

enum tv_tensor_dtype {
    TV_TENSOR_F32 = 0,
    TV_TENSOR_BF16,
    TV_TENSOR_F16,
    TV_TENSOR_FP8_E4M3, /* hidden rows alone */
};
const char *tv_tensor_dtype_name(enum tv_tensor_dtype dtype);
size_t tv_tensor_dtype_bytes(enum tv_tensor_dtype dtype);

/* Rows of the residual stream at some of the server's taps. */
struct tv_want_hidden {
    int wanted;
    int32_t tap_count;
    int32_t taps[TV_TAPS_MAX]; /* [tap_count]: places in the server's list of taps */
    int project;               /* the registered projection of all taps instead */
    struct tv_rows rows;       /* of a tree */
    int32_t window;            /* create: the last so many positions of the prompt; 0: all */
    enum tv_tensor_dtype dtype;
    int fetch; /* 0 inline, 1 via GET tensor */
};

struct tv_want {
    int32_t top_k; /* 0 = off */
    struct tv_rows rows;
    int logprobs;
    int logits; /* whole rows wanted */
    struct tv_rows logits_rows;
    enum tv_tensor_dtype logits_dtype;
    int logits_fetch; /* 0 inline, 1 via GET tensor */
    struct tv_want_hidden hidden;
    int shadow;
    uint64_t inline_bytes_most; /* what the inline blocks may take, at most */
    uint64_t fetch_bytes_most;  /* the same of the rows that are kept to be fetched, as f32 */
};

/* Where the round before may end: at this node, with this token pending. */
struct tv_guess {
    int32_t leaf, pending;
};
/* One of several such guesses, with the tree that it asks for. */
struct tv_alternative {
    struct tv_guess guess;
    struct tv_tree tree; /* owned */
};

struct tv_request_item; /* of a batch, below */

/* One decoded call. Which members count depends on kind; the rest is zero. */
struct tv_request {
    enum tv_call_kind kind;
    char session[32]; /* "s_" + 22 characters, or "" */

    int32_t seq;
    char epoch[17];  /* "" when absent */
    int len_implied; /* alternatives without expected_len: whichever runs says it */
    int32_t expected_len;
    int has_expected_digest;
    uint8_t expected_digest[16];

    char prefix_session[32]; /* create: the prompt is the first prefix_len tokens of this session */
    int32_t prefix_len;      /* 0: the prompt is in tokens */

    int32_t *tokens; /* [token_count], owned: prompt, extend tokens, one-shot prefix */
    int32_t token_count;
    int keep_pending;
    int32_t max_tokens; /* decode */
    int32_t len;        /* rollback, fork: the length to go to; 0 = absent */
    int has_pending;    /* rollback: the token to be pending there */
    int32_t pending;

    int has_sampling;
    struct tv_sampling_request sampling;
    int has_rule; /* verify: this round's rule */
    enum tv_rule rule;

    int32_t stop_ids[TV_STOP_IDS_MAX];
    int32_t stop_count;
    int32_t max_len; /* stop.max_len; 0 = the model's limit */
    char cache_salt[TV_SALT_BYTES_MAX + 1];
    int32_t cache_salt_bytes;

    int has_tree;
    struct tv_tree tree;
    int has_if; /* verify: runs only when round seq - 1 ends as guessed */
    int32_t if_seq;
    struct tv_guess guess;               /* of `tree`; unused with alternatives */
    struct tv_alternative *alternatives; /* [alternative_count], owned; instead of `tree` */
    int32_t alternative_count;
    int hold;     /* verify: commit "hold" */
    int commits;  /* verify: commit "auto", in so many words; a body without it is the same */
    int has_prev; /* verify: commit_prev, which settles the held round prev_seq */
    int32_t prev_seq;
    int32_t *path; /* [path_count], owned: commit, commit_prev; empty: nothing of it stays */
    int32_t path_count;
    int has_next; /* with a path: the token that is pending behind it */
    int32_t next;
    struct tv_request_item *items; /* [item_count], owned; batch */
    int32_t item_count;
    struct tv_want want;
    int32_t deadline_ms, lease_s; /* lease_s 0 = absent */
    int32_t ack;                  /* 0 = absent */

    int32_t tail;       /* state: ?tail=N */
    int32_t wait_ms;    /* round */
    int has_last_event; /* events: Last-Event-ID, from the header */
    int32_t last_event;
    int strict, deep;  /* parity, ready */
    int32_t violation; /* parity violation number */
    enum tv_tensor_dtype tensor_dtype;
    int has_tensor_dtype, has_tensor_rows;
    int tensor_hidden; /* what=hidden; else logits */
    struct tv_rows tensor_rows;

    uint8_t body_hash[32]; /* SHA-256 over the decoded request without deadline_ms, lease_s, ack */
    /* The same of a body without `rule`: what counts when it names the session's own. */
    uint8_t ruleless_hash[32];
};

/* One verify of a batch: decoded, or refused with a problem of its own. */
struct tv_request_item {
    int refused;
    struct tv_problem problem; /* when refused */
    struct tv_request request; /* of kind verify, with its session; empty when refused */
};

/* What the decoder must know of the server. */
struct tv_request_limits {
    struct tv_tree_limits tree;
    int32_t max_len; /* the model's context limit */
    size_t inline_bytes;
    size_t fetch_bytes;        /* of one call's rows that are kept to be fetched; 0: any */
    int32_t hidden_dim;        /* values of a hidden row */
    int32_t tap_count;         /* 0: none is handed out */
    int32_t taps[TV_TAPS_MAX]; /* [tap_count] layers, in the order of the setting */
    int32_t project_dim;       /* values of a projected row; 0: no projection is registered */
    int no_logprobs; /* want.logprobs is refused: what is accepted is not the target's choice */
};

/* Decode the JSON body of `kind` into *ret_request (zeroed first). 0; -EINVAL with *problem set;
 * -ENOMEM. On success the caller owns it (tv_request_finish). */
int tv_request_decode(enum tv_call_kind kind, const char *body, size_t body_bytes,
                      const struct tv_request_limits *limits, struct tv_request *ret_request,
                      struct tv_problem *problem);
/* One query parameter of a GET (already percent-decoded); unknown names are bad-request. */
int tv_request_query(struct tv_request *request, const char *name, const char *value,
                     const struct tv_request_limits *limits, struct tv_problem *problem);
/* Do the tree's draft and `commit` fit the round's rule? The decoder has asked where the rule is in
 * the body; the session's own is asked by its owner. 0, or -EINVAL with *problem. */
int tv_request_check_rule(const struct tv_request *request, enum tv_rule rule,
                          struct tv_problem *problem);
/* SHA-256 over the canonical form of a decoded request, into both hashes; for the decoder. */
void tv_request_hash(struct tv_request *request);
/* The tree of a verify; alternative < 0: the only one. */
const struct tv_tree *tv_request_tree(const struct tv_request *request, int32_t alternative);
void tv_request_finish(struct tv_request *request);

#endif
