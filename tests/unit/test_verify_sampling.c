/*
 * test_verify_sampling.c - the rules draw what they promise: distribution, settings, seeds.
 *
 * Distributions are judged through the walk and the backend's draw on hand-made logits of 16
 * tokens; seeds and greedy text on a bundled checkpoint.
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
#include "verify/walk.h"

#define VOCAB 16

/* One distribution per node; drawn by a backend. */
struct target {
    struct tv_kernels *kernels;
    const float (*logits)[VOCAB];
    struct tv_sampling sampling;
    void *workspace;
    size_t workspace_bytes;
};

static void target_open(struct target *target, const float (*logits)[VOCAB])
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_draw_args args = {.rows = 1, .vocab = VOCAB};
    memset(target, 0, sizeof *target);
    assert_int_equal(tv_kernels_create("cpu", &options, &target->kernels), 0);
    target->logits = logits;
    target->workspace_bytes = target->kernels->draw_workspace(target->kernels, &args);
    target->workspace = malloc(target->workspace_bytes + 1);
    assert_non_null(target->workspace);
}

static void target_close(struct target *target)
{
    free(target->workspace);
    target->kernels->destroy(target->kernels);
}

static int target_draw(void *context, int32_t node, int32_t position, struct tv_draw *ret_draw)
{
    struct target *target = context;
    struct tv_draw_args args = {.rows = 1,
                                .vocab = VOCAB,
                                .logits = target->logits[node],
                                .positions = &position,
                                .sampling = &target->sampling,
                                .draws = ret_draw,
                                .workspace = target->workspace,
                                .workspace_bytes = target->workspace_bytes};
    return target->kernels->draw(target->kernels, &args);
}

/* The two tokens that follow position LEN: the first, and the second after it. */
static void two_tokens(struct target *target, const struct tv_tree *tree,
                       struct tv_round_rule *rule, int32_t len, uint64_t seed, int32_t ret[2])
{
    int32_t nodes[8];
    float logprobs[8];
    struct tv_walk_result result;
    rule->sampling.seed = seed;
    target->sampling = tv_walk_sampling(rule);
    assert_int_equal(tv_walk_run(tree, len, rule, target_draw, target, nodes, logprobs, &result),
                     0);
    ret[0] = result.accepted_count > 1 ? tree->tokens[nodes[1]] : result.end.token;
    ret[1] = result.accepted_count > 1 ? result.end.token : -1;
    if (result.accepted_count > 2) {
        ret[1] = tree->tokens[nodes[2]];
    }
}

static void softmax(const float *logits, double *ret)
{
    double sum = 0.0;
    for (int32_t t = 0; t < VOCAB; t++) {
        ret[t] = exp((double)logits[t]);
        sum += ret[t];
    }
    for (int32_t t = 0; t < VOCAB; t++) {
        ret[t] /= sum;
    }
}

static double chi_square(const int64_t *counts, const double *expected, int64_t total)
{
    double sum = 0.0;
    for (int32_t t = 0; t < VOCAB; t++) {
        double mean = expected[t] * (double)total;
        assert_true(mean > 5.0);
        sum += ((double)counts[t] - mean) * ((double)counts[t] - mean) / mean;
    }
    return sum;
}

/* Rows: node 0, then one more distribution for every other node. */
static const float rows[4][VOCAB] = {
    {2.0f, 1.5f, 1.0f, 0.5f, 0.0f, -0.5f, -1.0f, -1.5f, 1.2f, 0.3f, 0.1f, -0.2f, -0.7f, 0.8f, 0.6f,
     -2.0f},
    {0.0f, 2.0f, 0.3f, 0.1f, 1.0f, 0.5f, -0.5f, -1.0f, 0.2f, 0.4f, 1.1f, -1.2f, 0.7f, -0.3f, 0.9f,
     -1.5f},
    {1.0f, 0.2f, 0.3f, -0.1f, -1.0f, 0.5f, 1.5f, 1.0f, 0.2f, -0.4f, 0.1f, 1.2f, 0.7f, 0.3f, -0.9f,
     0.5f},
    {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f,
     0.0f},
};

/* Critical value of chi-square with 15 degrees of freedom at p = 0.001 / 8. */
#define CHI_CRITICAL 43.1

