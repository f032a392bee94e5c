/*
 * test_sched_keys.c - calls with an Idempotency-Key: one session however often a create or a fork
 * is sent, also while it is under way, and what the memory of keys is bounded by.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "test_sched_fixture.h"

#define PROMPT "{\"tokens\":[1,2,3,4,5]}"

static struct tv_call *start_keyed(struct fixture *fixture, enum tv_call_kind kind,
                                   const char *session, const char *key, const char *body)
{
    struct tv_call *call = call_make(fixture, kind, session, "%s", body);
    (void)snprintf(call->key, sizeof call->key, "%s", key);
    call_start(fixture, call);
    return call;
}

static struct tv_call *keyed(struct fixture *fixture, enum tv_call_kind kind, const char *session,
                             const char *key, const char *body)
{
    return call_wait(start_keyed(fixture, kind, session, key, body));
}

static void assert_same(const struct tv_call *one, const struct tv_call *other)
{
    char session[32];
    assert_reply(one, 201);
    assert_reply(other, 201);
    reply_text(one, "session", session, sizeof session);
    assert_string_equal(one->reply.session, session); /* of the Location header */
    assert_string_equal(other->reply.session, session);
    assert_int_equal(one->reply.body.bytes, other->reply.body.bytes);
    assert_memory_equal(one->reply.body.data, other->reply.body.data, one->reply.body.bytes);
}

static void a_repeated_create_is_one_session(void **state)
{
    struct fixture *fixture = *state;
    struct tv_call *first = keyed(fixture, TV_CALL_CREATE, "", "k-1", PROMPT);
    struct tv_call *again =
        keyed(fixture, TV_CALL_CREATE, "", "k-1",
              "{\"lease_s\":7,\"tokens_b64\":\"AQAAAAIAAAADAAAABAAAAAUAAAA=\"}");
    assert_same(first, again); /* the same body, spelled otherwise */
    assert_int_equal(fixture->sched->table.count, 1);
    call_free(again);
    again = keyed(fixture, TV_CALL_CREATE, "", "k-1", "{\"tokens\":[1,2,3,4,6]}");
    assert_refused(again, 422, "seq-reused");
    call_free(again);
    again = keyed(fixture, TV_CALL_CREATE, "", "k-2", PROMPT); /* another key */
    assert_reply(again, 201);
    call_free(again);
    again = call_make(fixture, TV_CALL_CREATE, "", PROMPT); /* another's key of that name */
    (void)snprintf(again->key, sizeof again->key, "k-1");
    (void)snprintf(again->principal, sizeof again->principal, "other");
    call_start(fixture, again);
    assert_reply(call_wait(again), 201);
    call_free(again);
    assert_int_equal(fixture->sched->table.count, 3);
    /* it has moved on and is gone: the answer is what it was */
    char id[32];
    reply_text(first, "session", id, sizeof id);
    expect(fixture, 204, TV_CALL_DELETE, id, NULL);
    again = keyed(fixture, TV_CALL_CREATE, "", "k-1", PROMPT);
    assert_same(first, again);
    assert_int_equal(fixture->sched->table.count, 2);
    call_free(again);
    call_free(first);
}

static void a_create_under_way_is_waited_for(void **state)
{
    struct fixture *fixture = *state;
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *first = start_keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    tv_fixed_engine_await_held(fixture->engine);
    struct tv_call *twin = start_keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    struct tv_call *other = keyed(fixture, TV_CALL_CREATE, "", "key", "{\"tokens\":[9]}");
    assert_refused(other, 422, "seq-reused");
    call_free(other);
    /* queued ones: the first client leaves, the second stays */
    struct tv_call *leaving = start_keyed(fixture, TV_CALL_CREATE, "", "queued", PROMPT);
    struct tv_call *staying = start_keyed(fixture, TV_CALL_CREATE, "", "queued", PROMPT);
    struct tv_call *alone = start_keyed(fixture, TV_CALL_CREATE, "", "alone", PROMPT);
    tv_sched_cancel(fixture->sched, leaving);
    tv_sched_cancel(fixture->sched, alone);
    assert_refused(call_wait(leaving), 504, "deadline");
    assert_refused(call_wait(alone), 504, "deadline");
    assert_false(call_is_done(twin));
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_same(call_wait(first), call_wait(twin));
    assert_reply(call_wait(staying), 201);
    assert_int_equal(fixture->sched->table.count, 2);
    call_free(first);
    call_free(twin);
    call_free(leaving);
    call_free(staying);
    call_free(alone);
    /* the key of what was dropped is free, also for another body */
    first = keyed(fixture, TV_CALL_CREATE, "", "alone", "{\"tokens\":[9]}");
    assert_reply(first, 201);
    call_free(first);
}

