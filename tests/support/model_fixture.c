/*
 * model_fixture.c - loading, feeding and comparing models in the C tests.
 */
#include "model_fixture.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

const char *tv_fixture_dir(const char *name)
{
    static char path[512];
    const char *models = getenv("TV_MODELS_DIR");
    assert_non_null(models);
    (void)snprintf(path, sizeof path, "%s/%s", models, name);
    return path;
}

int tv_fixture_poison(void)
{
    const char *text = getenv("TREEVERIFY_POISON");
    if (text != NULL && strcmp(text, "on") != 0 && strcmp(text, "off") != 0) {
        fail_msg("TREEVERIFY_POISON is '%s', not on or off", text);
    }
    return text == NULL || strcmp(text, "on") == 0;
}

void tv_fixture_open(struct tv_fixture *fixture, const struct tv_fixture_options *options)
{
    struct tv_kernels_options kernel_options = {.threads = options->threads,
                                                .cpu_flags_mask = ~0ull};
    struct tv_model_error error = {{0}};
    memset(fixture, 0, sizeof *fixture);
    assert_int_equal(tv_kernels_create(options->backend, &kernel_options, &fixture->kernels), 0);
    struct tv_model_options model_options = {.max_len = options->max_len,
                                             .rows_max = options->rows_max,
                                             .prefill_rows = options->prefill_rows,
                                             .requests_max = options->requests_max,
                                             .page_size = options->page_size,
                                             .products = options->products};
    int err =
        tv_model_load(fixture->kernels, options->dir, &model_options, &fixture->model, &error);
    if (err != 0) {
        fail_msg("%s: %d %s", options->dir, err, error.text);
    }
    const struct tv_model_config *config = tv_model_config(fixture->model);
    struct tv_cache_params params = {.layers = config->layers,
                                     .page_size = options->page_size,
                                     .row_dim = config->kv_lora + config->rope_dim,
                                     .dtype = options->kv_dtype,
                                     .pages = options->pages,
                                     .poison = tv_fixture_poison(),
                                     .prefix = options->prefix};
    assert_int_equal(tv_cache_create(fixture->kernels, &params, &fixture->cache), 0);
}

void tv_fixture_close(struct tv_fixture *fixture)
{
    tv_cache_destroy(fixture->cache);
    tv_model_destroy(fixture->model);
    if (fixture->kernels != NULL) {
        fixture->kernels->destroy(fixture->kernels);
    }
    memset(fixture, 0, sizeof *fixture);
}

void tv_fixture_commit(struct tv_fixture *fixture, struct tv_cache_seq *seq, const int32_t *nodes,
                       int32_t count)
{
    assert_int_equal(tv_cache_commit(fixture->cache, seq, nodes, count), 0);
}

const float *tv_fixture_prefill(struct tv_fixture *fixture, struct tv_cache_seq *seq,
                                const int32_t *tokens, int32_t count, int32_t piece)
{
    const float *logits = NULL;
    for (int32_t at = 0; at < count; at += piece) {
        int32_t rows = count - at < piece ? count - at : piece;
        struct tv_cache_shortage shortage;
        assert_int_equal(tv_cache_reserve(fixture->cache, seq, rows, &shortage), 0);
        assert_int_equal(tv_model_prefill(fixture->model, fixture->cache, seq, tokens + at, rows,
                                          at + rows == count ? &logits : NULL),
                         0);
        tv_fixture_commit(fixture, seq, NULL, rows);
    }
    return logits;
}

const float *tv_fixture_verify(struct tv_fixture *fixture, struct tv_cache_seq *seq,
                               const int32_t *tokens, const int32_t *parents, int32_t rows)
{
    int32_t depths[TV_TREE_NODES_MAX];
    const float *logits = NULL;
    struct tv_cache_shortage shortage;
    for (int32_t i = 0; i < rows; i++) {
        depths[i] = parents[i] < 0 ? 0 : depths[parents[i]] + 1;
    }
    assert_int_equal(tv_cache_reserve(fixture->cache, seq, rows, &shortage), 0);
    struct tv_model_item item = {
        .seq = seq, .rows = rows, .tokens = tokens, .parents = parents, .depths = depths};
    assert_int_equal(tv_model_verify(fixture->model, fixture->cache, &item, 1, NULL, NULL, &logits),
                     0);
    return logits;
}

