/*
 * test_kernels_draw.c - the counter generator's check values and the meaning of sampling: filters,
 * ties, odd settings (B22), one counter per decision and the distribution itself (B17).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/philox.h"

enum { VOCAB_MAX = 64 };

static struct tv_kernels *backend(void)
{
    struct tv_kernels *k = NULL;
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~(uint64_t)0};
    assert_int_equal(tv_kernels_create("cpu", &options, &k), 0);
    return k;
}

static struct tv_draw draw_one(const float *logits, int32_t vocab, struct tv_sampling sampling,
                               int32_t position)
{
    struct tv_kernels *k = backend();
    uint64_t keys[VOCAB_MAX];
    struct tv_draw draw;
    struct tv_draw_args args = {.rows = 1, .vocab = vocab, .logits = logits};
    args.positions = &position;
    args.sampling = &sampling;
    args.draws = &draw;
    args.workspace = keys;
    args.workspace_bytes = sizeof keys;
    assert_int_equal(k->draw(k, &args), 0);
    k->destroy(k);
    return draw;
}

static void test_philox_check_values(void **state)
{
    (void)state;
    struct tv_philox_block zero = {{0, 0, 0, 0}};
    struct tv_philox_block block = tv_philox_generate(zero, 0);
    assert_int_equal(block.word[0], 0x6627e8d5u);
    assert_int_equal(block.word[1], 0xe169c58du);
    assert_int_equal(block.word[2], 0xbc57ac4cu);
    assert_int_equal(block.word[3], 0x9b00dbd8u);
    uint32_t x = tv_philox_word(1234567890123456789u, 812, 17, TV_PHILOX_TARGET);
    assert_int_equal(x, 0xff795f2au);
    assert_true(tv_philox_gumbel(x) == 6.1868095f);
    assert_true(tv_philox_gumbel(0xffffffffu) < TV_PHILOX_GUMBEL_MAX);
    assert_true(isfinite(tv_philox_gumbel(0)));
}

/* Coins and the residual's noise are words of their own, which the target's draws do not have. */
static void test_purposes_have_their_own_words(void **state)
{
    (void)state;
    const uint64_t seed = 1234567890123456789u;
    assert_int_equal(tv_philox_word(seed, 812, 17, TV_PHILOX_COIN), 0x823959c4u);
    assert_true(tv_kernels_coin(seed, 812, 17) == (0x823959c4u + 0.5) / 4294967296.0);
    assert_int_equal(tv_philox_word(seed, 812, 17, TV_PHILOX_RESIDUAL), 0xa38eda91u);
    assert_true(tv_kernels_residual_noise(seed, 812, 17) == tv_philox_gumbel(0xa38eda91u));
}

/* The draw is the documented argmax, counter by counter. */
static void test_draw_is_gumbel_max(void **state)
{
    (void)state;
    float logits[40];
    struct tv_sampling s = {.temperature = 0.7f, .top_p = 1.0f, .seed = 99};
    for (int i = 0; i < 40; i++) {
        logits[i] = (float)((i * 37) % 23) * 0.21f;
    }
    for (int32_t position = 0; position < 200; position++) {
        float best = -INFINITY, second = -INFINITY;
        int32_t token = -1;
        for (int32_t t = 0; t < 40; t++) {
            float score = logits[t] / 0.7f +
                          tv_philox_gumbel(tv_philox_word(99, (uint32_t)position, (uint32_t)t, 0));
            if (score > best) {
                second = best;
                best = score;
                token = t;
            } else if (score > second) {
                second = score;
            }
        }
        struct tv_draw draw = draw_one(logits, 40, s, position);
        assert_int_equal(draw.token, token);
        assert_true(draw.margin == best - second);
        assert_int_equal(draw.kept, 40);
    }
}

static void test_greedy_ties_and_logprob(void **state)
{
    (void)state;
    float logits[4] = {1.0f, 3.0f, 3.0f, -2.0f};
    struct tv_sampling s = {.temperature = 0.0f, .top_p = 0.1f, .top_k = 1, .min_p = 1.0f};
    struct tv_draw draw = draw_one(logits, 4, s, 0);
    double sum = exp(-2.0) + 1.0 + 1.0 + exp(-5.0);
    assert_int_equal(draw.token, 1);
    assert_true(draw.margin == 0.0f);
    assert_int_equal(draw.kept, 4);
    assert_true(fabs((double)draw.logprob + log(sum)) < 1e-6);
    draw = draw_one(logits, 1, s, 0);
    assert_true(isinf(draw.margin));
    assert_true(draw.logprob == 0.0f);
}

static void test_filters_keep_what_they_say(void **state)
{
    (void)state;
    /* probabilities 0.4, 0.3, 0.2, 0.1 at temperature 1, out of order */
    float logits[4] = {logf(0.2f), logf(0.4f), logf(0.1f), logf(0.3f)};
    static const struct {
        float top_p, min_p;
        int32_t top_k, kept;
        double mass;
    } cases[] = {
        {1.0f, 0.0f, 0, 4, 1.0},  {1.0f, 0.0f, 2, 2, 0.7},  {0.39f, 0.0f, 0, 1, 0.4},
        {0.45f, 0.0f, 0, 2, 0.7}, {0.75f, 0.0f, 0, 3, 0.9}, {1.0f, 0.6f, 0, 2, 0.7},
        {1.0f, 0.45f, 0, 3, 0.9}, {1.0f, 1.0f, 0, 1, 0.4},  {1e-9f, 0.0f, 0, 1, 0.4},
        {0.5f, 0.0f, 2, 1, 0.4},  {0.9f, 0.6f, 3, 2, 0.7},
    };
    /* {0.5, top_k 2}: of the renormalised 4/7 and 3/7 the first alone reaches one half */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct tv_sampling s = {.temperature = 1.0f};
        s.top_p = cases[i].top_p;
        s.min_p = cases[i].min_p;
        s.top_k = cases[i].top_k;
        s.seed = i;
        for (int32_t position = 0; position < 50; position++) {
            struct tv_draw draw = draw_one(logits, 4, s, position);
            assert_int_equal(draw.kept, cases[i].kept);
            double expected = (double)logits[draw.token] - log(cases[i].mass);
            assert_true(fabs((double)draw.logprob - expected) < 1e-5);
            assert_true(draw.kept > 1 || isinf(draw.margin));
            assert_true(draw.kept > 1 || draw.token == 1);
        }
    }
}

