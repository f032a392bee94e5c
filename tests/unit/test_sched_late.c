/*
 * test_sched_late.c - what the clock and leaving clients decide while a launch lasts: deadlines of
 * calls that have not begun, waits for a round, calls whose clients left before they were admitted,
 * batches that nobody waits for any more; and how long a launch waits for others.
 */
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define BODY 16384

/* A verify of a chain of two with more members, not yet submitted. */
static struct tv_call *chain_make(struct fixture *fixture, const struct client *client,
                                  const char *rest)
{
    char body[2048];
    (void)client_chain(fixture, client, 2, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    return call_make(fixture, TV_CALL_VERIFY, client->id, "%s%s}", body, rest);
}

/* The same, submitted, with a deadline that was over a moment ago. */
static struct tv_call *chain_late(struct fixture *fixture, const struct client *client,
                                  const char *rest)
{
    struct tv_call *call = chain_make(fixture, client, rest);
    call->request.deadline_ms = 1;
    call->received_us -= 2000;
    call_start(fixture, call);
    return call;
}

static void a_deadline_does_not_wait_for_a_launch(void **state)
{
    struct fixture *fixture = *state;
    struct client running, late, patient;
    client_open(fixture, &running, 5, "");
    client_open(fixture, &late, 6, "");
    client_open(fixture, &patient, 7, "");
    struct tv_call *first = call_running(fixture, &running, 2);
    struct tv_call *call = chain_late(fixture, &late, "");
    struct tv_call *other = call_chain(fixture, &patient, 2);
    assert_false(call_is_done(call));
    tv_sched_look(fixture->sched);
    assert_true(call_is_done(call)); /* the launch still lasts */
    assert_refused(call_wait(call), 504, "deadline");
    call_free(call);
    assert_false(call_is_done(first));
    assert_false(call_is_done(other));
    assert_int_equal(tv_sched_in_flight(fixture->sched), 2);
    client_check(fixture, &late); /* not busy: its seq is free at once */
    call_release(fixture, first, 200);
    call_release(fixture, other, 200);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 2);
    client_check(fixture, &late);
    call_release(fixture, call_chain(fixture, &late, 2), 200);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 3);
}

static void a_guess_is_late_by_itself(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    char rest[96];
    client_open(fixture, &client, 5, "");
    struct tv_call *first = call_running(fixture, &client, 3);
    ahead = client;
    client_advance(fixture, &ahead, 3);
    (void)snprintf(rest, sizeof rest, ",\"if\":{\"seq\":1,\"leaf\":2,\"pending\":%d}",
                   ahead.pending);
    struct tv_call *call = chain_late(fixture, &ahead, rest);
    assert_false(call_is_done(call));
    tv_sched_look(fixture->sched);
    assert_true(call_is_done(call));
    assert_refused(call_wait(call), 504, "deadline");
    call_free(call);
    assert_false(call_is_done(first));
    call_release(fixture, first, 200);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 1);
    client_check(fixture, &ahead);
    call_release(fixture, call_chain(fixture, &ahead, 2), 200);
}

static void who_has_time_stays(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    struct tv_call *first = pair_running(fixture, &running, &queued, 2);
    struct tv_call *late = chain_late(fixture, &queued, "");
    struct tv_call *twin = call_chain(fixture, &queued, 2);
    struct tv_call *later = chain_late(fixture, &queued, "");
    tv_sched_look(fixture->sched);
    assert_refused(call_wait(late), 504, "deadline");
    assert_refused(call_wait(later), 504, "deadline");
    assert_false(call_is_done(twin));
    call_free(late);
    call_free(later);
    call_release(fixture, first, 200);
    assert_reply(call_wait(twin), 200);
    call_free(twin);
    client_advance(fixture, &queued, 2);
    client_check(fixture, &queued);
}

/* Launches one by one: each says that it is there, and waits to be let through. */
static sem_t entered, gate;
static struct tv_engine_ops gated_ops;
static const struct tv_engine_ops *real_ops;

static int gated_verify(struct tv_engine *engine, const struct tv_round_in *in, int32_t count,
                        struct tv_round_out *out)
{
    assert_int_equal(sem_post(&entered), 0);
    assert_int_equal(sem_wait(&gate), 0);
    return real_ops->verify(engine, in, count, out);
}

