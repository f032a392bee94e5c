/*
 * experts_sm90.cu - the products over routed experts on Hopper, where an expert has many rows. For
 * sm_90a alone; linear_sm90.cuh computes.
 *
 * A launch gathers each expert's rows in pieces of bf16 (where `down` writes its results later);
 * gate and up write theirs as down reads them. Maps of the matrices are made on the device, where
 * their addresses are.
 */
#define TV_CUDA_SM90 1 /* that this file is built */

#include "experts_plan.cuh"
#include "linear_sm90.h"
#include "linear_sm90_launch.cuh"

static_assert(sizeof(CUtensorMap) == EXPERTS_MAP, "room for a map");

/* Row of the product -> row of x; NULL behind the last. */
struct expert_rows {
    const float *x;
    struct expert_plan plan;
    int32_t top_k, k;

    __device__ __forceinline__ const float *row(int32_t at) const
    {
        int32_t tiles = *plan.tile_count;
        struct expert_tile last = plan.tiles[max(tiles, 1) - 1];
        return tiles > 0 && at < last.first + last.rows ? x + (int64_t)(plan.order[at] / top_k) * k
                                                        : NULL;
    }
};

/* What both products have in common: tiles of sorted rows by columns of their expert. */
template <int PIECES> struct expert_sm90 {
    static constexpr int pieces = PIECES;
    static constexpr bool made = true;
    static constexpr int32_t groups = 1; /* pieces are all that lies apart */
    CUtensorMap x_map;
    struct expert_plan plan;
    int32_t n, k, experts, box_rows, column_tiles;

    /* Row tile and column tile of an item; false: there is none. */
    __device__ __forceinline__ bool find_tile(int32_t item, int32_t first_map, sm90_tile *t,
                                              int32_t *ret_column) const
    {
        int32_t at = item / column_tiles;
        if (at >= *plan.tile_count) {
            return false;
        }
        struct expert_tile mine = plan.tiles[at];
        *ret_column = item - at * column_tiles;
        t->w_map = (const CUtensorMap *)plan.maps + first_map + mine.expert;
        t->w_group = t->x_group = 0;
        t->x_row = mine.first;
        t->rows = mine.rows;
        t->k = k;
        return true;
    }
};

template <int PIECES> struct gate_sm90 : expert_sm90<PIECES> {
    static constexpr bool paired = true;
    int32_t second_map; /* from gate's to up's */
    int32_t act_k;      /* of a row of act, which down multiplies */
    int64_t apart;      /* between its pieces */

    struct tile : sm90_tile {
        __nv_bfloat16 *act;
        int32_t columns;
    };

    __device__ __forceinline__ bool find(int32_t item, tile *t) const
    {
        int32_t column;
        if (!this->find_tile(item, 0, t, &column)) {
            return false;
        }
        t->w_row = column * (SM90_WEIGHTS / 2);
        t->act = (__nv_bfloat16 *)this->plan.act + (int64_t)t->x_row * act_k + t->w_row;
        t->columns = act_k - t->w_row;
        return true;
    }

    /* Two rows of a column; lanes of neighbouring columns trade, so that each has two columns of a
     * row. */
    __device__ __forceinline__ void store_pair(const tile &t, int32_t row, int32_t end,
                                               int32_t column, const float (&sums)[4]) const
    {
        float upper = gated(sums[0], sums[2]), lower = gated(sums[1], sums[3]);
        bool odd = column % 2 == 1;
        float other = __shfl_xor_sync(0xffffffffu, odd ? upper : lower, 8);
        uint32_t word[PIECES];
        column -= odd;
        row += odd;
        sm90_cut<PIECES>(odd ? other : upper, odd ? lower : other, word);
        if (row < end && column < t.columns) {
            __nv_bfloat16 *to = t.act + (int64_t)row * act_k + column / 32 * 32;
            to += sm90_position(column % 32);
#pragma unroll
            for (int i = 0; i < PIECES; i++) {
                *(uint32_t *)(to + i * apart) = word[i];
            }
        }
    }
};

template <int PIECES> struct down_sm90 : expert_sm90<PIECES> {
    static constexpr bool paired = false;
    static constexpr int32_t second_map = 0;

    struct tile : sm90_tile {
        float *out;
        int32_t columns;
    };

    __device__ __forceinline__ bool find(int32_t item, tile *t) const
    {
        int32_t column;
        if (!this->find_tile(item, 2 * this->experts, t, &column)) {
            return false;
        }
        t->w_row = column * SM90_WEIGHTS;
        t->out = this->plan.out + (int64_t)t->x_row * this->n + t->w_row;
        t->columns = this->n - t->w_row;
        return true;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float2 sums) const
    {
        if (column < t.columns) {
            *(float2 *)(t.out + (int64_t)row * this->n + column) = sums;
        }
    }
};

struct expert_matrices {
    CUtensorMap wide, deep; /* of gate and up, of down, but for where they begin */
    const void *const *matrices[3];
};

