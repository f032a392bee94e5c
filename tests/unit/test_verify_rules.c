/*
 * test_verify_rules.c - rules that claim to be lossless, judged by chi-square on hand-made rows of
 * 16 tokens; ratio_wor and typical on single decisions.
 *
 * Seeds are fixed, so the statistics are the same in every run and nothing here can be flaky. A
 * statistic may reach the value that chance exceeds with p = 8.5e-6 (z = 4.3): 0.001 divided among
 * the about 100 statistics of this file (Bonferroni). Cells with a mean below 5 are pooled.
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
#include "verify/rules.h"

#define VOCAB    16
#define DRAWS    100000
#define Z        4.3
#define NODES    12
#define POSITION 500

/* The row after a token is one of these four. */
static const float rows[4][VOCAB] = {
    {2.0f, 1.5f, 1.0f, 0.5f, 0.0f, -0.5f, -1.0f, -1.5f, 1.2f, 0.3f, 0.1f, -0.2f, -0.7f, 0.8f, 0.6f,
     -2.0f},
    {0.0f, 2.0f, 0.3f, 0.1f, 1.0f, 0.5f, -0.5f, -1.0f, 0.2f, 0.4f, 1.1f, -1.2f, 0.7f, -0.3f, 0.9f,
     -1.5f},
    {-3.0f, 0.2f, 3.0f, 0.1f, 1.0f, -2.5f, 0.5f, 1.0f, 2.2f, 0.4f, -1.1f, 1.2f, 0.7f, 0.3f, -0.9f,
     1.5f},
    {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.5f, 0.5f, 0.5f, 0.5f, -0.5f, -0.5f, -0.5f,
     -0.5f},
};

/* One round: the tree, its draft, and the arrays of the walk. */
struct bench {
    struct tv_tree tree;
    int32_t tokens[NODES], parents[NODES], depths[NODES];
    float probs[NODES * VOCAB];
    struct tv_round_rule rule;
    uint64_t keys[VOCAB];
    int32_t ids[VOCAB];
    double target[VOCAB], p[VOCAB], left[VOCAB], draft[VOCAB];
    int64_t row_count, step_count;
};

static int bench_row(void *context, int32_t node, struct tv_rules_target *ret_target)
{
    struct bench *bench = context;
    bench->row_count++;
    ret_target->ids = bench->ids;
    ret_target->probs = bench->target;
    return tv_kernels_target(rows[bench->tree.tokens[node] % 4], VOCAB, &bench->rule.sampling,
                             bench->keys, bench->ids, bench->target, &ret_target->count);
}

static void bench_step(void *context)
{
    struct bench *bench = context;
    bench->step_count++;
}

/* The target draw, of the same survivors, by the contract's formula. */
static int bench_draw(void *context, int32_t node, int32_t position, struct tv_draw *ret_draw)
{
    struct bench *bench = context;
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    static struct tv_kernels *kernels;
    uint64_t workspace[VOCAB];
    if (kernels == NULL) {
        assert_int_equal(tv_kernels_create("ref", &options, &kernels), 0);
    }
    const struct tv_draw_args args = {.rows = 1,
                                      .vocab = VOCAB,
                                      .logits = rows[bench->tree.tokens[node] % 4],
                                      .positions = &position,
                                      .sampling = &bench->rule.sampling,
                                      .draws = ret_draw,
                                      .workspace = workspace,
                                      .workspace_bytes = sizeof workspace};
    return kernels->draw(kernels, &args);
}

static int32_t walk(struct bench *bench, int32_t *nodes, struct tv_walk_result *result)
{
    float logprobs[NODES];
    const struct tv_rules_source source = {.context = bench,
                                           .draw = bench_draw,
                                           .row = bench_row,
                                           .step = bench_step,
                                           .target = bench->p,
                                           .left = bench->left,
                                           .draft = bench->draft};
    int rc = tv_rules_apply(&bench->rule) ? tv_rules_run(&bench->tree, POSITION - 1, &bench->rule,
                                                         &source, nodes, logprobs, result)
                                          : tv_walk_run(&bench->tree, POSITION - 1, &bench->rule,
                                                        bench_draw, bench, nodes, logprobs, result);
    assert_int_equal(rc, 0);
    /* every row counts as progress, and so does a child of each */
    assert_true(bench->step_count >= 2 * bench->row_count);
    for (int32_t t = 0; t < VOCAB; t++) {
        assert_true(bench->p[t] == 0.0 && bench->left[t] == 0.0 && bench->draft[t] == 0.0);
    }
    return result->accepted_count;
}

