/*
 * synthesize.cu - random weights by a counter generator, a block of four values a thread.
 *
 * The same bits as ref/synthesize.c: one fused multiply-add and one rounding, both spelled out.
 */
#include "../philox.h"
#include "device.cuh"
#include "ops.h"

#define THREADS    256
#define BLOCKS_MAX (1 << 20) /* each goes on where the grid ends */

static __global__ void __launch_bounds__(THREADS)
    synthesize(const __grid_constant__ struct tv_synthesize p)
{
    int64_t rows = p.rows, cols = p.cols, count = p.groups * rows * cols;
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t b = (int64_t)blockIdx.x * THREADS + threadIdx.x; b < (count + 3) / 4; b += step) {
        struct tv_philox_block block = tv_philox_weights(p.seed, p.tensor, (uint64_t)b);
#pragma unroll
        for (int32_t j = 0; j < 4; j++) {
            int64_t i = 4 * b + j, at = i;
            if (i >= count) {
                break;
            }
            if (p.transposed) {
                int64_t group = i / (rows * cols), r = i / cols % rows, c = i % cols;
                at = (group * cols + c) * rows + r;
            }
            float value = __fmaf_rn(p.scale, tv_philox_signed(block.word[j]), p.offset);
            store_rounded(p.to, p.dtype, at, value);
        }
    }
}

int tv_cuda_synthesize(struct tv_kernels *k, const struct tv_synthesize *args)
{
    if (args->groups < 1 || args->rows < 1 || args->cols < 1 || args->to == NULL ||
        (args->dtype != TV_F32 && args->dtype != TV_BF16) ||
        (int64_t)args->groups * args->rows > INT64_MAX / 4 / args->cols) {
        return -EINVAL;
    }
    int64_t count = (int64_t)args->groups * args->rows * args->cols;
    int64_t blocks = (count + 4 * THREADS - 1) / (4 * THREADS);
    blocks = blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX;
    TV_CUDA_ENTER(k);
    synthesize<<<(uint32_t)blocks, THREADS, 0, tv_cuda_stream(k)>>>(*args);
    return tv_cuda_errno(cudaGetLastError());
}
