/*
 * test_sched_fair.c - who comes first: shares of principals, order within one, large trees, slices,
 * and the limits of a principal.
 *
 * Nothing here is judged by time: the order in which calls are completed is, with the engine held
 * while they queue.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define CALLS_MAX 64

/* Calls in the order of their completion; the worker thread writes, who waited for all reads. */
static struct tv_call *finished[CALLS_MAX];
static int32_t finished_count;
static void (*fixture_done)(struct tv_call *call);

static void note_done(struct tv_call *call)
{
    assert_true(finished_count < CALLS_MAX);
    finished[finished_count++] = call;
    fixture_done(call);
}

/* Submit a call whose place in the order counts. */
static void enter_race(struct fixture *fixture, struct tv_call *call)
{
    fixture_done = call->done;
    call->done = note_done;
    assert_int_equal(tv_sched_submit(fixture->sched, call), 1);
}

static struct tv_call *chain(struct fixture *fixture, const struct client *client, int32_t count)
{
    char body[2048];
    return call_make(fixture, TV_CALL_VERIFY, client->id, "%s",
                     client_chain(fixture, client, count, body, sizeof body));
}

static int32_t place(const struct tv_call *call)
{
    int32_t at = 0;
    while (at < finished_count && finished[at] != call) {
        at++;
    }
    return at;
}

static void who(struct fixture *fixture, const char *principal)
{
    (void)snprintf(fixture->principal, sizeof fixture->principal, "%s", principal);
}

/* Everybody has had the same so far. */
static void level(struct fixture *fixture)
{
    tv_sched_lock(fixture->sched);
    for (struct tv_account *account = fixture->sched->accounts; account != NULL;
         account = account->next) {
        account->served = fixture->sched->served_floor;
    }
    tv_sched_unlock(fixture->sched);
}

static int start(void **state)
{
    int rc = fixture_setup(state);
    struct fixture *fixture = *state;
    fixture->config.queue_max = 64; /* nobody has called yet */
    fixture->config.max_sessions = 64;
    fixture->sched->table.params.sessions_max = 64;
    finished_count = 0;
    return rc;
}

/* Rounds of `count` clients that wait together, handed over while the engine is held. */
static void race(struct fixture *fixture, struct tv_call **calls, int32_t count,
                 struct client *first)
{
    struct tv_call *running = call_running(fixture, first, 1);
    for (int32_t i = 0; i < count; i++) {
        enter_race(fixture, calls[i]);
    }
    level(fixture);
    call_release(fixture, running, 200);
    for (int32_t i = 0; i < count; i++) {
        assert_reply(call_wait(calls[i]), 200);
    }
}

static void calls_free(struct tv_call **calls, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        call_free(calls[i]);
    }
}

/* One principal brings 24 sessions, the other 6, all wait: as long as both have work each gets half
 * of the rows, whoever asked first. */
static void many_sessions_do_not_starve_few(void **state)
{
    struct fixture *fixture = *state;
    struct client hog[24], few[6], other;
    struct tv_call *calls[30];
    who(fixture, "hog");
    for (int i = 0; i < 24; i++) {
        client_open(fixture, &hog[i], 5, "");
        calls[i] = chain(fixture, &hog[i], 2);
    }
    who(fixture, "few");
    for (int i = 0; i < 6; i++) {
        client_open(fixture, &few[i], 5, "");
        calls[24 + i] = chain(fixture, &few[i], 2);
    }
    who(fixture, "other");
    client_open(fixture, &other, 5, "");
    race(fixture, calls, 30, &other);
    for (int32_t i = 0; i < 6; i++) {
        assert_in_range(place(calls[24 + i]), 2 * i, 2 * i + 1);
    }
    for (int32_t i = 1; i < 24; i++) {
        assert_true(place(calls[i - 1]) < place(calls[i])); /* within one: oldest first */
    }
    calls_free(calls, 30);
}

