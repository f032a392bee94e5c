/*
 * test_sched_progress.c - R16, B54: readiness while an engine call runs, by the steps that the
 * engine counts.
 *
 * The engine is held and the count is the test's, so nothing here depends on how fast anything is.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define LIMIT_US 20000

static atomic_uint_least64_t steps;
static struct tv_engine_ops ops; /* the engine's with a count; lives as long as it */

static int counted(const struct tv_engine *engine, uint64_t *ret_steps)
{
    (void)engine; /* the test's own count */
    *ret_steps = atomic_load(&steps);
    return 1;
}

/* An engine that counts, or not. */
static void count_set(struct fixture *fixture, int counts)
{
    tv_sched_lock(fixture->sched);
    ops = *fixture->engine->ops;
    ops.progress = counts ? counted : NULL;
    fixture->engine->ops = &ops;
    fixture->sched->launch_us_max = LIMIT_US;
    tv_sched_unlock(fixture->sched);
}

/* With a launch that does not end. */
static struct tv_call *launch_held(struct fixture *fixture, struct client *client, int counts)
{
    client_open(fixture, client, 5, "");
    count_set(fixture, counts);
    return call_running(fixture, client, 2);
}

static void pause_us(int64_t us)
{
    const struct timespec pause = {.tv_nsec = us * 1000};
    assert_int_equal(nanosleep(&pause, NULL), 0);
}

static void await_not_ready(struct fixture *fixture)
{
    int status = 200;
    for (int i = 0; status == 200 && i < 60000; i++) {
        struct tv_call *call = ask(fixture, TV_CALL_READY, "", NULL);
        status = call->reply.http_status;
        assert_int_equal(reply_mentions(call, "\"name\":\"worker\",\"ok\":false"), status == 503);
        call_free(call);
        pause_us(1000);
    }
    assert_int_equal(status, 503);
}

/* Many times the limit in one call, and ready whenever a step was made since the last look. */
static void long_calls_that_move_are_ready_r16(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    struct tv_call *call = launch_held(fixture, &client, 1);
    for (int i = 0; i < 40; i++) {
        pause_us(LIMIT_US / 8);
        atomic_fetch_add(&steps, 1);
        expect(fixture, 200, TV_CALL_READY, "", NULL);
    }
    await_not_ready(fixture);
    struct tv_call *deep = call_make(fixture, TV_CALL_READY, "", NULL);
    deep->request.deep = 1; /* must not wait for a worker that stands still */
    call_start(fixture, deep);
    assert_true(call_is_done(deep));
    assert_reply(call_wait(deep), 503);
    call_free(deep);
    atomic_fetch_add(&steps, 1);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
    call_release(fixture, call, 200);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
}

/* The first question after a stall is answered right when somebody has looked meanwhile. */
static void a_look_dates_the_stall_r16(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    struct tv_call *call = launch_held(fixture, &client, 1);
    atomic_fetch_add(&steps, 1);
    tv_sched_look(fixture->sched);
    pause_us(2 * LIMIT_US);
    tv_sched_look(fixture->sched);
    expect(fixture, 503, TV_CALL_READY, "", NULL);
    call_release(fixture, call, 200);
}

/* Without a count the whole call is one step. */
static void calls_that_are_not_counted_have_their_age_b54(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    struct tv_call *call = launch_held(fixture, &client, 0);
    atomic_fetch_add(&steps, 1);
    await_not_ready(fixture);
    call_release(fixture, call, 200);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
}

static void await_stuck(struct fixture *fixture)
{
    int stuck = 0;
    for (int i = 0; !stuck && i < 60000; i++) {
        stuck = tv_sched_stuck(fixture->sched);
        pause_us(1000);
    }
    assert_true(stuck);
}

/* What a held round is settled by: its path, or that of the next one's commit_prev. */
static struct tv_call *settle_start(struct fixture *fixture, struct client *client, int by_next)
{
    char body[2048];
    client_chain(fixture, client, 2, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client->id, "%s,\"commit\":\"hold\"}", body);
    client->seq++;
    tv_fixed_engine_hold_moves(fixture->engine, 1);
    struct tv_call *call =
        by_next ? call_make(fixture, TV_CALL_VERIFY, client->id,
                            "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,"
                            "\"commit_prev\":{\"seq\":%d,\"path\":[0],\"next\":9},"
                            "\"tree\":{\"tokens\":[9],\"parents\":[-1]}}",
                            client->seq, client->epoch, client->len + 1, client->seq - 1)
                : call_make(fixture, TV_CALL_COMMIT, client->id,
                            "{\"seq\":%d,\"epoch\":\"%s\",\"path\":[0],\"next\":9}", client->seq,
                            client->epoch);
    call_start(fixture, call);
    return call;
}

static struct tv_call *move_start(struct fixture *fixture, struct client *client, int which)
{
    client_open(fixture, client, 5, "");
    if (which < 2) {
        return settle_start(fixture, client, which);
    }
    tv_fixed_engine_hold_moves(fixture->engine, 1);
    struct tv_call *call =
        which == 2 ? call_make(fixture, TV_CALL_ROLLBACK, client->id,
                               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"len\":3}",
                               client->seq, client->epoch, client->len)
                   : call_make(fixture, TV_CALL_FORK, client->id, "{\"epoch\":\"%s\",\"len\":3}",
                               client->epoch);
    call_start(fixture, call);
    return call;
}

/* A device that hangs where rows are settled, cut or shared is found like one that hangs in a pass:
 * first not ready, then beyond help; and all is well when it goes on after all. */
static void rows_that_never_move_f29(void **state)
{
    struct fixture *fixture = *state;
    for (int which = 0; which < 4; which++) {
        struct client client;
        count_set(fixture, which % 2);
        struct tv_call *call = move_start(fixture, &client, which);
        await_not_ready(fixture);
        assert_false(call_is_done(call));
        await_stuck(fixture);
        tv_fixed_engine_hold_moves(fixture->engine, 0);
        assert_reply(call_wait(call), which == 3 ? 201 : 200);
        call_free(call);
        expect(fixture, 200, TV_CALL_READY, "", NULL);
    }
}

/* Unset, the limit is short exactly where progress is counted. */
static void the_default_follows_the_engine_r16(void **state)
{
    struct fixture *fixture = *state;
    struct tv_config config = *fixture->sched->config;
    const int32_t limits_s[2][2] = {{0, TV_SCHED_CALL_S}, {7, 7}};
    for (int counts = 0; counts < 2; counts++) {
        count_set(fixture, counts);
        for (int given = 0; given < 2; given++) {
            struct tv_sched *sched = NULL;
            config.launch_max_s = limits_s[given][0];
            assert_int_equal(
                tv_sched_create(&config, fixture->engine, NULL, &fixture->stats, &sched), 0);
            int64_t limit_s = counts && !given ? TV_SCHED_STALL_S : limits_s[given][1];
            assert_true(sched->launch_us_max == limit_s * 1000000);
            tv_sched_destroy(sched);
        }
    }
    assert_true(TV_SCHED_STALL_S < 5); /* and a look is never older than a twentieth of a second */
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(long_calls_that_move_are_ready_r16),
        TEST(a_look_dates_the_stall_r16),
        TEST(calls_that_are_not_counted_have_their_age_b54),
        TEST(rows_that_never_move_f29),
        TEST(the_default_follows_the_engine_r16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
