/*
 * test_sched_parity.c - the scheduler on the real engine with its oracles: want.shadow, comparisons
 * on demand, and live rounds that are all judged. Nothing may differ from unjudged rounds.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched_real_fixture.h"

static void assert_clean(struct fixture *fixture, int64_t rounds_min)
{
    struct tv_call *call = ask(fixture, TV_CALL_PARITY_TOTALS, "", NULL);
    assert_reply(call, 200);
    assert_int_equal(reply_int(call, "rounds/violation"), 0);
    assert_true(reply_int(call, "rounds/exact") >= rounds_min);
    call_free(call);
}

static void a_round_waits_for_its_oracle(void **state)
{
    struct fixture *fixture = *state;
    char session[32], epoch[17];
    struct tv_call *call = ask(fixture, TV_CALL_CREATE, "",
                               "{\"tokens\":[1,2,3,4,5],\"sampling\":{\"rule\":\"greedy\"}}");
    assert_reply(call, 201);
    reply_text(call, "session", session, sizeof session);
    reply_text(call, "epoch", epoch, sizeof epoch);
    int32_t pending = (int32_t)reply_int(call, "pending");
    call_free(call);
    call = ask(fixture, TV_CALL_VERIFY, session,
               "{\"seq\":1,\"epoch\":\"%s\",\"expected_len\":5,\"tree\":{\"tokens\":[%d,7,8],"
               "\"parents\":[-1,0,0]},\"want\":{\"shadow\":true}}",
               epoch, pending);
    assert_reply(call, 200);
    assert_int_equal(reply_flag(call, "shadow/ran"), 1);
    assert_int_equal(reply_flag(call, "shadow/tokens_equal"), 1);
    assert_int_equal(reply_int(call, "shadow/kernel/layers"), 3);
    int32_t len = (int32_t)reply_int(call, "committed_len");
    pending = (int32_t)reply_int(call, "pending");
    call_free(call);
    call = ask(fixture, TV_CALL_PARITY, "",
               "{\"session\":\"%s\",\"tree\":{\"tokens\":[%d,3,4],\"parents\":[-1,0,1]}}", session,
               pending);
    assert_reply(call, 200);
    assert_int_equal(reply_flag(call, "ok"), 1);
    call_free(call);
    call = ask(fixture, TV_CALL_STATE, session, NULL);
    assert_int_equal(reply_int(call, "committed_len"), len);
    assert_int_equal(reply_int(call, "next_seq"), 2);
    call_free(call);
    expect(fixture, 200, TV_CALL_DECODE, session,
           "{\"seq\":2,\"epoch\":\"%s\",\"expected_len\":%d,\"max_tokens\":5}", epoch, len);
    assert_clean(fixture, 2);
}

static void the_built_in_case_and_a_body_agree_with_the_oracles(void **state)
{
    static const char sampled[] =
        "{\"tokens\":[9,8,7],\"tree\":{\"tokens\":[1,2,3,4],\"parents\":[-1,0,0,2]},"
        "\"sampling\":{\"temperature\":0.8,\"top_p\":0.9,\"seed\":\"11\"}}";
    static const char *const bodies[] = {
        "{}", "{\"tokens\":[],\"tree\":{\"tokens\":[1],\"parents\":[-1]}}", sampled};
    struct fixture *fixture = *state;
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        struct tv_call *call = call_make(fixture, TV_CALL_PARITY, "", "%s", bodies[i]);
        call->request.strict = 1;
        call_start(fixture, call);
        assert_reply(call_wait(call), 200);
        assert_int_equal(reply_flag(call, "ok"), 1);
        assert_int_equal(reply_flag(call, "accepted_equal"), 1);
        assert_int_equal(reply_flag(call, "kv_equal"), 1);
        call_free(call);
    }
    assert_clean(fixture, 3);
}

/* A server whose products are rounded has no path oracle; the kernel oracle is as ever. */
static void rounded_products_are_not_compared(void **state)
{
    struct fixture *fixture = *state;
    struct tv_engine *engine = fixture->sched->engine;
    const struct tv_rounding before = engine->rounding;
    engine->rounding.rows = 20;
    struct tv_call *call = ask(fixture, TV_CALL_PARITY, "", "{}");
    assert_reply(call, 422);
    assert_non_null(strstr(call->reply.body.data, "products = bf16"));
    call_free(call);
    engine->rounding = before;
    expect(fixture, 200, TV_CALL_PARITY, "", "{}");
}

/* Whatever trees and contexts the server was told to admit, {} is a case that fits them. */
static void the_built_in_case_fits_every_limit(void **state)
{
    static const struct {
        int32_t nodes, depth, max_len, vocab;
    } limits[] = {{64, 32, 256, 307}, {64, 2, 256, 307}, {64, 1, 256, 307},  {64, 0, 256, 307},
                  {1, 32, 256, 307},  {2, 32, 256, 307}, {14, 32, 256, 307}, {64, 32, 1, 307},
                  {64, 32, 2, 307},   {64, 32, 3, 307},  {64, 32, 41, 307},  {64, 32, 256, 1},
                  {64, 32, 4, 2}};
    struct fixture *fixture = *state;
    struct tv_sched *sched = fixture->sched;
    struct tv_engine *engine = sched->engine;
    const struct tv_tree_limits trees = sched->limits.tree;
    int32_t max_len = engine->max_len, vocab = engine->vocab;
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        struct tv_request request = {.kind = TV_CALL_PARITY};
        struct tv_problem problem = {0};
        sched->limits.tree = (struct tv_tree_limits){
            .nodes_max = limits[i].nodes, .depth_max = limits[i].depth, .vocab = limits[i].vocab};
        engine->max_len = limits[i].max_len;
        engine->vocab = limits[i].vocab;
        assert_int_equal(tv_sched_parity_self_case(sched, &request, &problem), 0);
        assert_true(request.token_count >= 0);
        assert_true(request.token_count + request.tree.depth < limits[i].max_len);
        assert_int_equal(request.tree.depth > 0,
                         limits[i].depth > 0 && limits[i].max_len > 2 && limits[i].nodes > 2);
        tv_request_finish(&request);
    }
    sched->limits.tree = trees;
    engine->max_len = max_len;
    engine->vocab = vocab;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_built_in_case_fits_every_limit, real_setup,
                                        real_teardown),
        cmocka_unit_test_setup_teardown(a_round_waits_for_its_oracle, real_setup, real_teardown),
        cmocka_unit_test_setup_teardown(rounded_products_are_not_compared, real_setup,
                                        real_teardown),
        cmocka_unit_test_setup_teardown(the_built_in_case_and_a_body_agree_with_the_oracles,
                                        real_setup, real_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
