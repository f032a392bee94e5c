/*
 * forward.h - the parts of a pass that verify and prefill share.
 */
#ifndef TV_MODEL_FORWARD_H
#define TV_MODEL_FORWARD_H

#include "model/model_impl.h"

/* One pass under way. Index lists are device copies of what was staged. */
struct tv_forward {
    struct tv_model *model;
    struct tv_cache *cache;
    int32_t rows;
    int taps;                 /* keep the rows at the taps */
    const int32_t *tokens;    /* device [rows] */
    const int32_t *positions; /* device [rows] */
    const int64_t *slots;     /* device [rows] */
};

/* Take the next `bytes` of the stage: the host side, and in *ret_device where it will be. NULL when
 * the pass is larger than the options allow. */
void *tv_forward_stage(struct tv_model_stage *stage, size_t bytes, const void **ret_device);
/* 1: the cache has the shape this model needs. */
int tv_forward_cache_fits(const struct tv_model *model, const struct tv_cache *cache);
/* Copy what was staged to the device. */
int tv_forward_upload(struct tv_model *model);
/* Embed the tokens into x. */
int tv_forward_embed(struct tv_forward *pass);
/* taps.c: before layer `layer`, or behind the last one: keep x when it is a tap and wanted. */
int tv_forward_tap(const struct tv_forward *pass, int32_t layer);
/* 1: a pass that begins now keeps its rows at the taps. */
int tv_forward_taps(const struct tv_model *model);
/* Layer norm, latent and rotated key into the pages, and for q: q_low and *ret_query, the matrix
 * [heads * (nope + rope), *ret_dim] with its input *ret_input [rows, *ret_dim]. */
int tv_forward_latent(struct tv_forward *pass, int32_t layer,
                      const struct tv_model_tensor **ret_query, const float **ret_input,
                      int32_t *ret_dim);
/* prefill.c: latent and rotated key into the pages, and full queries [rows, heads, nope + rope]
 * into q, rope part rotated. */
int tv_forward_queries(struct tv_forward *pass, int32_t layer);
/* prefill.c: expanded attention of the pass's rows from `first` on, consecutive tokens of one
 * sequence from position `start` on; page_table device [pages of the sequence]. */
void tv_forward_prefill_args(const struct tv_forward *pass, int32_t layer, int32_t first,
                             int32_t start, const int32_t *page_table,
                             struct tv_prefill_attn *ret_args);
/* For backends that have linear_pair: layer norm, ckv, and full queries [rows, heads, nope + rope]
 * into q, not rotated. Nothing is written to the pages. */
int tv_forward_products(struct tv_forward *pass, int32_t layer);
/* The write of ckv into the pages. */
void tv_forward_latent_args(const struct tv_forward *pass, int32_t layer,
                            struct tv_latent_write *ret_args);
/* x += o_proj . values, then x += feed-forward of the normed x. */
int tv_forward_rest(struct tv_forward *pass, int32_t layer);
/* From the attention of a layer with experts to the next one's, in one operation: `values` makes
 * values, `next` is the next layer's query, or NULL: nothing of the next layer. -ENOTSUP: not with
 * this backend, or not for this pass; nothing has been done then. */
int tv_forward_between(struct tv_forward *pass, int32_t layer, const struct tv_linear *values,
                       const struct tv_query *next);
/* Logits of `rows` rows of x from `first` on into the logits buffer. */
int tv_forward_head(struct tv_forward *pass, int32_t first, int32_t rows);
/* y (+)= x . w for dense rows. */
int tv_forward_linear(struct tv_model *model, int32_t rows, const struct tv_model_tensor *w,
                      const float *x, float *y, int32_t accumulate);

#endif
