/*
 * test_shadow_pins.c - a backlog of judgements and the pool of pages: how much of it they may hold,
 * and that a live round gets back what it lacks, oldest judgement first.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include <cmocka.h>

#include "shadow/round.h"
#include "shadow_fixture.h"

#define PAGE       16
#define FULL_PAGES (PREFIX_LEN / PAGE) /* what a round of the bench pins */

static atomic_int gate_entered, gate_open;
static int (*naive)(struct tv_kernels *k, const struct tv_verify_attn *args);

static void nap(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* On the oracle's thread: it stays in its first layer until the test lets it go on. */
static int naive_gated(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    atomic_store(&gate_entered, 1);
    while (atomic_load(&gate_open) == 0) {
        nap();
    }
    return naive(k, args);
}

/* A round of a session that stays. */
static void live_round(struct bench *bench, struct tv_context *live)
{
    struct planted planted = {.round = tv_shadow_begin(bench->shadow, TV_SHADOW_SAMPLED)};
    struct tv_round_out out;
    struct tv_context *kept = bench->context;
    bench->context = live;
    round_run(bench, &planted, &out);
    bench->context = kept;
    tv_shadow_submit(bench->shadow, planted.round, NULL, NULL);
}

/* A round of a session that is deleted before it is judged. */
static void deleted_round(struct bench *bench, enum tv_shadow_why why, struct waiter *waiter)
{
    struct tv_engine *engine = bench->fixture.engine;
    struct planted planted = {.round = tv_shadow_begin(bench->shadow, why)};
    struct tv_round_out out;
    assert_non_null(planted.round);
    round_run(bench, &planted, &out);
    tv_shadow_submit(bench->shadow, planted.round, waiter != NULL ? waiter_done : NULL, waiter);
    engine->ops->context_close(engine, bench->context);
    bench->context = tv_test_context(engine);
    (void)tv_test_prefill(engine, bench->context, bench->prefix, PREFIX_LEN, NULL);
}

static int64_t pages_free(struct bench *bench)
{
    struct tv_cache_counts counts;
    tv_cache_counts(bench->fixture.base.cache, &counts);
    return counts.free;
}

static void reserve_whole(struct bench *bench, int64_t pages)
{
    struct tv_cache_seq seq = {0};
    struct tv_cache_shortage shortage;
    struct tv_cache *cache = bench->fixture.base.cache;
    assert_int_equal(tv_cache_reserve(cache, &seq, (int32_t)pages * PAGE, &shortage), 0);
    tv_cache_seq_finish(cache, &seq);
}

static void gate_close(struct bench *bench)
{
    atomic_store(&gate_entered, 0);
    atomic_store(&gate_open, 0);
    naive = bench->shadow->ref->verify_attn_naive;
    bench->shadow->ref->verify_attn_naive = naive_gated;
}

static void live_rounds_get_the_pages_back(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    struct waiter waiter = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    bench_open(&bench, "v3", PAGE, 1.0, QUEUE_BYTES, 0);
    gate_close(&bench);
    struct tv_context *live = tv_test_context(bench.fixture.engine);
    (void)tv_test_prefill(bench.fixture.engine, live, bench.prefix, PREFIX_LEN, NULL);
    int64_t before = pages_free(&bench);
    deleted_round(&bench, TV_SHADOW_SAMPLED, NULL);
    while (atomic_load(&gate_entered) == 0) {
        nap(); /* until it is the one under way */
    }
    deleted_round(&bench, TV_SHADOW_WANTED, &waiter);
    live_round(&bench, live); /* the oldest that is not waited for; nothing is gained without it */
    deleted_round(&bench, TV_SHADOW_SAMPLED, NULL);
    deleted_round(&bench, TV_SHADOW_SAMPLED, NULL);
    assert_int_equal(pages_free(&bench), before - 4 * FULL_PAGES);

    struct tv_cache_seq seq = {0};
    struct tv_cache_shortage shortage; /* more than there is: nothing is dropped in vain */
    assert_int_equal(
        tv_cache_reserve(bench.fixture.base.cache, &seq, (int32_t)(before + 1) * PAGE, &shortage),
        -ENOSPC);
    tv_cache_seq_finish(bench.fixture.base.cache, &seq);
    assert_int_equal(shortage.pages_free, before - 4 * FULL_PAGES);

    reserve_whole(&bench, before - 4 * FULL_PAGES + 1); /* one sampled judgement is enough */
    assert_int_equal(pages_free(&bench), before - 3 * FULL_PAGES);
    assert_int_equal(totals_of(&bench, violations).skipped, 1);
    reserve_whole(&bench, before - FULL_PAGES); /* the other, and the one under way */
    assert_int_equal(totals_of(&bench, violations).skipped, 2);
    assert_int_equal(waiter.done, 0);
    reserve_whole(&bench, before); /* the one that is waited for too */
    struct tv_shadow_block block = waiter_wait(&waiter);
    assert_int_equal(block.ran, 0);
    assert_string_equal(block.skipped, "queue");
    assert_int_equal(pages_free(&bench), before);

    atomic_store(&gate_open, 1);
    for (int32_t i = 0; i < 60000 && totals_of(&bench, violations).skipped < 4; i++) {
        nap();
    }
    struct tv_parity_totals totals = totals_of(&bench, violations);
    assert_int_equal(totals.skipped, 4);
    for (int32_t i = 0; i < 60000 && totals.exact == 0; i++) { /* the live session's was kept */
        nap();
        totals = totals_of(&bench, violations);
    }
    assert_int_equal(totals.exact, 1);
    assert_int_equal(totals.near_tie + totals.violation, 0);
    bench.fixture.engine->ops->context_close(bench.fixture.engine, live);
    bench_close(&bench);
}

/* An oracle reads its pages, page by page: a live round that is captured meanwhile, and one that
 * drops a judgement in the queue, do not wait for that read. They would wait for ever here. */
static void live_rounds_do_not_wait_for_a_read(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    bench_open(&bench, "v3", PAGE, 1.0, QUEUE_BYTES, 0);
    gate_close(&bench);
    int64_t before = pages_free(&bench);
    deleted_round(&bench, TV_SHADOW_SAMPLED, NULL);
    while (atomic_load(&gate_entered) == 0) {
        nap();
    }
    assert_int_equal(pthread_mutex_lock(&bench.shadow->reads_lock), 0);
    deleted_round(&bench, TV_SHADOW_SAMPLED, NULL);
    reserve_whole(&bench, before - FULL_PAGES);
    assert_int_equal(pages_free(&bench), before - FULL_PAGES);
    assert_int_equal(totals_of(&bench, violations).skipped, 1);
    assert_int_equal(pthread_mutex_unlock(&bench.shadow->reads_lock), 0);
    atomic_store(&gate_open, 1);
    bench_close(&bench);
}

/* Of sampled rounds of many sessions a quarter of the pool is held at most. */
static void a_backlog_holds_a_share_of_the_pool(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_cache_counts counts;
    bench_open(&bench, "v3", PAGE, 1.0, QUEUE_BYTES, 0);
    gate_close(&bench);
    int64_t before = pages_free(&bench);
    tv_cache_counts(bench.fixture.base.cache, &counts);
    int64_t share = counts.total / 4;
    for (int64_t i = 0; i < share / FULL_PAGES + 3; i++) {
        deleted_round(&bench, TV_SHADOW_SAMPLED, NULL);
    }
    assert_true(before - pages_free(&bench) <= share);
    assert_true(before - pages_free(&bench) > share - FULL_PAGES);
    atomic_store(&gate_open, 1);
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(live_rounds_get_the_pages_back),
        cmocka_unit_test(live_rounds_do_not_wait_for_a_read),
        cmocka_unit_test(a_backlog_holds_a_share_of_the_pool),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
