/*
 * test_model.c - properties of the two passes that no reference logits can show.
 *
 * Bit-identity of a row alone, in a batch and on other pages; scattered acceptance (B01), branching
 * trees at page borders (B03), rejected drafts (B09), positions and tokens out of range (B15, B43).
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model_passes.h"

#define NODES 24

/* A tree of `rows` nodes with random parents. */
struct tree {
    int32_t tokens[NODES], parents[NODES], depths[NODES], rows;
};

static void tree_draw(struct tree *tree, int32_t rows, int32_t vocab)
{
    tree->rows = rows;
    for (int32_t i = 0; i < rows; i++) {
        tree->tokens[i] = model_draw(vocab);
        tree->parents[i] = i == 0 ? -1 : model_draw(i);
        tree->depths[i] = i == 0 ? 0 : tree->depths[tree->parents[i]] + 1;
    }
}

/* Four sessions of very different lengths in one launch: the bits of each are those it has alone.
 */
static void batch_check(const char *name, int32_t page_size)
{
    static const int32_t lengths[] = {1, 65, 0, 130}, rows[] = {24, 1, 9, 17};
    struct tv_fixture fixture;
    struct tv_cache_seq seqs[4] = {{0}};
    struct tv_model_item items[4];
    struct tree trees[4];
    float *alone[4];
    int32_t prompt[130];
    const float *logits;
    model_open(&fixture, name, page_size, 0, TV_F32);
    int32_t vocab = tv_model_config(fixture.model)->vocab;
    model_seed(5);
    for (int32_t b = 0; b < 4; b++) {
        struct tv_cache_shortage shortage;
        model_tokens_draw(prompt, lengths[b], vocab);
        (void)tv_fixture_prefill(&fixture, &seqs[b], prompt, lengths[b], 50);
        tree_draw(&trees[b], rows[b], vocab);
        assert_int_equal(tv_cache_reserve(fixture.cache, &seqs[b], rows[b], &shortage), 0);
        items[b] = (struct tv_model_item){.seq = &seqs[b],
                                          .rows = rows[b],
                                          .tokens = trees[b].tokens,
                                          .parents = trees[b].parents,
                                          .depths = trees[b].depths};
        assert_int_equal(
            tv_model_verify(fixture.model, fixture.cache, &items[b], 1, NULL, NULL, &logits), 0);
        alone[b] = model_logits_copy(logits, rows[b], vocab);
    }
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, items, 4, NULL, NULL, &logits),
                     0);
    for (int32_t b = 0; b < 4; b++) {
        assert_memory_equal(logits, alone[b], (size_t)(rows[b] * vocab) * sizeof *logits);
        logits += (int64_t)rows[b] * vocab;
        free(alone[b]);
        tv_cache_seq_finish(fixture.cache, &seqs[b]);
    }
    tv_fixture_close(&fixture);
}

static void test_batch_is_bit_identical(void **state)
{
    (void)state;
    batch_check("v2lite", 64);
    batch_check("v3", 16);
    batch_check("moonlight", 32);
    batch_check("kjv-mla-8m", 64);
}

/* The same prompt and tree on scattered pages, in other pieces and at other page sizes. */
static void test_pages_and_pieces_are_bit_identical(void **state)
{
    (void)state;
    static const int32_t page_sizes[] = {16, 32, 64, 128}, pieces[] = {1, 7, 64, 65, 150};
    float *first = NULL;
    for (int32_t p = 0; p < 4; p++) {
        struct tv_fixture fixture;
        model_open(&fixture, "v3", page_sizes[p], 0, TV_F32);
        int32_t vocab = tv_model_config(fixture.model)->vocab;
        for (int32_t i = 0; i < 5; i++) {
            struct tv_cache_seq seq = {0}, others[3] = {{0}};
            struct tree tree;
            int32_t prompt[150];
            model_seed(17);
            model_tokens_draw(prompt, 150, vocab);
            tree_draw(&tree, NODES, vocab);
            for (int32_t o = 0; o < 3; o++) { /* neighbours that take pages between ours */
                (void)tv_fixture_prefill(&fixture, &others[o], prompt, 20 * (o + 1), 20);
            }
            tv_cache_seq_finish(fixture.cache, &others[1]);
            (void)tv_fixture_prefill(&fixture, &seq, prompt, 80, pieces[i]);
            tv_cache_seq_finish(fixture.cache, &others[0]);
            (void)tv_fixture_prefill(&fixture, &seq, prompt + 80, 70, pieces[i]);
            const float *logits =
                tv_fixture_verify(&fixture, &seq, tree.tokens, tree.parents, tree.rows);
            if (first == NULL) {
                first = model_logits_copy(logits, NODES, vocab);
            }
            assert_memory_equal(logits, first, (size_t)(NODES * vocab) * sizeof *logits);
            tv_cache_seq_finish(fixture.cache, &seq);
            tv_cache_seq_finish(fixture.cache, &others[2]);
        }
        tv_fixture_close(&fixture);
    }
    free(first);
}

