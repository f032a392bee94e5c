/*
 * test_sched_waiters.c - how many calls may wait for one answer that another call is about to get:
 * TV_WAITERS_MAX of them, and one more is told to come back; and what those who wait for a batch do
 * to the leases of its sessions.
 *
 * Refuses nothing itself: the engine is held, so that everybody waits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "test_sched_fixture.h"

/* One call, sent again and again. */
struct repeated {
    enum tv_call_kind kind;
    const char *session, *key, *body; /* body NULL: GET rounds/1?wait_ms=60000 */
};

static struct tv_call *send(struct fixture *fixture, const struct repeated *what)
{
    struct tv_call *call = what->body != NULL
                               ? call_make(fixture, what->kind, what->session, "%s", what->body)
                               : call_make(fixture, what->kind, what->session, NULL);
    (void)snprintf(call->key, sizeof call->key, "%s", what->key);
    if (what->body == NULL) {
        call->request.seq = 1;
        call->request.wait_ms = 60000;
    }
    call_start(fixture, call);
    return call;
}

/* As many as may wait, and one more. */
static void fill(struct fixture *fixture, const struct repeated *what, struct tv_call **ret_calls)
{
    for (int32_t i = 0; i < TV_WAITERS_MAX; i++) {
        ret_calls[i] = send(fixture, what);
        assert_false(call_is_done(ret_calls[i]));
    }
    struct tv_call *above = send(fixture, what);
    assert_true(call_is_done(above));
    assert_refused(call_wait(above), 503, "overloaded");
    assert_int_equal(above->reply.retry_after_s, 1);
    call_free(above);
    tv_sched_cancel(fixture->sched, ret_calls[7]); /* who leaves makes room */
    call_free(call_wait(ret_calls[7]));
    ret_calls[7] = send(fixture, what);
    assert_false(call_is_done(ret_calls[7]));
}

static void all_answered(struct tv_call **calls, int http_status)
{
    for (int32_t i = 0; i < TV_WAITERS_MAX; i++) {
        assert_reply(call_wait(calls[i]), http_status);
        call_free(calls[i]);
    }
}

static void of_a_round(void **state)
{
    static struct tv_call *twins[TV_WAITERS_MAX], *watchers[TV_WAITERS_MAX];
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 5, "");
    client_chain(fixture, &client, 3, body, sizeof body);
    tv_fixed_engine_hold(fixture->engine, 1);
    struct repeated round = {TV_CALL_VERIFY, client.id, "", body};
    struct tv_call *first = send(fixture, &round);
    tv_fixed_engine_await_held(fixture->engine);
    fill(fixture, &round, twins);
    struct repeated wait = {TV_CALL_ROUND, client.id, "", NULL};
    fill(fixture, &wait, watchers); /* are counted by themselves: no retry is refused for them */
    call_release(fixture, first, 200);
    all_answered(twins, 200);
    all_answered(watchers, 200);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 1);
    client_advance(fixture, &client, 3);
    client_check(fixture, &client);
}

static void of_a_guess(void **state)
{
    static struct tv_call *twins[TV_WAITERS_MAX];
    struct fixture *fixture = *state;
    struct client client;
    char body[2048], guess[64];
    client_open(fixture, &client, 5, "");
    struct tv_call *first = call_running(fixture, &client, 2);
    struct client ahead = client;
    client_advance(fixture, &ahead, 2);
    client_chain(fixture, &ahead, 2, body, sizeof body);
    (void)snprintf(guess, sizeof guess, ",\"if\":{\"seq\":1,\"leaf\":1,\"pending\":%d}}",
                   ahead.pending);
    memcpy(body + strlen(body) - 1, guess, strlen(guess) + 1);
    struct repeated round = {TV_CALL_VERIFY, client.id, "", body};
    struct tv_call *owner = send(fixture, &round);
    fill(fixture, &round, twins);
    call_release(fixture, first, 200);
    assert_reply(call_wait(owner), 200);
    call_free(owner);
    all_answered(twins, 200);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 2);
}

