/*
 * test_sched.c - rounds of a session through the scheduler: what commits, what is refused, what a
 * retry gets. One session at a time; queues, oracles and probes are in the other files.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "test_sched_fixture.h"

static void create_state_list_delete(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    client_open(fixture, &client, 40, ",\"sampling\":{\"seed\":\"7\"}");
    client_check(fixture, &client);
    struct tv_call *call = ask(fixture, TV_CALL_LIST, "", NULL);
    assert_reply(call, 200);
    assert_true(reply_mentions(call, client.id));
    call_free(call);
    expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
    expect(fixture, 204, TV_CALL_DELETE, client.id, NULL);
    call = ask(fixture, TV_CALL_STATE, client.id, NULL);
    assert_refused(call, 404, "session-not-found");
    call_free(call);
}

static void create_returns_a_drawn_seed(void **state)
{
    struct fixture *fixture = *state;
    char first[32], second[32];
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    reply_text(call, "sampling/seed", first, sizeof first);
    call_free(call);
    call = ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1]}");
    reply_text(call, "sampling/seed", second, sizeof second);
    call_free(call);
    assert_string_not_equal(first, second);
}

static void create_checks_the_prompts_digest(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char digest[33];
    client_open(fixture, &client, 2, "");
    for (int i = 0; i < 16; i++) {
        (void)snprintf(digest + 2 * i, 3, "%02x", client.digest.bytes[i]);
    }
    expect(fixture, 201, TV_CALL_CREATE, "", "{\"tokens\":[1,2],\"expected_digest\":\"%s\"}",
           digest);
    struct tv_call *call =
        ask(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1,3],\"expected_digest\":\"%s\"}", digest);
    assert_refused(call, 409, "digest-mismatch");
    call_free(call);
    call = ask(fixture, TV_CALL_CREATE, "", /* the digest comes before the room */
               "{\"tokens\":[1,3],\"expected_digest\":\"%s\",\"stop\":{\"max_len\":2}}", digest);
    assert_refused(call, 409, "digest-mismatch");
    call_free(call);
}

static void verify_commits_the_accepted_path(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    int32_t items[8];
    client_open(fixture, &client, 15, "");
    /* node 1 is wrong, node 2 right, node 3 right after it, node 4 wrong after that */
    struct tv_call *call =
        ask(fixture, TV_CALL_VERIFY, client.id,
            "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":15,\"tree\":{\"tokens\":[%d,0,%d,%d,0],"
            "\"parents\":[-1,0,0,2,3]},\"want\":{\"logprobs\":true}}",
            client.epoch, client.pending, tv_fixed_engine_token(fixture->engine, 16),
            tv_fixed_engine_token(fixture->engine, 17));
    assert_reply(call, 200);
    assert_int_equal(reply_ints(call, "accepted/nodes", items, 8), 3);
    assert_int_equal(items[0], 0);
    assert_int_equal(items[1], 2);
    assert_int_equal(items[2], 3);
    assert_int_equal(reply_ints(call, "new_tokens", items, 8), 3);
    assert_int_equal(items[2], tv_fixed_engine_token(fixture->engine, 18));
    assert_int_equal(reply_int(call, "committed_len"), 18);
    assert_int_equal(reply_int(call, "next_seq"), 2);
    assert_int_equal(reply_int(call, "stats/nodes"), 5);
    assert_int_equal(reply_int(call, "stats/accepted"), 2);
    assert_int_equal(reply_int(call, "stats/accept_len_mean"), 3);
    assert_int_equal(reply_int(call, "timing_us/batch"), 1);
    assert_true(reply_has(call, "logprobs"));
    assert_int_equal(reply_flag(call, "replayed"), 0);
    call_free(call);
    client_advance(fixture, &client, 3);
    client_check(fixture, &client);
}

