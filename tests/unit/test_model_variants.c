/*
 * test_model_variants.c - variants of the architecture against logits of other implementations.
 *
 * B28 (YaRN factors), B29 (rope layout), B30 (routing), B32 (epsilons), B33 (nope and v of unequal
 * size), B39 (tied head), newer rope_parameters, f16 weights; which layers have experts, models
 * without shared ones, normalised and raw weights, 1, 3 and 5 heads.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model_fixture.h"

#define PIECE 64

/* The references of a variant. */
struct variant {
    char dir[512];
    int32_t *tokens, *positions, token_count, position_count;
    float *logits;
    int64_t width;
    double bound;
};

static void variant_read(const char *name, struct variant *variant)
{
    int64_t floats = 0;
    const char *golden = getenv("TV_GOLDEN_DIR");
    assert_non_null(golden);
    (void)snprintf(variant->dir, sizeof variant->dir, "%s/model_variants/%s", golden, name);
    variant->tokens = tv_refs_ints(variant->dir, "tokens", &variant->token_count);
    variant->positions = tv_refs_ints(variant->dir, "positions", &variant->position_count);
    variant->logits = tv_refs_floats(variant->dir, "logits", &floats);
    assert_non_null(variant->tokens);
    assert_non_null(variant->positions);
    assert_non_null(variant->logits);
    variant->width = floats / variant->position_count;
    variant->bound = tv_fixture_bound(variant->logits, floats);
}

static void variant_free(struct variant *variant)
{
    free(variant->tokens);
    free(variant->positions);
    free(variant->logits);
}

/* Advance to each reference position by prefill, and reach it by prefill or by a one-node tree. */
static void variant_run(const char *name, int absorbed)
{
    struct variant variant;
    struct tv_fixture fixture;
    struct tv_fixture_difference difference = {0};
    struct tv_cache_seq seq = {0};
    variant_read(name, &variant);
    struct tv_fixture_options options = {.backend = "cpu",
                                         .dir = variant.dir,
                                         .page_size = 64,
                                         .rows_max = PIECE,
                                         .requests_max = 1,
                                         .pages = 4096 / 64};
    tv_fixture_open(&fixture, &options);
    for (int32_t i = 0; i < variant.position_count; i++) {
        int32_t position = variant.positions[i];
        const int32_t *next = variant.tokens + seq.len;
        const float *logits;
        if (absorbed) {
            (void)tv_fixture_prefill(&fixture, &seq, next, position - seq.len, PIECE);
            logits = tv_fixture_chain(&fixture, &seq, variant.tokens + position, 1);
            tv_fixture_commit(&fixture, &seq, NULL, 1);
        } else {
            logits = tv_fixture_prefill(&fixture, &seq, next, position + 1 - seq.len, PIECE);
        }
        tv_fixture_compare(logits, variant.logits + i * variant.width, 1, variant.width,
                           &difference);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
    print_message("%s %s max_abs=%.2e bound=%.1e\n", name, absorbed ? "absorbed" : "expanded",
                  difference.max_abs, variant.bound);
    assert_int_equal(difference.argmax_wrong, 0);
    assert_true(difference.max_abs <= variant.bound);
    variant_free(&variant);
}

static void variant_both(const char *name)
{
    variant_run(name, 0);
    variant_run(name, 1);
}

static void test_b28_yarn_mscales(void **state)
{
    (void)state;
    variant_both("v2-mscale-differs");
    variant_both("v3-mscale-absent");
    variant_both("v3-mscale-all-zero");
}

static void test_b29_rope_halves(void **state)
{
    (void)state;
    variant_both("v3-rope-halves");
}

static void test_b30_group_limited(void **state)
{
    (void)state;
    variant_both("v2-group-limited");
}

static void test_b32_epsilons(void **state)
{
    (void)state;
    variant_both("v3-eps-small-hidden");
}

static void test_b33_b39_nope_is_not_v_tied_f16(void **state)
{
    (void)state;
    variant_both("v3-nope48-v64-tied");
}

/* The published code's placing of experts: layer index, from first_k_dense_replace on, every so
 * often; none at all, or in every layer. */
static void test_expert_layers(void **state)
{
    (void)state;
    variant_both("v2-freq-two-top-one");
    variant_both("v3-freq-two-no-shared");
    variant_both("v2-all-moe-no-shared");
    variant_both("v3-all-dense-one-head");
    variant_both("v2-no-experts");
}

static void test_norm_topk_prob(void **state)
{
    (void)state;
    variant_both("v3-norm-off-five-heads");
    variant_both("v2-norm-on-three-heads");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_b28_yarn_mscales),
        cmocka_unit_test(test_b29_rope_halves),
        cmocka_unit_test(test_b30_group_limited),
        cmocka_unit_test(test_b32_epsilons),
        cmocka_unit_test(test_b33_b39_nope_is_not_v_tied_f16),
        cmocka_unit_test(test_expert_layers),
        cmocka_unit_test(test_norm_topk_prob),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
