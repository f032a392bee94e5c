/*
 * linear.cu - table entry of the grouped matrix product; linear.cuh computes.
 */
#include "linear_launch.cuh"
#include "ops.h"

struct dense_problem {
    typedef float X;
    static constexpr bool paired = false;
    const char *w;
    const float *x;
    float *y;
    int64_t w_group_bytes, x_row_stride, x_group_stride, y_row_stride, y_group_stride;
    int32_t rows, n, k;
    bool vector, accumulate;

    struct tile {
        const void *w[1];
        const float *x;
        float *y;
        int32_t rows;
    };

    __device__ __forceinline__ bool open(tile &t, int32_t block_rows) const
    {
        int32_t first = (int32_t)blockIdx.x * block_rows;
        t.w[0] = w + blockIdx.z * w_group_bytes;
        t.x = x + blockIdx.z * x_group_stride + first * x_row_stride;
        t.y = y + blockIdx.z * y_group_stride + first * y_row_stride;
        t.rows = min(block_rows, rows - first);
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return t.x + row * x_row_stride;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        float *y_at = t.y + row * y_row_stride + column;
        *y_at = accumulate ? *y_at + value : value;
    }
};

int tv_cuda_linear_prepare(void)
{
    return linear_prepare<struct dense_problem>();
}

int tv_cuda_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    if (args->rows < 0 || args->n < 1 || args->k < 1 || args->groups < 1 || args->w == NULL ||
        (args->rows > 0 && (args->x == NULL || args->y == NULL))) {
        return -EINVAL;
    }
    size_t element = tv_dtype_size(args->w_dtype);
    if (linear_uses_mma(args->w_dtype, args->k) &&
        ((uintptr_t)args->w % 16 != 0 ||
         (args->groups > 1 && args->w_group_stride * (int64_t)element % 16 != 0))) {
        return -EINVAL;
    }
    if (args->rows == 0) {
        return 0;
    }
    struct dense_problem p;
    p.w = (const char *)args->w;
    p.x = args->x;
    p.y = args->y;
    p.w_group_bytes = args->w_group_stride * (int64_t)element;
    p.x_row_stride = args->x_row_stride;
    p.x_group_stride = args->x_group_stride;
    p.y_row_stride = args->y_row_stride;
    p.y_group_stride = args->y_group_stride;
    p.rows = args->rows;
    p.n = args->n;
    p.k = args->k;
    p.vector = (uintptr_t)args->x % 16 == 0 && args->x_row_stride % 4 == 0 &&
               args->x_group_stride % 4 == 0;
    p.accumulate = args->accumulate != 0;
    bool mma = linear_uses_mma(args->w_dtype, args->k);
    int32_t block_rows = linear_block_rows(mma, false, args->groups, args->rows, args->n);
    return linear_launch(p, args->w_dtype, block_rows, linear_blocks(args->rows, block_rows),
                         args->groups, tv_cuda_stream(k));
}
