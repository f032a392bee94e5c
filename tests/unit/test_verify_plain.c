/*
 * test_verify_plain.c - trees of every shape against plain decoding, and against the rows it
 * stores.
 *
 * B02: the token stream; B07: the KV rows of accepted nodes; B14: launches whose sessions have
 * prefixes of 0 to 4,000 tokens; B29: what a stored row holds, from the weights alone. Runs on
 * bundled and tiny checkpoints with a poisoned pool.
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
#include "kernels/types.h"
#include "model/model_impl.h"
#include "tiny_model.h"
#include "verify/engine.h"

#define PROMPT     61 /* so that the text crosses page borders */
#define STREAM_MAX 512
#define AHEAD      70

/* [0, PROMPT) is the prompt; what plain decoding gives behind it, and the rows that it stored. */
struct plain {
    struct tv_context *context;
    int32_t tokens[STREAM_MAX];
    int32_t count;
};

static void plain_run(struct tv_engine *engine, struct plain *plain, int32_t count)
{
    struct tv_round_rule rule = tv_test_greedy(engine);
    plain->context = tv_test_context(engine);
    plain->count = PROMPT + count;
    tv_test_prefix_fill(plain->tokens, PROMPT, engine->vocab, 17);
    int32_t next = tv_test_prefill(engine, plain->context, plain->tokens, PROMPT, &rule);
    for (int32_t i = PROMPT; i < plain->count; i++) {
        struct tv_tree tree;
        struct tv_round_out out;
        plain->tokens[i] = next;
        tv_test_tree_chain(&tree, &next, 1);
        tv_test_verify(engine, plain->context, &tree, &rule, 1, &out);
        next = out.end.token;
        tv_tree_finish(&tree);
    }
}

/* A tree of `nodes` nodes and this depth whose right path goes wrong at depth `wrong_at`; the
 * path's node is the last of its level, the others are its siblings. `right` is the text from node
 * 0 on. */
static void tree_shape(struct tv_tree *tree, int32_t nodes, int32_t depth, int32_t wrong_at,
                       const int32_t *right, int32_t vocab)
{
    int32_t tokens[TV_TREE_NODES_MAX], parents[TV_TREE_NODES_MAX];
    int32_t count = 1, path = 0;
    tokens[0] = right[0];
    parents[0] = -1;
    for (int32_t level = 1; level <= depth; level++) {
        int32_t size = (nodes - 1) / depth + (level <= (nodes - 1) % depth ? 1 : 0);
        for (int32_t i = 1; i <= size; i++) {
            int32_t shift = i < size ? i : level == wrong_at ? size : 0;
            tokens[count] = (right[level] + shift) % vocab;
            parents[count++] = path;
        }
        path = count - 1;
    }
    assert_int_equal(count, nodes);
    tv_test_tree(tree, nodes, tokens, parents);
    assert_int_equal(tree->depth, depth);
}

/* The largest difference of two sequences' rows [0, count), relative to the size of their parts. */
static double rows_apart(const struct tv_engine_fixture *fixture, const struct tv_context *a,
                         const struct tv_context *b, int32_t count)
{
    const struct tv_cache_params *params = tv_cache_params(fixture->base.cache);
    double worst = 0.0;
    assert_int_equal(params->dtype, TV_F32);
    for (int32_t layer = 0; layer < params->layers; layer++) {
        for (int32_t r = 0; r < count; r++) {
            size_t bytes = 0;
            const float *x =
                (const float *)tv_test_kv_row(&fixture->base, &a->seq, layer, r, &bytes);
            const float *y =
                (const float *)tv_test_kv_row(&fixture->base, &b->seq, layer, r, &bytes);
            double squares = 0.0, delta = 0.0;
            for (int32_t i = 0; i < params->row_dim; i++) {
                double one = fabs((double)x[i] - (double)y[i]);
                squares += (double)x[i] * (double)x[i];
                delta = one > delta || isnan(one) ? one : delta;
            }
            delta /= sqrt(squares / params->row_dim);
            worst = delta > worst || isnan(delta) ? delta : worst;
        }
    }
    return worst;
}

