/*
 * shadow.c - which rounds are judged, the bounded queue, the thread that judges them, the totals.
 *
 * Owns the thread and its reference backend. Refuses to delay the worker: what does not fit the
 * queue's bytes is dropped and counted as skipped.
 */
#include "shadow/shadow.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/background.h"
#include "base/clock.h"
#include "shadow/device.h"

/* A counter-based choice: round number and purpose to [0, 1), the same in every run. */
static double sample_at(uint64_t number, uint64_t purpose)
{
    uint64_t x = number * UINT64_C(0x9e3779b97f4a7c15) + purpose;
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    x ^= x >> 31;
    return (double)(x >> 11) * 0x1p-53;
}

void tv_shadow_count(struct tv_shadow *shadow, enum tv_shadow_verdict verdict)
{
    pthread_mutex_lock(&shadow->lock);
    shadow->exact += verdict == TV_SHADOW_EXACT;
    shadow->near_tie += verdict == TV_SHADOW_NEAR_TIE;
    shadow->violation += verdict == TV_SHADOW_VIOLATION;
    shadow->skipped += verdict == TV_SHADOW_SKIPPED;
    pthread_mutex_unlock(&shadow->lock);
}

int tv_shadow_stopping(const struct tv_shadow *shadow)
{
    return atomic_load_explicit(&shadow->stopping, memory_order_relaxed);
}

struct tv_shadow_round *tv_shadow_begin(struct tv_shadow *shadow, enum tv_shadow_why why)
{
    uint64_t number = shadow->rounds_seen++;
    int wanted = why != TV_SHADOW_SAMPLED || sample_at(number, 1) < shadow->params.probability;
    int want_path =
        why != TV_SHADOW_ON_DEMAND && sample_at(number, 2) < shadow->params.path_probability;
    if (!wanted && !want_path) {
        return NULL;
    }
    struct tv_shadow_round *round = NULL;
    if (shadow->model != NULL && shadow->cache != NULL) {
        round = calloc(1, sizeof *round);
    }
    if (round == NULL) {
        tv_shadow_count(shadow, TV_SHADOW_SKIPPED);
        return NULL;
    }
    round->shadow = shadow;
    round->cache = shadow->cache;
    round->config = tv_model_config(shadow->model);
    round->want_kernel = wanted;
    round->want_path = want_path;
    round->on_demand = why == TV_SHADOW_ON_DEMAND;
    round->sampled = why == TV_SHADOW_SAMPLED;
    atomic_init(&round->lost, 0);
    round->layer_count = round->config->layers;
    /* the path oracle's rows come to the host */
    round->on_device = shadow->device != NULL && wanted && !want_path && !round->on_demand;
    return round;
}

void tv_shadow_layer(void *context, int32_t layer, const struct tv_verify_attn *attn)
{
    struct tv_shadow_round *round = context;
    tv_shadow_capture(round->shadow, round, layer, attn);
}

int tv_shadow_wants_path(const struct tv_shadow_round *round)
{
    return round->want_path;
}

static void *take_copy(struct tv_shadow_round *round, const void *data, size_t bytes)
{
    void *copy = tv_shadow_round_take(round, bytes);
    if (copy != NULL && bytes > 0) {
        memcpy(copy, data, bytes);
    }
    return copy;
}

static void draft_copy(struct tv_shadow_round *round, const struct tv_tree *tree)
{
    struct tv_draft *draft = &round->attached.tree.draft;
    size_t cells = (size_t)tree->count * (size_t)tree->draft.width;
    if (tree->draft.ids != NULL) {
        draft->ids = take_copy(round, tree->draft.ids, cells * sizeof *draft->ids);
    }
    draft->probs = take_copy(round, tree->draft.probs, cells * sizeof *draft->probs);
    draft->width = tree->draft.width;
}