static void gate_close(struct fixture *fixture)
{
    assert_int_equal(sem_init(&entered, 0, 0), 0);
    assert_int_equal(sem_init(&gate, 0, 0), 0);
    tv_sched_lock(fixture->sched);
    real_ops = fixture->engine->ops;
    gated_ops = *real_ops;
    gated_ops.verify = gated_verify;
    fixture->engine->ops = &gated_ops;
    fixture->engine->rider_rows = 0; /* what has a place goes nowhere else */
    tv_sched_unlock(fixture->sched);
}

static struct tv_call *extend_start(struct fixture *fixture, const struct client *client)
{
    struct tv_call *call = call_make(fixture, TV_CALL_EXTEND, client->id,
                                     "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"tokens\":["
                                     "1,2,3],\"deadline_ms\":600000}",
                                     client->seq, client->epoch, client->len);
    call_start(fixture, call);
    return call;
}

/* A call with a place beside others has not begun before its first slice: until then it may be
 * late, and its client may leave. */
static void a_place_is_no_beginning(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[5];
    for (int i = 0; i < 5; i++) {
        client_open(fixture, &clients[i], 4 + i, "");
    }
    gate_close(fixture);
    struct tv_call *first = call_chain(fixture, &clients[0], 2);
    assert_int_equal(sem_wait(&entered), 0);
    struct tv_call *second = call_chain(fixture, &clients[1], 2);
    struct tv_call *extends[3];
    for (int i = 0; i < 3; i++) {
        extends[i] = extend_start(fixture, &clients[2 + i]);
    }
    assert_int_equal(sem_post(&gate), 0);
    assert_reply(call_wait(first), 200);
    assert_int_equal(sem_wait(&entered), 0); /* the second; the others have their places */
    tv_sched_lock(fixture->sched);
    int32_t places = 0;
    for (struct job *job = fixture->sched->queue.first; job != NULL; job = job->next) {
        places += job->stage == JOB_PREFILL && job->queued;
        if (job->call == extends[0]) { /* its time is over */
            extends[0]->request.deadline_ms = 1;
            extends[0]->received_us -= 2000;
            tv_sched_job_waiters(job);
        }
    }
    tv_sched_unlock(fixture->sched);
    assert_int_equal(places, 3);
    tv_sched_look(fixture->sched);
    assert_true(call_is_done(extends[0]));
    assert_refused(call_wait(extends[0]), 504, "deadline");
    tv_sched_cancel(fixture->sched, extends[1]);
    assert_true(call_is_done(extends[1]));
    assert_false(call_is_done(extends[2]));
    client_check(fixture, &clients[2]);
    client_check(fixture, &clients[3]);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 2);
    assert_int_equal(sem_post(&gate), 0);
    assert_reply(call_wait(second), 200);
    assert_reply(call_wait(extends[2]), 200);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
    client_check(fixture, &clients[2]); /* neither ran */
    client_check(fixture, &clients[3]);
    call_free(first);
    call_free(second);
    for (int i = 0; i < 3; i++) {
        call_free(extends[i]);
    }
}

/* Under load a launch waits for rounds that answer the last ones: for a quarter of what the last
 * took, and no longer than the operator says. */
static void a_window_is_waited_for(void **state)
{
    struct fixture *fixture = *state;
    struct tv_sched *sched = fixture->sched;
    struct client running, queued;
    struct tv_call *first = pair_running(fixture, &running, &queued, 2);
    struct tv_call *second = call_chain(fixture, &queued, 2);
    static const struct {
        int64_t took_us, window_us;
    } cases[] = {{1000000, 500}, {4000, 500}, {800, 200}, {4, 1}};
    tv_sched_lock(sched); /* the worker is in its launch */
    fixture->config.batch_window_us = 500;
    sched->rounds_last[0] = sched->rounds_last[1] = 2;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t wake_us = INT64_MAX;
        sched->launched_us = 1000000;
        sched->launch_took_us = cases[i].took_us;
        int64_t until_us = sched->launched_us + cases[i].window_us;
        assert_int_equal(tv_sched_pick_launch(sched, until_us - 1, &wake_us), 0);
        assert_true(wake_us == until_us);
    }
    sched->launched_us = 0;
    tv_sched_unlock(sched);
    assert_false(call_is_done(second));
    call_release(fixture, first, 200);
    call_release(fixture, second, 200);
}

static struct tv_call *wait_for(struct fixture *fixture, const struct client *client, int32_t seq)
{
    struct tv_call *call = call_make(fixture, TV_CALL_ROUND, client->id, NULL);
    call->request.seq = seq;
    call->request.wait_ms = 1;
    call->received_us -= 2000;
    call_start(fixture, call);
    return call;
}

