/*
 * topk.c - the largest raw logits of a row and its log-sum-exp.
 *
 * k is small, so the best so far are kept in order and a logit that beats the last is inserted.
 */
#include "ref.h"

#include <math.h>

#include "../args.h"

void tv_ref_topk_row(const struct tv_topk *args, int32_t r)
{
    const float *logits = args->logits + (int64_t)r * args->vocab;
    int32_t *ids = args->ids + (int64_t)r * args->k;
    float *values = args->values + (int64_t)r * args->k;
    int32_t count = 0;
    double max = -INFINITY;
    for (int32_t t = 0; t < args->vocab; t++) {
        float value = isnan(logits[t]) ? -INFINITY : logits[t];
        max = fmax(max, (double)value);
        if (args->k == 0 || (count == args->k && !(value > values[count - 1]))) {
            continue;
        }
        int32_t at = count < args->k ? count++ : count - 1;
        while (at > 0 && value > values[at - 1]) {
            ids[at] = ids[at - 1];
            values[at] = values[at - 1];
            at--;
        }
        ids[at] = t;
        values[at] = value;
    }
    double sum = 0.0;
    for (int32_t t = 0; t < args->vocab; t++) {
        sum += exp((double)logits[t] - max);
    }
    args->lse[r] = (float)(max + log(sum));
}

int tv_ref_topk(struct tv_kernels *k, const struct tv_topk *args)
{
    (void)k;
    int rc = tv_args_topk(args);
    if (rc != 0) {
        return rc;
    }
    for (int32_t r = 0; r < args->rows; r++) {
        tv_ref_topk_row(args, r);
    }
    return 0;
}
