/*
 * engine_fixture.c - the real engine on a bundled checkpoint, and trees to give it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "shadow/shadow.h"

void tv_engine_fixture_open(struct tv_engine_fixture *fixture,
                            const struct tv_engine_fixture_options *options)
{
    int32_t page_size = options->page_size > 0 ? options->page_size : 64;
    struct tv_fixture_options base = {
        .backend = options->backend != NULL ? options->backend : "cpu",
        .dir = tv_fixture_dir(options->model),
        .page_size = page_size,
        .rows_max = options->rows_max > 0 ? options->rows_max : 256,
        .requests_max = options->requests_max > 0 ? options->requests_max : 4,
        .max_len = options->max_len,
        .pages = options->pages > 0 ? options->pages : 4096 / page_size,
        .kv_dtype = options->kv_dtype,
        .prefix = options->prefix,
        .threads = 1};
    memset(fixture, 0, sizeof *fixture);
    tv_fixture_open(&fixture->base, &base);
    if (options->apart) {
        fixture->base.kernels->host_memory = 0;
    }
    int rc = tv_engine_fixture_judge(fixture);
    if (rc != 0) {
        fail_msg("%s: engine: %d, %s", options->model, rc, fixture->detail);
    }
}

int tv_engine_fixture_judge(struct tv_engine_fixture *fixture)
{
    struct tv_fixture *base = &fixture->base;
    struct tv_shadow_judge *oracle = NULL;
    assert_int_equal(tv_shadow_judge_create(base->model, base->cache, base->kernels, &oracle), 0);
    const struct tv_judge judge = tv_shadow_judge_calls(oracle);
    int rc = tv_verify_engine_create(base->kernels, base->model, base->cache, &judge,
                                     &fixture->engine, fixture->detail, sizeof fixture->detail);
    tv_shadow_judge_destroy(oracle);
    return rc;
}

void tv_engine_fixture_close(struct tv_engine_fixture *fixture)
{
    fixture->engine->ops->destroy(fixture->engine);
    tv_fixture_close(&fixture->base);
}

int32_t tv_test_scaled(int32_t count)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scale = text != NULL ? strtod(text, NULL) : 1.0;
    double scaled = (double)count * (scale > 0.0 ? scale : 1.0);
    return scaled < 1.0 ? 1 : (int32_t)scaled;
}

uint32_t tv_test_random_next(struct tv_test_random *random)
{
    random->state = random->state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random->state >> 32);
}

int32_t tv_test_random_below(struct tv_test_random *random, int32_t limit)
{
    return (int32_t)(((uint64_t)tv_test_random_next(random) * (uint64_t)limit) >> 32);
}

void tv_test_tree(struct tv_tree *tree, int32_t count, const int32_t *tokens,
                  const int32_t *parents)
{
    size_t bytes = (size_t)count * sizeof(int32_t);
    *tree = (struct tv_tree){.count = count,
                             .tokens = malloc(bytes),
                             .parents = malloc(bytes),
                             .depths = calloc((size_t)count, sizeof(int32_t))};
    assert_non_null(tree->tokens);
    assert_non_null(tree->parents);
    assert_non_null(tree->depths);
    memcpy(tree->tokens, tokens, bytes);
    memcpy(tree->parents, parents, bytes);
    for (int32_t i = 1; i < count; i++) {
        assert_in_range(parents[i], 0, i - 1);
        tree->depths[i] = tree->depths[parents[i]] + 1;
        tree->depth = tree->depths[i] > tree->depth ? tree->depths[i] : tree->depth;
    }
}

void tv_test_tree_chain(struct tv_tree *tree, const int32_t *tokens, int32_t count)
{
    int32_t *parents = malloc((size_t)count * sizeof *parents);
    assert_non_null(parents);
    for (int32_t i = 0; i < count; i++) {
        parents[i] = i - 1;
    }
    tv_test_tree(tree, count, tokens, parents);
    free(parents);
}

void tv_test_tree_random(struct tv_tree *tree, int32_t count, int32_t vocab, int32_t root_token,
                         struct tv_test_random *random)
{
    int32_t *parents = malloc((size_t)count * sizeof *parents);
    int32_t *tokens = malloc((size_t)count * sizeof *tokens);
    assert_non_null(parents);
    assert_non_null(tokens);
    int32_t window = 1 + tv_test_random_below(random, count); /* small: deep; large: bushy */
    parents[0] = -1;
    tokens[0] = root_token;
    for (int32_t i = 1; i < count; i++) {
        int32_t first = i > window ? i - window : 0;
        int32_t repeated;
        parents[i] = first + tv_test_random_below(random, i - first);
        do {
            tokens[i] = tv_test_random_below(random, vocab);
            repeated = 0;
            for (int32_t j = 1; j < i; j++) {
                repeated |= parents[j] == parents[i] && tokens[j] == tokens[i];
            }
        } while (repeated);
    }
    tv_test_tree(tree, count, tokens, parents);
    free(parents);
    free(tokens);
}