/* Prefill passes of more rows than a verify pass may have: the same bits in one of them and in
 * small ones, and neither kind of pass takes more than its own. */
static void test_prefill_passes_are_longer(void **state)
{
    (void)state;
    enum { VERIFY_ROWS = 24, COUNT = 100 };
    struct tv_fixture fixture;
    struct tv_cache_seq whole = {0}, pieces = {0};
    struct tv_cache_shortage shortage;
    int32_t tokens[COUNT + 1], parents[COUNT], depths[COUNT];
    struct tv_fixture_options options = {.backend = "cpu",
                                         .dir = tv_fixture_dir("moonlight"),
                                         .page_size = 16,
                                         .rows_max = VERIFY_ROWS,
                                         .prefill_rows = COUNT,
                                         .requests_max = 2,
                                         .pages = 64,
                                         .threads = 2,
                                         .kv_dtype = TV_F32};
    tv_fixture_open(&fixture, &options);
    int32_t vocab = tv_model_config(fixture.model)->vocab;
    model_seed(31);
    model_tokens_draw(tokens, COUNT + 1, vocab);
    float *want = model_logits_copy(
        tv_fixture_prefill(&fixture, &pieces, tokens, COUNT, VERIFY_ROWS), 1, vocab);
    const float *logits = tv_fixture_prefill(&fixture, &whole, tokens, COUNT, COUNT);
    assert_memory_equal(logits, want, (size_t)vocab * sizeof *want);
    free(want);
    assert_int_equal(tv_cache_reserve(fixture.cache, &whole, COUNT + 1, &shortage), 0);
    assert_int_equal(
        tv_model_prefill(fixture.model, fixture.cache, &whole, tokens, COUNT + 1, NULL), -EINVAL);
    for (int32_t i = 0; i < COUNT; i++) {
        parents[i] = i - 1;
        depths[i] = i;
    }
    struct tv_model_item item = {.seq = &whole,
                                 .rows = VERIFY_ROWS + 1,
                                 .tokens = tokens,
                                 .parents = parents,
                                 .depths = depths};
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits),
                     -EINVAL);
    tv_cache_seq_finish(fixture.cache, &whole);
    tv_cache_seq_finish(fixture.cache, &pieces);
    tv_fixture_close(&fixture);
}

/* Logits of `token` after the committed rows of a fresh session with the same tokens: prefilled
 * there, verified here, so within the noise of two forms. */
static void fresh_compare(struct tv_fixture *fixture, const struct tv_cache_seq *seq,
                          const int32_t *history, int32_t token, const float *got, double noise)
{
    struct tv_cache_seq fresh = {0};
    struct tv_fixture_difference difference = {0};
    int32_t vocab = tv_model_config(fixture->model)->vocab;
    (void)tv_fixture_prefill(fixture, &fresh, history, seq->len, 64);
    const float *want = tv_fixture_chain(fixture, &fresh, &token, 1);
    tv_fixture_compare(got, want, 1, vocab, &difference);
    assert_true(difference.max_abs <= noise);
    tv_cache_seq_finish(fixture->cache, &fresh);
}

static void layer_rows_copy(const struct tv_fixture *fixture, const struct tv_cache_seq *seq,
                            const int32_t *nodes, int32_t count, float *rows)
{
    const float *pages = tv_cache_layer(fixture->cache, 0);
    for (int32_t i = 0; i < count; i++) {
        memcpy(rows + (int64_t)i * TV_MLA_ROW,
               pages + tv_cache_slot(fixture->cache, seq, seq->len + nodes[i]) * TV_MLA_ROW,
               TV_MLA_ROW * sizeof *rows);
    }
}

