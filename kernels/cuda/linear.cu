/*
 * linear.cu - table entry of the grouped matrix product; linear.cuh computes.
 */
#include "linear_launch.cuh"
#include "linear_sm90.h"
#include "ops.h"

#define PAIR_ROWS_MAX 128 /* beyond these two products fill the device one by one */
#define MANY_ROWS     64
#define MANY_WEIGHTS  (1 << 20)

struct dense_problem : stream_plain {
    const char *w;
    const float *x;
    float *y;
    int64_t w_group_bytes, x_row_stride, x_group_stride, y_row_stride, y_group_stride;
    bool accumulate;

    struct tile {
        const void *w[1];
        const float *x;
        float *y;
        int32_t n, k, rows;
    };

    __device__ __forceinline__ bool open(tile &t, int32_t at, int32_t group,
                                         int32_t block_rows) const
    {
        int32_t first = at * block_rows;
        t.w[0] = w + group * w_group_bytes;
        t.x = x + group * x_group_stride + first * x_row_stride;
        t.y = y + group * y_group_stride + first * y_row_stride;
        t.n = n;
        t.k = k;
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

/* Rows from which on Hopper's kernels of many are faster, where the weights are not small. */
static bool many_rows(const struct tv_linear *args)
{
    return args->rows > MANY_ROWS && (int64_t)args->n * args->k * args->groups >= MANY_WEIGHTS;
}

int tv_cuda_linear_check(const struct tv_linear *args)
{
    if (args->rows < 0 || args->n < 1 || args->k < 1 || args->groups < 1 || args->w == NULL ||
        (args->rows > 0 && (args->x == NULL || args->y == NULL)) ||
        !tv_args_dtype_known(args->w_dtype) || !tv_args_products_known(args->products)) {
        return -EINVAL;
    }
    int64_t group = args->w_group_stride * (int64_t)tv_dtype_size(args->w_dtype);
    return linear_uses_mma(args->w_dtype, args->k) &&
                   ((uintptr_t)args->w % 16 != 0 || (args->groups > 1 && group % 16 != 0))
               ? -EINVAL
               : 0;
}

int tv_cuda_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    int rc = tv_cuda_linear_check(args);
    if (rc < 0 || args->rows == 0) {
        return rc;
    }
    TV_CUDA_ENTER(k);
    size_t element = tv_dtype_size(args->w_dtype);
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
    if (mma && (block_rows == WIDE_ROWS || many_rows(args))) {
        rc = tv_linear_sm90(k, args, 1);
        if (rc != -ENOTSUP) {
            return rc;
        }
    }
    p.tiles = (int32_t)linear_blocks(args->rows, block_rows);
    p.groups = args->groups;
    return linear_launch(k, p, args->products, args->w_dtype, block_rows, (uint32_t)p.tiles,
                         args->groups, p.n, p.k);
}

/* Two matrices of the same k and the same rows; group: which of the two. */
struct pair_problem : stream_plain {
    const void *w[2];
    const float *x;
    float *y[2];
    int64_t x_row_stride, y_row_stride[2];
    int32_t columns[2]; /* n of either */
    bool accumulate[2];

    struct tile {
        const void *w[1];
        const float *x;
        float *y;
        int64_t y_row_stride;
        int32_t n, k, rows;
        bool accumulate;
    };

    int64_t items_bound(int32_t width) const
    {
        return (int64_t)tiles *
               (linear_blocks(columns[0], width) + linear_blocks(columns[1], width));
    }

    __device__ __forceinline__ void early(int32_t width, struct stream_run *ret) const
    {
        int32_t items = (columns[0] + width - 1) / width + (columns[1] + width - 1) / width;
        stream_dense(tiles, 1, items, 1, ret);
    }

    __device__ __forceinline__ void place(int32_t item, int32_t width, int32_t *tile,
                                          int32_t *group, int32_t *column) const
    {
        int32_t first = (columns[0] + width - 1) / width, at = item / tiles;
        *tile = item % tiles;
        *group = at >= first;
        *column = at >= first ? at - first : at;
    }

