/*
 * verify_attn_naive.c - the kernel oracle: textbook attention with a full score row.
 *
 * Refuses every shortcut of the fast forms: no tiles, no online softmax, no splits. Eight partial
 * sums per dot product keep it usable at 30,000 tokens; they are f64 unless sum_f32 asks otherwise.
 */
#include "ref.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"

enum { PARTS = 8, CHUNK = 64 };

/* One row's view of the request it belongs to, and its part of the workspace. */
struct view {
    const struct tv_verify_attn *args;
    const int32_t *page_table;
    int32_t prefix_len;
    int32_t dim;
    double *scores; /* [kv_len_max] */
    float *q;       /* [dim] */
    float *kv;      /* [dim] */
    int32_t *path;  /* [q_len]: nodes from the root to the row's own */
};

/* Element offset of the j-th visible token: the prefix, then the node's path. */
static int64_t token_offset(const struct view *v, int32_t j)
{
    int32_t slot = j < v->prefix_len ? j : v->prefix_len + v->path[j - v->prefix_len];
    int32_t page_size = v->args->page_size;
    int64_t page = v->page_table[slot / page_size];
    return (page * page_size + slot % page_size) * v->dim;
}

/* `count` elements of the pool from `offset`, widened where they are not f32. */
static const float *load(const struct view *v, int64_t offset, int32_t count)
{
    if (v->args->dtype == TV_F32) {
        return (const float *)v->args->kv_pages + offset;
    }
    const uint16_t *bits = (const uint16_t *)v->args->kv_pages + offset;
    for (int32_t i = 0; i < count; i++) {
        v->kv[i] = tv_bf16_to_f32(bits[i]);
    }
    return v->kv;
}

static double dot_f64(const float *q, const float *kv, int32_t n)
{
    double part[PARTS] = {0};
    int32_t i = 0;
    for (; i + PARTS <= n; i += PARTS) {
        for (int32_t j = 0; j < PARTS; j++) {
            part[j] += (double)q[i + j] * (double)kv[i + j];
        }
    }
    for (; i < n; i++) {
        part[0] += (double)q[i] * (double)kv[i];
    }
    return ((part[0] + part[1]) + (part[2] + part[3])) +
           ((part[4] + part[5]) + (part[6] + part[7]));
}

static float dot_f32(const float *q, const float *kv, int32_t n)
{
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        sum += q[i] * kv[i];
    }
    return sum;
}

/* Scores of the `count` tokens the row sees; returns their maximum. */
static double fill_scores(const struct view *v, int32_t count)
{
    double max = -INFINITY;
    for (int32_t j = 0; j < count; j++) {
        const float *kv = load(v, token_offset(v, j), v->dim);
        double product =
            v->args->sum_f32 ? (double)dot_f32(v->q, kv, v->dim) : dot_f64(v->q, kv, v->dim);
        v->scores[j] = (double)v->args->softmax_scale * product;
        max = fmax(max, v->scores[j]);
    }
    return max;
}

/* Of what is rounded; kernels.h, round_p_bf16. */
static double rounding_scale(int32_t k)
{
    double f = 0.0, weight = 0.5;
    for (int32_t bits = k - 1; bits > 0; bits >>= 1) {
        f += bits & 1 ? weight : 0.0;
        weight /= 2.0;
    }
    return exp2(f);
}

/* Scores to probabilities; returns the sum of exp(score - max). */
static double normalise(const struct view *v, int32_t count, double max)
{
    double sum = 0.0, scale = rounding_scale(v->args->round_p_bf16);
    for (int32_t j = 0; j < count; j++) {
        v->scores[j] = exp(v->scores[j] - max);
        sum += v->scores[j];
    }
    for (int32_t j = 0; j < count; j++) {
        v->scores[j] /= sum;
        if (v->args->round_p_bf16) {
            float scaled = (float)(v->scores[j] * scale);
            v->scores[j] = (double)tv_bf16_to_f32(tv_f32_to_bf16(scaled)) / scale;
        }
    }
    return sum;
}