static void b52_retry_gets_the_stored_answer(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 5, "");
    client_chain(fixture, &client, 4, body, sizeof body);
    struct tv_call *first = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
    struct tv_call *second = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
    assert_reply(second, 200);
    assert_int_equal(reply_flag(second, "replayed"), 1);
    size_t same = first->reply.body.bytes - strlen("false}");
    assert_int_equal(second->reply.body.bytes, same + strlen("true}"));
    assert_memory_equal(first->reply.body.data, second->reply.body.data, same);
    assert_int_equal(tv_fixed_engine_launches(fixture->engine), 1);
    call_free(first);
    call_free(second);
    /* fields that do not belong to the round's hash may differ */
    body[strlen(body) - 1] = '\0';
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s,\"deadline_ms\":5,\"lease_s\":7}", body);
    struct tv_call *other =
        ask(fixture, TV_CALL_VERIFY, client.id, "%s,\"want\":{\"logprobs\":true}}", body);
    assert_refused(other, 422, "seq-reused");
    call_free(other);
    client_advance(fixture, &client, 4);
    client_check(fixture, &client);
}

static void gap_and_evicted_bring_the_tail(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    int32_t tail[16];
    client_open(fixture, &client, 5, "");
    for (int round = 0; round < 2; round++) {
        client_chain(fixture, &client, 2, body, sizeof body);
        expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
        client_advance(fixture, &client, 2);
    }
    struct tv_call *call =
        ask(fixture, TV_CALL_DECODE, client.id,
            "{\"seq\":4,\"epoch\":\"%s\",\"expected_len\":7,\"max_tokens\":1}", client.epoch);
    assert_refused(call, 409, "seq-gap");
    assert_int_equal(reply_int(call, "session_state/committed_len"), 9);
    assert_int_equal(reply_int(call, "session_state/tail_from"), 7);
    assert_int_equal(reply_ints(call, "session_state/tail", tail, 16), 2);
    assert_memory_equal(tail, client.tokens + 7, 2 * sizeof tail[0]);
    call_free(call);
    for (int round = 0; round < TV_REPLAY_ROUNDS_MAX; round++) {
        client_chain(fixture, &client, 1, body, sizeof body);
        expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", body);
        client_advance(fixture, &client, 1);
    }
    call = ask(fixture, TV_CALL_DECODE, client.id,
               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":5,\"max_tokens\":1}", client.epoch);
    assert_refused(call, 410, "round-evicted");
    assert_int_equal(reply_ints(call, "session_state/tail", tail, 16), 12);
    call_free(call);
    client_check(fixture, &client);
}

/* A request that is wrong in everything, and then right one by one, in the contract's order. */
static void checks_come_in_the_contracts_order(void **state)
{
    static const char *const codes[] = {"epoch-changed",    "session-not-found", "seq-gap",
                                        "session-finished", "length-mismatch",   "digest-mismatch",
                                        "pending-mismatch", "context-full",      "overloaded"};
    struct fixture *fixture = *state;
    struct client live, finished;
    char digest[33];
    client_open(fixture, &live, 480, "");
    client_open(fixture, &finished, 20, ",\"stop\":{\"max_len\":21}");
    for (int i = 0; i < 16; i++) {
        (void)snprintf(digest + 2 * i, 3, "%02x", live.digest.bytes[i]);
    }
    fixture->config.queue_max = 0;
    for (int right = 0; right < 9; right++) {
        const char *session = right > 3 ? live.id : right > 1 ? finished.id : "s_none";
        char tree[512], parents[512];
        int depth = right > 7 ? 31 : 32;
        int at = snprintf(tree, sizeof tree, "%d", right > 6 ? live.pending : 0);
        int par = snprintf(parents, sizeof parents, "-1");
        for (int i = 0; i < depth; i++) {
            at += snprintf(tree + at, sizeof tree - (size_t)at, ",%d", i);
            par += snprintf(parents + par, sizeof parents - (size_t)par, ",%d", i);
        }
        struct tv_call *call =
            ask(fixture, TV_CALL_VERIFY, session,
                "{\"seq\":%d,\"epoch\":\"%s\",\"expected_len\":%d,\"expected_digest\":\"%s\","
                "\"tree\":{\"tokens\":[%s],\"parents\":[%s]}}",
                right > 2 ? 1 : 9, right > 0 ? live.epoch : "0000000000000000", right > 4 ? 480 : 1,
                right > 5 ? digest : "00000000000000000000000000000000", tree, parents);
        char code[64];
        reply_text(call, "code", code, sizeof code);
        assert_string_equal(code, codes[right]);
        assert_int_equal(reply_has(call, "session_state"), right >= 2 && right <= 6);
        call_free(call);
    }
    fixture->config.queue_max = 8;
    client_check(fixture, &live);
}