    __device__ __forceinline__ bool open(tile &t, int32_t at, int32_t group,
                                         int32_t block_rows) const
    {
        int32_t first = at * block_rows;
        bool second = group == 1;
        t.w[0] = second ? w[1] : w[0];
        t.y_row_stride = second ? y_row_stride[1] : y_row_stride[0];
        t.x = x + first * x_row_stride;
        t.y = (second ? y[1] : y[0]) + first * t.y_row_stride;
        t.n = second ? columns[1] : columns[0];
        t.k = k;
        t.rows = min(block_rows, rows - first);
        t.accumulate = second ? accumulate[1] : accumulate[0];
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return t.x + row * x_row_stride;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        float *y_at = t.y + row * t.y_row_stride + column;
        *y_at = t.accumulate ? *y_at + value : value;
    }
};

int tv_cuda_linear_prepare(const struct tv_cuda *cuda)
{
    int rc = linear_prepare<struct dense_problem>();
    rc = rc < 0 ? rc : linear_prepare<struct pair_problem>();
    return rc < 0 || cuda->portable ? rc : tv_linear_sm90_prepare();
}

/* Both of many rows in one launch; -ENOTSUP: not for these. */
static int pair_many(const struct tv_kernels *k, const struct tv_linear *first,
                     const struct tv_linear *second)
{
    const struct tv_linear both[2] = {*first, *second};
    for (int i = 0; i < 2; i++) {
        if (both[i].n < 1 || (uintptr_t)both[i].w % 16 != 0 || both[i].w == NULL ||
            both[i].x == NULL || both[i].y == NULL ||
            !linear_uses_mma(both[i].w_dtype, both[i].k)) {
            return -ENOTSUP;
        }
    }
    return first->products == second->products && (many_rows(first) || many_rows(second))
               ? tv_linear_sm90(k, both, 2)
               : -ENOTSUP;
}

int tv_cuda_linear_pair(struct tv_kernels *k, const struct tv_linear *first,
                        const struct tv_linear *second)
{
    const struct tv_linear *both[2] = {first, second};
    struct pair_problem p;
    int rc;
    if (first->rows != second->rows || first->k != second->k || first->x != second->x ||
        first->x_row_stride != second->x_row_stride || first->groups != 1 || second->groups != 1 ||
        tv_cuda_linear_check(first) < 0 || tv_cuda_linear_check(second) < 0) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    rc = pair_many(k, first, second);
    if (rc != -ENOTSUP) {
        return rc;
    }
    if (first->rows < 1 || first->rows > PAIR_ROWS_MAX || first->w_dtype != second->w_dtype ||
        first->products != second->products || !linear_uses_mma(first->w_dtype, first->k) ||
        (uintptr_t)first->w % 16 != 0 || (uintptr_t)second->w % 16 != 0) {
        rc = tv_cuda_linear(k, first); /* nothing to gain */
        return rc < 0 ? rc : tv_cuda_linear(k, second);
    }
    for (int i = 0; i < 2; i++) {
        if (both[i]->n < 1 || both[i]->w == NULL || both[i]->y == NULL || both[i]->x == NULL) {
            return -EINVAL;
        }
        p.w[i] = both[i]->w;
        p.y[i] = both[i]->y;
        p.y_row_stride[i] = both[i]->y_row_stride;
        p.columns[i] = both[i]->n;
        p.accumulate[i] = both[i]->accumulate != 0;
    }
    p.x = first->x;
    p.x_row_stride = first->x_row_stride;
    p.rows = first->rows;
    p.groups = 1;
    p.n = p.columns[0] + p.columns[1];
    p.k = first->k;
    p.vector = (uintptr_t)first->x % 16 == 0 && first->x_row_stride % 4 == 0;
    int32_t block_rows = p.rows <= 8 ? 8 : 16;
    p.tiles = (int32_t)linear_blocks(p.rows, block_rows);
    return linear_stream_rows(k, p, first->products, block_rows, p.k);
}