static void drafts_do_not_bend_the_distribution_b17(void **state)
{
    (void)state;
    const struct {
        const char *name;
        int32_t count, tokens[4];
    } cases[] = {
        {"no draft", 1, {3}},
        {"one right child", 2, {3, 0}},
        {"two children", 3, {3, 0, 1}},
        {"children without the mode", 4, {3, 15, 7, 12}},
    };
    const int32_t parents[] = {-1, 0, 0, 0};
    struct target target;
    double expected[VOCAB];
    target_open(&target, rows);
    int32_t samples = tv_test_scaled(200000);
    samples = samples < 20000 ? 20000 : samples;
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct tv_tree tree;
        struct tv_round_rule rule = {.rule = TV_RULE_TARGET_WALK,
                                     .sampling = {.temperature = 1.0f, .top_p = 1.0f},
                                     .max_len = 1 << 20};
        int64_t first[VOCAB] = {0}, second[VOCAB] = {0}, second_total = 0;
        int32_t alone[2], drawn[2];
        struct tv_tree root;
        tv_test_tree(&tree, cases[c].count, cases[c].tokens, parents);
        tv_test_tree(&root, 1, cases[c].tokens, parents);
        for (int32_t i = 0; i < samples; i++) {
            int32_t len = 10 + i % 7;
            uint64_t seed = 1000 + (uint64_t)i + 1000003 * (uint64_t)c; /* samples of its own */
            two_tokens(&target, &tree, &rule, len, seed, drawn);
            two_tokens(&target, &root, &rule, len, seed, alone);
            assert_int_equal(drawn[0], alone[0]); /* the draft never decides the token */
            first[drawn[0]]++;
            if (cases[c].count == 2 && drawn[1] >= 0) {
                second[drawn[1]]++;
                second_total++;
            }
        }
        softmax(rows[0], expected);
        double chi = chi_square(first, expected, samples);
        print_message("%s: chi-square %.1f (critical %.1f)\n", cases[c].name, chi, CHI_CRITICAL);
        assert_true(chi < CHI_CRITICAL);
        if (second_total > 0) { /* the next draw is independent of the first */
            softmax(rows[1], expected);
            assert_true(chi_square(second, expected, second_total) < CHI_CRITICAL);
        }
        tv_tree_finish(&tree);
        tv_tree_finish(&root);
    }
    target_close(&target);
}

static void flat_entropy_b18(void **state)
{
    (void)state;
    struct target target;
    struct tv_tree tree;
    struct tv_round_rule rule = {.rule = TV_RULE_TARGET_WALK,
                                 .sampling = {.temperature = 1.0f, .top_p = 1.0f},
                                 .max_len = 1 << 20};
    int64_t counts[VOCAB] = {0};
    int32_t drawn[2];
    double entropy = 0.0;
    target_open(&target, rows + 3);
    tv_test_tree(&tree, 1, (const int32_t[]){0}, (const int32_t[]){-1});
    for (int32_t i = 0; i < 10000; i++) {
        two_tokens(&target, &tree, &rule, i, 77, drawn); /* one seed: positions differ */
        counts[drawn[0]]++;
    }
    for (int32_t t = 0; t < VOCAB; t++) {
        double p = (double)counts[t] / 10000.0;
        entropy -= p > 0.0 ? p * log(p) : 0.0;
    }
    print_message("entropy %.4f, exact %.4f\n", entropy, log((double)VOCAB));
    assert_true(fabs(entropy - log((double)VOCAB)) < 0.02 * log((double)VOCAB));
    rule.rule = TV_RULE_GREEDY; /* the rule is what it says, whatever the temperature */
    for (int32_t i = 0; i < 100; i++) {
        two_tokens(&target, &tree, &rule, i, (uint64_t)i, drawn);
        assert_int_equal(drawn[0], 0);
    }
    tv_tree_finish(&tree);
    target_close(&target);
}

/* Odd settings that the decoder lets through: a documented token, never an invalid id. */
static void odd_settings_b22(void **state)
{
    (void)state;
    static const float temperatures[] = {0.0f, -0.0f, 1e-45f, 1e-6f, 0.99e-4f, 1e-4f, 0.5f, 100.0f};
    static const float top_ps[] = {1e-9f, 0.5f, 1.0f};
    static const int32_t top_ks[] = {0, 1, 3, VOCAB};
    static const float min_ps[] = {0.0f, 0.5f, 1.0f};
    struct target target;
    struct tv_tree tree;
    int32_t drawn[2], cases = 0;
    target_open(&target, rows);
    tv_test_tree(&tree, 1, (const int32_t[]){0}, (const int32_t[]){-1});
    for (size_t t = 0; t < 8; t++) {
        for (size_t p = 0; p < 3; p++) {
            for (size_t k = 0; k < 4; k++) {
                for (size_t m = 0; m < 3; m++) {
                    struct tv_round_rule rule = {.rule = TV_RULE_TARGET_WALK,
                                                 .sampling = {.temperature = temperatures[t],
                                                              .top_p = top_ps[p],
                                                              .top_k = top_ks[k],
                                                              .min_p = min_ps[m]},
                                                 .max_len = 1 << 20};
                    int only_best = temperatures[t] < 1e-4f || top_ps[p] < 1e-6f ||
                                    top_ks[k] == 1 || min_ps[m] >= 1.0f;
                    for (int32_t i = 0; i < 20; i++, cases++) {
                        two_tokens(&target, &tree, &rule, i, 5, drawn);
                        assert_in_range(drawn[0], 0, VOCAB - 1);
                        if (only_best) {
                            assert_int_equal(drawn[0], 0);
                        }
                        if (top_ks[k] == 3) { /* the three best of row 0 */
                            assert_true(drawn[0] == 0 || drawn[0] == 1 || drawn[0] == 8);
                        }
                    }
                }
            }
        }
    }
    assert_int_equal(cases, 8 * 3 * 4 * 3 * 20);
    tv_tree_finish(&tree);
    target_close(&target);
}

