/*
 * test_sched_share.c - tokens of a waiting prompt in launches of rounds: which launches take how
 * many along, whose, and that neither the prompt nor the rounds are other ones for it.
 *
 * Launches are put together while the engine is held, and their costs are planted: nothing here is
 * judged by time.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define ROUNDS  12 /* three launches */
#define LONG_US 100000000

/* A prompt that nobody else has, of `count` tokens. */
static struct tv_call *prompt(struct fixture *fixture, int32_t first, int32_t count)
{
    char tokens[4096];
    int at = snprintf(tokens, sizeof tokens, "%d", (int)first);
    for (int32_t i = 1; i < count; i++) {
        at += snprintf(tokens + at, sizeof tokens - (size_t)at, ",%d", (int)(i % 300));
    }
    return call_make(fixture, TV_CALL_CREATE, "", "{\"tokens\":[%s]}", tokens);
}

/* Launches of `nodes` nodes, and slices of any size, have taken so long, as far as anybody knows.
 */
static void plant(struct fixture *fixture, int32_t nodes, int64_t us)
{
    tv_sched_lock(fixture->sched);
    for (int i = 0; i < 15; i++) {
        tv_sched_curve_add(fixture->sched->curve, nodes, us);
        for (int32_t rows = 1; rows <= 1024; rows *= 2) {
            tv_sched_curve_add(fixture->sched->share.slices, rows, us);
        }
    }
    tv_sched_unlock(fixture->sched);
}

struct race {
    struct client clients[ROUNDS], first;
    struct tv_call *running, *calls[ROUNDS];
};

/* One round is held in the engine, and one of each other client waits behind it. */
static void race_start(struct fixture *fixture, struct race *race)
{
    for (int i = 0; i < ROUNDS; i++) {
        client_open(fixture, &race->clients[i], 5, "");
    }
    client_open(fixture, &race->first, 5, "");
    race->running = call_running(fixture, &race->first, 1);
    for (int i = 0; i < ROUNDS; i++) {
        race->calls[i] = call_chain(fixture, &race->clients[i], 1);
    }
}

static void race_end(struct fixture *fixture, struct race *race)
{
    call_release(fixture, race->running, 200);
    for (int i = 0; i < ROUNDS; i++) {
        assert_reply(call_wait(race->calls[i]), 200);
        call_free(race->calls[i]);
        client_advance(fixture, &race->clients[i], 1);
    }
}

static void race_check(struct fixture *fixture, struct race *race)
{
    for (int i = 0; i < ROUNDS; i++) {
        client_check(fixture, &race->clients[i]);
    }
}

static void race_close(struct fixture *fixture, const struct race *race)
{
    for (int i = 0; i < ROUNDS; i++) {
        expect(fixture, 204, TV_CALL_DELETE, race->clients[i].id, NULL);
    }
    expect(fixture, 204, TV_CALL_DELETE, race->first.id, NULL);
}

static void limits_lift(struct fixture *fixture)
{
    fixture->config.queue_max = 64; /* nobody has called yet */
    fixture->config.max_sessions = 64;
    fixture->sched->table.params.sessions_max = 64;
}

static int start(void **state)
{
    int rc = fixture_setup(state);
    limits_lift(*state);
    return rc;
}

static int start_pages(void **state)
{
    int rc = fixture_setup(state);
    fixture_stop(*state);
    fixture_start_pages(*state, 256);
    limits_lift(*state);
    return rc;
}

/* As long as rounds are ready, launches take it along to its end, and it has no slice of its own;
 * the session is the one that a prompt alone makes. */
static void a_prompt_goes_along_with_rounds_to_its_end(void **state)
{
    struct fixture *fixture = *state;
    struct tv_stats *stats = &fixture->stats;
    struct race *race = malloc(sizeof *race);
    char alone[80], shared[80];
    assert_non_null(race);
    struct tv_call *call = prompt(fixture, 1, 20);
    call_start(fixture, call);
    assert_reply(call_wait(call), 201);
    reply_text(call, "digest", alone, sizeof alone);
    int64_t pending = reply_int(call, "pending");
    call_free(call);
    plant(fixture, 4, LONG_US);
    race_start(fixture, race);
    int64_t launches = tv_fixed_engine_launches(fixture->engine);
    call = prompt(fixture, 1, 20);
    call_start(fixture, call);
    race_end(fixture, race);
    assert_reply(call_wait(call), 201);
    reply_text(call, "digest", shared, sizeof shared);
    assert_string_equal(shared, alone);
    assert_int_equal(reply_int(call, "pending"), pending);
    assert_int_equal(reply_int(call, "committed_len"), 20);
    call_free(call);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine) - launches, ROUNDS / 4);
    assert_int_equal(tv_fixed_engine_shared(fixture->engine), 3); /* 8, 8 and 4 tokens */
    assert_int_equal(atomic_load(&stats->shared_launches), 3);
    assert_int_equal(atomic_load(&stats->shared_tokens), 20);
    race_check(fixture, race);
    free(race);
}

