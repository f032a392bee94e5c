/*
 * test_sched_events.c - who follows a session knows after every round what the session is, and is
 * told when it has missed something and when there is no session any more.
 */
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

#define EVENT_BYTES 16384

/* The real clock, and what a test puts before it. */
static _Atomic int64_t ahead_us;

int64_t __real_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void);
int64_t __wrap_tv_clock_us(void)
{
    return __real_tv_clock_us() + atomic_load(&ahead_us);
}

struct event {
    enum tv_feed_found found;
    int32_t from, to;
    char text[EVENT_BYTES];
};

static struct tv_call *follow(struct fixture *fixture, const char *id, int32_t last)
{
    struct tv_call *call = call_make(fixture, TV_CALL_EVENTS, id, NULL);
    call->request.has_last_event = last >= 0;
    call->request.last_event = last;
    call_start(fixture, call);
    return call_wait(call);
}

static void next(struct tv_call *call, struct event *event)
{
    char *text = NULL;
    size_t bytes = 0;
    event->text[0] = '\0';
    event->found = tv_feed_read(call->reply.feed, &call->reply.cursor, &text, &bytes, &event->from,
                                &event->to);
    if (event->found == TV_FEED_TEXT) {
        assert_true(bytes < sizeof event->text);
        memcpy(event->text, text, bytes);
        event->text[bytes] = '\0';
        free(text);
    }
}

/* What the stream begins with. */
static const char *beginning(const struct tv_call *call)
{
    static char text[EVENT_BYTES];
    assert_reply(call, 200);
    assert_true(call->reply.body.bytes < sizeof text);
    memcpy(text, call->reply.body.data, call->reply.body.bytes);
    text[call->reply.body.bytes] = '\0';
    return text;
}

/* The number behind "name": in a text that has it once. */
static int32_t number(const char *text, const char *name)
{
    char quoted[40];
    (void)snprintf(quoted, sizeof quoted, "\"%s\":", name);
    const char *at = strstr(text, quoted);
    assert_non_null(at);
    return (int32_t)strtol(at + strlen(quoted), NULL, 10);
}

static int32_t number_after(const char *text, const char *label)
{
    const char *at = strstr(text, label);
    assert_non_null(at);
    return (int32_t)strtol(at + strlen(label), NULL, 10);
}

/* The next event is round seq's, of this kind, and leaves the session as the client knows it. */
static void assert_event(struct tv_call *reader, int32_t seq, const char *name, const char *op,
                         const struct client *client)
{
    struct event event;
    char expected[64];
    next(reader, &event);
    assert_int_equal(event.found, TV_FEED_TEXT);
    (void)snprintf(expected, sizeof expected, "id: %d\nevent: %s\ndata: {\"seq\":%d,\"op\":\"%s\"",
                   seq, name, seq, op);
    assert_memory_equal(event.text, expected, strlen(expected));
    size_t bytes = strlen(event.text);
    assert_string_equal(event.text + bytes - 3, "}\n\n");
    assert_ptr_equal(strstr(event.text, "\n\n"), event.text + bytes - 2);
    assert_int_equal(number(event.text, "committed_len"), client->len);
    assert_int_equal(number(event.text, "pending"), client->pending);
    char digest[64] = "\"digest\":\"";
    for (size_t i = 0; i < 16; i++) {
        (void)snprintf(digest + 10 + 2 * i, 3, "%02x", client->digest.bytes[i]);
    }
    assert_non_null(strstr(event.text, digest));
}

static void assert_quiet(struct tv_call *reader)
{
    struct event event;
    next(reader, &event);
    assert_int_equal(event.found, TV_FEED_NOTHING);
}

static void chain(struct fixture *fixture, struct client *client, int32_t count)
{
    struct tv_call *call = call_chain(fixture, client, count);
    assert_reply(call_wait(call), 200);
    call_free(call);
    client_advance(fixture, client, count);
}

static void test_a_stream_begins(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 20, "");
    chain(fixture, &client, 3);
    struct tv_call *fresh = follow(fixture, client.id, -1);
    assert_reply(fresh, 200);
    assert_string_equal(fresh->reply.content_type, "text/event-stream");
    assert_non_null(strstr(beginning(fresh), "id: 1\nevent: state\ndata: {\"session\":"));
    assert_int_equal(number(beginning(fresh), "committed_len"), 23);
    assert_quiet(fresh);
    struct tv_call *again = follow(fixture, client.id, 0);
    assert_non_null(strstr(beginning(again), "event: lease\ndata: {\"lease_expires_at\":\""));
    assert_null(strstr(beginning(again), "id:"));
    assert_event(again, 1, "commit", "verify", &client);
    assert_quiet(again);
    struct tv_call *future = follow(fixture, client.id, 2);
    assert_refused(future, 400, "bad-request");
    assert_null(future->reply.feed);
    struct tv_call *other = follow(fixture, "s_0123456789abcdefghijAB", -1);
    assert_refused(other, 404, "session-not-found");
    (void)snprintf(fixture->principal, sizeof fixture->principal, "another");
    struct tv_call *foreign = follow(fixture, client.id, -1);
    assert_refused(foreign, 404, "session-not-found");
    fixture->principal[0] = '\0';
    struct tv_call *calls[] = {fresh, again, future, other, foreign};
    for (size_t i = 0; i < 5; i++) {
        call_free(calls[i]);
    }
}