/* One round on a bushy tree whose right path is `nodes`, then a look at the next position. */
static void scattered_round(struct tv_fixture *fixture, struct tv_cache_seq *seq, int32_t *history,
                            const int32_t *nodes, int32_t count, double noise)
{
    static const int32_t order[NODES] = {0, 1, 2, 3, 4, 5, 6, 7};
    struct tree tree;
    float before[4 * TV_MLA_ROW], after[4 * TV_MLA_ROW];
    int32_t vocab = tv_model_config(fixture->model)->vocab;
    tree_draw(&tree, NODES, vocab);
    for (int32_t i = 1; i < count; i++) {
        tree.parents[nodes[i]] = nodes[i - 1];
    }
    assert_true(count <= 4);
    (void)tv_fixture_verify(fixture, seq, tree.tokens, tree.parents, NODES);
    layer_rows_copy(fixture, seq, nodes, count, before);
    for (int32_t i = 0; i < count; i++) {
        history[seq->len + i] = tree.tokens[nodes[i]];
    }
    tv_fixture_commit(fixture, seq, nodes, count);
    seq->len -= count; /* look at the rows that were just committed */
    seq->scratch = count;
    layer_rows_copy(fixture, seq, order, count, after);
    seq->len += count;
    seq->scratch = 0;
    assert_memory_equal(before, after, (size_t)count * TV_MLA_ROW * sizeof *before);
    int32_t token = model_draw(vocab);
    const float *logits = tv_fixture_chain(fixture, seq, &token, 1);
    float *got = model_logits_copy(logits, 1, vocab);
    tv_cache_drop(fixture->cache, seq);
    fresh_compare(fixture, seq, history, token, got, noise);
    free(got);
}

static void test_b01_scattered_acceptance(void **state)
{
    (void)state;
    static const int32_t last_child[] = {0, 23}, path[] = {0, 3, 7}, spread[] = {0, 5, 11, 20};
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    int32_t history[512];
    double noise = model_noise_of_both("v3");
    model_open(&fixture, "v3", 64, 0, TV_F32);
    model_seed(31);
    model_tokens_draw(history, 50, 307);
    (void)tv_fixture_prefill(&fixture, &seq, history, 50, 50);
    for (int32_t round = 0; round < 8; round++) {
        scattered_round(&fixture, &seq, history, path, 3, noise);
        scattered_round(&fixture, &seq, history, last_child, 2, noise);
        scattered_round(&fixture, &seq, history, spread, 4, noise);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
}

static void test_b03_branching_at_page_borders(void **state)
{
    (void)state;
    static const int32_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 127, 128};
    static const int32_t page_sizes[] = {16, 64}, path[] = {0, 3, 7};
    double noise = model_noise_of_both("v2lite");
    for (int32_t p = 0; p < 2; p++) {
        struct tv_fixture fixture;
        model_open(&fixture, "v2lite", page_sizes[p], 0, TV_F32);
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            struct tv_cache_seq seq = {0};
            int32_t history[256];
            model_seed(41);
            model_tokens_draw(history, lengths[i], 307);
            (void)tv_fixture_prefill(&fixture, &seq, history, lengths[i], 64);
            scattered_round(&fixture, &seq, history, path, 3, noise);
            tv_cache_seq_finish(fixture.cache, &seq);
        }
        tv_fixture_close(&fixture);
    }
}

/* 200 rounds in which nothing but the root is accepted leave what plain decoding leaves. */
static void test_b09_rejected_drafts_leave_nothing(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    struct tv_cache_seq speculative = {0}, plain = {0};
    struct tree tree;
    static const int32_t root[] = {0};
    model_open(&fixture, "moonlight", 16, 0, TV_F32);
    model_seed(47);
    for (int32_t round = 0; round < 200; round++) {
        tree_draw(&tree, 8, 307);
        const float *logits =
            tv_fixture_verify(&fixture, &speculative, tree.tokens, tree.parents, tree.rows);
        float *first = model_logits_copy(logits, 1, 307);
        tv_fixture_commit(&fixture, &speculative, root, 1);
        logits = tv_fixture_chain(&fixture, &plain, tree.tokens, 1);
        assert_memory_equal(logits, first, 307 * sizeof *logits);
        tv_fixture_commit(&fixture, &plain, NULL, 1);
        free(first);
        assert_int_equal(speculative.page_count, plain.page_count);
    }
    for (int32_t layer = 0; layer < 3; layer++) {
        assert_true(model_layer_difference(&fixture, layer, &speculative, &plain, 200) == 0.0);
    }
    tv_cache_seq_finish(fixture.cache, &speculative);
    tv_cache_seq_finish(fixture.cache, &plain);
    tv_fixture_close(&fixture);
}

