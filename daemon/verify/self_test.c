/*
 * self_test.c - a canned text and tree: judged at start, repeated bit for bit later.
 *
 * The text goes through prefill in slices, the tree behind it through verify; the judge compares
 * the logits of both with its oracle. A model whose products are not exact is judged with exact
 * ones, and then compared with itself (rounding.c). Owns a context whose rows stay reserved, so
 * that a repeat needs no page. Refuses to serve when a bound is missed.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/digest.h"
#include "verify/engine.h"

#define TEXT_LEN     24
#define TREE_NODES   16
#define DETAIL_BYTES 320

_Static_assert(TEXT_LEN + TREE_NODES <= TV_SELF_TEST_ROWS, "the pool was sized for them");

static const int32_t tree_parents[TREE_NODES] = {-1, 0, 0, 0, 1, 1, 2, 4, 4, 6, 7, 9, 9, 10, 12, 3};

/* Slices grow, so that short and long ones are seen. */
static int32_t slice_next(const struct tv_engine *engine, int32_t done, int32_t len)
{
    int32_t count = 1 + 2 * done;
    count = count < engine->prefill_rows ? count : engine->prefill_rows;
    return count < len - done ? count : len - done;
}

/* The text through prefill, into rows that the context has (committed ones are written again with
 * what they hold); the logits after each slice to the host. */
static int text_run(struct tv_verify_engine *self, float *ret_logits)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_seq seq = self->test_context->seq; /* a view of its pages, not a holder */
    int rc = 0;
    seq.len = 0;
    for (int32_t s = 0; rc == 0 && s < self->test_slice_count; s++) {
        const float *logits = NULL;
        seq.scratch = self->test_slices[s] + 1 - seq.len;
        rc = tv_model_prefill(engine->model, engine->cache, &seq, self->test_text + seq.len,
                              seq.scratch, &logits);
        if (rc == 0) {
            rc = engine->kernels->download(engine->kernels,
                                           ret_logits + (size_t)s * (size_t)engine->vocab, logits,
                                           (size_t)engine->vocab * sizeof *logits);
        }
        if (rc == 0) {
            rc = engine->kernels->sync(engine->kernels);
        }
        seq.len += seq.scratch;
    }
    return rc;
}

/* The tree through verify on the reserved rows; its logits to the host. */
static int tree_run(struct tv_verify_engine *self, struct tv_engine_layer_check *check,
                    float *ret_logits)
{
    struct tv_engine *engine = &self->engine;
    struct tv_model_item item = {.seq = &self->test_context->seq,
                                 .rows = self->test_tree.count,
                                 .tokens = self->test_tree.tokens,
                                 .parents = self->test_tree.parents,
                                 .depths = self->test_tree.depths};
    const float *logits = NULL;
    int rc = tv_model_verify(engine->model, engine->cache, &item, 1,
                             check != NULL ? tv_engine_layer_check : NULL, check, &logits);
    if (rc == 0) {
        rc = engine->kernels->download(engine->kernels, ret_logits, logits,
                                       (size_t)item.rows * (size_t)engine->vocab * sizeof *logits);
    }
    if (rc == 0) {
        rc = engine->kernels->sync(engine->kernels);
    }
    return rc != 0 ? rc : check != NULL ? check->rc : 0;
}

static int32_t logit_rows(const struct tv_verify_engine *self)
{
    return self->test_slice_count + self->test_tree.count;
}

static float *tree_logits(const struct tv_verify_engine *self, float *logits)
{
    return logits + (size_t)self->test_slice_count * (size_t)self->engine.vocab;
}

static void logits_sum(const struct tv_verify_engine *self, const float *logits,
                       uint8_t ret_sum[32])
{
    struct tv_sha256 hash;
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, logits,
                     (size_t)logit_rows(self) * (size_t)self->engine.vocab * sizeof *logits);
    tv_sha256_finish(&hash, ret_sum);
}

