/*
 * model_passes.h - what the tests of the two passes share: a checkpoint on small pages, draws from
 * one seeded stream, and the largest difference of KV rows.
 *
 * Every helper fails the running cmocka test instead of returning an error.
 */
#ifndef TV_TESTS_UNIT_MODEL_PASSES_H
#define TV_TESTS_UNIT_MODEL_PASSES_H

#include <stdint.h>

#include "model_fixture.h"

/* Start the stream anew; draws are below `below`. */
void model_seed(uint64_t seed);
int32_t model_draw(int32_t below);
void model_tokens_draw(int32_t *tokens, int32_t count, int32_t vocab);

/* A bundled checkpoint on the CPU backend with 2048 rows; max_len 0: the checkpoint's. */
void model_open(struct tv_fixture *fixture, const char *name, int32_t page_size, int32_t max_len,
                enum tv_dtype kv_dtype);
/* What two forms of a bundled checkpoint may differ by: twice the noise that the judge of a start
 * measures as the oracle against itself in the other order of summation. */
double model_noise_of_both(const char *name);
/* malloc'd, the caller's. */
float *model_logits_copy(const float *logits, int64_t rows, int64_t width);
/* Largest |a - b| / largest |b| over rows [0, rows) of one layer of f32 pages. */
double model_layer_difference(const struct tv_fixture *fixture, int32_t layer,
                              const struct tv_cache_seq *a, const struct tv_cache_seq *b,
                              int32_t rows);

#endif
