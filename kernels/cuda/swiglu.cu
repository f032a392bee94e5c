/*
 * swiglu.cu - gated activation: gate / (1 + exp(-gate)) * up, in place.
 */
#include "device.cuh"
#include "launch.cuh"
#include "ops.h"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    swiglu(int64_t count, float *gate, const float *up)
{
    ptx_launch_dependents();
    ptx_wait_dependence();
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) {
        gate[i] = gated(gate[i], up[i]);
    }
}

int tv_cuda_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up)
{
    if (rows < 0 || dim < 1) {
        return -EINVAL;
    }
    int64_t count = (int64_t)rows * dim, blocks = (count + THREADS - 1) / THREADS;
    if (blocks > INT32_MAX) {
        return -EINVAL;
    }
    if (count == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    return launch(swiglu, dim3((uint32_t)blocks), THREADS, 0, tv_cuda_stream(k), count, gate, up);
}
