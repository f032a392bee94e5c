/*
 * test_verify_walk.c - the acceptance rule on hand-made draws: paths, stop tokens, the length
 * limit.
 *
 * Draws are scripted, so every expectation is worked out by hand; arrays have guard zones.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "verify/rules.h"
#include "verify/walk.h"

#define LEN        100 /* committed before the round */
#define GUARD      16
#define GUARD_NODE (-77777)

/* The token after each node; margins and logprobs are made from the node's index. */
struct script {
    const int32_t *tokens; /* [nodes]; -1 = a row that is not finite */
    const float *margins;  /* [nodes], or NULL: 1 */
    int32_t calls;
    int32_t last_position;
    int rc;
};

static int script_draw(void *context, int32_t node, int32_t position, struct tv_draw *ret_draw)
{
    struct script *script = context;
    script->calls++;
    script->last_position = position;
    if (script->rc != 0) {
        return script->rc;
    }
    *ret_draw = (struct tv_draw){.token = script->tokens[node],
                                 .margin = script->margins != NULL ? script->margins[node] : 1.0f,
                                 .logprob = -0.5f * (float)node,
                                 .kept = 16};
    return 0;
}

static struct tv_round_rule free_rule(void)
{
    return (struct tv_round_rule){.rule = TV_RULE_TARGET_WALK, .max_len = 1 << 20};
}

/* A walk with guard zones around the answer arrays, which have room for exactly depth + 1. */
struct walked {
    int32_t nodes[2 * GUARD + TV_ENGINE_NODES_MAX];
    float logprobs[2 * GUARD + TV_ENGINE_NODES_MAX];
    struct tv_walk_result result;
};

static void walk(const struct tv_tree *tree, const struct tv_round_rule *rule,
                 struct script *script, struct walked *walked)
{
    for (int32_t i = 0; i < 2 * GUARD + tree->depth + 1; i++) {
        walked->nodes[i] = GUARD_NODE;
        walked->logprobs[i] = 7777.0f;
    }
    assert_int_equal(tv_walk_run(tree, LEN, rule, script_draw, script, walked->nodes + GUARD,
                                 walked->logprobs + GUARD, &walked->result),
                     0);
    int32_t count = walked->result.accepted_count;
    assert_in_range(count, 1, tree->depth + 1);
    for (int32_t i = 0; i < 2 * GUARD + tree->depth + 1; i++) {
        if (i < GUARD || i >= GUARD + count) {
            assert_int_equal(walked->nodes[i], GUARD_NODE);
            assert_true(walked->logprobs[i] == 7777.0f);
        }
    }
    assert_int_equal(script->calls, count);
    assert_int_equal(script->last_position, LEN + count);
}

static void expect_path(const struct walked *walked, const int32_t *nodes, int32_t count,
                        int32_t pending, enum tv_finish finish)
{
    assert_int_equal(walked->result.accepted_count, count);
    assert_memory_equal(walked->nodes + GUARD, nodes, (size_t)count * sizeof *nodes);
    assert_int_equal(walked->result.end.token, pending);
    assert_int_equal(walked->result.end.finish, finish);
    for (int32_t i = 0; i < count; i++) {
        assert_true(walked->logprobs[GUARD + i] == -0.5f * (float)nodes[i]);
    }
}

/* B01: the only right child of a star is the last one. */
static void star_last_child_b01(void **state)
{
    (void)state;
    const int32_t tokens[] = {5, 10, 11, 12, 13};
    const int32_t parents[] = {-1, 0, 0, 0, 0};
    const int32_t draws[] = {13, 90, 91, 92, 93};
    struct tv_tree tree;
    struct script script = {.tokens = draws};
    struct tv_round_rule rule = free_rule();
    struct walked walked;
    tv_test_tree(&tree, 5, tokens, parents);
    walk(&tree, &rule, &script, &walked);
    expect_path(&walked, (const int32_t[]){0, 4}, 2, 93, TV_FINISH_NONE);
    tv_tree_finish(&tree);
}

