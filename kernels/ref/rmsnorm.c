/*
 * rmsnorm.c - root mean square norm with a weight; the mean is taken in f64.
 */
#include "ref.h"

#include <errno.h>
#include <math.h>

int tv_ref_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                   int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride)
{
    (void)k;
    if (rows < 0 || dim < 1) {
        return -EINVAL;
    }
    for (int32_t r = 0; r < rows; r++) {
        const float *row = x + r * x_stride;
        float *result = y + r * y_stride;
        double sum = 0.0;
        for (int32_t i = 0; i < dim; i++) {
            sum += (double)row[i] * (double)row[i];
        }
        double factor = 1.0 / sqrt(sum / dim + (double)eps);
        for (int32_t i = 0; i < dim; i++) {
            result[i] = (float)((double)row[i] * factor * (double)weight[i]);
        }
    }
    return 0;
}