/* 6 accepted drafts; a stop token at place 3 of the new ones, a budget of 3, both, a pending stop.
 */
static void b13_stop_and_length_inside_the_path(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        int stop_at, budget, drafts;
        const char *finish;
        int32_t news;
    } cases[] = {
        {3, 0, 6, "stop", 3}, {0, 3, 6, "length", 3}, {3, 3, 6, "stop", 3}, {7, 0, 6, "stop", 7}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct client client;
        char options[128], body[2048], text[16];
        int32_t items[16];
        /* new token number n is drawn for position 10 + n */
        (void)snprintf(
            options, sizeof options, ",\"stop\":{\"token_ids\":[%d],\"max_len\":%d}",
            tv_fixed_engine_token(fixture->engine, cases[i].stop_at ? 10 + cases[i].stop_at : 300),
            cases[i].budget ? 10 + cases[i].budget + 1 : 512);
        client_open(fixture, &client, 10, options);
        client_chain(fixture, &client, cases[i].drafts + 1, body, sizeof body);
        struct tv_call *call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        assert_reply(call, 200);
        reply_text(call, "finish", text, sizeof text);
        assert_string_equal(text, cases[i].finish);
        reply_text(call, "status", text, sizeof text);
        assert_string_equal(text, "finished");
        assert_int_equal(reply_ints(call, "new_tokens", items, 16), cases[i].news);
        assert_int_equal(reply_int(call, "committed_len"), 10 + cases[i].news);
        call_free(call);
        client_advance(fixture, &client, cases[i].news);
        client_check(fixture, &client);
        client_chain(fixture, &client, 1, body, sizeof body);
        call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        assert_refused(call, 409, "session-finished");
        call_free(call);
    }
}

static void extend_reopens_a_stopped_session(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char options[64], body[512];
    (void)snprintf(options, sizeof options, ",\"stop\":{\"token_ids\":[%d]}",
                   tv_fixed_engine_token(fixture->engine, 4));
    client_open(fixture, &client, 4, options);
    client_chain(fixture, &client, 1, body, sizeof body);
    struct tv_call *call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
    assert_refused(call, 409, "session-finished");
    call_free(call);
    expect(fixture, 200, TV_CALL_EXTEND, client.id,
           "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":4,\"tokens\":[9]}", client.epoch);
    expect(fixture, 200, TV_CALL_DECODE, client.id,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":5,\"max_tokens\":2}", client.epoch);
}

static void b15_positions_end_with_the_model(void **state)
{
    static const int depths[] = {5, 6, 31, 4};
    struct fixture *fixture = *state;
    struct client client;
    char body[2048];
    client_open(fixture, &client, 507, "");
    for (size_t i = 0; i < sizeof depths / sizeof depths[0]; i++) {
        client_chain(fixture, &client, depths[i] + 1, body, sizeof body);
        struct tv_call *call = ask(fixture, TV_CALL_VERIFY, client.id, "%s", body);
        if (depths[i] > 4) {
            assert_refused(call, 422, "context-full");
            assert_int_equal(reply_int(call, "node"), 5);
        } else {
            assert_reply(call, 200);
            assert_int_equal(reply_int(call, "committed_len"), 511);
        }
        call_free(call);
    }
    struct tv_call *call =
        call_make(fixture, TV_CALL_CREATE, "", "{\"tokens\":[1],\"stop\":{\"max_len\":1}}");
    call_start(fixture, call);
    assert_refused(call_wait(call), 422, "context-full");
    call_free(call);
}

static void extend_drops_or_keeps_the_pending_token(void **state)
{
    struct fixture *fixture = *state;
    for (int keep = 0; keep < 2; keep++) {
        struct client client;
        int32_t added[] = {11, 12, 13};
        client_open(fixture, &client, 14, "");
        struct tv_call *call =
            ask(fixture, TV_CALL_EXTEND, client.id,
                "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":14,\"tokens\":[11,12,13]%s}",
                client.epoch, keep ? ",\"keep_pending\":true" : "");
        assert_reply(call, 200);
        if (keep) {
            client.tokens[client.len++] = client.pending;
            tv_digest_push(&client.digest, client.pending);
        }
        for (int i = 0; i < 3; i++) {
            client.tokens[client.len++] = added[i];
            tv_digest_push(&client.digest, added[i]);
        }
        client.pending = tv_fixed_engine_token(fixture->engine, client.len);
        client.seq = 2;
        assert_int_equal(reply_int(call, "pending"), client.pending);
        call_free(call);
        client_check(fixture, &client);
    }
}

