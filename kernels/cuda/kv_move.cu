/*
 * kv_move.cu - accepted rows move to the front of the tail, inside one pool, in order.
 *
 * A thread owns a column of every row and walks the list; eight rows are read before the first of
 * them is written, except where one of the eight is read after another was to be written.
 */
#include "device.cuh"
#include "ops.h"

#define THREADS 64
#define BATCH   8

struct move_list {
    const int64_t *src, *dst;
    int64_t slot_count;
    int32_t count;
};

/* Both ends of move i; 0 when there is nothing to do or an end is outside the pool. */
TV_DEVICE bool move_get(const struct move_list &list, int32_t i, int64_t *ret_src, int64_t *ret_dst)
{
    int64_t src = list.src[i], dst = list.dst[i];
    *ret_src = src;
    *ret_dst = dst;
    return src != dst && src >= 0 && src < list.slot_count && dst >= 0 && dst < list.slot_count;
}

/* True when an earlier move of the batch writes what a later one reads. */
TV_DEVICE bool batch_depends(const struct move_list &list, int32_t first, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        for (int32_t j = i + 1; j < count; j++) {
            if (list.dst[first + i] == list.src[first + j]) {
                return true;
            }
        }
    }
    return false;
}

template <typename Unit>
static __global__ void __launch_bounds__(THREADS)
    kv_move(Unit *rows, int64_t units, const struct move_list list)
{
    int64_t column = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (column >= units) {
        return;
    }
    int64_t src, dst;
    for (int32_t first = 0; first < list.count; first += BATCH) {
        int32_t count = min(BATCH, list.count - first);
        if (batch_depends(list, first, count)) {
            for (int32_t i = 0; i < count; i++) {
                if (move_get(list, first + i, &src, &dst)) {
                    rows[dst * units + column] = rows[src * units + column];
                }
            }
            continue;
        }
        Unit held[BATCH];
#pragma unroll
        for (int32_t i = 0; i < BATCH; i++) {
            if (i < count && move_get(list, first + i, &src, &dst)) {
                held[i] = rows[src * units + column];
            }
        }
#pragma unroll
        for (int32_t i = 0; i < BATCH; i++) {
            if (i < count && move_get(list, first + i, &src, &dst)) {
                rows[dst * units + column] = held[i];
            }
        }
    }
}

template <typename Unit>
static int launch(void *pages, size_t row_bytes, struct move_list list, cudaStream_t stream)
{
    int64_t units = (int64_t)(row_bytes / sizeof(Unit));
    uint32_t blocks = (uint32_t)((units + THREADS - 1) / THREADS);
    kv_move<Unit><<<blocks, THREADS, 0, stream>>>((Unit *)pages, units, list);
    return tv_cuda_errno(cudaGetLastError());
}

int tv_cuda_kv_move(struct tv_kernels *k, void *kv_pages, size_t row_bytes, int64_t slot_count,
                    const int64_t *src, const int64_t *dst, int32_t count)
{
    struct move_list list = {src, dst, slot_count, count};
    if (count < 0 || row_bytes == 0 || row_bytes > ((size_t)1 << 24)) {
        return -EINVAL;
    }
    if (count == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    uintptr_t bits = (uintptr_t)kv_pages | row_bytes;
    if (bits % 16 == 0) {
        return launch<uint4>(kv_pages, row_bytes, list, tv_cuda_stream(k));
    }
    return bits % 4 == 0 ? launch<uint32_t>(kv_pages, row_bytes, list, tv_cuda_stream(k))
                         : launch<uint8_t>(kv_pages, row_bytes, list, tv_cuda_stream(k));
}
