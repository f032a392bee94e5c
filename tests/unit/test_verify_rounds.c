/*
 * test_verify_rounds.c - rounds on the real engine: what they commit, and what they leave alone.
 *
 * Runs on bundled checkpoints with a poisoned pool; comparisons are bit for bit where the numerics
 * contract says so. Batches and refusals are test_verify_engine.c's.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "model/model_impl.h"
#include "verify/engine.h"

/* Scratch rows of every layer as the kernels left them, before the commit. */
struct scratch_copy {
    struct tv_fixture *base;
    const struct tv_cache_seq *seq;
    int32_t rows;
    char *bytes; /* [layers, rows, row_bytes] */
};

static void scratch_hook(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct scratch_copy *copy = context;
    assert_int_equal(attn->batch, 1);
    assert_int_equal(attn->q_len, copy->rows);
    assert_int_equal(attn->prefix_len[0], copy->seq->len);
    for (int32_t i = 0; i < copy->rows; i++) {
        size_t bytes = 0;
        const char *row = tv_test_kv_row(copy->base, copy->seq, layer, copy->seq->len + i, &bytes);
        memcpy(copy->bytes + ((size_t)layer * (size_t)copy->rows + (size_t)i) * bytes, row, bytes);
    }
}

/* One committed round whose moved rows must be the scratch rows, bit for bit. */
static void round_moves_exactly(struct tv_engine_fixture *fixture, struct tv_context *context,
                                const struct tv_tree *tree, struct tv_round_out *out)
{
    struct tv_engine *engine = fixture->engine;
    const struct tv_cache_params *params = tv_cache_params(fixture->base.cache);
    size_t row_bytes = (size_t)params->row_dim * tv_dtype_size(params->dtype);
    int32_t len = engine->ops->context_len(context);
    struct scratch_copy copy = {.base = &fixture->base, .seq = &context->seq, .rows = tree->count};
    copy.bytes = malloc((size_t)params->layers * (size_t)tree->count * row_bytes);
    assert_non_null(copy.bytes);
    struct tv_round_in in = {.context = context,
                             .tree = tree,
                             .rule = tv_test_greedy(engine),
                             .commit = 1,
                             .want_logits = 1,
                             .hook = scratch_hook,
                             .hook_context = &copy};
    assert_int_equal(engine->ops->verify(engine, &in, 1, out), 0);
    assert_int_equal(out->code, TV_OK);
    assert_int_equal(engine->ops->context_len(context), len + out->accepted_count);
    for (int32_t layer = 0; layer < params->layers; layer++) {
        for (int32_t i = 0; i < out->accepted_count; i++) {
            const char *row =
                tv_test_kv_row(&fixture->base, &context->seq, layer, len + i, &row_bytes);
            size_t from = (size_t)layer * (size_t)tree->count + (size_t)out->nodes[i];
            assert_memory_equal(row, copy.bytes + from * row_bytes, row_bytes);
        }
    }
    free(copy.bytes);
}

/* A text under verification: what is committed, and the pending token. */
struct text {
    int32_t tokens[2048];
    int32_t len, pending;
};

static void text_open(struct tv_engine *engine, struct tv_context *context, struct text *text,
                      int32_t prefix_len, const struct tv_round_rule *rule, uint64_t seed)
{
    tv_test_prefix_fill(text->tokens, prefix_len, engine->vocab, seed);
    text->len = prefix_len;
    text->pending = tv_test_prefill(engine, context, text->tokens, prefix_len, rule);
}

static void text_accept(struct text *text, const struct tv_tree *tree,
                        const struct tv_round_out *out)
{
    for (int32_t i = 0; i < out->accepted_count; i++) {
        text->tokens[text->len++] = tree->tokens[out->nodes[i]];
    }
    text->pending = out->end.token;
}

/* What plain decoding gives: `count` tokens from the pending one on, [0] = pending. */
static void plain_decode(struct tv_engine *engine, const struct text *text,
                         const struct tv_round_rule *rule, int32_t *ret_tokens, int32_t count)
{
    struct tv_context *context = tv_test_context(engine);
    struct text copy = *text;
    (void)tv_test_prefill(engine, context, text->tokens, text->len, NULL);
    for (int32_t i = 0; i < count; i++) {
        struct tv_tree tree;
        struct tv_round_out out;
        ret_tokens[i] = copy.pending;
        tv_test_tree_chain(&tree, &copy.pending, 1);
        tv_test_verify(engine, context, &tree, rule, 1, &out);
        text_accept(&copy, &tree, &out);
        tv_tree_finish(&tree);
    }
    engine->ops->context_close(engine, context);
}

