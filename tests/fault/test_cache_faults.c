/*
 * test_cache_faults.c - the paged cache under failing allocations and a failing device.
 *
 * After each failure the page counts, the lengths and every committed row are those of before (a
 * commit that fails gives its scratch back, as it says), and the same operation works afterwards.
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

#include "cache/cache.h"
#include "faults.h"

#define PAGES   64
#define ROW_DIM 4
#define LAYERS  2

static const struct tv_cache_params params = {.layers = LAYERS,
                                              .page_size = 16,
                                              .row_dim = ROW_DIM,
                                              .dtype = TV_F32,
                                              .pages = PAGES,
                                              .poison = 1,
                                              .prefix = TV_CACHE_PREFIX_EXACT};

struct world {
    struct tv_kernels *kernels;
    struct tv_cache *cache;
    struct tv_cache_seq seq;
};

static void world_open(struct world *world)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    memset(world, 0, sizeof *world);
    assert_int_equal(tv_kernels_create("ref", &options, &world->kernels), 0);
    fault_device_wrap(world->kernels);
    assert_int_equal(tv_cache_create(world->kernels, &params, &world->cache), 0);
}

static void world_close(struct world *world)
{
    struct tv_cache_counts counts;
    tv_cache_seq_finish(world->cache, &world->seq);
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.free, PAGES);
    tv_cache_destroy(world->cache);
    world->kernels->destroy(world->kernels);
}

static float *row_at(const struct world *world, int32_t layer, int32_t row)
{
    return (float *)tv_cache_layer(world->cache, layer) +
           tv_cache_slot(world->cache, &world->seq, row) * ROW_DIM;
}

/* Write rows [from, to) with their own number, layer by layer. */
static void rows_write(const struct world *world, int32_t from, int32_t to)
{
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t row = from; row < to; row++) {
            for (int32_t d = 0; d < ROW_DIM; d++) {
                row_at(world, layer, row)[d] = (float)(row * 10 + layer);
            }
        }
    }
}

static void rows_check(const struct world *world, int32_t count)
{
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        for (int32_t row = 0; row < count; row++) {
            assert_true(row_at(world, layer, row)[ROW_DIM - 1] == (float)(row * 10 + layer));
        }
    }
}

static void seq_fill(struct world *world, int32_t len)
{
    struct tv_cache_shortage shortage;
    assert_int_equal(tv_cache_reserve(world->cache, &world->seq, len, &shortage), 0);
    rows_write(world, 0, len);
    assert_int_equal(tv_cache_commit(world->cache, &world->seq, NULL, len), 0);
}

/* Pages, lengths and rows of a sequence of `len` rows, and nothing else held. */
static void untouched(struct world *world, int32_t len, int64_t held)
{
    struct tv_cache_counts counts;
    tv_cache_counts(world->cache, &counts);
    assert_int_equal(counts.held, held);
    assert_int_equal(counts.free, PAGES - held);
    assert_int_equal(world->seq.len, len);
    assert_int_equal(world->seq.scratch, 0);
    assert_int_equal(world->seq.page_count, (len + 15) / 16);
    rows_check(world, len);
}

static void create_or_nothing(void **state)
{
    (void)state;
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_kernels *kernels = NULL;
    assert_int_equal(tv_kernels_create("ref", &options, &kernels), 0);
    fault_device_wrap(kernels);
    for (int kind = 0; kind < 2; kind++) {
        for (int n = 1;; n++) {
            struct tv_cache *cache = NULL;
            int64_t blocks = fault_blocks();
            fault_arm(kind == 0 ? FAULT_MEMORY : FAULT_DEVICE, n);
            int rc = tv_cache_create(kernels, &params, &cache);
            int failed = fault_disarm();
            /* the device's fourth call is the fill, which is no allocation */
            assert_int_equal(rc, !failed ? 0 : kind == 1 && n == 4 ? -EIO : -ENOMEM);
            assert_true((cache == NULL) == failed);
            tv_cache_destroy(cache);
            assert_int_equal(fault_blocks(), blocks);
            if (!failed) {
                assert_int_equal(n, kind == 0 ? 12 : 5);
                break;
            }
        }
    }
    kernels->destroy(kernels);
}

