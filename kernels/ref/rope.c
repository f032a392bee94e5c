/*
 * rope.c - rotary embedding: interleaved pairs in, halves out.
 */
#include "ref.h"

#include "../args.h"

void tv_ref_rope_vector(float *x, const struct tv_rope_table *table, int32_t position)
{
    int32_t half = table->rope_dim / 2;
    const float *cosines = table->cos_sin + (int64_t)position * table->rope_dim;
    const float *sines = cosines + half;
    float turned[TV_ARGS_ROPE_MAX];
    for (int32_t i = 0; i < half; i++) {
        double even = (double)x[2 * i];
        double odd = (double)x[2 * i + 1];
        turned[i] = (float)(even * (double)cosines[i] - odd * (double)sines[i]);
        turned[half + i] = (float)(odd * (double)cosines[i] + even * (double)sines[i]);
    }
    memcpy(x, turned, (size_t)table->rope_dim * sizeof *x);
}

int tv_ref_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    (void)k;
    int rc = tv_args_rope(args);
    if (rc != 0) {
        return rc;
    }
    for (int32_t r = 0; r < args->rows; r++) {
        for (int32_t h = 0; h < args->heads; h++) {
            tv_ref_rope_vector(args->x + r * args->row_stride + h * args->head_stride, &args->table,
                               args->positions[r]);
        }
    }
    return 0;
}
