/*
 * test_shadow_pool.c - the memory of captured rounds: its bound, what is kept, and that a round in
 * memory of another one is judged as in memory of its own.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "shadow/round.h"
#include "shadow_fixture.h"

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* Nothing but a pool. */
static struct tv_shadow bare;

static void bare_open(size_t bytes_max)
{
    memset(&bare, 0, sizeof bare);
    tv_shadow_pool_init(&bare.pool, bytes_max);
}

static void bare_check(size_t bytes_held)
{
    size_t bytes_idle = 0;
    int32_t count = 0;
    for (const struct tv_shadow_store *store = bare.pool.idle; store != NULL; store = store->next) {
        bytes_idle += store->capacity;
        count++;
    }
    assert_int_equal(bare.pool.bytes_held, bytes_held);
    assert_int_equal(bare.pool.bytes_idle, bytes_idle);
    assert_int_equal(bare.pool.idle_count, count);
    assert_true(count <= TV_SHADOW_IDLE_MAX);
    assert_true(bytes_held + bytes_idle <= bare.pool.bytes_max);
}

static void give_back(struct tv_shadow_round *round)
{
    tv_shadow_pool_give_back(&bare.pool, round->stores);
    round->stores = NULL;
}

static size_t capacity_of(const struct tv_shadow_round *round)
{
    size_t bytes = 0;
    for (const struct tv_shadow_store *store = round->stores; store != NULL; store = store->next) {
        bytes += store->capacity;
    }
    return bytes;
}

static void stores_are_used_again(void **state)
{
    (void)state;
    struct tv_shadow_round first = {.shadow = &bare}, second = {.shadow = &bare};
    bare_open(8 * MIB);
    char *small = tv_shadow_round_take(&first, 100), *large = tv_shadow_round_take(&first, MIB);
    assert_true(small != NULL && large != NULL);
    assert_int_equal((uintptr_t)small % 64, 0);
    assert_int_equal((uintptr_t)large % 64, 0);
    char *next = tv_shadow_round_take(&first, 1); /* shares a store; no line */
    assert_ptr_equal(next, small + 128);
    memset(large, 1, MIB);
    bare_check(capacity_of(&first));
    give_back(&first);
    bare_check(0);
    assert_int_equal(bare.pool.idle_count, 2);
    assert_ptr_equal(tv_shadow_round_take(&second, 200), small);
    assert_ptr_equal(tv_shadow_round_take(&second, MIB - 1000), large); /* nearly the size */
    assert_int_equal(bare.pool.idle_count, 0);
    give_back(&second);
    char *tiny = tv_shadow_round_take(&first, 300 * KIB); /* far smaller: a store of its own */
    assert_ptr_not_equal(tiny, large);
    bare_check(capacity_of(&first));
    give_back(&first);
    tv_shadow_pool_finish(&bare.pool);
}

/* What is kept gives way to what a round needs; what rounds have does not. */
static void the_bound_holds(void **state)
{
    (void)state;
    struct tv_shadow_round rounds[3] = {{.shadow = &bare}, {.shadow = &bare}, {.shadow = &bare}};
    bare_open(4 * MIB);
    assert_non_null(tv_shadow_round_take(&rounds[0], MIB));
    assert_non_null(tv_shadow_round_take(&rounds[1], 2 * MIB));
    assert_null(tv_shadow_round_take(&rounds[2], 2 * MIB));
    assert_int_equal(rounds[2].failed, -ENOMEM);
    bare_check(3 * MIB);
    give_back(&rounds[2]);
    give_back(&rounds[0]);
    bare_check(2 * MIB);
    assert_int_equal(bare.pool.bytes_idle, MIB);
    assert_non_null(tv_shadow_round_take(&rounds[0], 2 * MIB)); /* to the byte */
    bare_check(4 * MIB);
    assert_int_equal(bare.pool.idle_count, 0);
    give_back(&rounds[0]);
    give_back(&rounds[1]);
    rounds[2].failed = 0;
    assert_null(tv_shadow_round_take(&rounds[2], 4 * MIB + 1));
    assert_null(tv_shadow_round_take(&rounds[2], SIZE_MAX));
    assert_int_equal(rounds[2].failed, -ENOMEM);
    assert_int_equal(bare.pool.idle_count, 2); /* nothing was dropped in vain */
    assert_non_null(tv_shadow_round_take(&rounds[0], 4 * MIB));
    bare_check(4 * MIB);
    give_back(&rounds[0]);
    tv_shadow_pool_finish(&bare.pool);
}

