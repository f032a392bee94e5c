/*
 * rmsnorm.cu - root mean square norm with a weight, one block a row.
 */
#include "device.cuh"
#include "launch.cuh"
#include "ops.h"

#define THREADS 256
#define KEPT    8 /* elements of a row that a thread keeps: longer rows are read twice */

static __global__ void __launch_bounds__(THREADS)
    rmsnorm(int32_t dim, const float *x, int64_t x_stride, const float *weight, float eps, float *y,
            int64_t y_stride)
{
    const float *row = x + blockIdx.x * x_stride;
    float *result = y + blockIdx.x * y_stride;
    float kept[KEPT], weights[KEPT], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        int32_t i = (int32_t)threadIdx.x + j * THREADS;
        weights[j] = i < dim ? weight[i] : 0.0f;
    }
    ptx_wait_dependence();
    ptx_launch_dependents();
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        int32_t i = (int32_t)threadIdx.x + j * THREADS;
        kept[j] = i < dim ? row[i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        sum = fmaf(kept[j], kept[j], sum);
    }
    for (int32_t i = (int32_t)threadIdx.x + KEPT * THREADS; i < dim; i += THREADS) {
        sum = fmaf(row[i], row[i], sum);
    }
    sum = block_sum(sum);
    float factor = 1.0f / sqrtf(sum / (float)dim + eps);
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        int32_t i = (int32_t)threadIdx.x + j * THREADS;
        if (i < dim) {
            result[i] = kept[j] * factor * weights[j];
        }
    }
    for (int32_t i = (int32_t)threadIdx.x + KEPT * THREADS; i < dim; i += THREADS) {
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
    TV_CUDA_ENTER(k);
    return launch(rmsnorm, dim3((uint32_t)rows), THREADS, 0, tv_cuda_stream(k), dim, x, x_stride,
                  weight, eps, y, y_stride);
}
