/*
 * fixed_impl.h - the inside of the engine with fixed answers, for its own files.
 */
#ifndef TV_TESTS_FIXED_IMPL_H
#define TV_TESTS_FIXED_IMPL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "fixed_engine.h"

/* What one round of the last verify call answered with. */
struct answer {
    int32_t *nodes;   /* [nodes_max] */
    float *logprobs;  /* [nodes_max] */
    float *logits;    /* [nodes_max, vocab], made when first wanted */
    int32_t *planted; /* [nodes_max]: where a row of logits differs from the base row, or -1 */
    int32_t *ids;     /* [nodes_max, TV_WANT_TOP_K_MAX] */
    float *values;    /* the same shape */
    float *lse;       /* [nodes_max] */
};

struct fixed_engine {
    struct tv_engine engine;
    struct answer *answers;          /* [requests_max] */
    const struct tv_context *sliced; /* whose prefill calls between right now, or NULL */
    double base_sum;                 /* of exp(base logit) over the vocabulary */
    atomic_int_least64_t launches, shared, commits, slow_us;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    int held, moves_held, inside, broken, lost;
    enum tv_code fail_code;
    int32_t fail_count, contexts;
};

#endif