/* Near the end of the context: what fits is served, what does not changes nothing. */
static void test_b15_positions_past_the_end(void **state)
{
    (void)state;
    enum { MAX_LEN = 100, LEN = MAX_LEN - 5 };
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    struct tv_cache_shortage shortage;
    int32_t tokens[MAX_LEN], parents[64], depths[64];
    const float *logits = NULL;
    model_open(&fixture, "v3", 16, MAX_LEN, TV_F32);
    model_seed(53);
    model_tokens_draw(tokens, MAX_LEN, 307);
    (void)tv_fixture_prefill(&fixture, &seq, tokens, LEN, 64);
    for (int32_t i = 0; i < 64; i++) {
        parents[i] = i - 1;
        depths[i] = i;
    }
    struct tv_model_item item = {
        .seq = &seq, .tokens = tokens, .parents = parents, .depths = depths};
    static const int32_t rows[] = {4, 5, 6, 64};
    for (size_t i = 0; i < 4; i++) {
        item.rows = rows[i];
        assert_int_equal(tv_cache_reserve(fixture.cache, &seq, rows[i], &shortage), 0);
        assert_int_equal(
            tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits),
            rows[i] <= MAX_LEN - LEN ? 0 : -EINVAL);
        assert_int_equal(
            tv_model_prefill(fixture.model, fixture.cache, &seq, tokens, rows[i], NULL),
            rows[i] <= MAX_LEN - LEN ? 0 : -EINVAL);
        tv_cache_drop(fixture.cache, &seq);
    }
    memset(depths, 0, sizeof depths); /* a star of many nodes at one depth does fit */
    memset(parents, 0, sizeof parents);
    parents[0] = -1;
    for (int32_t i = 1; i < 64; i++) {
        depths[i] = 1;
    }
    assert_int_equal(tv_cache_reserve(fixture.cache, &seq, 64, &shortage), 0);
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits),
                     0);
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
}

static void test_b43_tokens_and_trees_out_of_range(void **state)
{
    (void)state;
    static const int32_t wrong[] = {-1, 307, 200000, INT32_MAX, INT32_MIN};
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    struct tv_cache_shortage shortage;
    int32_t tokens[] = {1, 2, 3}, parents[] = {-1, 0, 1}, depths[] = {0, 1, 2};
    const float *logits = NULL;
    model_open(&fixture, "v3", 16, 0, TV_F32);
    assert_int_equal(tv_cache_reserve(fixture.cache, &seq, 3, &shortage), 0);
    struct tv_model_item item = {
        .seq = &seq, .rows = 3, .tokens = tokens, .parents = parents, .depths = depths};
    for (size_t i = 0; i < 5; i++) {
        tokens[2] = wrong[i];
        assert_int_equal(
            tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits), -EINVAL);
        assert_int_equal(tv_model_prefill(fixture.model, fixture.cache, &seq, tokens, 3, NULL),
                         -EINVAL);
    }
    tokens[2] = 3;
    parents[2] = 2;
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits),
                     -EINVAL);
    parents[2] = 1;
    item.rows = 4; /* more than was reserved */
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits),
                     -EINVAL);
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, &item, 0, NULL, NULL, &logits),
                     -EINVAL);
    item.rows = 3;
    assert_int_equal(tv_model_verify(fixture.model, fixture.cache, &item, 1, NULL, NULL, &logits),
                     0);
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
}

/* The hook sees every layer with what the kernel was given. */
static void hook_count(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    int32_t *next = context;
    assert_int_equal(layer, *next);
    assert_int_equal(attn->node_count[0], 3);
    assert_int_equal(attn->prefix_len[0], 0);
    (*next)++;
}

static void test_hook_sees_every_layer(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    struct tv_cache_shortage shortage;
    int32_t tokens[] = {1, 2, 3}, parents[] = {-1, 0, 0}, depths[] = {0, 1, 1}, layers = 0;
    const float *logits = NULL;
    model_open(&fixture, "v2lite", 16, 0, TV_F32);
    assert_int_equal(tv_cache_reserve(fixture.cache, &seq, 3, &shortage), 0);
    struct tv_model_item item = {
        .seq = &seq, .rows = 3, .tokens = tokens, .parents = parents, .depths = depths};
    assert_int_equal(
        tv_model_verify(fixture.model, fixture.cache, &item, 1, hook_count, &layers, &logits), 0);
    assert_int_equal(layers, 3);
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch_is_bit_identical),
        cmocka_unit_test(test_pages_and_pieces_are_bit_identical),
        cmocka_unit_test(test_prefill_passes_are_longer),
        cmocka_unit_test(test_b01_scattered_acceptance),
        cmocka_unit_test(test_b03_branching_at_page_borders),
        cmocka_unit_test(test_b09_rejected_drafts_leave_nothing),
        cmocka_unit_test(test_b15_positions_past_the_end),
        cmocka_unit_test(test_b43_tokens_and_trees_out_of_range),
        cmocka_unit_test(test_hook_sees_every_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
