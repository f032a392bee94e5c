/*
 * test_sched_batch_keys.c - batches with an Idempotency-Key: one answer however often they are
 * sent, also while they are under way; which answers are not kept; and items that join a round
 * whose answer is large.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "fixed_engine.h"
#include "test_sched_fixture.h"

#define BODY 16384

/* A verify of `count` nodes as an item, with `rest` behind its last member. */
static void item_add(struct fixture *fixture, const struct client *client, int32_t count,
                     const char *rest, char *ret_items)
{
    char body[2048];
    size_t at = strlen(ret_items);
    (void)client_chain(fixture, client, count, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    int used = snprintf(ret_items + at, BODY - at, "%s{\"session\":\"%s\",%s%s}", at > 0 ? "," : "",
                        client->id, body + 1, rest);
    assert_true(used > 0 && (size_t)used < BODY - at);
}

static struct tv_call *start(struct fixture *fixture, const char *key, const char *items)
{
    struct tv_call *call = call_make(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    (void)snprintf(call->key, sizeof call->key, "%s", key);
    call_start(fixture, call);
    return call;
}

static int32_t mentions(const struct tv_call *call, const char *text)
{
    const struct tv_buf *body = &call->reply.body;
    const char *at = body->data;
    int32_t count = 0;
    while ((at = memmem(at, body->bytes - (size_t)(at - body->data), text, strlen(text))) != NULL) {
        count++;
        at += strlen(text);
    }
    return count;
}

static void assert_same(const struct tv_call *one, const struct tv_call *other)
{
    assert_reply(one, 200);
    assert_reply(other, 200);
    assert_int_equal(one->reply.body.bytes, other->reply.body.bytes);
    assert_memory_equal(one->reply.body.data, other->reply.body.data, one->reply.body.bytes);
}

static int64_t lease_of(struct fixture *fixture, const struct client *client)
{
    struct tv_session *session = NULL;
    tv_sched_lock(fixture->sched);
    assert_int_equal(
        tv_sessions_find(&fixture->sched->table, client->id, "", tv_clock_us(), &session), TV_OK);
    int64_t lease_us = session->lease_expires_us;
    tv_sched_unlock(fixture->sched);
    return lease_us;
}

static void a_repeat_is_the_same_answer(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[3];
    char items[BODY] = "", other[BODY] = "";
    for (int i = 0; i < 3; i++) {
        client_open(fixture, &clients[i], 5 + i, "");
        item_add(fixture, &clients[i], 2 + i, "", items);
        item_add(fixture, &clients[i], 1 + i, "", other);
    }
    struct tv_call *first = call_wait(start(fixture, "key", items));
    assert_reply(first, 200);
    assert_int_equal(mentions(first, "{\"status\":200,\"body\":{\"seq\":1,"), 3);
    for (int i = 0; i < 3; i++) {
        client_advance(fixture, &clients[i], 2 + i);
    }
    for (int32_t n = 0; n < TV_REPLAY_ROUNDS_MAX; n++) { /* until no session keeps its answer */
        expect(fixture, 200, TV_CALL_DECODE, clients[0].id,
               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1}", clients[0].seq,
               clients[0].epoch, clients[0].len);
        client_advance(fixture, &clients[0], 1);
    }
    int64_t launches = tv_fixed_engine_launches(fixture->engine);
    int64_t lease_us = lease_of(fixture, &clients[1]);
    struct tv_call *again = call_wait(start(fixture, "key", items));
    assert_same(first, again);
    assert_int_equal(mentions(again, "\"replayed\":false}"), 3);
    assert_true(lease_of(fixture, &clients[1]) > lease_us);
    call_free(again);
    again = call_wait(start(fixture, "key", other)); /* other trees */
    assert_refused(again, 422, "seq-reused");
    call_free(again);
    again = call_make(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}"); /* of no batch */
    (void)snprintf(again->key, sizeof again->key, "key");
    call_start(fixture, again);
    assert_refused(call_wait(again), 422, "seq-reused");
    call_free(again);
    again =
        call_wait(start(fixture, "", items)); /* without the key every item answers for itself */
    assert_int_equal(mentions(again, "\"replayed\":true}"), 2);
    assert_int_equal(mentions(again, "\"code\":\"round-evicted\""), 1);
    call_free(again);
    call_free(first);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), launches);
    for (int i = 0; i < 3; i++) {
        client_check(fixture, &clients[i]);
    }
}

static void one_under_way_is_waited_for(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[2];
    char items[BODY] = "";
    for (int i = 0; i < 2; i++) {
        client_open(fixture, &clients[i], 5, "");
        item_add(fixture, &clients[i], 3, "", items);
    }
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *first = start(fixture, "key", items);
    tv_fixed_engine_await_held(fixture->engine);
    struct tv_call *twin = start(fixture, "key", items);
    struct tv_call *leaving = start(fixture, "key", items);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 4); /* two items, two that wait */
    tv_sched_cancel(fixture->sched, leaving);
    assert_refused(call_wait(leaving), 504, "deadline");
    tv_sched_cancel(fixture->sched, first); /* somebody else still wants it */
    assert_false(call_is_done(first));
    assert_false(call_is_done(twin));
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_same(call_wait(first), call_wait(twin));
    assert_int_equal(mentions(twin, "{\"status\":200,\"body\":"), 2);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), 2);
    assert_int_equal(tv_sched_in_flight(fixture->sched), 0);
    assert_null(fixture->sched->batches);
    call_free(first);
    call_free(twin);
    call_free(leaving);
}