static void shapes_equal_plain_decoding(const char *model, int32_t count)
{
    static const int32_t shapes[][2] = {{2, 1}, {64, 1}, {64, 63}, {63, 5}, {128, 3}};
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = model};
    struct plain plain;
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    double worst = 0.0;
    assert_in_range(count + AHEAD + PROMPT, 1, STREAM_MAX);
    plain_run(engine, &plain, count + AHEAD);
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct tv_context *context = tv_test_context(engine);
        int32_t len = PROMPT, rounds = 0;
        int32_t nodes = shapes[s][0], depth = shapes[s][1];
        int32_t pending = tv_test_prefill(engine, context, plain.tokens, PROMPT, &rule);
        while (len < PROMPT + count) {
            struct tv_tree tree;
            struct tv_round_out out;
            int32_t wrong_at = rounds++ % (depth + 1) + 1; /* depth + 1: all of the path is right */
            tree_shape(&tree, nodes, depth, wrong_at, plain.tokens + len, engine->vocab);
            assert_int_equal(pending, plain.tokens[len]);
            tv_test_verify(engine, context, &tree, &rule, 1, &out);
            assert_int_equal(out.accepted_count, wrong_at);
            for (int32_t i = 0; i < out.accepted_count; i++) {
                assert_int_equal(tree.tokens[out.nodes[i]], plain.tokens[len + i]);
            }
            len += out.accepted_count;
            pending = out.end.token;
            tv_tree_finish(&tree);
        }
        assert_int_equal(pending, plain.tokens[len]);
        double apart = rows_apart(&fixture, context, plain.context, len);
        print_message("%s, %d nodes of depth %d: %d tokens in %d rounds, rows %.1e apart\n", model,
                      nodes, depth, len - PROMPT, rounds, apart);
        worst = apart > worst || isnan(apart) ? apart : worst;
        engine->ops->context_close(engine, context);
    }
    assert_true(worst <= 1e-4); /* one wrong position shows as about 1 */
    engine->ops->context_close(engine, plain.context);
    tv_engine_fixture_close(&fixture);
}

static void shapes_equal_plain_decoding_b02_b07(void **state)
{
    (void)state;
    shapes_equal_plain_decoding("v3", 128);
    shapes_equal_plain_decoding("v2lite", 64);
}

#define SESSIONS 9

/* Chains of 7, stars of 32, random trees of 64, and plain steps, in one launch and each alone. */
static void long_prefixes_in_one_batch_b14(void **state)
{
    (void)state;
    static const int32_t lens[SESSIONS] = {0, 1, 63, 64, 65, 500, 2047, 4000, 17};
    static const int32_t counts[4] = {1, 7, 32, 64};
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {
        .model = "v2lite", .rows_max = 288, .requests_max = SESSIONS, .pages = 160};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_test_random random = {.state = 5};
    struct tv_round_in in[SESSIONS] = {0};
    struct tv_round_out out[SESSIONS], alone;
    struct tv_tree trees[SESSIONS];
    float *logits[SESSIONS];
    size_t row = (size_t)engine->vocab;
    int32_t *prefix = malloc(4000 * sizeof *prefix);
    assert_non_null(prefix);
    for (int32_t shift = 0; shift < 2; shift++) { /* the longest prefixes: star and bushy, then 7 */
        for (int32_t s = 0; s < SESSIONS; s++) {
            int32_t kind = (s + shift * 3) % 4, tokens[64], parents[64];
            in[s].context = shift == 0 ? tv_test_context(engine) : in[s].context;
            if (shift == 0) {
                tv_test_prefix_fill(prefix, lens[s], engine->vocab, 70 + (uint64_t)s);
                (void)tv_test_prefill(engine, in[s].context, prefix, lens[s], NULL);
            }
            for (int32_t i = 0; i < 64; i++) {
                tokens[i] = (s + i) % engine->vocab;
                parents[i] = i == 0 ? -1 : kind == 1 ? i - 1 : 0;
            }
            if (kind == 3) {
                tv_test_tree_random(&trees[s], 64, engine->vocab, s, &random);
            } else {
                tv_test_tree(&trees[s], counts[kind], tokens, parents);
            }
            in[s].tree = &trees[s];
            in[s].rule = s % 2 == 0 ? tv_test_greedy(engine)
                                    : tv_test_sampled(engine, 0.8f, 1000 + (uint64_t)s);
            in[s].want_logits = 1;
        }
        assert_int_equal(engine->ops->verify(engine, in, SESSIONS, out), 0);
        int32_t ends[SESSIONS][2];
        for (int32_t s = 0; s < SESSIONS; s++) {
            size_t floats = (size_t)trees[s].count * row;
            assert_int_equal(out[s].code, TV_OK);
            logits[s] = malloc(floats * sizeof **logits);
            assert_non_null(logits[s]);
            memcpy(logits[s], out[s].logits, floats * sizeof **logits);
            ends[s][0] = out[s].accepted_count;
            ends[s][1] = out[s].end.token;
        }
        for (int32_t s = 0; s < SESSIONS; s++) {
            assert_int_equal(engine->ops->verify(engine, &in[s], 1, &alone), 0);
            assert_int_equal(alone.accepted_count, ends[s][0]);
            assert_int_equal(alone.end.token, ends[s][1]);
            assert_memory_equal(alone.logits, logits[s],
                                (size_t)trees[s].count * row * sizeof(float));
            free(logits[s]);
            tv_tree_finish(&trees[s]);
        }
    }
    for (int32_t s = 0; s < SESSIONS; s++) {
        engine->ops->context_close(engine, in[s].context);
    }
    free(prefix);
    tv_engine_fixture_close(&fixture);
}

