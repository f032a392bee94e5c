/*
 * test_verify_start.c - no start with a wrong model form, and no readiness once one appears.
 *
 * Both fast forms may agree on a wrong answer; the path oracle must not. Every fault is planted in
 * the backend's table; the same checkpoint without it starts, with plausible noise.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "plant.h"
#include "tiny_model.h"

static const enum tv_dtype dtypes[] = {TV_F32, TV_BF16};

static void fixture_open(struct tv_engine_fixture *fixture, const char *model, enum tv_dtype dtype,
                         int32_t max_len)
{
    struct tv_fixture_options base = {.backend = "cpu",
                                      .dir = tv_fixture_dir(model),
                                      .page_size = 16,
                                      .rows_max = 64,
                                      .requests_max = 2,
                                      .max_len = max_len,
                                      .pages = 16,
                                      .threads = 1,
                                      .kv_dtype = dtype};
    memset(fixture, 0, sizeof *fixture);
    tv_fixture_open(&fixture->base, &base);
}

/* The naive kernel may be the one that notices; the word is that of the first who did. */
static void starts_refused(const char *model, enum tv_dtype dtype)
{
    for (int i = 0; tv_plant_names[i] != NULL; i++) {
        struct tv_engine_fixture fixture;
        if (strcmp(tv_plant_names[i], "late") == 0 || strcmp(tv_plant_names[i], "stuck") == 0 ||
            strcmp(tv_plant_names[i], "commit") == 0 || strcmp(tv_plant_names[i], "lost") == 0) {
            continue; /* a start neither waits nor commits */
        }
        fixture_open(&fixture, model, dtype, 0);
        assert_int_equal(tv_plant(fixture.base.kernels, tv_plant_names[i]), 0);
        int rc = tv_engine_fixture_judge(&fixture);
        if (rc == 0) {
            fail_msg("%s %s: started with %s", model, dtype == TV_F32 ? "f32" : "bf16",
                     tv_plant_names[i]);
        }
        assert_int_equal(rc, -EIO);
        print_message("%s %s %s: %s\n", model, dtype == TV_F32 ? "f32" : "bf16", tv_plant_names[i],
                      fixture.detail);
        assert_non_null(strstr(fixture.detail, "against the path oracle"));
        struct tv_cache_counts counts;
        tv_cache_counts(fixture.base.cache, &counts);
        assert_int_equal(counts.free, counts.total);
        tv_fixture_close(&fixture.base);
    }
}

static void wrong_forms_do_not_start_b28(void **state)
{
    (void)state;
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        starts_refused("v3", dtypes[d]);
        starts_refused("kjv-mla-8m", dtypes[d]);
    }
}

/* Without a fault: noise is there, small, and the two paths differ by less than both noises. */
static void right_forms_start(void **state)
{
    static const char *const models[] = {"v3", "v2lite", "moonlight", "kjv-mla-8m"};
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            struct tv_engine_fixture fixture;
            char detail[200];
            fixture_open(&fixture, models[m], dtypes[d], 0);
            if (tv_engine_fixture_judge(&fixture) != 0) {
                fail_msg("%s: %s", models[m], fixture.detail);
            }
            struct tv_engine *engine = fixture.engine;
            print_message("%s %s: noise %.3g\n", models[m], d == 0 ? "f32" : "bf16", engine->noise);
            assert_true(engine->noise > 0.0 && engine->noise < (d == 0 ? 1e-4 : 0.5));
            assert_true(tv_engine_near_tie(engine) == 2.0 * engine->noise);
            assert_int_equal(engine->ops->self_test(engine, detail, sizeof detail), 0);
            tv_engine_fixture_close(&fixture);
        }
    }
}

static int (*naive)(struct tv_kernels *k, const struct tv_verify_attn *args);
static size_t (*naive_workspace)(const struct tv_kernels *k, const struct tv_verify_attn *args);

/* What a device's kernel for bf16 rows may do: round probabilities too. */
static int attn_rounding(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    struct tv_verify_attn rounding = *args;
    rounding.round_p_bf16 = 1;
    rounding.workspace_bytes = naive_workspace(k, args);
    rounding.workspace = malloc(rounding.workspace_bytes + 1);
    int rc = rounding.workspace == NULL ? -ENOMEM : naive(k, &rounding);
    free(rounding.workspace);
    return rc;
}

static void device_make(struct tv_kernels *kernels)
{
    naive = kernels->verify_attn_naive;
    naive_workspace = kernels->verify_attn_naive_workspace;
    kernels->verify_attn = attn_rounding;
    kernels->host_memory = 0;
}

static int (*attn_before)(struct tv_kernels *k, const struct tv_verify_attn *args);

static int attn_nothing(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int rc = attn_before(k, args);
    if (args->out_dtype == TV_F32) {
        ((float *)args->out)[0] = NAN;
    } else {
        ((uint16_t *)args->out)[0] = 0x7fc0;
    }
    return rc;
}

static void nothing_finite(struct tv_kernels *kernels)
{
    attn_before = kernels->verify_attn;
    kernels->verify_attn = attn_nothing;
}

