/*
 * test_verify_rounding.c - starts of a model whose products are not exact: judged with exact ones,
 * compared with itself, and refused when the other form is not the same model's.
 *
 * On the reference backend, which has such products.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "verify/engine.h"

static void fixture_open(struct tv_engine_fixture *fixture, const char *model,
                         enum tv_products products, enum tv_dtype dtype)
{
    struct tv_fixture_options base = {.backend = "ref",
                                      .dir = tv_fixture_dir(model),
                                      .page_size = 16,
                                      .rows_max = 64,
                                      .requests_max = 2,
                                      .pages = 16,
                                      .threads = 1,
                                      .kv_dtype = dtype,
                                      .products = products};
    memset(fixture, 0, sizeof *fixture);
    tv_fixture_open(&fixture->base, &base);
}

/* Rounding is seen, stays far inside the bounds, counts as noise, and is what is repeated. */
static void rounded_products_start(void **state)
{
    static const char *const models[] = {"v3", "v2lite", "moonlight"};
    (void)state;
    for (size_t m = 0; m < 2 * sizeof models / sizeof models[0]; m++) {
        struct tv_engine_fixture fixture;
        char detail[200];
        fixture_open(&fixture, models[m / 2], TV_PRODUCTS_BF16, m % 2 == 0 ? TV_F32 : TV_BF16);
        if (tv_engine_fixture_judge(&fixture) != 0) {
            fail_msg("%s: %s", models[m / 2], fixture.detail);
        }
        const struct tv_engine *engine = fixture.engine;
        const struct tv_rounding *cost = &engine->rounding;
        print_message("%s %s: %d of %d rows, mean KL %.3g, logits %.3g\n", models[m / 2],
                      m % 2 == 0 ? "f32" : "bf16", cost->top1_equal, cost->rows, cost->kl_mean,
                      cost->logit_max);
        assert_int_equal(cost->rows, 20);
        assert_true(cost->top1_equal >= 16);
        assert_true(cost->kl_mean > 1e-9 && cost->kl_mean < 0.02);
        assert_true(cost->logit_max > 1e-4);
        assert_true(engine->noise >= cost->logit_max);
        struct tv_engine_facts facts;
        tv_engine_facts(engine, &facts);
        assert_string_equal(facts.products, "bf16");
        assert_int_equal(engine->ops->self_test(fixture.engine, detail, sizeof detail), 0);
        assert_non_null(strstr(detail, "whose exact products the path oracle judged"));
        tv_engine_fixture_close(&fixture);
    }
}

static void exact_products_are_not_compared(void **state)
{
    struct tv_engine_fixture fixture;
    struct tv_engine_facts facts;
    (void)state;
    fixture_open(&fixture, "v3", TV_PRODUCTS_EXACT, TV_F32);
    assert_int_equal(tv_engine_fixture_judge(&fixture), 0);
    assert_int_equal(fixture.engine->rounding.rows, 0);
    assert_true(fixture.engine->noise < 1e-4);
    tv_engine_facts(fixture.engine, &facts);
    assert_string_equal(facts.products, "exact");
    tv_engine_fixture_close(&fixture);
}

static int (*linear)(struct tv_kernels *k, const struct tv_linear *args);
static int exact_calls, rounded_calls;

/* The rounded form alone computes one column of each product. */
static int linear_wrong(struct tv_kernels *k, const struct tv_linear *args)
{
    struct tv_linear wrong = *args;
    *(args->products == TV_PRODUCTS_EXACT ? &exact_calls : &rounded_calls) += 1;
    if (args->products != TV_PRODUCTS_EXACT && args->n > 1 && args->groups == 1) {
        wrong.n = 1; /* the others keep what the pass before left there */
    }
    return linear(k, &wrong);
}

static void a_wrong_rounded_form_does_not_start(void **state)
{
    struct tv_engine_fixture fixture;
    (void)state;
    fixture_open(&fixture, "v3", TV_PRODUCTS_BF16, TV_F32);
    linear = fixture.base.kernels->linear;
    fixture.base.kernels->linear = linear_wrong;
    exact_calls = rounded_calls = 0;
    assert_int_equal(tv_engine_fixture_judge(&fixture), -EIO);
    print_message("%s\n", fixture.detail);
    assert_non_null(strstr(fixture.detail, "bf16 products beside exact ones"));
    assert_true(exact_calls > 0 && rounded_calls > 0);
    tv_fixture_close(&fixture.base);
}

static const void *routers[8];
static int32_t router_layers, router_calls;

static int linear_of_routers(struct tv_kernels *k, const struct tv_linear *args)
{
    for (int32_t i = 0; i < router_layers; i++) {
        if (args->w == routers[i]) {
            router_calls++;
            assert_int_equal(args->products, TV_PRODUCTS_EXACT);
        }
    }
    return linear(k, args);
}

static void routers_stay_exact(void **state)
{
    struct tv_engine_fixture fixture;
    (void)state;
    fixture_open(&fixture, "v3", TV_PRODUCTS_BF16, TV_F32);
    const struct tv_model_weights *weights = tv_model_weights(fixture.base.model);
    router_layers = tv_model_config(fixture.base.model)->layers;
    assert_true(router_layers <= 8);
    for (int32_t i = 0; i < router_layers; i++) {
        routers[i] = weights->layers[i].router.data; /* NULL: no product has such weights */
    }
    linear = fixture.base.kernels->linear;
    fixture.base.kernels->linear = linear_of_routers;
    assert_int_equal(tv_engine_fixture_judge(&fixture), 0);
    assert_true(router_calls > 0);
    tv_engine_fixture_close(&fixture);
}

/* By hand: what the numbers are, and where the bounds lie. */
static void numbers_by_hand(void **state)
{
    const float even[4] = {0.0f, 0.0f, logf(2.0f), 0.0f};
    const float other[4] = {0.0f, 0.0f, logf(2.0f), logf(3.0f)};
    const float none[4] = {0.0f, NAN, 1.0f, 0.0f};
    struct tv_rounding cost;
    char detail[200] = "";
    (void)state;
    assert_int_equal(tv_engine_rounding_measure(even, even, 1, 4, 1, &cost, detail, sizeof detail),
                     0);
    assert_int_equal(cost.rows, 1);
    assert_int_equal(cost.top1_equal, 1);
    assert_true(fabs(cost.kl_mean) < 1e-12 && cost.logit_max == 0.0);
    /* p = 1/5 1/5 2/5 1/5, q = 1/7 1/7 2/7 3/7 */
    assert_int_equal(tv_engine_rounding_measure(even, other, 1, 4, 1, &cost, detail, sizeof detail),
                     -EIO);
    double kl = 0.8 * log(7.0 / 5.0) + 0.2 * log(7.0 / 15.0);
    assert_true(fabs(cost.kl_mean - kl) < 1e-6);
    assert_int_equal(cost.top1_equal, 0);
    assert_true(fabs(cost.logit_max - log(3.0)) < 1e-6);
    assert_non_null(strstr(detail, "0 of 1 rows"));
    for (int bounded = 0; bounded < 2; bounded++) { /* numbers are asked of everybody */
        assert_int_equal(
            tv_engine_rounding_measure(even, none, 1, 4, bounded, &cost, detail, sizeof detail),
            -EIO);
    }
    assert_int_equal(tv_engine_rounding_measure(even, other, 1, 4, 0, &cost, detail, sizeof detail),
                     0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounded_products_start),
        cmocka_unit_test(exact_products_are_not_compared),
        cmocka_unit_test(a_wrong_rounded_form_does_not_start),
        cmocka_unit_test(routers_stay_exact),
        cmocka_unit_test(numbers_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
