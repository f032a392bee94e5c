/*
 * test_shadow_wait.c - calls that wait for an oracle: how long at most, what a stop makes of them,
 * and what becomes of the session meanwhile. Time passes when a test says so: no deadline and no
 * lease here is short enough for a busy machine to miss it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/clock.h"
#include "sched_real_fixture.h"
#include "shadow/round.h"

#define SECOND INT64_C(1000000)

struct session {
    char id[32], epoch[17];
    int32_t len, pending, seq;
};

/* The real clock, and what a test puts before it. */
static _Atomic int64_t ahead_us;

int64_t __real_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void)
{
    return __real_tv_clock_us() + atomic_load(&ahead_us);
}

/* Time passes, and the worker, which sleeps by the real clock, is told to look. */
static void pass(struct fixture *fixture, int64_t seconds)
{
    (void)atomic_fetch_add(&ahead_us, seconds * SECOND);
    tv_sched_lock(fixture->sched);
    (void)pthread_cond_signal(&fixture->sched->wake);
    tv_sched_unlock(fixture->sched);
}

static void session_open(struct fixture *fixture, struct session *session, int32_t lease_s)
{
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "",
                               "{\"tokens\":[1,2,3,4,5],\"sampling\":{\"rule\":\"greedy\"},"
                               "\"lease_s\":%d}",
                               lease_s);
    assert_reply(call, 201);
    reply_text(call, "session", session->id, sizeof session->id);
    reply_text(call, "epoch", session->epoch, sizeof session->epoch);
    session->pending = (int32_t)reply_int(call, "pending");
    session->len = 5;
    session->seq = 1;
    call_free(call);
}

/* A verify of one node that wants its oracle's word. */
static struct tv_call *wanted(struct fixture *fixture, const struct session *session,
                              int32_t deadline_ms)
{
    return call_make(fixture, TV_CALL_VERIFY, session->id,
                     "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tree\":{\"tokens\":[%d],"
                     "\"parents\":[-1]},\"want\":{\"shadow\":true},\"deadline_ms\":%d}",
                     session->seq, session->epoch, session->len, session->pending, deadline_ms);
}

static struct tv_call *compared(struct fixture *fixture, const struct session *session)
{
    return call_make(fixture, TV_CALL_PARITY, "",
                     "{\"session\":\"%s\",\"tree\":{\"tokens\":[%d],\"parents\":[-1]}}",
                     session->id, session->pending);
}

/* The answer of a wanted round that its oracle did not get to, and the commit behind it. */
static void assert_skipped(struct fixture *fixture, const struct session *session,
                           struct tv_call *call, const char *why)
{
    char text[32];
    assert_reply(call, 200);
    assert_int_equal(reply_flag(call, "shadow/ran"), 0);
    reply_text(call, "shadow/skipped", text, sizeof text);
    assert_string_equal(text, why);
    assert_int_equal(reply_int(call, "committed_len"), session->len + 1);
    struct tv_call *state = ask(fixture, TV_CALL_STATE, session->id, NULL);
    assert_reply(state, 200);
    assert_int_equal(reply_int(state, "committed_len"), session->len + 1);
    assert_int_equal(reply_int(state, "next_seq"), session->seq + 1);
    call_free(state);
    struct tv_call *again = wanted(fixture, session, 1000); /* kept for a retry, too */
    call_start(fixture, again);
    assert_reply(call_wait(again), 200);
    assert_int_equal(reply_flag(again, "replayed"), 1);
    call_free(again);
}