static void test_every_round_is_told(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    int32_t tokens[16];
    client_open(fixture, &client, 20, "");
    struct tv_call *reader = follow(fixture, client.id, -1);
    chain(fixture, &client, 4);
    assert_event(reader, 1, "commit", "verify", &client);
    struct tv_call *call = ask(fixture, TV_CALL_DECODE, client.id,
                               "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":6}",
                               client.epoch, client.len);
    assert_int_equal(reply_ints(call, "new_tokens", tokens, 16), 6);
    call_free(call);
    client_advance(fixture, &client, 6);
    assert_event(reader, 2, "commit", "decode", &client);
    client_roll(&client, 22, -1);
    expect(fixture, 200, TV_CALL_ROLLBACK, client.id,
           "{\"seq\":3,\"epoch\":\"%s\",\"expected_len\":30,\"len\":22}", client.epoch);
    client.seq = 4;
    assert_event(reader, 3, "rollback", "rollback", &client);
    call = ask(fixture, TV_CALL_EXTEND, client.id,
               "{\"seq\":4,\"epoch\":\"%s\",\"expected_len\":22,\"tokens\":[7,8]}", client.epoch);
    client.tokens[client.len++] = 7;
    client.tokens[client.len++] = 8;
    tv_digest_push(&client.digest, 7);
    tv_digest_push(&client.digest, 8);
    client.pending = (int32_t)reply_int(call, "pending");
    client.seq = 5;
    call_free(call);
    assert_event(reader, 4, "commit", "extend", &client);
    client_check(fixture, &client);
    /* what was replayed or refused has done nothing */
    expect(fixture, 200, TV_CALL_EXTEND, client.id,
           "{\"seq\":4,\"epoch\":\"%s\",\"expected_len\":22,\"tokens\":[7,8]}", client.epoch);
    expect(fixture, 409, TV_CALL_EXTEND, client.id,
           "{\"seq\":9,\"epoch\":\"%s\",\"expected_len\":22,\"tokens\":[7,8]}", client.epoch);
    assert_quiet(reader);
    call_free(reader);
}

/* A held round is told when it is settled: by a commit under the commit's number, by commit_prev
 * under its own, also to who came between the two. */
static void test_held_rounds(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[1024];
    client_open(fixture, &client, 20, "");
    struct tv_call *reader = follow(fixture, client.id, -1);
    (void)client_chain(fixture, &client, 3, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s,\"commit\":\"hold\"}", body);
    assert_quiet(reader);
    struct tv_call *between = follow(fixture, client.id, -1);
    assert_int_equal(number_after(beginning(between), "id: "), 0);
    int32_t pending = tv_fixed_engine_token(fixture->engine, 23);
    client_advance(fixture, &client, 3);
    expect(fixture, 200, TV_CALL_COMMIT, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"path\":[0,1,2],\"next\":%d}", client.epoch, pending);
    client.seq = 3;
    assert_event(reader, 2, "commit", "commit", &client);
    assert_event(between, 2, "commit", "commit", &client);
    (void)client_chain(fixture, &client, 2, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s,\"commit\":\"hold\"}", body);
    struct tv_call *held = follow(fixture, client.id, -1);
    int32_t told = number_after(beginning(held), "id: ");
    assert_int_equal(told, 2);
    client_advance(fixture, &client, 2);
    client.seq = 4;
    struct client settled = client;
    (void)client_chain(fixture, &client, 1, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client.id,
           "%s,\"commit_prev\":{\"seq\":3,\"path\":[0,1],\"next\":%d}}", body, client.pending);
    client_advance(fixture, &client, 1);
    client_check(fixture, &client);
    struct tv_call *late = follow(fixture, client.id, told); /* as one that lost its connection */
    struct tv_call *readers[] = {reader, held, late};
    for (size_t i = 0; i < 3; i++) {
        assert_event(readers[i], 3, "commit", "commit", &settled);
        assert_event(readers[i], 4, "commit", "verify", &client);
        assert_quiet(readers[i]);
        call_free(readers[i]);
    }
    call_free(between);
}

