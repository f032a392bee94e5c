/*
 * shadow.h - shadow mode: judge live rounds with oracles that share no code with the fast path.
 *
 * Kernel oracle: naive attention over the round's q and KV rows, per layer, on a thread of its own
 * that calls ref/ alone. Path oracle: the model again, each root-to-leaf path as a plain causal
 * sequence, on demand. Never alters an answer; the queue is bounded and drops are counted.
 */
#ifndef TV_SHADOW_SHADOW_H
#define TV_SHADOW_SHADOW_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/cache.h"
#include "model/model.h"
#include "proto/response.h"
#include "stats/stats.h"
#include "verify/verify.h"

struct tv_shadow;
struct tv_shadow_round; /* what the oracle needs of one round, being collected */

struct tv_shadow_params {
    double probability; /* 0 = off, 1 = all, else sampled share of rounds */
    double path_probability;
    /* Memory of captured rounds, and of what is kept of earlier ones for those to come: together
     * never more. A round that does not fit is skipped. */
    size_t queue_bytes_max;
    const char *state_dir; /* reproducers; NULL = none are written */
    /* The worker's backend, for copies out of device memory; NULL: all of it is host memory. */
    struct tv_kernels *device;
    /* 1: where that has a second table, rounds for the kernel oracle are captured and judged inside
     * the device; the memory for it (tv_shadow_device_bytes) is taken now. */
    int judge_there;
};

/* model and cache may be NULL (engine without them): every round is then skipped. */
int tv_shadow_create(const struct tv_shadow_params *params, const struct tv_model *model,
                     struct tv_cache *cache, struct tv_shadow **ret_shadow);
/* What judge_there takes of a device's memory. */
size_t tv_shadow_device_bytes(const struct tv_kernels *device, const struct tv_model *model,
                              enum tv_dtype kv_dtype, int32_t page_size);
/* Skips what is queued, whoever waits for it, and ends a judgement under way between two layers. */
void tv_shadow_destroy(struct tv_shadow *shadow);

enum tv_shadow_why {
    TV_SHADOW_SAMPLED,  /* judged when its number says so */
    TV_SHADOW_WANTED,   /* always, by the kernel oracle */
    TV_SHADOW_ON_DEMAND /* by both, the path oracle through tv_shadow_path_compare; counts once */
};
/* Worker thread. Decide whether this round is judged; NULL: it is not. */
struct tv_shadow_round *tv_shadow_begin(struct tv_shadow *shadow, enum tv_shadow_why why);
/* A tv_model_layer_hook: copies q, out, lse, tail rows; pins prefix pages. context = the round. */
void tv_shadow_layer(void *context, int32_t layer, const struct tv_verify_attn *attn);
/* A tv_round_commit_hook: are the rows that were kept those of the layers, bit for bit? */
void tv_shadow_committed(void *context, const struct tv_cache_seq *seq, const int32_t *nodes,
                         int32_t count);
/* Hand the finished round over. done (may be NULL) is called on the shadow thread with the block
 * for want.shadow, while a lock of the shadow is held: it must not call the shadow. Rounds with a
 * done are judged before those without. Never waits for a judgement. */
typedef void tv_shadow_done(void *context, const struct tv_shadow_block *block);
void tv_shadow_submit(struct tv_shadow *shadow, struct tv_shadow_round *round, tv_shadow_done *done,
                      void *done_context);
void tv_shadow_abandon(struct tv_shadow *shadow, struct tv_shadow_round *round);
/* Nobody waits for this context's round any more. 1: its done will never be called; 0: it has been,
 * or no such round was submitted. The round itself is still judged and counted. Any thread, without
 * locks that done takes. */
int tv_shadow_forget(struct tv_shadow *shadow, const void *done_context);

/* A fast result to be judged by the path oracle (POST /v1/parity), or redrawn by the thread. */
struct tv_parity_case {
    const int32_t *prefix; /* host [prefix_len] */
    int32_t prefix_len;
    const struct tv_tree *tree;
    struct tv_round_rule rule;
    const float *logits; /* the fast path's, host [nodes, vocab] */
    const int32_t *accepted_nodes;
    int32_t accepted_count, pending;
    double noise; /* of the two paths compared, together: a smaller gap is a near tie */
    /* The same round as captured through tv_shadow_layer, not yet submitted: its KV rows are
     * compared too, and those that tv_shadow_committed saw. NULL: they are not, and kv_equal is 1.
     */
    struct tv_shadow_round *round;
    /* Any of them not 0: give up with -ECANCELED at the next step. NULL: no such. */
    const atomic_int *cancelled[2];
};
/* Between verify (with lend_logits) and submit, for every round that begin gave: copies what the
 * thread needs to draw the walk again with ref/ (tokens_equal; without this call it only tells
 * whether the kernel was within its bounds) and, when tv_shadow_wants_path said so, to run the path
 * oracle. Worker thread. prefix may be NULL unless the path is wanted. */
void tv_shadow_attach(struct tv_shadow *shadow, struct tv_shadow_round *round,
                      const struct tv_parity_case *parity_case);
/* 1: the path oracle was sampled for this round too (path_probability). */
int tv_shadow_wants_path(const struct tv_shadow_round *round);
/* Runs on the calling thread; fills the path members of *ret_report. */
int tv_shadow_path_compare(struct tv_shadow *shadow, const struct tv_parity_case *parity_case,
                           struct tv_parity_report *ret_report);

/* start.c: the path oracle as judge of a start, for tv_verify_engine_create. model, cache and
 * device outlive it, and it the creation of the engine. -ENOMEM, -EAGAIN. */
struct tv_shadow_judge;
int tv_shadow_judge_create(const struct tv_model *model, struct tv_cache *cache,
                           struct tv_kernels *device, struct tv_shadow_judge **ret_judge);
struct tv_judge tv_shadow_judge_calls(struct tv_shadow_judge *judge);
void tv_shadow_judge_destroy(struct tv_shadow_judge *judge);

/* Totals and the newest reproducers; any thread. A round counts once for the kernel oracle and once
 * for the path oracle when that ran (on demand: once for both); dropped and failed ones are
 * skipped. */
void tv_shadow_totals(struct tv_shadow *shadow, struct tv_parity_totals *ret_totals,
                      struct tv_parity_violation *violations, int32_t violations_max);
/* Microseconds since the oldest round that waits or is judged was handed over, 0 without one; and
 * the largest differences that the path oracle has seen. Any thread. */
int64_t tv_shadow_lag(struct tv_shadow *shadow, struct tv_histogram *ret_errors);
/* Read reproducer n: *ret_data malloc'd, the caller's. -ENOENT. */
int tv_shadow_reproducer(struct tv_shadow *shadow, int32_t n, const char **ret_kind,
                         char **ret_data, size_t *ret_bytes);

#endif
