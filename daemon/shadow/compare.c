/*
 * compare.c - a fast result against the path oracle: logits, walk and KV rows.
 *
 * Owns the comparison's temporary memory. Refuses to call a difference a near tie unless the gap of
 * the two best logits is below the checkpoint's noise.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "shadow/round.h"

/* KV rows of the fast path against the recomputed ones, layer by layer. */
struct kv_check {
    const struct tv_shadow_round *round;
    const struct tv_path_rows *rows;
    int equal;
};

static double spread(const float *values, size_t count)
{
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)values[i];
        squares += (double)values[i] * (double)values[i];
    }
    double mean = count > 0 ? sum / (double)count : 0.0;
    return count > 0 ? sqrt(fmax(0.0, squares / (double)count - mean * mean)) : 0.0;
}

static double bound_of(double std)
{
    return TV_SHADOW_LOGIT_ABS * fmax(1.0, std / TV_SHADOW_LOGIT_STD);
}

/* f32 rows keep the logits' bound, scaled by their own spread; a bf16 row may also be one rounding
 * step off, because two sums on either side of a border round apart. */
static void kv_compare(void *context, int32_t layer, const float *kv)
{
    struct kv_check *check = context;
    const struct tv_shadow_round *round = check->round;
    const struct tv_path_rows *rows = check->rows;
    size_t width = (size_t)(round->latent_dim + round->rope_dim);
    double bound = bound_of(spread(kv, (size_t)rows->count * width));
    double step = round->dtype == TV_F32 ? 0.0 : 1.0 / 128.0;
    for (int32_t r = 0; r < rows->prefix_len + round->nodes; r++) {
        int32_t row = r < rows->prefix_len ? r : rows->row_of[r - rows->prefix_len];
        for (size_t i = 0; i < width; i++) {
            double expected = (double)kv[(size_t)row * width + i];
            double delta =
                fabs((double)tv_shadow_round_kv_at(round, layer, r, (int32_t)i) - expected);
            if (!(delta <= bound + step * fabs(expected))) {
                check->equal = 0;
            }
        }
    }
}

static int32_t argmax(const float *row, int32_t vocab, float *ret_gap)
{
    int32_t best = 0;
    float second = -INFINITY;
    for (int32_t t = 1; t < vocab; t++) {
        if (row[t] > row[best]) {
            second = row[best];
            best = t;
        } else if (row[t] > second) {
            second = row[t];
        }
    }
    *ret_gap = row[best] - second;
    return best;
}

/* Logits and argmax of every node. Returns 0 when an argmax differs beyond the noise. */
static int logits_compare(const struct tv_parity_case *parity_case, int32_t vocab,
                          const float *oracle, struct tv_parity_report *report)
{
    int explained = 1;
    for (int32_t node = 0; node < parity_case->tree->count; node++) {
        const float *fast = parity_case->logits + (size_t)node * (size_t)vocab;
        const float *slow = oracle + (size_t)node * (size_t)vocab;
        float gap = 0.0f, fast_gap = 0.0f;
        for (int32_t t = 0; t < vocab; t++) {
            double delta = fabs((double)fast[t] - (double)slow[t]);
            delta = isfinite(delta) ? delta : 1e300;
            report->logit_max_abs = fmax(report->logit_max_abs, delta);
        }
        if (argmax(slow, vocab, &gap) == argmax(fast, vocab, &fast_gap)) {
            report->argmax_equal++;
        } else if ((double)gap < parity_case->noise) {
            report->near_ties++;
        } else {
            explained = 0;
        }
    }
    return explained;
}

struct oracle_rows {
    const float *logits;
    size_t vocab;
};

static const float *oracle_row(void *context, int32_t node)
{
    const struct oracle_rows *rows = context;
    return rows->logits + (size_t)node * rows->vocab;
}

static double logit_bound(const struct tv_shadow *shadow, const struct tv_parity_case *parity_case,
                          const float *oracle, size_t count)
{
    double bound = bound_of(spread(oracle, count));
    if (tv_cache_params(shadow->cache)->dtype != TV_F32) {
        /* rows rounded to bf16 differ from an f32 oracle by more than the f32 bound: the measured
         * noise of the checkpoint on such rows takes its place */
        bound = fmax(bound, 8.0 * parity_case->noise);
    }
    return bound;
}