static int arrays_take(struct tv_verify_engine *self, int32_t text_len, int32_t nodes)
{
    struct tv_tree *tree = &self->test_tree;
    size_t count = (size_t)nodes, text = (size_t)text_len;
    size_t floats = (count + text) * (size_t)self->engine.vocab;
    tree->tokens = calloc(count, sizeof *tree->tokens);
    tree->parents = calloc(count, sizeof *tree->parents);
    tree->depths = calloc(count, sizeof *tree->depths);
    self->test_text = calloc(text + 1, sizeof *self->test_text);
    self->test_slices = calloc(text + 1, sizeof *self->test_slices);
    self->test_logits = malloc(floats * sizeof *self->test_logits);
    self->test_repeat = malloc(floats * sizeof *self->test_repeat);
    int missing = tree->tokens == NULL || tree->parents == NULL || tree->depths == NULL ||
                  self->test_text == NULL || self->test_slices == NULL ||
                  self->test_logits == NULL || self->test_repeat == NULL;
    return missing ? -ENOMEM : 0;
}

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* A context of a few rows has a short text and a short tree, but both where there are two. */
static int test_take(struct tv_verify_engine *self)
{
    struct tv_engine *engine = &self->engine;
    struct tv_tree *tree = &self->test_tree;
    int32_t text_len = smaller(TEXT_LEN, engine->max_len / 2);
    int32_t nodes = smaller(smaller(TREE_NODES, engine->nodes_max), engine->max_len - text_len);
    int rc = arrays_take(self, text_len, nodes);
    if (rc != 0) {
        return rc;
    }
    self->test_text_len = text_len;
    for (int32_t i = 0; i < text_len; i++) {
        self->test_text[i] = (int32_t)(((int64_t)i * 37 + 11) % engine->vocab);
    }
    for (int32_t done = 0; done < text_len;) {
        done += slice_next(engine, done, text_len);
        self->test_slices[self->test_slice_count++] = done - 1;
    }
    tree->count = nodes;
    for (int32_t i = 0; i < nodes; i++) {
        tree->tokens[i] = (int32_t)(((int64_t)i * 53 + 7) % engine->vocab);
        tree->parents[i] = tree_parents[i];
        tree->depths[i] = i == 0 ? 0 : tree->depths[tree_parents[i]] + 1;
        tree->depth = tree->depths[i] > tree->depth ? tree->depths[i] : tree->depth;
    }
    return engine->ops->context_open(engine, &self->test_context);
}

/* Rows for the text, committed once prefill has written them, and for the tree. */
static int rows_take(struct tv_verify_engine *self)
{
    struct tv_engine *engine = &self->engine;
    struct tv_cache_seq *seq = &self->test_context->seq;
    struct tv_cache_shortage shortage;
    int rc = 0;
    if (self->test_text_len > 0) {
        rc = tv_cache_reserve(engine->cache, seq, self->test_text_len, &shortage);
        if (rc == 0) {
            rc = text_run(self, self->test_logits);
        }
        if (rc == 0) {
            rc = tv_cache_commit(engine->cache, seq, NULL, self->test_text_len);
        }
    }
    return rc != 0 ? rc : tv_cache_reserve(engine->cache, seq, self->test_tree.count, &shortage);
}

/* The same text and tree as they are served, in the place of those that were judged. */
static int served_run(struct tv_verify_engine *self, char *detail, size_t detail_bytes)
{
    struct tv_engine *engine = &self->engine;
    float *exact = self->test_logits, *served = self->test_repeat;
    tv_model_products_set(engine->model, tv_model_options(engine->model)->products);
    int rc = text_run(self, served);
    if (rc == 0) {
        rc = tree_run(self, NULL, tree_logits(self, served));
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "self-test: %s", strerror(-rc));
        return rc;
    }
    /* random weights of many layers amplify whatever differs, and nobody relies on them */
    int bounded = !tv_model_options(engine->model)->synthetic;
    rc = tv_engine_rounding_measure(exact, served, logit_rows(self), engine->vocab, bounded,
                                    &engine->rounding, detail, detail_bytes);
    self->test_logits = served;
    self->test_repeat = exact;
    if (rc == 0 && self->test_judged && engine->noise < engine->rounding.logit_max) {
        engine->noise = engine->rounding.logit_max;
    }
    return rc;
}

