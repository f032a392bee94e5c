/*
 * experts.cuh - what the operations over routed experts share: the plan of a launch, the sort that
 * makes it, the two products and the sum at the end.
 *
 * Owns the workspace's layout. An id outside the experts gives its row NaN.
 */
#ifndef TV_KERNELS_CUDA_EXPERTS_CUH
#define TV_KERNELS_CUDA_EXPERTS_CUH

#include "experts_plan.cuh"
#include "launch.cuh"
#include "linear_launch.cuh"
#include "linear_sm90.h"

#define EXPERTS_FEW 32 /* rows of an expert up to which weights are what takes time */
/* Rows of an expert in the mean from which on Hopper's kernels read large weights faster. */
#define EXPERTS_HOPPER(products) ((products) == TV_PRODUCTS_BF16 ? 6 : 12)
#define EXPERTS_LARGE            (1 << 20) /* elements of a matrix */
#define EXPERTS_JOIN             256
#define EXPERTS_SORT             1024 /* threads */
#define EXPERTS_MAX              4096 /* two counters of each in shared memory */

/* Sort pairs by expert and cut each expert's into tiles, by one block of at least 32 threads.
 * shared: [2 * experts]. */
TV_DEVICE void experts_sort_pairs(const int32_t *ids, int32_t pairs, int32_t experts,
                                  int32_t block_rows, const struct expert_plan &plan,
                                  int32_t *shared)
{
    int32_t *counts = shared, *cursors = shared + experts;
    int32_t thread = (int32_t)threadIdx.x, threads = (int32_t)blockDim.x;
    for (int32_t e = thread; e < experts; e += threads) {
        counts[e] = 0;
    }
    __syncthreads();
    for (int32_t i = thread; i < pairs; i += threads) {
        if (ids[i] >= 0 && ids[i] < experts) {
            atomicAdd(&counts[ids[i]], 1);
        }
    }
    __syncthreads();
    int32_t row_base = 0, tile_base = 0;
    for (int32_t e0 = 0; thread < 32 && e0 < experts; e0 += 32) {
        int32_t e = e0 + thread, rows = e < experts ? counts[e] : 0;
        int32_t tiles = (rows + block_rows - 1) / block_rows, row_end = rows, tile_end = tiles;
        for (int i = 1; i < 32; i *= 2) {
            int32_t row_other = __shfl_up_sync(0xffffffffu, row_end, i);
            int32_t tile_other = __shfl_up_sync(0xffffffffu, tile_end, i);
            row_end += thread >= i ? row_other : 0;
            tile_end += thread >= i ? tile_other : 0;
        }
        int32_t first = row_base + row_end - rows;
        if (e < experts) {
            cursors[e] = first;
        }
        for (int32_t i = 0; i < tiles; i++) {
            struct expert_tile tile = {e, first + i * block_rows,
                                       min(block_rows, rows - i * block_rows)};
            plan.tiles[tile_base + tile_end - tiles + i] = tile;
        }
        row_base += __shfl_sync(0xffffffffu, row_end, 31);
        tile_base += __shfl_sync(0xffffffffu, tile_end, 31);
    }
    if (thread == 0) {
        *plan.tile_count = tile_base;
    }
    __syncthreads();
    for (int32_t i = thread; i < pairs; i += threads) {
        /* Which of an expert's rows comes first changes no result: rows do not meet. */
        bool known = ids[i] >= 0 && ids[i] < experts;
        int32_t at = known ? atomicAdd(&cursors[ids[i]], 1) : -1;
        plan.place[i] = at;
        if (known) {
            plan.order[at] = i;
        }
    }
}

static __global__ void __launch_bounds__(EXPERTS_SORT)
    experts_sort(const int32_t *ids, int32_t pairs, int32_t experts, int32_t block_rows,
                 struct expert_plan plan)
{
    extern __shared__ int32_t counters[];
    ptx_wait_dependence();
    ptx_launch_dependents();
    experts_sort_pairs(ids, pairs, experts, block_rows, plan, counters);
}

/* What both products over experts have in common: the items of the shared ones for every row (group
 * 1), then those of the tiles of routed ones (group 0). */
struct expert_problem {
    typedef float X;
    static constexpr bool streamed = true, rows_ready = false;
    struct expert_plan plan;
    int32_t rows, n, k, tiles_bound;
    int32_t shared_n, shared_k, shared_tiles; /* 0 tiles: no shared experts */
    bool vector;

