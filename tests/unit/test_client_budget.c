/*
 * test_client_budget.c - the size of tree that `generate --nodes auto` sends: against a search over
 * all sizes, at the ends of what is known, and as it learns.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "clients/cli/budget.h"

#define NODES 64

/* Chances of a drafter that is right with `first` at once, and less and less. */
static void fill(double chances[NODES], double first)
{
    chances[0] = 1.0;
    for (int i = 1; i < NODES; i++) {
        chances[i] = first * pow(0.9, i - 1);
    }
}

static struct tv_client_round round_of(int32_t drafts, int64_t gpu_us, int64_t rtt_us)
{
    return (struct tv_client_round){.node_count = 1 + drafts,
                                    .attempts = 1,
                                    .gpu_us = gpu_us,
                                    .rtt_us = rtt_us,
                                    .cost_nodes = {1, 16, 64},
                                    .cost_us = {1000, 2500, 10000},
                                    .cost_count = 3};
}

static void nothing_known_takes_all(void **state)
{
    (void)state;
    const struct tv_budget budget = {0};
    double chances[NODES];
    fill(chances, 0.5);
    assert_int_equal(tv_budget_fit(&budget, chances, NODES), NODES);
    assert_int_equal(tv_budget_fit(&budget, chances, 1), 1);
}

static void the_best_rate_of_all_sizes(void **state)
{
    (void)state;
    static const double firsts[] = {0.0, 0.02, 0.2, 0.6, 0.99};
    static const double rests[] = {0.0, 400.0, 20000.0};
    double chances[NODES];
    int32_t before = 0;
    for (size_t r = 0; r < sizeof(rests) / sizeof(rests[0]); r++) {
        for (size_t f = 0; f < sizeof(firsts) / sizeof(firsts[0]); f++) {
            struct tv_budget budget = {.cost_nodes = {1, 16, 64},
                                       .cost_us = {1000, 2500, 10000},
                                       .cost_count = 3,
                                       .rest_us = rests[r]};
            fill(chances, firsts[f]);
            double best = 0.0, tokens = 0.0;
            int32_t wanted = 0;
            for (int32_t n = 1; n <= NODES; n++) {
                tokens += chances[n - 1];
                double us = n <= 16 ? 1000.0 + 100.0 * (n - 1) : 2500.0 + 156.25 * (n - 16);
                if (tokens / (us + rests[r] + 1.0) > best) {
                    best = tokens / (us + rests[r] + 1.0);
                    wanted = n;
                }
            }
            assert_int_equal(tv_budget_fit(&budget, chances, NODES), wanted);
            assert_true(f == 0 || wanted >= before); /* better drafts, larger trees */
            before = wanted;
        }
        assert_true(before > 8);
    }
}

/* Behind the last measured size its line goes on, and no size is cheaper than a smaller one. */
static void costs_beyond_what_was_measured(void **state)
{
    (void)state;
    double chances[NODES];
    fill(chances, 0.9);
    struct tv_budget steep = {
        .cost_nodes = {1, 4}, .cost_us = {1000, 9000}, .cost_count = 2, .rest_us = 0.0};
    assert_int_equal(tv_budget_fit(&steep, chances, NODES), 1);
    struct tv_budget falling = {
        .cost_nodes = {1, 4}, .cost_us = {1000, 600}, .cost_count = 2, .rest_us = 0.0};
    assert_int_equal(tv_budget_fit(&falling, chances, NODES), NODES);
    struct tv_budget one = {.cost_nodes = {8}, .cost_us = {1000}, .cost_count = 1};
    assert_int_equal(tv_budget_fit(&one, chances, NODES), NODES);
}

static void what_came_of_promises(void **state)
{
    (void)state;
    double chances[NODES];
    struct tv_budget good = {0}, bad = {0};
    fill(chances, 0.5);
    for (int i = 0; i < 40; i++) {
        const struct tv_client_round right = round_of(3, 1500, 1700),
                                     wrong = round_of(0, 1500, 1700);
        tv_budget_learn(&good, 3.0, 1, &right);
        tv_budget_learn(&bad, 3.0, 1, &wrong);
    }
    assert_int_equal(good.cost_count, 3);
    assert_true(fabs(good.rest_us - 200.0) < 1.0);
    assert_true(fabs(good.came / good.said - 1.0) < 1e-9);
    assert_int_equal(bad.came, 0);
    assert_int_equal(tv_budget_fit(&bad, chances, NODES), 1);
    assert_true(tv_budget_fit(&good, chances, NODES) > 4);
}

/* A round that was recovered, or a link that other rounds used too, says nothing of the next one.
 */
static void what_is_not_learnt(void **state)
{
    (void)state;
    struct tv_budget budget = {0};
    struct tv_client_round round = round_of(3, 1500, 90000);
    round.recovered = TV_CLIENT_RESYNC;
    tv_budget_learn(&budget, 2.0, 1, &round);
    assert_true(budget.said == 0.0 && budget.rounds == 0);
    assert_int_equal(budget.cost_count,
                     3); /* costs are the server's, whatever became of the round */
    round = round_of(3, 1500, 90000);
    tv_budget_learn(&budget, 2.0, 0, &round);
    round.attempts = 2;
    tv_budget_learn(&budget, 2.0, 1, &round);
    assert_true(budget.said > 3.0 && budget.rounds == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_known_takes_all),
        cmocka_unit_test(the_best_rate_of_all_sizes),
        cmocka_unit_test(costs_beyond_what_was_measured),
        cmocka_unit_test(what_came_of_promises),
        cmocka_unit_test(what_is_not_learnt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
