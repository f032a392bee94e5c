/*
 * test_shadow.c - the oracles: right rounds are exact, planted faults are found, limits hold.
 *
 * Faults are planted between the engine and the capture, as a broken kernel would: an output
 * element, a bit of a page, a bit of the mask. Runs on bundled checkpoints with a poisoned pool.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine_fixture.h"
#include "shadow/round.h"
#include "shadow/shadow.h"
#include "verify/engine.h"

#define QUEUE_BYTES (64u << 20)
#define PREFIX_LEN  70

enum fault { FAULT_NONE, FAULT_OUTPUT, FAULT_PAGE, FAULT_MASK, FAULT_LSE, FAULT_NAN };

/* A hook in front of tv_shadow_layer that breaks one layer. */
struct planted {
    struct tv_shadow_round *round;
    enum fault fault;
    int32_t layer;
};

static void planted_layer(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct planted *planted = context;
    struct tv_verify_attn broken = *attn;
    size_t row = (size_t)(attn->latent_dim + attn->rope_dim);
    int32_t parents[64];
    if (layer != planted->layer || planted->fault == FAULT_NONE) {
        tv_shadow_layer(planted->round, layer, attn);
        return;
    }
    /* the model goes on with the right rows: only what is captured is broken */
    size_t rows = (size_t)attn->q_len * (size_t)attn->heads;
    size_t out_bytes = rows * (size_t)attn->latent_dim * sizeof(float);
    broken.out = malloc(out_bytes);
    broken.lse = malloc(rows * sizeof *broken.lse);
    assert_non_null(broken.out);
    assert_non_null(broken.lse);
    memcpy(broken.out, attn->out, out_bytes);
    memcpy(broken.lse, attn->lse, rows * sizeof *broken.lse);
    switch (planted->fault) {
    case FAULT_OUTPUT: /* what the fast kernel wrote is wrong in one element */
        ((float *)broken.out)[1234] += 0.01f;
        break;
    case FAULT_NAN:
        ((float *)broken.out)[77] = NAN;
        break;
    case FAULT_LSE:
        broken.lse[3] += 1e-3f;
        break;
    case FAULT_PAGE: { /* a bit of a prefix row flips after the kernel read it */
        uintptr_t address = (uintptr_t)attn->kv_pages;
        size_t at = ((size_t)attn->page_table[0] * (size_t)attn->page_size + 5) * row + 17;
        ((uint32_t *)address)[at] ^= UINT32_C(1) << 24;
        break;
    }
    case FAULT_MASK: /* the kernel saw another ancestor than the tree says */
        memcpy(parents, attn->parents, (size_t)attn->q_len * sizeof *parents);
        parents[attn->q_len - 1] = parents[attn->q_len - 1] == 0 ? 1 : 0;
        broken.parents = parents;
        break;
    case FAULT_NONE:
        break;
    }
    tv_shadow_layer(planted->round, layer, &broken);
    free(broken.out);
    free(broken.lse);
}

/* The block of one round, waited for. */
struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int done;
    struct tv_shadow_block block;
};

static void waiter_done(void *context, const struct tv_shadow_block *block)
{
    struct waiter *waiter = context;
    (void)pthread_mutex_lock(&waiter->lock);
    waiter->block = *block;
    waiter->done = 1;
    (void)pthread_cond_signal(&waiter->changed);
    (void)pthread_mutex_unlock(&waiter->lock);
}

static struct tv_shadow_block waiter_wait(struct waiter *waiter)
{
    (void)pthread_mutex_lock(&waiter->lock);
    while (!waiter->done) {
        (void)pthread_cond_wait(&waiter->changed, &waiter->lock);
    }
    (void)pthread_mutex_unlock(&waiter->lock);
    return waiter->block;
}

struct bench {
    struct tv_engine_fixture fixture;
    struct tv_shadow *shadow;
    struct tv_context *context;
    struct tv_tree tree;
    struct tv_round_rule rule;
    int32_t prefix[PREFIX_LEN];
    char dir[128];
};

