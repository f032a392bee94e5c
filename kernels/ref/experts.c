/*
 * experts.c - routed experts, one row and one expert after the other; f64 sums.
 */
#include "ref.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"

static double dot(const struct tv_experts *args, const float *x, const void *w, int64_t offset,
                  int32_t n)
{
    double sum = 0.0;
    for (int32_t i = 0; i < n; i++) {
        float value = tv_product_x(x[i], args->products, args->w_dtype);
        sum += (double)value * (double)tv_load_f32(w, args->w_dtype, offset + i);
    }
    return sum;
}

/* act [inter] of expert e */
static void activate(const struct tv_experts *args, const float *x, int32_t e, float *act)
{
    for (int32_t i = 0; i < args->inter; i++) {
        int64_t offset = (int64_t)i * args->hidden;
        double gate = dot(args, x, args->gate[e], offset, args->hidden);
        double up = dot(args, x, args->up[e], offset, args->hidden);
        act[i] = (float)(gate / (1.0 + exp(-gate)) * up);
    }
}

size_t tv_ref_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args)
{
    (void)k;
    return (size_t)args->inter * sizeof(float) + (size_t)args->hidden * sizeof(double);
}

int tv_ref_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    int rc = tv_args_experts(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_ref_experts_workspace(k, args)) {
        return -ENOSPC;
    }
    double *sum = args->workspace;
    float *act = (float *)(sum + args->hidden);
    for (int32_t r = 0; r < args->rows; r++) {
        const float *x = args->x + (int64_t)r * args->hidden;
        float *y = args->y + (int64_t)r * args->hidden;
        memset(sum, 0, (size_t)args->hidden * sizeof *sum);
        for (int32_t j = 0; j < args->top_k; j++) {
            int64_t slot = (int64_t)r * args->top_k + j;
            int32_t e = args->ids[slot];
            activate(args, x, e, act);
            for (int32_t i = 0; i < args->hidden; i++) {
                int64_t offset = (int64_t)i * args->inter;
                double down = dot(args, act, args->down[e], offset, args->inter);
                sum[i] += (double)args->weights[slot] * down;
            }
        }
        for (int32_t i = 0; i < args->hidden; i++) {
            y[i] = (float)((double)y[i] + sum[i]);
        }
    }
    return 0;
}