const float *tv_fixture_chain(struct tv_fixture *fixture, struct tv_cache_seq *seq,
                              const int32_t *tokens, int32_t rows)
{
    int32_t parents[TV_TREE_NODES_MAX];
    for (int32_t i = 0; i < rows; i++) {
        parents[i] = i - 1;
    }
    return tv_fixture_verify(fixture, seq, tokens, parents, rows);
}

/* The tensor's bytes, malloc'd; NULL when there is none of that name. */
static void *refs_read(const char *dir, const char *name, struct tv_safetensors_tensor *ret_tensor)
{
    struct tv_safetensors file;
    enum tv_safetensors_fault fault;
    struct tv_model_error error;
    int folder = open(dir, O_RDONLY | O_DIRECTORY);
    assert_true(folder >= 0);
    if (tv_safetensors_open(folder, "refs.safetensors", &file, &fault, &error) != 0) {
        fail_msg("%s: %s", dir, error.text);
    }
    (void)close(folder);
    void *data = NULL;
    for (size_t i = 0; i < file.count; i++) {
        if (strcmp(file.tensors[i].name, name) == 0) {
            *ret_tensor = file.tensors[i];
            data = malloc((size_t)file.tensors[i].bytes + 1);
            assert_non_null(data);
            assert_int_equal(tv_safetensors_read(&file, &file.tensors[i], 0, data,
                                                 (size_t)file.tensors[i].bytes, &error),
                             0);
        }
    }
    tv_safetensors_finish(&file);
    return data;
}

int32_t *tv_refs_ints(const char *dir, const char *name, int32_t *ret_count)
{
    struct tv_safetensors_tensor tensor;
    void *data = refs_read(dir, name, &tensor);
    if (data == NULL) {
        return NULL;
    }
    int wide = tensor.bits == 64;
    int32_t count = (int32_t)(tensor.bytes / (wide ? 8 : 4));
    int32_t *ints = malloc(((size_t)count + 1) * sizeof *ints);
    assert_non_null(ints);
    for (int32_t i = 0; i < count; i++) {
        int64_t value;
        if (wide) {
            memcpy(&value, (char *)data + (size_t)i * 8, 8);
            ints[i] = (int32_t)value;
        } else {
            memcpy(&ints[i], (char *)data + (size_t)i * 4, 4);
        }
    }
    free(data);
    *ret_count = count;
    return ints;
}

float *tv_refs_floats(const char *dir, const char *name, int64_t *ret_count)
{
    struct tv_safetensors_tensor tensor;
    float *data = refs_read(dir, name, &tensor);
    if (data != NULL) {
        assert_string_equal(tensor.dtype, "F32");
        *ret_count = tensor.bytes / 4;
    }
    return data;
}

static int64_t argmax(const float *row, int64_t width)
{
    int64_t best = 0;
    for (int64_t i = 1; i < width; i++) {
        if (row[i] > row[best]) {
            best = i;
        }
    }
    return best;
}

void tv_fixture_compare(const float *got, const float *want, int64_t rows, int64_t width,
                        struct tv_fixture_difference *difference)
{
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < width; i++) {
            double d = fabs((double)got[r * width + i] - (double)want[r * width + i]);
            if (!(d <= difference->max_abs)) {
                difference->max_abs = isnan(d) ? INFINITY : d;
            }
        }
        difference->argmax_wrong +=
            argmax(got + r * width, width) != argmax(want + r * width, width);
    }
}

double tv_fixture_bound(const float *want, int64_t count)
{
    double sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += (double)want[i];
        squares += (double)want[i] * (double)want[i];
    }
    double mean = sum / (double)count;
    double deviation = sqrt(squares / (double)count - mean * mean);
    return 5e-4 * fmax(1.0, deviation / 1.6);
}
