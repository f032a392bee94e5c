/*
 * test_shadow.c - the oracles: right rounds are exact, wrong rows are found, limits hold.
 *
 * What a violation leaves on disk is test_shadow_reproducers.c's. Runs on bundled checkpoints with
 * a poisoned pool.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "shadow/round.h"
#include "shadow_fixture.h"

static void right_rounds_are_exact(void **state)
{
    (void)state;
    static const char *const models[] = {"v3", "v2lite", "moonlight", "kjv-mla-8m"};
    /* the last one, the slowest, at full scale only: sanitizer builds meet it behind a prefix */
    size_t count = 2 + (size_t)tv_test_scaled(2);
    for (size_t m = 0; m < 4 && m < count; m++) {
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
    size_t count_models = (size_t)tv_test_scaled(3); /* one thread: less for sanitizers to see */
    for (size_t m = 0; m < 3 && m < count_models; m++) {
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

/* POST /v1/parity on the bundled model; the time is printed, not judged: builds differ. */
static void path_oracle_behind_a_prefix_of_200(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_report report = {0};
    struct tv_round_out out;
    struct tv_test_random random = {.state = 5};
    int32_t prefix[200];
    int32_t scaled = tv_test_scaled(200);
    int32_t len = scaled < 200 ? scaled : 200;
    bench_open(&bench, len < 200 ? "v2lite" : "kjv-mla-8m", 64, 0.0, QUEUE_BYTES, 0);
    struct tv_engine *engine = bench.fixture.engine;
    struct tv_context *context = tv_test_context(engine);
    for (int32_t i = 0; i < len; i++) {
        prefix[i] = tv_test_random_below(&random, 256);
    }
    (void)tv_test_prefill(engine, context, prefix, len, NULL);
    tv_test_verify(engine, context, &bench.tree, &bench.rule, 0, &out);
    struct tv_parity_case parity_case = case_of(&bench, &out, NULL);
    parity_case.prefix = prefix;
    parity_case.prefix_len = len;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 1);
    print_message("prefix %d, 33 nodes: %lld ms, logits %.2e (bound %.1e)\n", len,
                  (long long)report.took_ms, report.logit_max_abs, report.bound_logit_abs);
    engine->ops->context_close(engine, context);
    bench_close(&bench);
}

/* KV rows: a changed row of the prefix and a changed row of the tree are both seen. */
static void wrong_kv_rows_are_found(void **state)
{
    (void)state;
    struct bench bench;
    bench_open(&bench, "v3", 16, 0.0, QUEUE_BYTES, 0);
    for (int in_prefix = 0; in_prefix < 2; in_prefix++) {
        struct planted planted = {.fault = in_prefix ? FAULT_PAGE : FAULT_NONE, .layer = 2};
        struct tv_round_out out;
        struct tv_parity_report report = {0};
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
        bench.prefix[PREFIX_LEN - 1] = kept;
    }
    bench_close(&bench);
}

/* Another shadow on the same engine, whose making takes its time. */
static void shadow_renew(struct bench *bench, double probability, size_t queue_bytes)
{
    struct tv_shadow_params params = {.probability = probability,
                                      .queue_bytes_max = queue_bytes,
                                      .device = bench->fixture.base.kernels};
    tv_shadow_destroy(bench->shadow);
    assert_int_equal(tv_shadow_create(&params, bench->fixture.base.model, bench->fixture.base.cache,
                                      &bench->shadow),
                     0);
}

static int (*naive)(struct tv_kernels *k, const struct tv_verify_attn *args);
static atomic_int closed;

/* On the oracle's thread. */
static int naive_gated(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    while (atomic_load(&closed)) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return naive(k, args);
}

/* Sampling is a function of the round's number; what does not fit the queue is counted. */
static void sampling_queue_and_totals(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    int32_t taken = 0;
    bench_open(&bench, "v3", 64, 0.25, QUEUE_BYTES, 0);
    for (int run = 0; run < 2; run++) {
        int32_t now = 0;
        shadow_renew(&bench, 0.25, QUEUE_BYTES);
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
    }
    /* room for about two rounds: of twenty that come before the first one is judged, all are judged
     * or skipped */
    shadow_renew(&bench, 1.0, 5u << 20);
    naive = bench.shadow->ref->verify_attn_naive;
    bench.shadow->ref->verify_attn_naive = naive_gated;
    atomic_store(&closed, 1);
    struct tv_cache_counts before, after;
    tv_cache_counts(bench.fixture.base.cache, &before);
    for (int32_t i = 0; i < 20; i++) {
        struct planted planted = {.round = tv_shadow_begin(bench.shadow, 0)};
        struct tv_round_out out;
        assert_non_null(planted.round);
        round_run(&bench, &planted, &out);
        tv_shadow_submit(bench.shadow, planted.round, NULL, NULL);
    }
    atomic_store(&closed, 0);
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
        if (totals.exact + totals.near_tie + totals.violation + totals.skipped == 1) {
            break;
        }
        (void)nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    assert_int_equal(totals.exact + totals.near_tie, 1); /* the kernel oracle is off */
    assert_int_equal(totals.worst.layers, 0);
    bench_close(&bench);
}

static struct tv_shadow *held;

/* On the oracle's thread, which goes on once the stop has begun. */
static int naive_held(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    while (!tv_shadow_stopping(held)) {
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return naive(k, args);
}

/* What waits when the daemon stops is dropped, and a judgement ends at its next layer: with every
 * round judged the stop took minutes. Who waits for a word is told that there is none. */
static void stop_does_not_judge_what_waits(void **state)
{
    (void)state;
    struct bench bench;
    struct waiter waiters[3];
    struct tv_cache_counts before, after;
    bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 1);
    held = bench.shadow;
    naive = bench.shadow->ref->verify_attn_naive;
    bench.shadow->ref->verify_attn_naive = naive_held;
    tv_cache_counts(bench.fixture.base.cache, &before);
    for (int i = 0; i < 3; i++) { /* each would leave a reproducer */
        struct planted planted = {.fault = FAULT_OUTPUT, .layer = 1};
        struct tv_round_out out;
        waiters[i] =
            (struct waiter){.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        planted.round = tv_shadow_begin(bench.shadow, 1);
        assert_non_null(planted.round);
        round_run(&bench, &planted, &out);
        tv_shadow_submit(bench.shadow, planted.round, waiter_done, &waiters[i]);
    }
    assert_int_equal(tv_shadow_forget(bench.shadow, &waiters[1]), 1);
    assert_int_equal(tv_shadow_forget(bench.shadow, &waiters[1]), 0);
    tv_shadow_destroy(bench.shadow);
    bench.shadow = NULL;
    tv_cache_counts(bench.fixture.base.cache, &after);
    assert_true(before.free == after.free && after.shared == 0);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(waiters[i].done, i != 1);
        assert_int_equal(waiters[i].block.ran, 0);
    }
    assert_string_equal(waiters[0].block.skipped, "draining");
    assert_string_equal(waiters[2].block.skipped, "draining");
    assert_int_equal(rmdir(bench.dir), 0); /* empty */
    assert_int_equal(mkdir(bench.dir, S_IRWXU), 0);
    bench_close(&bench);
}

/* A comparison gives up when it is told to: its caller may be about to stop. */
static void comparisons_can_be_cancelled(void **state)
{
    (void)state;
    struct bench bench;
    struct planted planted = {.fault = FAULT_NONE};
    struct tv_parity_violation violations[32];
    struct tv_parity_report report = {0};
    struct tv_round_out out;
    atomic_int cancelled;
    atomic_init(&cancelled, 1);
    bench_open(&bench, "v3", 64, 0.0, QUEUE_BYTES, 0);
    round_run(&bench, &planted, &out);
    struct tv_parity_case parity_case = case_of(&bench, &out, NULL);
    parity_case.cancelled[1] = &cancelled;
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), -ECANCELED);
    assert_int_equal(totals_of(&bench, violations).skipped, 1);
    atomic_store(&cancelled, 0);
    assert_int_equal(tv_shadow_path_compare(bench.shadow, &parity_case, &report), 0);
    assert_int_equal(report.ok, 1);
    assert_int_equal(totals_of(&bench, violations).skipped, 1);
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_rounds_are_exact),
        cmocka_unit_test(path_oracle_meets_the_references),
        cmocka_unit_test(path_oracle_behind_a_prefix_of_200),
        cmocka_unit_test(wrong_kv_rows_are_found),
        cmocka_unit_test(sampling_queue_and_totals),
        cmocka_unit_test(captured_rows_outlive_the_session),
        cmocka_unit_test(sampled_path_rounds),
        cmocka_unit_test(stop_does_not_judge_what_waits),
        cmocka_unit_test(comparisons_can_be_cancelled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
