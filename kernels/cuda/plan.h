/*
 * plan.h - how one request of a verify launch is cut into row tiles and KV splits.
 *
 * One pure function, evaluated by every block of the launch and by the host for its bounds, so
 * that no planner kernel, work list or copy of the lengths is needed. It reads the request's own
 * rows and length (and the device's size) alone: a request is cut, and therefore summed, the same
 * way alone and inside any batch. Refuses to know the batch.
 *
 * Rows are nodes * heads, folded; 16 of them make an m-tile (the M of one mma). 16 tokens make a
 * KV tile, which never crosses a page, since page sizes are multiples of 16.
 */
#ifndef TV_KERNELS_CUDA_PLAN_H
#define TV_KERNELS_CUDA_PLAN_H

#include <stdint.h>

#ifdef __CUDACC__
#define TV_PLAN_FN static __host__ __device__ __forceinline__
#else
#define TV_PLAN_FN static inline
#endif

#define TV_PLAN_M          16 /* rows of an m-tile */
#define TV_PLAN_TOKENS     16 /* tokens of a KV tile */
#define TV_PLAN_SPLITS_MAX 132
#define TV_PLAN_WIDE       12 /* row tiles from which a request is split sparingly */

/* Shape of the kernel and of the device that a plan is made for. */
struct tv_plan_device {
    int32_t m_tiles_max; /* m-tiles a block can hold */
    int32_t blocks;      /* blocks the device runs at a time */
    int32_t splits;      /* forced number of splits, or 0 */
};

struct tv_plan {
    int32_t rows;      /* nodes * heads */
    int32_t m_tiles;   /* ceil(rows / 16) */
    int32_t row_tiles; /* blocks side by side over the rows */
    int32_t splits;    /* blocks behind each other over the KV tiles, none of them empty */
    int32_t chunk;     /* KV tiles of a split; the last may have fewer */
    int32_t kv_tiles;  /* ceil((prefix + nodes) / 16) */
};

TV_PLAN_FN int32_t tv_plan_ceil(int32_t a, int32_t b)
{
    return (a + b - 1) / b;
}

/*
 * Splits that a request of `length` tokens asks for when blocks are free: short ones as many as
 * keep a block busy for longer than its start and end take (192 tokens), up to 9; from there on
 * one per 457 tokens, since each split writes and reads its partial sums once more. Requests with
 * many row tiles keep a good part of the device busy unsplit and write as many partial sums more:
 * one per 2,048 tokens.
 */
TV_PLAN_FN int32_t tv_plan_splits_wanted(int32_t length, int32_t row_tiles)
{
    int32_t fine = length / 192, wanted = fine < 9 ? fine : 9, coarse = length / 457;
    if (row_tiles >= TV_PLAN_WIDE) {
        wanted = length / 2048;
    } else if (wanted < coarse) {
        wanted = coarse;
    }
    wanted = wanted > 1 ? wanted : 1;
    return wanted < TV_PLAN_SPLITS_MAX ? wanted : TV_PLAN_SPLITS_MAX;
}

TV_PLAN_FN struct tv_plan tv_plan_request(struct tv_plan_device device, int32_t nodes,
                                          int32_t heads, int32_t prefix)
{
    struct tv_plan plan;
    int32_t splits = device.splits;
    plan.rows = nodes * heads;
    plan.m_tiles = tv_plan_ceil(plan.rows, TV_PLAN_M);
    plan.row_tiles = tv_plan_ceil(plan.m_tiles, device.m_tiles_max);
    plan.kv_tiles = tv_plan_ceil(prefix + nodes, TV_PLAN_TOKENS);
    if (splits == 0) {
        int32_t free_blocks = device.blocks / plan.row_tiles;
        splits = tv_plan_splits_wanted(prefix + nodes, plan.row_tiles);
        splits = splits < free_blocks ? splits : free_blocks;
        splits = splits > 1 ? splits : 1;
    }
    plan.chunk = tv_plan_ceil(plan.kv_tiles, splits);
    plan.splits = tv_plan_ceil(plan.kv_tiles, plan.chunk);
    return plan;
}

/* First m-tile of row tile i; row tile i ends where i + 1 starts. Sizes differ by one at most. */
TV_PLAN_FN int32_t tv_plan_first_m_tile(const struct tv_plan *plan, int32_t i)
{
    /* At most 8,192 times 8,192. */
    return plan->m_tiles * i / plan->row_tiles;
}

/* What the host knows of a launch: bounds over all its requests. */
struct tv_plan_bound {
    int32_t blocks;       /* of one request: row tiles * splits */
    int32_t splits;       /* of one request */
    int64_t partial_rows; /* rows of partial sums of one request */
};

TV_PLAN_FN struct tv_plan_bound tv_plan_bound(struct tv_plan_device device, int32_t nodes_max,
                                              int32_t heads, int32_t length_max)
{
    struct tv_plan_bound bound;
    int32_t m_tiles = tv_plan_ceil(nodes_max * heads, TV_PLAN_M);
    int32_t row_tiles = tv_plan_ceil(m_tiles, device.m_tiles_max);
    int32_t kv_tiles = tv_plan_ceil(length_max, TV_PLAN_TOKENS);
    int64_t rows;
    bound.splits = device.splits;
    if (bound.splits == 0) {
        /* Fewer nodes may mean more splits. */
        bound.splits = tv_plan_splits_wanted(length_max, 1);
        bound.splits = bound.splits < device.blocks ? bound.splits : device.blocks;
    }
    bound.splits = bound.splits < kv_tiles ? bound.splits : kv_tiles;
    bound.blocks = row_tiles * bound.splits;
    if (device.splits == 0) {
        /* splits > 1 means row_tiles * splits <= device.blocks, for whatever number of nodes. */
        int32_t most = row_tiles > device.blocks ? row_tiles : device.blocks;
        bound.blocks = bound.blocks < most ? bound.blocks : most;
    }
    rows = (int64_t)m_tiles * TV_PLAN_M * bound.splits;
    if (device.splits == 0) {
        int64_t most = (int64_t)device.blocks * device.m_tiles_max * TV_PLAN_M;
        rows = rows < most ? rows : most;
    }
    bound.partial_rows = bound.splits > 1 ? rows : 0;
    return bound;
}

#endif