/* Large trees count for what they are: eight rounds of 4 nodes for one of 32. */
static void shares_are_of_rows_not_of_calls(void **state)
{
    struct fixture *fixture = *state;
    struct client large[4], small[16], other;
    struct tv_call *calls[20];
    who(fixture, "large");
    for (int i = 0; i < 4; i++) {
        client_open(fixture, &large[i], 5, "");
        calls[i] = chain(fixture, &large[i], 32);
    }
    who(fixture, "small");
    for (int i = 0; i < 16; i++) {
        client_open(fixture, &small[i], 5, "");
        calls[4 + i] = chain(fixture, &small[i], 4);
    }
    who(fixture, "other");
    client_open(fixture, &other, 5, "");
    race(fixture, calls, 20, &other);
    for (int32_t i = 0; i < 16; i++) { /* before small's n-th row large has had n + 31 at most */
        int32_t ahead = 0;
        for (int32_t k = 0; k < 4; k++) {
            ahead += place(calls[k]) < place(calls[4 + i]);
        }
        assert_true(ahead <= 1 + i * 4 / 32);
    }
    calls_free(calls, 20);
}

/* Who was away has saved nothing up, and who was alone owes nothing. */
static void absence_saves_nothing_up(void **state)
{
    struct fixture *fixture = *state;
    struct client busy[8], back[8], other;
    struct tv_call *calls[16];
    who(fixture, "back");
    for (int i = 0; i < 8; i++) {
        client_open(fixture, &back[i], 5, "");
        calls[8 + i] = chain(fixture, &back[i], 2);
    }
    who(fixture, "busy");
    client_open(fixture, &other, 5, "");
    for (int i = 0; i < 10; i++) {
        call_release(fixture, call_chain(fixture, &other, 16), 200);
        client_advance(fixture, &other, 16);
    }
    for (int i = 0; i < 8; i++) {
        client_open(fixture, &busy[i], 5, "");
        calls[i] = chain(fixture, &busy[i], 2);
    }
    struct tv_call *running = call_running(fixture, &other, 1);
    for (int32_t i = 0; i < 16; i++) {
        enter_race(fixture, calls[i]);
    }
    call_release(fixture, running, 200);
    for (int32_t i = 0; i < 16; i++) {
        assert_reply(call_wait(calls[i]), 200);
    }
    assert_true(place(calls[0]) < 4); /* not behind the 160 rows that it had before */
    calls_free(calls, 16);
}

/* A tree of most of a launch goes alone, and the small ones that fit do not wait for it twice. */
static void a_large_tree_goes_alone(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[5], other;
    struct tv_call *calls[5];
    tv_sched_lock(fixture->sched);
    fixture->sched->launch_rows = 32;
    tv_sched_unlock(fixture->sched);
    for (int i = 0; i < 5; i++) {
        client_open(fixture, &clients[i], 5, "");
        calls[i] = chain(fixture, &clients[i], i == 1 ? 30 : 3);
    }
    client_open(fixture, &other, 5, "");
    race(fixture, calls, 5, &other);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(reply_int(calls[i], "timing_us/batch"), i == 1 ? 1 : 4);
    }
    assert_int_equal(place(calls[1]), 4); /* the four that fit went first, and none after them */
    calls_free(calls, 5);
}

/* No launch has more rows than launch_rows says, unless one tree alone has. */
static void a_launch_is_cut_at_its_rows(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[4], other;
    struct tv_call *calls[4];
    tv_sched_lock(fixture->sched);
    fixture->sched->launch_rows = 16;
    tv_sched_unlock(fixture->sched);
    for (int i = 0; i < 4; i++) {
        client_open(fixture, &clients[i], 5, "");
        calls[i] = chain(fixture, &clients[i], 8);
    }
    client_open(fixture, &other, 5, "");
    race(fixture, calls, 4, &other);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(reply_int(calls[i], "timing_us/batch"), 2);
    }
    calls_free(calls, 4);
}

static struct tv_call *prompt(struct fixture *fixture, int32_t count)
{
    char tokens[4096] = "1";
    for (int32_t i = 1; i < count; i++) {
        (void)strcat(tokens, ",1");
    }
    return call_make(fixture, TV_CALL_CREATE, "", "{\"tokens\":[%s]}", tokens);
}

/* Twelve long prompts of one principal neither take all places nor all slices. */
static void long_prompts_leave_room_for_others(void **state)
{
    struct fixture *fixture = *state;
    struct client other;
    struct tv_call *calls[13];
    who(fixture, "other");
    client_open(fixture, &other, 5, "");
    struct tv_call *running = call_running(fixture, &other, 1);
    who(fixture, "hog");
    for (int i = 0; i < 12; i++) {
        calls[i] = prompt(fixture, 400);
        enter_race(fixture, calls[i]);
    }
    who(fixture, "late");
    calls[12] = prompt(fixture, 40);
    enter_race(fixture, calls[12]);
    call_release(fixture, running, 200);
    for (int i = 0; i < 13; i++) {
        assert_reply(call_wait(calls[i]), 201);
    }
    assert_int_equal(place(calls[12]), 0);
    calls_free(calls, 13);
}

