/*
 * test_sched_hint.c - the suggested size of trees, from planted counts and costs, and what a
 * verify's answer says of it.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched/hint.h"
#include "test_sched_fixture.h"

#define DEPTH_MAX 64

/* Chains of `depth` drafts of which each one is accepted with this chance, in many rounds. */
static struct tv_session_drafts chains(double accept, int32_t depth)
{
    struct tv_session_drafts drafts = {.nodes = 100 * depth, .levels = 100 * depth};
    for (int32_t d = 0; d < TV_SESSION_DEPTHS_MAX && d < depth; d++) {
        drafts.tried[d] = 100000;
        drafts.taken[d] = (int32_t)lround(100000.0 * accept);
    }
    return drafts;
}

static int32_t suggested(const struct tv_session_drafts *drafts, const int64_t (*points)[2],
                         int32_t count)
{
    return tv_sched_hint_nodes(drafts, points, count, 256, DEPTH_MAX);
}

static void before_anything_is_known_sizes_grow_in_steps(void **state)
{
    static const int64_t one[][2] = {{1, 500}}, eight[][2] = {{8, 500}};
    const struct tv_session_drafts none = {.nodes = 0};
    (void)state;
    assert_int_equal(tv_sched_hint_nodes(&none, NULL, 0, 256, DEPTH_MAX), TV_SCHED_HINT_FIRST);
    assert_int_equal(tv_sched_hint_nodes(&none, NULL, 0, 5, DEPTH_MAX), 5);
    assert_int_equal(suggested(&none, one, 1), 2);    /* never stuck at what was tried */
    assert_int_equal(suggested(&none, eight, 1), 10); /* behind that, 0.1 % is to be had */
    assert_int_equal(tv_sched_hint_nodes(&none, eight, 1, 9, DEPTH_MAX), 9);
}

/* Cost 100 + 10 n: E(n) / C(n) of chains is known in closed form. */
static void the_best_chain_is_found(void **state)
{
    static const int64_t line[][2] = {{1, 110}, {16, 260}, {128, 1380}};
    static const double chances[] = {0.0, 0.3, 0.6, 0.8, 0.95};
    (void)state;
    for (size_t c = 0; c < sizeof chances / sizeof chances[0]; c++) {
        struct tv_session_drafts drafts = chains(chances[c], TV_SESSION_DEPTHS_MAX);
        double rates[61] = {0.0}, best = 0.0, tokens = 0.0, reach = 1.0;
        int32_t nodes = 1;
        for (int32_t n = 1; n <= 60; n++, reach *= chances[c]) {
            tokens += reach;
            rates[n] = tokens / (101.0 + 10.0 * n);
            best = fmax(best, rates[n]);
        }
        while (rates[nodes] < 0.999 * best) {
            nodes++;
        }
        assert_int_equal(suggested(&drafts, line, 3), nodes);
    }
}

static void a_step_in_the_cost_ends_the_tree(void **state)
{
    /* nothing up to 32 nodes costs anything, behind that everything does */
    static const int64_t step[][2] = {{1, 1000}, {32, 1000}, {64, 64000}};
    const struct tv_session_drafts good = chains(0.9, TV_SESSION_DEPTHS_MAX);
    struct tv_session_drafts bad = chains(0.0, TV_SESSION_DEPTHS_MAX);
    (void)state;
    assert_int_equal(suggested(&good, step, 3), 32);
    assert_int_equal(suggested(&bad, step, 3), 1);
    bad.tried[0] = 0; /* one depth alone has no data: the others' word counts for it */
    assert_int_equal(suggested(&bad, step, 3), 1);
}

static void a_far_drafter_gets_larger_trees(void **state)
{
    static const int64_t line[][2] = {{1, 1100}, {64, 7400}};
    struct tv_session_drafts drafts = chains(0.8, TV_SESSION_DEPTHS_MAX);
    int32_t near = suggested(&drafts, line, 2);
    (void)state;
    drafts.apart_count = TV_SESSION_APART_MAX;
    for (int32_t i = 0; i < TV_SESSION_APART_MAX; i++) {
        drafts.apart_us[i] = i < 7 ? 900000000 : 40000; /* pauses of the user decide nothing */
    }
    int32_t far = suggested(&drafts, line, 2);
    assert_true(near > 1 && far > near && far < 40);
    drafts.nodes *= 3; /* three drafts in a level: as deep a tree has more nodes */
    assert_true(suggested(&drafts, line, 2) > far);
}

static void a_cost_that_falls_is_noise(void **state)
{
    static const int64_t dip[][2] = {{8, 2000}, {16, 2000}, {32, 100}};
    static const int64_t flat[][2] = {{8, 2000}, {16, 2000}, {32, 2000}};
    const struct tv_session_drafts drafts = chains(0.7, TV_SESSION_DEPTHS_MAX);
    (void)state;
    assert_int_equal(suggested(&drafts, dip, 3), suggested(&drafts, flat, 3));
}