/* The row that decided the pending token against a fresh prefill of all that is committed. */
static double against_fresh(struct tv_engine_fixture *fixture, const struct text *text,
                            const float *row)
{
    struct tv_cache_seq seq = {0};
    const float *fresh = tv_fixture_prefill(&fixture->base, &seq, text->tokens, text->len, 64);
    double worst = 0.0;
    for (int32_t t = 0; t < fixture->engine->vocab; t++) {
        double delta = fabs((double)fresh[t] - (double)row[t]);
        worst = delta > worst || isnan(delta) ? delta : worst;
    }
    tv_cache_seq_finish(fixture->base.cache, &seq);
    return worst;
}

/* FNV-1a over the KV rows [0, rows) of a sequence, all layers. */
static uint64_t kv_digest(const struct tv_fixture *base, const struct tv_cache_seq *seq,
                          int32_t rows)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int32_t layer = 0; layer < tv_cache_params(base->cache)->layers; layer++) {
        for (int32_t r = 0; r < rows; r++) {
            size_t bytes = 0;
            const char *row = tv_test_kv_row(base, seq, layer, r, &bytes);
            for (size_t i = 0; i < bytes; i++) {
                hash = (hash ^ (uint8_t)row[i]) * UINT64_C(0x100000001b3);
            }
        }
    }
    return hash;
}

/* The same tokens as a chain on a session of its own: row and KV rows are the drafted session's,
 * bit for bit, wherever in its tree they came from. */
static void chain_equals(struct tv_engine_fixture *fixture, struct tv_context *chain,
                         const struct tv_context *drafted, const struct text *text, int32_t count,
                         const float *row)
{
    struct tv_engine *engine = fixture->engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    struct tv_tree tree;
    struct tv_round_out out;
    tv_test_tree_chain(&tree, text->tokens + text->len - count, count);
    tv_test_verify(engine, chain, &tree, &rule, 1, &out);
    assert_int_equal(out.accepted_count, count);
    assert_int_equal(out.end.token, text->pending);
    assert_memory_equal(out.logits + (size_t)(count - 1) * (size_t)engine->vocab, row,
                        (size_t)engine->vocab * sizeof *row);
    assert_true(kv_digest(&fixture->base, &chain->seq, text->len) ==
                kv_digest(&fixture->base, &drafted->seq, text->len));
    tv_tree_finish(&tree);
}

static void committed_rows_after_scattered_paths_b01(void **state)
{
    (void)state;
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = "v3", .page_size = 64};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    double bound = tv_engine_near_tie(engine); /* the two forms, each with its own order of sums */
    double worst = 0.0;
    for (int32_t prefix_len = 55; prefix_len <= 63; prefix_len += 8) {
        struct tv_context *context = tv_test_context(engine);
        struct tv_context *chain = tv_test_context(engine);
        struct text text;
        int32_t right[12];
        text_open(engine, context, &text, prefix_len, &rule, 7);
        (void)tv_test_prefill(engine, chain, text.tokens, text.len, NULL);
        for (int32_t round = 0; round < 10; round++) {
            struct tv_tree tree;
            struct tv_round_out out;
            plain_decode(engine, &text, &rule, right, 12);
            int32_t v = engine->vocab;
            int32_t wrong[4];
            for (int32_t i = 0; i < 4; i++) {
                wrong[i] = (right[1] + 1 + i) % v;
            }
            if (round == 0) { /* star: only the last child is right */
                const int32_t tokens[] = {right[0], wrong[0], wrong[1], wrong[2], right[1]};
                tv_test_tree(&tree, 5, tokens, (const int32_t[]){-1, 0, 0, 0, 0});
            } else if (round == 1) { /* bushy: right path 0, 3, 7 */
                const int32_t tokens[] = {right[0],           wrong[0], wrong[1],
                                          right[1],           3,        4,
                                          (right[2] + 1) % v, right[2], (right[2] + 2) % v};
                tv_test_tree(&tree, 9, tokens, (const int32_t[]){-1, 0, 0, 0, 1, 1, 3, 3, 3});
            } else { /* chains of four, the third token wrong in odd rounds */
                int32_t tokens[] = {right[0], right[1], right[2], right[3]};
                tokens[3] = round % 2 != 0 ? (right[3] + 1) % v : right[3];
                tv_test_tree_chain(&tree, tokens, 4);
            }
            round_moves_exactly(&fixture, context, &tree, &out);
            int32_t expected = round == 0 ? 2 : round == 1 ? 3 : round % 2 != 0 ? 3 : 4;
            assert_int_equal(out.accepted_count, expected);
            if (round == 1) {
                assert_memory_equal(out.nodes, ((const int32_t[]){0, 3, 7}), 12);
            }
            text_accept(&text, &tree, &out);
            assert_int_equal(text.pending, right[expected]);
            int32_t stop = out.nodes[out.accepted_count - 1];
            float *row = malloc((size_t)engine->vocab * sizeof *row);
            assert_non_null(row);
            memcpy(row, out.logits + (size_t)stop * (size_t)engine->vocab,
                   (size_t)engine->vocab * sizeof *row);
            chain_equals(&fixture, chain, context, &text, expected, row);
            double delta = against_fresh(&fixture, &text, row);
            assert_true(delta <= bound);
            worst = fmax(worst, delta);
            free(row);
            tv_tree_finish(&tree);
        }
        engine->ops->context_close(engine, context);
        engine->ops->context_close(engine, chain);
    }
    print_message("20 rounds against fresh prefills: max_abs %.2e (noise of both %.1e)\n", worst,
                  bound);
    tv_engine_fixture_close(&fixture);
}