static void of_calls_with_a_key(void **state)
{
    static struct tv_call *creates[TV_WAITERS_MAX], *forks[TV_WAITERS_MAX],
        *batches[TV_WAITERS_MAX];
    struct fixture *fixture = *state;
    struct client running, parent;
    char body[2048], items[2300], fork[64];
    struct tv_call *round = pair_running(fixture, &running, &parent, 1); /* the worker is in it */
    (void)snprintf(fork, sizeof fork, "{\"epoch\":\"%s\"}", parent.epoch);
    struct repeated what[2] = {{TV_CALL_CREATE, "", "create", "{\"tokens\":[1,2,3]}"},
                               {TV_CALL_FORK, parent.id, "fork", fork}};
    struct tv_call *first[3];
    for (int i = 0; i < 2; i++) {
        first[i] = send(fixture, &what[i]);
        fill(fixture, &what[i], i == 0 ? creates : forks);
    }
    call_release(fixture, round, 200);
    for (int i = 0; i < 2; i++) {
        assert_reply(call_wait(first[i]), 201);
        call_free(first[i]);
        all_answered(i == 0 ? creates : forks, 201);
    }
    assert_int_equal(fixture->sched->table.count, 4); /* one of each, however many asked */

    tv_fixed_engine_hold(fixture->engine, 1);
    client_chain(fixture, &parent, 2, body, sizeof body);
    (void)snprintf(items, sizeof items, "{\"items\":[{\"session\":\"%s\",%s]}", parent.id,
                   body + 1);
    struct repeated batch = {TV_CALL_BATCH, "", "batch", items};
    first[2] = send(fixture, &batch);
    tv_fixed_engine_await_held(fixture->engine);
    fill(fixture, &batch, batches);
    call_release(fixture, first[2], 200);
    all_answered(batches, 200);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 2);
}

/* Copies of a batch's answer are no more at once than those of a round's. */
static void large_answers_of_a_batch(void **state)
{
    enum { MANY = 40 };
    struct fixture *fixture = *state;
    struct client client;
    struct tv_call *calls[MANY];
    char body[2048], items[2300];
    size_t most = TV_SCHED_REPLY_BYTES + 2 * fixture->sched->limits.inline_bytes;
    client_open(fixture, &client, 6, "");
    client_chain(fixture, &client, 32, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    (void)snprintf(items, sizeof items,
                   "{\"items\":[{\"session\":\"%s\",%s,\"want\":{\"logits\":{\"rows\":\"all\"}}}]}",
                   client.id, body + 1);
    struct repeated batch = {TV_CALL_BATCH, "", "large", items};
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *first = send(fixture, &batch);
    tv_fixed_engine_await_held(fixture->engine);
    for (int i = 0; i < MANY; i++) {
        calls[i] = send(fixture, &batch);
    }
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(first), 200);
    int32_t fit = (int32_t)(most / first->reply.body.bytes) + 1, served = 0;
    assert_in_range(fit, 2, MANY - 2);
    for (int i = 0; i < MANY; i++) {
        int ok = call_wait(calls[i])->reply.http_status == 200;
        served += ok;
        if (!ok) {
            assert_reply(calls[i], 503);
            assert_true(reply_mentions(calls[i], "\"code\":\"overloaded\""));
            assert_int_equal(reply_flag(calls[i], "committed"), 1);
            assert_int_equal(calls[i]->reply.retry_after_s, 1);
        }
        call_free(calls[i]);
    }
    assert_in_range(served, fit, fit + 1);
    struct tv_call *again = send(fixture, &batch); /* as it was told to ask */
    assert_reply(call_wait(again), 200);
    assert_int_equal(again->reply.body.bytes, first->reply.body.bytes);
    call_free(again);
    call_free(first);
}

/* *ret_lease_s: what it was granted. How long it still has, in us. */
static int64_t lease_left_us(struct fixture *fixture, const struct client *client,
                             int32_t *ret_lease_s)
{
    struct tv_session *session = NULL;
    int64_t now_us = tv_clock_us();
    tv_sched_lock(fixture->sched);
    assert_int_equal(tv_sessions_find(&fixture->sched->table, client->id, "", now_us, &session),
                     TV_OK);
    int64_t left_us = session->lease_expires_us - now_us;
    *ret_lease_s = session->lease_s;
    tv_sched_unlock(fixture->sched);
    return left_us;
}

