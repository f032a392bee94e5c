/*
 * to_bf16.cu - rounding of a dense array to bf16, to nearest even.
 */
#include "device.cuh"
#include "launch.cuh"
#include "ops.h"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    to_bf16(int64_t count, const float *x, __nv_bfloat16 *y)
{
    ptx_launch_dependents();
    ptx_wait_dependence();
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) {
        y[i] = __float2bfloat16_rn(x[i]);
    }
}

int tv_cuda_to_bf16(struct tv_kernels *k, int64_t count, const float *x, uint16_t *y)
{
    int64_t blocks = (count + THREADS - 1) / THREADS;
    if (count < 0 || blocks > INT32_MAX || (count > 0 && (x == NULL || y == NULL))) {
        return -EINVAL;
    }
    if (count == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    return launch(to_bf16, dim3((uint32_t)blocks), THREADS, 0, tv_cuda_stream(k), count, x,
                  (__nv_bfloat16 *)y);
}