/* Give a tree one right child per level of its greedy path. */
static void tree_follow_greedy(struct tv_engine *engine, struct tv_context *context,
                               struct tv_tree *tree)
{
    struct tv_round_rule rule = tv_test_greedy(engine);
    int32_t right = 0;
    while (right >= 0) {
        struct tv_round_out out;
        tv_test_verify(engine, context, tree, &rule, 0, &out);
        int32_t end = out.nodes[out.accepted_count - 1];
        right = tree->count - 1;
        while (right > end && tree->parents[right] != end) {
            right--;
        }
        if (right <= end) { /* a leaf: nothing changes any more */
            right = -1;
        } else {
            tree->tokens[right] = out.end.token;
        }
    }
}

static void page_sizes_and_prefix_lengths_b03(void **state)
{
    (void)state;
    static const int32_t page_sizes[] = {16, 32, 64, 128};
    static const int32_t lens[] = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128};
    int32_t expected_nodes[10][24], expected_count[10], expected_pending[10];
    float *expected_logits[10] = {NULL};
    for (size_t p = 0; p < 4; p++) {
        struct tv_engine_fixture fixture;
        struct tv_engine_fixture_options options = {.model = "v2lite", .page_size = page_sizes[p]};
        tv_engine_fixture_open(&fixture, &options);
        struct tv_engine *engine = fixture.engine;
        for (size_t l = 0; l < 10; l++) {
            struct tv_test_random random = {.state = 99 + l};
            struct tv_context *context = tv_test_context(engine);
            struct tv_round_out out;
            struct tv_tree tree;
            int32_t prefix[128];
            tv_test_prefix_fill(prefix, lens[l], engine->vocab, 5 + l);
            (void)tv_test_prefill(engine, context, prefix, lens[l], NULL);
            tv_test_tree_random(&tree, 24, engine->vocab, 3, &random);
            tree_follow_greedy(engine, context, &tree);
            int32_t full = lens[l] / page_sizes[p] * page_sizes[p];
            uint64_t before = kv_digest(&fixture.base, &context->seq, full);
            round_moves_exactly(&fixture, context, &tree, &out);
            assert_true(before == kv_digest(&fixture.base, &context->seq, full));
            size_t floats = 24 * (size_t)engine->vocab;
            if (p == 0) {
                expected_count[l] = out.accepted_count;
                expected_pending[l] = out.end.token;
                memcpy(expected_nodes[l], out.nodes,
                       (size_t)out.accepted_count * sizeof *out.nodes);
                expected_logits[l] = malloc(floats * sizeof(float));
                assert_non_null(expected_logits[l]);
                memcpy(expected_logits[l], out.logits, floats * sizeof(float));
            }
            assert_int_equal(out.accepted_count, expected_count[l]);
            assert_int_equal(out.end.token, expected_pending[l]);
            assert_memory_equal(out.nodes, expected_nodes[l],
                                (size_t)out.accepted_count * sizeof *out.nodes);
            assert_memory_equal(out.logits, expected_logits[l], floats * sizeof(float));
            tv_tree_finish(&tree);
            engine->ops->context_close(engine, context);
        }
        tv_engine_fixture_close(&fixture);
    }
    for (size_t l = 0; l < 10; l++) {
        free(expected_logits[l]);
    }
}

