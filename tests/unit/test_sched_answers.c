/*
 * test_sched_answers.c - what a session shows and who may see it: tensors, inline rows, one-shot
 * calls, ownership, the cap on sessions, leases, an extension whose caller leaves.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "test_sched_fixture.h"

static void tensor_serves_the_last_rounds_rows(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 10, "");
    client_chain(fixture, &client, 3, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    struct tv_call *call =
        ask(fixture, TV_CALL_VERIFY, client.id,
            "%s,\"want\":{\"top_k\":2,\"logits\":{\"rows\":\"all\",\"dtype\":\"bf16\",\"via\":"
            "\"fetch\"}}}",
            body);
    assert_reply(call, 200);
    assert_true(reply_has(call, "logits/href"));
    assert_true(reply_has(call, "topk/ids_b64"));
    call_free(call);
    call = call_make(fixture, TV_CALL_TENSOR, client.id, NULL);
    call->request.seq = 1;
    call->request.has_tensor_dtype = 1;
    call->request.tensor_dtype = TV_TENSOR_F32;
    call->request.has_tensor_rows = 1;
    call->request.tensor_rows.kind = TV_ROWS_STOP;
    call_start(fixture, call);
    (void)call_wait(call);
    assert_reply(call, 200);
    assert_string_equal(call->reply.tensor_shape, "1,307");
    assert_string_equal(call->reply.tensor_dtype, "f32");
    assert_int_equal(strlen(call->reply.etag), 66);
    assert_int_equal(call->reply.body.bytes, 307 * 4);
    float row[307];
    memcpy(row, call->reply.body.data, sizeof row);
    int32_t best = 0;
    for (int32_t t = 1; t < 307; t++) {
        best = row[t] > row[best] ? t : best;
    }
    assert_int_equal(best, tv_fixed_engine_token(fixture->engine, 13));
    call_free(call);
    client_advance(fixture, &client, 3);
    client_chain(fixture, &client, 1, body, sizeof body);
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
    for (int32_t seq = 1; seq < 4; seq++) {
        call = call_make(fixture, TV_CALL_TENSOR, client.id, NULL);
        call->request.seq = seq;
        call_start(fixture, call);
        (void)call_wait(call);
        assert_refused(call, seq < 3 ? 410 : 404, seq < 3 ? "round-evicted" : "round-not-found");
        call_free(call);
    }
}

static void inline_logits_and_rules(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[2048], text[32];
    client_open(fixture, &client, 10, "");
    client_chain(fixture, &client, 2, body, sizeof body);
    body[strlen(body) - 1] = '\0';
    struct tv_call *call =
        ask(fixture, TV_CALL_VERIFY, client.id,
            "%s,\"rule\":\"greedy\",\"want\":{\"logits\":{\"rows\":[1]}}}", body);
    assert_reply(call, 200);
    reply_text(call, "rule", text, sizeof text);
    assert_string_equal(text, "greedy");
    assert_true(reply_has(call, "logits/data_b64"));
    call_free(call);
}

static void oneshot_leaves_nothing(void **state)
{
    struct fixture *fixture = *state;
    static const char *const prefixes[] = {"", "1,2,3",
                                           "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17"};
    static const int32_t lens[] = {0, 3, 17};
    for (int i = 0; i < 3; i++) {
        struct tv_call *call =
            ask(fixture, TV_CALL_ONESHOT, "",
                "{\"tokens\":[%s],\"tree\":{\"tokens\":[5,%d],\"parents\":[-1,0]},"
                "\"want\":{\"top_k\":3}}",
                prefixes[i], tv_fixed_engine_token(fixture->engine, lens[i] + 1));
        int32_t items[4];
        assert_reply(call, 200);
        assert_int_equal(reply_int(call, "committed_len"), lens[i]);
        assert_int_equal(reply_ints(call, "accepted/nodes", items, 4), 2);
        assert_int_equal(reply_int(call, "pending"),
                         tv_fixed_engine_token(fixture->engine, lens[i] + 2));
        assert_true(reply_has(call, "topk"));
        assert_true(reply_has(call, "sampling/seed"));
        call_free(call);
        assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 0);
    }
}

/* On a prefix and on a session; the session's next round finds everything as it was. */
static void scores_commit_nothing(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char text[24];
    int32_t planted = tv_fixed_engine_token(fixture->engine, 4);
    struct tv_call *call = ask(fixture, TV_CALL_SCORE, "",
                               "{\"tokens\":[1,2,3],\"tree\":{\"tokens\":[5,%d,7],"
                               "\"parents\":[-1,0,0]}}",
                               planted);
    assert_reply(call, 200);
    assert_true(reply_has(call, "logprobs"));
    assert_memory_equal(call->reply.body.data, "{\"logprobs\":[null,-", 19);
    call_free(call);
    assert_int_equal(tv_fixed_engine_contexts(fixture->engine), 0);

    client_open(fixture, &client, 10, "");
    (void)snprintf(text, sizeof text, "%d", client.pending);
    int64_t commits = tv_fixed_engine_commits(fixture->engine);
    call = ask(fixture, TV_CALL_SCORE, "",
               "{\"session\":\"%s\",\"tree\":{\"tokens\":[%s,1,2],\"parents\":[-1,0,1]}}",
               client.id, text);
    assert_reply(call, 200);
    call_free(call);
    assert_int_equal(tv_fixed_engine_commits(fixture->engine), commits);
    call = ask(fixture, TV_CALL_SCORE, "",
               "{\"session\":\"%s\",\"tree\":{\"tokens\":[%d],\"parents\":[-1]}}", client.id,
               client.pending == 0 ? 1 : 0);
    assert_refused(call, 409, "pending-mismatch");
    call_free(call);
    client_check(fixture, &client);
}

