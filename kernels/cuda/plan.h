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

#include <stdbool.h>
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
#define TV_PLAN_WAVES_MAX  2  /* times that the blocks of one request may fill the device */

/* Time of a pair of KV tiles for a full row tile: what other costs are counted in. Anything goes
 * for correctness. */
#define TV_PLAN_COST 8

/* Shape of the kernel and of the device that a plan is made for. */
struct tv_plan_device {
    int32_t m_tiles_max; /* m-tiles a block can hold */
    int32_t blocks;      /* blocks the device runs at a time */
    int32_t splits;      /* forced number of splits, or 0 */
    int32_t cost_least;  /* a pair for the smallest row tile, at most TV_PLAN_COST */
    int32_t cost_start;  /* a block's start and end */
};

/* Row tiles of one size, and how each is cut over the KV tiles. */
struct tv_plan_part {
    int32_t row_tiles; /* blocks side by side over the rows */
    int32_t m_tiles;   /* of each */
    int32_t splits;    /* blocks behind each other over the KV tiles, none of them empty */
    int32_t chunk;     /* KV tiles of a split; the last may have fewer */
};

struct tv_plan {
    int32_t rows;             /* nodes * heads */
    int32_t kv_tiles;         /* ceil((prefix + nodes) / 16) */
    struct tv_plan_part full; /* the first row tiles, as large as a block can hold */
    struct tv_plan_part rest; /* the last one, or none */
};

/* No number here is negative, and the unsigned quotient is the shorter one to compute. */
TV_PLAN_FN int32_t tv_plan_div(int32_t a, int32_t b)
{
    return (int32_t)((uint32_t)a / (uint32_t)b);
}

TV_PLAN_FN int32_t tv_plan_ceil(int32_t a, int32_t b)
{
    return tv_plan_div(a + b - 1, b);
}

/*
 * Splits that a request of `length` tokens asks for when blocks are free: short ones as many as
 * keep a block busy for longer than its start and end take (128 tokens), up to 12, from 3,072
 * tokens on 9, and from there on one per 850 tokens, since each split writes and reads its partial
 * sums once more. One row tile: up to 16, from 6,000 tokens on 6, since a batch then fills the
 * device by itself, and one for every 680 tokens beyond 4,096. Many row tiles keep a good part of
 * the device busy unsplit and write as many partial sums more: up to 4 of 512 tokens, from 4,096
 * on one per 1,024.
 */
TV_PLAN_FN int32_t tv_plan_splits_wanted(int32_t length, int32_t row_tiles)
{
    int32_t fine = length / 128, most = length < 3072 ? 12 : 9, wanted = length / 850;
    if (row_tiles == 1) {
        most = length < 6000 ? 16 : 6;
        wanted = length > 4096 ? (length - 4096) / 680 : 1;
    } else if (row_tiles >= TV_PLAN_WIDE) {
        fine = length / 512;
        most = 4;
        wanted = length / 1024;
    }
    fine = fine < most ? fine : most;
    wanted = wanted > fine ? wanted : fine;
    wanted = wanted > 1 ? wanted : 1;
    return wanted < TV_PLAN_SPLITS_MAX ? wanted : TV_PLAN_SPLITS_MAX;
}

/* Bound of the above over all requests of up to `length` tokens, of any number of row tiles. */
TV_PLAN_FN int32_t tv_plan_splits_most(int32_t length)
{
    int32_t one = tv_plan_splits_wanted(length, 1), few = tv_plan_splits_wanted(length, 2);
    int32_t fine = length / 128 < 16 ? length / 128 : 16;
    int32_t most = one > few ? one : few;
    return most > fine ? most : fine;
}

/* Cost of a pair of KV tiles for a row tile of this many m-tiles. A small one costs more than its
 * part, since some of its time is the same for all. */
TV_PLAN_FN int32_t tv_plan_cost(struct tv_plan_device device, int32_t m_tiles)
{
    int32_t part = (TV_PLAN_COST - device.cost_least) * m_tiles;
    return m_tiles == 0 ? 0 : device.cost_least + tv_plan_div(part, device.m_tiles_max);
}

/*
 * Splits of a request's full row tiles, of which `weight` is the cost of all its row tiles for one
 * pair: what is wanted, when the device runs them all at a time; else as many as fill the device
 * once, or some number of times when that leaves fewer blocks without work at the end.
 */
TV_PLAN_FN int32_t tv_plan_splits(struct tv_plan_device device, int32_t wanted, int32_t weight,
                                  int32_t kv_tiles)
{
    int32_t room = device.blocks * TV_PLAN_COST, best = 1, best_cost = INT32_MAX;
    if (wanted * weight <= room) {
        return wanted;
    }
    for (int32_t waves = 1; waves <= TV_PLAN_WAVES_MAX; waves++) {
        int32_t splits = tv_plan_div(waves * room, weight);
        splits = splits > 1 ? splits : 1;
        splits = splits < wanted ? splits : wanted;
        /* Partial sums of a split take about as long as 1/40 of a pair of each row tile. */
        int32_t pairs = tv_plan_ceil(kv_tiles, 2 * splits);
        int32_t passes = tv_plan_ceil(splits * weight, room);
        int32_t cost = passes * (pairs * TV_PLAN_COST + device.cost_start) + splits * weight / 40;
        if (cost < best_cost) {
            best = splits;
            best_cost = cost;
        }
    }
    return best;
}

