/*
 * fixed_engine.c - an engine with fixed answers: no weights, no device, the protocol only.
 *
 * Owns its contexts' lengths and the answer arrays. Refuses what the real engine refuses: too many
 * nodes, positions over the limit, tokens outside the vocabulary.
 */
#include "fixed_impl.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "fixed_pages.h"
#include "verify/walk.h"

/* Raw logit of the fixed token; every other token t has -t / 1000. */
#define FIXED_LOGIT 10.0f

static float base_logit(int32_t token)
{
    return -0.001f * (float)token;
}

int32_t tv_fixed_engine_token(const struct tv_engine *engine, int32_t position)
{
    return (int32_t)((7 * (int64_t)position + 3) % engine->vocab);
}

static struct tv_draw fixed_draw(const struct fixed_engine *fixed, int32_t position)
{
    int32_t token = tv_fixed_engine_token(&fixed->engine, position);
    double sum = fixed->base_sum - exp((double)base_logit(token)) + exp((double)FIXED_LOGIT);
    float second = base_logit(token == 0 ? 1 : 0);
    return (struct tv_draw){.token = token,
                            .margin = FIXED_LOGIT - second,
                            .logprob = (float)((double)FIXED_LOGIT - log(sum)),
                            .kept = fixed->engine.vocab};
}

/* Wait while held; the planned failure of this call, or TV_OK. */
static enum tv_code enter(struct fixed_engine *fixed)
{
    enum tv_code code = TV_OK;
    (void)pthread_mutex_lock(&fixed->lock); /* cannot fail: a plain mutex we initialised */
    fixed->inside = 1;
    (void)pthread_cond_broadcast(&fixed->changed);
    while (fixed->held) {
        (void)pthread_cond_wait(&fixed->changed, &fixed->lock);
    }
    fixed->inside = 0;
    if (fixed->lost) {
        code = TV_KERNEL_FAULT;
    } else if (fixed->fail_count > 0) {
        fixed->fail_count--;
        code = fixed->fail_code;
    }
    (void)pthread_mutex_unlock(&fixed->lock);
    return code;
}

static int is_lost(struct tv_engine *engine)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    int lost = fixed->lost;
    (void)pthread_mutex_unlock(&fixed->lock);
    return lost;
}

/* Rows are to be moved: wait while that is held. 1: the device is lost. */
static int move_enter(struct tv_engine *engine)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    (void)pthread_mutex_lock(&fixed->lock);
    while (fixed->moves_held) {
        (void)pthread_cond_wait(&fixed->changed, &fixed->lock);
    }
    int lost = fixed->lost;
    (void)pthread_mutex_unlock(&fixed->lock);
    return lost;
}

/* What a call of this context may be: in the middle of a slice only what verify.h says, and of
 * another one than the slice's. */
static void check_place(const struct tv_engine *engine, const struct tv_context *context,
                        int is_of_rounds)
{
    const struct tv_context *sliced = ((const struct fixed_engine *)engine)->sliced;
    assert(sliced == NULL || (is_of_rounds && context != sliced));
}

static int fixed_context_open(struct tv_engine *engine, struct tv_context **ret_context)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    struct tv_context *context = calloc(1, sizeof *context);
    check_place(engine, NULL, 0);
    if (context == NULL) {
        return -ENOMEM;
    }
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->contexts++;
    (void)pthread_mutex_unlock(&fixed->lock);
    *ret_context = context;
    return 0;
}

static void fixed_context_close(struct tv_engine *engine, struct tv_context *context)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    if (context == NULL) {
        return;
    }
    check_place(engine, context, 1);
    if (engine->cache != NULL) { /* first: who counts contexts finds their pages given back */
        tv_cache_seq_finish(engine->cache, &context->seq);
    }
    (void)pthread_mutex_lock(&fixed->lock);
    fixed->contexts--;
    (void)pthread_mutex_unlock(&fixed->lock);
    free(context);
}

static int32_t fixed_context_len(const struct tv_context *context)
{
    return context->len;
}

static int fixed_truncate(struct tv_engine *engine, struct tv_context *context, int32_t len)
{
    check_place(engine, context, 1);
    if (len < 0 || len > context->len) {
        return -EINVAL;
    }
    if (move_enter(engine)) {
        return -ENOTRECOVERABLE;
    }
    int rc = tv_fixed_rows_settle(engine, context, NULL, 0);
    if (rc == 0 && engine->cache != NULL) {
        rc = tv_cache_truncate(engine->cache, &context->seq, len);
    }
    context->len = len;
    return rc;
}

