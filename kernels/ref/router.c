/*
 * router.c - expert choice from gate logits, in f64.
 *
 * Works without scratch: an expert is looked at again for each choice, which is cheap beside the
 * experts themselves. Non-finite logits lose against everything, so ids are always valid.
 */
#include "ref.h"

#include <math.h>

#include "../args.h"

struct row {
    const struct tv_router *args;
    const float *logits;
    double max; /* softmax: of the logits */
    double sum; /* softmax: of exp(logit - max) */
};

static double score(const struct row *row, int32_t e)
{
    double x = (double)row->logits[e];
    if (row->args->scoring == TV_ROUTER_SOFTMAX) {
        return exp(x - row->max) / row->sum;
    }
    return 1.0 / (1.0 + exp(-x));
}

/* What experts are ranked by; NaN ranks last. */
static double choice(const struct row *row, int32_t e)
{
    double value = score(row, e);
    if (row->args->scoring == TV_ROUTER_SIGMOID && row->args->bias) {
        value += (double)row->args->bias[e];
    }
    return isnan(value) ? -INFINITY : value;
}

static double group_value(const struct row *row, int32_t group)
{
    int32_t size = row->args->experts / row->args->n_group;
    double best = -INFINITY;
    double second = -INFINITY;
    for (int32_t e = group * size; e < (group + 1) * size; e++) {
        double value = choice(row, e);
        if (value > best) {
            second = best;
            best = value;
        } else if (value > second) {
            second = value;
        }
    }
    if (row->args->scoring == TV_ROUTER_SOFTMAX || size == 1) {
        return best;
    }
    return best + second;
}

/* A group is kept when fewer than topk_group groups rank before it. */
static int group_kept(const struct row *row, int32_t group)
{
    if (row->args->n_group == 1) {
        return 1;
    }
    double own = group_value(row, group);
    int32_t before = 0;
    for (int32_t g = 0; g < row->args->n_group; g++) {
        double other = group_value(row, g);
        before += g != group && (other > own || (other == own && g < group));
    }
    return before < row->args->topk_group;
}

static int chosen_before(const int32_t *ids, int32_t count, int32_t e)
{
    for (int32_t i = 0; i < count; i++) {
        if (ids[i] == e) {
            return 1;
        }
    }
    return 0;
}

static int32_t next_best(const struct row *row, const int32_t *ids, int32_t count)
{
    int32_t size = row->args->experts / row->args->n_group;
    int32_t best = -1;
    double best_value = 0.0;
    for (int32_t g = 0; g < row->args->n_group; g++) {
        if (!group_kept(row, g)) {
            continue;
        }
        for (int32_t e = g * size; e < (g + 1) * size; e++) {
            double value = choice(row, e);
            if ((best < 0 || value > best_value) && !chosen_before(ids, count, e)) {
                best = e;
                best_value = value;
            }
        }
    }
    return best;
}

void tv_ref_router_row(const struct tv_router *args, int32_t r)
{
    struct row row = {.args = args, .logits = args->logits + (int64_t)r * args->experts};
    int32_t *ids = args->ids + (int64_t)r * args->top_k;
    float *weights = args->weights + (int64_t)r * args->top_k;
    row.max = -INFINITY;
    for (int32_t e = 0; e < args->experts; e++) {
        row.max = fmax(row.max, (double)row.logits[e]);
    }
    for (int32_t e = 0; e < args->experts; e++) {
        row.sum += exp((double)row.logits[e] - row.max);
    }
    double total = 0.0;
    for (int32_t i = 0; i < args->top_k; i++) {
        ids[i] = next_best(&row, ids, i);
        total += score(&row, ids[i]);
    }
    double factor = (double)args->scale / (args->normalise ? total + 1e-20 : 1.0);
    for (int32_t i = 0; i < args->top_k; i++) {
        weights[i] = (float)(score(&row, ids[i]) * factor);
    }
}

int tv_ref_router(struct tv_kernels *k, const struct tv_router *args)
{
    (void)k;
    int rc = tv_args_router(args);
    if (rc != 0) {
        return rc;
    }
    for (int32_t r = 0; r < args->rows; r++) {
        tv_ref_router_row(args, r);
    }
    return 0;
}
