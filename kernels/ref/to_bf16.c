/*
 * to_bf16.c - rounding of a dense array to bf16, to nearest even.
 */
#include "ref.h"

#include <errno.h>

int tv_ref_to_bf16(struct tv_kernels *k, int64_t count, const float *x, uint16_t *y)
{
    (void)k;
    if (count < 0 || (count > 0 && (x == NULL || y == NULL))) {
        return -EINVAL;
    }
    for (int64_t i = 0; i < count; i++) {
        y[i] = tv_f32_to_bf16(x[i]);
    }
    return 0;
}
