/*
 * latent_write.cu - table entry of the latent write, one block a row; latent.cuh writes.
 */
#include "latent.cuh"
#include "launch.cuh"
#include "ops.h"

static __global__ void __launch_bounds__(LATENT_THREADS)
    latent_write(const __grid_constant__ struct tv_latent_write a)
{
    ptx_launch_dependents();
    ptx_wait_dependence();
    latent_row(a, blockIdx.x);
}

int tv_cuda_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    int rc = latent_check(args);
    if (rc < 0 || args->rows == 0) {
        return rc;
    }
    TV_CUDA_ENTER(k);
    return launch(latent_write, dim3((uint32_t)args->rows), LATENT_THREADS, 0, tv_cuda_stream(k),
                  *args);
}
