/*
 * test_poison.c - what TREEVERIFY_POISON does to the pool of a whole daemon, and to the fixtures'.
 *
 * B09, B24: poisoned, every row is NaN after the start, self-test included, and again once nobody
 * holds it. Not poisoned, a pool starts as zeros and keeps what was written. The suite's other
 * tests rely on this and do not look.
 */
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
#include "main.h"

#define ROWS 150 /* three pages, the last one in part */

static int64_t page_floats(const struct tv_cache *cache)
{
    const struct tv_cache_params *params = tv_cache_params(cache);
    return (int64_t)params->page_size * params->row_dim * params->layers;
}

/* Floats of the pool that are not NaN. */
static int64_t numbers(const struct tv_cache *cache)
{
    const struct tv_cache_params *params = tv_cache_params(cache);
    int64_t per_layer = params->pages * params->page_size * params->row_dim;
    int64_t count = 0;
    assert_int_equal(params->dtype, TV_F32);
    for (int32_t layer = 0; layer < params->layers; layer++) {
        const float *values = tv_cache_layer(cache, layer);
        for (int64_t i = 0; i < per_layer; i++) {
            count += isnan(values[i]) == 0;
        }
    }
    return count;
}

/* Prefill ROWS tokens and close the context: the pool before, meanwhile and after. */
static void pool_check(struct tv_engine *engine, int poisoned)
{
    struct tv_cache *cache = engine->cache;
    const struct tv_cache_params *params = tv_cache_params(cache);
    int64_t total = page_floats(cache) * params->pages;
    int64_t before = numbers(cache);
    struct tv_cache_counts counts;
    int32_t tokens[ROWS];
    tv_cache_counts(cache, &counts);
    assert_true(counts.free > ROWS / params->page_size);
    if (poisoned) { /* the self-test keeps a prefix of its own */
        assert_true(before <= counts.held * page_floats(cache));
    } else {
        assert_int_equal(before, total);
    }
    tv_test_prefix_fill(tokens, ROWS, 200, 1);
    struct tv_context *context = tv_test_context(engine);
    (void)tv_test_prefill(engine, context, tokens, ROWS, NULL);
    int64_t written = (int64_t)ROWS * params->row_dim * params->layers;
    assert_int_equal(numbers(cache), poisoned ? before + written : total);
    engine->ops->context_close(engine, context);
    assert_int_equal(numbers(cache), before);
}

/* The daemon's own way from the environment to an engine. */
static struct tv_engine *daemon_engine(const char *poison)
{
    char program[] = "treeverifyd", option[] = "--model", model[600], error[600] = "";
    char *argv[] = {program, option, model, NULL};
    static struct tv_config config;
    struct tv_engine *engine = NULL;
    (void)snprintf(model, sizeof model, "%s", tv_fixture_dir("v3"));
    assert_int_equal(setenv("TREEVERIFY_POISON", poison, 1), 0);
    assert_int_equal(setenv("TREEVERIFY_PAGES", "16", 1), 0);
    assert_int_equal(setenv("TREEVERIFY_THREADS", "1", 1), 0);
    if (tv_config_load(&config, 3, argv, error, sizeof error) != 0 ||
        tv_main_engine_open(&config, NULL, &engine, error, sizeof error) != 0) {
        fail_msg("%s", error);
    }
    return engine;
}

static void test_b09_b24_daemon_poisoned(void **state)
{
    (void)state;
    struct tv_engine *engine = daemon_engine("on");
    pool_check(engine, 1);
    tv_main_engine_close(engine);
}

static void test_daemon_not_poisoned(void **state)
{
    (void)state;
    struct tv_engine *engine = daemon_engine("off");
    pool_check(engine, 0);
    tv_main_engine_close(engine);
}

static void test_fixture_follows_the_variable(void **state)
{
    (void)state;
    static const char *const values[] = {NULL, "on", "off"};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        struct tv_engine_fixture_options options = {.model = "v3", .pages = 8};
        struct tv_engine_fixture fixture;
        assert_int_equal(values[i] == NULL ? unsetenv("TREEVERIFY_POISON")
                                           : setenv("TREEVERIFY_POISON", values[i], 1),
                         0);
        tv_engine_fixture_open(&fixture, &options);
        pool_check(fixture.engine, values[i] == NULL || strcmp(values[i], "on") == 0);
        tv_engine_fixture_close(&fixture);
    }
}

/* As the whole run was started. */
static void test_this_run(void **state)
{
    (void)state;
    struct tv_engine_fixture_options options = {.model = "v3", .pages = 8};
    struct tv_engine_fixture fixture;
    const char *text = getenv("TREEVERIFY_POISON");
    tv_engine_fixture_open(&fixture, &options);
    print_message("TREEVERIFY_POISON=%s\n", text != NULL ? text : "");
    pool_check(fixture.engine, text == NULL || strcmp(text, "on") == 0);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_this_run), /* before the others, which set the variable */
        cmocka_unit_test(test_b09_b24_daemon_poisoned),
        cmocka_unit_test(test_daemon_not_poisoned),
        cmocka_unit_test(test_fixture_follows_the_variable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