static void test_slow_readers_are_told(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    struct event event;
    client_open(fixture, &client, 20, "");
    struct tv_call *slow = follow(fixture, client.id, -1);
    for (int32_t i = 0; i < TV_FEED_TEXTS_MAX + 5; i++) {
        chain(fixture, &client, 1);
    }
    next(slow, &event);
    assert_int_equal(event.found, TV_FEED_LOST);
    assert_int_equal(event.from, 1);
    assert_int_equal(event.to, 5);
    next(slow, &event);
    assert_int_equal(number_after(event.text, "id: "), 6);
    struct tv_call *late = follow(fixture, client.id, 3);
    next(late, &event);
    assert_int_equal(event.found, TV_FEED_LOST);
    assert_int_equal(event.from, 4);
    assert_int_equal(event.to, 5);
    struct tv_call *timely = follow(fixture, client.id, 5);
    next(timely, &event);
    assert_int_equal(number_after(event.text, "id: "), 6);
    call_free(slow);
    call_free(late);
    call_free(timely);
}

static const char *end_of(const struct tv_call *reader)
{
    return tv_sched_events_end(tv_feed_ended(reader->reply.feed));
}

static void test_the_end_of_a_session(void **state)
{
    struct fixture *fixture = *state;
    struct client deleted, leased;
    client_open(fixture, &deleted, 20, "");
    client_open(fixture, &leased, 20, ",\"lease_s\":30");
    struct tv_call *reader = follow(fixture, deleted.id, -1);
    struct tv_call *expiring = follow(fixture, leased.id, -1);
    assert_int_equal(tv_feed_readers(reader->reply.feed), 1);
    chain(fixture, &deleted, 2);
    assert_int_equal(tv_feed_ended(reader->reply.feed), 0);
    expect(fixture, 204, TV_CALL_DELETE, deleted.id, NULL);
    assert_event(reader, 1, "commit", "verify", &deleted);
    assert_string_equal(end_of(reader), "deleted");
    assert_int_equal(tv_feed_ended(expiring->reply.feed), 0);
    int64_t lease = tv_feed_note(expiring->reply.feed);
    expect(fixture, 200, TV_CALL_RENEW, leased.id, "{\"lease_s\":60}");
    assert_true(tv_feed_note(expiring->reply.feed) >= lease + 30000); /* it is told of that too */
    (void)atomic_fetch_add(&ahead_us, INT64_C(61000000));             /* a stream keeps no lease */
    expect(fixture, 410, TV_CALL_EVENTS, leased.id, NULL);
    assert_string_equal(end_of(expiring), "expired");
    call_free(reader);
    call_free(expiring);
}

static _Atomic int rung;

static void bell(void *context)
{
    assert_ptr_equal(context, &rung);
    (void)atomic_fetch_add(&rung, 1);
}

/* The bell rings for what somebody follows, and for nothing else. */
static void test_the_bell(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    tv_sched_events_watch(fixture->sched, bell, &rung);
    client_open(fixture, &client, 20, "");
    client_open(fixture, &other, 20, "");
    chain(fixture, &client, 1);
    assert_int_equal(atomic_load(&rung), 0);
    struct tv_call *reader = follow(fixture, client.id, -1);
    chain(fixture, &other, 1);
    assert_int_equal(atomic_load(&rung), 0);
    chain(fixture, &client, 1);
    assert_int_equal(atomic_load(&rung), 1);
    expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
    assert_int_equal(atomic_load(&rung), 2);
    call_free(reader);
    expect(fixture, 204, TV_CALL_DELETE, other.id, NULL);
    assert_int_equal(atomic_load(&rung), 2);
    tv_sched_events_watch(fixture->sched, NULL, NULL);
}

/* Readers outlive the sessions and the scheduler. */
static void test_readers_outlive_all(void **state)
{
    struct fixture fixture;
    struct client client;
    struct event event;
    (void)state;
    fixture_start(&fixture);
    client_open(&fixture, &client, 20, "");
    struct tv_call *reader = follow(&fixture, client.id, -1);
    chain(&fixture, &client, 2);
    fixture_stop(&fixture);
    next(reader, &event);
    assert_int_equal(event.found, TV_FEED_TEXT);
    assert_int_equal(number_after(event.text, "id: "), 1);
    call_free(reader);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_stream_begins, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(test_every_round_is_told, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(test_held_rounds, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(test_slow_readers_are_told, fixture_setup,
                                        fixture_teardown),
        cmocka_unit_test_setup_teardown(test_the_end_of_a_session, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(test_the_bell, fixture_setup, fixture_teardown),
        cmocka_unit_test(test_readers_outlive_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