static int fixed_settle(struct tv_engine *engine, struct tv_context *context, const int32_t *nodes,
                        int32_t count)
{
    check_place(engine, context, 1);
    if (move_enter(engine)) {
        return -ENOTRECOVERABLE;
    }
    for (int32_t i = 0; i < count; i++) {
        if (nodes[i] >= context->scratch || (i > 0 && nodes[i] <= nodes[i - 1])) {
            return -EINVAL;
        }
    }
    return tv_fixed_rows_settle(engine, context, nodes, count);
}

static int fixed_fork(struct tv_engine *engine, const struct tv_context *context, int32_t len,
                      struct tv_context **ret_context)
{
    check_place(engine, context, 0);
    if (len < 0 || len > context->len) {
        return -EINVAL;
    }
    if (move_enter(engine)) {
        return -ENOTRECOVERABLE;
    }
    struct tv_context *fork = NULL;
    int rc = fixed_context_open(engine, &fork);
    if (rc == 0 && engine->cache != NULL) {
        rc = tv_cache_fork(engine->cache, &context->seq, len, &fork->seq);
    }
    if (rc != 0) {
        fixed_context_close(engine, fork);
        return rc;
    }
    fork->len = len;
    *ret_context = fork;
    return 0;
}

static void fixed_publish(struct tv_engine *engine, struct tv_context *context, int32_t first,
                          const struct tv_cache_key *keys, int32_t count)
{
    check_place(engine, context, 1);
    tv_cache_publish(engine->cache, &context->seq, first, keys, count);
}

/* Known tokens; `between`: it can be interrupted. As the engine's prefill. */
static int tokens_append(struct tv_engine *engine, struct tv_context *context,
                         const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                         struct tv_drawn *ret_drawn, struct tv_cache_shortage *ret_shortage,
                         int interruptible)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    check_place(engine, context, 0);
    if (count < 1 || count > engine->prefill_rows || context->len > engine->max_len - count) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= engine->vocab) {
            return -EINVAL;
        }
    }
    int rc = tv_fixed_rows_write(engine, context, tokens, count, ret_shortage);
    if (rc != 0) {
        return rc;
    }
    enum tv_code code = enter(fixed);
    if (code != TV_OK) {
        *ret_shortage = (struct tv_cache_shortage){.pages_needed = 2, .pages_free = 1};
        (void)tv_fixed_rows_settle(engine, context, NULL, 0); /* giving back cannot fail */
        return code == TV_KV_FULL         ? -ENOSPC
               : code == TV_NUMERIC_FAULT ? -EDOM
               : is_lost(engine)          ? -ENOTRECOVERABLE
                                          : -EIO;
    }
    if (interruptible && engine->between != NULL) {
        fixed->sliced = context;
        engine->between(engine->between_context);
        fixed->sliced = NULL;
    }
    rc = tv_fixed_rows_prefilled(engine, context, count);
    if (rc != 0) {
        return rc;
    }
    if (rule != NULL) {
        struct tv_draw draw = fixed_draw(fixed, context->len);
        ret_drawn->token = draw.token;
        ret_drawn->finish = tv_walk_finish(rule, context->len, draw.token);
        ret_drawn->has_margin = 1;
        ret_drawn->margin = draw.margin;
    }
    return 0;
}

static int fixed_prefill(struct tv_engine *engine, struct tv_context *context,
                         const int32_t *tokens, int32_t count, const struct tv_round_rule *rule,
                         struct tv_drawn *ret_drawn, struct tv_cache_shortage *ret_shortage)
{
    return tokens_append(engine, context, tokens, count, rule, ret_drawn, ret_shortage, 1);
}

static int walk_draw(void *context, int32_t node, int32_t position, struct tv_draw *ret_draw)
{
    (void)node;
    *ret_draw = fixed_draw(context, position);
    return 0;
}