/* The filtered target after a token, dense. */
static void target_of(struct bench *bench, int32_t token, double *ret)
{
    int32_t count = 0;
    assert_int_equal(tv_kernels_target(rows[token % 4], VOCAB, &bench->rule.sampling, bench->keys,
                                       bench->ids, bench->target, &count),
                     0);
    memset(ret, 0, VOCAB * sizeof *ret);
    for (int32_t i = 0; i < count; i++) {
        ret[bench->ids[i]] = bench->target[i];
    }
}

enum kind { Q_TARGET, Q_NEAR, Q_FLAT, Q_UNLIKELY, Q_ALL, KINDS };

/* What the drafter draws a node's children from. */
static void draft_of(struct bench *bench, int32_t token, enum kind kind, double *ret)
{
    double p[VOCAB], sum = 0.0, low = 1.0;
    target_of(bench, token, p);
    for (int32_t t = 0; t < VOCAB; t++) {
        low = fmin(low, p[t] > 0.0 ? p[t] : 1.0);
    }
    for (int32_t t = 0; t < VOCAB; t++) {
        double skew = (double)((5 * t + token) % VOCAB + 1) / VOCAB;
        ret[t] = kind == Q_TARGET     ? p[t]
                 : kind == Q_NEAR     ? 0.7 * p[t] + 0.02 * skew
                 : kind == Q_UNLIKELY ? (p[t] <= 2.5 * low ? skew : 0.0)
                                      : skew;
        sum += ret[t];
    }
    for (int32_t t = 0; t < VOCAB; t++) {
        ret[t] /= sum;
    }
}

static double uniform(struct tv_test_random *random)
{
    return ((double)tv_test_random_next(random) + 0.5) / 4294967296.0;
}

/* A child of `node`, drawn from what q has left; 0: q has nothing. */
static int child_add(struct bench *bench, int32_t node, double *q, struct tv_test_random *random)
{
    double sum = 0.0, at;
    int32_t token = -1, n = bench->tree.count;
    for (int32_t t = 0; t < VOCAB; t++) {
        sum += q[t];
    }
    if (!(sum > 1e-12) || n == NODES) {
        return 0;
    }
    at = uniform(random) * sum;
    for (int32_t t = 0; t < VOCAB; t++) {
        if (q[t] > 0.0 && (token < 0 || at > 0.0)) {
            token = t;
        }
        at -= q[t];
    }
    q[token] = 0.0;
    bench->tokens[n] = token;
    bench->parents[n] = node;
    bench->depths[n] = bench->depths[node] + 1;
    bench->tree.depth = bench->depths[n] > bench->tree.depth ? bench->depths[n] : bench->tree.depth;
    bench->tree.count++;
    return 1;
}

struct shape {
    const char *name;
    int32_t width[3]; /* children of a node at each depth, at most */
    int random;
};
static const struct shape shapes[] = {
    {"chain", {1, 1, 1}, 0}, {"star", {6, 0, 0}, 0}, {"random", {3, 2, 0}, 1}};

static void tree_grow(struct bench *bench, const struct shape *shape, enum kind kind, int lies,
                      struct tv_test_random *random)
{
    bench->tree = (struct tv_tree){.count = 1,
                                   .tokens = bench->tokens,
                                   .parents = bench->parents,
                                   .depths = bench->depths,
                                   .draft = {.width = VOCAB, .probs = bench->probs}};
    bench->tokens[0] = 0;
    bench->parents[0] = -1;
    bench->depths[0] = 0;
    for (int32_t node = 0; node < bench->tree.count; node++) {
        double q[VOCAB];
        int32_t depth = bench->depths[node];
        int32_t width = kind == Q_ALL && depth == 0 ? VOCAB : depth < 3 ? shape->width[depth] : 0;
        if (shape->random && width > 0) {
            width = tv_test_random_below(random, width + 1);
        }
        draft_of(bench, bench->tokens[node], kind, q);
        for (int32_t t = 0; t < VOCAB; t++) {
            bench->probs[node * VOCAB + t] = (float)q[t];
        }
        if (lies) { /* draws from something else than it says */
            for (int32_t t = 0; t < VOCAB; t++) {
                q[t] = q[t] > 0.0 ? q[t] * q[t] : 0.0;
            }
        }
        for (int32_t c = 0; c < width && child_add(bench, node, q, random); c++) {
        }
    }
}