static void decode_equals_one_node_rounds(void **state)
{
    struct fixture *fixture = *state;
    struct client one, many;
    char body[512];
    int32_t items[64];
    client_open(fixture, &one, 12, "");
    client_open(fixture, &many, 12, "");
    for (int i = 0; i < 20; i++) {
        client_chain(fixture, &one, 1, body, sizeof body);
        expect(fixture, 200, TV_CALL_VERIFY, one.id, "%s", body);
        client_advance(fixture, &one, 1);
    }
    struct tv_call *call =
        ask(fixture, TV_CALL_DECODE, many.id,
            "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":12,\"max_tokens\":20}", many.epoch);
    assert_reply(call, 200);
    assert_int_equal(reply_ints(call, "new_tokens", items, 64), 20);
    assert_memory_equal(items, one.tokens + 13, 19 * sizeof items[0]);
    assert_int_equal(items[19], one.pending);
    assert_false(reply_has(call, "accepted"));
    call_free(call);
    one.seq = 2;
    memcpy(one.id, many.id, sizeof one.id);
    client_check(fixture, &one);
}

static void decode_ends_at_the_limit(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    char text[16];
    client_open(fixture, &client, 10, ",\"stop\":{\"max_len\":14}");
    struct tv_call *call = ask(fixture, TV_CALL_DECODE, client.id,
                               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":10,"
                               "\"max_tokens\":100}",
                               client.epoch);
    assert_reply(call, 200);
    assert_int_equal(reply_int(call, "committed_len"), 13);
    reply_text(call, "finish", text, sizeof text);
    assert_string_equal(text, "length");
    call_free(call);
    client_advance(fixture, &client, 3);
    client.seq = 2;
    client_check(fixture, &client);
}

static void faults_change_nothing(void **state)
{
    static const struct {
        enum tv_code code;
        int status;
        const char *name;
    } faults[] = {{TV_KV_FULL, 503, "kv-full"},
                  {TV_NUMERIC_FAULT, 500, "numeric-fault"},
                  {TV_KERNEL_FAULT, 500, "kernel-fault"}};
    struct fixture *fixture = *state;
    struct client client;
    char chain[2048], decode[256], extend[256];
    client_open(fixture, &client, 10, "");
    client_chain(fixture, &client, 3, chain, sizeof chain);
    (void)snprintf(decode, sizeof decode,
                   "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":10,\"max_tokens\":8}",
                   client.epoch);
    (void)snprintf(extend, sizeof extend,
                   "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":10,\"tokens\":[4,5,6]}",
                   client.epoch);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        const struct {
            enum tv_call_kind kind;
            const char *session, *body;
        } calls[] = {{TV_CALL_VERIFY, client.id, chain},
                     {TV_CALL_DECODE, client.id, decode},
                     {TV_CALL_EXTEND, client.id, extend},
                     {TV_CALL_CREATE, "", "{\"tokens\":[1,2,3]}"}};
        for (size_t k = 0; k < sizeof calls / sizeof calls[0]; k++) {
            tv_fixed_engine_fail(fixture->engine, faults[i].code, 1);
            struct tv_call *call =
                ask(fixture, calls[k].kind, calls[k].session, "%s", calls[k].body);
            assert_refused(call, faults[i].status, faults[i].name);
            if (faults[i].code == TV_KV_FULL) {
                assert_int_equal(reply_int(call, "pages_needed"), 2);
                assert_int_equal(reply_int(call, "pages_free"), 1);
                assert_true(call->reply.retry_after_s > 0);
            }
            call_free(call);
            client_check(fixture, &client);
            assert_int_equal(fixture->sched->table.count, 1);
        }
    }
    expect(fixture, 200, TV_CALL_VERIFY, client.id, "%s", chain);
}

/* An engine whose n-th prefill or verify from now on fails. */
static const struct tv_engine_ops *real_ops;
static int steps_left;

