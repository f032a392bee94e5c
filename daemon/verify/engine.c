/*
 * engine.c - the real engine: contexts, verify and commit on a loaded model and its cache.
 *
 * Owns the contexts' sequences and the arrays that answers point into, all taken at start. Refuses
 * rounds one by one: what is wrong with one round leaves the others of the batch alone.
 */
#include "verify/engine.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "verify/walk.h"

/* A device reads the weights for the rounds anyway, and rows up to about so many cost it little
 * more; a processor pays for each. */
#define RIDER_ROWS      128
#define HOST_RIDER_ROWS 32

static int context_open(struct tv_engine *engine, struct tv_context **ret_context)
{
    (void)engine;
    struct tv_context *context = calloc(1, sizeof *context);
    if (context == NULL) {
        return -ENOMEM;
    }
    *ret_context = context;
    return 0;
}

static void context_close(struct tv_engine *engine, struct tv_context *context)
{
    if (context == NULL) {
        return;
    }
    tv_cache_seq_finish(engine->cache, &context->seq);
    free(context);
}

static int32_t context_len(const struct tv_context *context)
{
    return context->seq.len;
}

static int context_truncate(struct tv_engine *engine, struct tv_context *context, int32_t len)
{
    tv_cache_drop(engine->cache, &context->seq); /* of a held round */
    return tv_cache_truncate(engine->cache, &context->seq, len);
}

static int context_settle(struct tv_engine *engine, struct tv_context *context,
                          const int32_t *nodes, int32_t count)
{
    if (count == 0) {
        tv_cache_drop(engine->cache, &context->seq);
        return 0;
    }
    return tv_cache_commit(engine->cache, &context->seq, nodes, count);
}

static int context_adopt(struct tv_engine *engine, struct tv_context *context,
                         const struct tv_cache_key *keys, int32_t count)
{
    return tv_cache_adopt(engine->cache, &context->seq, keys, count);
}

static void context_publish(struct tv_engine *engine, struct tv_context *context, int32_t first,
                            const struct tv_cache_key *keys, int32_t count)
{
    tv_cache_publish(engine->cache, &context->seq, first, keys, count);
}

static int context_fork(struct tv_engine *engine, const struct tv_context *context, int32_t len,
                        struct tv_context **ret_context)
{
    struct tv_context *fork = calloc(1, sizeof *fork);
    if (fork == NULL) {
        return -ENOMEM;
    }
    int rc = tv_cache_fork(engine->cache, &context->seq, len, &fork->seq);
    if (rc != 0) {
        free(fork);
        return rc;
    }
    *ret_context = fork;
    return 0;
}

static const struct tv_cache_seq *context_seq(const struct tv_context *context)
{
    return &context->seq;
}

static int context_restore(struct tv_engine *engine, const struct tv_cache_seq *like,
                           struct tv_context **ret_context, struct tv_cache_shortage *ret_shortage)
{
    struct tv_context *context = calloc(1, sizeof *context);
    if (context == NULL) {
        return -ENOMEM;
    }
    int rc = tv_cache_restore(engine->cache, &context->seq, like, ret_shortage);
    if (rc != 0) {
        context_close(engine, context);
        return rc;
    }
    *ret_context = context;
    return 0;
}

static int page_read(struct tv_engine *engine, int32_t page, void *host)
{
    return tv_cache_page_read(engine->cache, page, host);
}

static int page_write(struct tv_engine *engine, int32_t page, const void *host)
{
    return tv_cache_page_write(engine->cache, page, host);
}

int tv_engine_tokens_check(const struct tv_engine *engine, const int32_t *tokens, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= engine->vocab) {
            return -EINVAL;
        }
    }
    return 0;
}

