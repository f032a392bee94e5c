/*
 * test_shadow_draw.c - the oracle's draw: the contract's check values, equal to the backend's over
 * random rows and settings, and a fault of the backend's draw that the shadow then sees.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "shadow/round.h"
#include "shadow_fixture.h"

#define VOCAB 300
#define ROWS  4000

static void check_values(void **state)
{
    (void)state;
    assert_true(fabs(tv_shadow_gumbel(UINT64_C(1234567890123456789), 812, 17) - 6.1868095) < 1e-6);
    double u = ((double)0x6627e8d5u + 0.5) / 4294967296.0;
    assert_true(tv_shadow_gumbel(0, 0, 0) == (double)(float)-log(-log(u)));
}

static float uniform(struct tv_test_random *random, float low, float high)
{
    return low + (high - low) * (float)tv_test_random_next(random) / 4294967296.0f;
}

/* Settings at and off their edges, each filter alone and together. */
static struct tv_sampling sampling_random(struct tv_test_random *random)
{
    static const float temperatures[] = {0.0f, 9e-5f, 1e-4f, 0.3f, 0.8f, 1.0f, 2.5f, 100.0f};
    struct tv_sampling sampling = {.temperature = temperatures[tv_test_random_below(random, 8)],
                                   .top_p = 1.0f,
                                   .seed = (uint64_t)tv_test_random_next(random) << 32 |
                                           tv_test_random_next(random)};
    if (tv_test_random_below(random, 2) == 0) {
        sampling.top_p = uniform(random, 0.0f, 1.0f);
    }
    if (tv_test_random_below(random, 2) == 0) {
        sampling.top_k = tv_test_random_below(random, VOCAB + 10);
    }
    if (tv_test_random_below(random, 2) == 0) {
        sampling.min_p = uniform(random, 0.0f, 0.5f);
    }
    return sampling;
}

static void equal_to_the_backend(void **state)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_test_random random = {.state = 20};
    struct tv_kernels *kernels = NULL;
    float logits[VOCAB];
    uint64_t workspace[VOCAB];
    (void)state;
    assert_int_equal(tv_kernels_create("cpu", &options, &kernels), 0);
    for (int32_t row = 0; row < tv_test_scaled(ROWS); row++) {
        float scale = row % 3 == 0 ? 0.0f : uniform(&random, 0.1f, 8.0f);
        for (int32_t t = 0; t < VOCAB; t++) { /* every other row has ties */
            logits[t] = uniform(&random, -scale, scale);
            logits[t] = row % 2 == 0 ? roundf(logits[t]) : logits[t];
        }
        struct tv_sampling sampling = sampling_random(&random);
        int32_t position = tv_test_random_below(&random, 100000);
        struct tv_draw fast = {0};
        struct tv_shadow_draw slow = {0};
        struct tv_draw_args args = {.rows = 1,
                                    .vocab = VOCAB,
                                    .logits = logits,
                                    .positions = &position,
                                    .sampling = &sampling,
                                    .draws = &fast,
                                    .workspace = workspace,
                                    .workspace_bytes = sizeof workspace};
        assert_int_equal(kernels->draw(kernels, &args), 0);
        assert_int_equal(tv_shadow_draw(logits, VOCAB, &sampling, position, &slow), 0);
        if (fast.token != slow.token) {
            fail_msg("row %d: %d, %d by the oracle", row, fast.token, slow.token);
        }
        assert_true(isinf(fast.margin) ? isinf(slow.margin)
                                       : fabs((double)fast.margin - slow.margin) <= 1e-4);
    }
    logits[7] = NAN;
    struct tv_sampling plain = {.temperature = 1.0f, .top_p = 1.0f};
    struct tv_shadow_draw none = {0};
    assert_int_equal(tv_shadow_draw(logits, VOCAB, &plain, 3, &none), 0);
    assert_int_equal(none.token, -1);
    kernels->destroy(kernels);
}

static int (*real_draw)(struct tv_kernels *k, const struct tv_draw_args *args);
static int fault_kind;

/* Filters forgotten, or noise of another position. */
static int draw_wrong(struct tv_kernels *k, const struct tv_draw_args *args)
{
    struct tv_draw_args wrong = *args;
    struct tv_sampling sampling = args->sampling[0];
    int32_t position = args->positions[0] + 1;
    sampling.top_p = 1.0f;
    if (fault_kind == 0) {
        wrong.sampling = &sampling;
    } else {
        wrong.positions = &position;
    }
    assert_int_equal(args->rows, 1); /* host memory: row by row */
    return real_draw(k, &wrong);
}

static void a_wrong_draw_is_a_violation(void **state)
{
    (void)state;
    for (fault_kind = 0; fault_kind < 2; fault_kind++) {
        struct bench bench;
        bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 0);
        struct tv_kernels *kernels = bench.fixture.base.kernels;
        real_draw = kernels->draw;
        kernels->draw = draw_wrong;
        int differing = 0;
        for (uint64_t seed = 0; seed < 12; seed++) {
            bench.rule = tv_test_sampled(bench.fixture.engine, 1.5f, seed);
            bench.rule.sampling.top_p = 0.3f;
            struct tv_shadow_block block = judged(&bench, FAULT_NONE, 0);
            assert_true(block.ran);
            differing += !block.tokens_equal;
        }
        assert_true(differing >= 3);
        kernels->draw = real_draw;
        struct tv_shadow_block block = judged(&bench, FAULT_NONE, 0);
        assert_true(block.ran && block.tokens_equal);
        bench_close(&bench);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(check_values),
        cmocka_unit_test(equal_to_the_backend),
        cmocka_unit_test(a_wrong_draw_is_a_violation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