/* The engine can be interrupted in a slice: rounds that come meanwhile are done before it. */
static void a_round_goes_between_the_parts_of_a_slice(void **state)
{
    struct fixture *fixture = *state;
    struct client client, back;
    struct tv_call *create = prompt(fixture, 10), *late, *round, *roll;
    client_open(fixture, &client, 5, "");
    client_open(fixture, &back, 9, "");
    tv_fixed_engine_hold(fixture->engine, 1);
    enter_race(fixture, create);
    tv_fixed_engine_await_held(fixture->engine);
    round = chain(fixture, &client, 3);
    enter_race(fixture, round);
    roll = call_make(fixture, TV_CALL_ROLLBACK, back.id,
                     "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":9,\"len\":4}", back.epoch);
    enter_race(fixture, roll);
    late = call_make(fixture, TV_CALL_ONESHOT, "",
                     "{\"tokens\":[1],\"tree\":{\"tokens\":[1],\"parents\":[-1]},"
                     "\"deadline_ms\":1}");
    late->received_us -= 1000; /* its time is over when the worker looks */
    enter_race(fixture, late);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(create), 201);
    assert_reply(call_wait(round), 200);
    assert_refused(call_wait(late), 504, "deadline");
    assert_int_equal(place(late), 0); /* refused right before the launch */
    assert_int_equal(place(round), 1);
    assert_reply(call_wait(roll), 200);
    assert_int_equal(place(roll), 2);
    assert_int_equal(place(create), 3);
    call_free(create);
    call_free(roll);
    call_free(round);
    call_free(late);
    client_advance(fixture, &client, 3);
    client_check(fixture, &client);
}

static void sessions_of_one_principal_are_limited(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[3];
    fixture->config.principal_sessions = 2;
    who(fixture, "one");
    client_open(fixture, &clients[0], 5, "");
    client_open(fixture, &clients[1], 5, "");
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    assert_refused(call, 429, "rate-limited");
    assert_true(call->reply.retry_after_s > 0);
    assert_string_equal(call->reply.rate_name, "sessions");
    assert_int_equal(call->reply.rate_quota, 2);
    call_free(call);
    who(fixture, "two");
    client_open(fixture, &clients[2], 5, "");
    who(fixture, "one");
    expect(fixture, 204, TV_CALL_DELETE, clients[0].id, NULL);
    client_open(fixture, &clients[0], 5, "");
}

static void pages_of_one_principal_are_limited(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    fixture->config.principal_pages = 4; /* of 16 rows */
    who(fixture, "one");
    client_open(fixture, &client, 40, "");
    struct tv_call *call = chain(fixture, &client, 20); /* three pages held, two more */
    call_start(fixture, call);
    assert_refused(call_wait(call), 429, "rate-limited");
    assert_string_equal(call->reply.rate_name, "pages");
    call_free(call);
    call_release(fixture, call_chain(fixture, &client, 16), 200);
    who(fixture, "two");
    client_open(fixture, &other, 40, "");
    call_release(fixture, call_chain(fixture, &other, 16), 200);
}

/* Time goes by, for the principal's bucket and memory. */
static void later(struct fixture *fixture, int64_t seconds)
{
    tv_sched_lock(fixture->sched);
    for (struct tv_account *account = fixture->sched->accounts; account != NULL;
         account = account->next) {
        account->nodes_us -= seconds * 1000000;
        account->drafted_us -= seconds * 1000000;
    }
    tv_sched_unlock(fixture->sched);
}