static void a_failed_create_leaves_its_key_free(void **state)
{
    struct fixture *fixture = *state;
    tv_fixed_engine_fail(fixture->engine, TV_KV_FULL, 1);
    struct tv_call *call = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    assert_refused(call, 503, "kv-full");
    call_free(call);
    fixture->config.max_sessions = 0;
    call = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    assert_refused(call, 429, "rate-limited");
    call_free(call);
    fixture->config.max_sessions = 16;
    call = keyed(fixture, TV_CALL_CREATE, "", "key", "{\"tokens\":[9]}");
    assert_reply(call, 201);
    call_free(call);
}

static void a_repeated_fork_is_one_session(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    char body[64];
    client_open(fixture, &client, 20, "");
    client_open(fixture, &other, 20, "");
    (void)snprintf(body, sizeof body, "{\"epoch\":\"%s\",\"len\":7}", client.epoch);
    struct tv_call *first = keyed(fixture, TV_CALL_FORK, client.id, "key", body);
    struct tv_call *again = keyed(fixture, TV_CALL_FORK, client.id, "key", body);
    assert_same(first, again);
    assert_int_equal(fixture->sched->table.count, 3);
    call_free(again);
    again = keyed(fixture, TV_CALL_FORK, other.id, "key", body); /* the parent belongs to it */
    assert_refused(again, 422, "seq-reused");
    call_free(again);
    expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
    again = keyed(fixture, TV_CALL_FORK, client.id, "key", body);
    assert_same(first, again);
    call_free(again);
    call_free(first);
}

/* A repeat renews what it made; when that is over, so is the key, but not before its time. */
static void keys_live_as_long_as_their_sessions(void **state)
{
    struct fixture *fixture = *state;
    char id[32], other[32];
    struct tv_call *first = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    reply_text(first, "session", id, sizeof id);
    tv_sched_lock(fixture->sched);
    struct tv_session_key *entry =
        tv_session_key_find(&fixture->sched->table, "", "key", tv_clock_us());
    if (entry != NULL) {
        entry->done_us -= TV_SESSION_KEY_US; /* its own time is over */
    }
    tv_sched_unlock(fixture->sched);
    assert_non_null(entry);
    struct tv_call *again = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    assert_same(first, again);
    call_free(again);
    expect(fixture, 204, TV_CALL_DELETE, id, NULL);
    again = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    assert_reply(again, 201);
    reply_text(again, "session", other, sizeof other);
    assert_string_not_equal(id, other);
    call_free(again);
    call_free(first);
}

/* However many calls with keys of their own are refused, what was answered is known. */
static void refused_calls_displace_nobody(void **state)
{
    static const char bad[] =
        "{\"tokens\":[1],\"expected_digest\":\"00000000000000000000000000000000\"}";
    struct fixture *fixture = *state;
    char key[16];
    struct tv_call *first = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    for (int i = 0; i < TV_SESSION_KEYS_MAX; i++) {
        (void)snprintf(key, sizeof key, "r%d", i);
        struct tv_call *call = keyed(fixture, TV_CALL_CREATE, "", key, bad);
        assert_reply(call, 409);
        call_free(call);
    }
    struct tv_call *again = keyed(fixture, TV_CALL_CREATE, "", "key", PROMPT);
    assert_same(first, again);
    call_free(again);
    call_free(first);
    first = keyed(fixture, TV_CALL_CREATE, "", "r0", PROMPT); /* and the keys are free */
    assert_reply(first, 201);
    call_free(first);
}

/* A repeat needs nothing of the session whose tokens its prompt was. */
static void a_repeat_outlives_its_prefix(void **state)
{
    struct fixture *fixture = *state;
    struct client source;
    char body[128];
    client_open(fixture, &source, 20, "");
    (void)snprintf(body, sizeof body, "{\"prefix\":{\"session\":\"%s\",\"len\":10}}", source.id);
    struct tv_call *first = keyed(fixture, TV_CALL_CREATE, "", "key", body), *again;
    assert_reply(first, 201);
    expect(fixture, 200, TV_CALL_ROLLBACK, source.id,
           "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":20,\"len\":5}", source.epoch);
    again = keyed(fixture, TV_CALL_CREATE, "", "new", body);
    assert_refused(again, 422, "wrong-value");
    call_free(again);
    for (int gone = 0; gone < 2; gone++) {
        again = keyed(fixture, TV_CALL_CREATE, "", "key", body);
        assert_same(first, again);
        call_free(again);
        again = keyed(fixture, TV_CALL_CREATE, "", "key", "{\"tokens\":[9]}");
        assert_refused(again, 422, "seq-reused");
        call_free(again);
        expect(fixture, 204, TV_CALL_DELETE, source.id, NULL);
    }
    again = keyed(fixture, TV_CALL_CREATE, "", "new", body);
    assert_refused(again, 404, "session-not-found");
    call_free(again);
    call_free(first);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
}

