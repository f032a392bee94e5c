/*
 * kernel.c - the kernel oracle: naive attention over a captured round, layer by layer.
 *
 * Runs on the shadow thread with the reference backend of its own. Owns its buffers for the time of
 * one round. Refuses to widen a bound: s is computed from the real scores, and only when needed.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shadow/round.h"

/* One layer's judgement. */
struct judge {
    struct tv_kernels *ref;
    const struct tv_shadow_round *round;
    char *kv;            /* the round's pages, dense */
    float *out, *lse;    /* the oracle's */
    int32_t *page_table; /* 0, 1, 2, ... */
    void *workspace;
    size_t workspace_bytes;
};

static float value_at(const void *data, enum tv_dtype dtype, size_t i)
{
    return dtype == TV_F32 ? ((const float *)data)[i] : tv_bf16_to_f32(((const uint16_t *)data)[i]);
}

static struct tv_verify_attn attn_of(const struct judge *judge, int32_t layer)
{
    const struct tv_shadow_round *round = judge->round;
    int32_t pages = tv_shadow_round_page_count(round);
    return (struct tv_verify_attn){.batch = 1,
                                   .q_len = round->nodes,
                                   .heads = round->heads,
                                   .latent_dim = round->latent_dim,
                                   .rope_dim = round->rope_dim,
                                   .softmax_scale = round->softmax_scale,
                                   .dtype = round->dtype,
                                   .out_dtype = TV_F32,
                                   .q = round->layers[layer].q,
                                   .kv_pages = judge->kv,
                                   .page_count = pages,
                                   .page_size = round->page_size,
                                   .max_pages = pages,
                                   .page_table = judge->page_table,
                                   .prefix_len = &round->prefix_len,
                                   .node_count = &round->nodes,
                                   .parents = round->parents,
                                   .kv_len_max = round->prefix_len + round->nodes,
                                   .out = judge->out,
                                   .lse = judge->lse,
                                   .workspace = judge->workspace,
                                   .workspace_bytes = judge->workspace_bytes};
}

static int judge_take(struct judge *judge)
{
    const struct tv_shadow_round *round = judge->round;
    int32_t pages = tv_shadow_round_page_count(round);
    size_t rows = (size_t)round->nodes * (size_t)round->heads;
    judge->kv = malloc(tv_shadow_round_kv_bytes(round));
    judge->out = malloc(rows * (size_t)round->latent_dim * sizeof *judge->out);
    judge->lse = malloc(rows * sizeof *judge->lse);
    judge->page_table = malloc((size_t)pages * sizeof *judge->page_table);
    if (judge->kv == NULL || judge->out == NULL || judge->lse == NULL ||
        judge->page_table == NULL) {
        return -ENOMEM;
    }
    for (int32_t p = 0; p < pages; p++) {
        judge->page_table[p] = p;
    }
    struct tv_verify_attn attn = attn_of(judge, 0);
    judge->workspace_bytes = judge->ref->verify_attn_naive_workspace(judge->ref, &attn);
    judge->workspace = malloc(judge->workspace_bytes > 0 ? judge->workspace_bytes : 1);
    return judge->workspace == NULL ? -ENOMEM : 0;
}

static void judge_finish(struct judge *judge)
{
    free(judge->kv);
    free(judge->out);
    free(judge->lse);
    free(judge->page_table);
    free(judge->workspace);
}

static double score_abs(const struct judge *judge, int32_t layer, size_t row, int32_t kv_row)
{
    const struct tv_shadow_round *round = judge->round;
    size_t width = (size_t)(round->latent_dim + round->rope_dim);
    double sum = 0.0;
    for (size_t i = 0; i < width; i++) {
        sum += (double)value_at(round->layers[layer].q, round->dtype, row * width + i) *
               (double)value_at(judge->kv, round->dtype, (size_t)kv_row * width + i);
    }
    return fabs(sum * (double)round->softmax_scale);
}

/* s of the contract: the largest score of the layer over 16, at least 1. */
static double score_scale(const struct judge *judge, int32_t layer)
{
    const struct tv_shadow_round *round = judge->round;
    double largest = 0.0;
    for (int32_t node = 0; node < round->nodes; node++) {
        for (int32_t head = 0; head < round->heads; head++) {
            size_t row = (size_t)node * (size_t)round->heads + (size_t)head;
            for (int32_t j = 0; j < round->prefix_len; j++) {
                largest = fmax(largest, score_abs(judge, layer, row, j));
            }
            for (int32_t i = node; i >= 0; i = round->parents[i]) {
                largest = fmax(largest, score_abs(judge, layer, row, round->prefix_len + i));
            }
        }
    }
    return fmax(1.0, largest / 16.0);
}

struct tv_shadow_difference tv_shadow_difference_of(const struct tv_shadow_round *round,
                                                    const float *out, const float *lse,
                                                    const void *fast, enum tv_dtype fast_dtype,
                                                    const float *fast_lse)
{
    size_t rows = (size_t)round->nodes * (size_t)round->heads;
    size_t count = rows * (size_t)round->latent_dim;
    struct tv_shadow_difference result = {0};
    double squares = 0.0, norm = 0.0, most = 0.0, most_rel = 0.0;
    /* comparisons, for fmax is a call: this is most of a judgement */
    for (size_t i = 0; i < count; i++) {
        double reference = (double)out[i], size = fabs(reference);
        double delta = fabs((double)value_at(fast, fast_dtype, i) - reference);
        double relative = delta / (size > 1e-6 ? size : 1e-6);
        most = delta > most ? delta : most;
        most_rel = relative > most_rel ? relative : most_rel;
        squares += delta * delta;
        norm += reference * reference;
    }
    int finite = isfinite(squares); /* what floats differ by has a square that fits */
    result.kernel.max_abs = most;
    result.kernel.max_rel = most_rel;
    for (size_t i = 0; i < rows; i++) {
        double delta = fabs((double)fast_lse[i] - (double)lse[i]);
        finite = finite && isfinite(delta);
        result.lse_abs = fmax(result.lse_abs, delta);
    }
    result.kernel.rel_l2 = sqrt(squares / (norm > 0.0 ? norm : 1.0));
    if (!finite) { /* comparisons drop NaN: say it with a number that JSON can carry */
        result.kernel.max_abs = result.kernel.max_rel = result.kernel.rel_l2 = 1e300;
        result.lse_abs = 1e300;
    }
    return result;
}