/* An extend goes along behind what its session has, and its one round waits for nothing else. */
static void an_extend_goes_along_too(void **state)
{
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    struct client client;
    assert_non_null(race);
    plant(fixture, 4, LONG_US);
    client_open(fixture, &client, 5, "");
    race_start(fixture, race);
    struct tv_call *extend = call_make(
        fixture, TV_CALL_EXTEND, client.id,
        "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":5,\"tokens\":[6,7,8,9,10,11]}", client.epoch);
    call_start(fixture, extend);
    race_end(fixture, race);
    assert_reply(call_wait(extend), 200);
    assert_int_equal(reply_int(extend, "committed_len"), 11);
    assert_int_equal(reply_int(extend, "pending"), tv_fixed_engine_token(fixture->engine, 11));
    call_free(extend);
    assert_int_equal(tv_fixed_engine_shared(fixture->engine), 1);
    race_check(fixture, race);
    free(race);
}

/* Rounds of a size that was never measured go alone. */
static void what_was_never_measured_goes_alone(void **state)
{
    struct fixture *fixture = *state;
    struct client first, second;
    client_open(fixture, &first, 5, "");
    client_open(fixture, &second, 5, "");
    struct tv_call *running = call_running(fixture, &first, 1);
    struct tv_call *call = call_chain(fixture, &second, 7), *create = prompt(fixture, 1, 4);
    call_start(fixture, create);
    call_release(fixture, running, 200);
    assert_reply(call_wait(call), 200);
    assert_reply(call_wait(create), 201);
    assert_int_equal(tv_fixed_engine_shared(fixture->engine), 0);
    call_free(call);
    call_free(create);
}

/* Which of two prompts ended first; the worker thread writes, who waited for both reads. */
static struct tv_call *ended_first;
static void (*fixture_done)(struct tv_call *call);

static void note_done(struct tv_call *call)
{
    ended_first = ended_first == NULL ? call : ended_first;
    fixture_done(call);
}

/* What is known of a prompt counts: the rest may be deeper than tokens go along. */
static void what_was_adopted_is_as_deep_as_it_is(void **state)
{
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    assert_non_null(race);
    struct tv_call *call = prompt(fixture, 1, 100);
    call_start(fixture, call);
    assert_reply(call_wait(call), 201);
    call_free(call);
    plant(fixture, 4, LONG_US);
    race_start(fixture, race);
    call = prompt(fixture, 1, 100); /* six pages are there */
    call_start(fixture, call);
    race_end(fixture, race);
    assert_reply(call_wait(call), 201);
    assert_int_equal(reply_int(call, "cached_len"), 96);
    assert_int_equal(reply_int(call, "committed_len"), 100);
    call_free(call);
    assert_int_equal(tv_fixed_engine_shared(fixture->engine), 0);
    race_check(fixture, race);
    free(race);
}

/* Of two prompts the one whose principal has had less goes along first. */
static void the_principal_with_less_goes_first(void **state)
{
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    assert_non_null(race);
    plant(fixture, 4, LONG_US);
    race_start(fixture, race);
    (void)snprintf(fixture->principal, sizeof fixture->principal, "hog");
    struct tv_call *hog = prompt(fixture, 2, 16);
    fixture_done = hog->done;
    hog->done = note_done;
    call_start(fixture, hog);
    (void)snprintf(fixture->principal, sizeof fixture->principal, "late");
    struct tv_call *late = prompt(fixture, 3, 16);
    late->done = note_done;
    ended_first = NULL;
    call_start(fixture, late);
    tv_sched_lock(fixture->sched);
    for (struct tv_account *account = fixture->sched->accounts; account != NULL;
         account = account->next) {
        account->served += strcmp(account->principal, "hog") == 0 ? 1000 : 0;
    }
    tv_sched_unlock(fixture->sched);
    race_end(fixture, race);
    assert_reply(call_wait(late), 201);
    assert_reply(call_wait(hog), 201);
    assert_ptr_equal(ended_first, late);
    assert_true(tv_fixed_engine_shared(fixture->engine) >= 2);
    call_free(hog);
    call_free(late);
    free(race);
}

/* The device is lost in a launch that took a prompt along: both are told, and nothing is left. */
static void a_lost_device_ends_both(void **state)
{
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    assert_non_null(race);
    plant(fixture, 4, LONG_US);
    race_start(fixture, race);
    struct tv_call *create = prompt(fixture, 1, 20);
    call_start(fixture, create);
    tv_fixed_engine_lose(fixture->engine);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(create), 500);
    call_free(create);
    for (int i = 0; i < ROUNDS; i++) {
        assert_true(call_wait(race->calls[i])->reply.http_status >= 500);
        call_free(race->calls[i]);
    }
    (void)call_wait(race->running);
    call_free(race->running);
    free(race);
}