/* Rounds of all sizes, in any order. */
static void any_order_keeps_the_count(void **state)
{
    (void)state;
    struct tv_shadow_round rounds[24];
    struct tv_test_random random = {.state = 11};
    memset(rounds, 0, sizeof rounds);
    bare_open(16 * MIB);
    int32_t refused = 0, steps = tv_test_scaled(3000);
    for (int32_t i = 0; i < steps; i++) {
        struct tv_shadow_round *round = &rounds[tv_test_random_below(&random, 24)];
        round->shadow = &bare;
        if (round->stores != NULL && tv_test_random_below(&random, 3) == 0) {
            give_back(round);
        } else {
            size_t bytes = (size_t)tv_test_random_below(&random, 1 << 20);
            char *piece = tv_shadow_round_take(round, bytes);
            refused += piece == NULL;
            if (piece != NULL && bytes > 0) {
                piece[0] = piece[bytes - 1] = 1; /* a sanitizer sees whether it is ours */
            }
        }
        size_t held = 0;
        for (int32_t r = 0; r < 24; r++) {
            held += capacity_of(&rounds[r]);
        }
        bare_check(held);
    }
    assert_true(refused > 0 && refused < steps);
    for (int32_t r = 0; r < 24; r++) {
        give_back(&rounds[r]);
    }
    bare_check(0);
    assert_int_equal(bare.pool.idle_count, TV_SHADOW_IDLE_MAX);
    tv_shadow_pool_finish(&bare.pool);
}

/* The thread gives a round back after its word. */
static void settle(struct tv_shadow *shadow)
{
    size_t held = 1;
    while (held > 0) {
        (void)pthread_mutex_lock(&shadow->pool.lock);
        held = shadow->pool.bytes_held;
        (void)pthread_mutex_unlock(&shadow->pool.lock);
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void rounds_in_memory_of_others(void **state)
{
    (void)state;
    struct bench bench;
    size_t bytes_idle = 0;
    bench_open(&bench, "v3", 16, 1.0, QUEUE_BYTES, 0);
    for (int32_t i = 0; i < 3; i++) {
        struct tv_shadow_block block = judged(&bench, i == 1 ? FAULT_NAN : FAULT_NONE, 0);
        assert_int_equal(block.ran, 1);
        assert_int_equal(block.kernel.rel_l2 <= 2e-6, i != 1); /* no word of the round before */
        settle(bench.shadow);
        assert_true(i == 0 || bench.shadow->pool.bytes_idle == bytes_idle); /* no store is fresh */
        bytes_idle = bench.shadow->pool.bytes_idle;
        assert_true(bytes_idle > 0);
    }
    bench_close(&bench);
}

/* A round that cannot be captured whole is not copied in part. */
static void what_does_not_fit_is_not_copied(void **state)
{
    (void)state;
    struct bench bench;
    struct tv_parity_violation violations[32];
    struct planted planted = {.fault = FAULT_NONE};
    struct tv_round_out out;
    bench_open(&bench, "v3", 64, 1.0, MIB / 2, 0);
    planted.round = tv_shadow_begin(bench.shadow, TV_SHADOW_WANTED);
    assert_non_null(planted.round);
    round_run(&bench, &planted, &out);
    assert_int_equal(planted.round->failed, -ENOMEM);
    assert_int_equal(planted.round->captured, 0);
    assert_null(planted.round->cache_pinned);
    assert_true(bench.shadow->pool.bytes_held <= MIB / 8); /* what is small only */
    tv_shadow_submit(bench.shadow, planted.round, NULL, NULL);
    settle(bench.shadow);
    struct tv_parity_totals totals = totals_of(&bench, violations);
    assert_int_equal(totals.skipped, 1);
    assert_int_equal(totals.exact + totals.near_tie + totals.violation, 0);
    bench_close(&bench);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stores_are_used_again),
        cmocka_unit_test(the_bound_holds),
        cmocka_unit_test(any_order_keeps_the_count),
        cmocka_unit_test(rounds_in_memory_of_others),
        cmocka_unit_test(what_does_not_fit_is_not_copied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