/* Rows of raw logits: the base row with the fixed token planted; only what differs is touched. */
static int answer_logits(struct fixed_engine *fixed, struct answer *answer,
                         const struct tv_tree *tree, int32_t len)
{
    size_t vocab = (size_t)fixed->engine.vocab;
    size_t rows = (size_t)fixed->engine.nodes_max;
    if (answer->logits == NULL) {
        answer->logits = malloc(rows * vocab * sizeof *answer->logits);
        if (answer->logits == NULL) {
            return -ENOMEM;
        }
        for (size_t i = 0; i < rows * vocab; i++) {
            answer->logits[i] = base_logit((int32_t)(i % vocab));
        }
    }
    for (int32_t i = 0; i < tree->count; i++) {
        float *row = answer->logits + (size_t)i * vocab;
        if (answer->planted[i] >= 0) {
            row[answer->planted[i]] = base_logit(answer->planted[i]);
        }
        answer->planted[i] = tv_fixed_engine_token(&fixed->engine, len + tree->depths[i] + 1);
        row[answer->planted[i]] = FIXED_LOGIT;
    }
    return 0;
}

static void answer_topk(struct fixed_engine *fixed, struct answer *answer,
                        const struct tv_tree *tree, int32_t len, int32_t top_k)
{
    for (int32_t i = 0; i < tree->count; i++) {
        struct tv_draw draw = fixed_draw(fixed, len + tree->depths[i] + 1);
        int32_t *ids = answer->ids + (size_t)i * (size_t)top_k;
        float *values = answer->values + (size_t)i * (size_t)top_k;
        ids[0] = draw.token;
        values[0] = FIXED_LOGIT;
        for (int32_t k = 1, token = 0; k < top_k; k++, token++) {
            token += token == draw.token ? 1 : 0;
            ids[k] = token;
            values[k] = base_logit(token);
        }
        answer->lse[i] = FIXED_LOGIT - draw.logprob;
    }
}

static void fixed_score(struct fixed_engine *fixed, struct answer *answer,
                        const struct tv_round_in *in, struct tv_round_out *out)
{
    const struct tv_tree *tree = in->tree;
    answer->logprobs[0] = -INFINITY;
    for (int32_t i = 1; i < tree->count; i++) {
        struct tv_draw draw =
            fixed_draw(fixed, in->context->len + tree->depths[tree->parents[i]] + 1);
        float logit = tree->tokens[i] == draw.token ? FIXED_LOGIT : base_logit(tree->tokens[i]);
        answer->logprobs[i] = logit - (FIXED_LOGIT - draw.logprob);
    }
    answer->nodes[0] = 0;
    out->nodes = answer->nodes;
    out->accepted_count = 1;
    out->scores = answer->logprobs;
}

static int fixed_round(struct fixed_engine *fixed, struct answer *answer,
                       const struct tv_round_in *in, struct tv_round_out *out)
{
    if (in->score) {
        fixed_score(fixed, answer, in, out);
        return tv_fixed_rows_settle(&fixed->engine, in->context, NULL, 0);
    }
    int32_t len = in->context->len;
    struct tv_walk_result result = {0};
    int rc = tv_walk_run(in->tree, len, &in->rule, walk_draw, fixed, answer->nodes,
                         answer->logprobs, &result);
    if (rc == 0 && (in->want_logits || in->lend_logits)) {
        rc = answer_logits(fixed, answer, in->tree, len);
        out->logits = answer->logits;
    }
    if (rc != 0) {
        return rc;
    }
    if (in->top_k > 0) {
        answer_topk(fixed, answer, in->tree, len, in->top_k);
        out->topk_ids = answer->ids;
        out->topk_logits = answer->values;
        out->topk_lse = answer->lse;
    }
    out->accepted_count = result.accepted_count;
    out->nodes = answer->nodes;
    out->logprobs = answer->logprobs;
    out->end = result.end;
    if (in->hold) {
        in->context->scratch = in->tree->count;
        return 0;
    }
    if (in->commit) {
        (void)atomic_fetch_add_explicit(&fixed->commits, 1, memory_order_relaxed);
    }
    return tv_fixed_rows_settle(&fixed->engine, in->context, answer->nodes,
                                in->commit ? result.accepted_count : 0);
}

static void slow_down(struct fixed_engine *fixed)
{
    int64_t us = atomic_load_explicit(&fixed->slow_us, memory_order_relaxed);
    struct timespec left = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    while (us > 0 && nanosleep(&left, &left) != 0) {
        /* a signal came: the rest of the time is in left */
    }
}

