/*
 * rope.cu - rotary embedding: interleaved pairs in, halves out, one warp a vector.
 */
#include "device.cuh"
#include "launch.cuh"
#include "ops.h"

#define WARPS 4

static __global__ void __launch_bounds__(WARPS * 32) rope(const __grid_constant__ struct tv_rope a)
{
    ptx_launch_dependents();
    ptx_wait_dependence();
    int64_t vector = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (vector >= (int64_t)a.rows * a.heads) {
        return;
    }
    int64_t row = vector / a.heads, head = vector % a.heads;
    float *x = a.x + row * a.row_stride + head * a.head_stride;
    rotate(x, a.table, a.positions[row], [x](int32_t i, float value) { x[i] = value; });
}

int tv_cuda_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    if (args->rows < 0 || args->heads < 1 || args->x == NULL || args->table.cos_sin == NULL ||
        args->table.rope_dim < 2 || args->table.rope_dim % 2 != 0 ||
        args->table.rope_dim > ROPE_DIM_MAX) {
        return -EINVAL;
    }
    if (args->rows == 0) {
        return 0;
    }
    int64_t blocks = ((int64_t)args->rows * args->heads + WARPS - 1) / WARPS;
    if (blocks > INT32_MAX) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    return launch(rope, dim3((uint32_t)blocks), WARPS * 32, 0, tv_cuda_stream(k), *args);
}
