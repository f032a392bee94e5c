/*
 * test_sched_queue.c - several calls at once: joining, waiting, cancelling, overload, deadlines,
 * deletion and draining while a round runs, readiness, and many threads.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "test_sched_fixture.h"

static void b52_two_at_once_are_one_launch(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 6, "");
    struct tv_call *first = call_running(fixture, &client, 3);
    struct tv_call *second = call_chain(fixture, &client, 3);
    struct tv_call *third = call_chain(fixture, &client, 3);
    struct tv_call *other = call_chain(fixture, &client, 2);
    assert_refused(call_wait(other), 422, "seq-reused");
    call_free(other);
    assert_false(call_is_done(second));
    assert_int_equal(tv_sched_in_flight(fixture->sched), 3);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_int_equal(reply_flag(call_wait(first), "replayed"), 0);
    assert_int_equal(reply_flag(call_wait(second), "replayed"), 1);
    assert_int_equal(reply_flag(call_wait(third), "replayed"), 1);
    assert_int_equal(second->reply.body.bytes, first->reply.body.bytes - 1);
    call_free(first);
    call_free(second);
    call_free(third);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 1);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
    client_advance(fixture, &client, 3);
    client_check(fixture, &client);
}

static void joined_calls_share_a_failure(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 6, "");
    struct tv_call *first = call_running(fixture, &client, 3);
    struct tv_call *second = call_chain(fixture, &client, 3);
    tv_fixed_engine_fail(fixture->engine, TV_NUMERIC_FAULT, 1);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_refused(call_wait(first), 500, "numeric-fault");
    assert_refused(call_wait(second), 500, "numeric-fault");
    call_free(first);
    call_free(second);
    client_check(fixture, &client);
    call_release(fixture, call_chain(fixture, &client, 3), 200);
}

static void one_operation_at_a_time(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 6, "");
    struct tv_call *call = call_running(fixture, &client, 2);
    client.seq = 2;
    struct tv_call *next = call_chain(fixture, &client, 2);
    assert_refused(call_wait(next), 409, "session-busy");
    assert_true(reply_has(next, "session_state/tail"));
    call_free(next);
    client.seq = 3;
    next = call_chain(fixture, &client, 2);
    assert_refused(call_wait(next), 409, "seq-gap");
    call_free(next);
    next = ask(fixture, TV_CALL_PARITY, "",
               "{\"session\":\"%s\",\"tree\":{\"tokens\":[%d],\"parents\":[-1]}}", client.id,
               client.pending);
    assert_refused(next, 409, "session-busy");
    call_free(next);
    call_release(fixture, call, 200);
}

static void rounds_of_sessions_share_a_launch(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[4];
    struct tv_call *calls[4];
    calls[0] = first_running(fixture, clients, 4, 2);
    for (int i = 1; i < 4; i++) {
        calls[i] = call_chain(fixture, &clients[i], i + 1);
    }
    tv_fixed_engine_hold(fixture->engine, 0);
    for (int i = 0; i < 4; i++) {
        assert_reply(call_wait(calls[i]), 200);
        assert_int_equal(reply_int(calls[i], "timing_us/batch"), i == 0 ? 1 : 3);
        call_free(calls[i]);
        client_advance(fixture, &clients[i], i == 0 ? 2 : i + 1);
        client_check(fixture, &clients[i]);
    }
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 2);
}

/* The steps of a decode, and trees behind a session or a prefix, are rows like any other. */
static void rounds_of_all_kinds_share_a_launch(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[4];
    struct tv_call *calls[4];
    calls[0] = first_running(fixture, clients, 4, 2);
    calls[1] = call_chain(fixture, &clients[1], 3);
    calls[2] = call_make(fixture, TV_CALL_DECODE, clients[2].id,
                         "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":7,\"max_tokens\":1}",
                         clients[2].epoch);
    calls[3] = call_make(fixture, TV_CALL_SCORE, "",
                         "{\"session\":\"%s\",\"tree\":{\"tokens\":[%d,1],\"parents\":[-1,0]}}",
                         clients[3].id, clients[3].pending);
    call_start(fixture, calls[2]);
    call_start(fixture, calls[3]);
    tv_fixed_engine_hold(fixture->engine, 0);
    for (int i = 0; i < 4; i++) {
        assert_reply(call_wait(calls[i]), 200);
    }
    assert_int_equal(reply_int(calls[1], "timing_us/batch"), 3);
    assert_int_equal(reply_int(calls[2], "timing_us/batch"), 3);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 2);
    for (int i = 0; i < 4; i++) {
        call_free(calls[i]);
    }
    client_advance(fixture, &clients[1], 3);
    client_advance(fixture, &clients[2], 1);
    for (int i = 1; i < 4; i++) {
        client_check(fixture, &clients[i]);
    }
}

