/*
 * router.cu - table entry of the expert choice, one warp a row; router.cuh chooses.
 */
#include "launch.cuh"
#include "ops.h"
#include "router.cuh"

static __global__ void __launch_bounds__(32) router(const __grid_constant__ struct tv_router a)
{
    extern __shared__ double shared[];
    __shared__ double groups[ROUTER_GROUPS_MAX];
    __shared__ uint8_t kept[ROUTER_GROUPS_MAX];
    struct router_shared s = {shared, shared + a.experts, groups, kept};
    ptx_launch_dependents();
    ptx_wait_dependence();
    router_row(a, blockIdx.x, s, NULL);
}

int tv_cuda_router(struct tv_kernels *k, const struct tv_router *args)
{
    int rc = router_check(args);
    if (rc < 0 || args->rows == 0) {
        return rc;
    }
    TV_CUDA_ENTER(k);
    size_t shared = 2 * sizeof(double) * (size_t)args->experts;
    return launch(router, dim3((uint32_t)args->rows), 32, shared, tv_cuda_stream(k), *args);
}