/* Everything but the totals. */
static int compare(struct tv_shadow *shadow, struct tv_kernels *ref,
                   const struct tv_parity_case *parity_case, struct tv_parity_report *report,
                   enum tv_shadow_verdict *ret_verdict)
{
    const struct tv_path_source source = {
        .config = tv_model_config(shadow->model),
        .weights = tv_model_weights(shadow->model),
        .device = shadow->params.device,
        .stops = {&shadow->stopping, parity_case->cancelled[0], parity_case->cancelled[1]}};
    int32_t vocab = source.config->vocab;
    int32_t nodes = parity_case->tree->count;
    const struct tv_shadow_round *round = parity_case->round;
    int has_kv = round != NULL && round->failed == 0 && round->captured == round->layer_count &&
                 round->prefix_len == parity_case->prefix_len && round->nodes == nodes;
    struct tv_path_rows rows = {0};
    struct tv_shadow_redraw redraw = {0};
    float *oracle = NULL;
    int rc =
        tv_path_rows_init(&rows, parity_case->prefix, parity_case->prefix_len, parity_case->tree);
    struct kv_check check = {.round = round, .rows = &rows, .equal = 1};
    if (rc == 0) {
        rc = tv_path_forward(&source, &rows, nodes, has_kv ? kv_compare : NULL, &check, &oracle);
    }
    if (rc == 0) {
        struct oracle_rows context = {.logits = oracle, .vocab = (size_t)vocab};
        rc = tv_shadow_redraw(ref, vocab, parity_case, oracle_row, &context, &redraw);
    }
    if (rc == 0) {
        report->path_rows = nodes;
        report->bound_logit_abs =
            logit_bound(shadow, parity_case, oracle, (size_t)nodes * (size_t)vocab);
        int explained = logits_compare(parity_case, vocab, oracle, report);
        report->accepted_equal = redraw.accepted_equal;
        report->pending_equal = redraw.pending_equal;
        report->kv_equal = check.equal;
        int walk_equal = redraw.accepted_equal && redraw.pending_equal;
        report->near_ties += !walk_equal && redraw.near_tie ? 1 : 0;
        report->ok = explained && check.equal && (walk_equal || redraw.near_tie) &&
                     report->logit_max_abs <= report->bound_logit_abs;
        *ret_verdict = !report->ok              ? TV_SHADOW_VIOLATION
                       : report->near_ties != 0 ? TV_SHADOW_NEAR_TIE
                                                : TV_SHADOW_EXACT;
    }
    tv_path_rows_finish(&rows);
    free(oracle);
    return rc;
}

int tv_shadow_path_run(struct tv_shadow *shadow, struct tv_kernels *ref,
                       const struct tv_parity_case *parity_case,
                       struct tv_parity_report *ret_report)
{
    if (shadow->model == NULL || shadow->cache == NULL) {
        tv_shadow_count(shadow, TV_SHADOW_SKIPPED);
        return -ENOTSUP;
    }
    int64_t start_us = tv_clock_us();
    enum tv_shadow_verdict verdict = TV_SHADOW_SKIPPED;
    struct tv_parity_report report = *ret_report;
    report.path_rows = report.argmax_equal = report.near_ties = 0;
    report.logit_max_abs = 0.0;
    report.oracle = "cpu-f32";
    report.bound_kernel_rel_l2 = tv_cache_params(shadow->cache)->dtype == TV_F32
                                     ? TV_SHADOW_REL_L2_F32
                                     : TV_SHADOW_REL_L2_BF16;
    int rc = compare(shadow, ref, parity_case, &report, &verdict);
    if (rc == 0 && verdict == TV_SHADOW_VIOLATION) {
        tv_shadow_reproduce_path(shadow, parity_case);
    }
    tv_shadow_count(shadow, verdict);
    if (rc == 0) {
        report.took_ms = (tv_clock_us() - start_us) / 1000;
        *ret_report = report;
    }
    return rc;
}

int tv_shadow_path_compare(struct tv_shadow *shadow, const struct tv_parity_case *parity_case,
                           struct tv_parity_report *ret_report)
{
    pthread_mutex_lock(&shadow->path_lock);
    int rc = tv_shadow_path_run(shadow, shadow->path_ref, parity_case, ret_report);
    pthread_mutex_unlock(&shadow->path_lock);
    return rc;
}