struct tally {
    int64_t first[VOCAB], second[4][VOCAB], firsts, seconds[4], accepted;
};

static void tally_fill(struct bench *bench, const struct shape *shape, enum kind kind, int lies,
                       int32_t draws, struct tally *tally)
{
    struct tv_test_random random = {.state = 7 + (uint64_t)kind};
    memset(tally, 0, sizeof *tally);
    for (int32_t i = 0; i < draws; i++) {
        int32_t nodes[NODES];
        struct tv_walk_result result = {0};
        tree_grow(bench, shape, kind, lies, &random);
        bench->rule.sampling.seed = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(i + 1);
        int32_t count = walk(bench, nodes, &result);
        int32_t token[2] = {result.end.token, -1};
        if (count > 1) {
            token[0] = bench->tokens[nodes[1]];
            token[1] = count > 2 ? bench->tokens[nodes[2]] : result.end.token;
            tally->second[token[0] % 4][token[1]]++;
            tally->seconds[token[0] % 4]++;
        }
        tally->first[token[0]]++;
        tally->firsts++;
        tally->accepted += count - 1;
    }
}

/* The statistic over the value that it may reach; cells of the target alone. */
static double excess(const int64_t *counts, const double *p, int64_t total)
{
    double sum = 0.0, pooled_mean = 0.0, pooled = 0.0;
    int32_t cells = 0;
    for (int32_t t = 0; t < VOCAB; t++) {
        double mean = p[t] * (double)total, apart = (double)counts[t] - mean;
        if (p[t] == 0.0 && counts[t] != 0) {
            return INFINITY; /* what the filters removed was drawn */
        }
        if (mean >= 5.0) {
            sum += apart * apart / mean;
            cells++;
        } else {
            pooled_mean += mean;
            pooled += (double)counts[t];
        }
    }
    if (pooled_mean >= 5.0) {
        sum += (pooled - pooled_mean) * (pooled - pooled_mean) / pooled_mean;
        cells++;
    }
    if (cells < 2) {
        return 0.0;
    }
    double freedom = (double)(cells - 1), part = 2.0 / (9.0 * freedom); /* Wilson and Hilferty */
    return sum / (freedom * pow(1.0 - part + Z * sqrt(part), 3.0));
}

static double tally_excess(struct bench *bench, const struct tally *tally)
{
    double p[VOCAB];
    target_of(bench, 0, p);
    double worst = excess(tally->first, p, tally->firsts);
    for (int32_t c = 0; c < 4; c++) {
        if (tally->seconds[c] > 0) {
            target_of(bench, c, p);
            worst = fmax(worst, excess(tally->second[c], p, tally->seconds[c]));
        }
    }
    return worst;
}

static const struct tv_sampling settings[] = {
    {.temperature = 1.0f, .top_p = 1.0f},
    {.temperature = 0.7f, .top_p = 0.9f, .min_p = 0.03f, .top_k = 10},
};

static void chi_square_of(enum tv_rule rule)
{
    static struct bench bench;
    struct tally tally;
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        for (int kind = 0; kind < KINDS; kind++) {
            const struct tv_sampling *setting = &settings[(s + (size_t)kind) % 2];
            bench.rule =
                (struct tv_round_rule){.rule = rule, .sampling = *setting, .max_len = 1 << 20};
            tally_fill(&bench, &shapes[s], (enum kind)kind, 0, tv_test_scaled(DRAWS), &tally);
            double worst = tally_excess(&bench, &tally);
            if (worst > 1.0) {
                fail_msg("%s, %s, draft %d: %.2f times the bound", tv_rule_name(rule),
                         shapes[s].name, kind, worst);
            }
            assert_true(kind == Q_UNLIKELY || tally.accepted > tally.firsts / 20);
        }
    }
}

