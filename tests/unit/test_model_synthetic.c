/*
 * test_model_synthetic.c - models of random weights: the same on every backend, finite, named by
 * their seed, and the configurations of the benchmarks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>

#include "model/checkpoint.h"
#include "model/model_config.h"
#include "model_fixture.h"

#define SEED 41u

/* A model of the folder's shapes with weights of this seed. */
static int open_model(const char *backend, const char *dir, uint64_t seed, int32_t max_len,
                      struct tv_fixture *fixture)
{
    const struct tv_kernels_options kernel_options = {.threads = 1, .cpu_flags_mask = ~0ull};
    const struct tv_model_options options = {.max_len = max_len,
                                             .rows_max = 64,
                                             .requests_max = 2,
                                             .page_size = 16,
                                             .synthetic = 1,
                                             .synthetic_seed = seed};
    struct tv_model_error error = {{0}};
    memset(fixture, 0, sizeof *fixture);
    assert_int_equal(tv_kernels_create(backend, &kernel_options, &fixture->kernels), 0);
    int rc = tv_model_load(fixture->kernels, dir, &options, &fixture->model, &error);
    if (rc != 0) {
        fixture->kernels->destroy(fixture->kernels);
        return rc;
    }
    const struct tv_model_config *config = tv_model_config(fixture->model);
    const struct tv_cache_params params = {.layers = config->layers,
                                           .page_size = 16,
                                           .row_dim = config->kv_lora + config->rope_dim,
                                           .dtype = TV_F32,
                                           .pages = 16,
                                           .poison = tv_fixture_poison()};
    assert_int_equal(tv_cache_create(fixture->kernels, &params, &fixture->cache), 0);
    return 0;
}

static void opened(const char *backend, const char *name, uint64_t seed, struct tv_fixture *fixture)
{
    assert_int_equal(open_model(backend, tv_fixture_dir(name), seed, 0, fixture), 0);
}

static void same(const struct tv_model_tensor *a, const struct tv_model_tensor *b)
{
    assert_int_equal(a->rows, b->rows);
    assert_int_equal(a->cols, b->cols);
    assert_int_equal(a->dtype, b->dtype);
    assert_int_equal(a->data == NULL, b->data == NULL);
    if (a->data != NULL) {
        assert_memory_equal(a->data, b->data,
                            (size_t)a->rows * (size_t)a->cols * tv_dtype_size(a->dtype));
    }
}

static void same_mlp(const struct tv_model_mlp_weights *a, const struct tv_model_mlp_weights *b)
{
    same(&a->gate, &b->gate);
    same(&a->up, &b->up);
    same(&a->down, &b->down);
}

static void test_backends_have_the_same_weights(void **state)
{
    struct tv_fixture ref, cpu;
    (void)state;
    opened("ref", "v3", SEED, &ref);
    opened("cpu", "v3", SEED, &cpu);
    const struct tv_model_weights *a = tv_model_weights(ref.model);
    const struct tv_model_weights *b = tv_model_weights(cpu.model);
    const struct tv_model_config *config = tv_model_config(ref.model);
    same(&a->embed, &b->embed);
    same(&a->final_norm, &b->final_norm);
    same(&a->head, &b->head);
    for (int32_t layer = 0; layer < config->layers; layer++) {
        const struct tv_model_layer_weights *x = &a->layers[layer], *y = &b->layers[layer];
        same(&x->input_norm, &y->input_norm);
        same(&x->q_a, &y->q_a);
        same(&x->q_b, &y->q_b);
        same(&x->kv_a, &y->kv_a);
        same(&x->k_up, &y->k_up);
        same(&x->v_up, &y->v_up);
        same(&x->o, &y->o);
        same(&x->router, &y->router);
        same(&x->router_bias, &y->router_bias);
        same_mlp(&x->mlp, &y->mlp);
        for (int32_t e = 0; x->experts != NULL && e < config->experts; e++) {
            same_mlp(&x->experts[e], &y->experts[e]);
        }
    }
    assert_memory_equal(tv_model_id(ref.model), tv_model_id(cpu.model), 32);
    assert_string_equal(tv_model_weights_dtype(ref.model), "bf16");
    assert_true(tv_model_bytes(ref.model) > 0);
    assert_int_equal(tv_model_bytes(ref.model), tv_model_bytes(cpu.model));
    tv_fixture_close(&ref);
    tv_fixture_close(&cpu);
}