TV_PLAN_FN struct tv_plan_part tv_plan_part(int32_t row_tiles, int32_t m_tiles, int32_t splits,
                                            int32_t kv_tiles)
{
    struct tv_plan_part part;
    part.row_tiles = row_tiles;
    part.m_tiles = m_tiles;
    /* Tiles are taken in pairs. */
    part.chunk = 2 * tv_plan_ceil(kv_tiles, 2 * (splits > 1 ? splits : 1));
    part.splits = tv_plan_ceil(kv_tiles, part.chunk);
    return part;
}

TV_PLAN_FN struct tv_plan tv_plan_request(struct tv_plan_device device, int32_t nodes,
                                          int32_t heads, int32_t prefix)
{
    struct tv_plan plan;
    int32_t most = device.m_tiles_max, splits = device.splits, splits_rest = device.splits;
    int32_t m_tiles = tv_plan_ceil(nodes * heads, TV_PLAN_M);
    int32_t full = tv_plan_div(m_tiles, most), rest = m_tiles - full * most;
    plan.rows = nodes * heads;
    plan.kv_tiles = tv_plan_ceil(prefix + nodes, TV_PLAN_TOKENS);
    if (splits == 0) {
        int32_t cost_rest = tv_plan_cost(device, rest), weight = full * TV_PLAN_COST + cost_rest;
        int32_t wanted = tv_plan_splits_wanted(prefix + nodes, full + (rest > 0));
        splits = tv_plan_splits(device, wanted, weight, plan.kv_tiles);
        /* Alone, the last row tile is split like a full one; else so that it takes as long. */
        splits_rest = full == 0 ? splits : (splits * cost_rest + TV_PLAN_COST / 2) / TV_PLAN_COST;
    }
    plan.full = tv_plan_part(full, most, splits, plan.kv_tiles);
    plan.rest = tv_plan_part(rest > 0, rest, splits_rest, plan.kv_tiles);
    return plan;
}

/* Blocks of a request. */
TV_PLAN_FN int32_t tv_plan_blocks(const struct tv_plan *plan)
{
    return plan->full.row_tiles * plan->full.splits + plan->rest.row_tiles * plan->rest.splits;
}

/* One of them. */
struct tv_plan_block {
    int32_t m_first; /* first m-tile of its row tile */
    int32_t m_tiles;
    int32_t tile_first; /* KV tiles [tile_first, tile_end) */
    int32_t tile_end;
    int32_t splits; /* of its row tile */
    int32_t split;
    int64_t slot_first; /* m-tiles of partial sums that precede its row tile's, in the request */
    int64_t slot;       /* ... that precede its own */
};

/* Block `index`, row tile fastest: all row tiles of one KV range run at the same time. */
TV_PLAN_FN struct tv_plan_block tv_plan_block(const struct tv_plan *plan, int32_t index)
{
    int32_t full_blocks = plan->full.row_tiles * plan->full.splits;
    bool in_full = index < full_blocks;
    struct tv_plan_part part = in_full ? plan->full : plan->rest; /* in registers */
    int32_t local = in_full ? index : index - full_blocks;
    int32_t split = in_full ? tv_plan_div(local, part.row_tiles) : local;
    int32_t row_tile = in_full ? local - split * part.row_tiles : plan->full.row_tiles;
    struct tv_plan_block block;
    block.m_first = row_tile * plan->full.m_tiles;
    block.m_tiles = part.m_tiles;
    block.tile_first = split * part.chunk;
    block.tile_end = block.tile_first + part.chunk;
    block.tile_end = block.tile_end < plan->kv_tiles ? block.tile_end : plan->kv_tiles;
    block.splits = part.splits;
    block.split = split;
    block.slot_first = (int64_t)row_tile * plan->full.splits * plan->full.m_tiles;
    block.slot = block.slot_first + (int64_t)split * part.m_tiles;
    return block;
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
    int64_t blocks, most = row_tiles;
    bound.splits = device.splits;
    if (bound.splits == 0) {
        bound.splits = tv_plan_splits_most(length_max);
        /* Split requests fill the device TV_PLAN_WAVES_MAX times at most by weight, in which the
         * splits of a smaller row tile count as much as they are; rounding adds one of them. A
         * small row tile alone weighs less than a block, and has one for every split. */
        int64_t filled = (int64_t)device.blocks * TV_PLAN_WAVES_MAX + 1;
        most = most > filled ? most : filled;
        most = most > bound.splits ? most : bound.splits;
    } else {
        most = (int64_t)row_tiles * bound.splits;
    }
    bound.splits = bound.splits < kv_tiles ? bound.splits : kv_tiles;
    blocks = (int64_t)row_tiles * bound.splits;
    blocks = blocks < most ? blocks : most;
    bound.blocks = (int32_t)blocks;
    bound.partial_rows = bound.splits > 1 ? blocks * device.m_tiles_max * TV_PLAN_M : 0;
    return bound;
}

#endif