/* A prompt of many slices and a long decode go on side by side with small rounds. */
static void small_rounds_get_between_slices(void **state)
{
    struct fixture *fixture = *state;
    struct client small, long_decode;
    char tokens[4096] = "1";
    struct tv_call *call = pair_running(fixture, &small, &long_decode, 1);
    for (int i = 1; i < 400; i++) {
        (void)strcat(tokens, ",1");
    }
    struct tv_call *create = call_make(fixture, TV_CALL_CREATE, "", "{\"tokens\":[%s]}", tokens);
    call_start(fixture, create);
    struct tv_call *decode = call_make(
        fixture, TV_CALL_DECODE, long_decode.id,
        "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":6,\"max_tokens\":200}", long_decode.epoch);
    call_start(fixture, decode);
    client_advance(fixture, &small, 1);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(call), 200);
    call_free(call);
    call = call_chain(fixture, &small, 1);
    assert_reply(call_wait(call), 200);
    call_free(call);
    assert_reply(call_wait(create), 201);
    assert_int_equal(reply_int(create, "committed_len"), 400);
    call_free(create);
    assert_reply(call_wait(decode), 200);
    assert_int_equal(reply_int(decode, "committed_len"), 206);
    call_free(decode);
}

static void b47_a_queued_call_is_dropped_a_running_one_stored(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    struct tv_call *first = pair_running(fixture, &running, &queued, 3);
    struct tv_call *second = call_chain(fixture, &queued, 2);
    tv_sched_cancel(fixture->sched, second);
    (void)call_wait(second); /* done at once */
    call_free(second);
    client_check(fixture, &queued);
    tv_sched_cancel(fixture->sched, first);
    assert_false(call_is_done(first));
    assert_int_equal(tv_sched_in_flight(fixture->sched), 1);
    call_release(fixture, first, 200);
    call_release(fixture, call_chain(fixture, &queued, 2), 200); /* its seq was free */
    struct tv_call *retry = call_chain(fixture, &running, 3);
    assert_int_equal(reply_flag(call_wait(retry), "replayed"), 1);
    call_free(retry);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
}

static void b47_the_round_goes_on_for_who_joined(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    struct tv_call *first = pair_running(fixture, &running, &queued, 1);
    struct tv_call *owner = call_chain(fixture, &queued, 2);
    struct tv_call *twin = call_chain(fixture, &queued, 2);
    struct tv_call *leaver = call_chain(fixture, &queued, 2);
    tv_sched_cancel(fixture->sched, leaver);
    (void)call_wait(leaver);
    call_free(leaver);
    tv_sched_cancel(fixture->sched, owner);
    (void)call_wait(owner);
    call_free(owner);
    call_release(fixture, first, 200);
    assert_reply(call_wait(twin), 200);
    assert_int_equal(reply_flag(twin, "replayed"), 0);
    call_free(twin);
}

static void b53_overload_is_refused_at_once(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[10];
    struct tv_call *calls[9];
    calls[0] = first_running(fixture, clients, 10, 2);
    for (int i = 1; i < 9; i++) {
        calls[i] = call_chain(fixture, &clients[i], 2);
        assert_false(call_is_done(calls[i]));
    }
    struct tv_call *refused = call_chain(fixture, &clients[9], 2);
    assert_true(call_is_done(refused));
    assert_refused(call_wait(refused), 503, "overloaded");
    assert_true(refused->reply.retry_after_s > 0);
    call_free(refused);
    refused = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    assert_refused(refused, 503, "overloaded");
    call_free(refused);
    tv_fixed_engine_hold(fixture->engine, 0);
    for (int i = 0; i < 9; i++) {
        assert_reply(call_wait(calls[i]), 200);
        call_free(calls[i]);
    }
    call_release(fixture, call_chain(fixture, &clients[9], 2), 200);
}

