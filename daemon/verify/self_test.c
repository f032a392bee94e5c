/*
 * self_test.c - a canned tree on a canned prompt: judged at start, repeated bit for bit later.
 *
 * At start the attention of every layer is compared with the naive kernel, and every path of the
 * tree with the expanded form of the same tokens. Owns a context whose rows stay reserved, so that
 * a repeat needs no page. Refuses to serve when a bound is missed.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "verify/engine.h"

#define PROMPT_LEN 24
#define TREE_NODES 16

/* Bounds of the numerics contract: flash f32 and bf16 attention, and the model's logits. */
#define REL_L2_F32   2e-6
#define REL_L2_BF16  4e-3
#define LSE_ABS_F32  1e-5
#define LSE_ABS_BF16 1e-4
#define LOGIT_ABS    5e-4
#define LOGIT_STD    1.6

static const int32_t tree_parents[TREE_NODES] = {-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9, 9, 10, 12, 3};

/* The layer hook's state: the first thing that went wrong stays. */
struct layer_check {
    struct tv_kernels *kernels;
    int32_t rows;
    int rc;
    char *detail;
    size_t detail_bytes;
};

static float element(const void *data, enum tv_dtype dtype, size_t i)
{
    return dtype == TV_F32 ? ((const float *)data)[i] : tv_bf16_to_f32(((const uint16_t *)data)[i]);
}

/* Fast against naive, both on the host. */
static void layer_compare(struct layer_check *check, int32_t layer,
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
    double s = fmax(1.0, (lse_max - log((double)(PROMPT_LEN + TREE_NODES))) / 16.0);
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

static void layer_hook(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct layer_check *check = context;
    struct tv_kernels *kernels = check->kernels;
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

/* Run the canned tree on the reserved rows; logits to the host. */
static int tree_run(struct tv_verify_engine *self, struct layer_check *check, float *ret_logits)
{
    struct tv_engine *engine = &self->engine;
    struct tv_model_item item = {.seq = &self->test_context->seq,
                                 .rows = self->test_rows,
                                 .tokens = self->test_tokens,
                                 .parents = self->test_parents,
                                 .depths = self->test_depths};
    const float *logits = NULL;
    int rc = tv_model_verify(engine->model, engine->cache, &item, 1,
                             check != NULL ? layer_hook : NULL, check, &logits);
    if (rc == 0) {
        rc = engine->kernels->download(engine->kernels, ret_logits, logits,
                                       (size_t)self->test_rows * (size_t)engine->vocab *
                                           sizeof *logits);
    }
    if (rc == 0) {
        rc = engine->kernels->sync(engine->kernels);
    }
    return rc != 0 ? rc : check != NULL ? check->rc : 0;
}

static void logits_sum(const struct tv_verify_engine *self, const float *logits,
                       uint8_t ret_sum[32])
{
    struct tv_sha256 hash;
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, logits,
                     (size_t)self->test_rows * (size_t)self->engine.vocab * sizeof *logits);
    tv_sha256_finish(&hash, ret_sum);
}

/* Append `count` tokens in the expanded form; when ret_row is given, the last one's logits. */
static int append(struct tv_verify_engine *self, struct tv_cache_seq *seq, const int32_t *tokens,
                  int32_t count, float *ret_row)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_shortage shortage;
    const float *logits = NULL;
    int rc = tv_cache_reserve(engine->cache, seq, count, &shortage);
    if (rc != 0) {
        return rc;
    }
    rc = tv_model_prefill(engine->model, engine->cache, seq, tokens, count,
                          ret_row != NULL ? &logits : NULL);
    if (rc == 0 && ret_row != NULL) {
        rc = engine->kernels->download(engine->kernels, ret_row, logits,
                                       (size_t)engine->vocab * sizeof *logits);
        rc = rc != 0 ? rc : engine->kernels->sync(engine->kernels);
    }
    if (rc != 0) {
        tv_cache_drop(engine->cache, seq);
        return rc;
    }
    return tv_cache_commit(engine->cache, seq, NULL, count);
}

/* The canned prompt, in slices that the model takes. */
static int prompt_append(struct tv_verify_engine *self, struct tv_cache_seq *seq)
{
    int rc = 0;
    for (int32_t done = 0; rc == 0 && done < self->test_prompt_len;) {
        int32_t tokens[PROMPT_LEN];
        int32_t count = self->test_prompt_len - done;
        count = count < self->engine.prefill_rows ? count : self->engine.prefill_rows;
        for (int32_t i = 0; i < count; i++) {
            tokens[i] = (int32_t)(((int64_t)(done + i) * 37 + 11) % self->engine.vocab);
        }
        rc = append(self, seq, tokens, count, NULL);
        done += count;
    }
    return rc;
}

static double logits_std(const struct tv_verify_engine *self)
{
    size_t count = (size_t)self->test_rows * (size_t)self->engine.vocab;
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)self->test_logits[i];
        squares += (double)self->test_logits[i] * (double)self->test_logits[i];
    }
    double mean = sum / (double)count;
    return sqrt(fmax(0.0, squares / (double)count - mean * mean));
}

