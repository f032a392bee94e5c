/*
 * linear.c - grouped matrix product with row-major weights; f64 sums in ascending k.
 */
#include "ref.h"

#include "../args.h"
#include "../convert.h"

int tv_ref_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    (void)k;
    int rc = tv_args_linear(args);
    if (rc != 0) {
        return rc;
    }
    for (int32_t g = 0; g < args->groups; g++) {
        for (int32_t r = 0; r < args->rows; r++) {
            const float *x = args->x + g * args->x_group_stride + r * args->x_row_stride;
            float *y = args->y + g * args->y_group_stride + r * args->y_row_stride;
            for (int32_t n = 0; n < args->n; n++) {
                int64_t w = g * args->w_group_stride + (int64_t)n * args->k;
                double sum = 0.0;
                for (int32_t i = 0; i < args->k; i++) {
                    float value = tv_product_x(x[i], args->products, args->w_dtype);
                    sum += (double)value * (double)tv_load_f32(args->w, args->w_dtype, w + i);
                }
                y[n] = args->accumulate ? (float)((double)y[n] + sum) : (float)sum;
            }
        }
    }
    return 0;
}
