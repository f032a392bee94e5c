/*
 * engine.h - private to verify/: the real engine's state, shared by its files.
 */
#ifndef TV_VERIFY_ENGINE_H
#define TV_VERIFY_ENGINE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "verify/verify.h"

struct tv_context {
    struct tv_cache_seq seq;
};

/* One tree's place in a launch. */
struct tv_engine_slot {
    int32_t round;     /* index in the caller's arrays */
    int32_t row_start; /* first row of the launch that is its own */
    int32_t rows;
};

/* A launch's layer hook, handed on to the rounds that asked for one. */
struct tv_engine_fan {
    const struct tv_round_in *in;
    const struct tv_engine_slot *slots;
    int32_t slot_count;
};

struct tv_verify_engine {
    struct tv_engine engine;
    int32_t page_size;
    struct tv_model_item *items;  /* [requests_max] */
    struct tv_engine_slot *slots; /* [requests_max] */
    int32_t *nodes;               /* [rows_max]: accepted nodes, from each slot's row_start */
    float *logprobs;              /* [rows_max] */
    float *scores;                /* [rows_max] */

    /* Device arrays of one draw launch over all rows; a host backend draws one row at a time. */
    int32_t draw_rows; /* rows_max, or 1 when device memory is host memory */
    int32_t *device_positions;
    struct tv_sampling *device_sampling;
    struct tv_draw *device_draws;
    void *draw_workspace;
    size_t draw_workspace_bytes;
    int32_t *host_positions; /* [draw_rows] */
    struct tv_sampling *host_sampling;
    struct tv_draw *host_draws;

    int32_t *device_topk_ids; /* [rows_max, TV_WANT_TOP_K_MAX], each round's part dense in its k */
    float *device_topk_values;
    float *device_topk_lse; /* [rows_max] */
    int32_t *host_topk_ids; /* the device arrays themselves when those are host memory */
    float *host_topk_values;
    float *host_topk_lse;
    float *host_logits; /* [rows_max, vocab]; NULL when device memory is host memory */

    /* Rules that look at whole rows: one filtered row, then what rules.h asks for. All [vocab]. */
    uint64_t *rule_keys;
    int32_t *rule_ids;
    double *rule_probs, *rule_target, *rule_left, *rule_draft;
    /* Work of these rules, which no backend counts; relaxed: somebody looks now and then whether it
     * moves. */
    _Atomic uint64_t rule_steps;

    /* Self-test: a context that keeps its rows reserved, so that a repeat needs no page. */
    struct tv_context *test_context;
    struct tv_tree test_tree;
    int32_t test_text_len, test_slice_count;
    int32_t *test_text;   /* [test_text_len] */
    int32_t *test_slices; /* [test_slice_count]: last row of each slice */
    float *test_logits;   /* [slices + nodes, vocab], the start's */
    float *test_repeat;   /* the same shape, of a repeat */
    uint8_t test_sum[32];
    int test_judged; /* an oracle has seen the start's logits, those of exact products */
};

/* engine.c: -EINVAL: a token is outside the vocabulary. */
int tv_engine_tokens_check(const struct tv_engine *engine, const int32_t *tokens, int32_t count);
/* prefill.c: of struct tv_engine_ops. */
int tv_engine_prefill(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                      int32_t count, const struct tv_round_rule *rule, struct tv_drawn *ret_drawn,
                      struct tv_cache_shortage *ret_shortage);
int tv_engine_prefill_hidden(struct tv_engine *engine, struct tv_context *context,
                             const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                             struct tv_drawn *ret_drawn, struct tv_cache_shortage *ret_shortage,
                             struct tv_slice_hidden *hidden);
/* prefill.c: a rider before its launch and after it. admit: 1 when its rows are reserved, else
 * rider->rc says why not. settle: the launch said rc; `first` is its first row of the launch, and
 * logits its row of logits, when it draws. */
int tv_engine_rider_admit(struct tv_verify_engine *self, struct tv_rider *rider, int32_t rows);
void tv_engine_rider_settle(struct tv_verify_engine *self, struct tv_rider *rider, int rc,
                            int32_t first, const float *logits);
/* rows.c - what becomes of a launch's logits. `logits` is the device pointer of row 0. */

/* Draw the rows of one slot. On a host backend nothing happens yet: rows are drawn as walked. */
int tv_engine_draw_slots(struct tv_verify_engine *self, const struct tv_round_in *in,
                         int32_t slot_count, const float *logits);
/* The draw of one row; sampling and position as given to tv_engine_draw_slots. */
int tv_engine_draw_row(struct tv_verify_engine *self, const float *logits, int32_t row,
                       int32_t position, const struct tv_sampling *sampling,
                       struct tv_draw *ret_draw);
/* Walk, then top-k and logits, of one slot into *out. */
int tv_engine_answer(struct tv_verify_engine *self, const struct tv_engine_slot *slot,
                     const struct tv_round_in *in, const float *logits, struct tv_round_out *out);

/* Values of a row as it is handed out; 0: none of the kind is. */
int64_t tv_engine_hidden_width(const struct tv_verify_engine *self, int project);
/* The hidden rows that a slice shall hand out whose last row is before row `end` of its pass.
 * -EDOM: one is not finite. */
int tv_engine_slice_hidden(struct tv_verify_engine *self, int32_t end,
                           struct tv_slice_hidden *hidden);
int tv_engine_all_finite(const float *values, int64_t count);
/* The view of one request (rows row_start .. + rows) of a packed launch. */
struct tv_verify_attn tv_engine_attn_slice(const struct tv_verify_attn *attn, int32_t request,
                                           int32_t row_start, int32_t rows);

/* rounding.c: rows of logits [rows, vocab] of exact products, and of those that are served. 0;
 * -EIO with a detail when they are not the same model's. bounded 0: numbers are all that is asked.
 */
int tv_engine_rounding_measure(const float *exact, const float *served, int32_t rows, int32_t vocab,
                               int bounded, struct tv_rounding *ret_cost, char *detail,
                               size_t detail_bytes);
/* self_test.c */
int tv_engine_self_test_start(struct tv_verify_engine *self, const struct tv_judge *judge,
                              char *detail, size_t detail_bytes);
int tv_engine_self_test_repeat(struct tv_verify_engine *self, char *detail, size_t detail_bytes);
void tv_engine_self_test_finish(struct tv_verify_engine *self);

/* layer_check.c: attention of one launch against the naive kernel; the first miss stays. */
struct tv_engine_layer_check {
    struct tv_kernels *kernels;
    int32_t rows, kv_len;
    const struct tv_judge *judge; /* sees every layer too */
    int rc;
    char *detail;
    size_t detail_bytes;
};
void tv_engine_layer_check(void *context, int32_t layer, const struct tv_verify_attn *attn);

#endif
