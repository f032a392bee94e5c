/*
 * test_model_layers.c - B33: the absorbed form against the expanded one, layer by layer.
 *
 * Once over whole passes (the rows of layer l + 1 come from the output of layer l), and once inside
 * a pass, where both forms get the same queries and pages, so that nothing can add up.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/convert.h"
#include "model/model_impl.h"
#include "model_passes.h"

/* Rows of layer l + 1 come from the output of layer l, so every layer's attention is seen. */
static void absorbed_against_expanded(struct tv_fixture *fixture, const char *name)
{
    enum { COUNT = 90 };
    int32_t tokens[COUNT];
    struct tv_cache_seq expanded = {0}, absorbed = {0};
    int32_t vocab = tv_model_config(fixture->model)->vocab;
    int32_t layers = tv_model_config(fixture->model)->layers;
    model_seed(23);
    model_tokens_draw(tokens, COUNT, vocab);
    float *last =
        model_logits_copy(tv_fixture_prefill(fixture, &expanded, tokens, COUNT, 64), 1, vocab);
    const float *logits = tv_fixture_chain(fixture, &absorbed, tokens, COUNT);
    struct tv_fixture_difference difference = {0};
    tv_fixture_compare(logits + (COUNT - 1) * (int64_t)vocab, last, 1, vocab, &difference);
    for (int32_t layer = 0; layer < layers; layer++) {
        double relative = model_layer_difference(fixture, layer, &absorbed, &expanded, COUNT);
        print_message("%s layer %d rel=%.2e\n", name, layer, relative);
        assert_true(relative <= 1e-5);
    }
    assert_true(difference.max_abs <= model_noise_of_both(name));
    free(last);
    tv_cache_seq_finish(fixture->cache, &expanded);
    tv_cache_seq_finish(fixture->cache, &absorbed);
}

/* A layer of a running pass against prefill_attn on the same queries and pages. */
struct layer_check {
    struct tv_fixture *fixture;
    double worst; /* largest |difference| / largest |value| of any layer */
};

/* q_nope of the pass beside the rotated part of the absorbed query: [rows, heads, nope + rope]. */
static float *queries_join(const struct tv_model *model, int32_t rows)
{
    const struct tv_model_config *config = &model->config;
    int32_t head_dim = config->nope_dim + config->rope_dim;
    float *q = malloc((size_t)rows * config->heads * head_dim * sizeof *q);
    assert_non_null(q);
    for (int32_t i = 0; i < rows * config->heads; i++) {
        memcpy(q + (int64_t)i * head_dim, model->buffers.q + (int64_t)i * config->nope_dim,
               (size_t)config->nope_dim * sizeof *q);
        memcpy(q + (int64_t)i * head_dim + config->nope_dim,
               model->buffers.q_abs + (int64_t)i * TV_MLA_ROW + TV_MLA_LATENT,
               TV_MLA_ROPE * sizeof *q);
    }
    return q;
}

/* v_up of one head times one latent row, in double. */
static double value_of(const struct tv_model *model, int32_t layer, int32_t head, int32_t d,
                       const float *latent)
{
    const struct tv_model_tensor *v_up = &model->layers[layer].v_up;
    int64_t row = ((int64_t)head * model->config.v_dim + d) * TV_MLA_LATENT;
    double sum = 0.0;
    for (int32_t i = 0; i < TV_MLA_LATENT; i++) {
        sum += (double)latent[i] * (double)tv_load_f32(v_up->data, v_up->dtype, row + i);
    }
    return sum;
}

static void layer_hook(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct layer_check *check = context;
    struct tv_model *model = check->fixture->model;
    const struct tv_model_config *config = &model->config;
    int32_t rows = attn->node_count[0], width = config->heads * config->v_dim;
    float *q = queries_join(model, rows);
    float *want = malloc((size_t)rows * (size_t)width * sizeof *want);
    assert_non_null(want);
    struct tv_prefill_attn args = {
        .rows = rows,
        .start = attn->prefix_len[0],
        .heads = config->heads,
        .nope_dim = config->nope_dim,
        .rope_dim = config->rope_dim,
        .v_dim = config->v_dim,
        .latent_dim = config->kv_lora,
        .softmax_scale = config->softmax_scale,
        .q = q,
        .k_up = model->layers[layer].k_up.data,
        .v_up = model->layers[layer].v_up.data,
        .w_dtype = model->layers[layer].k_up.dtype,
        .kv_pages = attn->kv_pages,
        .kv_dtype = attn->dtype,
        .page_count = attn->page_count,
        .page_size = attn->page_size,
        .page_table = attn->page_table,
        .out = want,
        .workspace = model->buffers.workspace,
        .workspace_bytes = model->buffers.workspace_bytes,
    };
    assert_int_equal(model->kernels->prefill_attn(model->kernels, &args), 0);
    double worst = 0.0, largest = 0.0;
    for (int32_t i = 0; i < rows * width; i++) {
        int32_t row = i / width, head = i % width / config->v_dim;
        const float *latent =
            (const float *)attn->out + ((int64_t)row * config->heads + head) * TV_MLA_LATENT;
        double got = value_of(model, layer, head, i % config->v_dim, latent);
        worst = fmax(worst, fabs(got - (double)want[i]));
        largest = fmax(largest, fabs((double)want[i]));
    }
    check->worst = fmax(check->worst, worst / largest);
    free(q);
    free(want);
}

static void layers_compare(const char *name, enum tv_dtype kv_dtype)
{
    enum { PREFIX = 70, ROWS = 20 };
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    struct tv_cache_shortage shortage;
    int32_t tokens[PREFIX + ROWS], parents[ROWS], depths[ROWS];
    const float *logits;
    model_open(&fixture, name, 64, 0, kv_dtype);
    struct layer_check check = {.fixture = &fixture};
    model_seed(29);
    model_tokens_draw(tokens, PREFIX + ROWS, tv_model_config(fixture.model)->vocab);
    (void)tv_fixture_prefill(&fixture, &seq, tokens, PREFIX, PREFIX);
    for (int32_t i = 0; i < ROWS; i++) {
        parents[i] = i - 1;
        depths[i] = i;
    }
    struct tv_model_item item = {
        .seq = &seq, .rows = ROWS, .tokens = tokens + PREFIX, .parents = parents, .depths = depths};
    assert_int_equal(tv_cache_reserve(fixture.cache, &seq, ROWS, &shortage), 0);
    assert_int_equal(
        tv_model_verify(fixture.model, fixture.cache, &item, 1, layer_hook, &check, &logits), 0);
    print_message("%s %s rel=%.2e\n", name, kv_dtype == TV_F32 ? "f32" : "bf16", check.worst);
    assert_true(check.worst > 0.0);
    assert_true(check.worst <= (kv_dtype == TV_F32 ? 1e-5 : 2e-2));
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
}

static void test_b33_absorbed_against_expanded(void **state)
{
    (void)state;
    static const char *const names[] = {"v2lite", "v3", "moonlight", "kjv-mla-8m",
                                        "../golden/model_variants/v3-nope48-v64-tied"};
    for (size_t i = 0; i < 5; i++) {
        struct tv_fixture fixture;
        model_open(&fixture, names[i], 64, 0, TV_F32);
        absorbed_against_expanded(&fixture, names[i]);
        tv_fixture_close(&fixture);
        layers_compare(names[i], TV_F32);
        layers_compare(names[i], TV_BF16);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_b33_absorbed_against_expanded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
