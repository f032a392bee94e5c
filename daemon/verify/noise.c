/*
 * noise.c - the checkpoint's noise: how far two orders of summation move its logits.
 *
 * The self-test prompt runs through both forms of the forward pass: absorbed, all positions in one
 * launch as a chain, and expanded, one token after the other. Both compute the same sums, the
 * products grouped and ordered differently; the largest difference of any logit is the noise.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "verify/engine.h"

#define NOISE_ROWS_MAX 48

/* The canned prompt: spread over the vocabulary, the same for every run. */
static int32_t prompt_token(int32_t i, int32_t vocab)
{
    return (int32_t)(((int64_t)i * 37 + 11) % vocab);
}

static int absorbed_logits(struct tv_verify_engine *self, struct tv_cache_seq *seq,
                           const int32_t *tokens, int32_t rows, float *ret_logits)
{
    struct tv_engine *engine = &self->engine;
    int32_t parents[NOISE_ROWS_MAX];
    int32_t depths[NOISE_ROWS_MAX];
    struct tv_cache_shortage shortage;
    for (int32_t i = 0; i < rows; i++) {
        parents[i] = i - 1;
        depths[i] = i;
    }
    int rc = tv_cache_reserve(engine->cache, seq, rows, &shortage);
    if (rc != 0) {
        return rc;
    }
    struct tv_model_item item = {
        .seq = seq, .rows = rows, .tokens = tokens, .parents = parents, .depths = depths};
    const float *logits = NULL;
    rc = tv_model_verify(engine->model, engine->cache, &item, 1, NULL, NULL, &logits);
    if (rc == 0) {
        rc = engine->kernels->download(engine->kernels, ret_logits, logits,
                                       (size_t)rows * (size_t)engine->vocab * sizeof *logits);
    }
    if (rc == 0) {
        rc = engine->kernels->sync(engine->kernels);
    }
    tv_cache_drop(engine->cache, seq);
    return rc;
}

/* Logits of one more token in the expanded form; the sequence grows by it. */
static int expanded_row(struct tv_verify_engine *self, struct tv_cache_seq *seq, int32_t token,
                        float *ret_row)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_shortage shortage;
    int rc = tv_cache_reserve(engine->cache, seq, 1, &shortage);
    if (rc != 0) {
        return rc;
    }
    const float *logits = NULL;
    rc = tv_model_prefill(engine->model, engine->cache, seq, &token, 1, &logits);
    if (rc == 0) {
        rc = engine->kernels->download(engine->kernels, ret_row, logits,
                                       (size_t)engine->vocab * sizeof *logits);
    }
    if (rc == 0) {
        rc = engine->kernels->sync(engine->kernels);
    }
    if (rc != 0) {
        tv_cache_drop(engine->cache, seq);
        return rc;
    }
    return tv_cache_commit(engine->cache, seq, NULL, 1);
}

int tv_engine_noise_measure(struct tv_verify_engine *self, double *ret_noise)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_seq seq = {0};
    int32_t tokens[NOISE_ROWS_MAX];
    int32_t rows = engine->nodes_max < NOISE_ROWS_MAX ? engine->nodes_max : NOISE_ROWS_MAX;
    rows = rows < engine->max_len ? rows : engine->max_len;
    size_t vocab = (size_t)engine->vocab;
    double noise = 0.0;
    int rc = -ENOMEM;
    float *absorbed = malloc((size_t)rows * vocab * sizeof *absorbed);
    float *row = malloc(vocab * sizeof *row);
    if (absorbed == NULL || row == NULL) {
        goto done;
    }
    for (int32_t i = 0; i < rows; i++) {
        tokens[i] = prompt_token(i, engine->vocab);
    }
    rc = absorbed_logits(self, &seq, tokens, rows, absorbed);
    for (int32_t i = 0; rc == 0 && i < rows; i++) {
        rc = expanded_row(self, &seq, tokens[i], row);
        for (size_t t = 0; rc == 0 && t < vocab; t++) {
            double difference = fabs((double)row[t] - (double)absorbed[(size_t)i * vocab + t]);
            if (!isfinite(difference)) {
                rc = -EDOM;
            }
            noise = difference > noise ? difference : noise;
        }
    }
    if (rc == 0) {
        *ret_noise = noise;
    }
done:
    tv_cache_seq_finish(engine->cache, &seq);
    free(absorbed);
    free(row);
    return rc;
}
