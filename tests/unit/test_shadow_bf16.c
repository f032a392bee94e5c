/*
 * test_shadow_bf16.c - both oracles on a cache of bf16 rows: right rounds are never called wrong,
 * wrong ones are found. The margins are printed: the bounds are those of f32 rows, because what
 * bf16 rounds is checked value by value and taken over.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "shadow/round.h"
#include "shadow_fixture.h"

static const char *const models[] = {"v3", "v2lite", "moonlight", "kjv-mla-8m"};

static int order(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* What one random round looked like to the oracles. */
struct seen {
    struct tv_shadow_block block;
    struct tv_parity_report report;
};

/* A random text, some of it committed by rounds of its own, and a random tree behind it. */
static struct seen random_round(struct bench *bench, int32_t prefix_max,
                                struct tv_test_random *random)
{
    struct tv_engine *engine = bench->fixture.engine;
    struct tv_context *context = tv_test_context(engine);
    struct tv_round_rule rule =
        tv_test_sampled(engine, 0.9f, (uint64_t)tv_test_random_next(random));
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct tv_tree tree;
    struct tv_round_out out;
    struct seen seen = {0};
    int32_t prefix[256];
    int32_t len = 1 + tv_test_random_below(random, prefix_max);
    for (int32_t i = 0; i < len; i++) {
        prefix[i] = tv_test_random_below(random, engine->vocab);
    }
    int32_t pending = tv_test_prefill(engine, context, prefix, len, &rule);
    for (int32_t i = tv_test_random_below(random, 12); i > 0; i--) { /* plain decoding */
        tv_test_tree_chain(&tree, &pending, 1);
        tv_test_verify(engine, context, &tree, &rule, 1, &out);
        tv_tree_finish(&tree);
        prefix[len++] = pending;
        pending = out.end.token;
    }
    tv_test_tree_random(&tree, 1 + tv_test_random_below(random, 48), engine->vocab, pending,
                        random);
    struct tv_shadow_round *round = tv_shadow_begin(bench->shadow, 1);
    assert_non_null(round);
    struct tv_round_in in = {.context = context,
                             .tree = &tree,
                             .rule = rule,
                             .lend_logits = 1,
                             .hook = tv_shadow_layer,
                             .hook_context = round};
    assert_int_equal(engine->ops->verify(engine, &in, 1, &out), 0);
    assert_int_equal(out.code, TV_OK);
    struct tv_parity_case parity_case = case_of(bench, &out, round);
    parity_case.prefix = prefix;
    parity_case.prefix_len = len;
    parity_case.tree = &tree;
    parity_case.rule = rule;
    assert_int_equal(tv_shadow_path_compare(bench->shadow, &parity_case, &seen.report), 0);
    tv_shadow_attach(bench->shadow, round, &parity_case);
    tv_shadow_submit(bench->shadow, round, waiter_done, &waiter);
    seen.block = waiter_wait(&waiter);
    tv_tree_finish(&tree);
    engine->ops->context_close(engine, context);
    return seen;
}