/* Who joins a queued create has no copy of the prompt when the first client leaves it the job. */
static void a_prefix_stays_when_its_first_client_leaves(void **state)
{
    struct fixture *fixture = *state;
    struct client source;
    int32_t tail[16];
    char body[128], id[32];
    client_open(fixture, &source, 20, "");
    (void)snprintf(body, sizeof body, "{\"prefix\":{\"session\":\"%s\",\"len\":10}}", source.id);
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *running = start_keyed(fixture, TV_CALL_CREATE, "", "running", PROMPT);
    tv_fixed_engine_await_held(fixture->engine);
    struct tv_call *leaving = start_keyed(fixture, TV_CALL_CREATE, "", "key", body);
    expect(fixture, 204, TV_CALL_DELETE, source.id, NULL);
    struct tv_call *staying = start_keyed(fixture, TV_CALL_CREATE, "", "key", body);
    assert_false(call_is_done(staying));
    tv_sched_cancel(fixture->sched, leaving);
    assert_refused(call_wait(leaving), 504, "deadline");
    call_free(leaving);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(running), 201);
    call_free(running);
    assert_reply(call_wait(staying), 201);
    reply_text(staying, "session", id, sizeof id);
    call_free(staying);
    struct tv_call *look = call_make(fixture, TV_CALL_STATE, id, NULL);
    look->request.tail = 16;
    call_start(fixture, look);
    assert_reply(call_wait(look), 200);
    assert_int_equal(reply_ints(look, "tail", tail, 16), 10);
    assert_memory_equal(tail, source.tokens, 10 * sizeof *tail);
    call_free(look);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
}

/* Whose client has gone before it was looked at waits for nobody's prompt. */
static void who_has_gone_joins_no_prefix(void **state)
{
    struct fixture *fixture = *state;
    struct client source;
    char body[128];
    client_open(fixture, &source, 20, "");
    (void)snprintf(body, sizeof body, "{\"prefix\":{\"session\":\"%s\",\"len\":10}}", source.id);
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *running = start_keyed(fixture, TV_CALL_CREATE, "", "running", PROMPT);
    tv_fixed_engine_await_held(fixture->engine);
    struct tv_call *first = start_keyed(fixture, TV_CALL_CREATE, "", "key", body);
    struct tv_call *gone = call_make(fixture, TV_CALL_CREATE, "", "%s", body);
    (void)snprintf(gone->key, sizeof gone->key, "key");
    tv_sched_cancel(fixture->sched, gone);
    int waits = tv_sched_submit(fixture->sched, gone);
    int32_t in_flight = tv_sched_in_flight(fixture->sched);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(running), 201);
    assert_reply(call_wait(first), 201);
    assert_int_equal(waits, 0);
    assert_int_equal(in_flight, 2);
    assert_refused(gone, 504, "deadline");
    call_free(running);
    call_free(first);
    call_free(gone);
}

static void end_one(struct tv_sessions *table, const char *principal, const char *key)
{
    struct tv_request request = {.kind = TV_CALL_CREATE};
    struct tv_session_key *entry = tv_session_key_begin(table, principal, key, &request, table);
    assert_non_null(entry);
    tv_session_key_end(table, entry, "", calloc(1, 100), 100, 0);
}

