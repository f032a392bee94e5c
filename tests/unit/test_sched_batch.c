/*
 * test_sched_batch.c - verify:batch on fixed answers: one launch for the items of different
 * sessions, faults that stay with their item, retries of items, how much they may answer at once,
 * and a client that leaves.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fixed_engine.h"
#include "test_sched_fixture.h"

#define BODY 16384

/* A verify of `count` nodes as an item: its session comes first. */
static void item_add(struct fixture *fixture, const struct client *client, int32_t count,
                     char *ret_items)
{
    char body[2048];
    size_t at = strlen(ret_items);
    (void)client_chain(fixture, client, count, body, sizeof body);
    int used = snprintf(ret_items + at, BODY - at, "%s{\"session\":\"%s\",%s", at > 0 ? "," : "",
                        client->id, body + 1);
    assert_true(used > 0 && (size_t)used < BODY - at);
}

static void text_add(const char *text, char *ret_items)
{
    size_t at = strlen(ret_items);
    int used = snprintf(ret_items + at, BODY - at, "%s%s", at > 0 ? "," : "", text);
    assert_true(used > 0 && (size_t)used < BODY - at);
}

static int32_t mentions(const struct tv_call *call, const char *text)
{
    int32_t count = 0;
    size_t bytes = strlen(text);
    const char *data = call->reply.body.data;
    for (size_t i = 0; i + bytes <= call->reply.body.bytes; i++) {
        count += memcmp(data + i, text, bytes) == 0;
    }
    return count;
}

static void one_launch(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[4];
    char items[BODY] = "";
    for (int i = 0; i < 4; i++) {
        client_open(fixture, &clients[i], 4 + i, "");
        item_add(fixture, &clients[i], 2 + i, items);
    }
    int64_t before = tv_fixed_engine_launches(fixture->engine);
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), before + 1);
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":{\"seq\":1,"), 4);
    assert_int_equal(mentions(call, "\"batch\":4}"), 4);
    call_free(call);
    for (int i = 0; i < 4; i++) {
        client_advance(fixture, &clients[i], 2 + i);
        client_check(fixture, &clients[i]);
    }
    call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items); /* lost, and sent again */
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "\"replayed\":true}"), 4);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), before + 1);
    call_free(call);
    for (int i = 0; i < 4; i++) { /* and the same as a round of its own */
        char body[2048];
        clients[i].len -= 2 + i;
        clients[i].pending = tv_fixed_engine_token(fixture->engine, clients[i].len);
        clients[i].seq = 1;
        call = ask(fixture, TV_CALL_VERIFY, clients[i].id, "%s",
                   client_chain(fixture, &clients[i], 2 + i, body, sizeof body));
        assert_reply(call, 200);
        assert_true(reply_flag(call, "replayed"));
        call_free(call);
    }
}

static void faults_stay_with_their_item(void **state)
{
    struct fixture *fixture = *state;
    struct client good, busy;
    char items[BODY] = "";
    client_open(fixture, &good, 5, "");
    client_open(fixture, &busy, 6, "");
    item_add(fixture, &good, 2, items);
    text_add("{\"session\":\"s_0123456789abcdefghijAB\",\"seq\":1,\"epoch\":\"0123456789abcdef\","
             "\"expected_len\":1,\"tree\":{\"tokens\":[1],\"parents\":[-1]}}",
             items); /* another epoch */
    item_add(fixture, &busy, 2, items);
    item_add(fixture, &busy, 3, items); /* a second round with the same number */
    item_add(fixture, &good, 2, items); /* the first item again: it joins it */
    text_add("{\"seq\":1}", items);
    text_add("{\"x\":7}", items);
    text_add("{\"session\":\"s_0123456789abcdefghijAB\",\"seq\":1,\"epoch\":\"0123456789abcdef\","
             "\"expected_len\":1,\"tree\":{\"tokens\":[1,2],\"parents\":[-1,1]}}",
             items);
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":"), 3);
    assert_int_equal(mentions(call, "\"replayed\":true}"), 1);
    assert_int_equal(mentions(call, "{\"status\":409,\"problem\":"), 1);
    assert_true(reply_mentions(call, "epoch-changed"));
    assert_int_equal(mentions(call, "\"code\":\"seq-reused\""), 1);
    assert_true(reply_mentions(call, "\"pointer\":\"/items/5/session\""));
    assert_true(reply_mentions(call, "\"pointer\":\"/items/6/x\""));
    assert_true(reply_mentions(call, "\"pointer\":\"/items/7/tree/parents/1\""));
    call_free(call);
    client_advance(fixture, &good, 2);
    client_advance(fixture, &busy, 2);
    client_check(fixture, &good);
    client_check(fixture, &busy);
}