    int64_t items_bound(int32_t width) const
    {
        return (int64_t)tiles_bound * linear_blocks(n, width) +
               (int64_t)shared_tiles * linear_blocks(shared_n, width);
    }

    __device__ __forceinline__ int32_t shared_items(int32_t width) const
    {
        return shared_tiles * ((shared_n + width - 1) / width);
    }

    __device__ __forceinline__ int32_t routed_items(int32_t width) const
    {
        return *plan.tile_count * ((n + width - 1) / width);
    }

    __device__ __forceinline__ void place(int32_t item, int32_t width, int32_t *tile,
                                          int32_t *group, int32_t *column) const
    {
        int32_t shared = shared_items(width), columns = (n + width - 1) / width;
        if (item < shared) {
            stream_dense_place(item, shared_tiles, shared_n, width, tile, group, column);
            *group = 1;
            return;
        }
        *tile = (item - shared) / columns;
        *column = (item - shared) % columns;
        *group = 0;
    }
};

/* act = silu(gate . x) * (up . x); the weights of shared experts are known before the routing is.
 */
struct gate_problem : expert_problem {
    static constexpr bool paired = true, has_late = true, items_ready = false;
    const void *const *gate, *const *up;
    const void *shared_gate, *shared_up;
    const float *x;
    int32_t top_k;

    struct tile {
        const void *w[2];
        const int32_t *order; /* NULL: rows as they come, from `first` on */
        float *act;
        int32_t first, n, k, rows;
    };

    __device__ __forceinline__ void early(int32_t width, struct stream_run *ret) const
    {
        stream_dense(shared_tiles, 1, shared_n, width, ret);
    }

    /* In the opposite order: who has had an early item has one less than others at most. */
    __device__ __forceinline__ void late(int32_t width, struct stream_run *ret) const
    {
        int32_t items = routed_items(width);
        uint32_t block = gridDim.x - 1 - blockIdx.x;
        int32_t first = stream_share(items, block, gridDim.x);
        ret->first = shared_items(width) + first;
        ret->count = stream_share(items, block + 1, gridDim.x) - first;
    }

    __device__ __forceinline__ bool open(tile &t, int32_t at, int32_t group,
                                         int32_t block_rows) const
    {
        t.k = k;
        if (group == 1) {
            t.w[0] = shared_gate;
            t.w[1] = shared_up;
            t.order = NULL;
            t.first = at * block_rows;
            t.act = plan.shared_act + (int64_t)t.first * shared_n;
            t.n = shared_n;
            t.rows = min(block_rows, rows - t.first);
            return true;
        }
        if (at >= *plan.tile_count) {
            return false;
        }
        struct expert_tile mine = plan.tiles[at];
        t.w[0] = gate[mine.expert];
        t.w[1] = up[mine.expert];
        t.order = plan.order + mine.first;
        t.first = 0;
        t.act = plan.act + (int64_t)mine.first * n;
        t.n = n;
        t.rows = mine.rows;
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return x + (int64_t)(t.order != NULL ? t.order[row] / top_k : t.first + row) * k;
    }

    __device__ __forceinline__ void store_pair(const tile &t, int32_t row, int32_t column,
                                               float gate_sum, float up_sum) const
    {
        t.act[(int64_t)row * t.n + column] = gated(gate_sum, up_sum);
    }
};

/* out = down . act. The launch that makes act has waited for the plan. */
struct down_problem : expert_problem {
    static constexpr bool paired = false, has_late = false, items_ready = true;
    const void *const *down;
    const void *shared_down;

    struct tile {
        const void *w[1];
        const float *act;
        float *out;
        int32_t n, k, rows;
    };

    /* The first item that begins at `cost` or later; an item costs its chunks. */
    __device__ __forceinline__ int32_t item_at(int64_t cost, int32_t shared, int32_t each,
                                               int32_t shared_each) const
    {
        int64_t all = (int64_t)shared * shared_each;
        return cost < all ? (int32_t)((cost + shared_each - 1) / shared_each)
                          : shared + (int32_t)((cost - all + each - 1) / each);
    }