/* The table alone: who has many entries displaces its own, not those of who has few. */
static void many_keys_displace_no_other_principals(void **state)
{
    (void)state;
    struct tv_sessions_params params = {.sessions_max = 4, .page_size = 16, .model_max_len = 100};
    struct tv_sessions *table = calloc(1, sizeof *table);
    char key[16];
    assert_non_null(table);
    assert_int_equal(tv_sessions_init(table, &params), 0);
    end_one(table, "few", "0");
    for (int i = 0; i < 2 * TV_SESSION_KEYS_MAX; i++) {
        (void)snprintf(key, sizeof key, "%d", i);
        end_one(table, "many", key);
    }
    assert_non_null(tv_session_key_find(table, "few", "0", 0));
    end_one(table, "few", "1"); /* in a full table */
    end_one(table, "third", "0");
    end_one(table, "many", "last");
    assert_non_null(tv_session_key_find(table, "few", "0", 0));
    assert_non_null(tv_session_key_find(table, "few", "1", 0));
    assert_non_null(tv_session_key_find(table, "third", "0", 0));
    assert_non_null(tv_session_key_find(table, "many", "last", 0));
    assert_non_null(tv_session_key_find(table, "many", key, 0));
    (void)snprintf(key, sizeof key, "%d", TV_SESSION_KEYS_MAX + 3); /* its oldest went */
    assert_null(tv_session_key_find(table, "many", key, 0));
    (void)snprintf(key, sizeof key, "%d", TV_SESSION_KEYS_MAX + 4);
    assert_non_null(tv_session_key_find(table, "many", key, 0));
    tv_sessions_finish(table);
    free(table);
}

/* The table alone: the oldest that has ended goes, never one under way; bytes count too. */
static void the_memory_of_keys_is_bounded(void **state)
{
    (void)state;
    struct tv_sessions_params params = {.sessions_max = 4, .page_size = 16, .model_max_len = 100};
    struct tv_request request = {.kind = TV_CALL_CREATE};
    struct tv_sessions *table = calloc(1, sizeof *table);
    char key[16];
    assert_non_null(table);
    assert_int_equal(tv_sessions_init(table, &params), 0);
    struct tv_session_key *running = tv_session_key_begin(table, "", "running", &request, table);
    assert_non_null(running);
    for (int i = 1; i < TV_SESSION_KEYS_MAX + 2; i++) {
        (void)snprintf(key, sizeof key, "%d", i);
        struct tv_session_key *entry = tv_session_key_begin(table, "", key, &request, table);
        assert_non_null(entry);
        tv_session_key_end(table, entry, "", calloc(1, 100), 100, 0);
    }
    assert_ptr_equal(tv_session_key_find(table, "", "running", 0), running);
    assert_null(tv_session_key_find(table, "", "1", 0));
    assert_null(tv_session_key_find(table, "", "2", 0));
    assert_non_null(tv_session_key_find(table, "", "3", 0));
    assert_null(tv_session_key_find(table, "me", "3", 0));
    assert_int_equal(table->keys.bytes, 100 * (TV_SESSION_KEYS_MAX - 1));
    assert_null(tv_session_key_find(table, "", "3", TV_SESSION_KEY_US)); /* its time is over */
    struct tv_session_key *large = tv_session_key_begin(table, "", "large", &request, table);
    tv_session_key_end(table, large, "", malloc(1), TV_SESSION_KEY_BYTES_MAX - 50, 0);
    assert_true(table->keys.bytes <= TV_SESSION_KEY_BYTES_MAX);
    assert_non_null(tv_session_key_find(table, "", "large", 0));
    assert_null(tv_session_key_find(table, "", "4000", 0));
    struct tv_session_key *over = tv_session_key_begin(table, "", "over", &request, table);
    tv_session_key_end(table, over, "", malloc(1), TV_SESSION_KEY_BYTES_MAX + 1, 0);
    assert_null(tv_session_key_find(table, "", "over", 0));
    for (int i = 0; i < TV_SESSION_KEYS_MAX - 1; i++) { /* as many under way as there may be */
        (void)snprintf(key, sizeof key, "r%d", i);
        assert_non_null(tv_session_key_begin(table, "", key, &request, table));
    }
    assert_null(tv_session_key_begin(table, "", "more", &request, table));
    tv_session_key_end(table, running, "", NULL, 0, 0);
    assert_non_null(tv_session_key_begin(table, "", "more", &request, table));
    tv_sessions_finish(table);
    free(table);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(a_repeated_create_is_one_session),
        CASE(a_create_under_way_is_waited_for),
        CASE(a_failed_create_leaves_its_key_free),
        CASE(a_repeated_fork_is_one_session),
        CASE(keys_live_as_long_as_their_sessions),
        CASE(refused_calls_displace_nobody),
        CASE(a_repeat_outlives_its_prefix),
        CASE(a_prefix_stays_when_its_first_client_leaves),
        CASE(who_has_gone_joins_no_prefix),
        cmocka_unit_test(many_keys_displace_no_other_principals),
        cmocka_unit_test(the_memory_of_keys_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
