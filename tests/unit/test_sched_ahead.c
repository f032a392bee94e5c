/*
 * test_sched_ahead.c - conditional rounds: staged behind the one under way, run when its end was
 * guessed, skipped with its answer when not, refused when there was no end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

/* A verify of a chain of `count` nodes behind the state that `ahead` believes in, which guesses
 * that the round before ends there, at `leaf`; not yet submitted. */
static struct tv_call *guess_make(struct fixture *fixture, const struct client *ahead,
                                  int32_t count, int32_t leaf)
{
    char body[2048];
    (void)client_chain(fixture, ahead, count, body, sizeof body);
    size_t at = strlen(body) - 1; /* the last brace */
    (void)snprintf(body + at, sizeof body - at, ",\"if\":{\"seq\":%d,\"leaf\":%d,\"pending\":%d}}",
                   ahead->seq - 1, leaf, ahead->pending);
    return call_make(fixture, TV_CALL_VERIFY, ahead->id, "%s", body);
}

/* Submit a chain of three that guesses that the round before, a chain of `before` nodes, ends at
 * `leaf`; *ret_ahead is the client as it is when that holds. */
static struct tv_call *guess(struct fixture *fixture, const struct client *client, int32_t before,
                             int32_t leaf, struct client *ret_ahead)
{
    *ret_ahead = *client;
    client_advance(fixture, ret_ahead, before);
    struct tv_call *call = guess_make(fixture, ret_ahead, 3, leaf);
    call_start(fixture, call);
    return call;
}

/* A new session whose first round, a chain of four that is accepted whole, runs in the held engine,
 * and the right guess about it, staged behind. */
struct staged {
    struct client client, ahead; /* before the first round, and after it */
    struct tv_call *first, *second;
};

static struct tv_call *first_open(struct fixture *fixture, const char *options,
                                  struct client *ret_client, struct client *ret_ahead)
{
    client_open(fixture, ret_client, 20, options);
    struct tv_call *first = call_running(fixture, ret_client, 4);
    *ret_ahead = *ret_client;
    client_advance(fixture, ret_ahead, 4);
    return first;
}

static void staged_open(struct fixture *fixture, const char *options, struct staged *ret_staged)
{
    ret_staged->first = first_open(fixture, options, &ret_staged->client, &ret_staged->ahead);
    ret_staged->second = guess_make(fixture, &ret_staged->ahead, 3, 3);
    call_start(fixture, ret_staged->second);
    assert_false(call_is_done(ret_staged->second));
}

static void assert_skipped(const struct tv_call *call, int32_t seq, int32_t outcome_seq)
{
    char status[32];
    int32_t items[4];
    assert_reply(call, 200);
    reply_text(call, "status", status, sizeof status);
    assert_string_equal(status, "skipped");
    assert_int_equal(reply_int(call, "seq"), seq);
    assert_int_equal(reply_int(call, "next_seq"), seq + 1);
    assert_int_equal(reply_ints(call, "new_tokens", items, 4), 0);
    assert_int_equal(reply_int(call, "outcome/seq"), outcome_seq);
    reply_text(call, "outcome/status", status, sizeof status);
    assert_string_not_equal(status, "skipped");
}

/* What a skipped round leaves behind: nothing but a used number. */
static void client_skip(struct client *client)
{
    client->seq++;
}

static void test_a_right_guess_runs(void **state)
{
    struct fixture *fixture = *state;
    struct staged on;
    staged_open(fixture, "", &on);
    struct tv_call *look = call_make(fixture, TV_CALL_ROUND, on.client.id, NULL);
    look->request.seq = 2;
    call_start(fixture, look);
    assert_reply(call_wait(look), 202);
    call_free(look);
    call_release(fixture, on.first, 200);
    assert_reply(call_wait(on.second), 200);
    assert_int_equal(reply_int(on.second, "seq"), 2);
    assert_int_equal(reply_int(on.second, "committed_len"), 27);
    assert_false(reply_has(on.second, "alternative"));
    assert_false(reply_has(on.second, "outcome"));
    call_free(on.second);
    client_advance(fixture, &on.ahead, 3);
    client_check(fixture, &on.ahead);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 2);
}