/* The page table grows by realloc; the pages are not taken before that. */
static void reserve_without_memory(void **state)
{
    (void)state;
    struct tv_cache_shortage shortage = {-1, -1};
    struct world world;
    world_open(&world);
    fault_arm(FAULT_MEMORY, 1); /* the first table */
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, 5, &shortage), -ENOMEM);
    assert_int_equal(fault_disarm(), 1);
    untouched(&world, 0, 0);
    seq_fill(&world, 490); /* 31 pages: a table of 32 has no room for a copy */
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, 20, &shortage), -ENOMEM);
    assert_int_equal(fault_disarm(), 1);
    untouched(&world, 490, 31);
    assert_int_equal(shortage.pages_needed, -1);
    fault_arm(FAULT_MEMORY, 2);
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, 20, &shortage), 0);
    assert_int_equal(fault_disarm(), 0);
    tv_cache_drop(world.cache, &world.seq);
    untouched(&world, 490, 31);
    world_close(&world);
}

/* A tail page that an oracle pinned is copied before a round writes beside its rows. */
static void copy_of_a_pinned_tail_fails(void **state)
{
    (void)state;
    struct tv_cache_shortage shortage;
    struct world world;
    int32_t tail;
    world_open(&world);
    seq_fill(&world, 40);
    tail = world.seq.pages[2];
    tv_cache_pin(world.cache, &tail, 1);
    for (int n = 1;; n++) {
        fault_arm(FAULT_DEVICE, n);
        int rc = tv_cache_reserve(world.cache, &world.seq, 30, &shortage);
        int failed = fault_disarm();
        assert_int_equal(rc, failed ? -EIO : 0);
        if (!failed) {
            assert_true(n > 1); /* one copy over all layers */
            break;
        }
        assert_int_equal(world.seq.pages[2], tail);
        untouched(&world, 40, 3);
    }
    assert_int_not_equal(world.seq.pages[2], tail);
    rows_check(&world, 40);
    tv_cache_drop(world.cache, &world.seq);
    untouched(&world, 40, 4); /* the pinned page is still its pin's */
    tv_cache_unpin(world.cache, &tail, 1);
    untouched(&world, 40, 3);
    world_close(&world);
}

static void commit_fails(void **state)
{
    (void)state;
    static const int32_t scattered[] = {0, 3, 9, 21};
    struct tv_cache_shortage shortage;
    struct world world;
    world_open(&world);
    seq_fill(&world, 40);
    for (int n = 1;; n++) {
        assert_int_equal(tv_cache_reserve(world.cache, &world.seq, 30, &shortage), 0);
        rows_write(&world, 40, 70);
        fault_arm(FAULT_DEVICE, n);
        int rc = tv_cache_commit(world.cache, &world.seq, scattered, 4);
        int failed = fault_disarm();
        if (!failed || rc == 0) { /* poison of a freed page is tried again when it is taken */
            assert_int_equal(rc, 0);
            assert_int_equal(world.seq.len, 44);
            for (int32_t i = 0; i < 4; i++) {
                assert_true(row_at(&world, 1, 40 + i)[0] == (float)((40 + scattered[i]) * 10 + 1));
            }
            assert_int_equal(tv_cache_truncate(world.cache, &world.seq, 40), 0);
        } else {
            assert_int_equal(rc, -EIO);
        }
        untouched(&world, 40, 3);
        if (!failed) {
            assert_true(n > 4);
            break;
        }
    }
    world_close(&world);
}

