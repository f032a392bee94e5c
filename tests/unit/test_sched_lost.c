/*
 * test_sched_lost.c - F28: an engine whose device is lost: what runs, what waits and what comes
 * later is refused as kernel-fault, readiness fails, and who can end the process is told once.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

static atomic_int told;

static void tell(void *context)
{
    (void)context;
    (void)atomic_fetch_add(&told, 1);
}

static int setup(void **state)
{
    int rc = fixture_setup(state);
    struct fixture *fixture = *state;
    atomic_store(&told, 0);
    tv_sched_lost_watch(fixture->sched, tell, NULL);
    return rc;
}

/* The fault has been met; nothing works any more, and everything says so. */
static void assert_lost(struct fixture *fixture)
{
    struct tv_call *call = ask(fixture, TV_CALL_READY, "", NULL);
    assert_reply(call, 503);
    assert_true(reply_mentions(call, "\"name\":\"device\",\"ok\":false,\"detail\":\"lost"));
    call_free(call);
    call = call_make(fixture, TV_CALL_READY, "", NULL);
    call->request.deep = 1; /* there is nothing to test */
    call_start(fixture, call);
    assert_reply(call_wait(call), 503);
    call_free(call);
    call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1,2,3]}");
    assert_refused(call, 500, "kernel-fault");
    call_free(call);
    assert_true(tv_sched_is_lost(fixture->sched));
    assert_int_equal(atomic_load(&told), 1);
}

static void what_runs_and_what_waits_is_refused(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[8];
    struct tv_call *calls[8];
    calls[0] = first_running(fixture, clients, 8, 3);
    for (int i = 1; i < 8; i++) { /* more than a launch takes */
        calls[i] = call_chain(fixture, &clients[i], 3);
    }
    int64_t commits = tv_fixed_engine_commits(fixture->engine);
    tv_fixed_engine_lose(fixture->engine);
    tv_fixed_engine_hold(fixture->engine, 0);
    for (int i = 0; i < 8; i++) {
        assert_refused(call_wait(calls[i]), 500, "kernel-fault");
        call_free(calls[i]);
        client_check(fixture, &clients[i]); /* its seq is free */
    }
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), commits);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
    assert_lost(fixture);
}

/* A drain that begins when the device is lost takes nothing back: path oracles have given up. */
static void a_drain_takes_no_end_back(void **state)
{
    struct fixture *fixture = *state;
    tv_fixed_engine_lose(fixture->engine);
    expect(fixture, 500, TV_CALL_CREATE, "", "{\"tokens\":[1,2,3]}");
    assert_lost(fixture);
    assert_int_equal(atomic_load(&fixture->sched->parity_stop), 1);
    tv_sched_drain(fixture->sched, 1, 0);
    assert_int_equal(atomic_load(&fixture->sched->parity_stop), 1);
    tv_sched_drain(fixture->sched, 0, 0);
    assert_int_equal(atomic_load(&fixture->sched->parity_stop), 1);
    assert_lost(fixture);
}

static void a_prompt_meets_it(void **state)
{
    struct fixture *fixture = *state;
    tv_fixed_engine_lose(fixture->engine);
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1,2,3]}");
    assert_refused(call, 500, "kernel-fault");
    call_free(call);
    assert_lost(fixture);
}

/* Rounds without a launch use the device too. */
static void a_rollback_meets_it(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 9, "");
    tv_fixed_engine_lose(fixture->engine);
    struct tv_call *call =
        ask(fixture, TV_CALL_ROLLBACK, client.id,
            "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":9,\"len\":4}", client.epoch);
    assert_refused(call, 500, "kernel-fault");
    call_free(call);
    client_check(fixture, &client);
    assert_lost(fixture);
}

static void a_fork_meets_it(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 9, "");
    tv_fixed_engine_lose(fixture->engine);
    struct tv_call *call =
        ask(fixture, TV_CALL_FORK, client.id, "{\"epoch\":\"%s\"}", client.epoch);
    assert_refused(call, 500, "kernel-fault");
    call_free(call);
    client_check(fixture, &client);
    assert_lost(fixture);
}

static void the_deep_question_meets_it(void **state)
{
    struct fixture *fixture = *state;
    tv_fixed_engine_lose(fixture->engine);
    expect(fixture, 200, TV_CALL_READY, "", NULL); /* nobody knows yet */
    struct tv_call *call = call_make(fixture, TV_CALL_READY, "", NULL);
    call->request.deep = 1;
    call_start(fixture, call);
    assert_reply(call_wait(call), 503);
    call_free(call);
    assert_lost(fixture);
}

static void a_guess_is_refused_with_its_round(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    char body[2048];
    client_open(fixture, &client, 20, "");
    struct tv_call *first = call_running(fixture, &client, 4);
    ahead = client;
    client_advance(fixture, &ahead, 4);
    (void)client_chain(fixture, &ahead, 3, body, sizeof body);
    size_t at = strlen(body) - 1; /* the last brace */
    (void)snprintf(body + at, sizeof body - at, ",\"if\":{\"seq\":1,\"leaf\":3,\"pending\":%d}}",
                   ahead.pending);
    struct tv_call *second = call_make(fixture, TV_CALL_VERIFY, client.id, "%s", body);
    call_start(fixture, second);
    assert_false(call_is_done(second));
    tv_fixed_engine_lose(fixture->engine);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_refused(call_wait(first), 500, "kernel-fault");
    assert_refused(call_wait(second), 500, "kernel-fault");
    call_free(first);
    call_free(second);
    client_check(fixture, &client);
    assert_lost(fixture);
}

/* What was answered before is still answered: a retry learns what was committed. */
static void stored_answers_are_still_given(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 6, "");
    (void)client_chain(fixture, &client, 3, body, sizeof body);
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
    tv_fixed_engine_lose(fixture->engine);
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    assert_refused(call, 500, "kernel-fault");
    call_free(call);
    call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
    assert_reply(call, 200);
    assert_true(reply_flag(call, "replayed"));
    call_free(call);
    assert_lost(fixture);
}

/* A fault of one launch is not the device's end. */
static void one_failed_launch_loses_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 6, "");
    tv_fixed_engine_fail(fixture->engine, TV_KERNEL_FAULT, 1);
    struct tv_call *call = call_chain(fixture, &client, 2);
    assert_refused(call_wait(call), 500, "kernel-fault");
    call_free(call);
    expect(fixture, 503, TV_CALL_READY, "", NULL);
    call = call_chain(fixture, &client, 2);
    assert_reply(call_wait(call), 200);
    call_free(call);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
    assert_false(tv_sched_is_lost(fixture->sched));
    assert_int_equal(atomic_load(&told), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(what_runs_and_what_waits_is_refused),
        TEST(a_drain_takes_no_end_back),
        TEST(a_prompt_meets_it),
        TEST(a_rollback_meets_it),
        TEST(a_fork_meets_it),
        TEST(the_deep_question_meets_it),
        TEST(a_guess_is_refused_with_its_round),
        TEST(stored_answers_are_still_given),
        TEST(one_failed_launch_loses_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
