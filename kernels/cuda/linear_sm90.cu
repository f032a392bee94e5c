/*
 * linear_sm90.cu - dense products of many rows on Hopper. For sm_90a alone; linear_sm90.cuh
 * computes.
 *
 * The copy engine reads bf16, so rows are cut into pieces by a launch of their own, as many at a
 * time as the backend's scratch has room for.
 */
#define TV_CUDA_SM90 1 /* that this file is built */

#include "linear_sm90.h"

#include "linear_sm90.cuh"
#include "linear_sm90_launch.cuh"

struct dense_part {
    CUtensorMap w_map;
    float *y;
    int64_t y_row_stride, y_group_stride;
    int32_t n, column_tiles, items;
    bool accumulate;
};

template <int PIECES> struct dense_sm90 {
    static constexpr int pieces = PIECES;
    static constexpr bool paired = false, made = false;
    static constexpr int32_t second_map = 0;
    CUtensorMap x_map;
    struct dense_part part[2];
    int32_t rows, k, groups, box_rows, tile_rows, row_tiles;

    struct tile : sm90_tile {
        float *y;
        int64_t y_row_stride;
        int32_t columns; /* that there are */
        bool accumulate;
    };

    __device__ __forceinline__ bool find(int32_t item, tile *t) const
    {
        bool second = item >= part[0].items;
        const struct dense_part &mine = second ? part[1] : part[0];
        item -= second ? part[0].items : 0;
        int32_t first = item % row_tiles * tile_rows, rest = item / row_tiles;
        int32_t group = rest / mine.column_tiles;
        int32_t column = rest % mine.column_tiles * SM90_WEIGHTS;
        t->w_map = &mine.w_map;
        t->w_row = column;
        t->w_group = t->x_group = group;
        t->x_row = first;
        t->rows = min(tile_rows, rows - first);
        t->k = k;
        t->y_row_stride = mine.y_row_stride;
        t->y = mine.y + group * mine.y_group_stride + first * mine.y_row_stride + column;
        t->columns = mine.n - column;
        t->accumulate = mine.accumulate;
        return item < mine.items;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float2 sums) const
    {
        float2 *y = (float2 *)(t.y + row * t.y_row_stride + column), before = {};
        if (column < t.columns) {
            if (t.accumulate) {
                before = *y;
            }
            *y = make_float2(before.x + sums.x, before.y + sums.y);
        }
    }
};

/* Row of the product -> row of x. */
struct dense_rows {
    const float *x;
    int64_t row_stride, group_stride;
    int32_t rows;

    __device__ __forceinline__ const float *row(int32_t at) const
    {
        return x + at / rows * group_stride + at % rows * row_stride;
    }
};

/* `rows` of them from row `first` on. */
template <int PIECES>
static int dense_slice(const struct tv_kernels *k, const struct tv_linear *args, int count,
                       int32_t first, int32_t rows)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    struct dense_sm90<PIECES> p = {
    };
    int32_t padded = (args->k + 31) / 32 * 32, groups = args->groups;
    int64_t columns = 0, items = 0, apart = (int64_t)groups * rows * padded;
    for (int i = 0; i < count; i++) {
        columns += (int64_t)groups * ((args[i].n + SM90_WEIGHTS - 1) / SM90_WEIGHTS);
    }
    p.tile_rows = sm90_tile_rows(cuda->sm_count, sm90_ring<PIECES>::tile_rows, rows, columns);
    p.box_rows = p.tile_rows / sm90_ring<PIECES>::sums;
    p.row_tiles = (rows + p.tile_rows - 1) / p.tile_rows;
    p.rows = rows;
    p.k = args->k;
    p.groups = groups;
    p.part[1].column_tiles = 1; /* of one part alone: the item behind the last is looked for here */
    int rc = sm90_encode(cuda, cuda->scratch, padded, rows, groups * PIECES, padded,
                         (int64_t)rows * padded, p.box_rows, &p.x_map);
    for (int i = 0; rc == 0 && i < count; i++) {
        const struct tv_linear *a = &args[i];
        struct dense_part *part = &p.part[i];
        part->y = a->y + first * a->y_row_stride;
        part->y_row_stride = a->y_row_stride;
        part->y_group_stride = a->y_group_stride;
        part->n = a->n;
        part->column_tiles = (a->n + SM90_WEIGHTS - 1) / SM90_WEIGHTS;
        part->items = p.row_tiles * part->column_tiles * groups;
        part->accumulate = a->accumulate != 0;
        items += part->items;
        rc = sm90_encode(cuda, a->w, a->k, a->n, groups, a->k,
                         groups > 1 ? a->w_group_stride : (int64_t)a->n * a->k, SM90_WEIGHTS / 2,
                         &part->w_map);
    }
    struct dense_rows from = {args->x + first * args->x_row_stride, args->x_row_stride,
                              args->x_group_stride, rows};
    rc = rc < 0 ? rc
                : sm90_rows_launch<struct dense_rows, PIECES>(k, from, groups * rows, args->k,
                                                              apart, cuda->scratch);
    return rc < 0 ? rc : sm90_launch(k, p, items);
}

/* What the kernel and its copies can take. */
static bool takes(const struct tv_linear *a)
{
    return a->n % 2 == 0 && (uintptr_t)a->y % 8 == 0 && a->y_row_stride % 2 == 0 &&
           a->y_group_stride % 2 == 0 && (uintptr_t)a->x % 8 == 0 && a->x_row_stride % 2 == 0 &&
           a->x_group_stride % 2 == 0;
}

template <int PIECES>
static int dense(const struct tv_kernels *k, const struct tv_linear *args, int count)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int64_t each = (int64_t)((args->k + 31) / 32 * 32) * 2 * PIECES * args->groups;
    int64_t most = (int64_t)cuda->scratch_bytes / each, columns = 0;
    for (int i = 0; i < count; i++) {
        columns += ((int64_t)args[i].n + SM90_WEIGHTS - 1) / SM90_WEIGHTS * args->groups;
    }
    /* Cutting exact rows of very few columns takes longer than the product. */
    bool few = PIECES > 1 && columns <= args->groups;
    if (few || most < SM90_SUM || columns * args->rows > INT32_MAX) {
        return -ENOTSUP;
    }
    most -= most % SM90_SUM;
    int rc = 0;
    bool done = false;
    for (int32_t first = 0; rc == 0 && first < args->rows; first += (int32_t)most) {
        done = first > 0;
        int32_t left = args->rows - first;
        rc = dense_slice<PIECES>(k, args, count, first, left < most ? left : (int32_t)most);
    }
    /* Rows before these are done: none may be added to once more. Their maps could be made, and
     * these differ in the number of rows alone. */
    return rc == -ENOTSUP && done ? -EIO : rc;
}

int tv_linear_sm90_prepare(void)
{
    int rc = sm90_prepare<struct dense_sm90<1>>();
    return rc < 0 ? rc : sm90_prepare<struct dense_sm90<3>>();
}

int tv_linear_sm90(const struct tv_kernels *k, const struct tv_linear *args, int count)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    if (cuda->scratch == NULL || !takes(args) || (count > 1 && !takes(args + 1))) {
        return -ENOTSUP;
    }
    return args->products == TV_PRODUCTS_BF16 ? dense<1>(k, args, count) : dense<3>(k, args, count);
}
