/*
 * experts.cu - routed experts without a round trip to the host.
 *
 * Four launches: sort the (row, choice) pairs by expert and cut each expert's into tiles; gate, up
 * and their activation of every tile; down of every tile; then each row adds its choices in
 * ascending order and joins y once. The launches are sized for the worst routing; blocks without a
 * tile end at once.
 */
#include "experts.cuh"
#include "ops.h"

size_t tv_cuda_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args)
{
    struct expert_plan plan;
    /* one more for a workspace that does not start at a multiple of 256 */
    return plan_carve(args, 0, experts_many(k, args), NULL, &plan) + 256;
}

int tv_cuda_experts_prepare(const struct tv_cuda *cuda)
{
    int rc = linear_prepare<struct gate_problem>();
    rc = rc < 0 ? rc : linear_prepare<struct down_problem>();
    return rc < 0 || cuda->portable ? rc : tv_experts_sm90_prepare();
}

int tv_cuda_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    int rc = experts_check(args);
    if (rc < 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_cuda_experts_workspace(k, args)) {
        return -ENOSPC;
    }
    if (args->rows == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    struct expert_plan plan;
    struct gate_problem gate;
    struct down_problem down;
    bool sm90 = experts_many(k, args);
    (void)plan_carve(args, 0, sm90, (char *)(((uintptr_t)args->workspace + 255) / 256 * 256),
                     &plan);
    sm90 = experts_hopper(k, args);
    int32_t block_rows = sm90 ? tv_experts_sm90_rows(args) : experts_block_rows(args);
    experts_problems(args, plan, block_rows, &gate, &down);
    rc = experts_sort_launch(k, args, plan, block_rows);
    if (sm90) {
        rc = rc < 0 ? rc : tv_experts_sm90(k, args, &plan);
        if (rc != -ENOTSUP) {
            return rc < 0 ? rc : experts_join_launch(k, args, plan, false);
        }
        /* the driver makes no map for it: the other kernels want tiles of their own */
        block_rows = experts_block_rows(args);
        experts_problems(args, plan, block_rows, &gate, &down);
        rc = experts_sort_launch(k, args, plan, block_rows);
    }
    if (rc == 0) {
        rc = linear_launch(k, gate, args->products, args->w_dtype, block_rows,
                           (uint32_t)gate.tiles_bound, 1, gate.n, gate.k);
    }
    if (rc == 0) {
        rc = linear_launch(k, down, args->products, args->w_dtype, block_rows,
                           (uint32_t)gate.tiles_bound, 1, down.n, down.k);
    }
    return rc < 0 ? rc : experts_join_launch(k, args, plan, false);
}
