/*
 * latent.cuh - one KV row: normed latent, rotated key, one rounding to the pool.
 *
 * LATENT_THREADS of a block, or all that it has, make a row; the first warp also turns the key. A
 * slot outside the pool is not written. Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_LATENT_CUH
#define TV_KERNELS_CUDA_LATENT_CUH

#include "device.cuh"

#define LATENT_THREADS 128 /* the norm's order of summation depends on it */

TV_DEVICE void latent_row(const struct tv_latent_write &a, int64_t row)
{
    int64_t slot = a.slots[row];
    int32_t dim = a.latent_dim, first = (int32_t)threadIdx.x;
    const float *ckv = a.ckv + row * a.row_stride;
    if (slot < 0 || slot >= a.slot_count) {
        return;
    }
    int64_t base = slot * (dim + a.table.rope_dim);
    float sum = 0.0f;
    first = first < LATENT_THREADS ? first : dim; /* the others add nothing */
    for (int32_t i = first; i < dim; i += LATENT_THREADS) {
        sum = fmaf(ckv[i], ckv[i], sum);
    }
    sum = block_sum(sum);
    float factor = 1.0f / sqrtf(sum / (float)dim + a.eps);
    for (int32_t i = first; i < dim; i += LATENT_THREADS) {
        store_rounded(a.kv_pages, a.kv_dtype, base + i, ckv[i] * factor * a.norm_weight[i]);
    }
    if (threadIdx.x < 32) {
        void *pages = a.kv_pages;
        enum tv_dtype dtype = a.kv_dtype;
        rotate(ckv + dim, a.table, a.positions[row],
               [=](int32_t i, float value) { store_rounded(pages, dtype, base + dim + i, value); });
    }
}

static int latent_check(const struct tv_latent_write *args)
{
    const struct tv_rope_table *table = &args->table;
    return args->rows < 0 || args->latent_dim < 1 || !tv_args_dtype_kv(args->kv_dtype) ||
                   table->cos_sin == NULL || table->rope_dim < 2 || table->rope_dim % 2 != 0 ||
                   table->rope_dim > ROPE_DIM_MAX
               ? -EINVAL
               : 0;
}

#endif