static void every_item_refused(void **state)
{
    struct fixture *fixture = *state;
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[{},{}]}");
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "{\"status\":400,\"problem\":"), 2);
    call_free(call);
}

/* What is no object is answered in its place, and the others run. */
static void items_that_are_no_objects(void **state)
{
    struct fixture *fixture = *state;
    static const char *const none[] = {"null", "7", "\"text\"", "[]", "true", "[{}]"};
    const int32_t count = (int32_t)(sizeof none / sizeof none[0]);
    struct client client;
    char items[BODY] = "", pointer[48];
    client_open(fixture, &client, 5, "");
    for (int32_t i = 0; i < count; i++) {
        text_add(none[i], items);
    }
    item_add(fixture, &client, 2, items);
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "{\"status\":400,\"problem\":"), count);
    assert_int_equal(mentions(call, "\"code\":\"wrong-type\""), count);
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":"), 1);
    for (int32_t i = 0; i < count; i++) {
        (void)snprintf(pointer, sizeof pointer, "\"pointer\":\"/items/%d\"", i);
        assert_int_equal(mentions(call, pointer), 1);
    }
    call_free(call);
    client_advance(fixture, &client, 2);
    client_check(fixture, &client);
    items[0] = '\0';
    for (int32_t i = 0; i < TV_BATCH_ITEMS_MAX; i++) { /* so many that they are no values */
        text_add(i % 2 == 0 ? "1" : "-1.5e3", items);
    }
    call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "\"code\":\"wrong-type\""), TV_BATCH_ITEMS_MAX);
    assert_int_equal(mentions(call, "\"pointer\":\"/items/63\""), 1);
    call_free(call);
}

static void lists_that_are_none(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *items;
        enum tv_code code;
    } bad[] = {{"[]", TV_WRONG_VALUE}, {"{}", TV_WRONG_TYPE}, {"17", TV_WRONG_TYPE}};
    char body[TV_BATCH_ITEMS_MAX * 3 + 64];
    struct tv_request request;
    struct tv_problem problem = {0};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        (void)snprintf(body, sizeof body, "{\"items\":%s}", bad[i].items);
        assert_true(tv_request_decode(TV_CALL_BATCH, body, strlen(body),
                                      tv_sched_limits(fixture->sched), &request, &problem) != 0);
        assert_int_equal(problem.code, bad[i].code);
        assert_string_equal(problem.pointer, "/items");
    }
    for (int over = 0; over < 2; over++) { /* at the cap and above it */
        size_t at = (size_t)snprintf(body, sizeof body, "{\"items\":[{}");
        for (int i = 1; i < TV_BATCH_ITEMS_MAX + over; i++) {
            at += (size_t)snprintf(body + at, sizeof body - at, ",{}");
        }
        (void)snprintf(body + at, sizeof body - at, "]}");
        int rc = tv_request_decode(TV_CALL_BATCH, body, strlen(body),
                                   tv_sched_limits(fixture->sched), &request, &problem);
        assert_int_equal(rc == 0, !over);
        tv_request_finish(&request);
    }
}

