/*
 * experts.cu - routed experts without a round trip to the host.
 *
 * Four launches: sort the (row, choice) pairs by expert and cut each expert's into tiles; gate, up
 * and their activation of every tile; down of every tile; then each row adds its choices in
 * ascending order and joins y once. The launches are sized for the worst routing; blocks without a
 * tile end at once. An id outside the experts gives its row NaN.
 */
#include "linear_launch.cuh"
#include "ops.h"

#define SORT_THREADS 1024
#define JOIN_THREADS 256
#define EXPERTS_MAX  4096 /* two counters of each in shared memory */

struct expert_tile {
    int32_t expert, first, rows; /* sorted positions first .. first + rows - 1 */
};

/* The workspace. */
struct expert_plan {
    int32_t *tile_count;
    struct expert_tile *tiles;
    int32_t *order; /* [pairs]: pair at a sorted position */
    int32_t *place; /* [pairs]: sorted position of a pair, -1 for a bad id */
    float *act;     /* [pairs, inter], sorted */
    float *out;     /* [pairs, hidden], sorted */
};

static __global__ void __launch_bounds__(SORT_THREADS)
    experts_sort(const int32_t *ids, int32_t pairs, int32_t experts, int32_t block_rows,
                 struct expert_plan plan)
{
    extern __shared__ int32_t shared[];
    int32_t *counts = shared, *cursors = shared + experts;
    int32_t thread = (int32_t)threadIdx.x;
    for (int32_t e = thread; e < experts; e += SORT_THREADS) {
        counts[e] = 0;
    }
    __syncthreads();
    for (int32_t i = thread; i < pairs; i += SORT_THREADS) {
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
    for (int32_t i = thread; i < pairs; i += SORT_THREADS) {
        /* Which of an expert's rows comes first changes no result: rows do not meet. */
        bool known = ids[i] >= 0 && ids[i] < experts;
        int32_t at = known ? atomicAdd(&cursors[ids[i]], 1) : -1;
        plan.place[i] = at;
        if (known) {
            plan.order[at] = i;
        }
    }
}

/* act = silu(gate . x) * (up . x) */
struct gate_problem {
    typedef float X;
    static constexpr bool paired = true;
    const void *const *gate, *const *up;
    const float *x;
    struct expert_plan plan;
    int32_t n, k, top_k;
    bool vector;

    struct tile {
        const void *w[2];
        const int32_t *order;
        float *act;
        int32_t rows;
    };

    __device__ __forceinline__ bool open(tile &t, int32_t) const
    {
        if ((int32_t)blockIdx.x >= *plan.tile_count) {
            return false;
        }
        struct expert_tile mine = plan.tiles[blockIdx.x];
        t.w[0] = gate[mine.expert];
        t.w[1] = up[mine.expert];
        t.order = plan.order + mine.first;
        t.act = plan.act + (int64_t)mine.first * n;
        t.rows = mine.rows;
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return x + (int64_t)(t.order[row] / top_k) * k;
    }

    __device__ __forceinline__ void store_pair(const tile &t, int32_t row, int32_t column,
                                               float gate_sum, float up_sum) const
    {
        t.act[(int64_t)row * n + column] = gated(gate_sum, up_sum);
    }
};

/* out = down . act */
struct down_problem {
    typedef float X;
    static constexpr bool paired = false;
    const void *const *down;
    struct expert_plan plan;
    int32_t n, k;
    bool vector;

    struct tile {
        const void *w[1];
        const float *act;
        float *out;
        int32_t rows;
    };