static void test_a_wrong_guess_is_skipped(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    for (int32_t by_pending = 0; by_pending < 2; by_pending++) {
        client_open(fixture, &client, 20, "");
        int64_t launches = tv_fixed_engine_launches(fixture->engine);
        struct tv_call *first = call_running(fixture, &client, 4), *second;
        if (by_pending) {
            ahead = client;
            client_advance(fixture, &ahead, 4);
            ahead.pending = (ahead.pending + 1) % 307;
            second = guess_make(fixture, &ahead, 1, 3);
            call_start(fixture, second);
        } else {
            second = guess(fixture, &client, 4, 2, &ahead);
        }
        call_release(fixture, first, 200);
        assert_skipped(call_wait(second), 2, 1);
        assert_int_equal(reply_int(second, "outcome/committed_len"), 24);
        client_advance(fixture, &client, 4);
        client_skip(&client);
        assert_int_equal(reply_int(second, "pending"), client.pending);
        assert_int_equal(reply_int(second, "committed_len"), 24);
        call_free(second);
        client_check(fixture, &client);
        assert_int_equal(tv_fixed_engine_launches(fixture->engine), launches + 1);
    }
}

/* A lost answer of a skipped round: the same again, also from GET, and another body is refused. */
static void test_a_skipped_round_is_replayed(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    client_open(fixture, &client, 20, "");
    call_release(fixture, call_running(fixture, &client, 4), 200);
    struct tv_call *late = guess(fixture, &client, 4, 1, &ahead); /* the round is over */
    assert_skipped(call_wait(late), 2, 1);
    assert_false(reply_flag(late, "replayed"));
    struct tv_call *again = guess(fixture, &client, 4, 1, &ahead);
    assert_skipped(call_wait(again), 2, 1);
    assert_true(reply_flag(again, "replayed"));
    assert_false(reply_flag(again, "outcome/replayed"));
    size_t bytes = late->reply.body.bytes - strlen("false}");
    assert_int_equal(again->reply.body.bytes, bytes + strlen("true}"));
    assert_memory_equal(again->reply.body.data, late->reply.body.data, bytes);
    call_free(late);
    call_free(again);
    struct tv_call *look = call_make(fixture, TV_CALL_ROUND, client.id, NULL);
    look->request.seq = 2;
    call_start(fixture, look);
    assert_skipped(call_wait(look), 2, 1);
    call_free(look);
    struct tv_call *other = guess(fixture, &client, 4, 2, &ahead);
    assert_refused(call_wait(other), 422, "seq-reused");
    call_free(other);
    client_advance(fixture, &client, 4);
    client_skip(&client);
    client_check(fixture, &client);
}

/* Whether a round had ended when its guess came does not change what becomes of the guess. */
static void test_a_late_guess_runs(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    client_open(fixture, &client, 20, "");
    call_release(fixture, call_running(fixture, &client, 4), 200);
    struct tv_call *late = guess(fixture, &client, 4, 3, &ahead);
    assert_reply(call_wait(late), 200);
    call_free(late);
    client_advance(fixture, &ahead, 3);
    client_check(fixture, &ahead);
}

/* The outcome is of the last round that ran, however many were skipped since: it does not grow. */
static void test_skips_do_not_nest(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    size_t bytes = 0;
    client_open(fixture, &client, 20, "");
    call_release(fixture, call_running(fixture, &client, 4), 200);
    client_advance(fixture, &client, 4);
    for (int32_t i = 0; i < 5; i++) {
        struct tv_call *call = call_make(
            fixture, TV_CALL_VERIFY, client.id,
            "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":99,\"tree\":{\"tokens\":[5],\"parents\":"
            "[-1]},\"if\":{\"seq\":%d,\"leaf\":%d,\"pending\":5}}",
            client.seq, client.epoch, client.seq - 1, i);
        call_start(fixture, call);
        assert_skipped(call_wait(call), client.seq, 1);
        assert_true(i == 0 || call->reply.body.bytes == bytes);
        bytes = call->reply.body.bytes;
        call_free(call);
        client_skip(&client);
        client_check(fixture, &client);
    }
}

static void test_behind_a_failed_round(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    client_open(fixture, &client, 20, "");
    tv_fixed_engine_fail(fixture->engine, TV_NUMERIC_FAULT, 1);
    struct tv_call *first = call_running(fixture, &client, 4);
    struct tv_call *second = guess(fixture, &client, 4, 3, &ahead);
    call_release(fixture, first, 500);
    assert_refused(call_wait(second), 409, "seq-gap");
    assert_int_equal(reply_int(second, "session_state/next_seq"), 1);
    call_free(second);
    client_check(fixture, &client);
}

