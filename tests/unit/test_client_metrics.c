/*
 * test_client_metrics.c - what `treeverify top` reads of Prometheus text, and the drafts and
 * figures of `treeverify bench`.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/cli/bench.h"
#include "clients/cli/metrics.h"

static const char early[] = "# HELP t_seconds Time.\n"
                            "# TYPE t_seconds histogram\n"
                            "t_seconds_bucket{stage=\"gpu\",le=\"0.001\"} 1\n"
                            "t_seconds_bucket{stage=\"gpu\",le=\"0.01\"} 1\n"
                            "t_seconds_bucket{stage=\"gpu\",le=\"+Inf\"} 1\n"
                            "t_seconds_count{stage=\"gpu\"} 1\n"
                            "sessions{state=\"idle\"} 3\n"
                            "sessions{state=\"busy\"} 2\n"
                            "plain_total 7\n"
                            "not a sample\n"
                            "{broken\n"
                            "cut{a=\"b\" 4\n"
                            "last_without_end 1e3";
static const char late[] = "t_seconds_bucket{stage=\"gpu\",le=\"0.001\"} 1\n"
                           "t_seconds_bucket{stage=\"gpu\",le=\"0.01\"} 9\n"
                           "t_seconds_bucket{stage=\"gpu\",le=\"+Inf\"} 11\n"
                           "t_seconds_bucket{stage=\"other\",le=\"0.001\"} 500\n"
                           "t_seconds_count{stage=\"gpu\"} 11\n"
                           "t_seconds_count{stage=\"other\"} 500\n"
                           "plain_total 10\n";

static void samples_and_sums(void **state)
{
    (void)state;
    struct tv_metrics one, two;
    const struct tv_metrics none = {0};
    assert_int_equal(tv_metrics_read(early, &one), 0);
    assert_int_equal(tv_metrics_read(late, &two), 0);
    assert_int_equal(one.count, 8);
    assert_true(tv_metrics_sum(&one, "sessions", NULL) == 5.0);
    assert_true(tv_metrics_sum(&one, "sessions", "state=\"idle\"") == 3.0);
    assert_true(tv_metrics_sum(&one, "session", NULL) == 0.0);
    assert_true(tv_metrics_sum(&one, "last_without_end", NULL) == 1000.0);
    assert_true(tv_metrics_grown(&two, &one, "plain_total", NULL) == 3.0);
    assert_true(tv_metrics_grown(&one, &none, "plain_total", NULL) == 7.0);
    tv_metrics_finish(&one);
    tv_metrics_finish(&two);
    assert_int_equal(tv_metrics_read("", &one), 0);
    assert_int_equal(one.count, 0);
    tv_metrics_finish(&one);
}

/* Ten values between the two scrapes: eight from 1 to 10 ms, two beyond the last border. */
static void quantiles(void **state)
{
    (void)state;
    static const char gpu[] = "stage=\"gpu\"";
    const struct tv_metrics none = {0};
    struct tv_metrics one, two;
    assert_int_equal(tv_metrics_read(early, &one), 0);
    assert_int_equal(tv_metrics_read(late, &two), 0);
    double half = tv_metrics_quantile(&two, &one, "t_seconds", gpu, 0.5);
    assert_true(half > 0.001 + 0.009 * 0.624 && half < 0.001 + 0.009 * 0.626); /* 5 of 8 */
    assert_true(tv_metrics_quantile(&two, &one, "t_seconds", gpu, 0.99) == 0.01);
    assert_true(tv_metrics_quantile(&one, &none, "t_seconds", gpu, 0.5) == 0.0005);
    assert_true(tv_metrics_quantile(&one, &one, "t_seconds", gpu, 0.5) == -1.0);
    assert_true(tv_metrics_quantile(&two, &none, "t_seconds", "stage=\"none\"", 0.5) == -1.0);
    tv_metrics_finish(&one);
    tv_metrics_finish(&two);
}

/* A tree is a chain of the text's tokens and wrong ones beside it, each edge once, within limits.
 */
static void drafts_are_as_good_as_asked_for(void **state)
{
    (void)state;
    int32_t words[40], tokens[TV_CLIENT_NODES_MAX], parents[TV_CLIENT_NODES_MAX];
    uint64_t random = tv_synthetic_seed(5);
    for (int32_t i = 0; i < 40; i++) {
        words[i] = (i * 37) % 200;
    }
    const struct tv_synthetic_text text = {
        .tokens = words, .prompt_count = 4, .count = 40, .vocab = 200};
    for (int32_t at = 4; at < 40; at++) {
        const struct tv_client_state now = {.committed_len = at,
                                            .pending = words[at],
                                            .max_nodes = 20,
                                            .max_depth = 6,
                                            .max_len = 44};
        int32_t count = tv_synthetic_draft(&text, &now, 64, 3, &random, tokens, parents);
        int32_t right = 39 - at < 3 ? 39 - at : 3;
        assert_int_equal(count, 20);
        assert_int_equal(tokens[0], words[at]);
        assert_int_equal(parents[0], -1);
        for (int32_t i = 1; i < count; i++) {
            assert_in_range(parents[i], 0, i - 1);
            assert_in_range(tokens[i], 0, 199);
            int truth = at + 1 + parents[i] < 40 && parents[i] <= right &&
                        tokens[i] == words[at + 1 + parents[i]];
            assert_int_equal(truth, i <= right);
            for (int32_t j = 1; j < i; j++) {
                assert_false(parents[i] == parents[j] && tokens[i] == tokens[j]);
            }
        }
    }
    const struct tv_client_state end = {
        .committed_len = 39, .pending = words[39], .max_nodes = 20, .max_depth = 6, .max_len = 40};
    assert_int_equal(tv_synthetic_draft(&text, &end, 64, 3, &random, tokens, parents), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(samples_and_sums),
        cmocka_unit_test(quantiles),
        cmocka_unit_test(drafts_are_as_good_as_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
