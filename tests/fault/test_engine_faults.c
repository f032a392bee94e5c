/*
 * test_engine_faults.c - the real engine on a tiny model while the n-th allocation or device call
 * fails: its creation, a prefill, and rounds of one and of two contexts.
 *
 * After each failure: the exact code, the length and the pages of before, no block left. The call
 * that then succeeds gives the answer and the KV rows of a run without failures.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "faults.h"
#include "tiny_engine.h"

static void creation_sweep(struct world *world, unsigned kind)
{
    int64_t free_before = pages_free(world);
    int stride = fault_stride(); /* thousands of calls: a self-test and its judge */
    for (int n = 1;; n += n < 100 ? 1 : stride) {
        struct tv_engine *engine = NULL;
        char detail[200] = "";
        int64_t blocks = fault_blocks();
        fault_arm(kind, n);
        int rc = engine_make(world, &engine, detail, sizeof detail);
        int failed = fault_disarm();
        if (failed ? rc != -ENOMEM && rc != -EIO : rc != 0) {
            fail_msg("call %d: %d '%s'", n, rc, detail);
        }
        assert_true(!failed || kind != FAULT_MEMORY || rc == -ENOMEM);
        if (!failed) {
            print_message("%d calls\n", n - 1);
            assert_true(n > 10);
            assert_true(engine->noise == world->engine->noise);
            engine->ops->destroy(engine);
            assert_int_equal(pages_free(world), free_before);
            return;
        }
        assert_null(engine);
        assert_int_equal(pages_free(world), free_before);
        assert_int_equal(fault_blocks(), blocks);
    }
}

static void creation_without_memory(void **state)
{
    creation_sweep(*state, FAULT_MEMORY);
}

static void creation_on_a_failing_device(void **state)
{
    creation_sweep(*state, FAULT_DEVICE);
}

/* All KV rows of two contexts have the same bits. */
static void rows_equal(struct world *world, const struct tv_context *a, const struct tv_context *b)
{
    const struct tv_cache_params *params = tv_cache_params(world->cache);
    size_t bytes = (size_t)params->row_dim * sizeof(float);
    assert_int_equal(a->seq.len, b->seq.len);
    for (int32_t layer = 0; layer < params->layers; layer++) {
        const char *pages = tv_cache_layer(world->cache, layer);
        for (int32_t row = 0; row < a->seq.len; row++) {
            assert_memory_equal(pages + (size_t)tv_cache_slot(world->cache, &a->seq, row) * bytes,
                                pages + (size_t)tv_cache_slot(world->cache, &b->seq, row) * bytes,
                                bytes);
        }
    }
}

static void prefill_fails(void **state)
{
    struct world *world = *state;
    const struct tv_engine_ops *ops = world->engine->ops;
    struct tv_round_rule rule = rule_of(world);
    struct tv_cache_shortage shortage;
    struct tv_drawn clean_drawn, drawn = {.token = -7};
    struct tv_context *clean = context_make(world, &clean_drawn), *context = NULL;
    assert_int_equal(ops->context_open(world->engine, &context), 0);
    for (int kind = 0; kind < 2; kind++) {
        int64_t free_before = pages_free(world);
        for (int n = 1;; n++) {
            fault_arm(kind == 0 ? FAULT_MEMORY : FAULT_DEVICE, n);
            int rc = ops->prefill(world->engine, context, world->prefix, PREFIX, &rule, &drawn,
                                  &shortage);
            int failed = fault_disarm();
            if (!failed) {
                assert_int_equal(rc, 0);
                assert_true(kind == 0 || n > 30);
                break;
            }
            assert_int_equal(rc, kind == 0 ? -ENOMEM : -EIO);
            assert_int_equal(context->seq.len, 0);
            assert_int_equal(context->seq.page_count, 0);
            assert_int_equal(drawn.token, -7);
            assert_int_equal(pages_free(world), free_before);
        }
        assert_int_equal(drawn.token, clean_drawn.token);
        assert_true(drawn.margin == clean_drawn.margin);
        rows_equal(world, context, clean);
        if (kind == 0) {
            assert_int_equal(ops->truncate(world->engine, context, 0), 0);
            drawn.token = -7;
        }
    }
    ops->context_close(world->engine, context);
    ops->context_close(world->engine, clean);
}

struct answer {
    int32_t accepted, pending, nodes[NODES], ids[NODES * 3];
    float logits[NODES * VOCAB];
};

static void answer_take(const struct tv_round_out *out, struct answer *answer)
{
    memset(answer, 0, sizeof *answer);
    answer->accepted = out->accepted_count;
    answer->pending = out->end.token;
    memcpy(answer->nodes, out->nodes, (size_t)out->accepted_count * sizeof *out->nodes);
    memcpy(answer->ids, out->topk_ids, sizeof answer->ids);
    memcpy(answer->logits, out->logits, sizeof answer->logits);
}