/* The round before never started: its client went while it was queued. */
static void test_behind_a_dropped_round(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other, ahead;
    client_open(fixture, &client, 20, "");
    client_open(fixture, &other, 20, "");
    struct tv_call *running = call_running(fixture, &other, 2);
    struct tv_call *first = call_chain(fixture, &client, 4);
    struct tv_call *second = guess(fixture, &client, 4, 3, &ahead);
    tv_sched_cancel(fixture->sched, first);
    assert_refused(call_wait(first), 504, "deadline");
    assert_refused(call_wait(second), 409, "seq-gap");
    call_free(first);
    call_free(second);
    call_release(fixture, running, 200);
    client_check(fixture, &client);
}

/* The session cannot do anything else with the numbers that are taken. */
static void test_what_is_refused_meanwhile(void **state)
{
    struct fixture *fixture = *state;
    struct staged on;
    staged_open(fixture, "", &on);
    struct tv_call *call;
    for (int32_t seq = 2; seq < 5; seq++) {
        call = ask(fixture, TV_CALL_EXTEND, on.client.id,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":24,\"tokens\":[1]}", seq,
                   on.client.epoch);
        assert_refused(call, 409, seq == 2 ? "session-busy" : "seq-gap");
        call_free(call);
        call = ask(fixture, TV_CALL_DECODE, on.client.id,
                   "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":24,\"max_tokens\":1}", seq,
                   on.client.epoch);
        assert_refused(call, 409, seq == 2 ? "session-busy" : "seq-gap");
        call_free(call);
    }
    call = guess(fixture, &on.client, 4, 2, &on.ahead);
    assert_refused(call_wait(call), 422, "seq-reused");
    call_free(call);
    client_advance(fixture, &on.client, 4);
    call =
        guess(fixture, &on.client, 3, 2, &on.ahead); /* seq 3: more than max_pipeline under way */
    assert_refused(call_wait(call), 409, "seq-gap");
    call_free(call);
    call_release(fixture, on.first, 200);
    call_release(fixture, on.second, 200);
    client_advance(fixture, &on.client, 3);
    client_check(fixture, &on.client);
}

/* An unconditional round is not queued behind another. */
static void test_only_a_guess_may_be_early(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    struct tv_call *first = first_open(fixture, "", &client, &ahead);
    struct tv_call *early = call_chain(fixture, &ahead, 2);
    assert_refused(call_wait(early), 409, "session-busy");
    call_free(early);
    call_release(fixture, first, 200);
    client_check(fixture, &ahead);
}

static void test_a_retry_joins_the_staged_round(void **state)
{
    struct fixture *fixture = *state;
    struct staged on;
    staged_open(fixture, "", &on);
    struct tv_call *twin = guess(fixture, &on.client, 4, 3, &on.ahead);
    struct tv_call *watcher = call_make(fixture, TV_CALL_ROUND, on.client.id, NULL);
    watcher->request.seq = 2;
    watcher->request.wait_ms = 60000;
    call_start(fixture, watcher);
    tv_sched_cancel(fixture->sched, on.second); /* the other one still wants it */
    assert_refused(call_wait(on.second), 504, "deadline");
    call_free(on.second);
    assert_false(call_is_done(twin));
    call_release(fixture, on.first, 200);
    assert_reply(call_wait(twin), 200);
    assert_reply(call_wait(watcher), 200);
    assert_int_equal(reply_int(twin, "seq"), 2);
    assert_int_equal(reply_int(watcher, "seq"), 2);
    call_free(twin);
    call_free(watcher);
    client_advance(fixture, &on.ahead, 3);
    client_check(fixture, &on.ahead);
}

static void test_the_client_of_a_staged_round_goes(void **state)
{
    struct fixture *fixture = *state;
    struct staged on;
    staged_open(fixture, "", &on);
    tv_sched_cancel(fixture->sched, on.second);
    assert_refused(call_wait(on.second), 504, "deadline");
    call_free(on.second);
    on.second =
        guess(fixture, &on.client, 4, 2, &on.ahead); /* its number is free for another body */
    call_release(fixture, on.first, 200);
    assert_skipped(call_wait(on.second), 2, 1);
    call_free(on.second);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
    client_advance(fixture, &on.client, 4);
    client_skip(&on.client);
    client_check(fixture, &on.client);
}

