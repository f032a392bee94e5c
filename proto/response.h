/*
 * response.h - what the server answers, as structs, and the encoder to JSON with bounded output.
 *
 * Numbers are written in known forms, text is escaped, NaN is never printed (an error instead),
 * arrays of floats are base64. Encoders append to a buffer and own nothing they are given.
 */
#ifndef TV_PROTO_RESPONSE_H
#define TV_PROTO_RESPONSE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/request.h"
#include "proto/status.h"

/* A growing byte buffer with a cap; after a failure it stays failed and appends do nothing. */
struct tv_buf {
    char *data; /* owned */
    size_t bytes, capacity, bytes_max;
    int failed; /* 0, -ENOMEM, -EMSGSIZE, or -EDOM: a NaN was to be written */
};
void tv_buf_init(struct tv_buf *buf, size_t bytes_max);
void tv_buf_finish(struct tv_buf *buf);
void tv_buf_append(struct tv_buf *buf, const void *data, size_t bytes);
void tv_buf_printf(struct tv_buf *buf, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Effective sampling, with the seed that is really used. */
struct tv_sampling_state {
    enum tv_rule rule;
    double temperature, top_p, min_p;
    int32_t top_k;
    uint64_t seed;
    int has_typical; /* the next two are shown */
    double typical_epsilon, typical_delta;
};

enum tv_finish { TV_FINISH_NONE = 0, TV_FINISH_STOP, TV_FINISH_LENGTH };

struct tv_session_state {
    char session[32];
    char epoch[17];
    int32_t committed_len;
    uint8_t digest[16];
    int32_t pending;
    int32_t next_seq;
    enum tv_finish finish;
    int32_t held_seq; /* 0: no round is held */
    int64_t lease_expires_unix_ms;
    struct tv_sampling_state sampling;
    int has_tail;
    int32_t *tail; /* [tail_count], owned: committed tokens from tail_from on */
    int32_t tail_count, tail_from;
};
/* Frees the state and its tail. */
void tv_session_state_destroy(struct tv_session_state *state);

struct tv_limits_info {
    int32_t max_nodes, max_depth, max_pipeline, replay_window, max_sessions;
    int64_t body_bytes, inline_bytes, fetch_bytes;
};

struct tv_topk_block {
    int32_t k, row_count;
    const int32_t *rows; /* [row_count] node indices */
    const int32_t *ids;  /* [row_count, k] */
    const float *logits; /* [row_count, k] */
    const float *lse;    /* [row_count] */
};
struct tv_logits_block {
    int32_t row_count, vocab;
    const int32_t *rows;
    enum tv_tensor_dtype dtype;
    const float *data; /* [row_count, vocab]; NULL: via fetch, href is given */
    const char *href;
};
/* Rows of the residual stream at each of the taps, or one projected plane. */
struct tv_hidden_block {
    int32_t tap_count;
    const int32_t *taps; /* [tap_count] layers */
    int projected;       /* data has one plane, which is not the taps' own */
    int32_t row_count, dim;
    const int32_t *rows; /* [row_count] nodes; create: positions */
    enum tv_tensor_dtype dtype;
    const float *data; /* [tap_count or 1, row_count, dim]; NULL: via fetch, href is given */
    const char *href;
};
/* Largest differences over the layers of one round (numerics contract). */
struct tv_parity_kernel {
    int32_t layers;
    double max_abs, max_rel, rel_l2;
};
struct tv_shadow_block {
    int ran;
    struct tv_parity_kernel kernel;
    int tokens_equal;
    const char *skipped; /* why there is no result when it did not run; static text, or NULL */
};

/* How large trees are worth it here. */
struct tv_hint {
    int32_t max_useful_nodes;
    int32_t queue_depth; /* calls that wait */
    int32_t verify_us_count;
    const int64_t (*verify_us)[2]; /* as in struct tv_model_info */
};

/* What of the server is made up, for measurements; every answer of a round names it. */
enum { TV_SYNTHETIC_WEIGHTS = 1, TV_SYNTHETIC_ACCEPTANCE = 2 };

/* The answer of create, fork, verify, extend, decode, rollback and the one-shot verify: `kind` says
 * which members the encoder writes. Arrays are the caller's and outlive the call. */
struct tv_round {
    enum tv_call_kind kind;
    char session[32], epoch[17];
    int32_t seq;
    enum tv_finish finish; /* status is "finished" when set */
    int held;              /* verify: status is "held", and nothing is committed */
    int deviates;          /* commit: not what the held round proposed */
    int has_alternative;   /* verify: which of the request's alternatives ran */
    int32_t alternative;
    int32_t accepted_count;
    const int32_t *accepted_nodes, *accepted_tokens; /* [accepted_count]; verify, one-shot */
    int32_t pending;
    int32_t new_count;
    const int32_t *new_tokens; /* [new_count] */
    int32_t committed_len;
    uint8_t digest[16];
    int32_t next_seq;
    int32_t cached_len; /* create, fork */
    enum tv_rule rule;
    int has_margin; /* 0: null */
    float margin_min;
    int near_tie;
    const float *logprobs; /* [new_count] or NULL; -INFINITY is written as null */
    const struct tv_topk_block *topk;
    const struct tv_logits_block *logits;
    const struct tv_hidden_block *hidden; /* create too */
    const struct tv_shadow_block *shadow;
    struct tv_sampling_state sampling;
    struct tv_limits_info limits; /* create, fork */
    int32_t stat_nodes, stat_depth;
    double accept_len_mean;
    int64_t queue_us, gpu_us, total_us;
    int32_t batch;
    const struct tv_hint *hint; /* verify; NULL: none */
    unsigned synthetic;         /* TV_SYNTHETIC_ bits; 0: no member */
    int64_t lease_expires_unix_ms;
};

/* The answer of a conditional round whose guess did not hold: the session as the round before left
 * it, with that one's answer. */
struct tv_skipped {
    int32_t seq, pending, committed_len, next_seq;
    uint8_t digest[16];
    enum tv_finish finish;
    const char *outcome; /* JSON text, [outcome_bytes] */
    size_t outcome_bytes;
    int64_t lease_expires_unix_ms;
};

/* What a numbered round has done to its session, for who follows it. */
struct tv_event_round {
    enum tv_call_kind kind; /* verify, extend, decode, commit, rollback */
    int32_t seq;
    int32_t new_count;
    const int32_t *new_tokens; /* [new_count]: as in its answer */
    int32_t pending, committed_len;
    uint8_t digest[16];
    enum tv_finish finish;
};

struct tv_model_info {
    const char *name, *architecture, *backend, *device, *weights_dtype, *kv_dtype, *products,
        *version;
    const char *kernels_variant, *http_library;
    char epoch[17];
    uint8_t model_id[32];
    int has_tokenizer;
    uint8_t tokenizer_sha256[32];
    int32_t vocab, layers, heads, max_len, page_size;
    int64_t pages_total, pages_free; /* free: a round can have them */
    int64_t pages_cached;            /* of the free ones, those that hold prefixes for reuse */
    struct tv_limits_info limits;
    unsigned synthetic;         /* TV_SYNTHETIC_ bits; 0: null */
    int64_t device_allocations; /* since the start was done; below 0: null */
    double noise;
    int32_t verify_us_count;
    const int64_t (*verify_us)[2]; /* [verify_us_count] {nodes, microseconds}, measured */
    int32_t tap_count;
    const int32_t *taps; /* [tap_count] */
    int has_projection;
};

struct tv_ready_check {
    const char *name;
    int ok;
    char detail[160];
};

/* One comparison of POST /v1/parity. */
struct tv_parity_report {
    int ok;
    struct tv_parity_kernel kernel;
    int32_t path_rows, argmax_equal, near_ties;
    double logit_max_abs;
    int accepted_equal, pending_equal, kv_equal;
    double bound_kernel_rel_l2, bound_logit_abs;
    const char *oracle;
    int64_t took_ms;
};

struct tv_parity_violation {
    int32_t n;
    int64_t at_unix_ms;
    const char *kind; /* "kernel" or "path" */
    int reproducer;   /* it could be kept */
};
struct tv_parity_totals {
    const char *mode; /* "off", "sample", "all" */
    double p;
    int64_t exact, near_tie, violation, skipped;
    struct tv_parity_kernel worst;
    const struct tv_parity_violation *violations;
    int32_t violation_count;
};

/* What GET /v1/admin/status tells of a session, whosever it is, and of a tree. */
struct tv_status_session {
    char session[32], principal[33];
    const char *state; /* "idle", "busy", "held" */
    int32_t committed_len, next_seq;
    int64_t rounds, new_tokens; /* of its settled trees */
    int64_t idle_ms;            /* since its last call ended; 0 while one is under way */
    int64_t lease_expires_unix_ms;
    enum tv_finish finish;
};
struct tv_status_tree {
    char session[32];
    int32_t seq;
    int64_t at_unix_ms;
    enum tv_rule rule;
    int held;                        /* accepted is what the rule proposed */
    int32_t count, accepted_count;   /* rule client: none is accepted */
    const int32_t *tokens, *parents; /* [count] */
    const int32_t *accepted;         /* [accepted_count] nodes */
    int32_t pending;
    int64_t queue_us, gpu_us;
};
struct tv_status_info {
    const char *version, *model;
    char epoch[17];
    int64_t at_unix_ms;
    int32_t session_total; /* open ones; those that are listed were used last */
    const struct tv_status_session *sessions;
    int32_t session_count;
    const struct tv_status_tree *trees; /* the newest first */
    int32_t tree_count;
};

/* Each appends one complete JSON text; the buffer's `failed` tells the outcome. */
void tv_encode_round(struct tv_buf *buf, const struct tv_round *round, int replayed);
/* *ret_outcome_at: where the outcome's text stands in the buffer. */
void tv_encode_skipped(struct tv_buf *buf, const struct tv_skipped *skipped,
                       size_t *ret_outcome_at);
/* Turn a stored round answer into its replay in place ("replayed":false -> true at the end). */
int tv_encode_mark_replayed(struct tv_buf *buf);
void tv_encode_session_state(struct tv_buf *buf, const struct tv_session_state *state);
void tv_encode_session_list(struct tv_buf *buf, const struct tv_session_state *states,
                            int32_t count);
void tv_encode_running(struct tv_buf *buf, int32_t seq);
/* The answers of a batch's items, in order; body is a whole JSON text. */
struct tv_batch_answer {
    int32_t status;
    const char *body;
    size_t bytes;
};
void tv_encode_batch(struct tv_buf *buf, const struct tv_batch_answer *answers, int32_t count);
/* One log-probability per node, null for node 0. */
void tv_encode_scores(struct tv_buf *buf, const float *logprobs, int32_t count, unsigned synthetic);
void tv_encode_model(struct tv_buf *buf, const struct tv_model_info *info);
void tv_encode_health(struct tv_buf *buf);
void tv_encode_ready(struct tv_buf *buf, int ready, const struct tv_ready_check *checks,
                     int32_t count);
void tv_encode_parity_report(struct tv_buf *buf, const struct tv_parity_report *report);
void tv_encode_status(struct tv_buf *buf, const struct tv_status_info *info);
/* Of both /v1/admin/drain and undrain: how it is now, and what is left to end. */
void tv_encode_drain(struct tv_buf *buf, int draining, int32_t sessions, int32_t in_flight);
void tv_encode_parity_totals(struct tv_buf *buf, const struct tv_parity_totals *totals);
/* `instance` is the request id; report: parity-mismatch only (its members join), else NULL. */
void tv_encode_problem(struct tv_buf *buf, const struct tv_problem *problem, const char *instance,
                       const struct tv_parity_report *report);
/* response_event.c: each appends whole blocks of a text/event-stream. state and resumed come first,
 * whichever is right: a reader that begins, or that goes on behind an id. */
void tv_encode_event_state(struct tv_buf *buf, int32_t id, const struct tv_session_state *state);
void tv_encode_event_resumed(struct tv_buf *buf, int64_t lease_expires_unix_ms);
void tv_encode_event_round(struct tv_buf *buf, const struct tv_event_round *event);
void tv_encode_event_missed(struct tv_buf *buf, int32_t from, int32_t to);
void tv_encode_event_lease(struct tv_buf *buf, int64_t lease_expires_unix_ms);
void tv_encode_event_parity(struct tv_buf *buf, const struct tv_parity_violation *violation);
void tv_encode_event_draining(struct tv_buf *buf, int64_t deadline_unix_ms);
void tv_encode_event_end(struct tv_buf *buf, const char *reason);
void tv_encode_event_quiet(struct tv_buf *buf); /* a comment: the connection lives */
/* Of a request: the members of a tree that its draft is written in, each behind a comma; none
 * without one. */
void tv_encode_draft(struct tv_buf *buf, const struct tv_tree *tree);
/* Raw tensor bytes of rows in dtype (GET .../tensor). */
void tv_encode_tensor(struct tv_buf *buf, const float *data, int64_t count,
                      enum tv_tensor_dtype dtype);

#endif
