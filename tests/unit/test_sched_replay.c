/*
 * test_sched_replay.c - the window of answers that a session keeps: how many, how large, what an
 * ack drops, and that each is replayed byte for byte.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define ROUNDS 12

/* A round as it was asked for and answered. */
struct done_round {
    enum tv_call_kind kind;
    char body[2048];
    char *answer; /* owned by the call */
    size_t answer_bytes;
    struct tv_call *call;
};

static void run_round(struct fixture *fixture, struct client *client, struct done_round *round,
                      enum tv_call_kind kind, const char *options)
{
    if (kind == TV_CALL_VERIFY) {
        client_chain(fixture, client, 2, round->body, sizeof round->body);
        round->body[strlen(round->body) - 1] = '\0';
        (void)strncat(round->body, options, sizeof round->body - strlen(round->body) - 2);
        (void)strcat(round->body, "}");
    } else {
        (void)snprintf(round->body, sizeof round->body,
                       "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":2%s}",
                       client->seq, client->epoch, client->len, options);
    }
    round->kind = kind;
    round->call = ask(fixture, kind, client->id, "%s", round->body);
    assert_reply(round->call, 200);
    round->answer = round->call->reply.body.data;
    round->answer_bytes = round->call->reply.body.bytes;
    client_advance(fixture, client, 2);
}

/* The call's answer is the round's with "replayed":true in place of its last member. */
static void assert_replay(const struct tv_call *call, const struct done_round *round)
{
    size_t same = round->answer_bytes - strlen("false}");
    assert_reply(call, 200);
    assert_int_equal(call->reply.body.bytes, same + strlen("true}"));
    assert_memory_equal(call->reply.body.data, round->answer, same);
    assert_memory_equal(call->reply.body.data + same, "true}", strlen("true}"));
}

static struct tv_call *get_round(struct fixture *fixture, const struct client *client, int32_t seq,
                                 int32_t wait_ms)
{
    struct tv_call *call = call_make(fixture, TV_CALL_ROUND, client->id, NULL);
    call->request.seq = seq;
    call->request.wait_ms = wait_ms;
    call_start(fixture, call);
    return call_wait(call);
}

/* Both ways to a kept answer; `first` is the seq of the oldest one. */
static void check_window(struct fixture *fixture, const struct client *client,
                         const struct done_round *rounds, int32_t first)
{
    int64_t launches = tv_fixed_engine_launches(fixture->engine);
    for (int32_t seq = 1; seq < client->seq; seq++) {
        const struct done_round *round = &rounds[seq - 1];
        struct tv_call *again = ask(fixture, round->kind, client->id, "%s", round->body);
        struct tv_call *got = get_round(fixture, client, seq, seq % 2 * 1000);
        if (seq >= first) {
            assert_replay(again, round);
            assert_replay(got, round);
        } else {
            assert_refused(again, 410, "round-evicted");
            assert_refused(got, 410, "round-evicted");
            assert_int_equal(reply_int(again, "session_state/committed_len"), client->len);
            assert_int_equal(reply_int(again, "session_state/next_seq"), client->seq);
            assert_true(reply_has(again, "session_state/tail"));
        }
        call_free(again);
        call_free(got);
    }
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), launches);
    client_check(fixture, client);
}

static void free_rounds(struct done_round *rounds, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        call_free(rounds[i].call);
    }
}

static void b52_eight_rounds_are_replayed_byte_for_byte(void **state)
{
    struct fixture *fixture = *state;
    struct done_round rounds[ROUNDS];
    struct client client;
    client_open(fixture, &client, 5, "");
    for (int32_t i = 0; i < ROUNDS; i++) {
        run_round(fixture, &client, &rounds[i], i % 3 == 2 ? TV_CALL_DECODE : TV_CALL_VERIFY, "");
        check_window(fixture, &client, rounds,
                     client.seq - TV_REPLAY_ROUNDS_MAX > 1 ? client.seq - TV_REPLAY_ROUNDS_MAX : 1);
    }
    /* another body under a kept number, and another kind */
    struct tv_call *call = ask(fixture, TV_CALL_DECODE, client.id,
                               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":2}",
                               client.seq - 5, client.epoch, client.len);
    assert_refused(call, 422, "seq-reused");
    call_free(call);
    /* the tail of the evicted begins where the client is */
    int32_t tail[64];
    call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", rounds[1].body);
    assert_refused(call, 410, "round-evicted");
    assert_int_equal(reply_int(call, "session_state/tail_from"), 7);
    assert_int_equal(reply_ints(call, "session_state/tail", tail, 64), client.len - 7);
    assert_memory_equal(tail, client.tokens + 7, (size_t)(client.len - 7) * sizeof tail[0]);
    call_free(call);
    free_rounds(rounds, ROUNDS);
}

