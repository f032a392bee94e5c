/*
 * test_shadow_commit.c - the KV rows after a commit are judged: a kernel that moves nothing is a
 * violation, one that moves is not, and a comparison judges the move without keeping it.
 *
 * Rows of both types, in host memory and behind copies as those of a device. Owns no checkpoint.
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plant.h"
#include "shadow/round.h"
#include "shadow_fixture.h"

struct stage {
    struct bench bench;
    struct tv_kernels as_device; /* the same table, whose memory the shadow may not read */
    struct tv_kernels sound;     /* the table without a fault */
};

/* As a device has it: a table for another thread, which computes in the same memory. */
static int side_make(struct tv_kernels *k, struct tv_kernels **ret_side)
{
    int rc = tv_kernels_create("ref", NULL, ret_side);
    if (rc == 0) {
        (*ret_side)->host_memory = k->host_memory;
    }
    return rc;
}

/* Root, a token that is not drawn, and the one that is: the third row moves to the second place. */
static void tree_make(struct bench *bench)
{
    static const int32_t parents[] = {-1, 0, 0};
    struct tv_engine *engine = bench->fixture.engine;
    struct tv_tree root;
    struct tv_round_out out;
    int32_t pending = bench->tree.tokens[0];
    tv_test_tree_chain(&root, &pending, 1);
    tv_test_verify(engine, bench->context, &root, &bench->rule, 0, &out);
    int32_t drawn = out.end.token;
    const int32_t tokens[] = {pending, (drawn + 1) % engine->vocab, drawn};
    tv_tree_finish(&root);
    tv_tree_finish(&bench->tree);
    tv_test_tree(&bench->tree, 3, tokens, parents);
}

enum memory { MEMORY_HOST, MEMORY_COPIED, MEMORY_JUDGED_THERE };

static void stage_open(struct stage *stage, enum tv_dtype dtype, enum memory memory,
                       double path_share)
{
    struct bench *bench = &stage->bench;
    bench_open_kv(bench, "v3", 16, dtype, 0.0, QUEUE_BYTES, 1);
    struct tv_kernels *kernels = bench->fixture.base.kernels;
    stage->sound = *kernels;
    stage->as_device = *kernels;
    stage->as_device.host_memory = 0;
    stage->as_device.side = memory == MEMORY_JUDGED_THERE ? side_make : NULL;
    struct tv_shadow_params params = {.probability = 1.0,
                                      .path_probability = path_share,
                                      .queue_bytes_max = QUEUE_BYTES,
                                      .state_dir = bench->dir,
                                      .device = memory == MEMORY_HOST ? kernels : &stage->as_device,
                                      .judge_there = 1};
    tv_shadow_destroy(bench->shadow);
    assert_int_equal(tv_shadow_create(&params, bench->fixture.base.model, bench->fixture.base.cache,
                                      &bench->shadow),
                     0);
    tree_make(bench);
}

static void stage_close(struct stage *stage)
{
    bench_close(&stage->bench);
}

static void move_fails(struct stage *stage)
{
    assert_int_equal(tv_plant(stage->bench.fixture.base.kernels, "commit"), 0);
}

static struct tv_shadow_round *round_play(struct bench *bench, enum tv_shadow_why why, int commit,
                                          struct tv_round_out *out)
{
    struct tv_engine *engine = bench->fixture.engine;
    struct tv_shadow_round *round = tv_shadow_begin(bench->shadow, why);
    assert_non_null(round);
    struct tv_round_in in = {.context = bench->context,
                             .tree = &bench->tree,
                             .rule = bench->rule,
                             .commit = commit,
                             .lend_logits = 1,
                             .hook = tv_shadow_layer,
                             .committed = tv_shadow_committed,
                             .hook_context = round};
    assert_int_equal(engine->ops->verify(engine, &in, 1, out), 0);
    assert_int_equal(out->code, TV_OK);
    assert_int_equal(out->accepted_count, 2);
    assert_int_equal(out->nodes[1], 2);
    assert_int_equal(engine->ops->context_len(bench->context), PREFIX_LEN + (commit ? 2 : 0));
    return round;
}