static void sessions_belong_to_their_key(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 4, "");
    struct tv_call *call = call_make(fixture, TV_CALL_STATE, client.id, NULL);
    (void)snprintf(call->principal, sizeof call->principal, "other");
    call_start(fixture, call);
    assert_refused(call_wait(call), 404, "session-not-found");
    call_free(call);
    call = call_make(fixture, TV_CALL_DELETE, client.id, NULL);
    (void)snprintf(call->principal, sizeof call->principal, "other");
    call_start(fixture, call);
    assert_reply(call_wait(call), 204);
    call_free(call);
    call = call_make(fixture, TV_CALL_LIST, "", NULL);
    (void)snprintf(call->principal, sizeof call->principal, "other");
    call_start(fixture, call);
    assert_false(reply_mentions(call_wait(call), client.id));
    call_free(call);
    client_check(fixture, &client);
}

static void too_many_sessions(void **state)
{
    struct fixture *fixture = *state;
    for (int i = 0; i < 16; i++) {
        expect(fixture, 201, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    }
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    assert_refused(call, 429, "rate-limited");
    assert_true(call->reply.retry_after_s > 0);
    call_free(call);
}

static void leases_are_renewed_and_end(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    struct tv_session *session = NULL;
    client_open(fixture, &client, 4, ",\"lease_s\":5");
    expect(fixture, 200, TV_CALL_RENEW, client.id, "{\"lease_s\":50}");
    tv_sched_lock(fixture->sched);
    assert_int_equal(tv_sessions_find(&fixture->sched->table, client.id, "", 0, &session), TV_OK);
    assert_int_equal(session->lease_s, 50);
    session->lease_expires_us = 1; /* long ago */
    tv_sched_unlock(fixture->sched);
    struct tv_call *call = ask(fixture, TV_CALL_STATE, client.id, NULL);
    assert_refused(call, 410, "session-expired");
    call_free(call);
    call = call_make(fixture, TV_CALL_STATE, client.id, NULL);
    (void)snprintf(call->principal, sizeof call->principal, "other");
    call_start(fixture, call);
    assert_refused(call_wait(call), 404, "session-not-found");
    call_free(call);
}

/* A refused look at a session does not keep it alive; an answered one does. */
static void refusals_do_not_renew_a_lease(void **state)
{
    static const struct {
        enum tv_call_kind kind;
        int32_t seq;
        int status;
    } looks[] = {{TV_CALL_ROUND, 9, 404},  {TV_CALL_TENSOR, 9, 404}, {TV_CALL_TENSOR, 1, 410},
                 {TV_CALL_DECODE, 5, 409}, {TV_CALL_ROUND, 1, 200},  {TV_CALL_STATE, 0, 200}};
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 4, ",\"lease_s\":100");
    client_chain(fixture, &client, 2, body, sizeof body);
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
    for (size_t i = 0; i < sizeof looks / sizeof looks[0]; i++) {
        struct tv_session *session = NULL;
        struct tv_call *call =
            looks[i].kind == TV_CALL_DECODE
                ? call_make(fixture, looks[i].kind, client.id,
                            "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":6,\"max_tokens\":1}",
                            looks[i].seq, client.epoch)
                : call_make(fixture, looks[i].kind, client.id, NULL);
        call->request.seq = looks[i].seq;
        tv_sched_lock(fixture->sched);
        int64_t planted_us = tv_clock_us() + 50 * INT64_C(1000000);
        assert_int_equal(
            tv_sessions_find(&fixture->sched->table, client.id, "", tv_clock_us(), &session),
            TV_OK);
        session->lease_expires_us = planted_us;
        tv_sched_unlock(fixture->sched);
        call_start(fixture, call);
        assert_reply(call_wait(call), looks[i].status);
        call_free(call);
        tv_sched_lock(fixture->sched);
        int64_t later_us = session->lease_expires_us - planted_us;
        tv_sched_unlock(fixture->sched);
        assert_true(looks[i].status < 400 ? later_us > 40 * INT64_C(1000000) : later_us == 0);
    }
}

