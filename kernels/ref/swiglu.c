/*
 * swiglu.c - gated activation: gate / (1 + exp(-gate)) * up.
 */
#include "ref.h"

#include <errno.h>
#include <math.h>

int tv_ref_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up)
{
    (void)k;
    if (rows < 0 || dim < 1) {
        return -EINVAL;
    }
    int64_t count = (int64_t)rows * dim;
    for (int64_t i = 0; i < count; i++) {
        double g = (double)gate[i];
        gate[i] = (float)(g / (1.0 + exp(-g)) * (double)up[i]);
    }
    return 0;
}