static void a_late_call_is_not_launched(void **state)
{
    struct fixture *fixture = *state;
    struct client running, late;
    char body[2048];
    struct tv_call *first = pair_running(fixture, &running, &late, 2);
    client_chain(fixture, &late, 2, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    struct tv_call *call =
        call_make(fixture, TV_CALL_VERIFY, late.id, "%s,\"deadline_ms\":1}", body);
    call->received_us -= 1000; /* its time is over when the worker looks */
    call_start(fixture, call);
    call_release(fixture, first, 200);
    assert_refused(call_wait(call), 504, "deadline");
    call_free(call);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 1);
    client_check(fixture, &late);
    call_release(fixture, call_chain(fixture, &late, 2), 200);
}

static void delete_lets_the_running_round_finish(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    struct tv_call *first = pair_running(fixture, &running, &queued, 2);
    struct tv_call *second = call_chain(fixture, &queued, 2);
    expect(fixture, 204, TV_CALL_DELETE, running.id, NULL);
    expect(fixture, 404, TV_CALL_STATE, running.id, NULL);
    expect(fixture, 204, TV_CALL_DELETE, queued.id, NULL);
    assert_refused(call_wait(second), 404, "session-not-found");
    call_free(second);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(first), 200);
    assert_int_equal(reply_int(first, "committed_len"), 7);
    call_free(first);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
    struct tv_call *deep = call_make(fixture, TV_CALL_READY, "", NULL);
    deep->request.deep = 1; /* a turn of the worker later the contexts are closed */
    call_start(fixture, deep);
    assert_reply(call_wait(deep), 200);
    call_free(deep);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 0);
}

static struct tv_call *start_watch(struct fixture *fixture, const struct client *client,
                                   int32_t seq, int32_t wait_ms)
{
    struct tv_call *call = call_make(fixture, TV_CALL_ROUND, client->id, NULL);
    call->request.seq = seq;
    call->request.wait_ms = wait_ms;
    call_start(fixture, call);
    return call;
}

static void watch(struct fixture *fixture, const struct client *client, int32_t seq,
                  int http_status)
{
    struct tv_call *call = call_wait(start_watch(fixture, client, seq, 0));
    assert_reply(call, http_status);
    call_free(call);
}

static void rounds_are_watched(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 5, "");
    watch(fixture, &client, 1, 404);
    struct tv_call *call = call_running(fixture, &client, 2);
    watch(fixture, &client, 1, 202);
    struct tv_call *waiting = start_watch(fixture, &client, 1, 60000);
    struct tv_call *short_wait = start_watch(fixture, &client, 1, 1);
    struct tv_call *leaving = start_watch(fixture, &client, 1, 60000);
    assert_false(call_is_done(waiting));
    tv_sched_cancel(fixture->sched, leaving);
    (void)call_wait(leaving);
    call_free(leaving);
    call_release(fixture, call, 200);
    assert_reply(call_wait(waiting), 200);
    assert_int_equal(reply_flag(waiting, "replayed"), 1);
    call_free(waiting);
    int http_status = call_wait(short_wait)->reply.http_status;
    assert_true(http_status == 200 || http_status == 202); /* whichever came first */
    call_free(short_wait);
    watch(fixture, &client, 1, 200);
    client_advance(fixture, &client, 2);
    call_release(fixture, call_chain(fixture, &client, 1), 200);
    watch(fixture, &client, 1, 200);
    watch(fixture, &client, 3, 404);
    client_advance(fixture, &client, 1);
    call = call_running(fixture, &client, 1);
    waiting = start_watch(fixture, &client, 3, 60000);
    tv_fixed_engine_fail(fixture->engine, TV_KV_FULL, 1);
    call_release(fixture, call, 503);
    assert_refused(call_wait(waiting), 404, "round-not-found");
    call_free(waiting);
}