static int verify_one(struct fixed_engine *fixed, struct answer *answer,
                      const struct tv_round_in *in, struct tv_round_out *out)
{
    const struct tv_engine *engine = &fixed->engine;
    const struct tv_tree *tree = in->tree;
    if (tree->count < 1 || tree->count > engine->nodes_max || in->top_k > engine->vocab ||
        in->top_k > TV_WANT_TOP_K_MAX || in->context->scratch != 0) {
        return -EINVAL; /* a held round is settled before another runs */
    }
    check_place(engine, in->context, 1);
    int rc = tv_fixed_rows_write(engine, in->context, tree->tokens, tree->count, &out->shortage);
    if (rc != 0 && rc != -ENOSPC) {
        return rc;
    }
    int full = rc == -ENOSPC;
    out->code = enter(fixed);
    if (out->code == TV_KV_FULL) {
        out->shortage = (struct tv_cache_shortage){.pages_needed = 2, .pages_free = 1};
    }
    if (out->code == TV_OK && in->context->len > engine->max_len - 1 - tree->depth) {
        out->code = TV_CONTEXT_FULL;
    }
    if (out->code != TV_OK) {
        (void)snprintf(out->detail, sizeof out->detail, "fixed engine: planned failure");
    } else if (full) {
        out->code = TV_KV_FULL;
        (void)snprintf(out->detail, sizeof out->detail, "no pages for %d rows", tree->count);
    } else {
        rc = fixed_round(fixed, answer, in, out);
    }
    if (!full && (rc != 0 || out->code != TV_OK)) {
        (void)tv_fixed_rows_settle(engine, in->context, NULL, 0); /* giving back cannot fail */
    }
    return full ? 0 : rc;
}

static int fixed_verify(struct tv_engine *engine, const struct tv_round_in *in, int32_t count,
                        struct tv_round_out *out)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    if (count < 1 || count > engine->requests_max) {
        return -EINVAL;
    }
    int64_t start_us = tv_clock_us();
    (void)atomic_fetch_add_explicit(&fixed->launches, 1, memory_order_relaxed);
    slow_down(fixed);
    for (int32_t i = 0; i < count; i++) {
        memset(&out[i], 0, sizeof out[i]);
        int rc = verify_one(fixed, &fixed->answers[i], &in[i], &out[i]);
        if (rc != 0) {
            return rc;
        }
        out[i].device_us = tv_clock_us() - start_us;
    }
    return is_lost(engine) ? -ENOTRECOVERABLE : 0;
}

static int fixed_verify_shared(struct tv_engine *engine, const struct tv_round_in *in,
                               int32_t count, struct tv_round_out *out, struct tv_rider *rider)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    int32_t rows = rider->count;
    check_place(engine, rider->context, 0);
    rider->rc = -EAGAIN;
    for (int32_t i = 0; i < count; i++) {
        rows += in[i].tree->count;
    }
    if (rows > engine->prefill_rows) {
        return -EINVAL;
    }
    int rc = fixed_verify(engine, in, count, out);
    if (rc != 0) {
        rider->rc = rc;
        return rc;
    }
    (void)atomic_fetch_add_explicit(&fixed->shared, 1, memory_order_relaxed);
    rider->rc = tokens_append(engine, rider->context, rider->tokens, rider->count, rider->rule,
                              &rider->drawn, &rider->shortage, 0);
    return 0;
}

static int fixed_self_test(struct tv_engine *engine, char *detail, size_t detail_bytes)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    check_place(engine, NULL, 0);
    (void)pthread_mutex_lock(&fixed->lock);
    int broken = fixed->broken, lost = fixed->lost;
    (void)pthread_mutex_unlock(&fixed->lock);
    (void)snprintf(detail, detail_bytes, broken ? "fixed engine: broken" : "fixed engine");
    return lost ? -ENOTRECOVERABLE : broken ? -EIO : 0;
}

