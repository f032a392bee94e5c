/*
 * latent_write.c - one KV row per token: normed latent, rotated key, one rounding to the pool.
 */
#include "ref.h"

#include <math.h>

#include "../args.h"
#include "../convert.h"

int tv_ref_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    (void)k;
    int rc = tv_args_latent_write(args);
    if (rc != 0) {
        return rc;
    }
    int32_t latent = args->latent_dim;
    int32_t rope = args->table.rope_dim;
    for (int32_t r = 0; r < args->rows; r++) {
        const float *row = args->ckv + r * args->row_stride;
        int64_t base = args->slots[r] * (latent + rope);
        double sum = 0.0;
        for (int32_t i = 0; i < latent; i++) {
            sum += (double)row[i] * (double)row[i];
        }
        double factor = 1.0 / sqrt(sum / latent + (double)args->eps);
        for (int32_t i = 0; i < latent; i++) {
            float value = (float)((double)row[i] * factor * (double)args->norm_weight[i]);
            tv_store_f32(args->kv_pages, args->kv_dtype, base + i, value);
        }
        float key[TV_ARGS_ROPE_MAX];
        memcpy(key, row + latent, (size_t)rope * sizeof *key);
        tv_ref_rope_vector(key, &args->table, args->positions[r]);
        for (int32_t i = 0; i < rope; i++) {
            tv_store_f32(args->kv_pages, args->kv_dtype, base + latent + i, key[i]);
        }
    }
    return 0;
}