static void draining_refuses_new_work_only(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 5, "");
    client_chain(fixture, &client, 2, body, sizeof body);
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
    client_advance(fixture, &client, 2);
    tv_sched_drain(fixture->sched, 1, 0);
    expect(fixture, 503, TV_CALL_READY, "", NULL);
    call_release(fixture, call_chain(fixture, &client, 1), 200);
    client_advance(fixture, &client, 1);
    tv_sched_drain(fixture->sched, 1, 1);
    struct tv_call *call = call_chain(fixture, &client, 1);
    assert_refused(call_wait(call), 503, "draining");
    assert_true(call->reply.retry_after_s > 0);
    call_free(call);
    expect(fixture, 503, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    watch(fixture, &client, 2, 200);
    client_check(fixture, &client);
    tv_sched_drain(fixture->sched, 0, 0);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
}

static void b54_ready_tells_of_a_stuck_worker_and_failed_launches(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 5, "");
    expect(fixture, 200, TV_CALL_READY, "", NULL);
    tv_fixed_engine_fail(fixture->engine, TV_KERNEL_FAULT, 1);
    call_release(fixture, call_chain(fixture, &client, 2), 500);
    expect(fixture, 503, TV_CALL_READY, "", NULL);
    struct tv_call *call = call_running(fixture, &client, 2);
    expect(fixture, 200, TV_CALL_HEALTH, "", NULL);
    tv_sched_lock(fixture->sched);
    int64_t launch_us_max = fixture->sched->launch_us_max;
    fixture->sched->launch_us_max = -1; /* any age is too old */
    tv_sched_unlock(fixture->sched);
    struct tv_call *ready = call_make(fixture, TV_CALL_READY, "", NULL);
    ready->request.deep = 1; /* must not wait for a worker that does not answer */
    call_start(fixture, ready);
    assert_true(call_is_done(ready));
    assert_reply(call_wait(ready), 503);
    assert_true(reply_mentions(ready, "\"name\":\"worker\",\"ok\":false"));
    call_free(ready);
    tv_sched_lock(fixture->sched);
    fixture->sched->launch_us_max = launch_us_max;
    tv_sched_unlock(fixture->sched);
    call_release(fixture, call, 200);
    expect(fixture, 200, TV_CALL_READY, "", NULL);
}

static int deep(struct fixture *fixture)
{
    struct tv_call *call = call_make(fixture, TV_CALL_READY, "", NULL);
    call->request.deep = 1;
    call_start(fixture, call);
    int http_status = call_wait(call)->reply.http_status;
    call_free(call);
    return http_status;
}

static void deep_readiness_repeats_the_self_test(void **state)
{
    struct fixture *fixture = *state;
    assert_int_equal(deep(fixture), 200);
    tv_fixed_engine_break(fixture->engine, 1);
    assert_int_equal(deep(fixture), 200); /* once a second: the last result */
    tv_sched_lock(fixture->sched);
    fixture->sched->self_test_us = 1; /* long ago */
    tv_sched_unlock(fixture->sched);
    assert_int_equal(deep(fixture), 503);
    expect(fixture, 503, TV_CALL_READY, "", NULL);
}

static void model_shows_the_measured_curve(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 5, "");
    call_release(fixture, call_chain(fixture, &client, 3), 200);
    struct tv_call *call = ask(fixture, TV_CALL_MODEL, "", NULL);
    assert_reply(call, 200);
    assert_true(reply_mentions(call, "\"verify_us\":[[4,"));
    assert_int_equal(reply_int(call, "limits/max_nodes"), 64);
    call_free(call);
    expect(fixture, 200, TV_CALL_PARITY_TOTALS, "", NULL);
    expect(fixture, 404, TV_CALL_PARITY_VIOLATION, "", NULL);
    call = ask(fixture, TV_CALL_PARITY, "", "{}");
    assert_refused(call, 500, "internal"); /* this engine has no model for an oracle */
    call_free(call);
}

static void destroy_completes_everything(void **state)
{
    struct fixture fixture;
    struct client clients[3];
    struct tv_call *calls[3];
    (void)state;
    fixture_start(&fixture);
    for (int i = 0; i < 3; i++) {
        client_open(&fixture, &clients[i], 5, "");
    }
    calls[0] = call_make(&fixture, TV_CALL_DECODE, clients[0].id,
                         "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":5,\"max_tokens\":500}",
                         clients[0].epoch);
    call_start(&fixture, calls[0]);
    calls[1] = call_chain(&fixture, &clients[1], 3);
    calls[2] = start_watch(&fixture, &clients[0], 1, 60000);
    fixture_stop(&fixture);
    for (int i = 0; i < 3; i++) {
        assert_true(call_is_done(calls[i]));
        call_free(calls[i]);
    }
}

