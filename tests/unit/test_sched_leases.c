/*
 * test_sched_leases.c - leases by a clock that is the test's: over exactly when they are over, at
 * use and at the worker's own look alike; what held and staged rounds give back then.
 */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "test_sched_fixture.h"

#define PAGES  24
#define SECOND INT64_C(1000000)

/* Far ahead of the real one, so that whoever waits until a time of it waits to be told. */
static _Atomic int64_t clock_us = INT64_C(1000000000) * SECOND;

int64_t __wrap_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void)
{
    return atomic_load(&clock_us);
}

static int setup(void **state)
{
    struct fixture *fixture = malloc(sizeof *fixture);
    assert_non_null(fixture);
    fixture_start_pages(fixture, PAGES);
    *state = fixture;
    return 0;
}

static void pass(int64_t us)
{
    (void)atomic_fetch_add(&clock_us, us);
}

static void worker_look(struct fixture *fixture)
{
    tv_sched_lock(fixture->sched);
    (void)pthread_cond_signal(&fixture->sched->wake);
    tv_sched_unlock(fixture->sched);
}

static int64_t pages_held(struct fixture *fixture)
{
    struct tv_cache_counts counts;
    tv_cache_counts(fixture->engine->cache, &counts);
    assert_int_equal(counts.free + counts.cached + counts.held, PAGES);
    return counts.held;
}

/* The worker closes contexts by itself; only one that is never closed gets to the end. */
static void await_nothing_held(struct fixture *fixture)
{
    struct timespec now, until;
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += 60;
    do {
        (void)sched_yield();
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
    } while (tv_fixed_engine_contexts(fixture->engine) > 0 && now.tv_sec < until.tv_sec);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 0);
    assert_int_equal(pages_held(fixture), 0);
    assert_int_equal(fixture->sched->table.count, 0);
}

static struct tv_call *chain(struct fixture *fixture, const struct client *client, int32_t count,
                             const char *rest)
{
    char body[2048];
    (void)client_chain(fixture, client, count, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    struct tv_call *call = call_make(fixture, TV_CALL_VERIFY, client->id, "%s%s}", body, rest);
    call_start(fixture, call);
    return call;
}

static void expired(struct fixture *fixture, const struct client *client)
{
    struct tv_call *call = ask(fixture, TV_CALL_STATE, client->id, NULL);
    assert_refused(call, 410, "session-expired");
    call_free(call);
}

/* A held round is settled in the last microsecond; one microsecond later it is gone with all. */
static void a_held_round_ends_with_its_lease(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    for (int by_use = 0; by_use < 2; by_use++) {
        client_open(fixture, &client, 20, ",\"lease_s\":5");
        pass(5 * SECOND - 1);
        struct tv_call *call = call_wait(chain(fixture, &client, 30, ",\"commit\":\"hold\""));
        assert_reply(call, 200);
        call_free(call);
        assert_int_equal(pages_held(fixture), 4); /* 50 rows */
        pass(5 * SECOND - 1);
        expect(fixture, 200, TV_CALL_STATE, client.id, NULL); /* its lease begins anew */
        pass(5 * SECOND - 1);
        call = ask(fixture, TV_CALL_COMMIT, client.id,
                   "{\"seq\":2,\"epoch\":\"%s\",\"path\":[0,1],\"next\":7}", client.epoch);
        assert_reply(call, 200);
        assert_int_equal(reply_int(call, "committed_len"), 22);
        call_free(call);
        assert_int_equal(pages_held(fixture), 2);
        client.len = 22;
        client.pending = 7;
        client.seq = 3;
        call = call_wait(chain(fixture, &client, 20, ",\"commit\":\"hold\""));
        assert_reply(call, 200);
        call_free(call);
        assert_int_equal(pages_held(fixture), 3);
        pass(5 * SECOND);
        if (by_use) { /* no call but that of the late client is needed */
            call = ask(fixture, TV_CALL_COMMIT, client.id,
                       "{\"seq\":4,\"epoch\":\"%s\",\"path\":[0],\"next\":7}", client.epoch);
            assert_refused(call, 410, "session-expired");
            call_free(call);
        } else {
            worker_look(fixture);
        }
        await_nothing_held(fixture);
        expired(fixture, &client);
    }
}

/* The guess behind a round under way keeps nothing back: both end, then the lease counts. */
static void staged_rounds_hold_no_lease_open(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    char rest[96];
    for (int fails = 0; fails < 2; fails++) {
        client_open(fixture, &client, 20, ",\"lease_s\":3");
        struct tv_call *first = call_running(fixture, &client, 4);
        ahead = client;
        client_advance(fixture, &ahead, 4);
        (void)snprintf(rest, sizeof rest, ",\"if\":{\"seq\":1,\"leaf\":3,\"pending\":%d}",
                       ahead.pending);
        struct tv_call *second = chain(fixture, &ahead, 8, rest);
        pass(4 * SECOND); /* over by the clock, but in use; within the round's deadline */
        worker_look(fixture);
        expect(fixture, 200, TV_CALL_STATE, client.id, NULL);
        pass(4 * SECOND);
        if (fails) {
            tv_fixed_engine_fail(fixture->engine, TV_NUMERIC_FAULT, 1);
        }
        call_release(fixture, first, fails ? 500 : 200);
        assert_reply(call_wait(second), fails ? 409 : 200);
        call_free(second);
        assert_int_equal(pages_held(fixture), 2);
        pass(3 * SECOND - 1);
        tv_sched_lock(fixture->sched); /* to the last microsecond: looked at without a renewal */
        struct tv_session *session = NULL;
        assert_int_equal(
            tv_sessions_find(&fixture->sched->table, client.id, "", tv_clock_us(), &session),
            TV_OK);
        tv_sched_unlock(fixture->sched);
        pass(1);
        expired(fixture, &client);
        await_nothing_held(fixture);
    }
}

/* A staged round whose own time is over leaves; the one under way and the session stay. */
static void a_staged_round_is_late_by_itself(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    char rest[128];
    client_open(fixture, &client, 20, ",\"lease_s\":100");
    struct tv_call *first = call_running(fixture, &client, 4);
    ahead = client;
    client_advance(fixture, &ahead, 4);
    (void)snprintf(rest, sizeof rest,
                   ",\"deadline_ms\":50,\"if\":{\"seq\":1,\"leaf\":3,\"pending\":%d}",
                   ahead.pending);
    struct tv_call *second = chain(fixture, &ahead, 8, rest);
    pass(50000);
    call_release(fixture, first, 200);
    assert_refused(call_wait(second), 504, "deadline");
    call_free(second);
    client_check(fixture, &ahead);
    pass(101 * SECOND);
    worker_look(fixture);
    await_nothing_held(fixture);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_held_round_ends_with_its_lease),
        CASE(staged_rounds_hold_no_lease_open),
        CASE(a_staged_round_is_late_by_itself),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