static void test_a_staged_round_has_a_deadline(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    struct tv_call *first = first_open(fixture, "", &client, &ahead);
    struct tv_call *second = guess_make(fixture, &ahead, 3, 3);
    second->request.deadline_ms = 1;
    second->received_us -= 10000; /* it is over already */
    call_start(fixture, second);
    call_release(fixture, first, 200);
    assert_refused(call_wait(second), 504, "deadline");
    call_free(second);
    client_check(fixture, &ahead);
}

static void test_delete_ends_a_staged_round(void **state)
{
    struct fixture *fixture = *state;
    struct staged on;
    staged_open(fixture, "", &on);
    expect(fixture, 204, TV_CALL_DELETE, on.client.id, NULL);
    assert_refused(call_wait(on.second), 404, "session-not-found");
    call_free(on.second);
    call_release(fixture, on.first, 200); /* it was under way */
    expect(fixture, 404, TV_CALL_STATE, on.client.id, NULL);
}

static void test_a_stop_ends_a_staged_round(void **state)
{
    struct fixture fixture;
    struct staged on;
    (void)state;
    fixture_start(&fixture);
    staged_open(&fixture, "", &on);
    tv_sched_drain(fixture.sched, 1, 1);
    assert_false(call_is_done(on.second)); /* it was taken before */
    client_advance(&fixture, &on.client, 4);
    struct tv_call *third = guess(&fixture, &on.client, 3, 2, &on.ahead);
    assert_refused(call_wait(third), 409, "seq-gap");
    call_free(third);
    call_release(&fixture, on.first, 200);
    call_release(&fixture, on.second, 200);
    client_advance(&fixture, &on.client, 3);
    client_check(&fixture, &on.client);
    third = guess(&fixture, &on.client, 1, 0, &on.ahead); /* round 3 is to come */
    assert_refused(call_wait(third), 409, "seq-gap");
    call_free(third);
    fixture_stop(&fixture);
}

/* The guess held, but what else the client believes does not: refused, and the number is free. */
static void test_beliefs_are_checked_when_the_guess_held(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    struct tv_call *first = first_open(fixture, "", &client, &ahead);
    ahead.len += 2;
    struct tv_call *second = guess_make(fixture, &ahead, 1, 3);
    call_start(fixture, second);
    call_release(fixture, first, 200);
    assert_refused(call_wait(second), 409, "length-mismatch");
    assert_int_equal(reply_int(second, "session_state/committed_len"), 24);
    call_free(second);
    ahead.len -= 2;
    client_check(fixture, &ahead);
}

/* The round ends the session where it was guessed to end: what follows is a finished session's. */
static void test_behind_the_last_round(void **state)
{
    struct fixture *fixture = *state;
    struct staged on;
    staged_open(fixture, ",\"stop\":{\"max_len\":25}", &on);
    call_release(fixture, on.first, 200);
    assert_refused(call_wait(on.second), 409, "session-finished");
    assert_int_equal(reply_int(on.second, "session_state/committed_len"), 24);
    call_free(on.second);
    client_check(fixture, &on.ahead);
}

/* A round without a tree ends at no node. */
static void test_behind_a_decode(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    client_open(fixture, &client, 20, "");
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *first = call_make(
        fixture, TV_CALL_DECODE, client.id,
        "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":20,\"max_tokens\":2}", client.epoch);
    call_start(fixture, first);
    tv_fixed_engine_await_held(fixture->engine);
    struct tv_call *second = guess(fixture, &client, 2, 1, &ahead);
    call_release(fixture, first, 200);
    assert_skipped(call_wait(second), 2, 1);
    call_free(second);
    client_advance(fixture, &client, 2);
    client_skip(&client);
    client_check(fixture, &client);
}

