/*
 * test_verify_trees.c - random trees: every node's logits are those of its path as plain text.
 *
 * Bit for bit against the path verified as a chain, which is the same kernels without branches;
 * within a bound against the path in the expanded form, which is other arithmetic. Siblings and
 * the order of the nodes change no bit, so they never change what is accepted. Prefix lengths lie
 * around page borders; the pool is poisoned.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "verify/engine.h"

#define NODES_MAX 24

/* Absorbed against expanded form in f32: a fifth of the bound against third-party logits, so 1e-4
 * at the usual spread. Over these 1,000 trees the two were at most 4.2e-5 apart. */
#define PATH_BOUND_SHARE 0.2

static const int32_t prefix_lens[] = {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65};
#define PREFIX_LENS (sizeof prefix_lens / sizeof prefix_lens[0])

static double worst_difference(const float *a, const float *b, int32_t count)
{
    double worst = 0.0;
    for (int32_t i = 0; i < count; i++) {
        double delta = fabs((double)a[i] - (double)b[i]);
        worst = delta > worst || isnan(delta) ? delta : worst;
    }
    return worst;
}

/* Every node's path behind the same prefix: as a chain its bits are the node's, and the return
 * value is the largest difference to the expanded form. */
static double paths_against(struct tv_engine_fixture *fixture, struct tv_context *context,
                            const struct tv_tree *tree, const float *logits)
{
    struct tv_engine *engine = fixture->engine;
    int32_t len = engine->ops->context_len(context);
    double worst = 0.0;
    for (int32_t node = 0; node < tree->count; node++) {
        int32_t path[NODES_MAX];
        int32_t depth = tree->depths[node];
        for (int32_t i = node, at = depth; i >= 0; i = tree->parents[i], at--) {
            path[at] = tree->tokens[i];
        }
        int32_t rows = depth + 1;
        const float *want = logits + (size_t)node * (size_t)engine->vocab;
        const float *chain = tv_fixture_chain(&fixture->base, &context->seq, path, rows);
        assert_memory_equal(chain + (size_t)depth * (size_t)engine->vocab, want,
                            (size_t)engine->vocab * sizeof *want);
        tv_cache_drop(fixture->base.cache, &context->seq);
        const float *row = tv_fixture_prefill(&fixture->base, &context->seq, path, rows, rows);
        double delta = worst_difference(row, want, engine->vocab);
        worst = delta > worst || isnan(delta) ? delta : worst;
        assert_int_equal(engine->ops->truncate(engine, context, len), 0);
    }
    return worst;
}

/* The same tree in another topological order; to[old] = new. */
static void tree_reorder(const struct tv_tree *tree, struct tv_test_random *random,
                         struct tv_tree *ret_tree, int32_t *to)
{
    int32_t tokens[NODES_MAX], parents[NODES_MAX], placed = 0;
    for (int32_t i = 0; i < tree->count; i++) {
        to[i] = -1;
    }
    while (placed < tree->count) {
        int32_t ready[NODES_MAX], count = 0;
        for (int32_t i = 0; i < tree->count; i++) {
            if (to[i] < 0 && (i == 0 || to[tree->parents[i]] >= 0)) {
                ready[count++] = i;
            }
        }
        int32_t node = ready[tv_test_random_below(random, count)];
        tokens[placed] = tree->tokens[node];
        parents[placed] = node == 0 ? -1 : to[tree->parents[node]];
        to[node] = placed++;
    }
    tv_test_tree(ret_tree, placed, tokens, parents);
}

/* The tree with one more leaf at a random node; the token is new among its siblings. */
static void tree_grow(const struct tv_tree *tree, int32_t vocab, struct tv_test_random *random,
                      struct tv_tree *ret_tree)
{
    int32_t tokens[NODES_MAX + 1], parents[NODES_MAX + 1];
    memcpy(tokens, tree->tokens, (size_t)tree->count * sizeof *tokens);
    memcpy(parents, tree->parents, (size_t)tree->count * sizeof *parents);
    int32_t parent = tv_test_random_below(random, tree->count);
    int32_t token;
    do {
        token = tv_test_random_below(random, vocab);
    } while (tv_tree_child(tree, parent, token) >= 0);
    tokens[tree->count] = token;
    parents[tree->count] = parent;
    tv_test_tree(ret_tree, tree->count + 1, tokens, parents);
}