static void bench_open(struct bench *bench, const char *model, int32_t page_size,
                       double probability, size_t queue_bytes, int with_dir)
{
    struct tv_test_random random = {.state = 17};
    struct tv_engine_fixture_options options = {.model = model, .page_size = page_size};
    const char *tmp = getenv("TMPDIR");
    memset(bench, 0, sizeof *bench);
    tv_engine_fixture_open(&bench->fixture, &options);
    struct tv_engine *engine = bench->fixture.engine;
    (void)snprintf(bench->dir, sizeof bench->dir, "%s/tv-shadow-XXXXXX",
                   tmp != NULL ? tmp : "/tmp");
    assert_non_null(mkdtemp(bench->dir));
    struct tv_shadow_params params = {.probability = probability,
                                      .queue_bytes_max = queue_bytes,
                                      .state_dir = with_dir ? bench->dir : NULL,
                                      .device = bench->fixture.base.kernels};
    assert_int_equal(tv_shadow_create(&params, bench->fixture.base.model, bench->fixture.base.cache,
                                      &bench->shadow),
                     0);
    bench->context = tv_test_context(engine);
    for (int32_t i = 0; i < PREFIX_LEN; i++) {
        bench->prefix[i] = tv_test_random_below(&random, engine->vocab);
    }
    bench->rule = tv_test_sampled(engine, 0.9f, 3);
    int32_t pending =
        tv_test_prefill(engine, bench->context, bench->prefix, PREFIX_LEN, &bench->rule);
    tv_test_tree_random(&bench->tree, 33, engine->vocab, pending, &random);
}

static void dir_remove(const char *dir)
{
    char command[200];
    (void)snprintf(command, sizeof command, "rm -rf '%s'", dir);
    assert_int_equal(system(command), 0);
}

static void bench_close(struct bench *bench)
{
    tv_shadow_destroy(bench->shadow);
    tv_tree_finish(&bench->tree);
    bench->fixture.engine->ops->context_close(bench->fixture.engine, bench->context);
    tv_engine_fixture_close(&bench->fixture);
    dir_remove(bench->dir);
}

static struct tv_parity_case case_of(const struct bench *bench, const struct tv_round_out *out,
                                     const struct tv_shadow_round *round)
{
    return (struct tv_parity_case){.prefix = bench->prefix,
                                   .prefix_len = PREFIX_LEN,
                                   .tree = &bench->tree,
                                   .rule = bench->rule,
                                   .logits = out->logits,
                                   .accepted_nodes = out->nodes,
                                   .accepted_count = out->accepted_count,
                                   .pending = out->end.token,
                                   .noise = bench->fixture.engine->noise,
                                   .round = round};
}

static void round_run(struct bench *bench, struct planted *planted, struct tv_round_out *out)
{
    struct tv_engine *engine = bench->fixture.engine;
    struct tv_round_in in = {.context = bench->context,
                             .tree = &bench->tree,
                             .rule = bench->rule,
                             .lend_logits = 1,
                             .hook = planted->round != NULL ? planted_layer : NULL,
                             .hook_context = planted};
    assert_int_equal(engine->ops->verify(engine, &in, 1, out), 0);
    assert_int_equal(out->code, TV_OK);
}

/* The mask is captured with the first layer, everything else with its own. */
static int32_t layer_of(enum fault fault)
{
    return fault == FAULT_MASK ? 0 : 1;
}

/* One forced round, judged; `change` turns the fast answer wrong before it is attached. */
static struct tv_shadow_block judged(struct bench *bench, enum fault fault, int32_t pending_change)
{
    struct planted planted = {.fault = fault, .layer = layer_of(fault)};
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct tv_round_out out;
    planted.round = tv_shadow_begin(bench->shadow, 1);
    assert_non_null(planted.round);
    round_run(bench, &planted, &out);
    struct tv_parity_case parity_case = case_of(bench, &out, planted.round);
    parity_case.pending = (parity_case.pending + pending_change) % bench->fixture.engine->vocab;
    tv_shadow_attach(bench->shadow, planted.round, &parity_case);
    tv_shadow_submit(bench->shadow, planted.round, waiter_done, &waiter);
    return waiter_wait(&waiter);
}