static void walks_are_counted_by_depth(void **state)
{
    int32_t tokens[] = {9, 1, 2, 3, 4}, parents[] = {-1, 0, 0, 2, 3}, depths[] = {0, 1, 1, 2, 3};
    const struct tv_tree tree = {
        .count = 5, .depth = 3, .tokens = tokens, .parents = parents, .depths = depths};
    static const int32_t root[] = {0}, half[] = {0, 2}, whole[] = {0, 2, 3, 4};
    struct tv_session_drafts drafts = {.nodes = 0};
    (void)state;
    tv_session_drafts_take(&drafts, &tree, root, 1, TV_FINISH_NONE);
    tv_session_drafts_take(&drafts, &tree, half, 2, TV_FINISH_NONE);
    tv_session_drafts_take(&drafts, &tree, half, 2, TV_FINISH_STOP); /* no draft was refused */
    tv_session_drafts_take(&drafts, &tree, whole, 4, TV_FINISH_NONE);
    assert_int_equal(drafts.tried[0], 4);
    assert_int_equal(drafts.taken[0], 3);
    assert_int_equal(drafts.tried[1], 2);
    assert_int_equal(drafts.taken[1], 1);
    assert_int_equal(drafts.tried[2], 1);
    assert_int_equal(drafts.taken[2], 1);
    assert_int_equal(drafts.tried[3], 0);
    assert_int_equal(drafts.nodes, 16);
    assert_int_equal(drafts.levels, 12);
    for (int i = 0; i < 10000; i++) { /* old counts fade, shares stay */
        tv_session_drafts_take(&drafts, &tree, root, 1, TV_FINISH_NONE);
    }
    assert_true(drafts.tried[0] <= 64 && drafts.taken[0] == 0);
    assert_true(drafts.levels <= 1024 + 3);
    tv_session_drafts_ran(&drafts, 1000, 1500);
    assert_int_equal(drafts.apart_count, 0);
    tv_session_drafts_ran(&drafts, 1700, 1900);
    tv_session_drafts_ran(&drafts, 1800, 2000); /* staged: it begins before the last one's end */
    assert_int_equal(drafts.apart_count, 2);
    assert_int_equal(drafts.apart_us[0], 200);
    assert_int_equal(drafts.apart_us[1], 0);
}

/* As if this size had often been launched. */
static void plant(struct fixture *fixture, int32_t nodes, int64_t us)
{
    tv_sched_lock(fixture->sched);
    for (int i = 0; i < 15; i++) {
        tv_sched_curve_add(fixture->sched->curve, nodes, us);
    }
    tv_sched_unlock(fixture->sched);
}

static void answers_carry_the_planted_curve(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    plant(fixture, 1, 1000);
    plant(fixture, 2, 1200);
    plant(fixture, 32, 90000);
    client_open(fixture, &client, 5, "");
    struct tv_call *call = call_wait(call_chain(fixture, &client, 2));
    assert_reply(call, 200);
    assert_true(reply_mentions(call, "\"verify_us\":[[1,1000],[2,1200],[32,90000]]"));
    assert_int_equal(reply_int(call, "hint/queue_depth"), 0);
    int64_t nodes = reply_int(call, "hint/max_useful_nodes");
    assert_in_range(nodes, 2, 4); /* one more node is cheap, ten are not */
    call_free(call);
    client_advance(fixture, &client, 2);
    /* a replay says what its first answer said */
    plant(fixture, 32, 1300);
    struct tv_call *first = call_wait(call_chain(fixture, &client, 3));
    plant(fixture, 1, 1);
    struct tv_call *again = call_wait(call_chain(fixture, &client, 3));
    assert_int_equal(reply_flag(again, "replayed"), 1);
    assert_int_equal(reply_int(again, "hint/max_useful_nodes"),
                     reply_int(first, "hint/max_useful_nodes"));
    assert_true(reply_int(first, "hint/max_useful_nodes") > nodes);
    call_free(first);
    call_free(again);
    client_advance(fixture, &client, 3);
    call = ask(fixture, TV_CALL_DECODE, client.id,
               "{\"seq\":3,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1}", client.epoch,
               client.len);
    assert_reply(call, 200);
    assert_false(reply_has(call, "hint")); /* which sent no tree */
    call_free(call);
}

/* Of many sizes an answer names four: the ends that a tree can have, its own, and the knee; beside
 * a long path none. /v1/model has them all. */
