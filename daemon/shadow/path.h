/*
 * path.h - private to shadow/: the path oracle, the whole model from tokens with plain loops.
 *
 * Every root-to-leaf path is an ordinary causal sequence behind the prefix: expanded attention, no
 * pages, no tree mask, f32. Shares the weights and the fields
 * of the file with model/, and nothing that model/ derives from them.
 */
#ifndef TV_SHADOW_PATH_H
#define TV_SHADOW_PATH_H

#include <stdatomic.h>
#include <stdint.h>

#include "model/model.h"
#include "proto/tree.h"

#define TV_PATH_STOPS 3

/* Order of the terms of every f32 sum over a row: the usual one in parallel lanes, or one term
 * after the other from the first or from the last on. Between the last two lies the noise. */
enum tv_path_order { TV_PATH_LANES, TV_PATH_FORWARDS, TV_PATH_BACKWARDS };

/* Where the oracle's weights are. */
struct tv_path_source {
    const struct tv_model_config *config;
    const struct tv_model_weights *weights;
    struct tv_kernels *device; /* for copies; NULL: weights are host memory */
    /* Any of them not 0: give up with -ECANCELED between two steps. Relaxed; NULL: no such. */
    const atomic_int *stops[TV_PATH_STOPS];
    enum tv_path_order order;
    int rows_bf16; /* the cache's rows are bf16: each is rounded once, when it is written */
};

/* All sequences of one comparison, row after row: first the prefix, which they share and which is
 * computed once (twice with twins: see below), then the nodes of one path after the other. */
struct tv_path_rows {
    int32_t count, prefix_len;
    int32_t twins;               /* 1: rows prefix_len .. 2 prefix_len are the prefix again */
    int32_t *tokens, *positions; /* [count] */
    int32_t *starts;             /* [count]: first row of this row's own path; prefix rows: 0 */
    int32_t *slots;              /* [count]: the cache row that stands for this row */
    int32_t *row_of;             /* [nodes of the tree]: the row that stands for it */
    /* Written by the pass, with twins. How far router scores must move at least before some expert
     * of the row is another (INFINITY without experts), and how far those of a prefix row and its
     * twin are apart. */
    float *margins; /* [count] */
    float *ties;  /* [count]: the margin over the score of the last expert chosen; written always */
    float *moved; /* [prefix_len] */
    /* Whose experts the rows have; not owned, NULL: nobody keeps them. Two passes over the same
     * rows that differ in the order of sums alone are the same model only with the same choices. */
    struct tv_path_choices *choices;
};
/* The experts of every row and layer, in order of choice: written by a pass, or, where `follow` is
 * set, those that the rows have whatever their own scores say. */
struct tv_path_choices {
    int follow;
    int32_t *experts; /* [layers, count, experts_per_token], -1: none; the caller's */
};
/* A cache of bf16 is asked for what it holds: its kernels take queries of that type too. With twins
 * every row but the first prefix_len has its queries rounded as the contract says. The absorbed
 * form of a query is what is rounded, so scores are products with the cache's rows there. */
int tv_path_rows_init(struct tv_path_rows *rows, const int32_t *prefix, int32_t prefix_len,
                      const struct tv_tree *tree, int twins);
void tv_path_rows_finish(struct tv_path_rows *rows);

/* Looks at a pass, and may take over what the fast path has. */
struct tv_path_watch {
    void *context;
    /* Once per layer: the KV rows [rows, kv_lora + rope], rotated key in the cache's order (two
     * halves), before anything reads them. NULL: not called. */
    void (*kv)(void *context, int32_t layer, float *kv);
    /* Once per layer and row with rounded queries: [heads, kv_lora + rope], before they are used.
     * NULL: not called. */
    void (*query)(void *context, int32_t layer, int32_t row, float *q);
    /* Once per layer and tree row: attention's result [heads, v] before it is used, and v_up
     * [heads, v, kv_lora]. NULL: not called. */
    void (*mixed)(void *context, int32_t layer, int32_t row, const float *v_up, float *mixed);
};

/* Run the model; *ret_logits [wanted_count, vocab] of the rows wanted[], each at most once,
 * malloc'd, the caller's. watch may be NULL. 0, -ENOMEM, -ECANCELED, or a failed copy from the
 * device. */
int tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                    const int32_t *wanted, int32_t wanted_count, const struct tv_path_watch *watch,
                    float **ret_logits);

/* path_math.c: 0, or -ECANCELED once somebody asked for the end. */
int tv_path_stopped(const struct tv_path_source *source);
/* y[r] (+)= w x[r] for every row; scratch: [cols] floats. */
int tv_path_linear(const struct tv_path_source *source, const struct tv_model_tensor *w,
                   const float *x, int32_t rows, int accumulate, float *y);
/* One term after the other, in either order. */
float tv_path_dot(const float *x, const float *y, int32_t count, enum tv_path_order order);
void tv_path_rmsnorm(const float *x, int64_t x_stride, int32_t rows, int32_t dim,
                     const float *weight, double eps, float *y, int64_t y_stride);
/* A tensor as f32 on the host, malloc'd; -ENOMEM or a failed copy. */
int tv_path_tensor(const struct tv_path_source *source, const struct tv_model_tensor *tensor,
                   float **ret_values);
/* Every value to the nearest bf16, ties to even, as a cache of that type keeps it. */
void tv_path_round_bf16(float *x, int64_t count);
/* What scores are multiplied by, and cosines and sines [positions, 2, rope / 2], malloc'd: both
 * from the file's fields alone, by code of their own, so that a wrong derivation of model/ is seen.
 */
float tv_path_softmax_scale(const struct tv_model_config *config);
int tv_path_rope_table(const struct tv_model_config *config, int32_t positions, float **ret_table);
/* Rotate one vector of interleaved pairs in place. */
void tv_path_rotate(float *x, int32_t rope_dim, const float *table, int32_t position);

/* path_experts.c: x += the feed-forward part of one layer, from its normed input h; the rows'
 * margins and moved are brought up to date. */
int tv_path_feed_forward(const struct tv_path_source *source,
                         const struct tv_model_layer_weights *layer, const float *h,
                         const struct tv_path_rows *rows, float *x);

#endif