static struct tv_parity_totals totals_of(struct bench *bench,
                                         struct tv_parity_violation *violations)
{
    struct tv_parity_totals totals;
    tv_shadow_totals(bench->shadow, &totals, violations, 32);
    return totals;
}

static void right_rounds_are_exact(void **state)
{
    (void)state;
    static const char *const models[] = {"v3", "v2lite", "moonlight", "kjv-mla-8m"};
    for (size_t m = 0; m < 4; m++) {
        struct bench bench;
        struct tv_parity_violation violations[32];
        struct planted planted = {.fault = FAULT_NONE};
        struct tv_round_out out;
        struct tv_parity_report report = {0};
        bench_open(&bench, models[m], m % 2 == 0 ? 16 : 64, 0.0, QUEUE_BYTES, 1);
        struct tv_shadow_block block = judged(&bench, FAULT_NONE, 0);
        assert_int_equal(block.ran, 1);
        assert_int_equal(block.tokens_equal, 1);
        assert_int_equal(block.kernel.layers, tv_model_config(bench.fixture.base.model)->layers);
        assert_true(block.kernel.rel_l2 <= 2e-6);

        planted.round = tv_shadow_begin(bench.shadow, 1);
        round_run(&bench, &planted, &out);
        struct tv_parity_case parity_case = case_of(&bench, &out, planted.round);
        assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
        tv_shadow_abandon(bench.shadow, planted.round);
        print_message("%s: kernel rel_l2 %.2e, path logits %.2e (bound %.1e), %d of %d argmax, "
                      "%lld ms\n",
                      models[m], block.kernel.rel_l2, report.logit_max_abs, report.bound_logit_abs,
                      report.argmax_equal, report.path_rows, (long long)report.took_ms);
        assert_int_equal(report.ok, 1);
        assert_int_equal(report.path_rows, 33);
        assert_int_equal(report.argmax_equal + report.near_ties, 33);
        assert_int_equal(report.accepted_equal, 1);
        assert_int_equal(report.pending_equal, 1);
        assert_int_equal(report.kv_equal, 1);
        struct tv_parity_totals totals = totals_of(&bench, violations);
        assert_int_equal(totals.exact + totals.near_tie, 2);
        assert_int_equal(totals.violation, 0);
        assert_int_equal(totals.skipped, 1); /* the abandoned one */
        assert_string_equal(totals.mode, "off");
        bench_close(&bench);
    }
}

/* The path oracle against third-party logits: it is right by itself, not only equal to the fast. */
static void path_oracle_meets_the_references(void **state)
{
    (void)state;
    static const char *const models[] = {"v3", "v2lite", "moonlight"};
    static const char *const kinds[] = {"random", "chain", "star"};
    for (size_t m = 0; m < 3; m++) {
        struct bench bench;
        char dir[4096];
        int32_t prefix_len = 0;
        bench_open(&bench, models[m], 64, 0.0, QUEUE_BYTES, 0);
        (void)snprintf(dir, sizeof dir, "%s", tv_fixture_dir(models[m]));
        int32_t *prefix = tv_refs_ints(dir, "tree_prefix", &prefix_len);
        for (size_t k = 0; k < 3; k++) {
            char name[64];
            int32_t count = 0;
            int64_t floats = 0;
            struct tv_tree tree;
            struct tv_parity_report report = {0};
            (void)snprintf(name, sizeof name, "tree_%s_tokens", kinds[k]);
            int32_t *tokens = tv_refs_ints(dir, name, &count);
            (void)snprintf(name, sizeof name, "tree_%s_parents", kinds[k]);
            int32_t *parents = tv_refs_ints(dir, name, &count);
            (void)snprintf(name, sizeof name, "tree_%s_logits", kinds[k]);
            float *logits = tv_refs_floats(dir, name, &floats);
            assert_true(prefix != NULL && tokens != NULL && parents != NULL && logits != NULL);
            if (count > 1 && parents[1] < 0) { /* several roots: only as many as one tree has */
                count = 1;
            }
            tv_test_tree(&tree, count, tokens, parents);
            int32_t node = 0;
            struct tv_parity_case parity_case = {.prefix = prefix,
                                                 .prefix_len = prefix_len,
                                                 .tree = &tree,
                                                 .rule = tv_test_greedy(bench.fixture.engine),
                                                 .logits = logits,
                                                 .accepted_nodes = &node,
                                                 .accepted_count = 1};
            assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
            print_message("%s %s: %d rows, max_abs %.2e, bound %.1e\n", models[m], kinds[k], count,
                          report.logit_max_abs, report.bound_logit_abs);
            assert_true(report.logit_max_abs <= report.bound_logit_abs);
            assert_int_equal(report.argmax_equal, count);
            tv_tree_finish(&tree);
            free(tokens);
            free(parents);
            free(logits);
        }
        free(prefix);
        bench_close(&bench);
    }
}

