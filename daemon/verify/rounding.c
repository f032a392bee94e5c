/*
 * rounding.c - what products that are not exact cost: logits of the same rows beside those of exact
 * products.
 *
 * Owns the bounds of a start in that mode (kernels/README.md, "bf16 products"). Refuses logits that
 * could not be the same model's: a sound one stays far below, a wrong kernel is far above.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "verify/engine.h"

#define KL_MEAN_MAX      0.05 /* nats */
#define TOP1_SHARE_LEAST 0.5  /* of the rows */

struct row_stats {
    int32_t best;
    double lse;
};

static void row_look(const float *x, int32_t count, struct row_stats *ret)
{
    int32_t best = 0;
    double sum = 0.0;
    for (int32_t i = 1; i < count; i++) {
        best = x[i] > x[best] ? i : best;
    }
    for (int32_t i = 0; i < count; i++) {
        sum += exp((double)x[i] - (double)x[best]);
    }
    ret->best = best;
    ret->lse = log(sum) + (double)x[best];
}

int tv_engine_rounding_measure(const float *exact, const float *served, int32_t rows, int32_t vocab,
                               int bounded, struct tv_rounding *ret_cost, char *detail,
                               size_t detail_bytes)
{
    struct tv_rounding cost = {.rows = rows};
    for (int32_t r = 0; r < rows; r++) {
        const float *p = exact + (size_t)r * (size_t)vocab, *q = served + (size_t)r * (size_t)vocab;
        struct row_stats of_p, of_q;
        double kl = 0.0;
        row_look(p, vocab, &of_p);
        row_look(q, vocab, &of_q);
        for (int32_t i = 0; i < vocab; i++) {
            double delta = (double)p[i] - (double)q[i];
            kl += exp((double)p[i] - of_p.lse) * (delta - of_p.lse + of_q.lse);
            cost.logit_max = isfinite(delta) ? fmax(cost.logit_max, fabs(delta)) : INFINITY;
        }
        cost.kl_mean += kl / rows;
        cost.top1_equal += of_p.best == of_q.best;
    }
    *ret_cost = cost;
    int close = cost.kl_mean <= KL_MEAN_MAX && cost.top1_equal >= TOP1_SHARE_LEAST * rows;
    if (isfinite(cost.logit_max) && (close || !bounded)) {
        return 0;
    }
    (void)snprintf(detail, detail_bytes,
                   "bf16 products beside exact ones: %d of %d rows have the same best token, mean "
                   "KL %.3g (at least %.0f %%, at most %.2g)",
                   cost.top1_equal, rows, cost.kl_mean, 100.0 * TOP1_SHARE_LEAST, KL_MEAN_MAX);
    return -EIO;
}
