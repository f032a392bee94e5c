/*
 * test_verify_engine.c - the real engine's batches, refusals and self-test.
 *
 * What rounds commit is test_verify_rounds.c's. Runs on bundled checkpoints with a poisoned pool.
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
#include "verify/engine.h"

#define SESSIONS 9

/* The top five of every node are of its row of `logits`. */
static void topk_is_of(const struct tv_round_out *out, const float *logits, int32_t count,
                       size_t vocab)
{
    for (int32_t i = 0; i < count; i++) {
        const int32_t *ids = out->topk_ids + (size_t)i * 5;
        double sum = 0.0;
        for (size_t t = 0; t < vocab; t++) {
            sum += exp((double)logits[(size_t)i * vocab + t]);
        }
        for (int32_t k = 0; k < 5; k++) {
            assert_true(out->topk_logits[(size_t)i * 5 + (size_t)k] ==
                        logits[(size_t)i * vocab + (size_t)ids[k]]);
        }
        assert_true(fabs((double)out->topk_lse[i] - log(sum)) < 1e-4);
    }
}

static void mixed_batch_equals_alone_b14(void **state)
{
    (void)state;
    static const int32_t lens[SESSIONS] = {0, 1, 63, 64, 65, 130, 255, 400, 17};
    static const int32_t counts[SESSIONS] = {1, 8, 33, 64, 1, 8, 33, 64, 5};
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {
        .model = "v3", .page_size = 64, .requests_max = SESSIONS, .max_len = 512};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_test_random random = {.state = 21};
    struct tv_round_in in[SESSIONS] = {0};
    struct tv_round_out out[SESSIONS], alone;
    struct tv_tree trees[SESSIONS];
    int32_t *prefix = malloc(512 * sizeof *prefix);
    float *logits[SESSIONS];
    int32_t nodes[SESSIONS][64], accepted[SESSIONS], pending[SESSIONS];
    assert_non_null(prefix);
    for (int32_t s = 0; s < SESSIONS; s++) {
        in[s].context = tv_test_context(engine);
        tv_test_prefix_fill(prefix, lens[s], engine->vocab, 40 + (uint64_t)s);
        (void)tv_test_prefill(engine, in[s].context, prefix, lens[s], NULL);
        if (s % 4 == 2) { /* star */
            int32_t tokens[64], parents[64];
            for (int32_t i = 0; i < counts[s]; i++) {
                tokens[i] = i;
                parents[i] = i == 0 ? -1 : 0;
            }
            tv_test_tree(&trees[s], counts[s], tokens, parents);
        } else {
            tv_test_tree_random(&trees[s], counts[s], engine->vocab, s, &random);
        }
        in[s].tree = &trees[s];
        in[s].rule =
            s % 2 == 0 ? tv_test_greedy(engine) : tv_test_sampled(engine, 0.8f, 1000 + (uint64_t)s);
        in[s].want_logits = 1;
        in[s].top_k = 5;
    }
    assert_int_equal(engine->ops->verify(engine, in, SESSIONS, out), 0);
    size_t vocab = (size_t)engine->vocab;
    for (int32_t s = 0; s < SESSIONS; s++) {
        size_t floats = (size_t)counts[s] * vocab;
        assert_int_equal(out[s].code, TV_OK);
        logits[s] = malloc(floats * sizeof **logits);
        assert_non_null(logits[s]);
        memcpy(logits[s], out[s].logits, floats * sizeof **logits);
        accepted[s] = out[s].accepted_count;
        pending[s] = out[s].end.token;
        memcpy(nodes[s], out[s].nodes, (size_t)accepted[s] * sizeof **nodes);
        topk_is_of(&out[s], logits[s], counts[s], vocab);
    }
    for (int32_t s = 0; s < SESSIONS; s++) {
        assert_int_equal(engine->ops->verify(engine, &in[s], 1, &alone), 0);
        assert_int_equal(alone.code, TV_OK);
        assert_int_equal(alone.accepted_count, accepted[s]);
        assert_int_equal(alone.end.token, pending[s]);
        assert_memory_equal(alone.nodes, nodes[s], (size_t)accepted[s] * sizeof **nodes);
        assert_memory_equal(alone.logits, logits[s], (size_t)counts[s] * vocab * sizeof(float));
        free(logits[s]);
        tv_tree_finish(&trees[s]);
        engine->ops->context_close(engine, in[s].context);
    }
    free(prefix);
    tv_engine_fixture_close(&fixture);
}

