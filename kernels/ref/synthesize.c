/*
 * synthesize.c - random weights by a counter generator: every element a function of its index.
 *
 * The definition in code, for both places and both orders of a matrix. Owns nothing; refuses types
 * that no weight is made of.
 */
#include "ref.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"
#include "../philox.h"

int tv_ref_synthesize(struct tv_kernels *k, const struct tv_synthesize *args)
{
    int rc = tv_args_synthesize(args);
    (void)k;
    if (rc != 0) {
        return rc;
    }
    int64_t rows = args->rows, cols = args->cols, count = args->groups * rows * cols;
    struct tv_philox_block block = {{0}};
    for (int64_t i = 0; i < count; i++) {
        if (i % 4 == 0) {
            block = tv_philox_weights(args->seed, args->tensor, (uint64_t)(i / 4));
        }
        int64_t group = i / (rows * cols), r = i / cols % rows, c = i % cols;
        int64_t at = args->transposed ? (group * cols + c) * rows + r : i;
        float u = tv_philox_signed(block.word[i % 4]);
        tv_store_f32(args->to, args->dtype, at, fmaf(args->scale, u, args->offset));
    }
    return 0;
}