void tv_shadow_attach(struct tv_shadow *shadow, struct tv_shadow_round *round,
                      const struct tv_parity_case *parity_case)
{
    struct tv_shadow_attachment *attached = &round->attached;
    const struct tv_tree *tree = parity_case->tree;
    size_t nodes = (size_t)tree->count * sizeof(int32_t);
    size_t accepted = (size_t)parity_case->accepted_count;
    size_t row_bytes = (size_t)round->config->vocab * sizeof(float);
    (void)shadow; /* the round knows whose it is */
    if (round->failed != 0) {
        return;
    }
    attached->rule = parity_case->rule;
    attached->prefix_len = parity_case->prefix_len;
    attached->accepted_count = parity_case->accepted_count;
    attached->pending = parity_case->pending;
    attached->noise = parity_case->noise;
    attached->tree.depth = tree->depth;
    attached->tree.tokens = take_copy(round, tree->tokens, nodes);
    attached->tree.parents = take_copy(round, tree->parents, nodes);
    attached->tree.depths = take_copy(round, tree->depths, nodes);
    attached->accepted_nodes =
        take_copy(round, parity_case->accepted_nodes, accepted * sizeof *attached->accepted_nodes);
    if (parity_case->prefix != NULL) {
        attached->prefix = take_copy(round, parity_case->prefix,
                                     (size_t)parity_case->prefix_len * sizeof *attached->prefix);
    }
    attached->all_rows = round->want_path || parity_case->rule.rule == TV_RULE_TYPICAL;
    if (tree->draft.width > 0) {
        draft_copy(round, tree);
    }
    if (attached->all_rows) {
        attached->logits = take_copy(round, parity_case->logits, (size_t)tree->count * row_bytes);
    } else {
        attached->logits = tv_shadow_round_take(round, accepted * row_bytes);
        for (size_t i = 0; attached->logits != NULL && i < accepted; i++) {
            size_t node = (size_t)parity_case->accepted_nodes[i];
            memcpy(attached->logits + i * (size_t)round->config->vocab,
                   parity_case->logits + node * (size_t)round->config->vocab, row_bytes);
        }
    }
    if (round->failed == 0) {
        attached->tree.count = tree->count;
    }
}

void tv_shadow_submit(struct tv_shadow *shadow, struct tv_shadow_round *round, tv_shadow_done *done,
                      void *done_context)
{
    round->done = done;
    round->done_context = done_context;
    round->next = NULL;
    round->submitted_us = tv_clock_us();
    pthread_mutex_lock(&shadow->lock);
    struct tv_shadow_round **link = shadow->last != NULL ? &shadow->last->next : &shadow->first;
    if (done != NULL) { /* behind those that are waited for, before those that are not */
        link = &shadow->first;
        for (struct tv_shadow_round *other = shadow->first; other != NULL; other = other->next) {
            link = other->done != NULL ? &other->next : link;
        }
    }
    round->next = *link;
    *link = round;
    if (round->next == NULL) {
        shadow->last = round;
    }
    (void)pthread_cond_signal(&shadow->changed); /* cannot fail */
    pthread_mutex_unlock(&shadow->lock);
}

void tv_shadow_abandon(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    if (round != NULL) {
        tv_shadow_count(shadow, TV_SHADOW_SKIPPED);
        tv_shadow_round_free(shadow, round);
    }
}

int tv_shadow_forget(struct tv_shadow *shadow, const void *done_context)
{
    pthread_mutex_lock(&shadow->lock);
    struct tv_shadow_round *round = shadow->judged;
    if (round == NULL || round->done == NULL || round->done_context != done_context) {
        round = shadow->first;
        while (round != NULL && (round->done == NULL || round->done_context != done_context)) {
            round = round->next;
        }
    }
    if (round != NULL) {
        round->done = NULL; /* it keeps its place */
    }
    pthread_mutex_unlock(&shadow->lock);
    return round != NULL;
}

/* Under the lock, so that a forget in between has a before and an after. */
static void round_tell(struct tv_shadow *shadow, struct tv_shadow_round *round,
                       const struct tv_shadow_block *block)
{
    pthread_mutex_lock(&shadow->lock);
    if (round->done != NULL) {
        round->done(round->done_context, block);
        round->done = NULL;
    }
    pthread_mutex_unlock(&shadow->lock);
}