static uint64_t le64(const char *data)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = value << 8 | (uint8_t)data[i];
    }
    return value;
}

static void planted_faults_are_found(void **state)
{
    (void)state;
    static const enum fault faults[] = {FAULT_OUTPUT, FAULT_NAN, FAULT_LSE, FAULT_MASK, FAULT_PAGE};
    struct bench bench;
    struct tv_parity_violation violations[32];
    bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 1);
    for (int32_t f = 0; f < 5; f++) {
        struct tv_shadow_block block = judged(&bench, faults[f], 0);
        assert_int_equal(block.ran, 1);
        print_message("fault %d: rel_l2 %.2e, max_abs %.2e\n", (int)faults[f], block.kernel.rel_l2,
                      block.kernel.max_abs);
        assert_true(block.kernel.rel_l2 > 2e-6 || faults[f] == FAULT_LSE);
        struct tv_parity_totals totals = totals_of(&bench, violations);
        assert_int_equal(totals.violation, f + 1);
        assert_int_equal(totals.exact, 0);
        assert_int_equal(totals.violation_count, f + 1);
        assert_string_equal(violations[f].kind, "kernel");
        const char *kind = NULL;
        char *data = NULL;
        size_t bytes = 0;
        assert_int_equal(tv_shadow_reproducer(bench.shadow, violations[f].n, &kind, &data, &bytes),
                         0);
        assert_string_equal(kind, "kernel");
        assert_true(bytes > 8 && le64(data) < bytes && le64(data) % 8 == 0);
        data[8 + le64(data) - 1] = '\0';
        assert_non_null(strstr(data + 8, "\"kind\":\"verify_attn\""));
        assert_non_null(strstr(data + 8, "\"out_fast\""));
        assert_non_null(
            strstr(data + 8, layer_of(faults[f]) == 0 ? "\"layer\":\"0\"" : "\"layer\":\"1\""));
        free(data);
    }
    bench_close(&bench);
}

/* A kernel reproducer is a bundle that test_verify_attn replays: both kernels are right on it. */
static void reproducer_replays(void **state)
{
    (void)state;
    static const char *const modes[] = {"", "--flash"};
    const char *program = getenv("TV_VERIFY_ATTN");
    struct bench bench;
    if (program == NULL || access(program, X_OK) != 0) {
        skip();
    }
    bench_open(&bench, "v3", 16, 0.0, QUEUE_BYTES, 1);
    (void)judged(&bench, FAULT_OUTPUT, 0);
    for (int m = 0; m < 2; m++) {
        char command[4600];
        (void)snprintf(command, sizeof command, "'%s' '%s/violation-00000001.kdtr' %s", program,
                       bench.dir, modes[m]);
        assert_int_equal(system(command), 0);
    }
    bench_close(&bench);
}