static void answers_say_what_matters(void **state)
{
    static const int64_t costs[][2] = {{1, 1000},  {2, 1010},  {4, 1020},   {8, 1040},
                                       {16, 1080}, {32, 1160}, {64, 30000}, {512, 90000}};
    struct fixture *fixture = *state;
    struct client client;
    for (size_t i = 0; i < sizeof costs / sizeof costs[0]; i++) {
        plant(fixture, (int32_t)costs[i][0], costs[i][1]);
    }
    client_open(fixture, &client, 5, "");
    struct tv_call *call = call_wait(call_chain(fixture, &client, 7));
    assert_reply(call, 200);
    assert_true(reply_mentions(call, "\"verify_us\":[[1,1000],[8,1040],[32,1160],[64,30000]]"));
    call_free(call);
    client_advance(fixture, &client, 7);
    call = call_wait(call_chain(fixture, &client, 33));
    assert_reply(call, 200);
    assert_true(reply_mentions(call, "\"verify_us\":[]"));
    assert_true(reply_int(call, "hint/max_useful_nodes") > 0);
    call_free(call);
    call = ask(fixture, TV_CALL_MODEL, "", NULL);
    assert_true(reply_mentions(call, "[8,1040],[16,1080],[32,1160],[64,30000],[512,90000]]"));
    call_free(call);
}

/* The line is drawn between what is left: points that lie on it say nothing, the farthest one
 * stays.
 */
static void a_curve_is_thinned(void **state)
{
    int64_t straight[][2] = {{1, 10}, {2, 20}, {4, 40}, {8, 80}, {16, 160}, {32, 320}, {64, 640}};
    int64_t bent[][2] = {{1, 10}, {2, 500}, {4, 500}, {8, 500}, {16, 500}, {32, 510}, {64, 520}};
    int64_t few[][2] = {{1, 10}, {16, 20}, {256, 30}};
    (void)state;
    assert_int_equal(tv_sched_curve_thin(straight, 7, 16, 64), 4);
    assert_true(straight[0][0] == 1 && straight[3][0] == 64);
    assert_true(straight[1][0] == 16 || straight[2][0] == 16); /* the tree's own */
    assert_int_equal(tv_sched_curve_thin(bent, 7, 64, 64), 4);
    assert_true(bent[0][0] == 1 && bent[1][0] == 2 && bent[3][0] == 64);
    assert_int_equal(tv_sched_curve_thin(few, 3, 1, 10), 2); /* 16 covers trees of 10 */
    assert_int_equal(few[1][0], 16);
    assert_int_equal(tv_sched_curve_thin(few, 0, 1, 10), 0);
    assert_int_equal(tv_sched_curve_thin(few, 1, 1, 10), 1);
}

static int increasing(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* What the curve says of a size lies between the medians of what the rounds said themselves: the
 * launch is around the engine's own time and within the round's. */
static void the_curve_agrees_with_the_rounds(void **state)
{
    enum { ROUNDS = 9 };
    struct fixture *fixture = *state;
    struct client client;
    int64_t gpu[ROUNDS], total[ROUNDS], pairs[TV_SCHED_CURVE_POINTS][2];
    client_open(fixture, &client, 5, "");
    for (int i = 0; i < ROUNDS; i++) {
        tv_fixed_engine_slow(fixture->engine, 1000 + 500 * (i % 3));
        struct tv_call *call = call_wait(call_chain(fixture, &client, 8));
        assert_reply(call, 200);
        gpu[i] = reply_int(call, "timing_us/gpu");
        total[i] = reply_int(call, "timing_us/total");
        call_free(call);
        client_advance(fixture, &client, 8);
    }
    qsort(gpu, ROUNDS, sizeof gpu[0], increasing);
    qsort(total, ROUNDS, sizeof total[0], increasing);
    tv_sched_lock(fixture->sched);
    assert_int_equal(tv_sched_curve_read(fixture->sched->curve, pairs), 1);
    tv_sched_unlock(fixture->sched);
    assert_int_equal(pairs[0][0], 8);
    assert_true(pairs[0][1] >= gpu[ROUNDS / 2] && pairs[0][1] <= total[ROUNDS / 2]);
    assert_true(pairs[0][1] >= 1500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(before_anything_is_known_sizes_grow_in_steps),
        cmocka_unit_test(the_best_chain_is_found),
        cmocka_unit_test(a_step_in_the_cost_ends_the_tree),
        cmocka_unit_test(a_far_drafter_gets_larger_trees),
        cmocka_unit_test(a_cost_that_falls_is_noise),
        cmocka_unit_test(walks_are_counted_by_depth),
        cmocka_unit_test(a_curve_is_thinned),
        cmocka_unit_test_setup_teardown(answers_say_what_matters, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(answers_carry_the_planted_curve, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(the_curve_agrees_with_the_rounds, fixture_setup,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