int tv_engine_self_test_start(struct tv_verify_engine *self, const struct tv_judge *judge,
                              char *detail, size_t detail_bytes)
{
    struct tv_engine *engine = &self->engine;
    int is_exact = tv_model_options(engine->model)->products == TV_PRODUCTS_EXACT;
    struct tv_engine_layer_check check = {
        .kernels = engine->kernels, .judge = judge, .detail = detail, .detail_bytes = detail_bytes};
    (void)snprintf(detail, detail_bytes, "self-test");
    tv_model_products_set(engine->model, TV_PRODUCTS_EXACT);
    int rc = test_take(self);
    if (rc == 0) {
        rc = rows_take(self);
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "self-test: no room: %s", strerror(-rc));
        return rc;
    }
    check.rows = self->test_tree.count;
    check.kv_len = self->test_text_len + self->test_tree.count;
    rc = tree_run(self, &check, tree_logits(self, self->test_logits));
    if (rc != 0 && (check.rc != -EIO || judge == NULL)) {
        return rc;
    }
    const struct tv_self_test_run run = {.text = self->test_text,
                                         .text_len = self->test_text_len,
                                         .text_rows = self->test_slices,
                                         .text_count = self->test_slice_count,
                                         .text_logits = self->test_logits,
                                         .tree = &self->test_tree,
                                         .tree_logits = tree_logits(self, self->test_logits)};
    if (rc != 0) { /* attention is not the naive kernel's; a model without numbers explains that */
        char other[DETAIL_BYTES] = "";
        if (judge->judge(judge->context, &run, &engine->noise, other, sizeof other) == -EDOM) {
            (void)snprintf(detail, detail_bytes, "%s", other);
            rc = -EDOM;
        }
        return rc;
    }
    self->test_judged = judge != NULL;
    if (judge != NULL) {
        rc = judge->judge(judge->context, &run, &engine->noise, detail, detail_bytes);
    }
    if (rc == 0 && !is_exact) {
        rc = served_run(self, detail, detail_bytes);
    }
    if (rc == 0) {
        logits_sum(self, self->test_logits, self->test_sum);
        rc = tv_engine_self_test_repeat(self, detail, detail_bytes);
    }
    return rc;
}

int tv_engine_self_test_repeat(struct tv_verify_engine *self, char *detail, size_t detail_bytes)
{
    size_t vocab = (size_t)self->engine.vocab;
    uint8_t sum[32];
    float *logits = self->test_repeat;
    int rc = text_run(self, logits);
    if (rc == 0) {
        rc = tree_run(self, NULL, tree_logits(self, logits));
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "self-test: %s", strerror(-rc));
        return rc;
    }
    logits_sum(self, logits, sum);
    if (memcmp(sum, self->test_sum, sizeof sum) == 0) {
        (void)snprintf(detail, detail_bytes,
                       "%d rows of prefill, %d of verify: bit-identical to the start%s",
                       self->test_slice_count, self->test_tree.count,
                       !self->test_judged               ? ""
                       : self->engine.rounding.rows > 0 ? ", whose exact products the path oracle "
                                                          "judged"
                                                        : ", which the path oracle judged");
        return 0;
    }
    for (int32_t i = 0; i < logit_rows(self); i++) {
        size_t start = (size_t)i * vocab;
        if (memcmp(logits + start, self->test_logits + start, vocab * sizeof *logits) != 0) {
            int verify = i >= self->test_slice_count;
            (void)snprintf(detail, detail_bytes, "self-test: logits of %s row %d differ",
                           verify ? "verify" : "prefill",
                           verify ? i - self->test_slice_count : self->test_slices[i]);
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
    tv_tree_finish(&self->test_tree);
    free(self->test_text);
    free(self->test_slices);
    free(self->test_logits);
    free(self->test_repeat);
}
