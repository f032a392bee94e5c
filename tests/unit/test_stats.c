/*
 * test_stats.c - the text of counters and histograms: escaping, buckets, numbers, and no memory.
 */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "stats/stats.h"

static void test_labels_are_escaped(void **state)
{
    (void)state;
    struct tv_stats_text text = {0};
    const struct tv_stats_label labels[] = {{"a", "x\"y\\z\nw"}, {"b", ""}};
    tv_stats_family(&text, "f", "gauge", "one\\two\n\"three\"");
    tv_stats_sample(&text, labels, 2, 0.1);
    tv_stats_sample(&text, NULL, 0, -INFINITY);
    tv_stats_sample(&text, labels + 1, 1, NAN);
    tv_stats_count(&text, NULL, 0, UINT64_MAX);
    assert_string_equal(text.data, "# HELP f one\\\\two\\n\"three\"\n"
                                   "# TYPE f gauge\n"
                                   "f{a=\"x\\\"y\\\\z\\nw\",b=\"\"} 0.10000000000000001\n"
                                   "f -Inf\n"
                                   "f{b=\"\"} NaN\n"
                                   "f 18446744073709551615\n");
    assert_int_equal(text.bytes, strlen(text.data));
    tv_stats_text_finish(&text);
}

/* A value at a bound is within it; what is above all of them is in +Inf alone. */
static void test_buckets(void **state)
{
    (void)state;
    struct tv_stats_text text = {0};
    static const struct tv_histogram_bounds bounds = {3, {0.5, 1, 4}};
    static const double values[] = {0.5, 0.75, 1, 2, 4, 4.25, 100};
    struct tv_histogram histogram = {0};
    const struct tv_stats_label label = {"stage", "s"};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        tv_stats_observe(&histogram, &bounds, values[i]);
    }
    tv_stats_family(&text, "h", "histogram", "x");
    tv_stats_histogram(&text, &label, &histogram, &bounds);
    assert_string_equal(text.data, "# HELP h x\n# TYPE h histogram\n"
                                   "h_bucket{stage=\"s\",le=\"0.5\"} 1\n"
                                   "h_bucket{stage=\"s\",le=\"1\"} 3\n"
                                   "h_bucket{stage=\"s\",le=\"4\"} 5\n"
                                   "h_bucket{stage=\"s\",le=\"+Inf\"} 7\n"
                                   "h_sum{stage=\"s\"} 112.5\n"
                                   "h_count{stage=\"s\"} 7\n");
    tv_stats_text_finish(&text);
}

static void bounds_check(const struct tv_histogram_bounds *bounds)
{
    assert_in_range(bounds->count, 1, TV_STATS_BUCKETS);
    for (int32_t i = 1; i < bounds->count; i++) {
        assert_true(bounds->bounds[i] > bounds->bounds[i - 1]);
    }
}

static void test_bounds_ascend(void **state)
{
    (void)state;
    bounds_check(&tv_stats_seconds);
    bounds_check(&tv_stats_nodes);
    bounds_check(&tv_stats_depths);
    bounds_check(&tv_stats_errors);
}

/* drafts = accepted + rejected, and each accepted one has a place. */
static void test_judged(void **state)
{
    (void)state;
    struct tv_stats *stats = calloc(1, sizeof *stats);
    assert_non_null(stats);
    uint64_t accepted = 0, drafted = 0, placed = 0;
    for (int32_t drafts = 0; drafts < 300; drafts++) {
        int32_t taken = drafts * 7 % (drafts + 1);
        tv_stats_judged(stats, drafts, taken);
        accepted += (uint64_t)taken;
        drafted += (uint64_t)drafts;
    }
    for (size_t i = 0; i < TV_STATS_POSITIONS; i++) {
        placed += stats->accepted_at[i];
    }
    assert_int_equal(stats->drafts, 299); /* the one without a node was no draft */
    assert_int_equal(stats->draft_tokens, drafted);
    assert_int_equal(stats->accepted_tokens, accepted);
    assert_int_equal(placed, accepted);
    assert_true(stats->accepted_at[TV_STATS_POSITIONS - 1] >
                stats->accepted_at[TV_STATS_POSITIONS - 2]);
    free(stats);
}

static void test_statuses_have_places(void **state)
{
    (void)state;
    static const int known[] = {200, 201, 202, 204, 206, 400, 401, 403, 404, 405,
                                408, 409, 410, 413, 415, 422, 429, 500, 503, 504};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        assert_int_equal(tv_stats_status_at(tv_stats_status_index(known[i])), known[i]);
    }
    assert_int_equal(tv_stats_status_index(299), TV_STATS_STATUSES - 1);
    assert_int_equal(tv_stats_status_at(TV_STATS_STATUSES - 1), 0);
}

#define THREADS 4
#define EACH    5000

static struct tv_histogram shared;
static _Atomic uint64_t shared_count;

static void *observe_many(void *context)
{
    (void)context;
    for (int i = 0; i < EACH; i++) {
        tv_stats_observe(&shared, &tv_stats_nodes, 3);
        tv_stats_add(&shared_count, 2);
    }
    return NULL;
}

static void test_threads_lose_nothing(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    uint64_t seen = 0;
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, observe_many, NULL), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    for (size_t i = 0; i <= TV_STATS_BUCKETS; i++) {
        seen += shared.buckets[i];
    }
    assert_int_equal(seen, THREADS * EACH);
    assert_true(shared.sum == 3.0 * THREADS * EACH);
    assert_int_equal(shared_count, 2 * THREADS * EACH);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_labels_are_escaped),   cmocka_unit_test(test_buckets),
        cmocka_unit_test(test_bounds_ascend),        cmocka_unit_test(test_judged),
        cmocka_unit_test(test_statuses_have_places), cmocka_unit_test(test_threads_lose_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