static void what_may_be_tried_again_is_not_kept(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[2];
    char items[BODY] = "", bad[BODY] = "";
    for (int i = 0; i < 2; i++) {
        client_open(fixture, &clients[i], 5, "");
        item_add(fixture, &clients[i], 3, "", items);
    }
    tv_fixed_engine_fail(fixture->engine, TV_KV_FULL, 1);
    struct tv_call *call = call_wait(start(fixture, "key", items));
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":"), 1);
    assert_int_equal(mentions(call, "\"code\":\"kv-full\""), 1);
    call_free(call);
    call = call_wait(start(fixture, "key", items)); /* the one that failed runs now */
    assert_int_equal(mentions(call, "\"replayed\":true}"), 1);
    assert_int_equal(mentions(call, "\"replayed\":false}"), 1);
    struct tv_call *again = call_wait(start(fixture, "key", items));
    assert_same(call, again);
    call_free(again);
    call_free(call);
    /* what is final is kept: a fault of the item's own */
    bad[0] = '\0';
    clients[1].len++;
    item_add(fixture, &clients[1], 2, "", bad);
    clients[1].len--;
    client_advance(fixture, &clients[0], 3);
    item_add(fixture, &clients[0], 2, "", bad);
    call = call_wait(start(fixture, "final", bad));
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":"), 1);
    again = call_wait(start(fixture, "final", bad));
    assert_same(call, again);
    call_free(again);
    call_free(call);
    /* and nothing of a batch in which all are refused */
    int32_t owners = fixture->sched->table.keys.owners[0].count;
    call = call_wait(start(fixture, "none", "{},{\"seq\":1}"));
    assert_int_equal(mentions(call, "{\"status\":400,\"problem\":"), 2);
    call_free(call);
    assert_int_equal(fixture->sched->table.keys.owners[0].count, owners);
    assert_int_equal(fixture->sched->table.keys.running, 0);
}

/* A round with a large block is under way and a wrong guess waits behind it; a batch of nothing but
 * that guess joins it. The guess is skipped with the large answer in it, which goes to as many
 * items as repeats would. */
static void joined_skips_are_bounded(void **state)
{
    struct fixture *fixture = *state;
    struct client client, ahead;
    char body[2048], rest[96], items[BODY] = "";
    size_t most = TV_SCHED_REPLY_BYTES + 2 * fixture->sched->limits.inline_bytes;
    client_open(fixture, &client, 20, "");
    (void)client_chain(fixture, &client, 32, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *large = call_make(fixture, TV_CALL_VERIFY, client.id,
                                      "%s,\"want\":{\"logits\":{\"rows\":\"all\"}}}", body);
    call_start(fixture, large);
    tv_fixed_engine_await_held(fixture->engine);
    ahead = client;
    client_advance(fixture, &ahead, 32);
    (void)snprintf(rest, sizeof rest, ",\"if\":{\"seq\":1,\"leaf\":30,\"pending\":%d}",
                   ahead.pending);
    for (int32_t i = 0; i < 40; i++) {
        item_add(fixture, &ahead, 1, rest, items);
    }
    struct tv_call *batch = start(fixture, "", items);
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(large), 200);
    size_t bytes = large->reply.body.bytes;
    int32_t fit = (int32_t)(most / bytes) + 1;
    assert_in_range(fit, 2, 38);
    (void)call_wait(batch);
    int32_t refused = mentions(batch, "{\"status\":503,\"problem\":");
    assert_int_equal(mentions(batch, "\"code\":\"overloaded\""), refused);
    assert_in_range(40 - refused, fit - 1, fit + 1);
    assert_true(batch->reply.body.bytes < most + 2 * bytes);
    call_free(batch);
    call_free(large);
    client_advance(fixture, &client, 32);
    client.seq++; /* it is kept: who was refused gets it now */
    client_check(fixture, &client);
    items[0] = '\0';
    item_add(fixture, &ahead, 1, rest, items);
    batch = call_wait(start(fixture, "", items));
    assert_int_equal(mentions(batch, "\"status\":\"skipped\""), 1);
    assert_int_equal(mentions(batch, "\"replayed\":true}"), 1);
    call_free(batch);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_repeat_is_the_same_answer),
        CASE(one_under_way_is_waited_for),
        CASE(what_may_be_tried_again_is_not_kept),
        cmocka_unit_test_setup_teardown(joined_skips_are_bounded, fixture_setup_wide,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