/* Ones in every byte that a pass may have left for the next: masks, scores and staged integers. */
static void buffers_poison(struct tv_model *model)
{
    struct tv_model_buffers *buffers = &model->buffers;
    memset(buffers->workspace, 0xff, buffers->workspace_bytes);
    memset(buffers->stage.device, 0xff, buffers->stage.bytes);
    memset(buffers->stage.host, 0xff, buffers->stage.bytes);
}

/* 500 rounds: a full tree and a tree of three on one session in turn; the small one sees no bit of
 * the large, nor of a mask full of ones. */
static void alternating_tree_sizes_b05(void **state)
{
    (void)state;
    static const int32_t counts[] = {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, TV_TREE_NODES_MAX};
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {
        .model = "v3", .page_size = 64, .rows_max = TV_TREE_NODES_MAX, .pages = 64};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    struct tv_context *context = tv_test_context(engine);
    struct tv_test_random random = {.state = 11};
    struct tv_tree small, large;
    struct tv_round_out out;
    int32_t prefix[70];
    size_t small_floats = 3 * (size_t)engine->vocab;
    float *alone = malloc(small_floats * sizeof *alone);
    assert_non_null(alone);
    tv_test_prefix_fill(prefix, 70, engine->vocab, 3);
    (void)tv_test_prefill(engine, context, prefix, 70, NULL);
    tv_test_tree(&small, 3, (const int32_t[]){4, 5, 6}, (const int32_t[]){-1, 0, 0});
    tv_test_verify(engine, context, &small, &rule, 0, &out);
    memcpy(alone, out.logits, small_floats * sizeof *alone);
    for (int32_t round = 0; round < tv_test_scaled(250); round++) {
        int32_t count = counts[round % 11];
        tv_test_tree_random(&large, count, engine->vocab, 4, &random);
        tv_test_verify(engine, context, &large, &rule, 0, &out);
        /* node 0 of any tree with this root token is the same plain sequence */
        assert_memory_equal(out.logits, alone, (size_t)engine->vocab * sizeof *alone);
        if (round % 2 == 0) { /* the others meet what the large tree really left */
            buffers_poison(fixture.base.model);
        }
        tv_test_verify(engine, context, &small, &rule, 0, &out);
        assert_memory_equal(out.logits, alone, small_floats * sizeof *alone);
        tv_tree_finish(&large);
    }
    tv_tree_finish(&small);
    free(alone);
    engine->ops->context_close(engine, context);
    tv_engine_fixture_close(&fixture);
}

static void wrong_trees_leave_no_trace_b09(void **state)
{
    (void)state;
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = "v3", .page_size = 16};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    struct tv_context *plain = tv_test_context(engine);
    struct tv_context *drafted = tv_test_context(engine);
    struct text plain_text, drafted_text;
    text_open(engine, plain, &plain_text, 20, &rule, 4);
    text_open(engine, drafted, &drafted_text, 20, &rule, 4);
    for (int32_t round = 0; round < tv_test_scaled(200); round++) {
        struct tv_tree tree;
        struct tv_round_out out;
        tv_test_tree_chain(&tree, &plain_text.pending, 1);
        tv_test_verify(engine, plain, &tree, &rule, 1, &out);
        text_accept(&plain_text, &tree, &out);
        int32_t next = out.end.token;
        tv_tree_finish(&tree);

        int32_t tokens[24], parents[24];
        for (int32_t i = 0; i < 24; i++) {
            parents[i] = i - 1 - (i > 1 ? i % 3 : 0);
            parents[i] = i == 0 ? -1 : parents[i] < 0 ? 0 : parents[i];
            tokens[i] = (next + i) % engine->vocab; /* children of the root: all wrong */
        }
        tokens[0] = drafted_text.pending;
        tv_test_tree(&tree, 24, tokens, parents);
        tv_test_verify(engine, drafted, &tree, &rule, 1, &out);
        assert_int_equal(out.accepted_count, 1);
        text_accept(&drafted_text, &tree, &out);
        tv_tree_finish(&tree);
        assert_int_equal(drafted_text.pending, next);
        assert_int_equal(drafted->seq.page_count, plain->seq.page_count);
    }
    assert_int_equal(plain_text.len, drafted_text.len);
    assert_true(kv_digest(&fixture.base, &plain->seq, plain_text.len) ==
                kv_digest(&fixture.base, &drafted->seq, drafted_text.len));
    engine->ops->context_close(engine, plain);
    engine->ops->context_close(engine, drafted);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(committed_rows_after_scattered_paths_b01),
        cmocka_unit_test(page_sizes_and_prefix_lengths_b03),
        cmocka_unit_test(alternating_tree_sizes_b05),
        cmocka_unit_test(wrong_trees_leave_no_trace_b09),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