static void nodes_a_second_are_limited(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    fixture->config.principal_nodes_s = 1; /* a burst of the largest tree, 64 */
    who(fixture, "one");
    client_open(fixture, &client, 24, "");
    call_release(fixture, call_chain(fixture, &client, 20), 200);
    client_advance(fixture, &client, 20);
    struct tv_call *call = call_chain(fixture, &client, 30); /* 20 and a little are left */
    assert_refused(call_wait(call), 429, "rate-limited");
    assert_in_range(call->reply.retry_after_s, 1, 10);
    assert_string_equal(call->reply.rate_name, "nodes");
    assert_int_equal(call->reply.rate_quota, 1);
    call_free(call);
    who(fixture, "two");
    client_open(fixture, &other, 5, "");
    call_release(fixture, call_chain(fixture, &other, 30), 200);
    who(fixture, "one");
    later(fixture, 10);
    call_release(fixture, call_chain(fixture, &client, 30), 200);
}

/* What was never started was not used. */
static void a_dropped_call_is_not_charged(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    who(fixture, "one");
    client_open(fixture, &client, 5, "");
    who(fixture, "two");
    client_open(fixture, &other, 5, "");
    struct tv_call *running = call_running(fixture, &other, 1);
    fixture->config.principal_nodes_s = 1; /* read under the lock, by calls that come */
    who(fixture, "one");
    for (int i = 0; i < 3; i++) { /* more than a burst of 64 in all */
        struct tv_call *call = call_chain(fixture, &client, 30);
        tv_sched_cancel(fixture->sched, call);
        (void)call_wait(call);
        call_free(call);
    }
    struct tv_call *call = call_chain(fixture, &client, 30);
    call_release(fixture, running, 200);
    assert_reply(call_wait(call), 200);
    call_free(call);
}

/* Not sent yet: a round of 64 nodes, none of them right. */
static struct tv_call *wrong_call(struct fixture *fixture, const struct client *client,
                                  const char *members)
{
    char text[64 * 5], parents[64 * 3];
    int32_t right = tv_fixed_engine_token(fixture->engine, client->len + 1);
    size_t at = 0, zeros = 0;
    for (int32_t i = 1; i < 64; i++) { /* siblings */
        at += (size_t)snprintf(text + at, sizeof text - at, ",%d", (right + i) % 307);
        zeros += (size_t)snprintf(parents + zeros, sizeof parents - zeros, ",0");
    }
    return call_make(fixture, TV_CALL_VERIFY, client->id,
                     "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,"
                     "\"tree\":{\"tokens\":[%d%s],\"parents\":[-1%s]}%s}",
                     client->seq, client->epoch, client->len, client->pending, text, parents,
                     members);
}

static struct tv_call *wrong_round(struct fixture *fixture, const struct client *client,
                                   const char *members)
{
    struct tv_call *call = wrong_call(fixture, client, members);
    call_start(fixture, call);
    return call_wait(call);
}

/* Nor is one whose guess does not hold. */
static void a_skipped_call_is_not_charged(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    char guess[64];
    client_open(fixture, &client, 5, "");
    struct tv_call *first = call_running(fixture, &client, 1);
    fixture->config.principal_nodes_s = 1; /* a burst of the largest tree, 64 */
    ahead = client;
    client_advance(fixture, &ahead, 1);
    ahead.pending = (ahead.pending + 1) % 307;
    (void)snprintf(guess, sizeof guess, ",\"if\":{\"seq\":%d,\"leaf\":0,\"pending\":%d}",
                   client.seq, ahead.pending);
    struct tv_call *second = wrong_call(fixture, &ahead, guess);
    call_start(fixture, second);
    call_release(fixture, first, 200);
    assert_reply(call_wait(second), 200);
    call_free(second);
    client_advance(fixture, &client, 1);
    client.seq++; /* the skipped one's */
    second = wrong_round(fixture, &client, "");
    assert_reply(second, 200);
    call_free(second);
}

/* A round that its client never wants is drafted in vain too. */
static void b53_holding_does_not_save_the_budget(void **state)
{
    struct fixture *fixture = *state;
    struct client hostile;
    struct tv_call *call;
    int32_t rounds = 0;
    fixture->config.principal_rejected = 0.98;
    client_open(fixture, &hostile, 5, "");
    for (;; rounds++) {
        assert_true(rounds < 1000);
        call = wrong_round(fixture, &hostile, ",\"commit\":\"hold\"");
        if (call->reply.http_status != 200) {
            break;
        }
        call_free(call);
        hostile.seq++;
        call = ask(fixture, TV_CALL_COMMIT, hostile.id, "{\"seq\":%d,\"epoch\":\"%s\",\"path\":[]}",
                   hostile.seq, hostile.epoch);
        assert_reply(call, 200);
        call_free(call);
        hostile.seq++;
    }
    assert_refused(call, 429, "work-budget");
    call_free(call);
    assert_in_range(rounds, TV_SCHED_REJECT_NODES / 63, 3 * TV_SCHED_REJECT_NODES / 63);
}

