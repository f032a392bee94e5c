/*
 * test_verify_between.c - rounds of other sessions in the middle of a prefill pass: neither the
 * pass nor the rounds can be told from those that ran alone, bit for bit; nor can rows that are
 * settled, cut or given back there.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine_fixture.h"

#define PROMPT  150
#define PREFIX  40
#define NODES   24
#define ROUNDS  3
#define VISITED 8 /* calls of between that do something */

#define MOVES 4

/* A session whose rows are moved and given back between, and another one that ends there. */
struct mover {
    struct tv_engine *engine;
    struct tv_context *context, *ending;
    struct tv_tree tree;
    int32_t moves; /* so far */
};

/* A session whose rounds run between, and what they answered. */
struct visitor {
    struct tv_engine *engine;
    struct tv_context *context;
    struct tv_tree trees[ROUNDS];
    float *logits[ROUNDS]; /* [NODES, vocab] */
    int32_t accepted[ROUNDS], pending[ROUNDS];
    int32_t rounds, calls;
    int32_t every;       /* calls, one of which does something; 0: 3 */
    struct mover *mover; /* what else happens there, or NULL */
};

static void mover_open(struct mover *mover, struct tv_engine *engine)
{
    struct tv_test_random random = {.state = 78};
    struct tv_round_rule rule = tv_test_greedy(engine);
    int32_t prefix[PREFIX];
    *mover = (struct mover){
        .engine = engine, .context = tv_test_context(engine), .ending = tv_test_context(engine)};
    tv_test_prefix_fill(prefix, PREFIX, engine->vocab, 7);
    (void)tv_test_prefill(engine, mover->context, prefix, PREFIX, &rule);
    (void)tv_test_prefill(engine, mover->ending, prefix, PREFIX, &rule);
    tv_test_tree_random(&mover->tree, NODES, engine->vocab, 9, &random);
}

/* A round is held, settled by the last child of node 0, cut to half; and the other session ends. */
static void move(struct mover *mover)
{
    const struct tv_engine_ops *ops = mover->engine->ops;
    struct tv_round_in in = {.context = mover->context,
                             .tree = &mover->tree,
                             .rule = tv_test_greedy(mover->engine),
                             .hold = 1};
    struct tv_round_out out = {0};
    int32_t path[2] = {0, 0};
    for (int32_t i = 1; i < NODES; i++) {
        path[1] = mover->tree.parents[i] == 0 ? i : path[1];
    }
    switch (mover->moves++) {
    case 0:
        assert_int_equal(ops->verify(mover->engine, &in, 1, &out), 0);
        assert_int_equal(out.code, TV_OK);
        break;
    case 1:
        assert_true(path[1] > 1); /* its row moves */
        assert_int_equal(ops->settle(mover->engine, mover->context, path, 2), 0);
        break;
    case 2:
        assert_int_equal(ops->truncate(mover->engine, mover->context, PREFIX + 1), 0);
        break;
    default:
        ops->context_close(mover->engine, mover->ending);
        mover->ending = NULL;
        break;
    }
}

/* Its rows: what they make of another tree. */
static void mover_close(struct mover *mover, float *ret_logits)
{
    struct tv_round_rule rule = tv_test_greedy(mover->engine);
    struct tv_round_out out = {0};
    assert_int_equal(mover->moves, MOVES);
    assert_int_equal(mover->engine->ops->context_len(mover->context), PREFIX + 1);
    tv_test_verify(mover->engine, mover->context, &mover->tree, &rule, 0, &out);
    memcpy(ret_logits, out.logits, NODES * (size_t)mover->engine->vocab * sizeof(float));
    mover->engine->ops->context_close(mover->engine, mover->context);
    tv_tree_finish(&mover->tree);
}

static void movers_equal(struct mover *left, struct mover *right)
{
    size_t bytes = NODES * (size_t)left->engine->vocab * sizeof(float);
    float *rows[2] = {malloc(bytes), malloc(bytes)};
    assert_true(rows[0] != NULL && rows[1] != NULL);
    mover_close(left, rows[0]);
    mover_close(right, rows[1]);
    assert_memory_equal(rows[0], rows[1], bytes);
    free(rows[0]);
    free(rows[1]);
}

static void visitor_open(struct visitor *visitor, struct tv_engine *engine)
{
    struct tv_test_random random = {.state = 77};
    struct tv_round_rule rule = tv_test_greedy(engine);
    int32_t prefix[PREFIX];
    *visitor = (struct visitor){.engine = engine, .context = tv_test_context(engine)};
    tv_test_prefix_fill(prefix, PREFIX, engine->vocab, 5);
    (void)tv_test_prefill(engine, visitor->context, prefix, PREFIX, &rule);
    for (int32_t i = 0; i < ROUNDS; i++) {
        tv_test_tree_random(&visitor->trees[i], NODES, engine->vocab, 9 + i, &random);
        visitor->logits[i] = malloc(NODES * (size_t)engine->vocab * sizeof(float));
        assert_non_null(visitor->logits[i]);
    }
}

static void visitor_close(struct visitor *visitor)
{
    visitor->engine->ops->context_close(visitor->engine, visitor->context);
    for (int32_t i = 0; i < ROUNDS; i++) {
        tv_tree_finish(&visitor->trees[i]);
        free(visitor->logits[i]);
    }
}