static void pause_ms(int32_t ms)
{
    (void)nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static void an_oracle_is_waited_for_until_the_deadline(void **state)
{
    struct real *real = *state;
    struct session session;
    session_open(&real->fixture, &session, 60);
    gate_close(GATE_KERNEL);
    struct tv_call *call = wanted(&real->fixture, &session, 600000);
    call_start(&real->fixture, call);
    gate_await(GATE_KERNEL);
    pass(&real->fixture, 300);
    pause_ms(20); /* for a worker that answers too early */
    assert_false(call_is_done(call));
    pass(&real->fixture, 300);
    (void)call_wait(call);
    assert_skipped(&real->fixture, &session, call, "deadline");
    call_free(call);
    session.seq++; /* the next round is judged as ever, behind the one that was given up */
    session.len++;
    struct tv_call *now = ask(&real->fixture, TV_CALL_STATE, session.id, NULL);
    session.pending = (int32_t)reply_int(now, "pending");
    call_free(now);
    call = wanted(&real->fixture, &session, 600000);
    call_start(&real->fixture, call);
    gate_open(GATE_KERNEL);
    assert_reply(call_wait(call), 200);
    assert_int_equal(reply_flag(call, "shadow/ran"), 1);
    assert_false(reply_has(call, "shadow/skipped"));
    call_free(call);
}

/* A round somebody waits for is with the oracle. */
static int waits(struct real *real)
{
    int found = 0;
    (void)pthread_mutex_lock(&real->shadow->lock);
    for (struct tv_shadow_round *round = real->shadow->first; round != NULL; round = round->next) {
        found |= round->done != NULL;
    }
    (void)pthread_mutex_unlock(&real->shadow->lock);
    return found;
}

/* With every round judged the backlog is long: who waits does not stand behind it. */
static void waited_for_rounds_are_judged_first(void **state)
{
    struct real *real = *state;
    struct session session, other;
    session_open(&real->fixture, &session, 60);
    session_open(&real->fixture, &other, 60);
    gate_close(GATE_KERNEL);
    expect(&real->fixture, 200, TV_CALL_DECODE, other.id,
           "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":5,\"max_tokens\":9}", other.epoch);
    gate_await(GATE_KERNEL);
    struct tv_call *call = wanted(&real->fixture, &session, 600000);
    call_start(&real->fixture, call);
    while (!waits(real)) {
        pause_ms(1);
    }
    gate_let(GATE_KERNEL, 3 + 3); /* layers of the round that is in hand, and of this one */
    assert_reply(call_wait(call), 200);
    assert_int_equal(reply_flag(call, "shadow/ran"), 1);
    call_free(call);
}

static void a_stop_answers_what_waits_for_an_oracle(void **state)
{
    struct real *real = *state;
    struct session session;
    session_open(&real->fixture, &session, 60);
    gate_close(GATE_KERNEL);
    struct tv_call *call = wanted(&real->fixture, &session, 600000);
    call_start(&real->fixture, call);
    gate_await(GATE_KERNEL);
    assert_false(call_is_done(call));
    tv_sched_drain(real->fixture.sched, 1, 0);
    (void)call_wait(call);
    assert_skipped(&real->fixture, &session, call, "draining");
    call_free(call);
    while (tv_sched_in_flight(real->fixture.sched) > 0) {
        pause_ms(1);
    }
    tv_sched_drain(real->fixture.sched, 0, 0);
}

/* Without a drain before it, as after a second signal; the gates are still closed. */
static void destruction_answers_what_waits_for_an_oracle(void **state)
{
    struct real *real = *state;
    struct session session, other;
    session_open(&real->fixture, &session, 60);
    session_open(&real->fixture, &other, 60);
    gate_close(GATE_KERNEL);
    struct tv_call *call = wanted(&real->fixture, &session, 600000);
    struct tv_call *parity = compared(&real->fixture, &other);
    call_start(&real->fixture, call);
    gate_await(GATE_KERNEL);
    call_start(&real->fixture, parity);
    while (!waits(real)) { /* its path oracle is done; before the other there is a backlog */
        pause_ms(1);
    }
    tv_sched_destroy(real->fixture.sched);
    real->fixture.sched = NULL;
    assert_reply(call_wait(call), 200);
    assert_int_equal(reply_flag(call, "shadow/ran"), 0);
    assert_int_equal(reply_int(call, "committed_len"), 6);
    assert_refused(call_wait(parity), 503, "draining");
    call_free(call);
    call_free(parity);
}

static void a_stop_refuses_comparisons(void **state)
{
    struct real *real = *state;
    struct session session;
    session_open(&real->fixture, &session, 60);
    gate_close(GATE_PATH);
    struct tv_call *first = compared(&real->fixture, &session);
    struct tv_call *second = compared(&real->fixture, &session);
    call_start(&real->fixture, first);
    gate_await(GATE_PATH);
    call_start(&real->fixture, second); /* behind the first one */
    tv_sched_drain(real->fixture.sched, 1, 0);
    pause_ms(50);
    assert_false(call_is_done(first)); /* within the grace it may still be answered */
    tv_sched_drain(real->fixture.sched, 1, 1);
    gate_open(GATE_PATH);
    assert_refused(call_wait(first), 503, "draining");
    assert_refused(call_wait(second), 503, "draining");
    call_free(first);
    call_free(second);
    struct tv_call *call = ask(&real->fixture, TV_CALL_PARITY_TOTALS, "", NULL);
    assert_int_equal(reply_int(call, "rounds/violation"), 0);
    assert_true(reply_int(call, "rounds/skipped") >= 2);
    call_free(call);
}

static int listed(struct fixture *fixture, const struct session *session)
{
    struct tv_call *call = ask(fixture, TV_CALL_LIST, "", NULL); /* renews nothing */
    int found = reply_mentions(call, session->id);
    call_free(call);
    return found;
}

static void a_lease_counts_from_the_end_of_a_comparison(void **state)
{
    struct real *real = *state;
    struct session session;
    session_open(&real->fixture, &session, 3000);
    gate_close(GATE_PATH);
    struct tv_call *call = compared(&real->fixture, &session);
    call_start(&real->fixture, call);
    gate_await(GATE_PATH);
    pass(&real->fixture, 4000);
    pause_ms(20); /* for a worker that sweeps it away */
    assert_true(listed(&real->fixture, &session));
    gate_open(GATE_PATH);
    assert_reply(call_wait(call), 200);
    call_free(call);
    pass(&real->fixture, 1500); /* 5,500 s after the round that was compared */
    pause_ms(20);
    assert_true(listed(&real->fixture, &session));
    pass(&real->fixture, 1501);
    while (listed(&real->fixture, &session)) { /* but it does end */
        pause_ms(1);
    }
    expect(&real->fixture, 410, TV_CALL_STATE, session.id, NULL);
}

static void a_session_may_be_deleted_under_a_comparison(void **state)
{
    struct real *real = *state;
    struct session session;
    session_open(&real->fixture, &session, 60);
    gate_close(GATE_PATH);
    struct tv_call *call = compared(&real->fixture, &session);
    call_start(&real->fixture, call);
    gate_await(GATE_PATH);
    expect(&real->fixture, 204, TV_CALL_DELETE, session.id, NULL);
    gate_open(GATE_PATH);
    assert_reply(call_wait(call), 200);
    assert_int_equal(reply_flag(call, "ok"), 1);
    call_free(call);
    expect(&real->fixture, 404, TV_CALL_STATE, session.id, NULL);
}

#define WITH_REAL(test) cmocka_unit_test_setup_teardown(test, real_setup, real_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WITH_REAL(an_oracle_is_waited_for_until_the_deadline),
        WITH_REAL(waited_for_rounds_are_judged_first),
        WITH_REAL(a_stop_answers_what_waits_for_an_oracle),
        WITH_REAL(destruction_answers_what_waits_for_an_oracle),
        WITH_REAL(a_stop_refuses_comparisons),
        WITH_REAL(a_lease_counts_from_the_end_of_a_comparison),
        WITH_REAL(a_session_may_be_deleted_under_a_comparison),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
