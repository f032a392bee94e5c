/*
 * prefill_attn.c - expanded causal attention, row by row, head by head; f64 sums.
 *
 * Keys and values of one head are expanded once for the whole sequence into the workspace.
 */
#include "ref.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"

struct scratch {
    float *keys;    /* [tokens, nope + rope] */
    float *values;  /* [tokens, v] */
    double *scores; /* [tokens] */
};

static int64_t token_count(const struct tv_prefill_attn *args)
{
    return (int64_t)args->start + args->rows;
}

static float expand(const struct tv_prefill_attn *args, const void *w, int64_t w_row,
                    int64_t kv_row)
{
    double sum = 0.0;
    int64_t kv_dim = args->latent_dim + args->rope_dim;
    for (int32_t i = 0; i < args->latent_dim; i++) {
        float latent = tv_load_f32(args->kv_pages, args->kv_dtype, kv_row * kv_dim + i);
        sum += (double)tv_product_x(latent, args->products, args->w_dtype) *
               (double)tv_load_f32(w, args->w_dtype, w_row * args->latent_dim + i);
    }
    return (float)sum;
}

static void expand_head(const struct tv_prefill_attn *args, int32_t h, const struct scratch *s)
{
    int32_t key_dim = args->nope_dim + args->rope_dim;
    int64_t kv_dim = args->latent_dim + args->rope_dim;
    for (int64_t t = 0; t < token_count(args); t++) {
        int64_t row =
            (int64_t)args->page_table[t / args->page_size] * args->page_size + t % args->page_size;
        for (int32_t i = 0; i < args->nope_dim; i++) {
            s->keys[t * key_dim + i] =
                expand(args, args->k_up, (int64_t)h * args->nope_dim + i, row);
        }
        for (int32_t i = 0; i < args->rope_dim; i++) {
            s->keys[t * key_dim + args->nope_dim + i] =
                tv_load_f32(args->kv_pages, args->kv_dtype, row * kv_dim + args->latent_dim + i);
        }
        for (int32_t i = 0; i < args->v_dim; i++) {
            s->values[t * args->v_dim + i] =
                expand(args, args->v_up, (int64_t)h * args->v_dim + i, row);
        }
    }
}

static void attend_row(const struct tv_prefill_attn *args, int32_t r, int32_t h,
                       const struct scratch *s)
{
    int32_t key_dim = args->nope_dim + args->rope_dim;
    const float *q = args->q + ((int64_t)r * args->heads + h) * key_dim;
    float *out = args->out + ((int64_t)r * args->heads + h) * args->v_dim;
    int64_t count = (int64_t)args->start + r + 1;
    double max = -INFINITY;
    for (int64_t t = 0; t < count; t++) {
        double sum = 0.0;
        for (int32_t i = 0; i < key_dim; i++) {
            sum += (double)q[i] * (double)s->keys[t * key_dim + i];
        }
        s->scores[t] = (double)args->softmax_scale * sum;
        max = fmax(max, s->scores[t]);
    }
    double total = 0.0;
    for (int64_t t = 0; t < count; t++) {
        s->scores[t] = exp(s->scores[t] - max);
        total += s->scores[t];
    }
    for (int32_t i = 0; i < args->v_dim; i++) {
        double sum = 0.0;
        for (int64_t t = 0; t < count; t++) {
            sum += s->scores[t] * (double)s->values[t * args->v_dim + i];
        }
        out[i] = (float)(sum / total);
    }
}

size_t tv_ref_prefill_attn_workspace(const struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    (void)k;
    size_t per_token =
        sizeof(double) + (size_t)(args->nope_dim + args->rope_dim + args->v_dim) * sizeof(float);
    return (size_t)token_count(args) * per_token;
}

int tv_ref_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    int rc = tv_args_prefill_attn(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_ref_prefill_attn_workspace(k, args)) {
        return -ENOSPC;
    }
    if (args->key_count > 0 && args->key_first + args->key_count < args->start + args->rows) {
        return 0; /* the call that takes the last token does the others too */
    }
    struct scratch s;
    s.scores = args->workspace;
    s.keys = (float *)(s.scores + token_count(args));
    s.values = s.keys + token_count(args) * (args->nope_dim + args->rope_dim);
    for (int32_t h = 0; h < args->heads && args->rows > 0; h++) {
        expand_head(args, h, &s);
        for (int32_t r = 0; r < args->rows; r++) {
            attend_row(args, r, h, &s);
        }
    }
    return 0;
}
