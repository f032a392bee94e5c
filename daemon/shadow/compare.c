/*
 * compare.c - a fast result against the path oracle: logits, walk and KV rows.
 *
 * Owns the comparison's temporary memory. Refuses to call a difference a near tie unless the gap of
 * the two best logits, or of a router's choice behind them, is below the checkpoint's noise.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "shadow/round.h"

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

/* Logits and argmax of every node. Returns 0 when an argmax differs beyond the noise. A node whose
 * experts are undecided and that is not the oracle's has the fast path's logits from here on: the
 * walk is judged by them. */
static int logits_compare(const struct tv_parity_case *parity_case, int32_t vocab,
                          const struct tv_rows_check *check, float *oracle,
                          struct tv_parity_report *report)
{
    int explained = 1;
    for (int32_t node = 0; node < parity_case->tree->count; node++) {
        const float *fast = parity_case->logits + (size_t)node * (size_t)vocab;
        float *slow = oracle + (size_t)node * (size_t)vocab;
        float gap = 0.0f, fast_gap = 0.0f;
        double largest = 0.0;
        for (int32_t t = 0; t < vocab; t++) {
            double delta = fabs((double)fast[t] - (double)slow[t]);
            largest = fmax(largest, isfinite(delta) ? delta : 1e300);
        }
        if (largest > report->bound_logit_abs && largest < 1e300 &&
            tv_shadow_row_undecided(check, check->rows->row_of[node])) {
            memcpy(slow, fast, (size_t)vocab * sizeof *slow);
            report->near_ties++;
            continue;
        }
        report->logit_max_abs = fmax(report->logit_max_abs, largest);
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

static int captured_whole(const struct tv_parity_case *parity_case)
{
    const struct tv_shadow_round *round = parity_case->round;
    return round != NULL && round->failed == 0 && round->captured == round->layer_count &&
           round->prefix_len == parity_case->prefix_len && round->nodes == parity_case->tree->count;
}

static int moved_wrong(const struct tv_parity_case *parity_case)
{
    return parity_case->round != NULL && parity_case->round->moved_wrong;
}

/* Logits and walk; the rows were compared during the pass. */
static int report_fill(int32_t vocab, const struct tv_parity_case *parity_case,
                       const struct tv_rows_check *check, float *oracle,
                       struct tv_parity_report *report, enum tv_shadow_verdict *ret_verdict)
{
    struct oracle_rows context = {.logits = oracle, .vocab = (size_t)vocab};
    struct tv_shadow_redraw redraw = {0};
    int explained = logits_compare(parity_case, vocab, check, oracle, report);
    int rc = tv_shadow_redraw(vocab, parity_case, oracle_row, &context, &redraw);
    if (rc != 0) {
        return rc;
    }
    report->path_rows = parity_case->tree->count;
    report->accepted_equal = redraw.accepted_equal;
    report->pending_equal = redraw.pending_equal;
    int walk_equal = redraw.accepted_equal && redraw.pending_equal;
    report->near_ties += !walk_equal && redraw.near_tie ? 1 : 0;
    report->ok = explained && report->kv_equal && (walk_equal || redraw.near_tie) &&
                 report->logit_max_abs <= report->bound_logit_abs;
    *ret_verdict = !report->ok              ? TV_SHADOW_VIOLATION
                   : report->near_ties != 0 ? TV_SHADOW_NEAR_TIE
                                            : TV_SHADOW_EXACT;
    return 0;
}

/* Everything but the totals. */
static int compare(struct tv_shadow *shadow, const struct tv_parity_case *parity_case,
                   struct tv_parity_report *report, enum tv_shadow_verdict *ret_verdict)
{
    int rounded = tv_cache_params(shadow->cache)->dtype != TV_F32;
    int apart = shadow->params.device != NULL && !shadow->params.device->host_memory;
    const struct tv_path_source source = {
        .config = tv_model_config(shadow->model),
        .weights = tv_model_weights(shadow->model),
        .device = shadow->params.device,
        .stops = {&shadow->stopping, parity_case->cancelled[0], parity_case->cancelled[1]},
        .rows_bf16 = rounded};
    struct tv_parity_case judged = *parity_case;
    struct tv_path_rows rows = {0};
    float *oracle = NULL;
    int whole = captured_whole(parity_case);
    if (rounded && !whole) {
        return -ENODATA; /* which way the fast path rounded is not known */
    }
    int rc = tv_path_rows_init(&rows, parity_case->prefix, parity_case->prefix_len,
                               parity_case->tree, rounded);
    struct tv_rows_check check = {.round = parity_case->round,
                                  .rows = &rows,
                                  .attention = rounded && apart,
                                  .v_dim = source.config->v_dim,
                                  .tie = rounded ? 0.0 : judged.noise / TV_SHADOW_LOGIT_STD,
                                  .equal = 1};
    struct tv_path_watch watch = tv_shadow_rows_watch(&check);
    if (rc == 0) {
        rc = tv_path_forward(&source, &rows, rows.row_of, judged.tree->count, whole ? &watch : NULL,
                             &oracle);
    }
    if (rc == 0) {
        size_t count = (size_t)judged.tree->count * (size_t)source.config->vocab;
        report->kv_equal = tv_shadow_rows_equal(&check) && !moved_wrong(parity_case);
        report->bound_logit_abs = tv_shadow_logit_bound(tv_shadow_spread(oracle, count));
        if (rounded) { /* the checkpoint's noise has the roundings in it that were taken over */
            judged.noise = fmin(judged.noise, 2.0 * report->bound_logit_abs);
        }
        rc = report_fill(source.config->vocab, &judged, &check, oracle, report, ret_verdict);
    }
    tv_path_rows_finish(&rows);
    free(oracle);
    return rc;
}

/* A round on demand counts once, when the kernel oracle has spoken too. */
static void settle(struct tv_shadow *shadow, const struct tv_parity_case *parity_case,
                   enum tv_shadow_verdict verdict)
{
    if (parity_case->round != NULL && parity_case->round->on_demand) {
        parity_case->round->path_verdict = verdict;
    } else {
        tv_shadow_count(shadow, verdict);
    }
}

int tv_shadow_path_compare(struct tv_shadow *shadow, const struct tv_parity_case *parity_case,
                           struct tv_parity_report *ret_report)
{
    if (shadow->model == NULL || shadow->cache == NULL) {
        settle(shadow, parity_case, TV_SHADOW_SKIPPED);
        return -ENOTSUP;
    }
    int64_t start_us = tv_clock_us();
    enum tv_shadow_verdict verdict = TV_SHADOW_SKIPPED;
    struct tv_parity_report report = *ret_report;
    report.path_rows = report.argmax_equal = report.near_ties = 0;
    report.logit_max_abs = 0.0;
    report.oracle = "cpu-f32";
    report.bound_kernel_rel_l2 = tv_shadow_sums_f32(shadow, tv_cache_params(shadow->cache)->dtype)
                                     ? TV_SHADOW_REL_L2_F32
                                     : TV_SHADOW_REL_L2_BF16;
    int rc = compare(shadow, parity_case, &report, &verdict);
    if (moved_wrong(parity_case)) { /* seen, whether the oracle could run or not */
        verdict = TV_SHADOW_VIOLATION;
    }
    if (verdict == TV_SHADOW_VIOLATION) {
        tv_shadow_reproduce_path(shadow, parity_case);
    }
    settle(shadow, parity_case, verdict);
    if (rc == 0) {
        pthread_mutex_lock(&shadow->lock);
        tv_stats_observe(&shadow->logit_errors, &tv_stats_errors, report.logit_max_abs);
        pthread_mutex_unlock(&shadow->lock);
        report.took_ms = (tv_clock_us() - start_us) / 1000;
        *ret_report = report;
    }
    return rc;
}