static void target_walk_is_lossless(void **state)
{
    (void)state;
    chi_square_of(TV_RULE_TARGET_WALK);
}

static void ratio_wor_is_lossless(void **state)
{
    (void)state;
    chi_square_of(TV_RULE_RATIO_WOR);
}

/* The same statistic finds what is not: a drafter that draws from another distribution than it
 * says, and typical. */
static void the_statistic_finds_a_bias(void **state)
{
    static struct bench bench;
    struct tally tally;
    int32_t draws = tv_test_scaled(DRAWS);
    (void)state;
    if (draws < 20000) {
        skip(); /* too few for the smaller one */
    }
    bench.rule = (struct tv_round_rule){
        .rule = TV_RULE_RATIO_WOR, .sampling = settings[0], .max_len = 1 << 20};
    tally_fill(&bench, &shapes[1], Q_NEAR, 1, draws, &tally);
    assert_true(tally_excess(&bench, &tally) > 1.0);
    bench.rule.rule = TV_RULE_TYPICAL;
    bench.rule.typical_epsilon = 0.09;
    bench.rule.typical_delta = 0.3;
    tally_fill(&bench, &shapes[1], Q_NEAR, 0, draws, &tally);
    assert_true(tally_excess(&bench, &tally) > 1.0);
}

/* With q = p the first child is always accepted, and a tree of one node draws as target_walk. */
static void ratio_wor_at_its_edges(void **state)
{
    static struct bench bench;
    struct tv_test_random random = {.state = 3};
    struct tv_walk_result result, plain;
    int32_t nodes[NODES];
    (void)state;
    for (uint64_t seed = 0; seed < 500; seed++) {
        bench.rule = (struct tv_round_rule){
            .rule = TV_RULE_RATIO_WOR, .sampling = settings[0], .max_len = 1 << 20};
        bench.rule.sampling.seed = seed;
        tree_grow(&bench, &shapes[0], Q_TARGET, 0, &random);
        int32_t count = walk(&bench, nodes, &result);
        assert_true(count >= 3); /* q is rounded to f32: a coin within that of 1 may say no */
        bench.tree.count = 1;
        (void)walk(&bench, nodes, &result);
        bench.rule.rule = TV_RULE_TARGET_WALK;
        (void)walk(&bench, nodes, &plain);
        assert_int_equal(result.end.token, plain.end.token);

        tree_grow(&bench, &shapes[2], Q_FLAT, 0, &random); /* greedy: the walk of the argmax */
        bench.rule.rule = TV_RULE_RATIO_WOR;
        bench.rule.sampling.temperature = 0.0f;
        count = walk(&bench, nodes, &result);
        bench.rule.rule = TV_RULE_GREEDY;
        assert_int_equal(walk(&bench, nodes, &plain), count);
        assert_int_equal(result.end.token, plain.end.token);
    }
}

/* Stop tokens and the length limit end the path before the accepted child. */
static void ends_of_a_path(void **state)
{
    static struct bench bench;
    struct tv_test_random random = {.state = 4};
    struct tv_walk_result result;
    int32_t nodes[NODES];
    (void)state;
    for (int rule = TV_RULE_RATIO_WOR; rule <= TV_RULE_TYPICAL; rule++) {
        bench.rule = (struct tv_round_rule){.rule = (enum tv_rule)rule,
                                            .sampling = settings[0],
                                            .max_len = POSITION + 1,
                                            .typical_epsilon = 1e-9,
                                            .typical_delta = 1e-9};
        tree_grow(&bench, &shapes[0], Q_TARGET, 0, &random);
        assert_int_equal(walk(&bench, nodes, &result), 1);
        assert_int_equal(result.end.finish, TV_FINISH_LENGTH);
        assert_int_equal(result.end.token, bench.tokens[1]);
        bench.rule.max_len = 1 << 20;
        bench.rule.stop_ids[0] = bench.tokens[1];
        bench.rule.stop_count = 1;
        assert_int_equal(walk(&bench, nodes, &result), 1);
        assert_int_equal(result.end.finish, TV_FINISH_STOP);
        assert_int_equal(result.end.token, bench.tokens[1]);
        bench.rule.stop_ids[0] = -1;
        assert_true(walk(&bench, nodes, &result) >= 3);
        assert_int_equal(result.end.finish, TV_FINISH_NONE);
    }
}

