/*
 * model_passes.c - draws and comparisons of test_model.c and test_model_layers.c.
 */
#include "model_passes.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"

static uint64_t random_state;

void model_seed(uint64_t seed)
{
    random_state = seed;
}

int32_t model_draw(int32_t below)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int32_t)((random_state >> 33) % (uint64_t)below);
}

void model_open(struct tv_fixture *fixture, const char *name, int32_t page_size, int32_t max_len,
                enum tv_dtype kv_dtype)
{
    struct tv_fixture_options options = {.backend = "cpu",
                                         .dir = tv_fixture_dir(name),
                                         .page_size = page_size,
                                         .rows_max = 256,
                                         .requests_max = 4,
                                         .max_len = max_len,
                                         .pages = 2048 / page_size,
                                         .threads = 2,
                                         .kv_dtype = kv_dtype};
    tv_fixture_open(fixture, &options);
}

double model_noise_of_both(const char *name)
{
    struct tv_engine_fixture judged;
    const struct tv_engine_fixture_options options = {.model = name};
    tv_engine_fixture_open(&judged, &options);
    double noise = tv_engine_near_tie(judged.engine);
    tv_engine_fixture_close(&judged);
    return noise;
}

void model_tokens_draw(int32_t *tokens, int32_t count, int32_t vocab)
{
    for (int32_t i = 0; i < count; i++) {
        tokens[i] = model_draw(vocab);
    }
}

float *model_logits_copy(const float *logits, int64_t rows, int64_t width)
{
    size_t bytes = (size_t)(rows * width) * sizeof *logits;
    float *copy = malloc(bytes);
    assert_non_null(copy);
    memcpy(copy, logits, bytes);
    return copy;
}

/* Largest |a - b| / largest |b| over rows [0, rows) of one layer. */
double model_layer_difference(const struct tv_fixture *fixture, int32_t layer,
                              const struct tv_cache_seq *a, const struct tv_cache_seq *b,
                              int32_t rows)
{
    const float *pages = tv_cache_layer(fixture->cache, layer);
    double worst = 0.0, largest = 0.0;
    for (int32_t i = 0; i < rows; i++) {
        const float *x = pages + tv_cache_slot(fixture->cache, a, i) * TV_MLA_ROW;
        const float *y = pages + tv_cache_slot(fixture->cache, b, i) * TV_MLA_ROW;
        for (int32_t d = 0; d < TV_MLA_ROW; d++) {
            double difference = fabs((double)x[d] - (double)y[d]);
            worst = difference > worst || isnan(difference) ? difference : worst;
            largest = fmax(largest, fabs((double)y[d]));
        }
    }
    return worst / largest;
}