/* The oracle takes over what such attention gave, and nothing that is further off. */
static void rounded_probabilities_of_a_device(void **state)
{
    static const char *const faults[] = {"scale-verify", "rope-query",   "mask",
                                         "value-heads",  "absorb-heads", "router"};
    (void)state;
    struct tv_engine_fixture fixture;
    fixture_open(&fixture, "v3", TV_BF16, 0);
    device_make(fixture.base.kernels);
    if (tv_engine_fixture_judge(&fixture) != 0) {
        fail_msg("%s", fixture.detail);
    }
    tv_engine_fixture_close(&fixture);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        fixture_open(&fixture, "v3", TV_BF16, 0);
        device_make(fixture.base.kernels);
        assert_int_equal(tv_plant(fixture.base.kernels, faults[i]), 0);
        assert_int_equal(tv_engine_fixture_judge(&fixture), -EIO);
        print_message("device %s: %s\n", faults[i], fixture.detail);
        tv_fixture_close(&fixture.base);
    }
    /* The same kernel in host memory has no such leave. */
    fixture_open(&fixture, "v3", TV_BF16, 0);
    device_make(fixture.base.kernels);
    fixture.base.kernels->host_memory = 1;
    assert_int_equal(tv_engine_fixture_judge(&fixture), -EIO);
    print_message("host: %s\n", fixture.detail);
    tv_fixture_close(&fixture.base);
}

/* A context of a few rows still has both forms judged. */
static void short_contexts_are_judged(void **state)
{
    static const int32_t lengths[] = {2, 3, 17, 39, 41};
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct tv_engine_fixture fixture;
        fixture_open(&fixture, "v3", TV_F32, lengths[i]);
        if (tv_engine_fixture_judge(&fixture) != 0) {
            fail_msg("max_len %d: %s", lengths[i], fixture.detail);
        }
        tv_engine_fixture_close(&fixture);
        fixture_open(&fixture, "v3", TV_F32, lengths[i]);
        assert_int_equal(tv_plant(fixture.base.kernels, "router"), 0);
        assert_int_equal(tv_engine_fixture_judge(&fixture), -EIO);
        tv_fixture_close(&fixture.base);
    }
}

/* A tiny checkpoint in which one tensor is this number throughout, judged: the word of the start.
 */
static int absurd_start(const char *tensor, float value, enum tv_dtype dtype, int as_device,
                        char *detail, size_t bytes)
{
    static struct tv_tiny_model tiny; /* large */
    struct tv_engine_fixture fixture;
    char dir[256];
    tv_tiny_folder(dir, sizeof dir);
    tv_tiny_init(&tiny, 1021);
    struct tv_tiny_tensor *changed = tv_tiny_find(&tiny, tensor);
    for (size_t i = 0; i < changed->count; i++) {
        changed->values[i] = value != 0.0f ? value : changed->values[i];
    }
    tv_tiny_write(&tiny, dir);
    tv_tiny_finish(&tiny);
    const struct tv_fixture_options base = {.backend = "cpu",
                                            .dir = dir,
                                            .page_size = 16,
                                            .rows_max = 64,
                                            .requests_max = 2,
                                            .pages = 16,
                                            .threads = 1,
                                            .kv_dtype = dtype};
    memset(&fixture, 0, sizeof fixture);
    tv_fixture_open(&fixture.base, &base);
    if (as_device) {
        device_make(fixture.base.kernels);
    }
    if (value == 0.0f) {
        nothing_finite(fixture.base.kernels);
    }
    int rc = tv_engine_fixture_judge(&fixture);
    (void)snprintf(detail, bytes, "%s", fixture.detail);
    if (rc == 0) {
        fixture.engine->ops->destroy(fixture.engine);
    }
    tv_fixture_close(&fixture.base);
    tv_tiny_folder_remove(dir);
    return rc;
}

/* Finite weights whose sums overflow whoever computes them are the checkpoint's fault; a fast form
 * that alone is not finite is ours, also where the oracle takes over what attention gave. */
static void absurd_weights_are_the_checkpoints_fault(void **state)
{
    static const char *const tensors[] = {"model.layers.0.self_attn.kv_a_layernorm.weight",
                                          "model.layers.1.self_attn.o_proj.weight",
                                          "lm_head.weight"};
    (void)state;
    for (int form = 0; form < 3; form++) {
        enum tv_dtype dtype = form == 0 ? TV_F32 : TV_BF16;
        char detail[320];
        for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; t++) {
            int rc = absurd_start(tensors[t], 1e38f, dtype, form == 2, detail, sizeof detail);
            print_message("%s: %d, %s\n", tensors[t], rc, detail);
            assert_int_equal(rc, -EDOM);
            assert_non_null(strstr(detail, "no finite logits"));
        }
        int rc = absurd_start("lm_head.weight", 0.0f, dtype, form == 2, detail, sizeof detail);
        print_message("the fast form alone: %d, %s\n", rc, detail);
        assert_int_equal(rc, -EIO);
    }
}

/* A weight of one form alone: verify takes keys transposed, so k_up is prefill's. */
static void self_test_sees_a_changed_weight_of_prefill_b54(void **state)
{
    (void)state;
    struct tv_engine_fixture fixture;
    char detail[200];
    fixture_open(&fixture, "v3", TV_F32, 0);
    assert_int_equal(tv_engine_fixture_judge(&fixture), 0);
    struct tv_engine *engine = fixture.engine;
    const struct tv_model_weights *weights = tv_model_weights(fixture.base.model);
    uintptr_t address = (uintptr_t)weights->layers[1].k_up.data; /* ours to break: host memory */
    uint16_t *element = (uint16_t *)address + 5;
    *element = (uint16_t)(*element ^ 0x0040u);
    assert_int_equal(engine->ops->self_test(engine, detail, sizeof detail), -EIO);
    assert_non_null(strstr(detail, "prefill row"));
    *element = (uint16_t)(*element ^ 0x0040u);
    assert_int_equal(engine->ops->self_test(engine, detail, sizeof detail), 0);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_forms_do_not_start_b28),
        cmocka_unit_test(right_forms_start),
        cmocka_unit_test(rounded_probabilities_of_a_device),
        cmocka_unit_test(short_contexts_are_judged),
        cmocka_unit_test(absurd_weights_are_the_checkpoints_fault),
        cmocka_unit_test(self_test_sees_a_changed_weight_of_prefill_b54),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