static int rider_rc; /* of the next launch with tokens of a prompt, whose rounds run */
static struct tv_engine_ops refusing_ops;
static const struct tv_engine_ops *real_ops;

static int refusing_verify_shared(struct tv_engine *engine, const struct tv_round_in *in,
                                  int32_t count, struct tv_round_out *out, struct tv_rider *rider)
{
    if (rider_rc == 0) {
        return real_ops->verify_shared(engine, in, count, out, rider);
    }
    rider->rc = rider_rc;
    rider_rc = 0;
    return real_ops->verify(engine, in, count, out);
}

static void refusals_begin(struct fixture *fixture)
{
    tv_sched_lock(fixture->sched);
    real_ops = fixture->engine->ops;
    refusing_ops = *real_ops;
    refusing_ops.verify_shared = refusing_verify_shared;
    fixture->engine->ops = &refusing_ops;
    tv_sched_unlock(fixture->sched);
}

/* The rounds of a launch are what they are, whatever becomes of the tokens that were to go along:
 * without pages these have their slice, and what fails ends the prompt as its slice would. */
static void what_is_refused_along_is_no_matter_of_the_rounds(void **state)
{
    static const struct {
        int rc, http_status;
    } cases[] = {{-ENOSPC, 201}, {-EAGAIN, 201}, {-EDOM, 500}, {-EIO, 500}, {-ENOMEM, 500}};
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    assert_non_null(race);
    refusals_begin(fixture);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        plant(fixture, 4, LONG_US);
        race_start(fixture, race);
        int64_t tokens = atomic_load(&fixture->stats.prefill_tokens);
        struct tv_call *call = prompt(fixture, 1, 20);
        call_start(fixture, call);
        rider_rc = cases[i].rc;
        race_end(fixture, race);
        assert_reply(call_wait(call), cases[i].http_status);
        assert_int_equal(rider_rc, 0);
        int made = cases[i].http_status == 201;
        assert_int_equal(atomic_load(&fixture->stats.prefill_tokens) - tokens, made ? 20 : 0);
        if (made) {
            char id[32];
            assert_int_equal(reply_int(call, "committed_len"), 20);
            reply_text(call, "session", id, sizeof id);
            expect(fixture, 204, TV_CALL_DELETE, id, NULL);
        }
        call_free(call);
        race_check(fixture, race);
        race_close(fixture, race);
    }
    free(race);
}

/* The principal of prompts, far ahead of the others, so that nobody brings it level with them. */
#define OWNER "owner"
#define AHEAD 1000000
static int64_t owner_before; /* what it has been charged for by then */

static struct tv_account *owner(struct fixture *fixture)
{
    struct tv_account *account = fixture->sched->accounts;
    while (account != NULL && strcmp(account->principal, OWNER) != 0) {
        account = account->next;
    }
    assert_non_null(account);
    return account;
}

/* A prompt of the owner's waits, beside a race that has been started. */
static struct tv_call *owner_starts(struct fixture *fixture, int32_t count)
{
    (void)snprintf(fixture->principal, sizeof fixture->principal, OWNER);
    struct tv_call *call = prompt(fixture, 1, count);
    call_start(fixture, call);
    fixture->principal[0] = '\0';
    tv_sched_lock(fixture->sched);
    owner_before = fixture->sched->served_floor + AHEAD;
    owner(fixture)->served = owner_before;
    tv_sched_unlock(fixture->sched);
    return call;
}

/* Rows that it has been charged for since. */
static int64_t owner_had(struct fixture *fixture)
{
    tv_sched_lock(fixture->sched);
    int64_t served = owner(fixture)->served;
    tv_sched_unlock(fixture->sched);
    return served - owner_before;
}

/* Tokens that a launch did not take along are charged once they have their slice; those that failed
 * in it were computed. */
static void a_prompt_is_charged_for_what_ran(void **state)
{
    static const struct {
        int rc;
        int32_t had;
    } cases[] = {{0, 20}, {-ENOSPC, 20}, {-EAGAIN, 20}, {-EDOM, 8}};
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    assert_non_null(race);
    refusals_begin(fixture);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        plant(fixture, 4, LONG_US);
        race_start(fixture, race);
        struct tv_call *call = owner_starts(fixture, 20);
        rider_rc = cases[i].rc;
        race_end(fixture, race);
        assert_reply(call_wait(call), cases[i].rc == -EDOM ? 500 : 201);
        assert_int_equal(owner_had(fixture), cases[i].had);
        call_free(call);
        race_close(fixture, race);
    }
    free(race);
}

