/*
 * layer_check.c - the self-test's layer hook: verify attention against the naive kernel.
 *
 * Owns its copies for the time of one call. Refuses to widen a bound.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verify/engine.h"

/* Bounds of the numerics contract: flash f32 and bf16 attention. */
#define REL_L2_F32   2e-6
#define REL_L2_BF16  4e-3
#define LSE_ABS_F32  1e-5
#define LSE_ABS_BF16 1e-4

static float element(const void *data, enum tv_dtype dtype, size_t i)
{
    return dtype == TV_F32 ? ((const float *)data)[i] : tv_bf16_to_f32(((const uint16_t *)data)[i]);
}

/* Fast against naive, both on the host. */
static void layer_compare(struct tv_engine_layer_check *check, int32_t layer,
                          const struct tv_verify_attn *attn, const void *fast,
                          const float *fast_lse, const void *naive, const float *naive_lse)
{
    size_t rows = (size_t)check->rows * (size_t)attn->heads;
    size_t count = rows * (size_t)attn->latent_dim;
    double difference = 0.0, norm = 0.0, lse_worst = 0.0, lse_max = 0.0;
    for (size_t i = 0; i < count; i++) {
        double reference = (double)element(naive, attn->out_dtype, i);
        double delta = (double)element(fast, attn->out_dtype, i) - reference;
        difference += delta * delta;
        norm += reference * reference;
    }
    for (size_t i = 0; i < rows; i++) {
        double delta = fabs((double)fast_lse[i] - (double)naive_lse[i]);
        lse_worst = delta > lse_worst || isnan(delta) ? delta : lse_worst;
        lse_max = fmax(lse_max, fabs((double)naive_lse[i]));
    }
    /* A row's largest score is at least its lse - ln(length): s below is never too wide. */
    double s = fmax(1.0, (lse_max - log((double)check->kv_len)) / 16.0);
    double rel_l2 = sqrt(difference / (norm > 0.0 ? norm : 1.0));
    double rel_bound = attn->dtype == TV_F32 ? REL_L2_F32 * s : REL_L2_BF16;
    double lse_bound = (attn->dtype == TV_F32 ? LSE_ABS_F32 : LSE_ABS_BF16) * s;
    if (!(rel_l2 <= rel_bound) || !(lse_worst <= lse_bound)) {
        check->rc = -EIO;
        (void)snprintf(check->detail, check->detail_bytes,
                       "layer %d: attention against naive: rel_l2 %.3g (bound %.3g), lse %.3g "
                       "(bound %.3g)",
                       layer, rel_l2, rel_bound, lse_worst, lse_bound);
    }
}

void tv_engine_layer_check(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct tv_engine_layer_check *check = context;
    struct tv_kernels *kernels = check->kernels;
    if (check->judge != NULL) {
        check->judge->layer(check->judge->context, layer, attn);
    }
    if (check->rc != 0) {
        return;
    }
    struct tv_verify_attn naive = *attn;
    size_t rows = (size_t)check->rows * (size_t)attn->heads;
    size_t out_bytes = rows * (size_t)attn->latent_dim * tv_dtype_size(attn->out_dtype);
    size_t lse_bytes = rows * sizeof(float);
    naive.workspace_bytes = kernels->verify_attn_naive_workspace(kernels, &naive);
    naive.workspace =
        naive.workspace_bytes > 0 ? kernels->alloc(kernels, naive.workspace_bytes) : NULL;
    naive.out = kernels->alloc(kernels, out_bytes);
    naive.lse = kernels->alloc(kernels, lse_bytes);
    char *host = malloc(2 * (out_bytes + lse_bytes));
    check->rc = -ENOMEM;
    if (naive.out == NULL || naive.lse == NULL || host == NULL ||
        (naive.workspace == NULL && naive.workspace_bytes > 0)) {
        goto done;
    }
    char *host_naive = host + out_bytes;
    char *lse_fast = host_naive + out_bytes;
    char *lse_naive = lse_fast + lse_bytes;
    int rc = kernels->verify_attn_naive(kernels, &naive);
    rc = rc != 0 ? rc : kernels->download(kernels, host, attn->out, out_bytes);
    rc = rc != 0 ? rc : kernels->download(kernels, host_naive, naive.out, out_bytes);
    rc = rc != 0 ? rc : kernels->download(kernels, lse_fast, attn->lse, lse_bytes);
    rc = rc != 0 ? rc : kernels->download(kernels, lse_naive, naive.lse, lse_bytes);
    rc = rc != 0 ? rc : kernels->sync(kernels);
    check->rc = rc;
    if (rc == 0) {
        layer_compare(check, layer, attn, host, (const float *)(void *)lse_fast, host_naive,
                      (const float *)(void *)lse_naive);
    }
done:
    if (check->rc == -ENOMEM) {
        (void)snprintf(check->detail, check->detail_bytes, "layer %d: no memory", layer);
    }
    if (naive.workspace != NULL && naive.workspace != attn->workspace) {
        kernels->free(kernels, naive.workspace);
    }
    if (naive.out != NULL) {
        kernels->free(kernels, naive.out);
    }
    if (naive.lse != NULL) {
        kernels->free(kernels, naive.lse);
    }
    free(host);
}