/* Equal logits at the edge of top_k and of top_p: the lower id stays. */
static void test_filter_ties_keep_lower_ids(void **state)
{
    (void)state;
    float logits[6] = {0.0f, -0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    int seen[6] = {0};
    for (int32_t position = 0; position < 100; position++) {
        struct tv_sampling s = {.temperature = 1.0f, .top_p = 1.0f, .top_k = 2, .seed = 3};
        seen[draw_one(logits, 6, s, position).token]++;
        s.top_k = 0;
        s.top_p = 0.34f; /* three of six */
        seen[draw_one(logits, 6, s, position).token]++;
    }
    assert_true(seen[0] > 0 && seen[1] > 0 && seen[2] > 0);
    assert_int_equal(seen[3] + seen[4] + seen[5], 0);
}

static void test_b22_odd_settings(void **state)
{
    (void)state;
    static const float temperatures[] = {0.0f, -0.0f, 1e-45f, 1e-6f, 1e-4f, 100.0f, 1e30f};
    static const float masses[] = {1e-9f, 0.5f, 1.0f};
    static const int32_t counts[] = {0, 1, 8, INT32_MAX};
    float logits[8] = {FLT_MAX, -FLT_MAX, 1e30f, -1e30f, 0.0f, 1.0f, -1.0f, FLT_MIN};
    for (size_t t = 0; t < 7; t++) {
        for (size_t p = 0; p < 3; p++) {
            for (size_t c = 0; c < 4; c++) {
                struct tv_sampling s = {.temperature = temperatures[t], .top_p = masses[p]};
                s.top_k = counts[c];
                s.seed = t * 16 + p * 4 + c;
                struct tv_draw draw = draw_one(logits, 8, s, 5);
                assert_in_range(draw.token, 0, 7);
                assert_in_range(draw.kept, 1, 8);
                assert_false(isnan(draw.margin));
                assert_true(draw.logprob <= 0.0f);
                if (t < 5) { /* greedy, or so cold that nothing else can win */
                    assert_int_equal(draw.token, 0);
                }
            }
        }
    }
}

static void test_not_finite_rows_have_no_token(void **state)
{
    (void)state;
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < 3; i++) {
        float logits[5] = {1.0f, 2.0f, bad[i], 0.0f, 0.0f};
        struct tv_sampling s = {.temperature = (float)i, .top_p = 1.0f};
        assert_int_equal(draw_one(logits, 5, s, 0).token, -1);
    }
}

/* Draws at many positions follow the softmax: 16 tokens, 15 degrees of freedom, p = 0.001. */
static void test_b17_distribution(void **state)
{
    (void)state;
    enum { VOCAB = 16, DRAWS = 200000 };
    float *logits = malloc((size_t)DRAWS * VOCAB * sizeof *logits);
    int32_t *positions = malloc(DRAWS * sizeof *positions);
    struct tv_sampling *sampling = malloc(DRAWS * sizeof *sampling);
    struct tv_draw *draws = malloc(DRAWS * sizeof *draws);
    uint64_t keys[VOCAB];
    double p[VOCAB], sum = 0.0, chi = 0.0;
    int counts[VOCAB] = {0};
    assert_true(logits && positions && sampling && draws);
    for (int i = 0; i < DRAWS; i++) {
        for (int t = 0; t < VOCAB; t++) {
            logits[i * VOCAB + t] = 0.25f * (float)((t * 5) % VOCAB);
        }
        positions[i] = i;
        sampling[i] = (struct tv_sampling){.temperature = 1.5f, .top_p = 1.0f, .seed = 7};
    }
    struct tv_draw_args args = {.rows = DRAWS, .vocab = VOCAB, .logits = logits};
    args.positions = positions;
    args.sampling = sampling;
    args.draws = draws;
    args.workspace = keys;
    args.workspace_bytes = sizeof keys;
    struct tv_kernels *k = backend();
    assert_int_equal(k->draw(k, &args), 0);
    for (int i = 0; i < DRAWS; i++) {
        counts[draws[i].token]++;
    }
    for (int t = 0; t < VOCAB; t++) {
        p[t] = exp((double)logits[t] / 1.5);
        sum += p[t];
    }
    for (int t = 0; t < VOCAB; t++) {
        double expected = DRAWS * p[t] / sum;
        chi += (counts[t] - expected) * (counts[t] - expected) / expected;
    }
    assert_true(chi < 37.70);
    k->destroy(k);
    free(logits);
    free(positions);
    free(sampling);
    free(draws);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_check_values),
        cmocka_unit_test(test_purposes_have_their_own_words),
        cmocka_unit_test(test_draw_is_gumbel_max),
        cmocka_unit_test(test_greedy_ties_and_logprob),
        cmocka_unit_test(test_filters_keep_what_they_say),
        cmocka_unit_test(test_filter_ties_keep_lower_ids),
        cmocka_unit_test(test_b22_odd_settings),
        cmocka_unit_test(test_not_finite_rows_have_no_token),
        cmocka_unit_test(test_b17_distribution),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
