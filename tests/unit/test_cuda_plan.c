/*
 * test_cuda_plan.c - the cut of a verify launch on CUDA (kernels/cuda/plan.h), which is a pure
 * function: every row meets every KV tile once, partial sums do not overlap, and nothing exceeds
 * what the host reserved for a launch. Needs no device.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/cuda/plan.h"

#define M_TILES_MAX 8192 /* 1,024 nodes of 128 heads */

static uint64_t state = 20260102;

static int32_t pick(int32_t low, int32_t high)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + (int32_t)((state >> 33) % (uint64_t)(high - low + 1));
}

static struct tv_plan_device pick_device(void)
{
    struct tv_plan_device device;
    device.m_tiles_max = pick(0, 1) != 0 ? 4 : 1;
    /* whole devices, and any part or smaller one */
    device.blocks = pick(0, 2) != 0 ? 132 : pick(0, 1) != 0 ? 188 : pick(1, 100);
    device.splits = pick(0, 3) != 0 ? 0 : pick(1, 64);
    device.cost_least = pick(0, 1) != 0 ? TV_PLAN_COST : TV_PLAN_COST / 2;
    device.cost_start = pick(0, 40);
    return device;
}

/* Blocks of one row tile follow each other without a gap from its first KV tile to its last. */
static void check_cover(const struct tv_plan *plan)
{
    static int32_t reached[M_TILES_MAX];
    int32_t blocks = tv_plan_blocks(plan), m_tiles = (plan->rows + TV_PLAN_M - 1) / TV_PLAN_M;
    assert_true(m_tiles <= M_TILES_MAX);
    memset(reached, 0, sizeof reached);
    for (int32_t i = 0; i < blocks; i++) {
        struct tv_plan_block block = tv_plan_block(plan, i);
        assert_true(block.m_tiles > 0 && block.tile_end > block.tile_first);
        for (int32_t m = block.m_first; m < block.m_first + block.m_tiles; m++) {
            assert_true(m < m_tiles);
            assert_int_equal(reached[m], block.tile_first);
            reached[m] = block.tile_end;
        }
    }
    for (int32_t m = 0; m < m_tiles; m++) {
        assert_int_equal(reached[m], plan->kv_tiles);
    }
}

/* Partial sums of a request's blocks, m-tile by m-tile, and their lse, a row's splits side by side.
 */
static void check_slots(const struct tv_plan *plan, int64_t room)
{
    size_t slots = (size_t)(room / TV_PLAN_M);
    unsigned char *taken = calloc(slots + 1, 1), *lse = calloc((size_t)room + 1, 1);
    assert_non_null(taken);
    assert_non_null(lse);
    for (int32_t i = 0; i < tv_plan_blocks(plan); i++) {
        struct tv_plan_block block = tv_plan_block(plan, i);
        for (int32_t m = 0; block.splits > 1 && m < block.m_tiles; m++) {
            assert_true((size_t)(block.slot + m) < slots);
            assert_int_equal(taken[block.slot + m], 0);
            taken[block.slot + m] = 1;
        }
        for (int32_t row = 0; block.splits > 1 && row < block.m_tiles * TV_PLAN_M; row++) {
            int64_t at = block.slot_first * TV_PLAN_M + (int64_t)row * block.splits + block.split;
            assert_true(at < room);
            assert_int_equal(lse[at], 0);
            lse[at] = 1;
        }
    }
    free(taken);
    free(lse);
}

static void test_cut(void **unused)
{
    (void)unused;
    for (int32_t i = 0; i < 3000; i++) {
        struct tv_plan_device device = pick_device();
        int32_t heads = pick(1, 128), nodes_max = pick(1, pick(0, 7) != 0 ? 64 : 1024);
        int32_t length_max = nodes_max + pick(0, pick(0, 1) != 0 ? 3000 : 300000);
        int32_t nodes = pick(1, nodes_max), prefix = pick(0, length_max - nodes);
        struct tv_plan_bound bound = tv_plan_bound(device, nodes_max, heads, length_max);
        struct tv_plan plan = tv_plan_request(device, nodes, heads, prefix);
        assert_true(tv_plan_blocks(&plan) <= bound.blocks);
        assert_true(plan.full.row_tiles == 0 || plan.full.splits <= bound.splits);
        assert_true(plan.rest.row_tiles == 0 || plan.rest.splits <= bound.splits);
        check_cover(&plan);
        check_slots(&plan, bound.partial_rows);
    }
}

/* No length below a bound's asks for more splits than it. */
static void test_most_splits(void **unused)
{
    (void)unused;
    int32_t most = 1;
    for (int32_t length = 1; length < 200000; length++) {
        for (int32_t row_tiles = 1; row_tiles <= TV_PLAN_WIDE; row_tiles++) {
            int32_t wanted = tv_plan_splits_wanted(length, row_tiles);
            most = wanted > most ? wanted : most;
        }
        assert_true(tv_plan_splits_most(length) >= most);
    }
}

/* Devices of few multiprocessors and long requests of few rows, which are split more often than the
 * device has room by the weight of full row tiles. */
static void test_small_devices(void **unused)
{
    (void)unused;
    for (int32_t blocks = 1; blocks <= 132; blocks++) {
        for (int32_t heads = 1; heads <= 128; heads += 3) {
            struct tv_plan_device device = {4, blocks, 0, TV_PLAN_COST / 2, 20};
            struct tv_plan_bound bound = tv_plan_bound(device, 2, heads, 185002);
            struct tv_plan plan = tv_plan_request(device, 1 + heads % 2, heads, 185000);
            assert_true(tv_plan_blocks(&plan) <= bound.blocks);
            check_cover(&plan);
            check_slots(&plan, bound.partial_rows);
        }
    }
}

/* The whole device has work at the points that the measurement plan splits. */
static void test_device_is_filled(void **unused)
{
    static const int32_t points[][3] = {
        {16, 17, 25000}, {8, 17, 185000}, {16, 17, 185000}, {64, 64, 32768}, {16, 1, 185000}};
    struct tv_plan_device device = {4, 132, 0, TV_PLAN_COST / 2, 20};
    (void)unused;
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        struct tv_plan plan = tv_plan_request(device, points[i][1], points[i][0], points[i][2]);
        int32_t blocks = tv_plan_blocks(&plan);
        assert_true(blocks >= 126 && blocks <= 132);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_most_splits),
        cmocka_unit_test(test_small_devices),
        cmocka_unit_test(test_device_is_filled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