/* Items that wait are dropped, the one under way finishes and is kept. */
static void the_client_leaves(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[6];
    char items[BODY] = "";
    for (int i = 0; i < 6; i++) { /* more than a launch has room for */
        client_open(fixture, &clients[i], 4, "");
        item_add(fixture, &clients[i], 2, items);
    }
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *call = call_make(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    call_start(fixture, call);
    tv_fixed_engine_await_held(fixture->engine);
    assert_false(call_is_done(call));
    tv_sched_cancel(fixture->sched, call);
    assert_false(call_is_done(call)); /* four are in the launch */
    tv_fixed_engine_hold(fixture->engine, 0);
    (void)call_wait(call);
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":"), 4);
    assert_int_equal(mentions(call, "{\"status\":504,\"problem\":"), 2);
    tv_sched_cancel(fixture->sched, call); /* too late: nothing happens */
    call_free(call);
    for (int i = 0; i < 4; i++) {
        client_advance(fixture, &clients[i], 2);
    }
    for (int i = 0; i < 6; i++) {
        client_check(fixture, &clients[i]);
    }
}

/* A round with large logits, and one behind it that guessed wrong: its answer has the first one's.
 * *ret_item is the second as an item; the size of its answer. */
static size_t skip_large(struct fixture *fixture, struct client *client, char *ret_item,
                         size_t item_bytes)
{
    char body[2048];
    (void)client_chain(fixture, client, 32, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client->id, "%s,\"want\":{\"logits\":{\"rows\":\"all\"}}}",
           body);
    client_advance(fixture, client, 32);
    (void)client_chain(fixture, client, 1, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    int used = snprintf(ret_item, item_bytes,
                        "{\"session\":\"%s\",%s,\"if\":{\"seq\":1,\"leaf\":30,\"pending\":%d}}",
                        client->id, body + 1, client->pending);
    assert_true(used > 0 && (size_t)used < item_bytes);
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", ret_item);
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "\"status\":\"skipped\""), 1);
    size_t bytes = call->reply.body.bytes;
    call_free(call);
    client->seq++;
    return bytes;
}

/* A small body that asks for many large answers gets what one round's may have, and one more. */
static void kept_answers_are_bounded(void **state)
{
    struct fixture *fixture = *state;
    struct client client, other;
    char items[BODY] = "", item[512];
    size_t most = TV_SCHED_REPLY_BYTES + 2 * fixture->sched->limits.inline_bytes;
    client_open(fixture, &client, 20, "");
    client_open(fixture, &other, 20, "");
    size_t bytes = skip_large(fixture, &client, item, sizeof item);
    int32_t fit = (int32_t)(most / bytes) + 1;
    assert_in_range(fit, 2, TV_BATCH_ITEMS_MAX - 2);
    for (int32_t i = 0; i < TV_BATCH_ITEMS_MAX - 1; i++) {
        text_add(item, items);
    }
    item_add(fixture, &other, 2, items);
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    int32_t refused = mentions(call, "{\"status\":503,\"problem\":");
    assert_int_equal(mentions(call, "\"code\":\"overloaded\""), refused);
    assert_in_range(TV_BATCH_ITEMS_MAX - refused, fit, fit + 1);
    assert_true(call->reply.body.bytes < most + 2 * bytes);
    call_free(call);
    client_check(fixture, &other); /* nothing of it was used up */
    items[0] = '\0';
    text_add(item, items);
    item_add(fixture, &other, 2, items);
    call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    assert_int_equal(mentions(call, "{\"status\":200,\"body\":"), 2);
    call_free(call);
    client_advance(fixture, &other, 2);
    client_check(fixture, &other);
    client_check(fixture, &client);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        CASE(one_launch),
        CASE(faults_stay_with_their_item),
        CASE(every_item_refused),
        CASE(items_that_are_no_objects),
        CASE(lists_that_are_none),
        CASE(the_client_leaves),
        cmocka_unit_test_setup_teardown(kept_answers_are_bounded, fixture_setup_wide,
                                        fixture_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