/* A live round: what the thread says of it. */
static struct tv_shadow_block round_judged(struct bench *bench)
{
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct tv_round_out out;
    struct tv_shadow_round *round = round_play(bench, TV_SHADOW_WANTED, 1, &out);
    struct tv_parity_case parity_case = case_of(bench, &out, round);
    tv_shadow_attach(bench->shadow, round, &parity_case);
    tv_shadow_submit(bench->shadow, round, waiter_done, &waiter);
    struct tv_engine *engine = bench->fixture.engine;
    assert_int_equal(engine->ops->truncate(engine, bench->context, PREFIX_LEN), 0);
    return waiter_wait(&waiter);
}

static void rows_after_the_commit_are_judged(void **state)
{
    (void)state;
    for (int form = 0; form < 6; form++) {
        struct stage stage;
        struct tv_parity_violation violations[32];
        const char *kind = NULL;
        char *data = NULL;
        size_t bytes = 0;
        stage_open(&stage, form % 2 == 0 ? TV_F32 : TV_BF16, (enum memory)(form / 2), 0.0);
        struct tv_shadow_block block = round_judged(&stage.bench);
        assert_true(block.ran && block.tokens_equal);
        struct tv_parity_totals totals = totals_of(&stage.bench, violations);
        assert_true(totals.exact == 1 && totals.violation == 0);

        move_fails(&stage);
        block = round_judged(&stage.bench);
        assert_true(block.ran && !block.tokens_equal);
        totals = totals_of(&stage.bench, violations);
        print_message("form %d: exact %lld, violation %lld\n", form, (long long)totals.exact,
                      (long long)totals.violation);
        assert_true(totals.exact == 1 && totals.violation == 1);
        assert_int_equal(totals.violation_count, 1);
        assert_string_equal(violations[0].kind, "path");
        assert_true(violations[0].reproducer);
        assert_int_equal(
            tv_shadow_reproducer(stage.bench.shadow, violations[0].n, &kind, &data, &bytes), 0);
        assert_true(bytes > 2 && strncmp(data, "{\"tokens\":[", 11) == 0);
        free(data);
        stage_close(&stage);
    }
}

/* What POST /v1/parity does, also with the reproducer: the sequence is as it was afterwards. */
static void comparisons_judge_the_move(void **state)
{
    (void)state;
    for (int form = 0; form < 2; form++) {
        struct stage stage;
        struct tv_parity_violation violations[32];
        struct tv_round_out out;
        stage_open(&stage, form == 0 ? TV_F32 : TV_BF16, MEMORY_HOST, 0.0);
        struct bench *bench = &stage.bench;
        for (int fault = 0; fault < 2; fault++) {
            struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER,
                                    .changed = PTHREAD_COND_INITIALIZER};
            struct tv_parity_report report = {0};
            if (fault) {
                move_fails(&stage);
            }
            struct tv_shadow_round *round = round_play(bench, TV_SHADOW_ON_DEMAND, 0, &out);
            struct tv_parity_case parity_case = case_of(bench, &out, round);
            assert_int_equal(tv_shadow_path_compare(bench->shadow, &parity_case, &report), 0);
            assert_int_equal(report.kv_equal, !fault);
            assert_int_equal(report.ok, !fault);
            assert_true(report.accepted_equal && report.pending_equal);
            tv_shadow_submit(bench->shadow, round, waiter_done, &waiter);
            assert_true(waiter_wait(&waiter).tokens_equal == !fault);
            struct tv_parity_totals totals = totals_of(bench, violations);
            assert_true(totals.exact + totals.near_tie == 1 && totals.violation == fault);
            assert_int_equal(totals.violation_count, fault);
        }
        stage_close(&stage);
    }
}

/* Sampled for the path oracle too, a round counts twice, and neither calls it exact. */
static void both_oracles_count_it(void **state)
{
    (void)state;
    struct stage stage;
    struct tv_parity_violation violations[32];
    stage_open(&stage, TV_F32, MEMORY_HOST, 1.0);
    move_fails(&stage);
    (void)round_judged(&stage.bench);
    stage.bench.fixture.base.kernels->kv_move = stage.sound.kv_move; /* the oracle reads others */
    stage.bench.fixture.base.kernels->copy = stage.sound.copy;
    (void)round_judged(&stage.bench); /* its first word comes after the last one of the other */
    struct tv_parity_totals totals = totals_of(&stage.bench, violations);
    assert_int_equal(totals.violation, 2);
    assert_int_equal(totals.violation_count, 2);
    assert_in_range(totals.exact + totals.near_tie, 1, 2);
    stage_close(&stage);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_after_the_commit_are_judged),
        cmocka_unit_test(comparisons_judge_the_move),
        cmocka_unit_test(both_oracles_count_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