#define TEXT_MAX 256

/* How a text is drafted; `truth` is what plain decoding gave, for drafts that are sometimes right.
 */
enum drafts { DRAFTS_NONE, DRAFTS_CHAIN, DRAFTS_STAR, DRAFTS_RANDOM };

static void draft(struct tv_tree *tree, enum drafts drafts, const int32_t *truth, int32_t left,
                  int32_t vocab, struct tv_test_random *random)
{
    int32_t tokens[24], parents[24], count = 1;
    tokens[0] = truth[0];
    parents[0] = -1;
    if (drafts == DRAFTS_CHAIN) {
        for (; count < 8 && count < left; count++) {
            tokens[count] = tv_test_random_below(random, 6) == 0
                                ? tv_test_random_below(random, vocab)
                                : truth[count];
            parents[count] = count - 1;
        }
    } else if (drafts == DRAFTS_STAR) {
        int32_t first = tv_test_random_below(random, vocab - 12);
        for (; count < 12; count++) {
            tokens[count] = first + count;
            parents[count] = 0;
        }
        if (left > 1 && (truth[1] < first || truth[1] >= first + 12)) {
            tokens[11] = truth[1];
        }
    }
    if (drafts != DRAFTS_RANDOM) {
        tv_test_tree(tree, count, tokens, parents);
        return;
    }
    tv_test_tree_random(tree, 24, vocab, truth[0], random);
    for (int32_t node = 0, at = 1; at < left; at++) { /* a right path through the last children */
        int32_t child = tv_tree_child(tree, node, truth[at]);
        for (int32_t i = tree->count - 1; child < 0 && i > node; i--) {
            child = tree->parents[i] == node ? i : -1;
        }
        if (child < 0) {
            return;
        }
        tree->tokens[child] = truth[at];
        node = child;
    }
}

/* Decode `count` tokens; ret_tokens[0] is the first pending one. Returns the rounds. */
static int32_t decode(struct tv_engine *engine, enum drafts drafts, const int32_t *prompt,
                      int32_t prompt_len, const struct tv_round_rule *rule, const int32_t *truth,
                      int32_t *ret_tokens, float *ret_margins, int32_t count)
{
    struct tv_context *context = tv_test_context(engine);
    struct tv_test_random random = {.state = 31};
    int32_t done = 1, rounds = 0;
    ret_tokens[0] = tv_test_prefill(engine, context, prompt, prompt_len, rule);
    while (done < count) {
        struct tv_tree tree;
        struct tv_round_out out;
        int32_t here[TEXT_MAX];
        int32_t left = count - done + 1;
        memcpy(here, truth + done - 1, (size_t)left * sizeof *here);
        here[0] = ret_tokens[done - 1];
        draft(&tree, drafts, here, left, engine->vocab, &random);
        tv_test_verify(engine, context, &tree, rule, 1, &out);
        for (int32_t i = 0; i < out.accepted_count && done < count; i++) {
            ret_margins[done] = out.end.has_margin ? out.end.margin : INFINITY;
            ret_tokens[done++] =
                i + 1 < out.accepted_count ? tree.tokens[out.nodes[i + 1]] : out.end.token;
        }
        rounds++;
        tv_tree_finish(&tree);
    }
    engine->ops->context_close(engine, context);
    return rounds;
}

