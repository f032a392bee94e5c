/*
 * moe.cu - the feed-forward part of a layer with routed and shared experts, for few rows.
 *
 * Five launches, six for many rows: the router's product; choice and sort; gate, up and activation
 * of shared and routed experts; down of both; the sum. The same operations in the same order as the
 * slots that it stands for, so the same bits. Refuses (-ENOTSUP) what those serve better: many
 * rows (of an expert, on Hopper), weights that the matrix product does not take.
 */
#include "experts.cuh"
#include "ops.h"
#include "router.cuh"

#define ROWS_MAX     128   /* beyond these tiles are wide */
#define ROUTE_WARPS  4     /* the fewest that sort */
#define ROUTE_MOST   24    /* what registers allow */
#define SHARED_BYTES 40960 /* of the choice: as many warps as this serves */
#define IDS_BYTES    8192  /* of the ids, beside them */

static size_t route_bytes(const struct tv_router *a)
{
    size_t bytes = 2 * sizeof(double) * (size_t)a->experts;
    return bytes + ((sizeof(double) + 1) * (size_t)a->n_group + 15) / 16 * 16;
}

/* A warp chooses for each row; then the block sorts. */
static __global__ void __launch_bounds__(32 * ROUTE_MOST, 1)
    moe_route(const __grid_constant__ struct tv_router a, int32_t block_rows,
              const __grid_constant__ struct expert_plan plan)
{
    extern __shared__ double shared[];
    int32_t *ids = (int32_t *)((char *)shared + SHARED_BYTES);
    int32_t warp = (int32_t)threadIdx.x >> 5;
    int32_t bytes = (int32_t)(2 * sizeof(double)) * a.experts;
    bytes += ((int32_t)(sizeof(double) + 1) * a.n_group + 15) / 16 * 16;
    /* Shared experts may begin beside this: the router's product has waited for their rows. */
    ptx_launch_dependents();
    ptx_wait_dependence();
    if (warp < a.rows) {
        struct router_shared s;
        s.score = (double *)((char *)shared + warp * bytes);
        s.choice = s.score + a.experts;
        s.groups = s.choice + a.experts;
        s.kept = (uint8_t *)(s.groups + a.n_group);
        router_row(a, warp, s, ids);
    }
    __syncthreads();
    experts_sort_pairs(ids, a.rows * a.top_k, a.experts, block_rows, plan, (int32_t *)shared);
}

size_t tv_cuda_moe_workspace(const struct tv_kernels *k, const struct tv_moe *args)
{
    struct expert_plan plan;
    struct tv_experts experts = args->experts;
    (void)k;
    experts.rows = experts.rows < ROWS_MAX ? experts.rows : ROWS_MAX;
    return plan_carve(&experts, args->shared_inter, false, NULL, &plan) + 256;
}

static int moe_check(const struct tv_kernels *k, const struct tv_moe *args)
{
    const struct tv_experts *experts = &args->experts;
    if (experts_check(experts) < 0 || router_check(&args->router) < 0 || args->shared_inter < 0 ||
        args->router.rows != experts->rows || args->router.experts != experts->experts ||
        args->router.top_k != experts->top_k || args->router.ids != experts->ids ||
        args->router.weights != experts->weights || tv_cuda_linear_check(&args->logits) < 0) {
        return -EINVAL;
    }
    bool mma = linear_uses_mma(experts->w_dtype, experts->hidden) &&
               linear_uses_mma(experts->w_dtype, experts->inter) &&
               (args->shared_inter == 0 || linear_uses_mma(experts->w_dtype, args->shared_inter));
    bool apart = experts_hopper(k, experts) && experts_large(experts);
    return mma && !apart && experts->rows <= ROWS_MAX &&
                   route_bytes(&args->router) <= SHARED_BYTES &&
                   2 * sizeof(int32_t) * (size_t)experts->experts <= SHARED_BYTES &&
                   (int64_t)experts->rows * experts->top_k * (int64_t)sizeof(int32_t) <= IDS_BYTES
               ? 0
               : -ENOTSUP;
}

/* More rows than a block has warps for choose in blocks of their own, in a launch more. */
static int route(struct tv_kernels *k, const struct tv_moe *args, int32_t block_rows,
                 const struct expert_plan &plan)
{
    const struct tv_router *router = &args->router;
    size_t most = SHARED_BYTES / route_bytes(router), rows = (size_t)router->rows;
    if (rows > ROUTE_MOST || rows > most) {
        int rc = tv_cuda_router(k, router);
        return rc < 0 ? rc : experts_sort_launch(k, &args->experts, plan, block_rows);
    }
    uint32_t threads = 32 * (uint32_t)(rows > ROUTE_WARPS ? rows : ROUTE_WARPS);
    size_t bytes = SHARED_BYTES + rows * (size_t)router->top_k * sizeof(int32_t);
    return launch(moe_route, dim3(1), threads, bytes, tv_cuda_stream(k), *router, block_rows, plan);
}

int tv_cuda_moe_prepare(void)
{
    int rc = linear_prepare_rows<struct gate_problem>();
    return rc < 0 ? rc : linear_prepare_rows<struct down_problem>();
}

int tv_cuda_moe(struct tv_kernels *k, const struct tv_moe *args)
{
    const struct tv_experts *experts = &args->experts;
    int rc = moe_check(k, args);
    if (rc < 0) {
        return rc;
    }
    if (experts->workspace_bytes < tv_cuda_moe_workspace(k, args)) {
        return -ENOSPC;
    }
    if (experts->rows == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    struct expert_plan plan;
    struct gate_problem gate;
    struct down_problem down;
    (void)plan_carve(experts, args->shared_inter, false,
                     (char *)(((uintptr_t)experts->workspace + 255) / 256 * 256), &plan);
    int32_t block_rows = experts_block_rows(experts);
    block_rows = block_rows < 32 ? block_rows : 32;
    experts_problems(experts, plan, block_rows, &gate, &down);
    if (args->shared_inter > 0) {
        gate.shared_gate = args->shared_gate;
        gate.shared_up = args->shared_up;
        gate.shared_n = args->shared_inter;
        gate.shared_tiles = (int32_t)linear_blocks(experts->rows, block_rows);
        down.shared_down = args->shared_down;
        down.shared_k = args->shared_inter;
        down.shared_tiles = gate.shared_tiles;
        down.vector = down.vector && args->shared_inter % 4 == 0;
    }
    rc = tv_cuda_linear(k, &args->logits);
    if (rc == 0) {
        rc = route(k, args, block_rows, plan);
    }
    if (rc == 0) {
        rc = linear_stream_rows(k, gate, experts->products, block_rows, gate.k);
    }
    if (rc == 0) {
        rc = linear_stream_rows(k, down, experts->products, block_rows,
                                down.k > down.shared_k ? down.k : down.shared_k);
    }
    return rc < 0 ? rc : experts_join_launch(k, experts, plan, args->shared_inter > 0);
}