/* As if so much of its lease had gone by. */
static void age(struct fixture *fixture, const struct client *client, int64_t us)
{
    struct tv_session *session = NULL;
    tv_sched_lock(fixture->sched);
    assert_int_equal(
        tv_sessions_find(&fixture->sched->table, client->id, "", tv_clock_us(), &session), TV_OK);
    session->lease_expires_us -= us;
    tv_sched_unlock(fixture->sched);
}

/* Two items, a round of two nodes each; lease_s 0: none is asked for. */
static void batch_of_two(struct fixture *fixture, const struct client *clients, int32_t lease_s,
                         char *ret_items, size_t bytes)
{
    char bodies[2][2048], lease[32] = "";
    for (int i = 0; i < 2; i++) {
        client_chain(fixture, &clients[i], 2, bodies[i], sizeof bodies[i]);
        bodies[i][strlen(bodies[i]) - 1] = '\0';
    }
    if (lease_s > 0) {
        (void)snprintf(lease, sizeof lease, ",\"lease_s\":%d", lease_s);
    }
    int used = snprintf(ret_items, bytes,
                        "{\"items\":[{\"session\":\"%s\",%s%s},{\"session\":\"%s\",%s%s}]}",
                        clients[0].id, bodies[0] + 1, lease, clients[1].id, bodies[1] + 1, lease);
    assert_true(used > 0 && (size_t)used < bytes);
}

/* A batch is sent again when one of its rounds has ended and the other has not: whoever waits for
 * it uses both sessions. */
static void who_waits_for_a_batch_renews(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[2];
    char items[4400], longer[4400];
    const struct timespec millisecond = {.tv_nsec = 1000000};
    int32_t lease_s = 0;
    tv_sched_lock(fixture->sched);     /* the worker reads it */
    fixture->engine->requests_max = 1; /* one round a launch */
    tv_sched_unlock(fixture->sched);
    client_open(fixture, &clients[0], 5, ",\"lease_s\":60");
    client_open(fixture, &clients[1], 6, ",\"lease_s\":60");
    batch_of_two(fixture, clients, 0, items, sizeof items);
    batch_of_two(fixture, clients, 900, longer, sizeof longer);
    tv_fixed_engine_slow(fixture->engine, 20000);
    struct repeated batch = {TV_CALL_BATCH, "", "batch", items};
    struct repeated other = {TV_CALL_BATCH, "", "batch", longer};
    struct tv_call *first = send(fixture, &batch);
    while (tv_fixed_engine_commits(fixture->engine) < 1) {
        (void)nanosleep(&millisecond, NULL);
    }
    tv_fixed_engine_hold(fixture->engine, 1); /* the other one, which is slow to begin */
    while (tv_sched_in_flight(fixture->sched) > 1) {
        (void)nanosleep(&millisecond, NULL);
    }
    age(fixture, &clients[0], 50 * INT64_C(1000000));
    assert_true(lease_left_us(fixture, &clients[0], &lease_s) < 15 * INT64_C(1000000));
    struct tv_call *twin = send(fixture, &batch);
    assert_false(call_is_done(twin));
    assert_true(lease_left_us(fixture, &clients[0], &lease_s) > 50 * INT64_C(1000000));
    assert_int_equal(lease_s, 60);
    struct tv_call *longest = send(fixture, &other);
    struct tv_call *last = send(fixture, &batch); /* asks for no other lease */
    tv_fixed_engine_hold(fixture->engine, 0);
    for (int i = 0; i < 2; i++) {
        struct tv_call *calls[2][2] = {{first, twin}, {longest, last}};
        for (int k = 0; k < 2; k++) {
            assert_reply(call_wait(calls[i][k]), 200);
            call_free(calls[i][k]);
        }
    }
    for (int i = 0; i < 2; i++) { /* also where the round was under way when it was sent again */
        assert_true(lease_left_us(fixture, &clients[i], &lease_s) > 800 * INT64_C(1000000));
        assert_int_equal(lease_s, 900);
    }
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 2);
    tv_sched_lock(fixture->sched);
    fixture->engine->requests_max = 4; /* as it was made, and will be given back */
    tv_sched_unlock(fixture->sched);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(of_a_round),
        CASE(of_a_guess),
        CASE(of_calls_with_a_key),
        CASE(who_waits_for_a_batch_renews),
        cmocka_unit_test_setup_teardown(large_answers_of_a_batch, fixture_setup_wide,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