static void an_ack_drops_all_but_the_last(void **state)
{
    struct fixture *fixture = *state;
    struct done_round rounds[ROUNDS];
    struct client client;
    client_open(fixture, &client, 5, "");
    for (int32_t i = 0; i < 5; i++) {
        run_round(fixture, &client, &rounds[i], TV_CALL_VERIFY, "");
    }
    run_round(fixture, &client, &rounds[5], TV_CALL_DECODE, ",\"ack\":3");
    check_window(fixture, &client, rounds, 4);
    /* a refused call acknowledges nothing */
    expect(fixture, 409, TV_CALL_DECODE, client.id,
           "{\"seq\":7,\"epoch\":\"%s\",\"expected_len\":1,\"max_tokens\":1,\"ack\":6}",
           client.epoch);
    check_window(fixture, &client, rounds, 4);
    /* of the future as well: the newest stays until the next one is there */
    tv_fixed_engine_fail(fixture->engine, TV_NUMERIC_FAULT, 1);
    expect(fixture, 500, TV_CALL_DECODE, client.id,
           "{\"seq\":7,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1,\"ack\":2147483647}",
           client.epoch, client.len);
    check_window(fixture, &client, rounds, 6);
    run_round(fixture, &client, &rounds[6], TV_CALL_VERIFY, ",\"ack\":1");
    check_window(fixture, &client, rounds, 6);
    free_rounds(rounds, 7);
}

/* The right token and wrong ones below the root, with the logits of all. */
static void star(struct fixture *fixture, const struct client *client, int32_t count, char *body,
                 size_t bytes)
{
    int32_t right = tv_fixed_engine_token(fixture->engine, client->len + 1);
    int at = snprintf(body, bytes,
                      "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"want\":{\"logits\":{"
                      "\"rows\":\"all\"}},\"tree\":{\"tokens\":[%d",
                      client->seq, client->epoch, client->len, client->pending);
    for (int32_t i = 1; i < count; i++) {
        at += snprintf(body + at, bytes - (size_t)at, ",%d", (right + i - 1) % 307);
    }
    at += snprintf(body + at, bytes - (size_t)at, "],\"parents\":[-1");
    for (int32_t i = 1; i < count; i++) {
        at += snprintf(body + at, bytes - (size_t)at, ",0");
    }
    (void)snprintf(body + at, bytes - (size_t)at, "]}}");
}

/* Inline rows count; what is over the sum of bytes is kept alone until the next round. */
static void the_window_is_bounded_in_bytes(void **state)
{
    static const char two_rows[] = ",\"want\":{\"logits\":{\"rows\":\"all\"}}"; /* about 3.3 KB */
    struct fixture *fixture = *state;
    struct done_round rounds[3], large;
    struct client client;
    client_open(fixture, &client, 5, "");
    for (int32_t i = 0; i < 3; i++) {
        run_round(fixture, &client, &rounds[i], TV_CALL_VERIFY, two_rows);
    }
    check_window(fixture, &client, rounds, 1);
    star(fixture, &client, 60, large.body, sizeof large.body); /* about 98 KB */
    large.call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", large.body);
    assert_reply(large.call, 200);
    large.answer = large.call->reply.body.data;
    large.answer_bytes = large.call->reply.body.bytes;
    assert_true(large.answer_bytes > TV_REPLAY_BYTES_MAX);
    client_advance(fixture, &client, 2);
    struct tv_call *call = get_round(fixture, &client, 4, 0);
    assert_replay(call, &large);
    call_free(call);
    call = get_round(fixture, &client, 3, 0);
    assert_refused(call, 410, "round-evicted");
    call_free(call);
    struct done_round next;
    run_round(fixture, &client, &next, TV_CALL_VERIFY, "");
    call = get_round(fixture, &client, 4, 0);
    assert_refused(call, 410, "round-evicted");
    call_free(call);
    call = get_round(fixture, &client, 5, 0);
    assert_replay(call, &next);
    call_free(call);
    call_free(next.call);
    call_free(large.call);
    free_rounds(rounds, 3);
}

static void limits_name_the_window(void **state)
{
    struct fixture *fixture = *state;
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    assert_int_equal(reply_int(call, "limits/replay_window"), 8);
    call_free(call);
    call = ask(fixture, TV_CALL_MODEL, "", NULL);
    assert_int_equal(reply_int(call, "limits/replay_window"), 8);
    call_free(call);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(b52_eight_rounds_are_replayed_byte_for_byte),
        CASE(an_ack_drops_all_but_the_last),
        CASE(the_window_is_bounded_in_bytes),
        CASE(limits_name_the_window),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