/* A bar of 0 lets every path pass; ties go to the lower node. */
static void typical_takes_the_deepest_path(void **state)
{
    static const int32_t tokens[] = {0, 1, 2, 5, 9, 4}, parents[] = {-1, 0, 0, 1, 2, 1};
    static const int32_t depths[] = {0, 1, 1, 2, 2, 2};
    static struct bench bench;
    struct tv_walk_result result;
    int32_t nodes[NODES];
    (void)state;
    memcpy(bench.tokens, tokens, sizeof tokens);
    memcpy(bench.parents, parents, sizeof parents);
    memcpy(bench.depths, depths, sizeof depths);
    bench.tree = (struct tv_tree){.count = 6,
                                  .tokens = bench.tokens,
                                  .parents = bench.parents,
                                  .depths = bench.depths,
                                  .depth = 2};
    bench.rule = (struct tv_round_rule){
        .rule = TV_RULE_TYPICAL, .sampling = settings[0], .max_len = 1 << 20};
    assert_int_equal(walk(&bench, nodes, &result), 3);
    assert_true(nodes[1] == 1 && nodes[2] == 3);
    bench.rule.typical_epsilon = bench.rule.typical_delta = 1.0;
    bench.tokens[1] = 15; /* exp(-2) and exp(-1.5) of about 30: below exp(-H) */
    bench.tokens[2] = 7;
    assert_int_equal(walk(&bench, nodes, &result), 1);
    bench.tokens[1] = 1;
    bench.tokens[2] = 2;
    bench.rule.typical_delta = 0.5; /* of row 0: H = 2.43, so the bar is 0.044: 1 and 2 pass */
    bench.tree.count = 3;
    bench.tree.depth = 1;
    assert_int_equal(walk(&bench, nodes, &result), 2);
    assert_int_equal(nodes[1], 1);
    bench.tokens[1] = 15; /* does not */
    assert_int_equal(walk(&bench, nodes, &result), 2);
    assert_int_equal(nodes[1], 2);
}

/* In the engine these rows count as any work does, so that a long vocabulary is no standstill. */
static void rows_are_progress(void **state)
{
    const struct tv_engine_fixture_options options = {.model = "kjv-mla-8m"};
    struct tv_engine_fixture fixture;
    struct tv_tree tree;
    struct tv_round_out out;
    struct tv_context *context = NULL;
    const int32_t tokens[] = {65, 66, 67, 68}, parents[] = {-1, 0, 0, 1};
    uint64_t before, after;
    (void)state;
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    const _Atomic uint64_t *rows_done = &((struct tv_verify_engine *)engine)->rule_steps;
    tv_test_tree(&tree, 4, tokens, parents);
    assert_int_equal(engine->ops->context_open(engine, &context), 0);
    struct tv_round_in in = {
        .context = context, .tree = &tree, .rule = tv_test_sampled(engine, 1.0f, 7)};
    assert_int_equal(engine->ops->verify(engine, &in, 1, &out), 0);
    assert_int_equal(*rows_done, 0);
    in.rule.rule = TV_RULE_TYPICAL;
    in.rule.typical_epsilon = in.rule.typical_delta = 0.5;
    assert_int_equal(engine->ops->progress(engine, &before), 1);
    assert_int_equal(engine->ops->verify(engine, &in, 1, &out), 0);
    assert_int_equal(engine->ops->progress(engine, &after), 1);
    assert_true(*rows_done >= 3); /* the root's row, and each of its children */
    assert_true(after - before > *rows_done);
    engine->ops->context_close(engine, context);
    tv_tree_finish(&tree);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(target_walk_is_lossless),
        cmocka_unit_test(ratio_wor_is_lossless),
        cmocka_unit_test(the_statistic_finds_a_bias),
        cmocka_unit_test(ratio_wor_at_its_edges),
        cmocka_unit_test(ends_of_a_path),
        cmocka_unit_test(typical_takes_the_deepest_path),
        cmocka_unit_test(rows_are_progress),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