/* A round that met the failing call changed nothing; the others of its launch have their answer. */
static int round_settled(const struct tv_round_out *out, unsigned kind, struct tv_context *context,
                         const struct answer *expected)
{
    struct answer answer;
    if (out->code == TV_OK) {
        answer_take(out, &answer);
        assert_memory_equal(&answer, expected, sizeof answer);
        assert_int_equal(context->seq.len, PREFIX + answer.accepted);
        return 1;
    }
    assert_int_equal(out->code, kind == FAULT_MEMORY ? TV_OVERLOADED : TV_KERNEL_FAULT);
    assert_true(out->detail[0] != '\0');
    assert_int_equal(out->accepted_count, 0);
    assert_int_equal(context->seq.len, PREFIX);
    assert_int_equal(context->seq.scratch, 0);
    assert_int_equal(context->seq.page_count, 2);
    return 0;
}

static void rounds_sweep(struct world *world, int32_t count, unsigned kind)
{
    const struct tv_engine_ops *ops = world->engine->ops;
    struct tv_round_in in[2];
    struct tv_round_out out[2];
    struct tv_drawn drawn;
    struct answer expected;
    struct tv_context *clean = context_make(world, &drawn), *contexts[2];
    world->tokens[0] = drawn.token;
    round_set(world, &in[0], clean);
    assert_int_equal(ops->verify(world->engine, in, 1, out), 0);
    answer_take(&out[0], &expected);
    int64_t free_before = pages_free(world);
    for (int n = 1;; n++) {
        int answered = 0;
        for (int32_t i = 0; i < count; i++) {
            contexts[i] = context_make(world, &drawn);
            round_set(world, &in[i], contexts[i]);
        }
        memset(out, 0, sizeof out);
        fault_arm(kind, n);
        int rc = ops->verify(world->engine, in, count, out);
        int failed = fault_disarm();
        assert_true(failed ? rc == 0 || rc == -EIO : rc == 0);
        for (int32_t i = 0; i < count; i++) {
            answered += round_settled(&out[i], kind, contexts[i], &expected);
            if (out[i].code == TV_OK) {
                rows_equal(world, contexts[i], clean);
            }
        }
        assert_true(failed ? answered < count : answered == count);
        for (int32_t i = 0; i < count; i++) {
            ops->context_close(world->engine, contexts[i]);
        }
        assert_int_equal(pages_free(world), free_before);
        if (!failed) {
            print_message("%d rounds: %d calls\n", count, n - 1);
            assert_true(kind == FAULT_MEMORY || n > 30);
            break;
        }
    }
    ops->context_close(world->engine, clean);
}

static void rounds_on_a_failing_device(void **state)
{
    rounds_sweep(*state, 1, FAULT_DEVICE);
    rounds_sweep(*state, 2, FAULT_DEVICE);
}

/* A round takes no memory, but for a page table that grows; then only its own round is refused. */
static void rounds_without_memory(void **state)
{
    struct world *world = *state;
    const struct tv_engine_ops *ops = world->engine->ops;
    struct tv_cache_shortage shortage;
    struct tv_context *contexts[2];
    struct tv_round_in in[2];
    struct tv_round_out out[2];
    struct tv_drawn drawn;
    rounds_sweep(world, 2, FAULT_MEMORY);
    contexts[0] = context_make(world, &drawn);
    contexts[1] = NULL;
    assert_int_equal(ops->context_open(world->engine, &contexts[1]), 0);
    for (int32_t done = 0; done < 240; done += PREFIX) { /* 15 pages of a table of 16 */
        assert_int_equal(ops->prefill(world->engine, contexts[1], world->prefix, PREFIX, NULL,
                                      &drawn, &shortage),
                         0);
    }
    for (int i = 0; i < 2; i++) {
        round_set(world, &in[i], contexts[i]);
    }
    int64_t free_before = pages_free(world);
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(ops->verify(world->engine, in, 2, out), 0);
    assert_int_equal(fault_disarm(), 1);
    assert_int_equal(out[0].code, TV_OK);
    assert_int_equal(out[1].code, TV_OVERLOADED);
    assert_int_equal(contexts[1]->seq.len, 240);
    assert_int_equal(pages_free(world), free_before);
    for (int i = 0; i < 2; i++) {
        ops->context_close(world->engine, contexts[i]);
    }
}

/* The repeat of the self-test on a failing device is a failed self-test, and the next one passes.
 */
static void self_test_fails(void **state)
{
    struct world *world = *state;
    int64_t free_before = pages_free(world);
    for (int n = 1;; n++) {
        char detail[200] = "";
        fault_arm(FAULT_DEVICE, n);
        int rc = world->engine->ops->self_test(world->engine, detail, sizeof detail);
        int failed = fault_disarm();
        assert_int_equal(rc, failed ? -EIO : 0);
        assert_int_equal(pages_free(world), free_before);
        if (!failed) {
            assert_true(n > 20);
            return;
        }
        assert_true(detail[0] != '\0');
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(creation_without_memory), cmocka_unit_test(creation_on_a_failing_device),
        cmocka_unit_test(prefill_fails),           cmocka_unit_test(rounds_on_a_failing_device),
        cmocka_unit_test(rounds_without_memory),   cmocka_unit_test(self_test_fails),
    };
    return cmocka_run_group_tests(tests, world_setup, world_teardown);
}