/* The answer names the rule that was used, and nothing else is taken for one. */
static void b18_the_answer_names_its_rule(void **state)
{
    static const char *const settings[] = {"", "greedy", "target_walk", "typical"};
    static const char *const refused[] = {"\"ratio-wor\"", "\"Typical\"", "\"Client\"",
                                          "\"Greedy\"",    "\"\"",        "null"};
    struct fixture *fixture = *state;
    for (int own = 0; own < 4; own++) { /* the session's, then the round's */
        for (int round = 0; round < 4; round++) {
            struct client client;
            char body[2048], options[128] = "", text[32];
            const char *named = round > 0 ? settings[round] : settings[own];
            if (own > 0) {
                (void)snprintf(options, sizeof options, ",\"sampling\":{\"rule\":\"%s\"}",
                               settings[own]);
            }
            client_open(fixture, &client, 4, options);
            client_chain(fixture, &client, 2, body, sizeof body);
            body[strlen(body) - 1] = '\0';
            struct tv_call *call = round > 0 ? ask(fixture, TV_CALL_VERIFY, client.id,
                                                   "%s,\"rule\":\"%s\"}", body, settings[round])
                                             : ask(fixture, TV_CALL_VERIFY, client.id, "%s}", body);
            assert_reply(call, 200);
            reply_text(call, "rule", text, sizeof text);
            assert_string_equal(text, named[0] != '\0' ? named : "target_walk");
            assert_int_equal(reply_flag(call, "lossless"), strcmp(named, "typical") != 0);
            call_free(call);
            expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
        }
    }
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        struct tv_request request;
        struct tv_problem problem = {0};
        char body[128];
        (void)snprintf(body, sizeof body, "{\"tokens\":[1],\"sampling\":{\"rule\":%s}}",
                       refused[i]);
        assert_int_equal(tv_request_decode(TV_CALL_CREATE, body, strlen(body),
                                           tv_sched_limits(fixture->sched), &request, &problem),
                         -EINVAL);
        int is_text = refused[i][0] == '"';
        assert_int_equal(problem.code, is_text ? TV_WRONG_VALUE : TV_WRONG_TYPE);
        assert_string_equal(problem.pointer, "/sampling/rule");
        tv_problem_finish(&problem);
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

/* The tokens of an extension are the call's; the round goes on with those of who joined. */
static void b47_an_extension_goes_on_without_who_asked_first(void **state)
{
    struct fixture *fixture = *state;
    struct client running, queued;
    struct tv_call *calls[2];
    char body[2048];
    client_open(fixture, &running, 5, "");
    client_open(fixture, &queued, 4, "");
    tv_fixed_engine_hold(fixture->engine, 1);
    struct tv_call *first = call_make(fixture, TV_CALL_VERIFY, running.id, "%s",
                                      client_chain(fixture, &running, 1, body, sizeof body));
    call_start(fixture, first);
    tv_fixed_engine_await_held(fixture->engine);
    for (int i = 0; i < 2; i++) {
        calls[i] = call_make(fixture, TV_CALL_EXTEND, queued.id,
                             "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":4,"
                             "\"tokens\":[21,22,23,24,25,26,27,28]}",
                             queued.epoch);
        call_start(fixture, calls[i]);
    }
    tv_sched_cancel(fixture->sched, calls[0]);
    (void)call_wait(calls[0]);
    call_free(calls[0]); /* and its tokens */
    tv_fixed_engine_hold(fixture->engine, 0);
    assert_reply(call_wait(first), 200);
    call_free(first);
    assert_reply(call_wait(calls[1]), 200);
    for (int32_t token = 21; token <= 28; token++) {
        queued.tokens[queued.len++] = token;
        tv_digest_push(&queued.digest, token);
    }
    queued.pending = (int32_t)reply_int(calls[1], "pending");
    queued.seq++;
    client_check(fixture, &queued);
    call_free(calls[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(b47_an_extension_goes_on_without_who_asked_first),
        CASE(tensor_serves_the_last_rounds_rows),
        CASE(inline_logits_and_rules),
        CASE(oneshot_leaves_nothing),
        CASE(scores_commit_nothing),
        CASE(sessions_belong_to_their_key),
        CASE(too_many_sessions),
        CASE(leases_are_renewed_and_end),
        CASE(refusals_do_not_renew_a_lease),
        CASE(b18_the_answer_names_its_rule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