/* Three ends of a chain of four nodes, each with its tree; more of the request in `rest`. */
static struct tv_call *alternatives(struct fixture *fixture, const struct client *client,
                                    int32_t first_leaf, const char *rest)
{
    char *body = NULL;
    size_t bytes = 0;
    FILE *text = open_memstream(&body, &bytes);
    assert_non_null(text);
    (void)fprintf(text, "{\"seq\":%d,\"epoch\":\"%s\",\"if\":{\"seq\":%d}%s,\"alternatives\":[",
                  client->seq + 1, client->epoch, client->seq, rest);
    for (int32_t i = 0; i < 3; i++) {
        int32_t len = client->len + first_leaf + i + 1;
        (void)fprintf(text,
                      "%s{\"leaf\":%d,\"pending\":%d,\"tree\":{\"tokens\":[%d,%d],"
                      "\"parents\":[-1,0]}}",
                      i > 0 ? "," : "", first_leaf + i, tv_fixed_engine_token(fixture->engine, len),
                      tv_fixed_engine_token(fixture->engine, len),
                      tv_fixed_engine_token(fixture->engine, len + 1));
    }
    (void)fprintf(text, "]}");
    assert_int_equal(fclose(text), 0);
    struct tv_call *call = call_make(fixture, TV_CALL_VERIFY, client->id, "%s", body);
    free(body);
    call_start(fixture, call);
    return call;
}

static void test_alternatives(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    for (int32_t i = 0; i < 3; i++) {
        struct tv_call *first = call_running(fixture, &client, 4);
        struct tv_call *second = alternatives(fixture, &client, 3 - i, "");
        call_release(fixture, first, 200);
        assert_reply(call_wait(second), 200);
        assert_int_equal(reply_int(second, "alternative"), i);
        assert_int_equal(reply_int(second, "stats/nodes"), 2);
        call_free(second);
        client_advance(fixture, &client, 4);
        client_advance(fixture, &client, 2);
        client_check(fixture, &client);
    }
    struct tv_call *first = call_running(fixture, &client, 4);
    struct tv_call *second = alternatives(fixture, &client, 0, "");
    call_release(fixture, first, 200);
    assert_skipped(call_wait(second), client.seq + 1, client.seq);
    call_free(second);
    client_advance(fixture, &client, 4);
    client_skip(&client);
    first = call_running(fixture, &client, 4);
    char rest[64];
    (void)snprintf(rest, sizeof rest, ",\"expected_len\":%d", client.len + 5);
    second = alternatives(fixture, &client, 3, rest); /* the client's own count is off by one */
    call_release(fixture, first, 200);
    assert_refused(call_wait(second), 409, "length-mismatch");
    call_free(second);
    client_advance(fixture, &client, 4);
    client_check(fixture, &client);
}

/* Random rounds, each with a guess on the way: nothing is lost, doubled or out of order. */
static void test_random_guesses(void **state)
{
    struct fixture *fixture = *state;
    uint64_t seed = 88172645463325252u;
    struct client client, ahead;
    client_open(fixture, &client, 20, "");
    for (int32_t i = 0; i < fixture_scaled(300) && client.len < 480; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        int32_t count = 1 + (int32_t)(seed >> 40) % 3, held = (int32_t)(seed >> 50) % 2;
        int32_t leaf = (int32_t)(seed >> 55) % 3;
        struct tv_call *first = held ? call_running(fixture, &client, count)
                                     : call_wait(call_chain(fixture, &client, count));
        struct tv_call *second = guess(fixture, &client, count, leaf, &ahead);
        if (held) {
            call_release(fixture, first, 200);
        } else {
            call_free(first);
        }
        (void)call_wait(second);
        client_advance(fixture, &client, count);
        if (leaf == count - 1) {
            assert_reply(second, 200);
            client_advance(fixture, &client, 3);
        } else {
            assert_skipped(second, client.seq, client.seq - 1);
            client_skip(&client);
        }
        call_free(second);
        client_check(fixture, &client);
    }
    assert_true(client.seq > 20);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_a_right_guess_runs),
        TEST(test_a_wrong_guess_is_skipped),
        TEST(test_a_skipped_round_is_replayed),
        TEST(test_a_late_guess_runs),
        TEST(test_skips_do_not_nest),
        TEST(test_behind_a_failed_round),
        TEST(test_behind_a_dropped_round),
        TEST(test_what_is_refused_meanwhile),
        TEST(test_only_a_guess_may_be_early),
        TEST(test_a_retry_joins_the_staged_round),
        TEST(test_the_client_of_a_staged_round_goes),
        TEST(test_a_staged_round_has_a_deadline),
        TEST(test_delete_ends_a_staged_round),
        cmocka_unit_test(test_a_stop_ends_a_staged_round),
        TEST(test_beliefs_are_checked_when_the_guess_held),
        TEST(test_behind_the_last_round),
        TEST(test_behind_a_decode),
        TEST(test_alternatives),
        TEST(test_random_guesses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