static void depth_at_the_context_limit_b15(void **state)
{
    (void)state;
    static const int32_t depths[] = {4, 5, 6, 64};
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = "v3", .page_size = 16, .max_len = 80};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    struct tv_context *context = tv_test_context(engine);
    int32_t prefix[80], chain[65];
    tv_test_prefix_fill(prefix, 80, engine->vocab, 8);
    tv_test_prefix_fill(chain, 65, engine->vocab, 9);
    (void)tv_test_prefill(engine, context, prefix, 75, NULL);
    for (size_t d = 0; d < 4; d++) {
        struct tv_tree tree;
        struct tv_round_out out;
        tv_test_tree_chain(&tree, chain, depths[d] + 1);
        struct tv_round_in in = {.context = context, .tree = &tree, .rule = rule};
        assert_int_equal(engine->ops->verify(engine, &in, 1, &out), 0);
        assert_int_equal(out.code, depths[d] <= 4 ? TV_OK : TV_CONTEXT_FULL);
        assert_int_equal(context->seq.len, 75);
        assert_int_equal(context->seq.scratch, 0);
        tv_tree_finish(&tree);
    }
    struct tv_cache_shortage shortage;
    assert_int_equal(engine->ops->prefill(engine, context, prefix, 6, NULL, NULL, &shortage),
                     -EINVAL);
    int32_t pending = tv_test_prefill(engine, context, prefix, 5, &rule); /* up to the last row */
    assert_in_range(pending, 0, engine->vocab - 1);
    engine->ops->context_close(engine, context);
    tv_engine_fixture_close(&fixture);
}

/* A prefill that lacks pages and one of a bad id are refused; the session stays as it was. */
static void prefills_are_refused(struct tv_engine *engine, struct tv_context *context)
{
    struct tv_round_rule rule = tv_test_greedy(engine);
    struct tv_cache_shortage shortage = {0};
    struct tv_drawn drawn;
    int32_t many[200];
    int32_t len = context->seq.len;
    tv_test_prefix_fill(many, 200, engine->vocab, 1);
    assert_int_equal(engine->ops->prefill(engine, context, many, 200, &rule, &drawn, &shortage),
                     -ENOSPC);
    assert_true(shortage.pages_needed > shortage.pages_free);
    assert_int_equal(context->seq.len, len);
    assert_int_equal(
        engine->ops->prefill(engine, context, &engine->vocab, 1, &rule, &drawn, &shortage),
        -EINVAL);
}

/* What the three failed rounds say, and that their sessions stay as they were. */
static void failures_are_told(const struct tv_round_in *in, const struct tv_round_out *out)
{
    assert_int_equal(out[0].code, TV_NUMERIC_FAULT);
    assert_int_equal(out[1].code, TV_TREE_INVALID);
    assert_int_equal(out[2].code, TV_KV_FULL);
    assert_true(out[2].shortage.pages_needed > out[2].shortage.pages_free);
    for (int32_t s = 0; s < 3; s++) {
        assert_int_equal(in[s].context->seq.len, 30);
        assert_int_equal(in[s].context->seq.scratch, 0);
        assert_true(out[s].detail[0] != '\0');
    }
}

/* One round of a batch lacks pages, one has a bad id, one has NaN rows: the fourth does not care.
 */