/* A page that could not be poisoned is never handed out with its old rows. */
static void poison_fails(void **state)
{
    (void)state;
    struct tv_cache_shortage shortage;
    struct world world;
    world_open(&world);
    seq_fill(&world, 20);
    fault_arm(FAULT_DEVICE, 1);
    assert_int_equal(tv_cache_truncate(world.cache, &world.seq, 16), 0);
    assert_int_equal(fault_disarm(), 1);
    untouched(&world, 16, 1);
    fault_arm(FAULT_DEVICE, 2); /* of two layers */
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, 4, &shortage), -EIO);
    assert_int_equal(fault_disarm(), 1);
    untouched(&world, 16, 1);
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, 4, &shortage), 0);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        assert_true(row_at(&world, layer, 17)[0] != row_at(&world, layer, 17)[0]); /* NaN */
    }
    tv_cache_drop(world.cache, &world.seq);
    world_close(&world);
}

/* Two whole pages that can be found, of a sequence that has ended. */
static void known_pages(struct world *world, struct tv_cache_key *ret_keys)
{
    for (int i = 0; i < 2; i++) {
        memset(&ret_keys[i], i + 1, sizeof ret_keys[i]);
    }
    seq_fill(world, 40);
    world->seq.exact = 40;
    tv_cache_publish(world->cache, &world->seq, 0, ret_keys, 2);
    tv_cache_seq_finish(world->cache, &world->seq);
}

/* The page table grows before a page is taken over. */
static void adopt_without_memory(void **state)
{
    struct world world;
    struct tv_cache_key keys[2];
    struct tv_cache_counts before, after;
    (void)state;
    world_open(&world);
    known_pages(&world, keys);
    tv_cache_counts(world.cache, &before);
    assert_int_equal(before.cached, 2);
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(tv_cache_adopt(world.cache, &world.seq, keys, 2), -ENOMEM);
    assert_true(fault_disarm());
    tv_cache_counts(world.cache, &after);
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(world.seq.len, 0);
    assert_int_equal(tv_cache_adopt(world.cache, &world.seq, keys, 2), 0);
    untouched(&world, 32, 2);
    struct tv_cache_seq fork = {0};
    fault_arm(FAULT_MEMORY, 1);
    assert_int_equal(tv_cache_fork(world.cache, &world.seq, 20, &fork), -ENOMEM);
    assert_true(fault_disarm());
    untouched(&world, 32, 2);
    /* Who writes its page anew makes it unknown, so that the pool is empty at the end. */
    assert_int_equal(tv_cache_truncate(world.cache, &world.seq, 1), 0);
    struct tv_cache_shortage shortage;
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, PAGES * 16 - 1, &shortage), 0);
    tv_cache_counts(world.cache, &after);
    assert_int_equal(after.evicted, 1);
    tv_cache_drop(world.cache, &world.seq);
    world_close(&world);
}

/* A page that was evicted and could not be cleared is cleared before anybody has it. */
static void evict_without_a_device(void **state)
{
    struct world world;
    struct tv_cache_key keys[2];
    struct tv_cache_counts counts;
    struct tv_cache_shortage shortage;
    (void)state;
    world_open(&world);
    known_pages(&world, keys);
    fault_arm(FAULT_DEVICE, 1);
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, PAGES * 16, &shortage), -EIO);
    assert_true(fault_disarm());
    tv_cache_counts(world.cache, &counts);
    assert_int_equal(counts.held, 0);
    assert_int_equal(counts.free + counts.cached, PAGES);
    assert_int_equal(tv_cache_reserve(world.cache, &world.seq, PAGES * 16, &shortage), 0);
    for (int32_t row = 0; row < PAGES * 16; row++) {
        assert_true(isnan(row_at(&world, LAYERS - 1, row)[0]));
    }
    tv_cache_drop(world.cache, &world.seq);
    world_close(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_or_nothing),
        cmocka_unit_test(reserve_without_memory),
        cmocka_unit_test(copy_of_a_pinned_tail_fails),
        cmocka_unit_test(commit_fails),
        cmocka_unit_test(poison_fails),
        cmocka_unit_test(adopt_without_memory),
        cmocka_unit_test(evict_without_a_device),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
