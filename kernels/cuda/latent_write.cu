/*
 * latent_write.cu - one KV row per token: normed latent, rotated key, one rounding to the pool.
 *
 * A block makes one row; its first warp also turns the key. A slot outside the pool is not written.
 */
#include "device.cuh"
#include "ops.h"

#define THREADS 128

static __global__ void __launch_bounds__(THREADS)
    latent_write(const __grid_constant__ struct tv_latent_write a)
{
    int64_t row = blockIdx.x, slot = a.slots[row];
    int32_t dim = a.latent_dim;
    const float *ckv = a.ckv + row * a.row_stride;
    if (slot < 0 || slot >= a.slot_count) {
        return;
    }
    int64_t base = slot * (dim + a.table.rope_dim);
    float sum = 0.0f;
    for (int32_t i = (int32_t)threadIdx.x; i < dim; i += THREADS) {
        sum = fmaf(ckv[i], ckv[i], sum);
    }
    sum = block_sum(sum);
    float factor = 1.0f / sqrtf(sum / (float)dim + a.eps);
    for (int32_t i = (int32_t)threadIdx.x; i < dim; i += THREADS) {
        store_rounded(a.kv_pages, a.kv_dtype, base + i, ckv[i] * factor * a.norm_weight[i]);
    }
    if (threadIdx.x < 32) {
        void *pages = a.kv_pages;
        enum tv_dtype dtype = a.kv_dtype;
        rotate(ckv + dim, a.table, a.positions[row],
               [=](int32_t i, float value) { store_rounded(pages, dtype, base + dim + i, value); });
    }
}

int tv_cuda_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    const struct tv_rope_table *table = &args->table;
    if (args->rows < 0 || args->latent_dim < 1 || args->kv_dtype == TV_F16 ||
        table->cos_sin == NULL || table->rope_dim < 2 || table->rope_dim % 2 != 0 ||
        table->rope_dim > ROPE_DIM_MAX) {
        return -EINVAL;
    }
    if (args->rows == 0) {
        return 0;
    }
    latent_write<<<(uint32_t)args->rows, THREADS, 0, tv_cuda_stream(k)>>>(*args);
    return tv_cuda_errno(cudaGetLastError());
}