/* TV_TEST_SCALE times 40 rounds a checkpoint, 8 on the largest. */
static void right_rounds_are_never_called_wrong(void **state)
{
    (void)state;
    for (size_t m = 0; m < 4; m++) {
        struct bench bench;
        struct tv_parity_violation violations[32];
        struct tv_test_random random = {.state = 1000 + m};
        int32_t count = tv_test_scaled(m == 3 ? 8 : 40);
        double *shares = malloc((size_t)count * sizeof *shares);
        double kernel = 0.0;
        assert_non_null(shares);
        bench_open_kv(&bench, models[m], m % 2 == 0 ? 16 : 64, TV_BF16, 0.0, QUEUE_BYTES, 1);
        for (int32_t i = 0; i < count; i++) {
            struct seen seen = random_round(&bench, m == 3 ? 60 : 120, &random);
            shares[i] = seen.report.logit_max_abs / seen.report.bound_logit_abs;
            kernel = fmax(kernel, seen.block.kernel.rel_l2);
            if (!seen.report.ok || !seen.block.tokens_equal) {
                print_error("round %d: logits %.3g of %.3g, rows %d, argmax %d of %d, walk %d %d, "
                            "kernel %.3g\n",
                            i, seen.report.logit_max_abs, seen.report.bound_logit_abs,
                            seen.report.kv_equal, seen.report.argmax_equal, seen.report.path_rows,
                            seen.report.accepted_equal, seen.report.pending_equal,
                            seen.block.kernel.rel_l2);
            }
            assert_int_equal(seen.block.ran, 1);
        }
        struct tv_parity_totals totals = totals_of(&bench, violations);
        qsort(shares, (size_t)count, sizeof *shares, order);
        print_message("%s: %d rounds, seed %zu: logits over their bound: median %.3f, p90 %.3f, "
                      "largest %.3f; near ties %lld; kernel rel_l2 <= %.2e\n",
                      models[m], count, 1000 + m, shares[count / 2], shares[count * 9 / 10],
                      shares[count - 1], (long long)totals.near_tie, kernel);
        assert_int_equal(totals.violation, 0);
        assert_int_equal(totals.skipped, 0);
        assert_int_equal(totals.exact + totals.near_tie, 2 * count);
        assert_true(kernel <= TV_SHADOW_REL_L2_F32); /* sums of bf16 products are f32 here */
        free(shares);
        bench_close(&bench);
    }
}

/* One node of one head that sees ALONE_TOKENS tokens, one of which has most of the weight, as a
 * kernel leaves it that rounds probabilities by draw `draw` of kernels.h. */
enum { ALONE_TOKENS = 40, ALONE_HEADS = 1, ALONE_LATENT = 64, ALONE_ROW = ALONE_LATENT + 8 };
struct alone {
    uint16_t q[ALONE_HEADS * ALONE_ROW], kv[ALONE_TOKENS * ALONE_ROW];
    float out[ALONE_HEADS * ALONE_LATENT], lse[ALONE_HEADS];
    double workspace[1 << 13];
};

static void alone_make(struct alone *alone, struct tv_kernels *ref, int32_t draw,
                       struct tv_test_random *random)
{
    static const int32_t table = 0, prefix_len = ALONE_TOKENS - 1, nodes = 1, parent = -1;
    for (size_t i = 0; i < sizeof alone->kv / sizeof alone->kv[0]; i++) {
        alone->kv[i] = tv_f32_to_bf16((float)tv_test_random_below(random, 2001) / 1000.0f - 1.0f);
    }
    for (int32_t i = 0; i < ALONE_HEADS * ALONE_ROW; i++) { /* it looks for the first token */
        float own = (float)tv_test_random_below(random, 2001) / 5000.0f - 0.2f;
        alone->q[i] = tv_f32_to_bf16(0.4f * tv_bf16_to_f32(alone->kv[i % ALONE_ROW]) + own);
    }
    struct tv_verify_attn args = {.batch = 1,
                                  .q_len = 1,
                                  .heads = ALONE_HEADS,
                                  .latent_dim = ALONE_LATENT,
                                  .rope_dim = ALONE_ROW - ALONE_LATENT,
                                  .softmax_scale = 0.5f,
                                  .dtype = TV_BF16,
                                  .out_dtype = TV_F32,
                                  .q = alone->q,
                                  .kv_pages = alone->kv,
                                  .page_count = 1,
                                  .page_size = 64,
                                  .max_pages = 1,
                                  .page_table = &table,
                                  .prefix_len = &prefix_len,
                                  .node_count = &nodes,
                                  .parents = &parent,
                                  .kv_len_max = ALONE_TOKENS,
                                  .round_p_bf16 = draw,
                                  .out = alone->out,
                                  .lse = alone->lse,
                                  .workspace = alone->workspace,
                                  .workspace_bytes = sizeof alone->workspace};
    assert_true(ref->verify_attn_naive_workspace(ref, &args) <= sizeof alone->workspace);
    assert_int_equal(ref->verify_attn_naive(ref, &args), 0);
}

/* Draws that the oracle does not look at. Of 2,000 rounds 22 were violations beside the worst of
 * four draws. */
