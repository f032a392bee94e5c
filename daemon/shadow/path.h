/*
 * path.h - private to shadow/: the path oracle, the whole model from tokens with plain loops.
 *
 * Every root-to-leaf path is an ordinary causal sequence behind the prefix: expanded attention, no
 * pages, no tree mask, f32. Shares the weights and their config with model/, and nothing else.
 */
#ifndef TV_SHADOW_PATH_H
#define TV_SHADOW_PATH_H

#include <stdatomic.h>
#include <stdint.h>

#include "model/model.h"
#include "proto/tree.h"

#define TV_PATH_STOPS 3

/* Where the oracle's weights are. */
struct tv_path_source {
    const struct tv_model_config *config;
    const struct tv_model_weights *weights;
    struct tv_kernels *device; /* for copies; NULL: weights are host memory */
    /* Any of them not 0: give up with -ECANCELED between two steps. Relaxed; NULL: no such. */
    const atomic_int *stops[TV_PATH_STOPS];
};

/* All sequences of one comparison, row after row: first the prefix, which they share and which is
 * computed once, then the nodes of one path after the other. */
struct tv_path_rows {
    int32_t count, prefix_len;
    int32_t *tokens, *positions; /* [count] */
    int32_t *starts;             /* [count]: first row of this row's own path; prefix rows: 0 */
    int32_t *nodes;  /* [count]: tree node, -1 for the prefix and for a node an earlier path had */
    int32_t *row_of; /* [nodes of the tree]: the row that stands for it */
};
int tv_path_rows_init(struct tv_path_rows *rows, const int32_t *prefix, int32_t prefix_len,
                      const struct tv_tree *tree);
void tv_path_rows_finish(struct tv_path_rows *rows);

/* Called once per layer with the recomputed KV rows [rows, kv_lora + rope], rotated key in the
 * cache's order (two halves). */
typedef void tv_path_kv(void *context, int32_t layer, const float *kv);

/* Run the model; *ret_logits [nodes of the tree, vocab], malloc'd, the caller's. kv may be NULL.
 * 0, -ENOMEM, -ECANCELED, or a failed copy from the device. */
int tv_path_forward(const struct tv_path_source *source, const struct tv_path_rows *rows,
                    int32_t node_count, tv_path_kv *kv, void *kv_context, float **ret_logits);

/* path_math.c: 0, or -ECANCELED once somebody asked for the end. */
int tv_path_stopped(const struct tv_path_source *source);
/* y[r] (+)= w x[r] for every row; scratch: [cols] floats. */
int tv_path_linear(const struct tv_path_source *source, const struct tv_model_tensor *w,
                   const float *x, int32_t rows, int accumulate, float *y);
void tv_path_rmsnorm(const float *x, int64_t x_stride, int32_t rows, int32_t dim,
                     const float *weight, double eps, float *y, int64_t y_stride);
/* A tensor as f32 on the host, malloc'd; -ENOMEM or a failed copy. */
int tv_path_tensor(const struct tv_path_source *source, const struct tv_model_tensor *tensor,
                   float **ret_values);
/* Cosines and sines [positions, 2, rope / 2] from the config alone, malloc'd. */
int tv_path_rope_table(const struct tv_model_config *config, int32_t positions, float **ret_table);
/* Rotate one vector of interleaved pairs in place. */
void tv_path_rotate(float *x, int32_t rope_dim, const float *table, int32_t position);

/* path_experts.c: x += the feed-forward part of one layer, from its normed input h. */
int tv_path_feed_forward(const struct tv_path_source *source,
                         const struct tv_model_layer_weights *layer, const float *h, int32_t rows,
                         float *x);

#endif
