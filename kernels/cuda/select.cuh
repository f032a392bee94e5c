/*
 * select.cuh - work on one row of logits by a cluster of blocks: loops and sums over the row, and
 * finding the k largest elements, or the largest that hold a share of the mass, by bisection on
 * order-preserving keys.
 *
 * Sums over the row run in a fixed order, so a result is the same in every run. Owns no kernel. A
 * kernel that uses this runs with __cluster_dims__(SELECT_BLOCKS) and SELECT_THREADS threads, and
 * ends with select_end.
 */
#ifndef TV_KERNELS_CUDA_SELECT_CUH
#define TV_KERNELS_CUDA_SELECT_CUH

#include <cooperative_groups.h>

#include "device.cuh"

#define SELECT_BLOCKS  8
#define SELECT_THREADS 512
#define SELECT_PIVOTS  3 /* two bits of the key a pass */

/* Row of the cluster, and its first thread's place in the row's loops. */
TV_DEVICE int64_t select_row(void)
{
    return blockIdx.x / SELECT_BLOCKS;
}

TV_DEVICE int32_t select_thread(void)
{
    return (int32_t)(blockIdx.x % SELECT_BLOCKS * SELECT_THREADS + threadIdx.x);
}

/* f(i) for every i below count, shared out over the cluster's threads; four at a time in flight. */
template <typename F> TV_DEVICE void select_each(int32_t count, F f)
{
#pragma unroll 4
    for (int32_t i = select_thread(); i < count; i += SELECT_BLOCKS * SELECT_THREADS) {
        f(i);
    }
}

/*
 * Join one value of every thread of the cluster: over a warp in a tree, then over warps and blocks
 * in order; every thread gets the same bits. Two slots take turns, so that a block which is ahead
 * does not overwrite what another still reads: it meets it at the next barrier first.
 */
template <typename T, typename Join> TV_DEVICE T select_join(T x, int &turn, Join join)
{
    __shared__ T warps[SELECT_THREADS / 32], slots[2];
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    for (int i = 16; i > 0; i >>= 1) {
        T other;
#pragma unroll
        for (int word = 0; word < (int)(sizeof(T) / 4); word++) {
            ((uint32_t *)&other)[word] =
                __shfl_xor_sync(0xffffffffu, ((const uint32_t *)&x)[word], i);
        }
        x = join(x, other);
    }
    if ((threadIdx.x & 31) == 0) {
        warps[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        x = warps[0];
        for (int w = 1; w < SELECT_THREADS / 32; w++) {
            x = join(x, warps[w]);
        }
        slots[turn] = x;
    }
    cluster.sync();
    x = *cluster.map_shared_rank(&slots[turn], 0);
    for (uint32_t b = 1; b < SELECT_BLOCKS; b++) {
        x = join(x, *cluster.map_shared_rank(&slots[turn], b));
    }
    turn ^= 1;
    return x;
}

template <typename T> TV_DEVICE T select_sum(T x, int &turn)
{
    return select_join(x, turn, [](const T &a, const T &b) { return a + b; });
}

TV_DEVICE float select_max(float x, int &turn)
{
    return select_join(x, turn, [](float a, float b) { return fmaxf(a, b); });
}

/* No block leaves while another may still read its shared memory. */
TV_DEVICE void select_end(void)
{
    cooperative_groups::this_cluster().sync();
}

/* Unsigned order is float order; -0 and +0 tie. */
TV_DEVICE uint32_t select_key(float value)
{
    uint32_t bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* A set of a row's elements: those with a key above `key`, and of those with `key` itself the ids
 * below id_end. */
struct select_set {
    uint32_t key;
    int32_t id_end;
};

TV_DEVICE bool select_has(struct select_set set, uint32_t key, int32_t id)
{
    return key > set.key || (key == set.key && id < set.id_end);
}

template <typename Sum> struct select_sums {
    Sum pivot[SELECT_PIVOTS];
};

/*
 * The largest key for which measure(elements with at least this key) >= wanted. row(i, &key,
 * &weight) tells of element i; a weight of 0 does not count. *ret_above: the measure of what is
 * above the result. The measure of everything must be >= wanted > 0.
 */
template <typename Sum, typename Row>
TV_DEVICE uint32_t select_key_of(int32_t count, Sum wanted, Row row, Sum *ret_above, int &turn)
{
    uint64_t low = 0, high = (uint64_t)1 << 32; /* enough at low, too little at high */
    Sum above = 0;
    while (high - low > 1) {
        uint64_t step = (high - low + SELECT_PIVOTS) / (SELECT_PIVOTS + 1);
        struct select_sums<Sum> sums = {
        };
        select_each(count, [&](int32_t i) {
            uint32_t key;
            Sum weight;
            row(i, &key, &weight);
#pragma unroll
            for (int p = 0; p < SELECT_PIVOTS; p++) {
                sums.pivot[p] += key >= low + step * (uint64_t)(p + 1) ? weight : (Sum)0;
            }
        });
        sums = select_join(sums, turn,
                           [](const struct select_sums<Sum> &a, const struct select_sums<Sum> &b) {
                               struct select_sums<Sum> joined;
#pragma unroll
                               for (int p = 0; p < SELECT_PIVOTS; p++) {
                                   joined.pivot[p] = a.pivot[p] + b.pivot[p];
                               }
                               return joined;
                           });
        uint64_t end = high;
#pragma unroll
        for (int p = 0; p < SELECT_PIVOTS; p++) {
            uint64_t pivot = low + step * (uint64_t)(p + 1);
            if (pivot < end && !(sums.pivot[p] >= wanted)) {
                end = pivot;
                above = sums.pivot[p];
            }
        }
        /* The last pivot that had enough is one step below the first that had not. */
        low += (end - 1 - low) / step * step;
        high = end;
    }
    *ret_above = above;
    return (uint32_t)low;
}

/* The id below which `wanted` elements with key `key` are; INT32_MAX when there are no more. */
template <typename Row>
TV_DEVICE int32_t select_id_end(int32_t count, uint32_t key, int32_t wanted, Row row, int &turn)
{
    int32_t low = 0, high = INT32_MAX; /* too few below low, enough below high */
    for (int32_t middle = count; high - low > 1; middle = low + (high - low) / 2) {
        int32_t below = 0;
        select_each(middle, [&](int32_t i) { below += row(i) == key; });
        below = select_sum(below, turn);
        if (middle == count && below <= wanted) {
            return INT32_MAX;
        }
        if (below >= wanted) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return high;
}

/* The `wanted` (1 .. count) elements with the largest keys, ties to the lower id. */
template <typename Row>
TV_DEVICE struct select_set select_largest(int32_t count, int32_t wanted, Row row, int &turn)
{
    struct select_set set;
    int32_t above;
    set.key = select_key_of<int32_t>(
        count, wanted,
        [&](int32_t i, uint32_t *key, int32_t *weight) {
            *key = row(i);
            *weight = 1;
        },
        &above, turn);
    set.id_end = select_id_end(count, set.key, wanted - above, row, turn);
    return set;
}

#endif
