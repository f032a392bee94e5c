/*
 * ref.h - the scalar reference: one function per slot of the operation table.
 *
 * Private to kernels/. Every function here is the oracle of its operation: plain loops, f64 sums,
 * run-time dimensions, no threads. The cpu backend keeps those that need no faster version and
 * calls the row functions from its threads.
 */
#ifndef TV_KERNELS_REF_H
#define TV_KERNELS_REF_H

#include "../kernels.h"

/* Fill every slot of a zeroed table. */
void tv_ref_fill(struct tv_kernels *k);

/* memory.c */
void *tv_ref_alloc(struct tv_kernels *k, size_t bytes);
void tv_ref_free(struct tv_kernels *k, void *device);
int tv_ref_upload(struct tv_kernels *k, void *device, const void *host, size_t bytes);
int tv_ref_download(struct tv_kernels *k, void *host, const void *device, size_t bytes);
int tv_ref_fill_bytes(struct tv_kernels *k, void *device, int byte, size_t bytes);
int tv_ref_sync(struct tv_kernels *k);

int tv_ref_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                 const void *table, enum tv_dtype dtype, const int32_t *ids, float *x);
int tv_ref_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                   int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride);
int tv_ref_linear(struct tv_kernels *k, const struct tv_linear *args);
int tv_ref_rope(struct tv_kernels *k, const struct tv_rope *args);
int tv_ref_latent_write(struct tv_kernels *k, const struct tv_latent_write *args);
int tv_ref_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up);
int tv_ref_to_bf16(struct tv_kernels *k, int64_t count, const float *x, uint16_t *y);
int tv_ref_router(struct tv_kernels *k, const struct tv_router *args);
int tv_ref_experts(struct tv_kernels *k, const struct tv_experts *args);
size_t tv_ref_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args);
int tv_ref_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args);
size_t tv_ref_verify_attn_naive_workspace(const struct tv_kernels *k,
                                          const struct tv_verify_attn *args);
int tv_ref_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args);
size_t tv_ref_prefill_attn_workspace(const struct tv_kernels *k,
                                     const struct tv_prefill_attn *args);
int tv_ref_kv_move(struct tv_kernels *k, void *kv_pages, size_t row_bytes, int64_t slot_count,
                   const int64_t *src, const int64_t *dst, int32_t count);
int tv_ref_draw(struct tv_kernels *k, const struct tv_draw_args *args);
size_t tv_ref_draw_workspace(const struct tv_kernels *k, const struct tv_draw_args *args);
int tv_ref_topk(struct tv_kernels *k, const struct tv_topk *args);
int tv_ref_copy(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                size_t from_stride, size_t row_bytes, int32_t rows);
int tv_ref_synthesize(struct tv_kernels *k, const struct tv_synthesize *args);

/* Parts that serve one row each; arguments were checked by the caller. */

/* Rotate one vector of table->rope_dim elements from interleaved pairs to halves, in place. */
void tv_ref_rope_vector(float *x, const struct tv_rope_table *table, int32_t position);
/* Choose the experts of row r. */
void tv_ref_router_row(const struct tv_router *args, int32_t r);
/* Row of request b, node i, head h of the naive attention; `scratch` as large as the workspace. */
void tv_ref_verify_attn_row(const struct tv_verify_attn *args, int32_t b, int32_t i, int32_t h,
                            void *scratch);
/* out = 0, lse = -inf in the padding rows of request b (nothing in the packed layout). */
void tv_ref_verify_attn_padding(const struct tv_verify_attn *args, int32_t b);
/* Draw row r; `keys` holds vocab entries. */
void tv_ref_draw_row(const struct tv_draw_args *args, int32_t r, uint64_t *keys);
/* What a row's filters leave: ids and weights relative to the best; returns how many, 0 when a
 * logit is not finite. Greedy: the best alone. All arrays [vocab]. */
int32_t tv_ref_draw_survivors(const float *logits, int32_t vocab, const struct tv_sampling *s,
                              uint64_t *keys, int32_t *ids, double *weights);
/* k largest logits and log-sum-exp of row r. */
void tv_ref_topk_row(const struct tv_topk *args, int32_t r);

#endif