/* Logits of the accepted nodes that were attached. */
static const float *attached_row(void *context, int32_t node)
{
    const struct tv_shadow_round *round = context;
    const struct tv_shadow_attachment *attached = &round->attached;
    size_t vocab = (size_t)round->config->vocab;
    if (attached->all_rows) {
        return attached->logits + (size_t)node * vocab;
    }
    for (int32_t i = 0; i < attached->accepted_count; i++) {
        if (attached->accepted_nodes[i] == node) {
            return attached->logits + (size_t)i * vocab;
        }
    }
    return NULL;
}

static struct tv_parity_case case_of(struct tv_shadow_round *round)
{
    const struct tv_shadow_attachment *attached = &round->attached;
    return (struct tv_parity_case){.prefix = attached->prefix,
                                   .prefix_len = attached->prefix_len,
                                   .tree = &attached->tree,
                                   .rule = attached->rule,
                                   .logits = attached->logits,
                                   .accepted_nodes = attached->accepted_nodes,
                                   .accepted_count = attached->accepted_count,
                                   .pending = attached->pending,
                                   .noise = attached->noise,
                                   .round = round,
                                   .cancelled = {&round->lost}};
}

static void worst_update(struct tv_shadow *shadow, const struct tv_parity_kernel *kernel)
{
    pthread_mutex_lock(&shadow->lock);
    shadow->worst.layers = kernel->layers;
    shadow->worst.max_abs = fmax(shadow->worst.max_abs, kernel->max_abs);
    shadow->worst.max_rel = fmax(shadow->worst.max_rel, kernel->max_rel);
    shadow->worst.rel_l2 = fmax(shadow->worst.rel_l2, kernel->rel_l2);
    pthread_mutex_unlock(&shadow->lock);
}

static enum tv_shadow_verdict round_judge(struct tv_shadow *shadow, struct tv_shadow_round *round,
                                          struct tv_shadow_block *block)
{
    int within = 0;
    if (round->failed != 0 || round->captured != round->layer_count ||
        (round->on_device ? tv_shadow_device_judge(shadow, round, &block->kernel, &within)
                          : tv_shadow_kernel_judge(shadow, round, &block->kernel, &within)) != 0) {
        return TV_SHADOW_SKIPPED;
    }
    block->ran = 1;
    block->tokens_equal = within;
    worst_update(shadow, &block->kernel);
    enum tv_shadow_verdict verdict = within ? TV_SHADOW_EXACT : TV_SHADOW_VIOLATION;
    if (round->attached.tree.count == 0) {
        return verdict;
    }
    struct tv_parity_case parity_case = case_of(round);
    struct tv_shadow_redraw redraw = {0};
    parity_case.noise = fmin(parity_case.noise, TV_SHADOW_DRAW_MARGIN); /* its own logits */
    if (tv_shadow_redraw(round->config->vocab, &parity_case, attached_row, round, &redraw) != 0) {
        block->ran = 0;
        return TV_SHADOW_SKIPPED;
    }
    block->tokens_equal = redraw.accepted_equal && redraw.pending_equal;
    if (!block->tokens_equal && within) {
        verdict = redraw.near_tie ? TV_SHADOW_NEAR_TIE : TV_SHADOW_VIOLATION;
        if (!redraw.near_tie && parity_case.prefix != NULL) {
            tv_shadow_reproduce_path(shadow, &parity_case);
        }
    }
    return verdict;
}

/* One verdict of two: a violation is one, and what was not judged by both was not judged. */
enum tv_shadow_verdict tv_shadow_both(enum tv_shadow_verdict a, enum tv_shadow_verdict b)
{
    if (a == TV_SHADOW_VIOLATION || b == TV_SHADOW_VIOLATION) {
        return TV_SHADOW_VIOLATION;
    }
    return a > b ? a : b;
}

/* Weights in a device's own memory are the worker's to copy. */
static int path_can_run(const struct tv_shadow *shadow, const struct tv_shadow_round *round)
{
    const struct tv_kernels *device = shadow->params.device;
    return round->attached.tree.count > 0 && round->attached.prefix != NULL &&
           (device == NULL || device->host_memory);
}