    __device__ __forceinline__ bool open(tile &t, int32_t) const
    {
        if ((int32_t)blockIdx.x >= *plan.tile_count) {
            return false;
        }
        struct expert_tile mine = plan.tiles[blockIdx.x];
        t.w[0] = down[mine.expert];
        t.act = plan.act + (int64_t)mine.first * k;
        t.out = plan.out + (int64_t)mine.first * n;
        t.rows = mine.rows;
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return t.act + (int64_t)row * k;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        t.out[(int64_t)row * n + column] = value;
    }
};

static __global__ void __launch_bounds__(JOIN_THREADS)
    experts_join(const float *weights, struct expert_plan plan, int32_t hidden, int32_t top_k,
                 float *y)
{
    int64_t row = blockIdx.x;
    int32_t i = (int32_t)(blockIdx.y * JOIN_THREADS + threadIdx.x);
    if (i >= hidden) {
        return;
    }
    float sum = 0.0f;
    for (int32_t j = 0; j < top_k; j++) {
        int32_t at = plan.place[row * top_k + j];
        float value = at < 0 ? CUDART_NAN_F : plan.out[(int64_t)at * hidden + i];
        sum = fmaf(weights[row * top_k + j], value, sum);
    }
    y[row * hidden + i] += sum;
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

/* Bytes of the workspace, and its parts when there is one. */
static size_t plan_carve(const struct tv_experts *args, char *workspace, struct expert_plan *plan)
{
    int64_t pairs = (int64_t)args->rows * args->top_k, f = (int64_t)sizeof(float);
    char *next = workspace;
    plan->tile_count = (int32_t *)carve(&next, (int64_t)sizeof(int32_t));
    plan->tiles = (struct expert_tile *)carve(&next, tiles_bound(args, LINEAR_ANY) *
                                                         (int64_t)sizeof(struct expert_tile));
    plan->order = (int32_t *)carve(&next, pairs * (int64_t)sizeof(int32_t));
    plan->place = (int32_t *)carve(&next, pairs * (int64_t)sizeof(int32_t));
    plan->act = (float *)carve(&next, pairs * args->inter * f);
    plan->out = (float *)carve(&next, pairs * args->hidden * f);
    return (size_t)(next - workspace);
}

size_t tv_cuda_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args)
{
    struct expert_plan plan;
    (void)k;
    /* one more for a workspace that does not start at a multiple of 256 */
    return plan_carve(args, NULL, &plan) + 256;
}

int tv_cuda_experts_prepare(void)
{
    int rc = linear_prepare<struct gate_problem>();
    return rc < 0 ? rc : linear_prepare<struct down_problem>();
}

int tv_cuda_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    int64_t pairs = (int64_t)args->rows * args->top_k;
    if (args->rows < 0 || args->hidden < 1 || args->inter < 1 || args->experts < 1 ||
        args->experts > EXPERTS_MAX || args->top_k < 1 || args->top_k > args->experts ||
        pairs > INT32_MAX) {
        return -EINVAL;
    }
    if (args->workspace_bytes < tv_cuda_experts_workspace(k, args)) {
        return -ENOSPC;
    }
    if (pairs == 0) {
        return 0;
    }
    cudaStream_t stream = tv_cuda_stream(k);
    struct expert_plan plan;
    (void)plan_carve(args, (char *)(((uintptr_t)args->workspace + 255) / 256 * 256), &plan);
    int32_t each = (int32_t)((pairs + args->experts - 1) / args->experts);
    /* One tile shape for both products; a shape does not change a result. */
    bool gate_mma = linear_uses_mma(args->w_dtype, args->hidden);
    bool down_mma = linear_uses_mma(args->w_dtype, args->inter);
    int32_t block_rows =
        linear_block_rows(gate_mma && down_mma, true, args->experts, each, args->inter);
    uint32_t tiles = (uint32_t)tiles_bound(args, block_rows);
    size_t shared = 2 * sizeof(int32_t) * (size_t)args->experts;
    experts_sort<<<1, SORT_THREADS, shared, stream>>>(args->ids, (int32_t)pairs, args->experts,
                                                      block_rows, plan);
    TV_CUDA_CHECK(cudaGetLastError());
    struct gate_problem gate = {args->gate,  args->up,
                                args->x,     plan,
                                args->inter, args->hidden,
                                args->top_k, (uintptr_t)args->x % 16 == 0 && args->hidden % 4 == 0};
    int rc = linear_launch(gate, args->w_dtype, block_rows, tiles, 1, stream);
    if (rc < 0) {
        return rc;
    }
    struct down_problem down = {args->down, plan, args->hidden, args->inter, args->inter % 4 == 0};
    rc = linear_launch(down, args->w_dtype, block_rows, tiles, 1, stream);
    if (rc < 0) {
        return rc;
    }
    dim3 grid((uint32_t)args->rows, linear_blocks(args->hidden, JOIN_THREADS));
    experts_join<<<grid, JOIN_THREADS, 0, stream>>>(args->weights, plan, args->hidden, args->top_k,
                                                    args->y);
    return tv_cuda_errno(cudaGetLastError());
}