static void a_wait_for_a_round_ends_in_time(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    struct tv_call *first = pair_running(fixture, &running, &queued, 2);
    struct tv_call *second = call_chain(fixture, &queued, 2);
    struct tv_call *waits[2] = {wait_for(fixture, &running, 1), wait_for(fixture, &queued, 1)};
    for (int i = 0; i < 2; i++) {
        assert_false(call_is_done(waits[i]));
    }
    tv_sched_look(fixture->sched);
    for (int i = 0; i < 2; i++) {
        assert_true(call_is_done(waits[i]));
        assert_reply(call_wait(waits[i]), 202);
        call_free(waits[i]);
    }
    call_release(fixture, first, 200);
    call_release(fixture, second, 200);
}

/* Who looks, as often as it can, beside the worker. */
struct looker {
    struct fixture *fixture;
    atomic_int stop;
};

static void *look_main(void *context)
{
    struct looker *looker = context;
    while (!atomic_load_explicit(&looker->stop, memory_order_relaxed)) {
        tv_sched_look(looker->fixture->sched);
    }
    return NULL;
}

struct load {
    struct fixture *fixture;
    int32_t rounds, late, served;
};

/* Rounds with little time: each is either answered and counted, or refused and not. */
static void *load_main(void *context)
{
    struct load *load = context;
    struct client client;
    client_open(load->fixture, &client, 3, "");
    for (int32_t i = 0; i < load->rounds; i++) {
        struct tv_call *call = chain_make(load->fixture, &client, "");
        call->request.deadline_ms = 1;
        call_start(load->fixture, call);
        (void)call_wait(call);
        if (call->reply.http_status == 200) {
            client_advance(load->fixture, &client, 2);
            load->served++;
        } else {
            assert_refused(call, 504, "deadline");
            load->late++;
        }
        call_free(call);
        if (i % 8 == 0) {
            client_check(load->fixture, &client);
        }
        if (client.len > 450) {
            expect(load->fixture, 204, TV_CALL_DELETE, client.id, NULL);
            client_open(load->fixture, &client, 3, "");
        }
    }
    client_check(load->fixture, &client);
    return NULL;
}

static void a_refused_round_is_never_committed(void **state)
{
    struct fixture *fixture = *state;
    struct looker looker = {.fixture = fixture};
    struct load loads[6];
    pthread_t threads[6], look;
    int32_t late = 0, served = 0;
    fixture->config.queue_max = 64; /* nobody has called yet */
    tv_fixed_engine_slow(fixture->engine, 700);
    atomic_init(&looker.stop, 0);
    assert_int_equal(pthread_create(&look, NULL, look_main, &looker), 0);
    for (int i = 0; i < 6; i++) { /* a launch has room for four */
        loads[i] = (struct load){.fixture = fixture, .rounds = fixture_scaled(200)};
        assert_int_equal(pthread_create(&threads[i], NULL, load_main, &loads[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        late += loads[i].late;
        served += loads[i].served;
    }
    atomic_store_explicit(&looker.stop, 1, memory_order_relaxed);
    assert_int_equal(pthread_join(look, NULL), 0);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), served);
    assert_int_equal(late + served, 6 * fixture_scaled(200));
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
}

/* Whoever noticed that the client left may have been faster than its call. */
static void who_left_before_is_not_admitted(void **state)
{
    struct fixture *fixture = *state;
    struct client running, client;
    char body[2048];
    struct tv_call *first = pair_running(fixture, &running, &client, 2);
    struct tv_call *calls[3] = {chain_make(fixture, &client, ""), NULL, NULL};
    (void)client_chain(fixture, &client, 2, body, sizeof body);
    calls[1] = call_make(fixture, TV_CALL_BATCH, "", "{\"items\":[{\"session\":\"%s\",%s]}",
                         client.id, body + 1);
    calls[2] = call_make(fixture, TV_CALL_ROUND, running.id, NULL);
    calls[2]->request.seq = 1;
    calls[2]->request.wait_ms = 60000;
    for (int i = 0; i < 3; i++) {
        tv_sched_cancel(fixture->sched, calls[i]);
        assert_false(call_is_done(calls[i]));
        call_start(fixture, calls[i]);
        assert_true(call_is_done(calls[i]));
        assert_reply(call_wait(calls[i]), i == 2 ? 202 : 504);
        call_free(calls[i]);
    }
    assert_int_equal(tv_sched_in_flight(fixture->sched), 1);
    call_release(fixture, first, 200);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 1);
    client_check(fixture, &client);
}