static void *destroy_main(void *context)
{
    tv_sched_destroy(context);
    return NULL;
}

/* A stop does not leave waiting calls without an answer until the running launch is over. */
static void b65_destroy_refuses_what_waits_while_a_round_runs(void **state)
{
    struct fixture fixture;
    struct client clients[2];
    pthread_t thread;
    (void)state;
    fixture_start(&fixture);
    struct tv_call *running = first_running(&fixture, clients, 2, 3);
    struct tv_call *waiting = call_chain(&fixture, &clients[1], 2);
    assert_int_equal(pthread_create(&thread, NULL, destroy_main, fixture.sched), 0);
    int64_t end_us = tv_clock_us() + 60000000; /* only a hang gets there */
    while (!call_is_done(waiting) && tv_clock_us() < end_us) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    int was_done = call_is_done(waiting);
    tv_fixed_engine_hold(fixture.engine, 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_true(was_done);
    assert_refused(waiting, 503, "draining");
    assert_reply(call_wait(running), 200);
    call_free(waiting);
    call_free(running);
    assert_int_equal(tv_fixed_engine_contexts(fixture.engine), 0);
    fixture.engine->ops->destroy(fixture.engine);
}

/* One of many clients: rounds of its own, retries of them, and readings of its state. */
struct load {
    struct fixture *fixture;
    int rounds;
    uint32_t random;
};

static void *load_main(void *context)
{
    struct load *load = context;
    struct client client;
    client_open(load->fixture, &client, 3, "");
    for (int i = 0; i < load->rounds; i++) {
        load->random = load->random * 1664525u + 1013904223u;
        int32_t count = (int32_t)(load->random >> 16) % 5 + 1;
        struct tv_call *first = call_chain(load->fixture, &client, count);
        struct tv_call *second = call_chain(load->fixture, &client, count);
        assert_reply(call_wait(first), 200);
        assert_reply(call_wait(second), 200);
        call_free(first);
        call_free(second);
        client_advance(load->fixture, &client, count);
        if (i % 8 == 0) {
            client_check(load->fixture, &client);
            expect(load->fixture, 200, TV_CALL_LIST, "", NULL);
        }
        if (client.len > 450) {
            expect(load->fixture, 204, TV_CALL_DELETE, client.id, NULL);
            client_open(load->fixture, &client, 3, "");
        }
    }
    client_check(load->fixture, &client);
    return NULL;
}

static void eight_threads(void **state)
{
    struct fixture *fixture = *state;
    struct load loads[8];
    pthread_t threads[8];
    fixture->config.queue_max = 64; /* nobody has called yet */
    for (int i = 0; i < 8; i++) {
        loads[i] =
            (struct load){.fixture = fixture, .rounds = fixture_scaled(100), .random = (uint32_t)i};
        assert_int_equal(pthread_create(&threads[i], NULL, load_main, &loads[i]), 0);
    }
    for (int i = 0; i < 8; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
    }
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(b52_two_at_once_are_one_launch),
        CASE(joined_calls_share_a_failure),
        CASE(one_operation_at_a_time),
        CASE(rounds_of_sessions_share_a_launch),
        CASE(rounds_of_all_kinds_share_a_launch),
        CASE(small_rounds_get_between_slices),
        CASE(b47_a_queued_call_is_dropped_a_running_one_stored),
        CASE(b47_the_round_goes_on_for_who_joined),
        CASE(b53_overload_is_refused_at_once),
        CASE(a_late_call_is_not_launched),
        CASE(delete_lets_the_running_round_finish),
        CASE(rounds_are_watched),
        CASE(draining_refuses_new_work_only),
        CASE(b54_ready_tells_of_a_stuck_worker_and_failed_launches),
        CASE(deep_readiness_repeats_the_self_test),
        CASE(model_shows_the_measured_curve),
        cmocka_unit_test(destroy_completes_everything),
        cmocka_unit_test(b65_destroy_refuses_what_waits_while_a_round_runs),
        CASE(eight_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