static void round_run(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    const struct tv_parity_case parity_case = case_of(round);
    if (round->want_kernel) {
        struct tv_shadow_block block = {0};
        enum tv_shadow_verdict verdict = round_judge(shadow, round, &block);
        /* behind it: on a device that is where the committed rows are looked at */
        verdict = tv_shadow_both(verdict, tv_shadow_commit_judge(shadow, round, &parity_case));
        block.tokens_equal = block.tokens_equal && !round->moved_wrong; /* the next ones will not */
        tv_shadow_count(shadow,
                        round->on_demand ? tv_shadow_both(verdict, round->path_verdict) : verdict);
        if (!block.ran) {
            block.skipped = tv_shadow_stopping(shadow) ? "draining" : "queue";
        }
        round_tell(shadow, round, &block);
    }
    if (round->want_path && path_can_run(shadow, round)) {
        struct tv_parity_report report = {0};
        /* counts itself */
        (void)tv_shadow_path_compare(shadow, &parity_case, &report);
    } else if (round->want_path) {
        enum tv_shadow_verdict commit = TV_SHADOW_EXACT;
        if (!round->want_kernel) { /* else it has been judged */
            commit = tv_shadow_commit_judge(shadow, round, &parity_case);
        }
        tv_shadow_count(shadow, tv_shadow_both(TV_SHADOW_SKIPPED, commit));
    }
}

static void *thread_main(void *context)
{
    struct tv_shadow *shadow = context;
    tv_thread_background(); /* live rounds come first; what they wait for is a few stores long */
    pthread_mutex_lock(&shadow->lock);
    for (;;) {
        while (shadow->first == NULL && !tv_shadow_stopping(shadow)) {
            (void)pthread_cond_wait(&shadow->changed, &shadow->lock);
        }
        struct tv_shadow_round *round = shadow->first;
        if (round == NULL) {
            break; /* stopping, and the queue is empty */
        }
        shadow->first = round->next;
        if (shadow->first == NULL) {
            shadow->last = NULL;
        }
        shadow->judged = round;
        int dropped = tv_shadow_stopping(shadow); /* a stop must not wait for a backlog */
        pthread_mutex_unlock(&shadow->lock);
        if (dropped) {
            const struct tv_shadow_block block = {.skipped = "draining"};
            round_tell(shadow, round, &block);
        } else {
            round_run(shadow, round);
        }
        pthread_mutex_lock(&shadow->lock);
        tv_shadow_unpin(shadow, round); /* while a reclaim can see the round */
        shadow->judged = NULL;
        pthread_mutex_unlock(&shadow->lock);
        if (dropped) {
            tv_shadow_abandon(shadow, round);
        } else {
            tv_shadow_round_free(shadow, round);
        }
        pthread_mutex_lock(&shadow->lock);
    }
    pthread_mutex_unlock(&shadow->lock);
    return NULL;
}

/* Signals are main's: the thread is born with all of them blocked. */
static int thread_start(struct tv_shadow *shadow)
{
    sigset_t all, before;
    (void)sigfillset(&all); /* cannot fail */
    int rc = -pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc == 0) {
        rc = -pthread_create(&shadow->thread, NULL, thread_main, shadow);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* it was a valid mask */
    }
    shadow->running = rc == 0;
    return rc;
}

int tv_shadow_create(const struct tv_shadow_params *params, const struct tv_model *model,
                     struct tv_cache *cache, struct tv_shadow **ret_shadow)
{
    struct tv_kernels_options options = {.threads = 1, .cpu_flags_mask = ~UINT64_C(0)};
    struct tv_shadow *shadow = calloc(1, sizeof *shadow);
    if (shadow == NULL) {
        return -ENOMEM;
    }
    shadow->params = *params;
    shadow->params.state_dir = NULL;
    shadow->model = model;
    shadow->cache = cache;
    tv_shadow_pool_init(&shadow->pool, params->queue_bytes_max);
    atomic_init(&shadow->stopping, 0);
    (void)pthread_mutex_init(&shadow->lock, NULL); /* default attributes cannot fail */
    (void)pthread_mutex_init(&shadow->reads_lock, NULL);
    (void)pthread_mutex_init(&shadow->pins_lock, NULL);
    (void)pthread_cond_init(&shadow->changed, NULL);
    int rc = 0;
    if (cache != NULL) {
        shadow->pins = calloc((size_t)tv_cache_params(cache)->pages, sizeof *shadow->pins);
        rc = shadow->pins == NULL ? -ENOMEM : 0;
        tv_cache_reclaim_set(cache, tv_shadow_reclaim, shadow);
    }
    if (rc == 0 && params->state_dir != NULL) {
        shadow->state_dir = strdup(params->state_dir);
        rc = shadow->state_dir == NULL ? -ENOMEM : 0;
    }
    tv_shadow_files_open(&shadow->files, shadow->state_dir);
    if (rc == 0) {
        rc = tv_kernels_create("ref", &options, &shadow->ref);
    }
    if (rc == 0) {
        rc = tv_shadow_device_create(params->judge_there ? params->device : NULL, model, cache,
                                     &shadow->device);
    }
    if (rc == 0) {
        rc = thread_start(shadow);
    }
    if (rc != 0) {
        tv_shadow_destroy(shadow);
        return rc;
    }
    *ret_shadow = shadow;
    return 0;
}