/* Every node's logits against its path as plain text in the expanded form. */
static int paths_compare(struct tv_verify_engine *self, char *detail, size_t detail_bytes)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_seq seq = {0};
    size_t vocab = (size_t)engine->vocab;
    double worst = 0.0;
    double bound = fmax(LOGIT_ABS * fmax(1.0, logits_std(self) / LOGIT_STD), 2.0 * engine->noise);
    float *row = malloc(vocab * sizeof *row);
    int rc = row == NULL ? -ENOMEM : prompt_append(self, &seq);
    for (int32_t node = 0; rc == 0 && node < self->test_rows; node++) {
        int32_t path[TREE_NODES];
        int32_t at = self->test_depths[node];
        for (int32_t i = node; i >= 0; i = self->test_parents[i]) {
            path[at--] = self->test_tokens[i];
        }
        rc = tv_cache_truncate(engine->cache, &seq, self->test_prompt_len);
        for (int32_t i = 0; rc == 0 && i <= self->test_depths[node]; i++) {
            rc = append(self, &seq, &path[i], 1, i == self->test_depths[node] ? row : NULL);
        }
        for (size_t t = 0; rc == 0 && t < vocab; t++) {
            double delta =
                fabs((double)row[t] - (double)self->test_logits[(size_t)node * vocab + t]);
            worst = delta > worst || isnan(delta) ? delta : worst;
        }
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "path form of the self-test: %s", strerror(-rc));
    } else if (!(worst <= bound)) {
        rc = -EIO;
        (void)snprintf(detail, detail_bytes,
                       "tree logits against their paths: %.3g, the bound is %.3g", worst, bound);
    }
    tv_cache_seq_finish(engine->cache, &seq);
    free(row);
    return rc;
}

static int test_take(struct tv_verify_engine *self)
{
    struct tv_engine *engine = &self->engine;
    int32_t rows = engine->nodes_max < TREE_NODES ? engine->nodes_max : TREE_NODES;
    rows = rows < engine->max_len ? rows : engine->max_len;
    size_t count = (size_t)rows;
    self->test_rows = rows;
    self->test_prompt_len =
        engine->max_len - rows < PROMPT_LEN ? engine->max_len - rows : PROMPT_LEN;
    self->test_tokens = calloc(count, sizeof *self->test_tokens);
    self->test_parents = calloc(count, sizeof *self->test_parents);
    self->test_depths = calloc(count, sizeof *self->test_depths);
    self->test_logits = malloc(count * (size_t)engine->vocab * sizeof *self->test_logits);
    self->test_repeat = malloc(count * (size_t)engine->vocab * sizeof *self->test_repeat);
    if (self->test_tokens == NULL || self->test_parents == NULL || self->test_depths == NULL ||
        self->test_logits == NULL || self->test_repeat == NULL) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < rows; i++) {
        self->test_tokens[i] = (int32_t)(((int64_t)i * 53 + 7) % engine->vocab);
        self->test_parents[i] = tree_parents[i];
        self->test_depths[i] = i == 0 ? 0 : self->test_depths[tree_parents[i]] + 1;
    }
    return engine->ops->context_open(engine, &self->test_context);
}

int tv_engine_self_test_start(struct tv_verify_engine *self, char *detail, size_t detail_bytes)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_shortage shortage;
    struct layer_check check = {
        .kernels = engine->kernels, .detail = detail, .detail_bytes = detail_bytes};
    (void)snprintf(detail, detail_bytes, "self-test");
    int rc = test_take(self);
    if (rc == 0) {
        rc = prompt_append(self, &self->test_context->seq);
    }
    if (rc == 0) {
        rc = tv_cache_reserve(engine->cache, &self->test_context->seq, self->test_rows, &shortage);
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "self-test: no room: %s", strerror(-rc));
        return rc;
    }
    check.rows = self->test_rows;
    rc = tree_run(self, &check, self->test_logits);
    if (rc == 0) {
        logits_sum(self, self->test_logits, self->test_sum);
        rc = paths_compare(self, detail, detail_bytes);
    }
    if (rc == 0) {
        rc = tv_engine_self_test_repeat(self, detail, detail_bytes);
    }
    return rc;
}

int tv_engine_self_test_repeat(struct tv_verify_engine *self, char *detail, size_t detail_bytes)
{
    size_t vocab = (size_t)self->engine.vocab;
    uint8_t sum[32];
    float *logits = self->test_repeat;
    int rc = tree_run(self, NULL, logits);
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "self-test: %s", strerror(-rc));
        return rc;
    }
    logits_sum(self, logits, sum);
    if (memcmp(sum, self->test_sum, sizeof sum) == 0) {
        (void)snprintf(detail, detail_bytes, "%d rows, bit-identical to the start",
                       self->test_rows);
        return 0;
    }
    for (int32_t i = 0; i < self->test_rows; i++) {
        size_t start = (size_t)i * vocab;
        if (memcmp(logits + start, self->test_logits + start, vocab * sizeof *logits) != 0) {
            (void)snprintf(detail, detail_bytes, "self-test: logits of row %d differ", i);
            break;
        }
    }
    return -EIO;
}

void tv_engine_self_test_finish(struct tv_verify_engine *self)
{
    if (self->test_context != NULL) {
        tv_cache_drop(self->engine.cache, &self->test_context->seq);
        self->engine.ops->context_close(&self->engine, self->test_context);
    }
    free(self->test_tokens);
    free(self->test_parents);
    free(self->test_depths);
    free(self->test_logits);
    free(self->test_repeat);
}