/* The same tokens whatever the drafts, the page size or the run; near ties end the comparison. */
static void same_text(float temperature, const char *what)
{
    static const char prompt[] = "And it came to pass in those days, that ";
    static const char *const names[] = {"none", "chain", "star", "random"};
    int32_t tokens[TEXT_MAX], truth[TEXT_MAX] = {0}, prompt_ids[sizeof prompt];
    int32_t prompt_len = (int32_t)sizeof prompt - 1, near_ties = 0;
    int32_t count = tv_test_scaled(TEXT_MAX);
    count = count > TEXT_MAX ? TEXT_MAX : count < 32 ? 32 : count;
    for (int32_t i = 0; i < prompt_len; i++) {
        prompt_ids[i] = (uint8_t)prompt[i];
    }
    for (int32_t page_size = 16; page_size <= 64; page_size *= 4) {
        struct tv_engine_fixture fixture;
        struct tv_engine_fixture_options options = {.model = "kjv-mla-8m", .page_size = page_size};
        tv_engine_fixture_open(&fixture, &options);
        struct tv_round_rule rule = temperature > 0.0f
                                        ? tv_test_sampled(fixture.engine, temperature, 4711)
                                        : tv_test_greedy(fixture.engine);
        for (int drafts = DRAFTS_NONE; drafts <= DRAFTS_RANDOM; drafts++) {
            float margins[TEXT_MAX] = {0};
            int first = page_size == 16 && drafts == DRAFTS_NONE;
            int32_t rounds = decode(fixture.engine, (enum drafts)drafts, prompt_ids, prompt_len,
                                    &rule, truth, tokens, margins, count);
            if (first) {
                memcpy(truth, tokens, sizeof truth);
            }
            for (int32_t i = 0; i < count; i++) {
                if (tokens[i] != truth[i]) {
                    assert_true((double)margins[i] < 2.0 * fixture.engine->noise);
                    near_ties++;
                    break;
                }
            }
            print_message("%s page %d %s: %d tokens in %d rounds, near ties %d\n", what, page_size,
                          names[drafts], count, rounds, near_ties);
            if (drafts != DRAFTS_NONE && drafts != DRAFTS_STAR) {
                assert_true(rounds < count / 2); /* drafts were really accepted */
            }
        }
        tv_engine_fixture_close(&fixture);
    }
    assert_in_range(near_ties, 0, 1);
}

static void seeded_text_does_not_depend_on_drafts_b20(void **state)
{
    (void)state;
    same_text(0.8f, "temperature 0.8");
}

static void greedy_text_equals_plain_b21(void **state)
{
    (void)state;
    same_text(0.0f, "greedy");
}

/* How often the counters of each position were used: the log of a session's draws. */
static int (*draw_real)(struct tv_kernels *k, const struct tv_draw_args *args);
static uint16_t draws_at[2 * TEXT_MAX];
static uint64_t draws_seed;

static int draw_logged(struct tv_kernels *k, const struct tv_draw_args *args)
{
    for (int32_t i = 0; i < args->rows; i++) { /* device memory is host memory here */
        assert_in_range(args->positions[i], 0, 2 * TEXT_MAX - 1);
        assert_true(args->sampling[i].seed == draws_seed);
        draws_at[args->positions[i]]++;
    }
    return draw_real(k, args);
}

/* One row of Gumbel values for each position of a session, whatever trees it was drafted with: the
 * target draw is the only purpose that these rules have. */
static void every_counter_is_used_once_b17(void **state)
{
    (void)state;
    enum { PROMPT = 40 };
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = "v3", .page_size = 16};
    int32_t prompt[PROMPT], tokens[TEXT_MAX], truth[TEXT_MAX] = {0};
    float margins[TEXT_MAX];
    tv_engine_fixture_open(&fixture, &options);
    struct tv_round_rule rule = tv_test_sampled(fixture.engine, 0.7f, 1234567);
    draws_seed = rule.sampling.seed;
    draw_real = fixture.base.kernels->draw;
    fixture.base.kernels->draw = draw_logged;
    tv_test_prefix_fill(prompt, PROMPT, fixture.engine->vocab, 8);
    for (int drafts = DRAFTS_NONE; drafts <= DRAFTS_RANDOM; drafts++) {
        memset(draws_at, 0, sizeof draws_at);
        int32_t rounds = decode(fixture.engine, (enum drafts)drafts, prompt, PROMPT, &rule, truth,
                                tokens, margins, TEXT_MAX);
        if (drafts == DRAFTS_NONE) {
            memcpy(truth, tokens, sizeof truth);
        }
        assert_memory_equal(tokens, truth, sizeof truth);
        for (int32_t position = 0; position < 2 * TEXT_MAX; position++) {
            int drawn = position >= PROMPT && position < PROMPT + TEXT_MAX;
            assert_true(draws_at[position] == drawn ||
                        (position >= PROMPT + TEXT_MAX && draws_at[position] <= 1));
        }
        print_message("%d rounds\n", rounds);
    }
    fixture.base.kernels->draw = draw_real;
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_counter_is_used_once_b17),
        cmocka_unit_test(drafts_do_not_bend_the_distribution_b17),
        cmocka_unit_test(flat_entropy_b18),
        cmocka_unit_test(odd_settings_b22),
        cmocka_unit_test(seeded_text_does_not_depend_on_drafts_b20),
        cmocka_unit_test(greedy_text_equals_plain_b21),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
