/*
 * test_sched_sizes.c - how large bodies are with the ids of a large vocabulary, and how much memory
 * the rows take that sessions keep to be fetched.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

#define BODY          8192
#define VOCAB         163840
#define REQUEST_BYTES 1024
#define ANSWER_BYTES  1536

/* As the fixture, with six digits to most ids. */
static int setup(void **state)
{
    struct tv_fixed_engine_params params = {
        .vocab = VOCAB, .max_len = 32768, .nodes_max = 64, .requests_max = 4, .prefill_rows = 1024};
    int rc = fixture_setup(state);
    struct fixture *fixture = *state;
    fixture_stop(fixture);
    fixture->config.max_depth = 64;
    fixture->config.fetch_bytes = 8 << 20;
    assert_int_equal(tv_fixed_engine_create(&params, &fixture->engine), 0);
    assert_int_equal(
        tv_sched_create(&fixture->config, fixture->engine, NULL, &fixture->stats, &fixture->sched),
        0);
    return rc;
}

/* A tree of 64 nodes: `depth` right ones under the pending token, and wrong ones beside them; all
 * ids have six digits. */
static void body_write(struct fixture *fixture, const struct client *client, int32_t depth,
                       char *ret_body, size_t bytes)
{
    FILE *text = fmemopen(ret_body, bytes, "w");
    int32_t parents[64] = {-1}, right[65] = {0}, count = 1;
    assert_non_null(text);
    (void)fprintf(text, "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"expected_digest\":\"",
                  client->seq, client->epoch, client->len);
    for (int i = 0; i < 16; i++) {
        (void)fprintf(text, "%02x", client->digest.bytes[i]);
    }
    (void)fprintf(text, "\",\"tree\":{\"tokens\":[%d", client->pending);
    for (int32_t d = 1; d <= depth; d++) { /* the right one first, then its siblings */
        int32_t share = (63 - (d - 1)) / depth > 0 ? (64 - count) / (depth - d + 1) : 1;
        for (int32_t k = 0; k < share; k++) {
            int32_t token = tv_fixed_engine_token(fixture->engine, client->len + d);
            right[d] = k == 0 ? count : right[d];
            parents[count++] = right[d - 1];
            (void)fprintf(text, ",%d", k == 0 ? token : 100000 + k);
        }
    }
    assert_int_equal(count, 64);
    (void)fprintf(text, "],\"parents\":[-1");
    for (int32_t i = 1; i < count; i++) {
        (void)fprintf(text, ",%d", parents[i]);
    }
    (void)fprintf(text, "]}}");
    assert_int_equal(fclose(text), 0);
}

/* As client_advance, without the tokens, for which a client has no room. */
static void advance(struct fixture *fixture, struct client *client, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        tv_digest_push(&client->digest, client->pending);
        client->pending = tv_fixed_engine_token(fixture->engine, ++client->len);
    }
    client->seq++;
}

/* To where drawn ids have six digits and lengths five. */
static void go_far(struct fixture *fixture, struct client *client)
{
    while (client->pending < 100000) {
        expect(fixture, 200, TV_CALL_DECODE, client->id,
               "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1000}", client->seq,
               client->epoch, client->len);
        advance(fixture, client, 1000);
    }
}

/* A request of 64 nodes and the answer to it, every node of the deepest path accepted: at every
 * depth to 24, which is more than drafts get, and at 63 with what that takes. */
static void bodies_are_small(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[4096];
    client_open(fixture, &client, 100, "");
    go_far(fixture, &client);
    for (int32_t depth = 1; depth <= 24; depth++) {
        memset(body, 0, sizeof body);
        body_write(fixture, &client, depth, body, sizeof body);
        struct tv_call *call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        assert_reply(call, 200);
        assert_int_equal(reply_int(call, "stats/nodes"), 64);
        assert_int_equal(reply_int(call, "stats/accepted"), depth);
        assert_true(strlen(body) <= REQUEST_BYTES);
        assert_true(call->reply.body.bytes <= ANSWER_BYTES);
        if (depth == 8 || depth == 24) {
            print_message("64 nodes, %d accepted: request %zu bytes, answer %zu\n", depth,
                          strlen(body), call->reply.body.bytes);
        }
        call_free(call);
        advance(fixture, &client, depth + 1);
    }
    memset(body, 0, sizeof body);
    body_write(fixture, &client, 63, body, sizeof body);
    struct tv_call *call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
    assert_reply(call, 200);
    print_message("64 nodes, 63 accepted: request %zu bytes, answer %zu\n", strlen(body),
                  call->reply.body.bytes);
    assert_true(strlen(body) <= REQUEST_BYTES);
    assert_true(call->reply.body.bytes <= 2 * ANSWER_BYTES);
    call_free(call);
}