    __device__ __forceinline__ void early(int32_t width, struct stream_run *ret) const
    {
        int32_t each = 2 * ((k + LINEAR_CHUNK - 1) / LINEAR_CHUNK), shared = shared_items(width);
        int32_t shared_each = (shared_k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
        shared_each *= rows > 8 ? 3 : 2; /* two groups of rows cost half as much again */
        int64_t cost = (int64_t)shared * shared_each + (int64_t)routed_items(width) * each;
        ret->first = item_at(cost * blockIdx.x / gridDim.x, shared, each, shared_each);
        ret->count =
            item_at(cost * (blockIdx.x + 1) / gridDim.x, shared, each, shared_each) - ret->first;
    }

    __device__ __forceinline__ bool open(tile &t, int32_t at, int32_t group,
                                         int32_t block_rows) const
    {
        t.n = n;
        if (group == 1) {
            int32_t first = at * block_rows;
            t.w[0] = shared_down;
            t.act = plan.shared_act + (int64_t)first * shared_k;
            t.out = plan.shared_out + (int64_t)first * n;
            t.k = shared_k;
            t.rows = min(block_rows, rows - first);
            return true;
        }
        if (at >= *plan.tile_count) {
            return false;
        }
        struct expert_tile mine = plan.tiles[at];
        t.w[0] = down[mine.expert];
        t.act = plan.act + (int64_t)mine.first * k;
        t.out = plan.out + (int64_t)mine.first * n;
        t.k = k;
        t.rows = mine.rows;
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return t.act + (int64_t)row * t.k;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        t.out[(int64_t)row * n + column] = value;
    }
};

static __global__ void __launch_bounds__(EXPERTS_JOIN)
    experts_join(const float *weights, struct expert_plan plan, int32_t hidden, int32_t top_k,
                 bool shared, float *y)
{
    int64_t row = blockIdx.x;
    int32_t i = (int32_t)(blockIdx.y * EXPERTS_JOIN + threadIdx.x);
    ptx_launch_dependents();
    ptx_wait_dependence();
    if (i >= hidden) {
        return;
    }
    float sum = 0.0f;
    for (int32_t j = 0; j < top_k; j++) {
        int32_t at = plan.place[row * top_k + j];
        float value = at < 0 ? CUDART_NAN_F : plan.out[(int64_t)at * hidden + i];
        sum = fmaf(weights[row * top_k + j], value, sum);
    }
    sum += y[row * hidden + i];
    y[row * hidden + i] = shared ? sum + plan.shared_out[row * hidden + i] : sum;
}

/* Tiles that the worst routing can make: one more for each expert with rows. */
static int64_t tiles_bound(const struct tv_experts *args, int32_t block_rows)
{
    int64_t pairs = (int64_t)args->rows * args->top_k;
    int64_t used = pairs < args->experts ? pairs : args->experts;
    return (pairs - used) / block_rows + used;
}

/* Carve the next `bytes`, kept at multiples of 256. */
static char *carve(char **next, int64_t bytes)
{
    char *mine = *next;
    *next = mine + (bytes + 255) / 256 * 256;
    return mine;
}

/* Bytes of `count` floats, or of as many elements in the three pieces that the Hopper kernel reads:
 * whatever the products, since those may change. */
static int64_t plan_row(bool sm90, int64_t count)
{
    int64_t floats = count * (int64_t)sizeof(float), cut = (count + 31) / 32 * 32 * 2 * 3;
    return sm90 ? cut : floats;
}

/* Bytes of the workspace, and its parts when there is one; shared_inter 0: no shared experts; sm90:
 * for experts_sm90.cu as well. */
static size_t plan_carve(const struct tv_experts *args, int32_t shared_inter, bool sm90,
                         char *workspace, struct expert_plan *plan)
{
    int64_t pairs = (int64_t)args->rows * args->top_k, f = (int64_t)sizeof(float);
    char *next = workspace;
    char *maps = carve(&next, sm90 ? 3 * (int64_t)args->experts * EXPERTS_MAP : 0);
    plan->maps = sm90 ? maps : NULL;
    plan->tile_count = (int32_t *)carve(&next, (int64_t)sizeof(int32_t));
    plan->tiles = (struct expert_tile *)carve(&next, tiles_bound(args, LINEAR_ANY) *
                                                         (int64_t)sizeof(struct expert_tile));
    plan->order = (int32_t *)carve(&next, pairs * (int64_t)sizeof(int32_t));
    plan->place = (int32_t *)carve(&next, pairs * (int64_t)sizeof(int32_t));
    plan->act = (float *)carve(&next, pairs * plan_row(sm90, args->inter));
    plan->out = (float *)carve(&next, pairs * plan_row(sm90, args->hidden));
    plan->shared_act = (float *)carve(&next, (int64_t)args->rows * shared_inter * f);
    plan->shared_out = (float *)carve(&next, shared_inter > 0 ? args->rows * args->hidden * f : 0);
    return (size_t)(next - workspace);
}

/* Rows of a tile, the same for both products; a shape does not change a result. A tile that holds
 * all rows of an expert reads its weights once; of twice their mean number few are second ones, and
 * for 12 rows in the mean these cost less than tiles of 32 rows do. */
static inline int32_t experts_block_rows(const struct tv_experts *args)
{
    int64_t pairs = (int64_t)args->rows * args->top_k;
    bool mma =
        linear_uses_mma(args->w_dtype, args->hidden) && linear_uses_mma(args->w_dtype, args->inter);
    int32_t each = (int32_t)((pairs + args->experts - 1) / args->experts);
    if (!mma || each > EXPERTS_FEW) {
        return linear_block_rows(mma, true, args->experts, each, args->inter);
    }
    return args->rows <= 8 ? 8 : each <= 12 ? 16 : 32;
}

/* Whether there may be rows enough for experts_sm90.cu, whatever the weights' type and the
 * products: the workspace is sized before those are known. */
static bool experts_many(const struct tv_kernels *k, const struct tv_experts *args)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    return TV_LINEAR_SM90 && !cuda->portable &&
           (int64_t)args->rows * args->top_k >=
               (int64_t)args->experts * EXPERTS_HOPPER(TV_PRODUCTS_BF16);
}