static void a_round_of_few_rows_is_never_called_wrong(void **state)
{
    (void)state;
    struct tv_kernels device = {.host_memory = 0};
    struct tv_shadow shadow = {.params = {.device = &device}};
    struct tv_test_random random = {.state = 77};
    struct alone *alone = malloc(sizeof *alone);
    int32_t parent = -1;
    struct tv_shadow_layer_copy layer = {
        .q = alone->q, .out = alone->out, .lse = alone->lse, .kv_tail = alone->kv};
    struct tv_shadow_round round = {.shadow = &shadow,
                                    .nodes = 1,
                                    .heads = ALONE_HEADS,
                                    .latent_dim = ALONE_LATENT,
                                    .rope_dim = ALONE_ROW - ALONE_LATENT,
                                    .page_size = 64,
                                    .prefix_len = ALONE_TOKENS - 1,
                                    .softmax_scale = 0.5f,
                                    .dtype = TV_BF16,
                                    .out_dtype = TV_F32,
                                    .parents = &parent,
                                    .layer_count = 1,
                                    .layers = &layer};
    struct tv_parity_kernel worst;
    double most = 0.0;
    int within = 0;
    assert_int_equal(tv_kernels_create("ref", NULL, &shadow.ref), 0);
    for (int32_t i = 0; i < tv_test_scaled(2000); i++) {
        alone_make(alone, shadow.ref, TV_SHADOW_ROUNDINGS + 1 + i % 200, &random);
        assert_int_equal(tv_shadow_kernel_judge(&shadow, &round, &worst, &within), 0);
        most = fmax(most, worst.rel_l2);
        assert_int_equal(within, 1);
    }
    print_message("rel_l2 <= %.2e\n", most);
    shadow.ref->destroy(shadow.ref);
    free(alone);
}

static void planted_faults_are_found_by_the_kernel_oracle(void **state)
{
    (void)state;
    static const enum fault faults[] = {FAULT_OUTPUT, FAULT_PAGE, FAULT_MASK, FAULT_LSE, FAULT_NAN};
    for (size_t f = 0; f < sizeof faults / sizeof faults[0]; f++) {
        struct bench bench;
        struct tv_parity_violation violations[32];
        bench_open_kv(&bench, models[f % 3], 16, TV_BF16, 0.0, QUEUE_BYTES, 1);
        struct tv_shadow_block block = judged(&bench, FAULT_NONE, 0);
        assert_int_equal(block.tokens_equal, 1);
        block = judged(&bench, faults[f], 0);
        assert_int_equal(block.ran, 1);
        struct tv_parity_totals totals = totals_of(&bench, violations);
        print_message("fault %d: rel_l2 %.2e\n", (int)faults[f], block.kernel.rel_l2);
        assert_int_equal(totals.exact, 1);
        assert_int_equal(totals.violation, 1);
        assert_string_equal(violations[0].kind, "kernel");
        bench_close(&bench);
    }
}

/* The drawn token is the fast path's own logits' word: the noise of bf16 rows excuses nothing. */
static void wrong_tokens_are_found(void **state)
{
    (void)state;
    for (size_t m = 0; m < 3; m++) {
        struct bench bench;
        struct tv_parity_violation violations[32];
        bench_open_kv(&bench, models[m], 64, TV_BF16, 0.0, QUEUE_BYTES, 0);
        struct tv_shadow_block block = judged(&bench, FAULT_NONE, 1);
        assert_int_equal(block.ran, 1);
        assert_int_equal(block.tokens_equal, 0);
        assert_int_equal(totals_of(&bench, violations).violation, 1);
        bench_close(&bench);
    }
}

enum path_fault {
    PATH_PAGE,
    PATH_TEXT,
    PATH_LOGIT,
    PATH_PENDING,
    PATH_QUERY,
    PATH_TAIL,
    PATH_FAULTS
};