static int late_prefill(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                        int32_t count, const struct tv_round_rule *rule, struct tv_drawn *ret_drawn,
                        struct tv_cache_shortage *ret_shortage)
{
    if (--steps_left == 0) {
        return -EDOM;
    }
    return real_ops->prefill(engine, context, tokens, count, rule, ret_drawn, ret_shortage);
}

static int late_verify(struct tv_engine *engine, const struct tv_round_in *in, int32_t count,
                       struct tv_round_out *out)
{
    if (--steps_left == 0) {
        return -EIO;
    }
    return real_ops->verify(engine, in, count, out);
}

/* The second slice of an extend, the fifth step of a decode: the first ones' rows go too. */
static void later_steps_roll_the_first_ones_back(void **state)
{
    struct fixture *fixture = *state;
    struct client client;
    struct tv_engine_ops late = *fixture->engine->ops;
    client_open(fixture, &client, 10, "");
    real_ops = fixture->engine->ops;
    late.prefill = late_prefill;
    late.verify = late_verify;
    tv_sched_lock(fixture->sched); /* the worker is idle */
    fixture->engine->ops = &late;
    tv_sched_unlock(fixture->sched);
    steps_left = 2;
    struct tv_call *call =
        ask(fixture, TV_CALL_EXTEND, client.id,
            "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":10,\"tokens\":[1,2,3,4,5,6,7,8,"
            "9,10,11,12,13,14,15,16,17,18,19,20]}",
            client.epoch);
    assert_refused(call, 500, "numeric-fault");
    call_free(call);
    client_check(fixture, &client);
    steps_left = 5;
    call = ask(fixture, TV_CALL_DECODE, client.id,
               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":10,\"max_tokens\":9}", client.epoch);
    assert_refused(call, 500, "kernel-fault");
    call_free(call);
    client_check(fixture, &client);
    steps_left = 2;
    call = ask(fixture, TV_CALL_CREATE, "",
               "{\"tokens\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20]}");
    assert_refused(call, 500, "numeric-fault");
    call_free(call);
    tv_sched_lock(fixture->sched);
    fixture->engine->ops = real_ops;
    tv_sched_unlock(fixture->sched);
    client_check(fixture, &client);
}

/* The engine's margins are a gap of 10 between scores, which are logits over the temperature. */
static void a_near_tie_is_a_gap_of_logits(void **state)
{
    static const struct {
        const char *sampling;
        int below_8, below_12;
    } cases[] = {
        {"\"temperature\":0.5", 1, 1},
        {"\"temperature\":1", 0, 1},
        {"\"temperature\":2", 0, 0},
        {"\"temperature\":0", 0, 1}, /* no draw: the scores are the logits */
        {"\"temperature\":0.5,\"rule\":\"greedy\"", 0, 1},
        {"\"temperature\":2,\"rule\":\"greedy\"", 0, 1},
    };
    struct fixture *fixture = *state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct client client;
        char options[128];
        (void)snprintf(options, sizeof options, ",\"sampling\":{%s}", cases[i].sampling);
        client_open(fixture, &client, 20, options);
        for (int twelve = 0; twelve < 2; twelve++) {
            fixture->engine->noise = twelve ? 6.0 : 4.0; /* of one path; a tie has that of two */
            struct tv_call *call = call_chain(fixture, &client, 3);
            assert_reply(call_wait(call), 200);
            assert_int_equal(reply_int(call, "margin/min"), 10);
            assert_int_equal(reply_flag(call, "margin/near_tie"),
                             twelve ? cases[i].below_12 : cases[i].below_8);
            call_free(call);
            client_advance(fixture, &client, 3);
        }
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(create_state_list_delete),
        CASE(create_returns_a_drawn_seed),
        CASE(create_checks_the_prompts_digest),
        CASE(verify_commits_the_accepted_path),
        CASE(b52_retry_gets_the_stored_answer),
        CASE(gap_and_evicted_bring_the_tail),
        CASE(checks_come_in_the_contracts_order),
        CASE(b13_stop_and_length_inside_the_path),
        CASE(extend_reopens_a_stopped_session),
        CASE(b15_positions_end_with_the_model),
        CASE(extend_drops_or_keeps_the_pending_token),
        CASE(decode_equals_one_node_rounds),
        CASE(decode_ends_at_the_limit),
        CASE(faults_change_nothing),
        CASE(later_steps_roll_the_first_ones_back),
        CASE(a_near_tie_is_a_gap_of_logits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