void tv_shadow_destroy(struct tv_shadow *shadow)
{
    if (shadow == NULL) {
        return;
    }
    if (shadow->running) {
        pthread_mutex_lock(&shadow->lock);
        atomic_store_explicit(&shadow->stopping, 1, memory_order_relaxed);
        (void)pthread_cond_signal(&shadow->changed);
        pthread_mutex_unlock(&shadow->lock);
        (void)pthread_join(shadow->thread, NULL); /* it is ours and joinable */
    }
    if (shadow->ref != NULL) {
        shadow->ref->destroy(shadow->ref);
    }
    if (shadow->cache != NULL) {
        tv_cache_reclaim_set(shadow->cache, NULL, shadow);
    }
    tv_shadow_device_destroy(shadow->device);
    tv_shadow_pool_finish(&shadow->pool);
    free(shadow->pins);
    (void)pthread_cond_destroy(&shadow->changed);
    (void)pthread_mutex_destroy(&shadow->pins_lock);
    (void)pthread_mutex_destroy(&shadow->reads_lock);
    (void)pthread_mutex_destroy(&shadow->lock);
    free(shadow->state_dir);
    free(shadow);
}

void tv_shadow_totals(struct tv_shadow *shadow, struct tv_parity_totals *ret_totals,
                      struct tv_parity_violation *violations, int32_t violations_max)
{
    double p = shadow->params.probability;
    struct tv_parity_totals totals = {.mode = p <= 0.0   ? "off"
                                              : p >= 1.0 ? "all"
                                                         : "sample",
                                      .p = p};
    pthread_mutex_lock(&shadow->lock);
    const struct tv_shadow_files *files = &shadow->files;
    totals.exact = shadow->exact;
    totals.near_tie = shadow->near_tie;
    totals.violation = shadow->violation;
    totals.skipped = shadow->skipped;
    totals.worst = shadow->worst;
    int32_t first = files->count > violations_max ? files->count - violations_max : 0;
    for (int32_t i = first; i < files->count; i++) {
        violations[totals.violation_count++] =
            (struct tv_parity_violation){.n = files->files[i].n,
                                         .at_unix_ms = files->files[i].at_unix_ms,
                                         .kind = files->files[i].kind,
                                         .reproducer = files->files[i].bytes > 0};
    }
    pthread_mutex_unlock(&shadow->lock);
    totals.violations = violations;
    *ret_totals = totals;
}

int64_t tv_shadow_lag(struct tv_shadow *shadow, struct tv_histogram *ret_errors)
{
    int64_t now_us = tv_clock_us();
    pthread_mutex_lock(&shadow->lock);
    int64_t oldest_us = shadow->judged != NULL ? shadow->judged->submitted_us : now_us;
    for (const struct tv_shadow_round *round = shadow->first; round != NULL; round = round->next) {
        oldest_us = round->submitted_us < oldest_us ? round->submitted_us : oldest_us;
    }
    *ret_errors = shadow->logit_errors;
    pthread_mutex_unlock(&shadow->lock);
    return now_us - oldest_us;
}

int tv_shadow_reproducer(struct tv_shadow *shadow, int32_t n, const char **ret_kind,
                         char **ret_data, size_t *ret_bytes)
{
    return tv_shadow_files_read(shadow, n, ret_kind, ret_data, ret_bytes);
}
