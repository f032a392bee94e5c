/*
 * test_model_refs.c - the forward pass against third-party logits.
 *
 * Every bundled checkpoint, as a causal sequence and as trees, over page sizes and prefill pieces,
 * always on a poisoned pool: a row that reads what it must not becomes NaN.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model_fixture.h"

static const char *const checkpoints[] = {"v2lite", "v3", "moonlight", "kjv-mla-8m"};
#define CHECKPOINTS (sizeof checkpoints / sizeof checkpoints[0])

#define CHAIN_ROWS 96

/* The reference sequence of a checkpoint. */
struct sequence {
    int32_t *tokens, count;
    float *logits;
    int64_t width;
    double bound;
};

static void sequence_read(const char *dir, struct sequence *sequence)
{
    int64_t floats = 0;
    sequence->tokens = tv_refs_ints(dir, "seq_tokens", &sequence->count);
    sequence->logits = tv_refs_floats(dir, "seq_logits", &floats);
    assert_non_null(sequence->tokens);
    assert_non_null(sequence->logits);
    sequence->width = floats / sequence->count;
    sequence->bound = tv_fixture_bound(sequence->logits, floats);
}

static void sequence_free(struct sequence *sequence)
{
    free(sequence->tokens);
    free(sequence->logits);
}

static void fixture_open(struct tv_fixture *fixture, const char *backend, const char *dir,
                         int32_t page_size)
{
    struct tv_fixture_options options = {.backend = backend,
                                         .dir = dir,
                                         .page_size = page_size,
                                         .rows_max = 512,
                                         .requests_max = 4,
                                         .pages = 2048 / page_size};
    tv_fixture_open(fixture, &options);
}

static void result_check(const char *what, const char *name, const char *backend, int32_t page_size,
                         int32_t piece, const struct tv_fixture_difference *difference,
                         double bound)
{
    print_message("%s %s %s page=%d piece=%d max_abs=%.2e bound=%.1e\n", what, name, backend,
                  page_size, piece, difference->max_abs, bound);
    assert_int_equal(difference->argmax_wrong, 0);
    assert_true(difference->max_abs <= bound);
}