static struct tv_call *fetching(struct fixture *fixture, struct client *client, int32_t nodes,
                                const char *rows)
{
    char body[2048];
    (void)client_chain(fixture, client, nodes, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    return ask(fixture, TV_CALL_VERIFY, client->id,
               "%s,\"want\":{\"logits\":{\"rows\":\"%s\",\"via\":\"fetch\"}}}", body, rows);
}

/* What alone is more than all may be is refused by the decoder. */
static void fetching_refused(struct fixture *fixture, const struct client *client, int32_t nodes)
{
    char body[2048];
    struct tv_request request;
    struct tv_problem problem = {0};
    (void)client_chain(fixture, client, nodes, body, 1024);
    (void)snprintf(body + strlen(body) - 1, 1024,
                   ",\"want\":{\"logits\":{\"rows\":\"all\",\"via\":\"fetch\"}}}");
    assert_int_equal(tv_request_decode(TV_CALL_VERIFY, body, strlen(body),
                                       tv_sched_limits(fixture->sched), &request, &problem),
                     -EINVAL);
    assert_int_equal(problem.code, TV_WRONG_VALUE);
    assert_string_equal(problem.pointer, "/want");
}

static void fetch_expect(struct fixture *fixture, const struct client *client, int status)
{
    struct tv_call *call = call_make(fixture, TV_CALL_TENSOR, client->id, NULL);
    call->request.seq = 1;
    call_start(fixture, call);
    assert_reply(call_wait(call), status);
    call_free(call);
}

static size_t fetch_bytes(struct fixture *fixture)
{
    tv_sched_lock(fixture->sched);
    size_t bytes = tv_sessions_fetch_bytes(&fixture->sched->table);
    tv_sched_unlock(fixture->sched);
    return bytes;
}

/* Rows to fetch of all sessions are within fetch_bytes: the oldest go, each answers 410 then. */
static void rows_to_fetch_are_bounded(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[5];
    const size_t row = VOCAB * sizeof(float), max = 8 << 20; /* 12 rows and a bit */
    for (int i = 0; i < 5; i++) {
        client_open(fixture, &clients[i], 5, "");
    }
    fetching_refused(fixture, &clients[0], 13);
    struct tv_call *call;
    for (int i = 0; i < 5; i++) {
        call = fetching(fixture, &clients[i], 4, "all");
        assert_reply(call, 200);
        call_free(call);
        assert_int_equal(fetch_bytes(fixture), (size_t)(i < 3 ? i + 1 : 3) * 4 * row);
        assert_true(fetch_bytes(fixture) <= max);
    }
    for (int i = 0; i < 5; i++) {
        fetch_expect(fixture, &clients[i], i < 2 ? 410 : 200);
        client_advance(fixture, &clients[i], 4);
    }
    call = fetching(fixture, &clients[0], 12, "all"); /* all there is room for */
    assert_reply(call, 200);
    call_free(call);
    assert_int_equal(fetch_bytes(fixture), 12 * row);
    fetch_expect(fixture, &clients[4], 410);
    client_advance(fixture, &clients[0], 12);
    expect(fixture, 200, TV_CALL_DECODE, clients[0].id,
           "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":1}", clients[0].seq,
           clients[0].epoch, clients[0].len);
    assert_int_equal(fetch_bytes(fixture), 0); /* with the next round they go in any case */
}

/* The items of a batch share the limit of one call. */
static void a_batch_has_one_limit(void **state)
{
    struct fixture *fixture = *state;
    struct client clients[3];
    char items[BODY] = "";
    for (int i = 0; i < 3; i++) {
        client_open(fixture, &clients[i], 5, "");
        char body[1024];
        size_t at = strlen(items);
        (void)client_chain(fixture, &clients[i], i < 2 ? 6 : 1, body, sizeof body);
        body[strlen(body) - 1] = '\0';
        int used = snprintf(items + at, sizeof items - at,
                            "%s{\"session\":\"%s\",%s,\"want\":{\"logits\":{\"rows\":\"all\","
                            "\"via\":\"fetch\"}}}",
                            i > 0 ? "," : "", clients[i].id, body + 1);
        assert_true(used > 0 && (size_t)used < sizeof items - at);
    }
    struct tv_call *call = ask(fixture, TV_CALL_BATCH, "", "{\"items\":[%s]}", items);
    assert_reply(call, 200);
    assert_true(reply_mentions(call, "rows to fetch of up to"));
    assert_true(reply_mentions(call, "\"pointer\":\"/items/2/want\""));
    call_free(call);
    fetch_expect(fixture, &clients[0], 200);
    fetch_expect(fixture, &clients[1], 200);
    fetch_expect(fixture, &clients[2], 404);
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        CASE(bodies_are_small),
        CASE(rows_to_fetch_are_bounded),
        CASE(a_batch_has_one_limit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