static void fixed_destroy(struct tv_engine *engine)
{
    struct fixed_engine *fixed = (struct fixed_engine *)engine;
    if (fixed == NULL) {
        return;
    }
    tv_cache_destroy(engine->cache);
    if (engine->kernels != NULL) {
        engine->kernels->destroy(engine->kernels);
    }
    for (int32_t i = 0; fixed->answers != NULL && i < engine->requests_max; i++) {
        free(fixed->answers[i].nodes);
        free(fixed->answers[i].logprobs);
        free(fixed->answers[i].logits);
        free(fixed->answers[i].planted);
        free(fixed->answers[i].ids);
        free(fixed->answers[i].values);
        free(fixed->answers[i].lse);
    }
    free(fixed->answers);
    (void)pthread_cond_destroy(&fixed->changed);
    (void)pthread_mutex_destroy(&fixed->lock);
    free(fixed);
}

static const struct tv_engine_ops fixed_ops = {
    .context_open = fixed_context_open,
    .context_close = fixed_context_close,
    .context_len = fixed_context_len,
    .truncate = fixed_truncate,
    .settle = fixed_settle,
    .fork = fixed_fork,
    .adopt = tv_fixed_adopt,
    .publish = fixed_publish,
    .prefill = fixed_prefill,
    .verify = fixed_verify,
    .verify_shared = fixed_verify_shared,
    .self_test = fixed_self_test,
    .context_seq = tv_fixed_engine_seq,
    .restore = tv_fixed_restore,
    .page_read = tv_fixed_page_read,
    .page_write = tv_fixed_page_write,
    .destroy = fixed_destroy,
};

static int answer_init(struct answer *answer, size_t nodes)
{
    answer->nodes = calloc(nodes, sizeof *answer->nodes);
    answer->logprobs = calloc(nodes, sizeof *answer->logprobs);
    answer->planted = calloc(nodes, sizeof *answer->planted);
    answer->ids = calloc(nodes * TV_WANT_TOP_K_MAX, sizeof *answer->ids);
    answer->values = calloc(nodes * TV_WANT_TOP_K_MAX, sizeof *answer->values);
    answer->lse = calloc(nodes, sizeof *answer->lse);
    if (answer->nodes == NULL || answer->logprobs == NULL || answer->planted == NULL ||
        answer->ids == NULL || answer->values == NULL || answer->lse == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < nodes; i++) {
        answer->planted[i] = -1;
    }
    return 0;
}

int tv_fixed_engine_create(const struct tv_fixed_engine_params *params,
                           struct tv_engine **ret_engine)
{
    int32_t rows_max = 0;
    if (__builtin_mul_overflow(params->nodes_max, params->requests_max, &rows_max) ||
        params->vocab < 2 || params->max_len < 2 || params->nodes_max < 1 ||
        params->requests_max < 1 || params->prefill_rows < 1) {
        return -EINVAL;
    }
    struct fixed_engine *fixed = calloc(1, sizeof *fixed);
    if (fixed == NULL) {
        return -ENOMEM;
    }
    fixed->engine = (struct tv_engine){.ops = &fixed_ops,
                                       .vocab = params->vocab,
                                       .max_len = params->max_len,
                                       .nodes_max = params->nodes_max,
                                       .requests_max = params->requests_max,
                                       .rows_max = rows_max,
                                       .prefill_rows = params->prefill_rows,
                                       .rider_rows = params->rider_rows,
                                       .noise = 1e-5};
    (void)pthread_mutex_init(&fixed->lock, NULL); /* neither fails with default attributes */
    (void)pthread_cond_init(&fixed->changed, NULL);
    atomic_init(&fixed->launches, 0);
    atomic_init(&fixed->shared, 0);
    atomic_init(&fixed->commits, 0);
    atomic_init(&fixed->slow_us, 0);
    for (int32_t token = 0; token < params->vocab; token++) {
        fixed->base_sum += exp((double)base_logit(token));
    }
    int rc = tv_fixed_pages_take(&fixed->engine, params);
    fixed->answers = calloc((size_t)params->requests_max, sizeof *fixed->answers);
    if (rc != 0 || fixed->answers == NULL) {
        rc = rc != 0 ? rc : -ENOMEM;
        goto fail;
    }
    for (int32_t i = 0; i < params->requests_max; i++) {
        rc = answer_init(&fixed->answers[i], (size_t)params->nodes_max);
        if (rc != 0) {
            goto fail;
        }
    }
    *ret_engine = &fixed->engine;
    return 0;
fail:
    fixed_destroy(&fixed->engine);
    return rc;
}