/* Prefill up to `limit` tokens; the logits at the end of each piece are compared. */
static void sequence_prefill(const char *name, const char *backend, int32_t page_size,
                             int32_t piece, int32_t limit)
{
    struct tv_fixture fixture;
    struct sequence sequence;
    struct tv_fixture_difference difference = {0};
    struct tv_cache_seq seq = {0};
    const char *dir = tv_fixture_dir(name);
    sequence_read(dir, &sequence);
    fixture_open(&fixture, backend, dir, page_size);
    int32_t count = sequence.count < limit ? sequence.count : limit;
    for (int32_t at = 0; at < count; at += piece) {
        int32_t rows = count - at < piece ? count - at : piece;
        const float *logits = tv_fixture_prefill(&fixture, &seq, sequence.tokens + at, rows, rows);
        tv_fixture_compare(logits, sequence.logits + (at + rows - 1) * sequence.width, 1,
                           sequence.width, &difference);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
    result_check("prefill", name, backend, page_size, piece, &difference, sequence.bound);
    sequence_free(&sequence);
}

/* The sequence as committed chains of `rows` nodes, every row's logits compared. */
static void sequence_chains(const char *name, const char *backend, int32_t page_size, int32_t rows,
                            int32_t limit)
{
    struct tv_fixture fixture;
    struct sequence sequence;
    struct tv_fixture_difference difference = {0};
    struct tv_cache_seq seq = {0};
    const char *dir = tv_fixture_dir(name);
    sequence_read(dir, &sequence);
    fixture_open(&fixture, backend, dir, page_size);
    int32_t count = sequence.count < limit ? sequence.count : limit;
    for (int32_t at = 0; at < count; at += rows) {
        int32_t part = count - at < rows ? count - at : rows;
        const float *logits = tv_fixture_chain(&fixture, &seq, sequence.tokens + at, part);
        tv_fixture_compare(logits, sequence.logits + at * sequence.width, part, sequence.width,
                           &difference);
        tv_fixture_commit(&fixture, &seq, NULL, part);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
    result_check("chains", name, backend, page_size, rows, &difference, sequence.bound);
    sequence_free(&sequence);
}

/* One reference tree after a prefix that was prefilled in pieces. Returns 0 when there is none. */
static int tree_check(struct tv_fixture *fixture, const char *dir, const char *kind,
                      struct tv_cache_seq *seq, struct tv_fixture_difference *difference,
                      double *ret_bound)
{
    char name[64];
    int32_t count = 0, parent_count = 0;
    int64_t floats = 0;
    (void)snprintf(name, sizeof name, "tree_%s_tokens", kind);
    int32_t *tokens = tv_refs_ints(dir, name, &count);
    if (tokens == NULL) {
        return 0;
    }
    (void)snprintf(name, sizeof name, "tree_%s_parents", kind);
    int32_t *parents = tv_refs_ints(dir, name, &parent_count);
    (void)snprintf(name, sizeof name, "tree_%s_logits", kind);
    float *want = tv_refs_floats(dir, name, &floats);
    assert_non_null(parents);
    assert_non_null(want);
    assert_int_equal(count, parent_count);
    const float *logits = tv_fixture_verify(fixture, seq, tokens, parents, count);
    tv_fixture_compare(logits, want, count, floats / count, difference);
    *ret_bound = tv_fixture_bound(want, floats);
    tv_cache_drop(fixture->cache, seq);
    free(tokens);
    free(parents);
    free(want);
    return 1;
}

static void trees(const char *name, const char *backend, int32_t page_size, int32_t piece)
{
    static const char *const kinds[] = {"random", "chain", "star"};
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    int32_t prefix_count = 0;
    char dir[512];
    (void)snprintf(dir, sizeof dir, "%s", tv_fixture_dir(name));
    int32_t *prefix = tv_refs_ints(dir, "tree_prefix", &prefix_count);
    if (prefix == NULL) {
        return; /* this checkpoint's references have no trees */
    }
    fixture_open(&fixture, backend, dir, page_size);
    (void)tv_fixture_prefill(&fixture, &seq, prefix, prefix_count, piece);
    for (size_t i = 0; i < 3; i++) {
        struct tv_fixture_difference difference = {0};
        double bound = 0.0;
        assert_int_equal(tree_check(&fixture, dir, kinds[i], &seq, &difference, &bound), 1);
        result_check(kinds[i], name, backend, page_size, piece, &difference, bound);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
    free(prefix);
}

static const int32_t page_sizes[] = {16, 64, 128};
static const int32_t pieces[] = {512, 1, 7, 64, 65};

/* Page sizes to go through: below TV_TEST_SCALE 1 (sanitizer builds) the smallest only. */
static size_t page_sizes_count(void)
{
    const char *text = getenv("TV_TEST_SCALE");
    return text != NULL && strtod(text, NULL) < 1.0 ? 1 : 3;
}

/* Pieces likewise: whole prompts, and 65 tokens at a time. */
static size_t pieces_step(void)
{
    return page_sizes_count() == 1 ? 4 : 1;
}

static void test_cpu_prefill(void **state)
{
    (void)state;
    for (size_t c = 0; c < CHECKPOINTS; c++) {
        for (size_t p = 0; p < 5; p += pieces_step()) {
            for (size_t s = 0; s < page_sizes_count(); s++) {
                sequence_prefill(checkpoints[c], "cpu", page_sizes[s], pieces[p], INT32_MAX);
            }
        }
    }
}

static void test_cpu_chains(void **state)
{
    (void)state;
    for (size_t c = 0; c < CHECKPOINTS; c++) {
        for (size_t s = 0; s < page_sizes_count(); s++) {
            sequence_chains(checkpoints[c], "cpu", page_sizes[s], CHAIN_ROWS, INT32_MAX);
        }
    }
}

static void test_cpu_trees(void **state)
{
    (void)state;
    for (size_t c = 0; c < CHECKPOINTS; c++) {
        for (size_t p = 0; p < 5; p += pieces_step()) {
            for (size_t s = 0; s < page_sizes_count(); s++) {
                trees(checkpoints[c], "cpu", page_sizes[s], pieces[p]);
            }
        }
    }
}

/* The scalar backend is slow: a share of the same. */
static void test_ref_subset(void **state)
{
    (void)state;
    for (size_t c = 0; c < CHECKPOINTS; c++) {
        sequence_prefill(checkpoints[c], "ref", 64, 65, 100);
        sequence_chains(checkpoints[c], "ref", 16, 33, 66);
    }
    trees("v3", "ref", 16, 64);
    trees("v2lite", "ref", 64, 512);
}

/* Greedy decoding, one token a pass, gives the text the library gave. */
static void test_kjv_greedy(void **state)
{
    (void)state;
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    int32_t prompt_count = 0, count = 0;
    char dir[512];
    (void)snprintf(dir, sizeof dir, "%s", tv_fixture_dir("kjv-mla-8m"));
    int32_t *prompt = tv_refs_ints(dir, "greedy_prompt", &prompt_count);
    int32_t *want = tv_refs_ints(dir, "greedy_tokens", &count);
    assert_non_null(prompt);
    assert_non_null(want);
    fixture_open(&fixture, "cpu", dir, 64);
    int32_t vocab = tv_model_config(fixture.model)->vocab;
    const float *logits = tv_fixture_prefill(&fixture, &seq, prompt, prompt_count, 512);
    for (int32_t i = 0; i < count; i++) {
        int32_t best = 0;
        for (int32_t t = 1; t < vocab; t++) {
            best = logits[t] > logits[best] ? t : best;
        }
        assert_int_equal(best, want[i]);
        logits = tv_fixture_chain(&fixture, &seq, &best, 1);
        tv_fixture_commit(&fixture, &seq, NULL, 1);
    }
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
    free(prompt);
    free(want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cpu_trees),   cmocka_unit_test(test_cpu_chains),
        cmocka_unit_test(test_cpu_prefill), cmocka_unit_test(test_kjv_greedy),
        cmocka_unit_test(test_ref_subset),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