static void failures_stay_in_their_round_b43(void **state)
{
    (void)state;
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = "v3", .page_size = 16, .pages = 22};
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    struct tv_round_rule rule = tv_test_greedy(engine);
    struct tv_round_in in[4] = {0};
    struct tv_round_out out[4], alone;
    struct tv_cache_counts counts;
    struct tv_test_random random = {.state = 5};
    struct tv_tree good, bad, huge;
    int32_t prefix[30];
    tv_test_prefix_fill(prefix, 30, engine->vocab, 2);
    tv_test_tree_random(&good, 10, engine->vocab, 1, &random);
    tv_test_tree_random(&bad, 10, engine->vocab, 1, &random);
    tv_test_tree_random(&huge, 200, engine->vocab, 1, &random);
    bad.tokens[7] = engine->vocab;
    for (int32_t s = 0; s < 4; s++) {
        in[s] = (struct tv_round_in){.context = tv_test_context(engine),
                                     .tree = s == 1   ? &bad
                                             : s == 2 ? &huge
                                                      : &good,
                                     .rule = rule,
                                     .want_logits = 1,
                                     .commit = 1};
        (void)tv_test_prefill(engine, in[s].context, prefix, 30, NULL);
    }
    /* rows 3 and 4 of session 0 become NaN */
    size_t bytes = 0;
    const char *row = tv_test_kv_row(&fixture.base, &in[0].context->seq, 0, 3, &bytes);
    char *kept = malloc(2 * bytes);
    assert_non_null(kept);
    memcpy(kept, row, 2 * bytes);
    char *pool = tv_cache_layer(fixture.base.cache, 0);
    memset(pool + (row - pool), 0xff, 2 * bytes);

    struct tv_round_in without = in[3];
    without.commit = 0;
    assert_int_equal(engine->ops->verify(engine, &without, 1, &alone), 0);
    assert_int_equal(alone.code, TV_OK);
    int32_t accepted = alone.accepted_count, pending = alone.end.token;
    tv_cache_counts(fixture.base.cache, &counts);
    int64_t free_before = counts.free;
    assert_int_equal(engine->ops->verify(engine, in, 4, out), 0);
    failures_are_told(in, out);
    assert_int_equal(out[3].code, TV_OK);
    assert_int_equal(out[3].accepted_count, accepted);
    assert_int_equal(out[3].end.token, pending);
    tv_cache_counts(fixture.base.cache, &counts);
    assert_true(counts.free == free_before - in[3].context->seq.page_count + 2);
    memcpy(pool + (row - pool), kept, 2 * bytes); /* healed: the session is usable again */
    assert_int_equal(engine->ops->verify(engine, &in[0], 1, &out[0]), 0);
    assert_int_equal(out[0].code, TV_OK);
    assert_int_equal(out[0].end.token, pending);
    prefills_are_refused(engine, in[1].context);
    for (int32_t s = 0; s < 4; s++) {
        engine->ops->context_close(engine, in[s].context);
    }
    free(kept);
    tv_tree_finish(&good);
    tv_tree_finish(&bad);
    tv_tree_finish(&huge);
    tv_engine_fixture_close(&fixture);
}

static void self_test_sees_a_changed_weight_b54(void **state)
{
    (void)state;
    struct tv_engine_fixture fixture;
    struct tv_engine_fixture_options options = {.model = "v3", .page_size = 16};
    char detail[200];
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    assert_true(engine->noise > 0.0 && engine->noise < 5e-4);
    assert_int_equal(engine->ops->self_test(engine, detail, sizeof detail), 0);
    const struct tv_model_weights *weights = tv_model_weights(fixture.base.model);
    uintptr_t address = (uintptr_t)weights->layers[0].o.data; /* ours to break: host memory */
    uint16_t *element = (uint16_t *)address + 5;
    *element = (uint16_t)(*element ^ 0x0040u);
    assert_int_equal(engine->ops->self_test(engine, detail, sizeof detail), -EIO);
    assert_non_null(strstr(detail, "differ"));
    *element = (uint16_t)(*element ^ 0x0040u);
    assert_int_equal(engine->ops->self_test(engine, detail, sizeof detail), 0);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mixed_batch_equals_alone_b14),
        cmocka_unit_test(depth_at_the_context_limit_b15),
        cmocka_unit_test(failures_stay_in_their_round_b43),
        cmocka_unit_test(self_test_sees_a_changed_weight_b54),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
