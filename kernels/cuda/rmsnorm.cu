/*
 * rmsnorm.cu - root mean square norm with a weight, one block a row.
 */
#include "device.cuh"
#include "launch.cuh"
#include "ops.h"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    rmsnorm(int32_t dim, const float *x, int64_t x_stride, const float *weight, float eps, float *y,
            int64_t y_stride)
{
    ptx_launch_dependents();
    ptx_wait_dependence();
    const float *row = x + blockIdx.x * x_stride;
    float *result = y + blockIdx.x * y_stride;
    float sum = 0.0f;
    for (int32_t i = (int32_t)threadIdx.x; i < dim; i += THREADS) {
        sum = fmaf(row[i], row[i], sum);
    }
    sum = block_sum(sum);
    float factor = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int32_t i = (int32_t)threadIdx.x; i < dim; i += THREADS) {
        result[i] = row[i] * factor * weight[i];
    }
}

int tv_cuda_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                    int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride)
{
    if (rows < 0 || dim < 1) {
        return -EINVAL;
    }
    if (rows == 0) {
        return 0;
    }
    return launch(rmsnorm, dim3((uint32_t)rows), THREADS, 0, tv_cuda_stream(k), dim, x, x_stride,
                  weight, eps, y, y_stride);
}