/* POST /v1/parity on the bundled model; the time is printed, not judged: builds differ. */
static void path_oracle_behind_a_prefix_of_200(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_report report = {0};
    struct tv_round_out out;
    struct tv_test_random random = {.state = 5};
    int32_t prefix[200];
    bench_open(&bench, "kjv-mla-8m", 64, 0.0, QUEUE_BYTES, 0);
    struct tv_engine *engine = bench.fixture.engine;
    struct tv_context *context = tv_test_context(engine);
    for (int32_t i = 0; i < 200; i++) {
        prefix[i] = tv_test_random_below(&random, 256);
    }
    (void)tv_test_prefill(engine, context, prefix, 200, NULL);
    tv_test_verify(engine, context, &bench.tree, &bench.rule, 0, &out);
    struct tv_parity_case parity_case = case_of(&bench, &out, NULL);
    parity_case.prefix = prefix;
    parity_case.prefix_len = 200;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 1);
    print_message("prefix 200, 33 nodes: %lld ms, logits %.2e (bound %.1e)\n",
                  (long long)report.took_ms, report.logit_max_abs, report.bound_logit_abs);
    engine->ops->context_close(engine, context);
    bench_close(&bench);
}

/* A wrong token behind right kernels: the redraw finds it; the path oracle finds it on demand. */
static void wrong_tokens_are_found(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    struct planted planted = {.fault = FAULT_NONE};
    struct tv_round_out out;
    struct tv_parity_report report = {0};
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 1);
    struct tv_shadow_block block = judged(&bench, FAULT_NONE, 1);
    assert_int_equal(block.ran, 1);
    assert_int_equal(block.tokens_equal, 0);
    assert_int_equal(totals_of(&bench, violations).violation, 1);
    assert_string_equal(violations[0].kind, "path");
    assert_int_equal(tv_shadow_reproducer(bench.shadow, violations[0].n, &kind, &data, &bytes), 0);
    struct tv_request request;
    struct tv_problem problem;
    struct tv_request_limits limits = {
        .tree = {.nodes_max = 256, .depth_max = 64, .vocab = bench.fixture.engine->vocab},
        .max_len = bench.fixture.engine->max_len,
        .inline_bytes = 1 << 20};
    /* the reproducer is a body that the contract takes, and says the same round */
    if (tv_request_decode(TV_CALL_PARITY, data, bytes, &limits, &request, &problem) != 0) {
        fail_msg("%s at %s in %.*s", problem.detail, problem.pointer, (int)bytes, data);
    }
    assert_int_equal(request.token_count, PREFIX_LEN);
    assert_memory_equal(request.tokens, bench.prefix, sizeof bench.prefix);
    assert_int_equal(request.tree.count, bench.tree.count);
    assert_memory_equal(request.tree.tokens, bench.tree.tokens, 33 * sizeof(int32_t));
    assert_memory_equal(request.tree.parents, bench.tree.parents, 33 * sizeof(int32_t));
    assert_true((float)request.sampling.temperature == bench.rule.sampling.temperature);
    assert_true(request.sampling.seed == bench.rule.sampling.seed);
    tv_request_finish(&request);
    free(data);

    round_run(&bench, &planted, &out);
    size_t floats = 33 * (size_t)bench.fixture.engine->vocab;
    float *logits = malloc(floats * sizeof *logits);
    assert_non_null(logits);
    memcpy(logits, out.logits, floats * sizeof *logits);
    struct tv_parity_case parity_case = case_of(&bench, &out, NULL);
    parity_case.logits = logits;
    parity_case.pending = (out.end.token + 1) % bench.fixture.engine->vocab;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 0);
    assert_int_equal(report.pending_equal, 0);
    assert_int_equal(report.accepted_equal, 1);
    parity_case.pending = out.end.token;
    logits[floats - 5] += 0.01f; /* one logit of the last node */
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 0);
    assert_true(report.logit_max_abs > 0.009);
    assert_int_equal(report.pending_equal, 1);
    logits[floats - 5] = NAN;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 0);
    assert_int_equal(totals_of(&bench, violations).violation, 4);
    free(logits);
    bench_close(&bench);
}

