/*
 * select.cuh - finding the k largest, or the largest that hold a share of the mass, in one row by
 * one block: bisection on order-preserving keys.
 *
 * Sums over the row run in a fixed order, so a result is the same in every run. Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_SELECT_CUH
#define TV_KERNELS_CUDA_SELECT_CUH

#include "device.cuh"

#define SELECT_THREADS 512
#define SELECT_PIVOTS  3 /* two bits of the key a pass */

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

/*
 * The largest key for which measure(elements with at least this key) >= wanted. row(i, &key,
 * &weight) tells of element i; a weight of 0 does not count. *ret_above: the measure of what is
 * above the result. The measure of everything must be >= wanted > 0. By all threads of the block.
 */
template <typename Sum, typename Row>
TV_DEVICE uint32_t select_key_of(int32_t count, Sum wanted, Row row, Sum *ret_above)
{
    uint64_t low = 0, high = (uint64_t)1 << 32; /* enough at low, too little at high */
    Sum above = 0;
    while (high - low > 1) {
        uint64_t step = (high - low + SELECT_PIVOTS) / (SELECT_PIVOTS + 1);
        Sum sums[SELECT_PIVOTS] = {};
        for (int32_t i = (int32_t)threadIdx.x; i < count; i += SELECT_THREADS) {
            uint32_t key;
            Sum weight;
            row(i, &key, &weight);
#pragma unroll
            for (int p = 0; p < SELECT_PIVOTS; p++) {
                sums[p] += key >= low + step * (uint64_t)(p + 1) ? weight : (Sum)0;
            }
        }
        uint64_t next_low = low, next_high = high;
#pragma unroll
        for (int p = 0; p < SELECT_PIVOTS; p++) {
            uint64_t pivot = low + step * (uint64_t)(p + 1);
            Sum sum = block_sum(sums[p]);
            if (pivot >= next_high) {
                continue;
            }
            if (sum >= wanted) {
                next_low = pivot;
            } else {
                next_high = pivot;
                above = sum;
            }
        }
        low = next_low;
        high = next_high;
    }
    *ret_above = above;
    return (uint32_t)low;
}

/* The id below which `wanted` elements with key `key` are; INT32_MAX when they are all. */
template <typename Row>
TV_DEVICE int32_t select_id_end(int32_t count, uint32_t key, int32_t wanted, Row row)
{
    int32_t low = 0, high = count; /* too few below low, enough below high */
    int32_t ties = 0;
    for (int32_t i = (int32_t)threadIdx.x; i < count; i += SELECT_THREADS) {
        ties += row(i) == key;
    }
    if (block_sum(ties) <= wanted) {
        return INT32_MAX;
    }
    while (high - low > 1) {
        int32_t middle = low + (high - low) / 2, below = 0;
        for (int32_t i = (int32_t)threadIdx.x; i < middle; i += SELECT_THREADS) {
            below += row(i) == key;
        }
        if (block_sum(below) >= wanted) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return high;
}

/* The `wanted` (1 .. count) elements with the largest keys, ties to the lower id. */
template <typename Row>
TV_DEVICE struct select_set select_largest(int32_t count, int32_t wanted, Row row)
{
    struct select_set set;
    int32_t above;
    set.key = select_key_of<int32_t>(
        count, wanted,
        [&](int32_t i, uint32_t *key, int32_t *weight) {
            *key = row(i);
            *weight = 1;
        },
        &above);
    set.id_end = select_id_end(count, set.key, wanted - above, row);
    return set;
}

#endif