/* x / rms(x) * weight in doubles. */
static void norm(const double *x, const float *weight, int32_t count, double *out)
{
    double squares = 0.0;
    for (int32_t i = 0; i < count; i++) {
        squares += x[i] * x[i];
    }
    double scale = 1.0 / sqrt(squares / count + 1e-6);
    for (int32_t i = 0; i < count; i++) {
        out[i] = x[i] * scale * (double)weight[i];
    }
}

/* The row that the first layer stores for a token, from the checkpoint's tensors alone: normalised
 * latent, then the rotated key as two halves (pair i of the checkpoint is (i, i + 32)). */
static void row_expected(struct tv_tiny_model *tiny, int32_t token, int32_t position, double *row)
{
    const struct tv_tiny_tensor *embed = tv_tiny_find(tiny, "model.embed_tokens.weight");
    const struct tv_tiny_tensor *down =
        tv_tiny_find(tiny, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight");
    int32_t hidden = (int32_t)embed->shape[1];
    double x[64], h[64], raw[TV_MLA_ROW];
    assert_in_range(hidden, 1, 64);
    for (int32_t i = 0; i < hidden; i++) {
        x[i] = (double)embed->values[token * hidden + i];
    }
    norm(x, tv_tiny_find(tiny, "model.layers.0.input_layernorm.weight")->values, hidden, h);
    for (int32_t r = 0; r < TV_MLA_ROW; r++) {
        raw[r] = 0.0;
        for (int32_t i = 0; i < hidden; i++) {
            raw[r] += (double)down->values[r * hidden + i] * h[i];
        }
    }
    norm(raw, tv_tiny_find(tiny, "model.layers.0.self_attn.kv_a_layernorm.weight")->values,
         TV_MLA_LATENT, row);
    for (int32_t pair = 0; pair < TV_MLA_ROPE / 2; pair++) {
        double angle = position * pow(10000.0, -2.0 * pair / TV_MLA_ROPE);
        double even = raw[TV_MLA_LATENT + 2 * pair], odd = raw[TV_MLA_LATENT + 2 * pair + 1];
        row[TV_MLA_LATENT + pair] = even * cos(angle) - odd * sin(angle);
        row[TV_MLA_LATENT + TV_MLA_ROPE / 2 + pair] = odd * cos(angle) + even * sin(angle);
    }
}

/* Sums over the row with a weight for each place, so that two parts cannot change places. */
static double checksum(const double *row)
{
    double sum = 0.0;
    for (int32_t i = 0; i < TV_MLA_ROW; i++) {
        sum += row[i] * (1.0 + i % 97);
    }
    return sum;
}

static void stored_row_by_checksum_b29(void **state)
{
    (void)state;
    static struct tv_tiny_model tiny; /* large */
    char dir[256];
    struct tv_fixture fixture;
    struct tv_cache_seq seq = {0};
    int32_t tokens[40];
    tv_tiny_folder(dir, sizeof dir);
    tv_tiny_init(&tiny, 29);
    tv_tiny_write(&tiny, dir);
    struct tv_fixture_options options = {.backend = "cpu",
                                         .dir = dir,
                                         .page_size = 16,
                                         .rows_max = 64,
                                         .requests_max = 1,
                                         .pages = 8,
                                         .threads = 1};
    tv_fixture_open(&fixture, &options);
    tv_test_prefix_fill(tokens, 40, 11, 3);
    (void)tv_fixture_prefill(&fixture, &seq, tokens, 40, 7);
    double worst = 0.0;
    for (int32_t position = 0; position < 40; position++) {
        double want[TV_MLA_ROW], got[TV_MLA_ROW];
        size_t bytes = 0;
        const float *row = (const float *)tv_test_kv_row(&fixture, &seq, 0, position, &bytes);
        assert_int_equal(bytes, TV_MLA_ROW * sizeof(float));
        row_expected(&tiny, tokens[position], position, want);
        for (int32_t i = 0; i < TV_MLA_ROW; i++) {
            got[i] = (double)row[i];
            worst = fmax(worst, fabs(got[i] - want[i]));
            assert_true(fabs(got[i] - want[i]) <= 1e-4);
        }
        assert_true(fabs(checksum(got) - checksum(want)) <= 2e-2);
    }
    print_message("40 rows of the first layer: %.1e from doubles\n", worst);
    tv_cache_seq_finish(fixture.cache, &seq);
    tv_fixture_close(&fixture);
    tv_tiny_finish(&tiny);
    tv_tiny_folder_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_equal_plain_decoding_b02_b07),
        cmocka_unit_test(long_prefixes_in_one_batch_b14),
        cmocka_unit_test(stored_row_by_checksum_b29),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