static struct tv_shadow_difference difference_of(const struct judge *judge, const void *fast,
                                                 enum tv_dtype fast_dtype, const float *fast_lse)
{
    return tv_shadow_difference_of(judge->round, judge->out, judge->lse, fast, fast_dtype,
                                   fast_lse);
}

/* The bf16 row's second condition: no worse than twice naive with bf16 probabilities, in the worst
 * of its scalings. */
static int rounded_within(const struct judge *judge, int32_t layer, double rel_l2, int *ret_within)
{
    const struct tv_shadow_round *round = judge->round;
    size_t rows = (size_t)round->nodes * (size_t)round->heads;
    struct tv_verify_attn attn = attn_of(judge, layer);
    size_t out_bytes = rows * (size_t)round->latent_dim * tv_dtype_size(round->out_dtype);
    void *out = malloc(out_bytes);
    float *lse = malloc(rows * sizeof *lse);
    int rc = -ENOMEM;
    if (out != NULL && lse != NULL) {
        attn.out = out;
        attn.out_dtype = round->out_dtype;
        attn.lse = lse;
        rc = 0;
    }
    *ret_within = 0;
    for (int32_t k = 1; rc == 0 && !*ret_within && k <= TV_SHADOW_ROUNDINGS; k++) {
        attn.round_p_bf16 = k;
        rc = judge->ref->verify_attn_naive(judge->ref, &attn);
        if (rc == 0) {
            struct tv_shadow_difference rounded = difference_of(judge, out, round->out_dtype, lse);
            *ret_within = rel_l2 <= 2.0 * rounded.kernel.rel_l2;
        }
    }
    free(out);
    free(lse);
    return rc;
}

int tv_shadow_sums_f32(const struct tv_shadow *shadow, enum tv_dtype dtype)
{
    const struct tv_kernels *device = shadow->params.device;
    return dtype == TV_F32 || device == NULL || device->host_memory;
}

static int layer_within(const struct judge *judge, int32_t layer,
                        const struct tv_shadow_difference *difference, int *ret_within)
{
    int f32 = tv_shadow_sums_f32(judge->round->shadow, judge->round->dtype);
    double lse_bound = f32 ? TV_SHADOW_LSE_ABS_F32 : TV_SHADOW_LSE_ABS_BF16;
    double rel_l2 = difference->kernel.rel_l2;
    if (rel_l2 <= TV_SHADOW_REL_L2_F32 && difference->lse_abs <= lse_bound) {
        *ret_within = 1; /* within the narrowest bound there is, whatever s */
        return 0;
    }
    double s = score_scale(judge, layer);
    double rel_bound = f32 ? TV_SHADOW_REL_L2_F32 * s : TV_SHADOW_REL_L2_BF16;
    *ret_within = rel_l2 <= rel_bound && difference->lse_abs <= lse_bound * s;
    if (*ret_within && !f32 && rel_l2 > TV_SHADOW_REL_L2_F32 * s) {
        return rounded_within(judge, layer, rel_l2, ret_within);
    }
    return 0;
}

void tv_shadow_worst_join(struct tv_parity_kernel *worst, const struct tv_parity_kernel *layer)
{
    worst->layers++;
    worst->max_abs = fmax(worst->max_abs, layer->max_abs);
    worst->max_rel = fmax(worst->max_rel, layer->max_rel);
    worst->rel_l2 = fmax(worst->rel_l2, layer->rel_l2);
}

int tv_shadow_kernel_judge(struct tv_shadow *shadow, const struct tv_shadow_round *round,
                           struct tv_parity_kernel *ret_worst, int *ret_within)
{
    struct judge judge = {.ref = shadow->ref, .round = round};
    struct tv_parity_kernel worst = {0};
    int within = 1;
    int rc = judge_take(&judge);
    for (int32_t layer = 0; rc == 0 && layer < round->layer_count; layer++) {
        if (tv_shadow_stopping(shadow)) {
            rc = -ECANCELED;
            break;
        }
        rc = tv_shadow_round_kv(round, layer, judge.kv);
        if (rc != 0) {
            rc = within ? rc : 0; /* a violation that was found stays one */
            break;
        }
        struct tv_verify_attn attn = attn_of(&judge, layer);
        rc = shadow->ref->verify_attn_naive(shadow->ref, &attn);
        if (rc != 0) {
            break;
        }
        const struct tv_shadow_layer_copy *fast = &round->layers[layer];
        struct tv_shadow_difference difference =
            difference_of(&judge, fast->out, round->out_dtype, fast->lse);
        int layer_ok = 0;
        rc = layer_within(&judge, layer, &difference, &layer_ok);
        tv_shadow_worst_join(&worst, &difference.kernel);
        if (rc == 0 && !layer_ok) {
            if (within) { /* the first violating layer explains those behind it */
                tv_shadow_reproduce_kernel(shadow, round, layer, judge.kv, judge.out, judge.lse);
            }
            within = 0;
        }
    }
    judge_finish(&judge);
    if (rc == 0) {
        *ret_worst = worst;
        *ret_within = within;
    }
    return rc;
}