static void mix_values(const struct view *v, int32_t count, int64_t out_base)
{
    const struct tv_verify_attn *args = v->args;
    for (int32_t d = 0; d < args->latent_dim; d += CHUNK) {
        int32_t width = args->latent_dim - d < CHUNK ? args->latent_dim - d : CHUNK;
        double sum[CHUNK] = {0};
        float sum_f32[CHUNK] = {0};
        for (int32_t j = 0; j < count; j++) {
            const float *kv = load(v, token_offset(v, j) + d, width);
            double p = v->scores[j];
            for (int32_t i = 0; i < width && args->sum_f32; i++) {
                sum_f32[i] += (float)p * kv[i];
            }
            for (int32_t i = 0; i < width && !args->sum_f32; i++) {
                sum[i] += p * (double)kv[i];
            }
        }
        for (int32_t i = 0; i < width; i++) {
            float value = args->sum_f32 ? sum_f32[i] : (float)sum[i];
            tv_store_f32(args->out, args->out_dtype, out_base + d + i, value);
        }
    }
}

/* Path from the root to node i; returns its length. */
static int32_t fill_path(const int32_t *parents, int32_t i, int32_t *path)
{
    int32_t length = 0;
    for (int32_t at = i; at >= 0; at = parents[at]) {
        length++;
    }
    int32_t end = length;
    for (int32_t at = i; at >= 0; at = parents[at]) {
        path[--end] = at;
    }
    return length;
}

void tv_ref_verify_attn_row(const struct tv_verify_attn *args, int32_t b, int32_t i, int32_t h,
                            void *scratch)
{
    int64_t base = tv_args_row_base(args, b);
    struct view v = {
        .args = args,
        .page_table = args->page_table + (int64_t)b * args->max_pages,
        .prefix_len = args->prefix_len[b],
        .dim = args->latent_dim + args->rope_dim,
        .scores = scratch,
    };
    v.q = (float *)(v.scores + args->kv_len_max);
    v.kv = v.q + v.dim;
    v.path = (int32_t *)(v.kv + v.dim);
    int64_t row = (base + i) * args->heads + h;
    for (int32_t d = 0; d < v.dim; d++) {
        v.q[d] = tv_load_f32(args->q, args->dtype, row * v.dim + d);
    }
    int32_t count = v.prefix_len + fill_path(args->parents + base, i, v.path);
    double max = fill_scores(&v, count);
    double sum = normalise(&v, count, max);
    mix_values(&v, count, row * args->latent_dim);
    args->lse[row] = (float)(max + log(sum));
}

void tv_ref_verify_attn_padding(const struct tv_verify_attn *args, int32_t b)
{
    if (args->row_start) {
        return;
    }
    int64_t first = ((int64_t)b * args->q_len + args->node_count[b]) * args->heads;
    int64_t end = ((int64_t)b + 1) * args->q_len * args->heads;
    for (int64_t row = first; row < end; row++) {
        for (int32_t d = 0; d < args->latent_dim; d++) {
            tv_store_f32(args->out, args->out_dtype, row * args->latent_dim + d, 0.0f);
        }
        args->lse[row] = -INFINITY;
    }
}

size_t tv_ref_verify_attn_naive_workspace(const struct tv_kernels *k,
                                          const struct tv_verify_attn *args)
{
    (void)k;
    size_t dim = (size_t)args->latent_dim + (size_t)args->rope_dim;
    size_t bytes = (size_t)args->kv_len_max * sizeof(double) + 2 * dim * sizeof(float) +
                   (size_t)args->q_len * sizeof(int32_t);
    return (bytes + 63) / 64 * 64; /* threads of the cpu backend take one such part each */
}

int tv_ref_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int rc = tv_args_verify_attn(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_ref_verify_attn_naive_workspace(k, args)) {
        return -ENOSPC;
    }
    for (int32_t b = 0; b < args->batch; b++) {
        for (int32_t i = 0; i < args->node_count[b]; i++) {
            for (int32_t h = 0; h < args->heads; h++) {
                tv_ref_verify_attn_row(args, b, i, h, args->workspace);
            }
        }
        tv_ref_verify_attn_padding(args, b);
    }
    return 0;
}
