/*
 * test_sched_costs.c - what launches and slices have taken, and how many tokens of a prompt go
 * along for it, how deep, and where they are cheaper.
 *
 * Costs are planted: nothing here is judged by time.
 */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define LONG_US 100000000

/* Every sample that the points keep of so many rows. */
static void plant(struct curve_point *points, int32_t rows, int64_t us)
{
    for (int i = 0; i < 15; i++) {
        tv_sched_curve_add(points, rows, us);
    }
}

/* With the lock, which costs_end lets go: launches of 1 and 2 nodes were measured. */
static struct tv_sched *costs_begin(struct fixture *fixture)
{
    struct tv_sched *sched = fixture->sched;
    tv_sched_lock(sched);
    plant(sched->curve, 2, 10000);
    plant(sched->curve, 1, 100);
    for (int32_t rows = 1; rows <= 1024; rows *= 2) {
        plant(sched->share.slices, rows, LONG_US);
    }
    sched->engine->rider_rows = 32;
    sched->engine->prefill_rows = 64;
    return sched;
}

static void costs_end(struct tv_sched *sched)
{
    sched->engine->prefill_rows = 16;
    tv_sched_unlock(sched);
}

/* What a launch took decides how many tokens the next one takes along. */
static void the_measured_cost_decides_how_many(void **state)
{
    struct tv_sched *sched = costs_begin(*state);
    struct job job = {.token_count = 100000, .own_context = 1};
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 8);
    assert_int_equal(tv_sched_share_rows(sched, &job, 8), 0); /* never measured */
    tv_sched_share_note(sched, &job, 8, 2, 15000);            /* half as much again: more */
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 10);
    tv_sched_share_note(sched, &job, 7, 2, 10000); /* the prompt's end: says nothing of more */
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 10);
    for (int i = 0; i < 20; i++) {
        tv_sched_share_note(sched, &job, sched->share.rows, 2, 10000);
    }
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 32); /* what the engine takes */
    sched->launch_rows = 12;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 10);
    sched->launch_rows = 2;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    sched->launch_rows = 256;
    tv_sched_share_note(sched, &job, 32, 2, 15001);
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 16);
    tv_sched_share_note(sched, &job, 16, 1, 1100); /* a millisecond more is always fine */
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 20);
    tv_sched_share_note(sched, &job, 20, 1, 1101);
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 10);

    sched->sliced = &job; /* in the middle of a slice */
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    sched->sliced = NULL;
    sched->engine->rider_rows = 0;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    costs_end(sched);
}

/* A launch may lose a round after it was picked. What is left may be of a size that was never
 * measured: what it took says nothing of the tokens that went along. */
static void a_size_never_measured_teaches_nothing(void **state)
{
    struct tv_sched *sched = costs_begin(*state);
    struct job job = {.token_count = 100000, .own_context = 1};
    const struct tv_sched_share before = sched->share;
    int64_t known = tv_sched_curve_median(sched->curve, 8);
    tv_sched_share_note(sched, &job, 8, 8, 20000);
    const struct tv_sched_share slow = sched->share;
    tv_sched_share_note(sched, &job, 8, 8, 900);
    const struct tv_sched_share quick = sched->share;
    costs_end(sched);
    assert_int_equal(known, -1);
    assert_int_equal(slow.token_ns, before.token_ns);
    assert_int_equal(slow.rows, before.rows);
    assert_int_equal(slow.keys, before.keys);
    assert_int_equal(quick.token_ns, before.token_ns);
    assert_int_equal(quick.rows, before.rows);
    assert_int_equal(quick.keys, before.keys);
}

/* And how deep in a prompt. */
static void the_measured_cost_decides_how_deep(void **state)
{
    struct tv_sched *sched = costs_begin(*state);
    struct job job = {.token_count = 100000, .own_context = 1};
    sched->share.rows = 10;
    job.token_done = 63; /* every prompt's beginning */
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 10);
    job.token_done = 64;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    job.token_done = 60; /* as deep again as what was cheap */
    tv_sched_share_note(sched, &job, 10, 2, 10000);
    job.token_done = 139;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 12);
    job.token_done = 140;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    job.token_done = 100; /* the fewest tokens are too many there */
    tv_sched_share_note(sched, &job, 4, 2, 20000);
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    job.token_done = 99;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 4);
    job.token_count = 101;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 2);
    job.token_done = 0;
    tv_sched_share_note(sched, &job, 4, 2, 20000);
    job.token_done = 63;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 4);
    job.token_done = INT_MAX - 40; /* no overflow */
    job.token_count = INT_MAX;
    tv_sched_share_note(sched, &job, 4, 2, 10000);
    assert_int_equal(sched->share.keys, INT_MAX);
    costs_end(sched);
}

/* A token in a launch beside one in a slice of what is left, at most the engine's. */
static void a_token_goes_where_it_is_cheap(void **state)
{
    struct tv_sched *sched = costs_begin(*state);
    struct job job = {.token_count = 20, .own_context = 1};
    sched->share.rows = 5;
    plant(sched->share.slices, 16, 600);
    plant(sched->share.slices, 32, 800);
    plant(sched->share.slices, 64, 800);
    tv_sched_share_note(sched, &job, 10, 2, 11600); /* a quarter of 160 us */
    assert_int_equal(sched->share.token_ns, 40000);
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 5); /* 800 us of 20 tokens */
    job.token_count = 21;
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 0);
    job.token_count = 10; /* 600 us of 10 */
    assert_int_equal(tv_sched_share_rows(sched, &job, 2), 5);
    job.token_count = 1000; /* 800 us of 64, the engine's slice */
    int32_t refused = 0;
    while (tv_sched_share_rows(sched, &job, 2) == 0) {
        refused++;
    }
    assert_in_range(refused, 150, 350); /* one tries again */
    costs_end(sched);
}

/* Slices are longer while no rounds are about. Those say nothing of one beside rounds, though both
 * may be of one point of the curve; the last point has all of 513 rows and more. */
static void long_slices_are_no_measure_of_short_ones(void **state)
{
    struct fixture *fixture = *state;
    int64_t known[2];
    tv_sched_lock(fixture->sched);
    fixture->sched->launch_rows = 12; /* the engine's slices have 16 */
    tv_sched_unlock(fixture->sched);
    for (int32_t i = 0; i < 2; i++) { /* no round has been about */
        struct client client;
        client_open(fixture, &client, i == 0 ? 16 : 12, "");
        tv_sched_lock(fixture->sched);
        known[i] = tv_sched_curve_median(fixture->sched->share.slices, 12);
        tv_sched_unlock(fixture->sched);
    }
    assert_int_equal(known[0], -1);
    assert_true(known[1] >= 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(the_measured_cost_decides_how_many),       CASE(a_size_never_measured_teaches_nothing),
        CASE(the_measured_cost_decides_how_deep),       CASE(a_token_goes_where_it_is_cheap),
        CASE(long_slices_are_no_measure_of_short_ones),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
