/*
 * test_sched_joined.c - calls that share one round: each keeps its own deadline and lease, and what
 * is the same body.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

static struct tv_call *start_with(struct fixture *fixture, const struct client *client,
                                  const char *options)
{
    char body[2048];
    client_chain(fixture, client, 2, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    struct tv_call *call = call_make(fixture, TV_CALL_VERIFY, client->id, "%s%s}", body, options);
    call_start(fixture, call);
    return call;
}

static int64_t lease_expires(struct fixture *fixture, const struct client *client)
{
    char text[40];
    struct tm at = {0};
    struct tv_call *call = ask(fixture, TV_CALL_STATE, client->id, NULL);
    reply_text(call, "lease_expires_at", text, sizeof text);
    call_free(call);
    assert_int_equal(sscanf(text, "%d-%d-%dT%d:%d:%d", &at.tm_year, &at.tm_mon, &at.tm_mday,
                            &at.tm_hour, &at.tm_min, &at.tm_sec),
                     6);
    at.tm_year -= 1900;
    at.tm_mon--;
    return (int64_t)timegm(&at);
}

/* Each of the calls that share a queued round has its own deadline and lease. */
static void joined_calls_keep_their_own_fields(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    client_open(fixture, &running, 5, "");
    client_open(fixture, &queued, 6, ",\"lease_s\":60");
    struct tv_call *first = call_running(fixture, &running, 1);
    struct tv_call *owner = start_with(fixture, &queued, ",\"deadline_ms\":1");
    struct tv_call *twin = start_with(fixture, &queued, ",\"deadline_ms\":60000,\"lease_s\":3000");
    struct tv_call *late = start_with(fixture, &queued, ",\"deadline_ms\":1,\"lease_s\":7");
    (void)nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    call_release(fixture, first, 200);
    assert_refused(call_wait(owner), 504, "deadline");
    assert_refused(call_wait(late), 504, "deadline");
    assert_reply(call_wait(twin), 200);
    assert_int_equal(reply_flag(twin, "replayed"), 0);
    call_free(owner);
    call_free(late);
    call_free(twin);
    client_advance(fixture, &queued, 2);
    client_check(fixture, &queued);
    assert_true(lease_expires(fixture, &queued) > (int64_t)time(NULL) + 2900);

    /* who goes takes the long deadline along */
    first = call_chain(fixture, &running, 1);
    (void)call_wait(first);
    call_free(first);
    client_advance(fixture, &running, 1);
    first = call_running(fixture, &running, 1);
    owner = start_with(fixture, &queued, ",\"deadline_ms\":60000");
    late = start_with(fixture, &queued, ",\"deadline_ms\":1");
    tv_sched_cancel(fixture->sched, owner);
    (void)call_wait(owner);
    call_free(owner);
    (void)nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    call_release(fixture, first, 200);
    assert_refused(call_wait(late), 504, "deadline");
    call_free(late);
    client_check(fixture, &queued);
}

/* Of a running round: all are answered by it, and the longest lease counts. */
static void a_lease_of_who_joins_a_running_round(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 6, ",\"lease_s\":60");
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *first = start_with(fixture, &client, "");
    tv_fixed_engine_await_held(fixture->engine);
    struct tv_call *twin = start_with(fixture, &client, ",\"lease_s\":3000,\"deadline_ms\":1");
    call_release(fixture, first, 200);
    assert_int_equal(reply_flag(call_wait(twin), "replayed"), 1);
    call_free(twin);
    assert_true(lease_expires(fixture, &client) > (int64_t)time(NULL) + 2900);
}

/* The session's own rule, said or not, is the same body; another rule is another. */
static void an_explicit_default_rule_is_no_other_body(void **state)
{
    static const char *const pairs[][2] = {{"", ",\"rule\":\"greedy\""},
                                           {",\"rule\":\"greedy\"", ""}};
    struct fixture *fixture = *state;
    for (size_t i = 0; i < 2; i++) {
        struct client client;
        client_open(fixture, &client, 6, ",\"sampling\":{\"rule\":\"greedy\"}");
        struct tv_call *call = start_with(fixture, &client, pairs[i][0]);
        assert_reply(call_wait(call), 200);
        call_free(call);
        call = start_with(fixture, &client, pairs[i][1]);
        assert_int_equal(reply_flag(call_wait(call), "replayed"), 1);
        call_free(call);
        call = start_with(fixture, &client, ",\"rule\":\"target_walk\"");
        assert_refused(call_wait(call), 422, "seq-reused");
        call_free(call);
    }
}

#define MANY 220

static void assert_done_but_large(const struct tv_call *call)
{
    char text[64];
    reply_text(call, "code", text, sizeof text);
    assert_string_equal(text, "overloaded");
    assert_reply(call, 503);
    assert_int_equal(reply_flag(call, "committed"), 1);
    assert_int_equal(call->reply.retry_after_s, 1);
}

/* Joining costs nothing, so copies of one answer are no more at once than a batch repeats. */
static void copies_of_a_large_answer_are_bounded(void **state)
{
    struct fixture *fixture = *state;
    struct client running, client;
    struct tv_call *calls[MANY], *watcher;
    char body[2048];
    int32_t refused = 0;
    fixture->sched->limits.inline_bytes = 100000; /* nobody has called yet */
    size_t most = TV_SCHED_REPLY_BYTES + 2 * fixture->sched->limits.inline_bytes;
    client_open(fixture, &running, 5, "");
    client_open(fixture, &client, 6, "");
    client_chain(fixture, &client, 32, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    struct tv_call *first = call_running(fixture, &running, 1);
    for (int i = 0; i < MANY; i++) {
        calls[i] = call_make(fixture, TV_CALL_VERIFY, client.id,
                             "%s,\"want\":{\"logits\":{\"rows\":\"all\"}}}", body);
        call_start(fixture, calls[i]);
    }
    watcher = call_make(fixture, TV_CALL_ROUND, client.id, NULL);
    watcher->request.seq = 1;
    watcher->request.wait_ms = 60000;
    call_start(fixture, watcher);
    call_release(fixture, first, 200);
    assert_reply(call_wait(calls[0]), 200); /* its round, whoever joined it */
    size_t bytes = calls[0]->reply.body.bytes;
    int32_t fit = (int32_t)(most / bytes) + 1;
    assert_in_range(fit, 2, MANY - 2);
    for (int i = 1; i < MANY; i++) {
        if (call_wait(calls[i])->reply.http_status != 200) {
            assert_done_but_large(calls[i]);
            refused++;
        }
    }
    assert_in_range(MANY - 1 - refused, fit, fit + 1);
    assert_done_but_large(call_wait(watcher));
    call_free(watcher);
    for (int i = 0; i < MANY; i++) {
        call_free(calls[i]);
    }
    calls[0] = call_make(fixture, TV_CALL_VERIFY, client.id,
                         "%s,\"want\":{\"logits\":{\"rows\":\"all\"}}}", body);
    assert_int_equal(tv_sched_submit(fixture->sched, calls[0]), 0);
    assert_reply(calls[0], 200);
    assert_int_equal(reply_flag(calls[0], "replayed"), 1);
    call_free(calls[0]);
    client_advance(fixture, &client, 32);
    client_check(fixture, &client);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(joined_calls_keep_their_own_fields),
        CASE(a_lease_of_who_joins_a_running_round),
        CASE(an_explicit_default_rule_is_no_other_body),
        CASE(copies_of_a_large_answer_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