struct outcome {
    int32_t accepted_count, pending;
    int32_t nodes[NODES_MAX];
    float *logits; /* [nodes, vocab] */
};

static void outcome_take(struct tv_engine *engine, struct tv_context *context,
                         const struct tv_tree *tree, const struct tv_round_rule *rule,
                         struct outcome *outcome)
{
    struct tv_round_out out;
    tv_test_verify(engine, context, tree, rule, 0, &out);
    size_t bytes = (size_t)tree->count * (size_t)engine->vocab * sizeof(float);
    outcome->accepted_count = out.accepted_count;
    outcome->pending = out.end.token;
    assert_in_range(out.accepted_count, 1, tree->depth + 1);
    memcpy(outcome->nodes, out.nodes, (size_t)out.accepted_count * sizeof *out.nodes);
    outcome->logits = malloc(bytes);
    assert_non_null(outcome->logits);
    memcpy(outcome->logits, out.logits, bytes);
}

/* Plants the target's own continuation into some nodes, so that paths get accepted. */
static void tree_right(struct tv_engine *engine, struct tv_context *context, struct tv_tree *tree,
                       const struct tv_round_rule *rule, struct tv_test_random *random)
{
    int32_t node = 0;
    for (;;) {
        struct outcome outcome;
        int32_t children[NODES_MAX], count = 0;
        outcome_take(engine, context, tree, rule, &outcome);
        free(outcome.logits);
        node = outcome.nodes[outcome.accepted_count - 1];
        for (int32_t i = node + 1; i < tree->count; i++) {
            if (tree->parents[i] == node) {
                children[count++] = i;
            }
        }
        if (count == 0 || tv_test_random_below(random, 4) == 0) {
            return;
        }
        tree->tokens[children[tv_test_random_below(random, count)]] = outcome.pending;
    }
}

static void tree_case(struct tv_engine_fixture *fixture, struct tv_test_random *random,
                      double bound, double *worst_path)
{
    struct tv_engine *engine = fixture->engine;
    struct tv_context *context = tv_test_context(engine);
    int32_t prefix[65], to[NODES_MAX];
    int32_t prefix_len = prefix_lens[tv_test_random_below(random, (int32_t)PREFIX_LENS)];
    struct tv_round_rule rule = tv_test_random_below(random, 2) == 0
                                    ? tv_test_greedy(engine)
                                    : tv_test_sampled(engine, 0.8f, tv_test_random_next(random));
    struct tv_tree tree, reordered, grown;
    struct outcome first, second, third;
    for (int32_t i = 0; i < prefix_len; i++) {
        prefix[i] = tv_test_random_below(random, engine->vocab);
    }
    (void)tv_test_prefill(engine, context, prefix, prefix_len, NULL);
    tv_test_tree_random(&tree, 1 + tv_test_random_below(random, NODES_MAX - 1), engine->vocab,
                        tv_test_random_below(random, engine->vocab), random);
    tree_right(engine, context, &tree, &rule, random);
    outcome_take(engine, context, &tree, &rule, &first);

    double path = paths_against(fixture, context, &tree, first.logits);
    *worst_path = fmax(*worst_path, path);
    assert_true(path <= bound);

    tree_reorder(&tree, random, &reordered, to);
    outcome_take(engine, context, &reordered, &rule, &second);
    size_t row_bytes = (size_t)engine->vocab * sizeof(float);
    for (int32_t i = 0; i < tree.count; i++) {
        assert_memory_equal(second.logits + (size_t)to[i] * (size_t)engine->vocab,
                            first.logits + (size_t)i * (size_t)engine->vocab, row_bytes);
    }
    assert_int_equal(first.accepted_count, second.accepted_count);
    assert_int_equal(first.pending, second.pending);
    for (int32_t i = 0; i < first.accepted_count; i++) {
        assert_int_equal(to[first.nodes[i]], second.nodes[i]);
    }

    tree_grow(&tree, engine->vocab, random, &grown);
    outcome_take(engine, context, &grown, &rule, &third);
    assert_memory_equal(third.logits, first.logits, (size_t)tree.count * row_bytes);
    assert_true(third.accepted_count >= first.accepted_count);
    assert_memory_equal(third.nodes, first.nodes,
                        (size_t)first.accepted_count * sizeof *first.nodes);
    free(first.logits);
    free(second.logits);
    free(third.logits);
    tv_tree_finish(&tree);
    tv_tree_finish(&reordered);
    tv_tree_finish(&grown);
    engine->ops->context_close(engine, context);
}