static bool experts_large(const struct tv_experts *args)
{
    return (int64_t)args->hidden * args->inter >= EXPERTS_LARGE;
}

/* Whether experts_sm90.cu serves these best. */
static inline bool experts_hopper(const struct tv_kernels *k, const struct tv_experts *args)
{
    int64_t pairs = (int64_t)args->rows * args->top_k, experts = args->experts;
    return experts_many(k, args) && linear_uses_mma(args->w_dtype, args->hidden) &&
           linear_uses_mma(args->w_dtype, args->inter) && (uintptr_t)args->x % 8 == 0 &&
           (pairs > experts * EXPERTS_FEW ||
            (experts_large(args) && pairs >= experts * EXPERTS_HOPPER(args->products)));
}

static int experts_check(const struct tv_experts *args)
{
    return args->rows < 0 || args->hidden < 1 || args->inter < 1 || args->experts < 1 ||
                   args->experts > EXPERTS_MAX || args->top_k < 1 || args->top_k > args->experts ||
                   (int64_t)args->rows * args->top_k > INT32_MAX ||
                   !tv_args_dtype_known(args->w_dtype) || !tv_args_products_known(args->products)
               ? -EINVAL
               : 0;
}

static inline void experts_problems(const struct tv_experts *args, const struct expert_plan &plan,
                                    int32_t block_rows, struct gate_problem *gate,
                                    struct down_problem *down)
{
    *gate = {};
    gate->gate = args->gate;
    gate->up = args->up;
    gate->x = args->x;
    gate->plan = plan;
    gate->rows = args->rows;
    gate->n = args->inter;
    gate->k = args->hidden;
    gate->top_k = args->top_k;
    gate->tiles_bound = (int32_t)tiles_bound(args, block_rows);
    gate->vector = (uintptr_t)args->x % 16 == 0 && args->hidden % 4 == 0;
    *down = {};
    down->down = args->down;
    down->plan = plan;
    down->rows = args->rows;
    down->n = down->shared_n = args->hidden;
    down->k = args->inter;
    down->tiles_bound = gate->tiles_bound;
    down->vector = args->inter % 4 == 0;
}

static inline int experts_sort_launch(const struct tv_kernels *k, const struct tv_experts *args,
                                      const struct expert_plan &plan, int32_t block_rows)
{
    size_t counters = 2 * sizeof(int32_t) * (size_t)args->experts;
    return launch(experts_sort, dim3(1), EXPERTS_SORT, counters, tv_cuda_stream(k), args->ids,
                  args->rows * args->top_k, args->experts, block_rows, plan);
}

static inline int experts_join_launch(const struct tv_kernels *k, const struct tv_experts *args,
                                      const struct expert_plan &plan, bool shared)
{
    dim3 grid((uint32_t)args->rows, linear_blocks(args->hidden, EXPERTS_JOIN));
    return launch(experts_join, grid, EXPERTS_JOIN, 0, tv_cuda_stream(k), args->weights, plan,
                  args->hidden, args->top_k, shared, args->y);
}

#endif