static void round_refuse(struct tv_round_out *out, enum tv_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static void round_refuse(struct tv_round_out *out, enum tv_code code, const char *format, ...)
{
    va_list args;
    struct tv_cache_shortage shortage = out->shortage;
    memset(out, 0, sizeof *out);
    out->code = code;
    out->shortage = shortage;
    va_start(args, format);
    (void)vsnprintf(out->detail, sizeof out->detail, format, args); /* cut text is still text */
    va_end(args);
}

/* What the callers above should have refused; here it costs this round only, not its batch. */
static int round_check(const struct tv_engine *engine, const struct tv_round_in *in,
                       struct tv_round_out *out)
{
    const struct tv_tree *tree = in->tree;
    int32_t len = in->context->seq.len;
    if (tree->count < 1 || tree->count > engine->nodes_max) {
        round_refuse(out, TV_TREE_TOO_LARGE, "%d nodes, the engine takes %d", tree->count,
                     engine->nodes_max);
        return -EINVAL;
    }
    if (tv_engine_tokens_check(engine, tree->tokens, tree->count) != 0) {
        round_refuse(out, TV_TREE_INVALID, "a token is outside the vocabulary of %d",
                     engine->vocab);
        return -EINVAL;
    }
    for (int32_t i = 0; i < tree->count; i++) {
        if (len > engine->max_len - 1 - tree->depths[i]) {
            round_refuse(out, TV_CONTEXT_FULL, "node %d: position %lld, the limit is %d", i,
                         (long long)len + tree->depths[i], engine->max_len);
            return -EINVAL;
        }
    }
    if (in->want_hidden &&
        tv_engine_hidden_width((const struct tv_verify_engine *)engine, in->project) == 0) {
        round_refuse(out, TV_WRONG_VALUE, "no hidden rows are handed out");
        return -EINVAL;
    }
    if (in->top_k < 0 || in->top_k > TV_WANT_TOP_K_MAX || in->top_k > engine->vocab) {
        round_refuse(out, TV_WRONG_VALUE, "top_k %d", in->top_k);
        return -EINVAL;
    }
    return 0;
}

/* Reserve rows for every round that can run; returns how many slots the launch has. *ret_rc: what
 * the device said, when that is what kept one from it. */
static int32_t rounds_admit(struct tv_verify_engine *self, const struct tv_round_in *in,
                            int32_t count, struct tv_round_out *out, int *ret_rc)
{
    struct tv_engine *engine = &self->engine;
    int32_t slot_count = 0;
    int32_t rows = 0;
    for (int32_t i = 0; i < count; i++) {
        memset(&out[i], 0, sizeof out[i]);
        if (round_check(engine, &in[i], &out[i]) != 0) {
            continue;
        }
        const struct tv_tree *tree = in[i].tree;
        int rc =
            tv_cache_reserve(engine->cache, &in[i].context->seq, tree->count, &out[i].shortage);
        if (rc != 0) {
            *ret_rc = rc == -EIO || rc == -ENOTRECOVERABLE ? rc : *ret_rc;
            round_refuse(&out[i],
                         rc == -ENOSPC   ? TV_KV_FULL
                         : rc == -ENOMEM ? TV_OVERLOADED
                         : rc == -EINVAL ? TV_INTERNAL
                                         : TV_KERNEL_FAULT,
                         "%d rows for the tree: %s", tree->count, strerror(-rc));
            continue;
        }
        self->slots[slot_count] =
            (struct tv_engine_slot){.round = i, .row_start = rows, .rows = tree->count};
        self->items[slot_count] = (struct tv_model_item){.seq = &in[i].context->seq,
                                                         .rows = tree->count,
                                                         .tokens = tree->tokens,
                                                         .parents = tree->parents,
                                                         .depths = tree->depths};
        rows += tree->count;
        slot_count++;
    }
    return slot_count;
}

static void hook_fan(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    const struct tv_engine_fan *fan = context;
    for (int32_t s = 0; s < fan->slot_count; s++) {
        const struct tv_engine_slot *slot = &fan->slots[s];
        const struct tv_round_in *in = &fan->in[slot->round];
        if (in->hook != NULL) {
            struct tv_verify_attn slice =
                tv_engine_attn_slice(attn, s, slot->row_start, slot->rows);
            in->hook(in->hook_context, layer, &slice);
        }
    }
}

/* The pass, and the draws. *ret_us: their time on a device, or that of the call where the backend
 * has no other. rider: NULL, or admitted. */
static int launch(struct tv_verify_engine *self, const struct tv_round_in *in, int32_t slot_count,
                  const struct tv_rider *rider, const float **ret_logits, int64_t *ret_us)
{
    struct tv_engine_fan fan = {.in = in, .slots = self->slots, .slot_count = slot_count};
    struct tv_kernels *kernels = self->engine.kernels;
    int64_t start_us = tv_clock_us();
    struct tv_model_rider tokens = {0};
    int hooked = 0, tapped = 0;
    double device_us = -1.0;
    for (int32_t s = 0; s < slot_count; s++) {
        hooked |= in[self->slots[s].round].hook != NULL;
        tapped |= in[self->slots[s].round].want_hidden;
    }
    if (rider != NULL) {
        tapped |= rider->hidden.rows > 0;
        tokens = (struct tv_model_rider){.seq = &rider->context->seq,
                                         .tokens = rider->tokens,
                                         .count = rider->count,
                                         .draws = rider->rule != NULL};
    }
    tv_model_taps_set(self->engine.model, tapped);
    int rc = tv_model_verify_shared(self->engine.model, self->engine.cache, self->items, slot_count,
                                    rider != NULL ? &tokens : NULL, hooked ? hook_fan : NULL, &fan,
                                    ret_logits);
    if (rc == 0) {
        rc = tv_engine_draw_slots(self, in, slot_count, *ret_logits);
    }
    if (rc == 0) {
        rc = kernels->sync(kernels);
    }
    if (rc == 0 && kernels->timer_read != NULL) {
        rc = kernels->timer_read(kernels, &device_us);
    }
    *ret_us = device_us >= 0.0 ? (int64_t)(device_us + 0.5) : tv_clock_us() - start_us;
    return rc;
}

/* Keep the accepted rows, or move them only to be looked at. */
static int rows_commit(struct tv_cache *cache, const struct tv_round_in *in,
                       const struct tv_round_out *out)
{
    struct tv_cache_seq *seq = &in->context->seq;
    int32_t len = seq->len;
    int rc = tv_cache_commit(cache, seq, out->nodes, out->accepted_count);
    if (rc == 0 && in->committed != NULL) {
        in->committed(in->hook_context, seq, out->nodes, out->accepted_count);
    }
    if (rc == 0 && !in->commit) {
        rc = tv_cache_truncate(cache, seq, len);
    }
    return rc;
}

/* Answer one launched round, then commit it or give its rows back. */
static int round_settle(struct tv_verify_engine *self, const struct tv_engine_slot *slot,
                        const struct tv_round_in *in, const float *logits, struct tv_round_out *out)
{
    struct tv_cache *cache = self->engine.cache;
    int rc = tv_engine_answer(self, slot, in, logits, out);
    if (rc == 0 && (in->commit || in->committed != NULL)) {
        rc = rows_commit(cache, in, out);
    } else if (rc != 0 || !in->hold) {
        tv_cache_drop(cache, &in->context->seq);
    }
    if (rc == -EDOM) {
        round_refuse(out, TV_NUMERIC_FAULT, "a logit of a row in use is not finite");
        return 0;
    }
    if (rc != 0) {
        round_refuse(out, TV_KERNEL_FAULT, "after the pass: %s", strerror(-rc));
    }
    return rc;
}

static int engine_verify_shared(struct tv_engine *engine, const struct tv_round_in *in,
                                int32_t count, struct tv_round_out *out, struct tv_rider *rider)
{
    struct tv_verify_engine *self = (struct tv_verify_engine *)engine;
    if (rider != NULL) {
        rider->rc = -EAGAIN;
    }
    if (count < 1 || count > engine->requests_max) {
        return -EINVAL;
    }
    int64_t rows = 0;
    for (int32_t i = 0; i < count; i++) {
        rows += in[i].tree->count > 0 ? in[i].tree->count : 0;
    }
    if (rows > engine->rows_max) {
        return -EINVAL;
    }
    int64_t device_us = 0;
    int first_rc = 0;
    int32_t slot_count = rounds_admit(self, in, count, out, &first_rc);
    if (slot_count == 0) {
        return first_rc;
    }
    const struct tv_engine_slot *last = &self->slots[slot_count - 1];
    int32_t tree_rows = last->row_start + last->rows;
    int rides = rider != NULL && tv_engine_rider_admit(self, rider, tree_rows);
    const float *logits = NULL;
    int rc = launch(self, in, slot_count, rides ? rider : NULL, &logits, &device_us);
    first_rc = rc != 0 ? rc : first_rc;
    for (int32_t s = 0; s < slot_count; s++) {
        const struct tv_engine_slot *slot = &self->slots[s];
        const struct tv_round_in *round = &in[slot->round];
        struct tv_round_out *answer = &out[slot->round];
        if (rc != 0) {
            tv_cache_drop(engine->cache, &round->context->seq);
            round_refuse(answer, TV_KERNEL_FAULT, "the pass failed: %s", strerror(-rc));
            continue;
        }
        int settle_rc = round_settle(self, slot, round, logits, answer);
        first_rc = first_rc != 0 ? first_rc : settle_rc;
        answer->device_us = device_us;
    }
    if (rides) { /* last: its draw takes the place of a round's */
        const float *row = rc == 0 ? logits + (int64_t)tree_rows * engine->vocab : NULL;
        tv_engine_rider_settle(self, rider, rc, tree_rows, row);
        rider->device_us = device_us;
    }
    return first_rc;
}

static int engine_verify(struct tv_engine *engine, const struct tv_round_in *in, int32_t count,
                         struct tv_round_out *out)
{
    return engine_verify_shared(engine, in, count, out, NULL);
}

double tv_engine_near_tie(const struct tv_engine *engine)
{
    return 2.0 * engine->noise;
}

static int engine_self_test(struct tv_engine *engine, char *detail, size_t detail_bytes)
{
    return tv_engine_self_test_repeat((struct tv_verify_engine *)engine, detail, detail_bytes);
}

static int engine_progress(const struct tv_engine *engine, uint64_t *ret_steps)
{
    const struct tv_kernels *kernels = engine->kernels;
    if (kernels->progress == NULL) {
        return 0;
    }
    const struct tv_verify_engine *self = (const struct tv_verify_engine *)engine;
    *ret_steps =
        kernels->progress(kernels) + atomic_load_explicit(&self->rule_steps, memory_order_relaxed);
    return 1;
}

static void device_free(struct tv_kernels *kernels, void *device)
{
    if (device != NULL) {
        kernels->free(kernels, device);
    }
}

static void engine_destroy(struct tv_engine *engine)
{
    struct tv_verify_engine *self = (struct tv_verify_engine *)engine;
    if (self == NULL) {
        return;
    }
    struct tv_kernels *kernels = engine->kernels;
    tv_engine_self_test_finish(self);
    if (!kernels->host_memory) {
        free(self->host_topk_ids);
        free(self->host_topk_values);
        free(self->host_topk_lse);
        free(self->host_logits);
    }
    device_free(kernels, self->device_positions);
    device_free(kernels, self->device_sampling);
    device_free(kernels, self->device_draws);
    device_free(kernels, self->draw_workspace);
    device_free(kernels, self->device_topk_ids);
    device_free(kernels, self->device_topk_values);
    device_free(kernels, self->device_topk_lse);
    free(self->host_positions);
    free(self->host_sampling);
    free(self->host_draws);
    free(self->items);
    free(self->slots);
    free(self->nodes);
    free(self->logprobs);
    free(self->scores);
    free(self->rule_keys);
    free(self->rule_ids);
    free(self->rule_probs);
    free(self->rule_target);
    free(self->rule_left);
    free(self->rule_draft);
    free(self);
}

static const struct tv_engine_ops engine_ops = {
    .context_open = context_open,
    .context_close = context_close,
    .context_len = context_len,
    .truncate = context_truncate,
    .settle = context_settle,
    .fork = context_fork,
    .adopt = context_adopt,
    .publish = context_publish,
    .context_seq = context_seq,
    .restore = context_restore,
    .page_read = page_read,
    .page_write = page_write,
    .prefill = tv_engine_prefill,
    .prefill_hidden = tv_engine_prefill_hidden,
    .verify = engine_verify,
    .verify_shared = engine_verify_shared,
    .self_test = engine_self_test,
    .progress = engine_progress,
    .destroy = engine_destroy,
};

/* Arrays of draws: one row on host memory, every row of a launch elsewhere. */
static int draw_arrays_take(struct tv_verify_engine *self)
{
    struct tv_kernels *kernels = self->engine.kernels;
    self->draw_rows = kernels->host_memory ? 1 : self->engine.rows_max;
    size_t rows = (size_t)self->draw_rows;
    struct tv_draw_args args = {.rows = self->draw_rows, .vocab = self->engine.vocab};
    self->draw_workspace_bytes = kernels->draw_workspace(kernels, &args);
    if (self->draw_workspace_bytes > 0) {
        self->draw_workspace = kernels->alloc(kernels, self->draw_workspace_bytes);
    }
    self->device_positions = kernels->alloc(kernels, rows * sizeof *self->device_positions);
    self->device_sampling = kernels->alloc(kernels, rows * sizeof *self->device_sampling);
    self->device_draws = kernels->alloc(kernels, rows * sizeof *self->device_draws);
    self->host_positions = calloc(rows, sizeof *self->host_positions);
    self->host_sampling = calloc(rows, sizeof *self->host_sampling);
    self->host_draws = calloc(rows, sizeof *self->host_draws);
    int missing = (self->draw_workspace == NULL && self->draw_workspace_bytes > 0) ||
                  self->device_positions == NULL || self->device_sampling == NULL ||
                  self->device_draws == NULL || self->host_positions == NULL ||
                  self->host_sampling == NULL || self->host_draws == NULL;
    return missing ? -ENOMEM : 0;
}

static int answer_arrays_take(struct tv_verify_engine *self)
{
    struct tv_kernels *kernels = self->engine.kernels;
    size_t rows = (size_t)self->engine.rows_max;
    size_t picks = rows * TV_WANT_TOP_K_MAX;
    self->nodes = calloc(rows, sizeof *self->nodes);
    self->logprobs = calloc(rows, sizeof *self->logprobs);
    self->scores = calloc(rows, sizeof *self->scores);
    self->items = calloc((size_t)self->engine.requests_max, sizeof *self->items);
    self->slots = calloc((size_t)self->engine.requests_max, sizeof *self->slots);
    self->device_topk_ids = kernels->alloc(kernels, picks * sizeof *self->device_topk_ids);
    self->device_topk_values = kernels->alloc(kernels, picks * sizeof *self->device_topk_values);
    self->device_topk_lse = kernels->alloc(kernels, rows * sizeof *self->device_topk_lse);
    if (kernels->host_memory) {
        self->host_topk_ids = self->device_topk_ids;
        self->host_topk_values = self->device_topk_values;
        self->host_topk_lse = self->device_topk_lse;
    } else {
        self->host_topk_ids = calloc(picks, sizeof *self->host_topk_ids);
        self->host_topk_values = calloc(picks, sizeof *self->host_topk_values);
        self->host_topk_lse = calloc(rows, sizeof *self->host_topk_lse);
        self->host_logits = calloc(rows * (size_t)self->engine.vocab, sizeof *self->host_logits);
        if (self->host_logits == NULL) {
            return -ENOMEM;
        }
    }
    int missing = self->nodes == NULL || self->logprobs == NULL || self->scores == NULL ||
                  self->items == NULL || self->slots == NULL || self->host_topk_ids == NULL ||
                  self->host_topk_values == NULL || self->host_topk_lse == NULL ||
                  self->device_topk_ids == NULL || self->device_topk_values == NULL ||
                  self->device_topk_lse == NULL;
    return missing ? -ENOMEM : 0;
}

/* For one row at a time of the rules that look at whole rows. */
static int rule_arrays_take(struct tv_verify_engine *self)
{
    size_t vocab = (size_t)self->engine.vocab;
    self->rule_keys = calloc(vocab, sizeof *self->rule_keys);
    self->rule_ids = calloc(vocab, sizeof *self->rule_ids);
    self->rule_probs = calloc(vocab, sizeof *self->rule_probs);
    self->rule_target = calloc(vocab, sizeof *self->rule_target);
    self->rule_left = calloc(vocab, sizeof *self->rule_left);
    self->rule_draft = calloc(vocab, sizeof *self->rule_draft);
    int missing = self->rule_keys == NULL || self->rule_ids == NULL || self->rule_probs == NULL ||
                  self->rule_target == NULL || self->rule_left == NULL || self->rule_draft == NULL;
    return missing ? -ENOMEM : 0;
}

int tv_verify_engine_create(struct tv_kernels *kernels, struct tv_model *model,
                            struct tv_cache *cache, const struct tv_judge *judge,
                            struct tv_engine **ret_engine, char *detail, size_t detail_bytes)
{
    const struct tv_model_options *options = tv_model_options(model);
    struct tv_verify_engine *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return -ENOMEM;
    }
    int32_t rows_max = options->rows_max;
    self->engine =
        (struct tv_engine){.ops = &engine_ops,
                           .vocab = tv_model_config(model)->vocab,
                           .max_len = options->max_len,
                           .nodes_max = rows_max < TV_TREE_NODES_MAX ? rows_max : TV_TREE_NODES_MAX,
                           .requests_max = options->requests_max,
                           .rows_max = rows_max,
                           .prefill_rows = options->prefill_rows,
                           .rider_rows = kernels->host_memory ? HOST_RIDER_ROWS : RIDER_ROWS,
                           .model = model,
                           .cache = cache,
                           .kernels = kernels};
    self->page_size = tv_cache_params(cache)->page_size;
    atomic_init(&self->rule_steps, 0);
    int rc = draw_arrays_take(self);
    if (rc == 0) {
        rc = answer_arrays_take(self);
    }
    if (rc == 0) {
        rc = rule_arrays_take(self);
    }
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "no memory for %d rows", rows_max);
        goto fail;
    }
    rc = tv_model_record(model, cache);
    if (rc != 0) {
        (void)snprintf(detail, detail_bytes, "recording the passes: %s", strerror(-rc));
        goto fail;
    }
    rc = tv_engine_self_test_start(self, judge, detail, detail_bytes);
    if (rc != 0) {
        goto fail;
    }
    if (kernels->allocations != NULL) {
        self->engine.allocations_start = kernels->allocations(kernels);
    }
    *ret_engine = &self->engine;
    return 0;
fail:
    engine_destroy(&self->engine);
    return rc;
}