/* Different seeds, tensors and layers have different values; a seed is part of the name. */
static void test_seeds_tell_models_apart(void **state)
{
    struct tv_fixture first, other;
    (void)state;
    opened("ref", "moonlight", SEED, &first);
    opened("ref", "moonlight", SEED + 1, &other);
    const struct tv_model_weights *a = tv_model_weights(first.model);
    const struct tv_model_weights *b = tv_model_weights(other.model);
    size_t embed_bytes = (size_t)a->embed.rows * (size_t)a->embed.cols * sizeof(uint16_t);
    size_t norm_bytes = (size_t)a->layers[0].input_norm.cols * sizeof(float);
    assert_true(memcmp(a->embed.data, b->embed.data, embed_bytes) != 0);
    assert_true(memcmp(tv_model_id(first.model), tv_model_id(other.model), 32) != 0);
    assert_true(memcmp(a->layers[0].input_norm.data, a->layers[1].input_norm.data, norm_bytes) !=
                0);
    assert_true(memcmp(a->layers[0].input_norm.data, a->layers[0].post_norm.data, norm_bytes) != 0);
    tv_fixture_close(&first);
    tv_fixture_close(&other);
}

/* Both forms of the forward pass on such a model: finite, and the same within the contract. */
static void test_logits_are_finite(void **state)
{
    static const char *const names[] = {"v3", "v2lite", "moonlight", "kjv-mla-8m"};
    int32_t tokens[40];
    (void)state;
    for (int32_t i = 0; i < 40; i++) {
        tokens[i] = 3 + 5 * i % 101;
    }
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
        struct tv_fixture fixture;
        struct tv_cache_seq seq = {0};
        struct tv_fixture_difference difference = {0};
        opened("cpu", names[n], SEED + n, &fixture);
        int32_t vocab = tv_model_config(fixture.model)->vocab;
        float *expected = malloc((size_t)vocab * sizeof *expected);
        assert_non_null(expected);
        memcpy(expected, tv_fixture_prefill(&fixture, &seq, tokens, 40, 16),
               (size_t)vocab * sizeof *expected);
        for (int32_t i = 0; i < vocab; i++) {
            assert_true(isfinite(expected[i]));
        }
        tv_cache_seq_finish(fixture.cache, &seq);
        memset(&seq, 0, sizeof seq);
        (void)tv_fixture_prefill(&fixture, &seq, tokens, 39, 16);
        tv_fixture_compare(tv_fixture_chain(&fixture, &seq, tokens + 39, 1), expected, 1, vocab,
                           &difference);
        assert_true(difference.max_abs <= tv_fixture_bound(expected, vocab));
        tv_cache_drop(fixture.cache, &seq);
        tv_cache_seq_finish(fixture.cache, &seq);
        free(expected);
        tv_fixture_close(&fixture);
    }
}

static void test_longer_than_it_was_made_for(void **state)
{
    struct tv_fixture fixture;
    (void)state;
    assert_int_equal(open_model("ref", tv_fixture_dir("v3"), SEED, 5000, &fixture), 0);
    assert_int_equal(tv_model_options(fixture.model)->max_len, 5000); /* of 4096 */
    tv_fixture_close(&fixture);
    assert_int_equal(open_model("ref", "/nowhere", SEED, 0, &fixture), -EBADMSG);
}

/* The folders of tests/bench/configs are taken as they are. */
static void test_benchmark_configurations(void **state)
{
    static const struct {
        const char *name;
        int32_t hidden, heads, experts, layers, vocab;
    } wanted[] = {
        {"moonlight-16b-a3b", 2048, 16, 64, 27, 163840},
        {"deepseek-v2-lite", 2048, 16, 64, 27, 102400},
        {"deepseek-v3-4layers", 7168, 128, 256, 4, 129280},
        {"kimi-k2-4layers", 7168, 64, 384, 4, 163840},
    };
    const char *root = getenv("TV_BENCH_CONFIGS");
    (void)state;
    assert_non_null(root);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        char dir[1024];
        struct tv_checkpoint checkpoint;
        struct tv_model_config config;
        struct tv_model_error error = {{0}};
        (void)snprintf(dir, sizeof dir, "%s/%s", root, wanted[i].name);
        assert_int_equal(tv_checkpoint_invent(dir, 1, &checkpoint, &error), 0);
        if (tv_model_config_read(checkpoint.config, &config, &error) != 0) {
            fail_msg("%s: %s", wanted[i].name, error.text);
        }
        assert_int_equal(config.hidden, wanted[i].hidden);
        assert_int_equal(config.heads, wanted[i].heads);
        assert_int_equal(config.experts, wanted[i].experts);
        assert_int_equal(config.layers, wanted[i].layers);
        assert_int_equal(config.vocab, wanted[i].vocab);
        assert_int_equal(config.first_k_dense, 1);
        tv_checkpoint_finish(&checkpoint);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backends_have_the_same_weights),
        cmocka_unit_test(test_seeds_tell_models_apart),
        cmocka_unit_test(test_logits_are_finite),
        cmocka_unit_test(test_longer_than_it_was_made_for),
        cmocka_unit_test(test_benchmark_configurations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