/* KV rows: a changed row of the prefix and a changed row of the tree are both seen. */
static void wrong_kv_rows_are_found(void **state)
{
    (void)state;
    for (int in_prefix = 0; in_prefix < 2; in_prefix++) {
        struct bench bench;
        struct planted planted = {.fault = in_prefix ? FAULT_PAGE : FAULT_NONE, .layer = 2};
        struct tv_round_out out;
        struct tv_parity_report report = {0};
        bench_open(&bench, "v3", 16, 0.0, QUEUE_BYTES, 0);
        planted.round = tv_shadow_begin(bench.shadow, 1);
        round_run(&bench, &planted, &out);
        struct tv_parity_case parity_case = case_of(&bench, &out, planted.round);
        int32_t kept = bench.prefix[PREFIX_LEN - 1];
        if (!in_prefix) { /* the text says another token than the rows were made from */
            bench.prefix[PREFIX_LEN - 1] = (kept + 1) % bench.fixture.engine->vocab;
        }
        assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
        assert_int_equal(report.kv_equal, 0);
        assert_int_equal(report.ok, 0);
        tv_shadow_abandon(bench.shadow, planted.round);
        bench_close(&bench);
    }
}

/* Sampling is a function of the round's number; what does not fit the queue is counted. */
static void sampling_queue_and_totals(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    int32_t taken = 0;
    for (int run = 0; run < 2; run++) {
        int32_t now = 0;
        bench_open(&bench, "v3", 64, 0.25, QUEUE_BYTES, 0);
        for (int32_t i = 0; i < 2000; i++) {
            struct tv_shadow_round *round = tv_shadow_begin(bench.shadow, 0);
            now += round != NULL ? 1 : 0;
            tv_shadow_abandon(bench.shadow, round);
        }
        assert_in_range(now, 420, 580);
        assert_int_equal(totals_of(&bench, violations).skipped, now);
        assert_string_equal(totals_of(&bench, violations).mode, "sample");
        if (run == 1) {
            assert_int_equal(now, taken);
        }
        taken = now;
        bench_close(&bench);
    }
    /* room for about two rounds: of twenty submitted at once, all are judged or skipped */
    bench_open(&bench, "v3", 64, 1.0, 5u << 20, 0);
    struct tv_cache_counts before, after;
    tv_cache_counts(bench.fixture.base.cache, &before);
    for (int32_t i = 0; i < 20; i++) {
        struct planted planted = {.round = tv_shadow_begin(bench.shadow, 0)};
        struct tv_round_out out;
        assert_non_null(planted.round);
        round_run(&bench, &planted, &out);
        tv_shadow_submit(bench.shadow, planted.round, NULL, NULL);
    }
    struct tv_shadow *shadow = bench.shadow;
    struct tv_parity_totals totals;
    for (int32_t i = 0; i < 6000; i++) { /* at most a minute, usually well below a second */
        tv_shadow_totals(shadow, &totals, violations, 32);
        if (totals.exact + totals.near_tie + totals.violation + totals.skipped == 20) {
            break;
        }
        (void)nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    print_message("queue of 5 MiB, 20 rounds: exact %lld, skipped %lld\n", (long long)totals.exact,
                  (long long)totals.skipped);
    assert_int_equal(totals.exact + totals.skipped, 20);
    assert_true(totals.exact >= 1 && totals.skipped >= 1);
    struct tv_shadow_params none = {.probability = 1.0, .queue_bytes_max = QUEUE_BYTES};
    tv_shadow_destroy(bench.shadow); /* every pin is gone with it */
    tv_cache_counts(bench.fixture.base.cache, &after);
    assert_true(before.free == after.free && after.shared == 0);
    assert_int_equal(tv_shadow_create(&none, NULL, NULL, &bench.shadow), 0);
    assert_null(tv_shadow_begin(bench.shadow, 0)); /* an engine without model: skipped */
    assert_null(tv_shadow_begin(bench.shadow, 1));
    assert_int_equal(totals_of(&bench, violations).skipped, 2);
    bench_close(&bench);
}

/* Pinned pages: the session rolls back and writes on while its round waits to be judged. */
static void captured_rows_outlive_the_session(void **state)
{
    (void)state;
    struct bench bench;
    struct planted planted = {.fault = FAULT_NONE};
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    struct tv_round_out out;
    bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 0);
    struct tv_engine *engine = bench.fixture.engine;
    planted.round = tv_shadow_begin(bench.shadow, 0);
    round_run(&bench, &planted, &out);
    struct tv_parity_case parity_case = case_of(&bench, &out, planted.round);
    tv_shadow_attach(bench.shadow, planted.round, &parity_case);
    int32_t other[60];
    for (int32_t i = 0; i < 60; i++) {
        other[i] = (bench.prefix[i] + 1) % engine->vocab;
    }
    assert_int_equal(engine->ops->truncate(engine, bench.context, 5), 0);
    (void)tv_test_prefill(engine, bench.context, other, 60, NULL);
    engine->ops->context_close(engine, bench.context);
    bench.context = tv_test_context(engine);
    (void)tv_test_prefill(engine, bench.context, other, 60, NULL);
    tv_shadow_submit(bench.shadow, planted.round, waiter_done, &waiter);
    struct tv_shadow_block block = waiter_wait(&waiter);
    assert_int_equal(block.ran, 1);
    assert_int_equal(block.tokens_equal, 1);
    assert_true(block.kernel.rel_l2 <= 2e-6);
    bench_close(&bench);
}

