/*
 * attn.h - a verify-attention problem as a logical value, and ways to lay it out.
 *
 * The same problem can be run with any page size, page order, row layout and split count; outputs
 * come back in one padded order, so layouts can be compared bit by bit.
 */
#ifndef TV_TESTS_ATTN_H
#define TV_TESTS_ATTN_H

#include "tests/check/check.h"

enum attn_tree { ATTN_RANDOM, ATTN_CHAIN, ATTN_STAR };

struct attn_problem {
    int32_t batch, q_len, heads, latent, rope;
    enum tv_dtype dtype, out_dtype;
    float scale;
    int32_t *prefix;  /* [batch] */
    int32_t *nodes;   /* [batch] */
    int32_t *parents; /* [batch, q_len], padding -1 */
    float *q;         /* [batch, q_len, heads, dim], representable in dtype */
    float **kv;       /* [batch] of [prefix + nodes, dim], representable in dtype */
};

struct attn_layout {
    int32_t page_size;
    int32_t shuffled; /* pages in random order with holes, unused rows NaN */
    int32_t packed;
    int32_t splits;
    int32_t naive;
    int32_t round_p;
    int32_t sum_f32; /* naive: f32 sums */
    int32_t blocks;  /* blocks_max */
    int32_t repeats; /* more runs on the same memory, poisoned again: every bit must be the same */
};

struct attn_result {
    float *out; /* [batch, q_len, heads, latent] */
    float *lse; /* [batch, q_len, heads] */
};

/* Random contents; host memory of the running case. prefix and nodes hold `batch` entries. */
struct attn_problem attn_make(struct check *c, int32_t batch, const int32_t *prefix,
                              const int32_t *nodes, int32_t heads, enum attn_tree tree,
                              enum tv_dtype dtype);
/* Run on `k`, which is c->k or c->ref. The workspace and the outputs are poisoned before. Returns
 * the operation's code after reporting it, unless it is -ENOTSUP. */
int attn_run(struct check *c, struct tv_kernels *k, const struct attn_problem *p,
             const struct attn_layout *layout, struct attn_result *ret_result);
int64_t attn_out_count(const struct attn_problem *p);
int64_t attn_lse_count(const struct attn_problem *p);

#endif