/* Rows that wait for a client's decision are its principal's. */
static void held_rows_count(void **state)
{
    struct fixture *fixture = *state;
    struct client first, second;
    fixture->config.principal_pages = 8; /* of 16 rows */
    client_open(fixture, &first, 5, "");
    struct tv_call *call = wrong_round(fixture, &first, ",\"commit\":\"hold\"");
    assert_reply(call, 200); /* 69 rows: five pages */
    call_free(call);
    client_open(fixture, &second, 5, "");
    call = wrong_round(fixture, &second, "");
    assert_refused(call, 429, "rate-limited");
    assert_string_equal(call->reply.rate_name, "pages");
    call_free(call);
}

/* A drafter that is always wrong is slowed down, a right one beside it is not. */
static void b53_a_hostile_drafter_runs_out_of_budget(void **state)
{
    struct fixture *fixture = *state;
    struct client hostile, honest;
    struct tv_call *call;
    fixture->config.principal_rejected = 0.98;
    who(fixture, "honest");
    client_open(fixture, &honest, 5, "");
    who(fixture, "hostile");
    client_open(fixture, &hostile, 5, "");
    int32_t rounds = 0;
    for (;;) {
        call = wrong_round(fixture, &hostile, "");
        if (call->reply.http_status != 200) {
            break;
        }
        call_free(call);
        client_advance(fixture, &hostile, 1);
        rounds++;
    }
    assert_refused(call, 429, "work-budget");
    assert_true(call->reply.retry_after_s > 0);
    call_free(call);
    assert_in_range(rounds, TV_SCHED_REJECT_NODES / 63, 3 * TV_SCHED_REJECT_NODES / 63);
    who(fixture, "honest");
    call_release(fixture, call_chain(fixture, &honest, 30), 200);
    who(fixture, "hostile");
    later(fixture, 60);
    call_release(fixture, call_chain(fixture, &hostile, 30), 200);
}

/* One principal cannot keep others out of the queue. */
static void the_queue_is_shared(void **state)
{
    struct fixture *fixture = *state;
    struct client hog[9], other[4];
    struct tv_call *calls[9];
    fixture->config.queue_max = 8;
    who(fixture, "other");
    for (int i = 0; i < 4; i++) {
        client_open(fixture, &other[i], 5, "");
    }
    who(fixture, "hog");
    for (int i = 0; i < 9; i++) {
        client_open(fixture, &hog[i], 5, "");
    }
    struct tv_call *running = call_running(fixture, &hog[8], 1);
    for (int i = 0; i < 4; i++) {
        calls[i] = call_chain(fixture, &hog[i], 2);
    }
    struct tv_call *refused = call_chain(fixture, &hog[4], 2);
    assert_refused(call_wait(refused), 429, "rate-limited");
    assert_string_equal(refused->reply.rate_name, "waiting");
    call_free(refused);
    who(fixture, "other");
    for (int i = 0; i < 4; i++) {
        calls[4 + i] = call_chain(fixture, &other[i], 2);
        assert_false(call_is_done(calls[4 + i]));
    }
    call_release(fixture, running, 200);
    for (int i = 0; i < 8; i++) {
        assert_reply(call_wait(calls[i]), 200);
    }
    calls_free(calls, 8);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(many_sessions_do_not_starve_few),
        CASE(shares_are_of_rows_not_of_calls),
        CASE(absence_saves_nothing_up),
        CASE(a_large_tree_goes_alone),
        CASE(a_launch_is_cut_at_its_rows),
        CASE(long_prompts_leave_room_for_others),
        CASE(a_round_goes_between_the_parts_of_a_slice),
        CASE(sessions_of_one_principal_are_limited),
        CASE(pages_of_one_principal_are_limited),
        CASE(nodes_a_second_are_limited),
        CASE(a_dropped_call_is_not_charged),
        CASE(a_skipped_call_is_not_charged),
        CASE(b53_holding_does_not_save_the_budget),
        CASE(held_rows_count),
        CASE(b53_a_hostile_drafter_runs_out_of_budget),
        CASE(the_queue_is_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