static void trees_run(const char *model, int32_t page_size, int32_t count, uint64_t seed)
{
    struct tv_engine_fixture fixture;
    struct tv_test_random random = {.state = seed};
    struct tv_engine_fixture_options options = {.model = model, .page_size = page_size};
    double worst_path = 0.0;
    int64_t floats = 0;
    float *refs = tv_refs_floats(tv_fixture_dir(model), "seq_logits", &floats);
    assert_non_null(refs);
    double bound = tv_fixture_bound(refs, floats) * PATH_BOUND_SHARE;
    free(refs);
    tv_engine_fixture_open(&fixture, &options);
    for (int32_t i = 0; i < count; i++) {
        tree_case(&fixture, &random, bound, &worst_path);
    }
    print_message(
        "%s page %d: %d trees, seed %llu: expanded form within %.2e, noise %.2e, bound %.1e\n",
        model, page_size, count, (unsigned long long)seed, worst_path, fixture.engine->noise,
        bound);
    tv_engine_fixture_close(&fixture);
}

static void random_trees_equal_their_paths_b05_b07(void **state)
{
    (void)state;
    trees_run("v3", 16, tv_test_scaled(400), 1);
    trees_run("v2lite", 16, tv_test_scaled(200), 2);
    trees_run("moonlight", 32, tv_test_scaled(200), 3);
    trees_run("v3", 64, tv_test_scaled(200), 4);
}

/* Node counts around the words of a mask, up to what the engine takes; every node is checked. */
static void node_counts_equal_their_paths_b05(void **state)
{
    (void)state;
    static const int32_t counts[PREFIX_LENS] = {
        1, 2, 31, 32, 33, 63, 64, 65, 127, 128, TV_TREE_NODES_MAX};
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {
        .model = "v3", .page_size = 16, .rows_max = TV_TREE_NODES_MAX, .pages = 256};
    struct tv_test_random random = {.state = 5};
    int32_t prefix[65];
    int64_t floats = 0, checked = 0;
    double worst = 0.0;
    float *refs = tv_refs_floats(tv_fixture_dir("v3"), "seq_logits", &floats);
    assert_non_null(refs);
    double bound = tv_fixture_bound(refs, floats);
    free(refs);
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    tv_test_prefix_fill(prefix, 65, engine->vocab, 9);
    size_t sizes = tv_test_scaled(100) < 100 ? PREFIX_LENS - 1 : PREFIX_LENS; /* slow: the last */
    for (size_t c = 0; c < sizes; c++) {
        struct tv_context *context = tv_test_context(engine);
        struct tv_round_out out;
        struct tv_tree tree;
        (void)tv_test_prefill(engine, context, prefix, prefix_lens[c], NULL);
        do { /* paths of at most NODES_MAX nodes */
            tv_test_tree_random(&tree, counts[c], engine->vocab, 3, &random);
        } while (tree.depth >= NODES_MAX && (tv_tree_finish(&tree), 1));
        tv_test_verify(engine, context, &tree, &rule, 0, &out);
        size_t bytes = (size_t)tree.count * (size_t)engine->vocab * sizeof(float);
        float *logits = malloc(bytes);
        assert_non_null(logits);
        memcpy(logits, out.logits, bytes);
        worst = fmax(worst, paths_against(&fixture, context, &tree, logits));
        assert_true(worst <= bound);
        checked += tree.count;
        free(logits);
        tv_tree_finish(&tree);
        engine->ops->context_close(engine, context);
    }
    print_message("%lld nodes: path %.2e, bound %.1e\n", (long long)checked, worst, bound);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(node_counts_equal_their_paths_b05),
        cmocka_unit_test(random_trees_equal_their_paths_b05_b07),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