static void newest_reproducers_are_kept(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 1);
    for (int32_t i = 0; i < 35; i++) {
        (void)judged(&bench, i == 30 ? FAULT_OUTPUT : FAULT_NONE, 1);
    }
    struct tv_parity_totals totals = totals_of(&bench, violations);
    assert_int_equal(totals.violation, 35);
    assert_int_equal(totals.violation_count, 32);
    assert_int_equal(violations[0].n, 4);
    assert_int_equal(violations[31].n, 35);
    assert_string_equal(violations[27].kind, "kernel");
    assert_int_equal(tv_shadow_reproducer(bench.shadow, 3, &kind, &data, &bytes), -ENOENT);
    assert_int_equal(tv_shadow_reproducer(bench.shadow, 4, &kind, &data, &bytes), 0);
    free(data);
    /* a new process goes on numbering, and still serves the old files */
    struct tv_shadow_params params = {.queue_bytes_max = QUEUE_BYTES, .state_dir = bench.dir};
    tv_shadow_destroy(bench.shadow);
    assert_int_equal(tv_shadow_create(&params, bench.fixture.base.model, bench.fixture.base.cache,
                                      &bench.shadow),
                     0);
    assert_int_equal(totals_of(&bench, violations).violation_count, 32);
    (void)judged(&bench, FAULT_NONE, 1);
    totals = totals_of(&bench, violations);
    assert_int_equal(totals.violation_count, 32);
    assert_int_equal(violations[31].n, 36);
    assert_int_equal(violations[0].n, 5);
    assert_int_equal(tv_shadow_reproducer(bench.shadow, 31, &kind, &data, &bytes), 0);
    assert_string_equal(kind, "kernel");
    free(data);
    bench_close(&bench);
}

/* A disk that takes nothing: the violation is counted and listed, and nothing else happens. */
static void full_disk_is_harmless(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    const char *kind = NULL;
    char *data = NULL;
    size_t bytes = 0;
    struct rlimit before, none;
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 1);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    none = (struct rlimit){.rlim_cur = 64, .rlim_max = before.rlim_max};
    (void)signal(SIGXFSZ, SIG_IGN); /* write then fails, as on a full disk */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    struct tv_shadow_block block = judged(&bench, FAULT_OUTPUT, 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_int_equal(block.ran, 1);
    struct tv_parity_totals totals = totals_of(&bench, violations);
    assert_int_equal(totals.violation, 1);
    assert_int_equal(totals.violation_count, 1);
    assert_int_equal(tv_shadow_reproducer(bench.shadow, violations[0].n, &kind, &data, &bytes),
                     -ENOENT);
    assert_int_equal(rmdir(bench.dir), 0); /* not even a temporary file is left */
    (void)judged(&bench, FAULT_OUTPUT, 0); /* and without the directory */
    assert_int_equal(totals_of(&bench, violations).violation, 2);
    bench_close(&bench);
}