static struct tv_call *batch_make(struct fixture *fixture, const struct client *clients,
                                  int32_t count, const char *key)
{
    char body[2048], items[BODY] = "";
    for (int32_t i = 0; i < count; i++) {
        size_t at = strlen(items);
        (void)client_chain(fixture, &clients[i], 2, body, sizeof body);
        int used = snprintf(items + at, BODY - at, "%s{\"session\":\"%s\",%s", i > 0 ? "," : "",
                            clients[i].id, body + 1);
        assert_true(used > 0 && (size_t)used < BODY - at);
    }
    struct tv_call *call = call_make(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    (void)snprintf(call->key, sizeof call->key, "%s", key);
    return call;
}

static void open_three(struct fixture *fixture, struct client *running, struct client clients[2])
{
    client_open(fixture, running, 5, "");
    for (int i = 0; i < 2; i++) {
        client_open(fixture, &clients[i], 6, "");
    }
}

/* The last one who waits takes what is queued along, whichever of them came first. */
static void b47_the_last_who_leaves_a_batch_drops_it(void **state)
{
    struct fixture *fixture = *state;
    struct client running, clients[2];
    open_three(fixture, &running, clients);
    struct tv_call *round = call_running(fixture, &running, 2);
    struct tv_call *first = batch_make(fixture, clients, 2, "key");
    struct tv_call *twin = batch_make(fixture, clients, 2, "key");
    call_start(fixture, first);
    call_start(fixture, twin);
    tv_sched_cancel(fixture->sched, first);
    assert_false(call_is_done(first)); /* the other one waits for it */
    tv_sched_cancel(fixture->sched, twin);
    assert_true(call_is_done(first));
    assert_true(call_is_done(twin));
    assert_true(reply_mentions(call_wait(first), "the client has gone"));
    assert_refused(call_wait(twin), 504, "deadline");
    call_free(first);
    call_free(twin);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 1);
    assert_null(fixture->sched->batches);
    call_release(fixture, round, 200);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 1);
    for (int i = 0; i < 2; i++) {
        client_check(fixture, &clients[i]);
    }
}

struct leaver {
    struct fixture *fixture;
    struct tv_call *call;
    pthread_barrier_t *start;
};

static void *leave_main(void *context)
{
    const struct leaver *leaver = context;
    (void)pthread_barrier_wait(leaver->start);
    tv_sched_cancel(leaver->fixture->sched, leaver->call);
    return NULL;
}

/* Whoever sends a batch again at the moment in which its first client leaves gets it whole. */
static void b47_a_batch_joined_as_it_is_left_runs(void **state)
{
    struct fixture *fixture = *state;
    struct client running, clients[2];
    pthread_barrier_t start;
    char key[24];
    assert_int_equal(pthread_barrier_init(&start, NULL, 2), 0);
    open_three(fixture, &running, clients);
    for (int32_t n = 0, count = fixture_scaled(200); n < count; n++) {
        pthread_t thread;
        struct tv_call *round = call_running(fixture, &running, 1);
        (void)snprintf(key, sizeof key, "key %d", n);
        struct tv_call *first = batch_make(fixture, clients, 2, key);
        struct tv_call *twin = batch_make(fixture, clients, 2, key);
        struct leaver leaver = {.fixture = fixture, .call = first, .start = &start};
        call_start(fixture, first);
        assert_int_equal(pthread_create(&thread, NULL, leave_main, &leaver), 0);
        (void)pthread_barrier_wait(&start);
        call_start(fixture, twin);
        assert_int_equal(pthread_join(thread, NULL), 0);
        call_release(fixture, round, 200);
        (void)call_wait(first);
        assert_reply(call_wait(twin), 200);
        assert_false(reply_mentions(twin, "\"problem\""));
        call_free(first);
        call_free(twin);
        client_advance(fixture, &running, 1);
        for (int i = 0; i < 2; i++) {
            client_advance(fixture, &clients[i], 2);
            client_check(fixture, &clients[i]);
        }
        if (clients[0].len > 450) {
            open_three(fixture, &running, clients);
        }
    }
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
    assert_int_equal(pthread_barrier_destroy(&start), 0);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_deadline_does_not_wait_for_a_launch),
        CASE(a_guess_is_late_by_itself),
        CASE(who_has_time_stays),
        CASE(a_place_is_no_beginning),
        CASE(a_window_is_waited_for),
        CASE(a_wait_for_a_round_ends_in_time),
        CASE(a_refused_round_is_never_committed),
        CASE(who_left_before_is_not_admitted),
        CASE(b47_the_last_who_leaves_a_batch_drops_it),
        CASE(b47_a_batch_joined_as_it_is_left_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