/* B01: a bushy tree whose right path is nodes 0, 3, 7. */
static void bushy_scattered_path_b01(void **state)
{
    (void)state;
    const int32_t tokens[] = {5, 10, 11, 12, 20, 21, 20, 21, 22, 20};
    const int32_t parents[] = {-1, 0, 0, 0, 1, 1, 3, 3, 3, 2};
    const int32_t draws[] = {12, 20, 20, 21, 1, 1, 1, 30, 1, 1};
    const float margins[] = {0.9f, 0.01f, 0.02f, 0.25f, 0.0f, 0.0f, 0.0f, 0.5f, 0.0f, 0.0f};
    struct tv_tree tree;
    struct script script = {.tokens = draws, .margins = margins};
    struct tv_round_rule rule = free_rule();
    struct walked walked;
    tv_test_tree(&tree, 10, tokens, parents);
    walk(&tree, &rule, &script, &walked);
    expect_path(&walked, (const int32_t[]){0, 3, 7}, 3, 30, TV_FINISH_NONE);
    assert_int_equal(walked.result.end.has_margin, 1);
    assert_true(walked.result.end.margin == 0.25f); /* of the path's rows, not of the others */
    tv_tree_finish(&tree);
}

/* B02: (nodes, depth) shapes; the chain part of each is right, guard zones see every write. */
static void shapes_stay_inside_b02(void **state)
{
    (void)state;
    static const int32_t shapes[][2] = {{2, 1}, {64, 1}, {64, 63}, {63, 5}, {128, 3}, {1, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        int32_t count = shapes[s][0], depth = shapes[s][1];
        int32_t tokens[128], parents[128], draws[128];
        for (int32_t i = 0; i < count; i++) {
            /* nodes 0..depth are a chain; the rest hang on it, with tokens nobody draws */
            parents[i] = i <= depth ? i - 1 : i % (depth > 0 ? depth : 1);
            tokens[i] = i <= depth ? i : 1000 + i;
            draws[i] = i < depth ? i + 1 : 7;
        }
        struct tv_tree tree;
        struct script script = {.tokens = draws};
        struct tv_round_rule rule = free_rule();
        struct walked walked;
        tv_test_tree(&tree, count, tokens, parents);
        assert_int_equal(tree.depth, depth);
        walk(&tree, &rule, &script, &walked);
        assert_int_equal(walked.result.accepted_count, depth + 1);
        assert_int_equal(walked.result.end.token, 7);
        tv_tree_finish(&tree);
    }
}

/* B13: accepted path of 6 tokens; what ends it at place 3 of the new tokens. */
static void stop_and_length_b13(void **state)
{
    (void)state;
    const int32_t tokens[] = {50, 51, 52, 53, 54, 55, 56};
    const int32_t draws[] = {51, 52, 53, 54, 55, 56, 57};
    const struct {
        int32_t stop, max_len, new_tokens;
        enum tv_finish finish;
    } cases[] = {
        {-1, 1 << 20, 7, TV_FINISH_NONE},
        {53, 1 << 20, 3, TV_FINISH_STOP},   /* a: a stop token inside the path */
        {-1, LEN + 4, 3, TV_FINISH_LENGTH}, /* b: budget of 3 */
        {53, LEN + 4, 3, TV_FINISH_STOP},   /* c: both at place 3 */
        {57, 1 << 20, 7, TV_FINISH_STOP},   /* d: the pending token is the stop token */
        {57, LEN + 8, 7, TV_FINISH_STOP},   /* d at the limit */
        {-1, LEN + 8, 7, TV_FINISH_LENGTH}, /* the limit reached exactly at the end */
        {-1, LEN + 9, 7, TV_FINISH_NONE},   /* one token of room left */
        {51, LEN + 2, 1, TV_FINISH_STOP},   /* both at once on the first draw */
        {-1, LEN + 2, 1, TV_FINISH_LENGTH},
        {-1, LEN + 1, 1, TV_FINISH_LENGTH}, /* one-shot at the model's limit */
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct tv_tree tree;
        struct script script = {.tokens = draws};
        struct tv_round_rule rule = free_rule();
        struct walked walked;
        rule.max_len = cases[c].max_len;
        if (cases[c].stop >= 0) {
            rule.stop_ids[0] = 9999;
            rule.stop_ids[1] = cases[c].stop;
            rule.stop_count = 2;
        }
        tv_test_tree_chain(&tree, tokens, 7);
        walk(&tree, &rule, &script, &walked);
        int32_t count = cases[c].new_tokens;
        /* new tokens = accepted 1.. and pending, so as many as accepted nodes */
        expect_path(&walked, (const int32_t[]){0, 1, 2, 3, 4, 5, 6}, count, draws[count - 1],
                    cases[c].finish);
        for (int32_t i = 0; i < count; i++) {
            assert_int_not_equal(tokens[walked.nodes[GUARD + i]], cases[c].stop);
        }
        tv_tree_finish(&tree);
    }
}

static void margins_and_single_survivors(void **state)
{
    (void)state;
    const int32_t tokens[] = {50, 51, 52};
    const int32_t draws[] = {51, 52, 53};
    const float none[] = {INFINITY, INFINITY, INFINITY};
    const float one[] = {INFINITY, 0.125f, INFINITY};
    struct tv_tree tree;
    struct script script = {.tokens = draws, .margins = none};
    struct tv_round_rule rule = free_rule();
    struct walked walked;
    tv_test_tree_chain(&tree, tokens, 3);
    walk(&tree, &rule, &script, &walked);
    assert_int_equal(walked.result.end.has_margin, 0);
    script = (struct script){.tokens = draws, .margins = one};
    walk(&tree, &rule, &script, &walked);
    assert_int_equal(walked.result.end.has_margin, 1);
    assert_true(walked.result.end.margin == 0.125f);
    tv_tree_finish(&tree);
}

/* A row that is not finite matters on the path only. */
static void non_finite_rows(void **state)
{
    (void)state;
    const int32_t tokens[] = {50, 51, 52};
    const int32_t parents[] = {-1, 0, 0};
    const int32_t off_path[] = {52, -1, 9};
    const int32_t on_path[] = {51, -1, 9};
    int32_t nodes[2];
    float logprobs[2];
    struct tv_tree tree;
    struct tv_walk_result result = {.accepted_count = 123};
    struct script script = {.tokens = off_path};
    struct tv_round_rule rule = free_rule();
    struct walked walked;
    tv_test_tree(&tree, 3, tokens, parents);
    walk(&tree, &rule, &script, &walked);
    expect_path(&walked, (const int32_t[]){0, 2}, 2, 9, TV_FINISH_NONE);
    script = (struct script){.tokens = on_path};
    assert_int_equal(tv_walk_run(&tree, LEN, &rule, script_draw, &script, nodes, logprobs, &result),
                     -EDOM);
    script = (struct script){.tokens = off_path, .rc = -EIO};
    assert_int_equal(tv_walk_run(&tree, LEN, &rule, script_draw, &script, nodes, logprobs, &result),
                     -EIO);
    assert_int_equal(result.accepted_count, 123); /* untouched on failure */
    tv_tree_finish(&tree);
}

static void greedy_ignores_filters(void **state)
{
    (void)state;
    struct tv_round_rule rule = {
        .rule = TV_RULE_GREEDY,
        .sampling = {.temperature = 0.7f, .top_p = 0.5f, .min_p = 0.1f, .top_k = 3, .seed = 9}};
    struct tv_sampling sampling = tv_walk_sampling(&rule);
    assert_true(sampling.temperature == 0.0f && sampling.top_p == 1.0f && sampling.min_p == 0.0f);
    assert_int_equal(sampling.top_k, 0);
    rule.rule = TV_RULE_TARGET_WALK;
    sampling = tv_walk_sampling(&rule);
    assert_memory_equal(&sampling, &rule.sampling, sizeof sampling);
}

/* How often a walk under these rates ends at each depth of a chain, for so many seeds. */
static void chain_ends(const double *rates, int32_t rate_count, int32_t seeds, int64_t *ret_ends)
{
    static int32_t tokens[] = {7, 1, 2, 3, 4}, parents[] = {-1, 0, 1, 2, 3},
                   depths[] = {0, 1, 2, 3, 4};
    static const int32_t drawn[] = {9, 9, 9, 9, 9};
    const struct tv_tree tree = {
        .count = 5, .depth = 4, .tokens = tokens, .parents = parents, .depths = depths};
    static struct walked walked;
    for (int32_t seed = 0; seed < seeds; seed++) {
        struct tv_round_rule rule = free_rule();
        struct script script = {.tokens = drawn};
        rule.sampling.seed = (uint64_t)seed;
        rule.rates = rates;
        rule.rate_count = rate_count;
        walk(&tree, &rule, &script, &walked);
        assert_int_equal(walked.result.end.token, 9); /* the target's word ends it */
        assert_int_equal(walked.result.end.has_margin, 0);
        ret_ends[walked.result.accepted_count - 1]++;
    }
}

static void synthetic_rates_come_out(void **state)
{
    enum { SEEDS = 20000 };
    static const double rates[] = {0.8, 0.5, 0.25}; /* depth 4 has the last one too */
    static const double chances[] = {0.2, 0.8 * 0.5, 0.4 * 0.75, 0.1 * 0.75, 0.1 * 0.25};
    int64_t ends[5] = {0};
    double chi = 0.0;
    (void)state;
    chain_ends(rates, 3, SEEDS, ends);
    for (int i = 0; i < 5; i++) {
        double expected = chances[i] * SEEDS;
        chi += ((double)ends[i] - expected) * ((double)ends[i] - expected) / expected;
    }
    assert_true(chi < 23.51); /* 4 degrees of freedom: one seed set in 10,000 is above */
    static const double never[] = {0.0}, always[] = {1.0};
    int64_t none[5] = {0}, all[5] = {0};
    chain_ends(never, 1, 100, none);
    chain_ends(always, 1, 100, all);
    assert_int_equal(none[0], 100);
    assert_int_equal(all[4], 100);
}

/* The first child or none; the coin is the position's, whatever hangs there and whatever the rule;
 * a stop token ends the path as ever. */
static void synthetic_coin_is_the_positions(void **state)
{
    static int32_t tokens[] = {7, 5, 6, 8, 3}, parents[] = {-1, 0, 0, 2, 1},
                   depths[] = {0, 1, 1, 2, 2};
    static const int32_t drawn[] = {6, 6, 6, 6, 6};
    static const double half[] = {0.5}, always[] = {1.0};
    const struct tv_tree tree = {
        .count = 5, .depth = 2, .tokens = tokens, .parents = parents, .depths = depths};
    const struct tv_tree one = {
        .count = 2, .depth = 1, .tokens = tokens, .parents = parents, .depths = depths};
    static struct walked walked;
    int32_t first = 0;
    (void)state;
    for (uint64_t seed = 0; seed < 64; seed++) {
        struct tv_round_rule rule = free_rule();
        struct script script = {.tokens = drawn}, again = {.tokens = drawn};
        rule.sampling.seed = seed;
        rule.rates = half;
        rule.rate_count = 1;
        rule.rule = seed % 2 == 0 ? TV_RULE_TARGET_WALK : TV_RULE_RATIO_WOR;
        rule.sampling.temperature = 1.0f;
        assert_int_equal(tv_rules_apply(&rule), 0);
        walk(&tree, &rule, &script, &walked);
        int32_t count = walked.result.accepted_count;
        if (count > 1) { /* never node 2, although the target drew its token */
            assert_int_equal(walked.nodes[GUARD + 1], 1);
        } else {
            assert_int_equal(walked.result.end.token, 6);
        }
        first += count > 1;
        walk(&one, &rule, &again, &walked);
        assert_int_equal(walked.result.accepted_count > 1, count > 1);
    }
    assert_in_range(first, 16, 48);
    struct tv_round_rule rule = free_rule();
    struct script script = {.tokens = drawn};
    rule.rates = always;
    rule.rate_count = 1;
    rule.stop_ids[0] = 3;
    rule.stop_count = 1;
    walk(&tree, &rule, &script, &walked);
    assert_int_equal(walked.result.accepted_count, 2);
    assert_int_equal(walked.result.end.token, 3);
    assert_int_equal(walked.result.end.finish, TV_FINISH_STOP);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(star_last_child_b01),
        cmocka_unit_test(bushy_scattered_path_b01),
        cmocka_unit_test(shapes_stay_inside_b02),
        cmocka_unit_test(stop_and_length_b13),
        cmocka_unit_test(margins_and_single_survivors),
        cmocka_unit_test(non_finite_rows),
        cmocka_unit_test(greedy_ignores_filters),
        cmocka_unit_test(synthetic_rates_come_out),
        cmocka_unit_test(synthetic_coin_is_the_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