/* The path oracle on a sampled share of live rounds. */
static void sampled_path_rounds(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    bench_open(&bench, "v2lite", 16, 0.0, QUEUE_BYTES, 0);
    struct tv_shadow_params params = {.path_probability = 1.0, .queue_bytes_max = QUEUE_BYTES};
    tv_shadow_destroy(bench.shadow);
    assert_int_equal(tv_shadow_create(&params, bench.fixture.base.model, bench.fixture.base.cache,
                                      &bench.shadow),
                     0);
    struct planted planted = {.round = tv_shadow_begin(bench.shadow, 0)};
    struct tv_round_out out;
    assert_non_null(planted.round);
    assert_int_equal(tv_shadow_wants_path(planted.round), 1);
    round_run(&bench, &planted, &out);
    struct tv_parity_case parity_case = case_of(&bench, &out, planted.round);
    tv_shadow_attach(bench.shadow, planted.round, &parity_case);
    tv_shadow_submit(bench.shadow, planted.round, NULL, NULL);
    struct tv_parity_totals totals;
    for (int32_t i = 0; i < 6000; i++) {
        totals = totals_of(&bench, violations);
        if (totals.exact + totals.near_tie + totals.violation + totals.skipped == 2) {
            break;
        }
        (void)nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    assert_int_equal(totals.exact + totals.near_tie, 2); /* once by each oracle */
    bench_close(&bench);
}

/* Called on the oracle's thread, which goes on once the stop has begun. */
static void hold_until_stop(void *context, const struct tv_shadow_block *block)
{
    struct tv_shadow *shadow = context;
    int stopping = 0;
    (void)block;
    while (!stopping) {
        (void)pthread_mutex_lock(&shadow->lock);
        stopping = shadow->stopping;
        (void)pthread_mutex_unlock(&shadow->lock);
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* What waits when the daemon stops is dropped: with every round judged it took minutes. */
static void stop_does_not_judge_what_waits(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_cache_counts before, after;
    bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 1);
    tv_cache_counts(bench.fixture.base.cache, &before);
    for (int i = 0; i < 2; i++) { /* the second would leave a reproducer */
        struct planted planted = {.fault = i == 1 ? FAULT_OUTPUT : FAULT_NONE, .layer = 1};
        struct tv_round_out out;
        planted.round = tv_shadow_begin(bench.shadow, 1);
        assert_non_null(planted.round);
        round_run(&bench, &planted, &out);
        tv_shadow_submit(bench.shadow, planted.round, i == 0 ? hold_until_stop : NULL,
                         bench.shadow);
    }
    tv_shadow_destroy(bench.shadow);
    bench.shadow = NULL;
    tv_cache_counts(bench.fixture.base.cache, &after);
    assert_true(before.free == after.free && after.shared == 0);
    assert_int_equal(rmdir(bench.dir), 0); /* empty */
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_rounds_are_exact),
        cmocka_unit_test(path_oracle_meets_the_references),
        cmocka_unit_test(path_oracle_behind_a_prefix_of_200),
        cmocka_unit_test(planted_faults_are_found),
        cmocka_unit_test(reproducer_replays),
        cmocka_unit_test(wrong_tokens_are_found),
        cmocka_unit_test(wrong_kv_rows_are_found),
        cmocka_unit_test(sampling_queue_and_totals),
        cmocka_unit_test(captured_rows_outlive_the_session),
        cmocka_unit_test(newest_reproducers_are_kept),
        cmocka_unit_test(full_disk_is_harmless),
        cmocka_unit_test(sampled_path_rounds),
        cmocka_unit_test(stop_does_not_judge_what_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