static void planted_faults_are_found_by_the_path_oracle(void **state)
{
    (void)state;
    for (int fault = 0; fault < PATH_FAULTS; fault++) {
        struct bench bench;
        struct planted planted = {.fault = fault == PATH_PAGE ? FAULT_PAGE : FAULT_NONE,
                                  .layer = 2};
        struct tv_round_out out;
        struct tv_parity_report report = {0};
        bench_open_kv(&bench, models[fault % 3], 16, TV_BF16, 0.0, QUEUE_BYTES, 0);
        int32_t vocab = bench.fixture.engine->vocab;
        planted.round = tv_shadow_begin(bench.shadow, 1);
        round_run(&bench, &planted, &out);
        struct tv_parity_case parity_case = case_of(&bench, &out, planted.round);
        size_t count = (size_t)bench.tree.count * (size_t)vocab;
        float *logits = malloc(count * sizeof *logits);
        assert_non_null(logits);
        for (size_t i = 0; i < count; i++) {
            logits[i] = out.logits[i];
        }
        parity_case.logits = logits;
        size_t row = (size_t)(planted.round->latent_dim + planted.round->rope_dim);
        switch (fault) {
        case PATH_TEXT: /* says another token than the rows were made from */
            bench.prefix[PREFIX_LEN - 1] = (bench.prefix[PREFIX_LEN - 1] + 1) % vocab;
            break;
        case PATH_LOGIT: /* a tenth of what the rounding of rows moves them */
            logits[count / 2] += 0.004f;
            break;
        case PATH_PENDING:
            parity_case.pending = (parity_case.pending + 1) % vocab;
            break;
        case PATH_QUERY: /* of the last node and layer: two steps up */
            ((uint16_t *)planted.round->layers[1]
                 .q)[(size_t)(bench.tree.count - 1) * (size_t)planted.round->heads * row + 7] ^= 4;
            break;
        case PATH_TAIL: /* a row of the tree, as if the wrong one had been moved */
            for (size_t i = 0; i < row; i++) {
                uint16_t *tail = planted.round->layers[1].kv_tail;
                size_t at = (size_t)(PREFIX_LEN - planted.round->tail_start + 3) * row + i;
                tail[at] = tail[at + row];
            }
            break;
        default:
            break;
        }
        assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
        print_message("path fault %d: logits %.2e of %.2e, rows %d, walk %d %d\n", fault,
                      report.logit_max_abs, report.bound_logit_abs, report.kv_equal,
                      report.accepted_equal, report.pending_equal);
        assert_int_equal(report.ok, 0);
        assert_int_equal(report.kv_equal, fault == PATH_LOGIT || fault == PATH_PENDING);
        tv_shadow_abandon(bench.shadow, planted.round);
        free(logits);
        bench_close(&bench);
    }
}

/* Without the captured rows nobody knows which way the fast path rounded: no word is given. */
static void a_case_without_rows_is_skipped(void **state)
{
    (void)state;
    struct bench bench;
    struct planted planted = {.fault = FAULT_NONE};
    struct tv_parity_violation violations[32];
    struct tv_parity_report report = {0};
    struct tv_round_out out;
    bench_open_kv(&bench, "v3", 64, TV_BF16, 0.0, QUEUE_BYTES, 0);
    round_run(&bench, &planted, &out);
    struct tv_parity_case parity_case = case_of(&bench, &out, NULL);
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), -ENODATA);
    assert_int_equal(totals_of(&bench, violations).skipped, 1);
    bench_close(&bench);
}

/* The oracle's rounding against the definition: ties to even, and what lies beside them. */
static void rounding_is_to_nearest_even(void **state)
{
    (void)state;
    struct tv_test_random random = {.state = 3};
    for (int32_t i = 0; i < 100000; i++) {
        union {
            uint32_t bits;
            float value;
        } any = {.bits = tv_test_random_next(&random)};
        any.bits = i % 4 == 0 ? (any.bits & 0xffff0000u) | 0x8000u : any.bits; /* a tie */
        if (isfinite(any.value) && fabsf(any.value) < 3e38f) {
            float rounded = any.value;
            tv_path_round_bf16(&rounded, 1);
            assert_true(rounded == tv_bf16_to_f32(tv_f32_to_bf16(any.value)));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(right_rounds_are_never_called_wrong),
        cmocka_unit_test(a_round_of_few_rows_is_never_called_wrong),
        cmocka_unit_test(planted_faults_are_found_by_the_kernel_oracle),
        cmocka_unit_test(wrong_tokens_are_found),
        cmocka_unit_test(planted_faults_are_found_by_the_path_oracle),
        cmocka_unit_test(a_case_without_rows_is_skipped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
