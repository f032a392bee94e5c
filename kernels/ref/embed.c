/*
 * embed.c - token embedding: a copy that widens. Refuses ids outside the table and unknown types.
 */
#include "ref.h"

#include <errno.h>

#include "../args.h"
#include "../convert.h"

int tv_ref_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                 const void *table, enum tv_dtype dtype, const int32_t *ids, float *x)
{
    (void)k;
    if (rows < 0 || hidden < 1 || vocab < 1 || !tv_args_dtype_known(dtype)) {
        return -EINVAL;
    }
    for (int32_t r = 0; r < rows; r++) {
        if (ids[r] < 0 || ids[r] >= vocab) {
            return -EINVAL;
        }
    }
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t i = 0; i < hidden; i++) {
            x[(int64_t)r * hidden + i] = tv_load_f32(table, dtype, (int64_t)ids[r] * hidden + i);
        }
    }
    return 0;
}