/* Maps of experts' matrices, one warp each. */
static __global__ void __launch_bounds__(32)
    experts_maps(const __grid_constant__ struct expert_matrices like, CUtensorMap *maps)
{
    __shared__ __align__(128) CUtensorMap map;
    const CUtensorMap &from = blockIdx.y == 2 ? like.deep : like.wide;
    ptx_wait_dependence();
    ptx_launch_dependents();
    ((uint32_t *)&map)[threadIdx.x] = ((const uint32_t *)&from)[threadIdx.x];
    __syncwarp();
    if (threadIdx.x == 0) {
        asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(
                         ptx_shared(&map)),
                     "l"(like.matrices[blockIdx.y][blockIdx.x])
                     : "memory");
    }
    __syncwarp();
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync"
                 ".aligned [%0], [%1], 128;" ::"l"(maps + blockIdx.y * gridDim.x + blockIdx.x),
                 "r"(ptx_shared(&map))
                 : "memory");
}

static int maps_launch(const struct tv_kernels *k, const struct tv_experts *args,
                       const struct expert_plan *plan)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    struct expert_matrices like = {};
    int64_t size = (int64_t)args->hidden * args->inter;
    like.matrices[0] = args->gate;
    like.matrices[1] = args->up;
    like.matrices[2] = args->down;
    int rc = sm90_encode(cuda, plan->maps, args->hidden, args->inter, 1, args->hidden, size,
                         SM90_WEIGHTS / 2, &like.wide);
    rc = rc < 0 ? rc
                : sm90_encode(cuda, plan->maps, args->inter, args->hidden, 1, args->inter, size,
                              SM90_WEIGHTS / 2, &like.deep);
    return rc < 0 ? rc
                  : launch(experts_maps, dim3((uint32_t)args->experts, 3), 32, 0, tv_cuda_stream(k),
                           like, (CUtensorMap *)plan->maps);
}

template <int PIECES>
static int experts(const struct tv_kernels *k, const struct tv_experts *args,
                   const struct expert_plan *plan)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int32_t pairs = args->rows * args->top_k;
    int32_t x_k = (args->hidden + 31) / 32 * 32, act_k = (args->inter + 31) / 32 * 32;
    int32_t box_rows = tv_experts_sm90_rows(args) / sm90_ring<PIECES>::sums;
    struct expert_rows rows = {args->x, *plan, args->top_k, args->hidden};
    struct gate_sm90<PIECES> gate = {
    };
    struct down_sm90<PIECES> down = {
    };
    gate.plan = down.plan = *plan;
    gate.n = down.k = args->inter;
    gate.k = down.n = args->hidden;
    gate.experts = gate.second_map = down.experts = args->experts;
    gate.box_rows = down.box_rows = box_rows;
    gate.column_tiles = (args->inter + SM90_WEIGHTS / 2 - 1) / (SM90_WEIGHTS / 2);
    down.column_tiles = (args->hidden + SM90_WEIGHTS - 1) / SM90_WEIGHTS;
    gate.act_k = act_k;
    gate.apart = (int64_t)pairs * act_k;
    int rc = maps_launch(k, args, plan);
    rc = rc < 0 ? rc
                : sm90_encode(cuda, plan->out, x_k, pairs, PIECES, x_k, (int64_t)pairs * x_k,
                              box_rows, &gate.x_map);
    rc = rc < 0 ? rc
                : sm90_encode(cuda, plan->act, act_k, pairs, PIECES, act_k, gate.apart, box_rows,
                              &down.x_map);
    rc = rc < 0 ? rc
                : sm90_rows_launch<struct expert_rows, PIECES>(k, rows, pairs, args->hidden,
                                                               (int64_t)pairs * x_k, plan->out);
    rc = rc < 0 ? rc : sm90_launch(k, gate, cuda->sm_count);
    return rc < 0 ? rc : sm90_launch(k, down, cuda->sm_count);
}

int tv_experts_sm90_prepare(void)
{
    int rc = sm90_prepare<struct gate_sm90<1>>();
    rc = rc < 0 ? rc : sm90_prepare<struct gate_sm90<3>>();
    rc = rc < 0 ? rc : sm90_prepare<struct down_sm90<1>>();
    return rc < 0 ? rc : sm90_prepare<struct down_sm90<3>>();
}

/* Room for a quarter more than the mean. */
int32_t tv_experts_sm90_rows(const struct tv_experts *args)
{
    int64_t each = (int64_t)args->rows * args->top_k / args->experts * 5 / 4;
    int32_t rows =
        args->products == TV_PRODUCTS_BF16 ? sm90_ring<1>::tile_rows : sm90_ring<3>::tile_rows;
    while (rows > 64 && each <= rows / 2) {
        rows /= 2;
    }
    return rows;
}

int tv_experts_sm90(const struct tv_kernels *k, const struct tv_experts *args,
                    const struct expert_plan *plan)
{
    if (plan->maps == NULL) {
        return -ENOTSUP;
    }
    return args->products == TV_PRODUCTS_BF16 ? experts<1>(k, args, plan)
                                              : experts<3>(k, args, plan);
}