/* Pages that are known are not computed again. */
static void known_pages_are_not_charged(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    for (int i = 0; i < 2; i++) {
        client_open(fixture, &client, 5, "");
        struct tv_call *running = call_running(fixture, &client, 1);
        struct tv_call *call = owner_starts(fixture, 100);
        call_release(fixture, running, 200);
        assert_reply(call_wait(call), 201);
        assert_int_equal(reply_int(call, "cached_len"), i == 0 ? 0 : 96);
        assert_int_equal(owner_had(fixture), i == 0 ? 100 : 4);
        call_free(call);
    }
}

/* With the lock: what is known of launches of `nodes` nodes; -1: nothing. */
static int64_t known_us(struct fixture *fixture, int32_t nodes)
{
    tv_sched_lock(fixture->sched);
    int64_t us = tv_sched_curve_median(fixture->sched->curve, nodes);
    tv_sched_unlock(fixture->sched);
    return us;
}

/* A round without pages is not in its launch: what that took is no cost of trees, nor of tokens
 * that went along. */
static void a_launch_that_lacks_a_round_teaches_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct race *race = malloc(sizeof *race);
    struct client client;
    assert_non_null(race);
    client_open(fixture, &client, 5, "");
    tv_fixed_engine_fail(fixture->engine, TV_KV_FULL, 1);
    struct tv_call *call = call_chain(fixture, &client, 3);
    assert_refused(call_wait(call), 503, "kv-full");
    call_free(call);
    assert_int_equal(known_us(fixture, 3), -1);
    call_release(fixture, call_chain(fixture, &client, 3), 200);
    assert_true(known_us(fixture, 3) >= 0);

    plant(fixture, 4, 0); /* whatever a launch takes with tokens is what they cost */
    tv_fixed_engine_slow(fixture->engine, 1000);
    race_start(fixture, race);
    struct tv_call *create = prompt(fixture, 1, 8);
    call_start(fixture, create);
    tv_fixed_engine_fail(fixture->engine, TV_KV_FULL, 2); /* the running one, and one of four */
    call_release(fixture, race->running, 503);
    int refused = 0;
    for (int i = 0; i < ROUNDS; i++) {
        refused += call_wait(race->calls[i])->reply.http_status == 503;
        call_free(race->calls[i]);
    }
    assert_int_equal(refused, 1);
    assert_reply(call_wait(create), 201);
    call_free(create);
    assert_int_equal(tv_fixed_engine_shared(fixture->engine), 1);
    tv_sched_lock(fixture->sched);
    assert_int_equal(fixture->sched->share.token_ns, 0);
    tv_sched_unlock(fixture->sched);
    free(race);
}

/* Tokens that were in the pass and failed there: its time is no cost of its trees. Those that were
 * refused before took none of it. */
static void a_launch_with_tokens_that_failed_teaches_nothing(void **state)
{
    static const struct {
        int rc, http_status;
        int32_t learnt; /* samples */
    } cases[] = {{-EDOM, 500, 0}, {-ENOSPC, 201, 1}, {-EAGAIN, 201, 1}};
    struct fixture *fixture = *state;
    const struct curve_point *point = &fixture->sched->curve[2]; /* of 4 nodes */
    struct client first, second;
    refusals_begin(fixture);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        plant(fixture, 4, LONG_US);
        struct tv_call *running = pair_running(fixture, &first, &second, 1);
        struct tv_call *call = call_chain(fixture, &second, 4), *create = prompt(fixture, 1, 8);
        call_start(fixture, create);
        rider_rc = cases[i].rc;
        int32_t before = point->next;
        call_release(fixture, running, 200);
        assert_reply(call_wait(call), 200);
        assert_reply(call_wait(create), cases[i].http_status);
        tv_sched_lock(fixture->sched);
        int32_t learnt = point->next - before;
        tv_sched_unlock(fixture->sched);
        assert_int_equal(rider_rc, 0);
        assert_int_equal(learnt, cases[i].learnt);
        call_free(call);
        call_free(create);
    }
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, start, fixture_teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_prompt_goes_along_with_rounds_to_its_end),
        CASE(an_extend_goes_along_too),
        CASE(what_was_never_measured_goes_alone),
        cmocka_unit_test_setup_teardown(what_was_adopted_is_as_deep_as_it_is, start_pages,
                                        fixture_teardown),
        CASE(the_principal_with_less_goes_first),
        CASE(a_lost_device_ends_both),
        CASE(what_is_refused_along_is_no_matter_of_the_rounds),
        CASE(a_prompt_is_charged_for_what_ran),
        cmocka_unit_test_setup_teardown(known_pages_are_not_charged, start_pages, fixture_teardown),
        CASE(a_launch_that_lacks_a_round_teaches_nothing),
        CASE(a_launch_with_tokens_that_failed_teaches_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