struct tv_round_rule tv_test_greedy(const struct tv_engine *engine)
{
    return (struct tv_round_rule){.rule = TV_RULE_GREEDY,
                                  .sampling = {.temperature = 1.0f, .top_p = 1.0f},
                                  .max_len = engine->max_len};
}

struct tv_round_rule tv_test_sampled(const struct tv_engine *engine, float temperature,
                                     uint64_t seed)
{
    return (struct tv_round_rule){
        .rule = TV_RULE_TARGET_WALK,
        .sampling = {.temperature = temperature, .top_p = 1.0f, .seed = seed},
        .max_len = engine->max_len};
}

struct tv_context *tv_test_context(struct tv_engine *engine)
{
    struct tv_context *context = NULL;
    assert_int_equal(engine->ops->context_open(engine, &context), 0);
    return context;
}

int32_t tv_test_prefill(struct tv_engine *engine, struct tv_context *context, const int32_t *tokens,
                        int32_t count, const struct tv_round_rule *rule)
{
    struct tv_drawn drawn = {.token = -1};
    struct tv_cache_shortage shortage = {0};
    for (int32_t at = 0; at < count;) {
        int32_t rows = count - at < engine->prefill_rows ? count - at : engine->prefill_rows;
        const struct tv_round_rule *last = at + rows == count ? rule : NULL;
        assert_int_equal(
            engine->ops->prefill(engine, context, tokens + at, rows, last, &drawn, &shortage), 0);
        at += rows;
    }
    return drawn.token;
}

void tv_test_verify(struct tv_engine *engine, struct tv_context *context,
                    const struct tv_tree *tree, const struct tv_round_rule *rule, int commit,
                    struct tv_round_out *ret_out)
{
    struct tv_round_in in = {
        .context = context, .tree = tree, .rule = *rule, .commit = commit, .want_logits = 1};
    assert_int_equal(engine->ops->verify(engine, &in, 1, ret_out), 0);
    if (ret_out->code != TV_OK) {
        fail_msg("round: code %d, %s", (int)ret_out->code, ret_out->detail);
    }
}

void tv_test_prefix_fill(int32_t *prefix, int32_t count, int32_t vocab, uint64_t seed)
{
    struct tv_test_random random = {.state = seed};
    for (int32_t i = 0; i < count; i++) {
        prefix[i] = tv_test_random_below(&random, vocab);
    }
}

const char *tv_test_kv_row(const struct tv_fixture *base, const struct tv_cache_seq *seq,
                           int32_t layer, int32_t row, size_t *ret_bytes)
{
    const struct tv_cache_params *params = tv_cache_params(base->cache);
    *ret_bytes = (size_t)params->row_dim * tv_dtype_size(params->dtype);
    return (const char *)tv_cache_layer(base->cache, layer) +
           (size_t)tv_cache_slot(base->cache, seq, row) * *ret_bytes;
}