/* One round, committed: the next one depends on it. */
static void visit(struct visitor *visitor)
{
    struct tv_round_rule rule = tv_test_greedy(visitor->engine);
    struct tv_round_out out;
    int32_t i = visitor->rounds;
    memset(&out, 0, sizeof out);
    tv_test_verify(visitor->engine, visitor->context, &visitor->trees[i], &rule, 1, &out);
    memcpy(visitor->logits[i], out.logits, NODES * (size_t)visitor->engine->vocab * sizeof(float));
    visitor->accepted[i] = out.accepted_count;
    visitor->pending[i] = out.end.token;
    visitor->rounds++;
}

static void between(void *context)
{
    struct visitor *visitor = context;
    int32_t every = visitor->every > 0 ? visitor->every : 3;
    if (visitor->calls % every == every / 2 && visitor->rounds < ROUNDS) {
        visit(visitor);
    }
    for (int32_t i = 0; i < (every == 1 ? 2 : 1); i++) { /* there are few such calls then */
        if (visitor->mover != NULL && visitor->mover->moves < MOVES) {
            move(visitor->mover);
        }
    }
    visitor->calls++;
}

static void visitors_equal(const struct visitor *left, const struct visitor *right)
{
    size_t bytes = NODES * (size_t)left->engine->vocab * sizeof(float);
    assert_int_equal(left->rounds, ROUNDS);
    assert_int_equal(right->rounds, ROUNDS);
    for (int32_t i = 0; i < ROUNDS; i++) {
        assert_memory_equal(left->logits[i], right->logits[i], bytes);
        assert_int_equal(left->accepted[i], right->accepted[i]);
        assert_int_equal(left->pending[i], right->pending[i]);
    }
}

/* The prompt's own round afterwards shows its KV rows. */
static void prompt_run(struct tv_engine *engine, struct visitor *host)
{
    int32_t prompt[PROMPT];
    struct tv_round_rule rule = tv_test_greedy(engine);
    tv_test_prefix_fill(prompt, PROMPT, engine->vocab, 6);
    int32_t drawn = tv_test_prefill(engine, host->context, prompt, PROMPT, &rule);
    host->pending[ROUNDS - 1] = drawn;
    for (int32_t i = 0; i < ROUNDS; i++) {
        visit(host);
    }
}

static int (*sync_before)(struct tv_kernels *k);
static int waits;

static int sync_counted(struct tv_kernels *k)
{
    waits++;
    return sync_before(k);
}

static void run(const char *model, const char *backend, int apart)
{
    struct tv_engine_fixture fixture;
    const struct tv_engine_fixture_options options = {
        .model = model, .backend = backend, .apart = apart};
    struct visitor alone, guest, host_alone, host;
    struct mover still, moved;
    tv_engine_fixture_open(&fixture, &options);
    struct tv_engine *engine = fixture.engine;
    visitor_open(&alone, engine);
    visitor_open(&guest, engine);
    visitor_open(&host_alone, engine);
    visitor_open(&host, engine);
    mover_open(&still, engine);
    mover_open(&moved, engine);
    for (int32_t i = 0; i < ROUNDS; i++) {
        visit(&alone);
    }
    for (int32_t i = 0; i < MOVES; i++) {
        move(&still);
    }
    prompt_run(engine, &host_alone);
    assert_int_equal(guest.calls, 0);
    guest.every = apart ? 1 : 0; /* between layers only */
    guest.mover = &moved;
    engine->between = between;
    engine->between_context = &guest;
    prompt_run(engine, &host);
    engine->between = NULL;
    assert_true(guest.calls >= (apart ? ROUNDS : VISITED)); /* it could be interrupted */
    visitors_equal(&alone, &guest);
    visitors_equal(&host_alone, &host);
    movers_equal(&still, &moved);
    visitor_close(&alone);
    visitor_close(&guest);
    visitor_close(&host_alone);
    visitor_close(&host);
    tv_engine_fixture_close(&fixture);
}

static void rounds_between_are_rounds_alone(void **state)
{
    (void)state;
    run("v2lite", "cpu", 0);
    run("v3", "cpu", 0);
}

static void the_reference_backend_does_the_same(void **state)
{
    (void)state;
    run("v2lite", "ref", 0);
}

/* A device's pass goes between layers, and has come to its end there. */
static void a_device_is_waited_for(void **state)
{
    (void)state;
    run("v3", "cpu", 1);

    struct tv_engine_fixture fixture;
    const struct tv_engine_fixture_options options = {.model = "v3", .apart = 1};
    struct visitor guest, host;
    struct tv_round_rule rule;
    int32_t prompt[PROMPT];
    tv_engine_fixture_open(&fixture, &options);
    visitor_open(&guest, fixture.engine);
    visitor_open(&host, fixture.engine);
    rule = tv_test_greedy(fixture.engine);
    tv_test_prefix_fill(prompt, PROMPT, fixture.engine->vocab, 6);
    guest.rounds = ROUNDS; /* calls are counted alone */
    fixture.engine->between = between;
    fixture.engine->between_context = &guest;
    sync_before = fixture.base.kernels->sync;
    fixture.base.kernels->sync = sync_counted;
    waits = 0;
    (void)tv_test_prefill(fixture.engine, host.context, prompt, PROMPT, &rule);
    fixture.base.kernels->sync = sync_before;
    fixture.engine->between = NULL;
    assert_int_equal(guest.calls, tv_model_config(fixture.base.model)->layers);
    assert_true(waits >= guest.calls);
    visitor_close(&guest);
    visitor_close(&host);
    tv_engine_fixture_close(&fixture);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounds_between_are_rounds_alone),
        cmocka_unit_test(the_reference_backend_does_the_same),
        cmocka_unit_test(a_device_is_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
