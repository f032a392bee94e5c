/*
 * test_sched_many.c - 64 sessions that send their next round as soon as they have an answer: nobody
 * waits much longer than others do. Counted in launches, which no machine makes slower.
 */
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

#include "test_sched_fixture.h"

enum { SESSIONS = 64, ROUNDS = 12 };

/* One session and the call that is under way. */
struct caller {
    struct fixture *fixture;
    struct client client;
    struct tv_call *call;
    int32_t nodes, done_count;
    uint64_t sent; /* launches before its round */
    uint64_t waits[ROUNDS];
    _Atomic int *left;
};

static uint64_t launches(const struct fixture *fixture)
{
    return atomic_load(&fixture->stats.launches);
}

static void send_next(struct caller *caller);

/* On the worker, or whoever submits: what the test asserts is looked at behind the last one. */
static void on_done(struct tv_call *call)
{
    struct caller *caller = call->owner;
    if (call->reply.http_status == 200) {
        caller->waits[caller->done_count++] = launches(caller->fixture) - caller->sent;
        client_advance(caller->fixture, &caller->client, caller->nodes);
    }
    if (call->reply.http_status == 200 && caller->done_count < ROUNDS) {
        send_next(caller);
    } else {
        (void)atomic_fetch_sub(caller->left, 1);
    }
    tv_call_destroy(call);
}

static void send_next(struct caller *caller)
{
    char body[2048];
    struct tv_problem problem;
    struct tv_call *call = tv_call_create();
    assert_non_null(call);
    (void)client_chain(caller->fixture, &caller->client, caller->nodes, body, sizeof body);
    assert_int_equal(tv_request_decode(TV_CALL_VERIFY, body, strlen(body),
                                       tv_sched_limits(caller->fixture->sched), &call->request,
                                       &problem),
                     0);
    memcpy(call->request.session, caller->client.id, sizeof caller->client.id);
    (void)snprintf(call->request_id, sizeof call->request_id, "many");
    call->done = on_done;
    call->owner = caller;
    call->received_us = 1 + (int64_t)launches(caller->fixture); /* the order they come in */
    call->request.deadline_ms = 0;
    caller->sent = launches(caller->fixture);
    assert_int_equal(tv_sched_submit(caller->fixture->sched, call), 1);
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static void sixty_four_sessions_take_turns(void **state)
{
    static struct caller callers[SESSIONS];
    static uint64_t waits[SESSIONS * ROUNDS];
    const struct timespec pause = {.tv_nsec = 1000000};
    struct fixture *fixture = *state;
    _Atomic int left = SESSIONS;
    fixture->config.max_sessions = fixture->config.queue_max = 2 * SESSIONS;
    fixture->sched->table.params.sessions_max = SESSIONS; /* nobody has come yet */
    memset(callers, 0, sizeof callers);
    for (int32_t i = 0; i < SESSIONS; i++) {
        callers[i].fixture = fixture;
        callers[i].left = &left;
        callers[i].nodes = i % 8 == 7 ? 32 : 1 + i % 16; /* some send large trees */
        client_open(fixture, &callers[i].client, 8, ",\"lease_s\":3600");
    }
    tv_fixed_engine_hold(fixture->engine, 1);
    for (int32_t i = 0; i < SESSIONS; i++) {
        send_next(&callers[i]);
    }
    tv_fixed_engine_hold(fixture->engine, 0);
    while (atomic_load(&left) > 0) {
        (void)nanosleep(&pause, NULL);
    }
    for (int32_t i = 0; i < SESSIONS; i++) {
        assert_int_equal(callers[i].done_count, ROUNDS);
        memcpy(&waits[(size_t)i * ROUNDS], callers[i].waits, sizeof callers[i].waits);
    }
    qsort(waits, SESSIONS * ROUNDS, sizeof waits[0], ascending);
    uint64_t median = waits[SESSIONS * ROUNDS / 2], longest = waits[SESSIONS * ROUNDS - 1];
    print_message("waits in launches: median %llu, longest %llu\n", (unsigned long long)median,
                  (unsigned long long)longest);
    assert_true(median >= 1);
    assert_true(longest <= 10 * median);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(sixty_four_sessions_take_turns, fixture_setup,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
