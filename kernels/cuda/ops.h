/*
 * ops.h - the table entries of the CUDA backend beside verify attention. Private to kernels/cuda.
 *
 * Contracts are in kernels.h. What those say about index arrays in device memory (ids, positions,
 * slots, pages) cannot be checked by a launch: a kernel that meets an index outside its range reads
 * and writes nothing there, and gives NaN where a value was due.
 */
#ifndef TV_KERNELS_CUDA_OPS_H
#define TV_KERNELS_CUDA_OPS_H

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Once per device, before the first launch: shared memory limits. -ENOTSUP: it offers too little.
 */
int tv_cuda_linear_prepare(const struct tv_cuda *cuda);
int tv_cuda_experts_prepare(const struct tv_cuda *cuda);
int tv_cuda_moe_prepare(void);
int tv_cuda_prefill_attn_prepare(const struct tv_cuda *cuda);
int tv_cuda_query_prepare(void);
/* Takes memory of the device, which tv_cuda_layer_finish gives back. */
int tv_cuda_layer_prepare(struct tv_cuda *cuda);
void tv_cuda_layer_finish(struct tv_cuda *cuda);

int tv_cuda_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                  const void *table, enum tv_dtype dtype, const int32_t *ids, float *x);
int tv_cuda_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                    int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride);
int tv_cuda_linear(struct tv_kernels *k, const struct tv_linear *args);
/* Its arguments alone: 0 or -EINVAL. */
int tv_cuda_linear_check(const struct tv_linear *args);
int tv_cuda_linear_pair(struct tv_kernels *k, const struct tv_linear *first,
                        const struct tv_linear *second);
int tv_cuda_query(struct tv_kernels *k, const struct tv_query *args);
int tv_cuda_moe(struct tv_kernels *k, const struct tv_moe *args);
size_t tv_cuda_moe_workspace(const struct tv_kernels *k, const struct tv_moe *args);
int tv_cuda_layer(struct tv_kernels *k, const struct tv_layer *args);
int tv_cuda_rope(struct tv_kernels *k, const struct tv_rope *args);
int tv_cuda_latent_write(struct tv_kernels *k, const struct tv_latent_write *args);
int tv_cuda_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up);
int tv_cuda_synthesize(struct tv_kernels *k, const struct tv_synthesize *args);
int tv_cuda_to_bf16(struct tv_kernels *k, int64_t count, const float *x, uint16_t *y);
int tv_cuda_router(struct tv_kernels *k, const struct tv_router *args);
int tv_cuda_experts(struct tv_kernels *k, const struct tv_experts *args);
size_t tv_cuda_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args);
int tv_cuda_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args);
size_t tv_cuda_prefill_attn_workspace(const struct tv_kernels *k,
                                      const struct tv_prefill_attn *args);
int tv_cuda_kv_move(struct tv_kernels *k, void *kv_pages, size_t row_bytes, int64_t slot_count,
                    const int64_t *src, const int64_t *dst, int32_t count);
int tv_cuda_draw(struct tv_kernels *k, const struct tv_draw_args *args);
size_t tv_cuda_draw_workspace(const struct tv_kernels *k, const struct tv_draw_args *args);
int tv_cuda_topk(struct tv_kernels *k, const struct tv_topk *args);
int tv_cuda_record_begin(struct tv_kernels *k);
int tv_cuda_record_end(struct tv_kernels *k, void **ret_recording);
int tv_cuda_replay(struct tv_kernels *k, void *recording);
void tv_cuda_recording_free(struct tv_kernels *k, void *recording);
int tv_cuda_copy(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                 size_t from_stride, size_t row_bytes, int32_t rows);
int tv_cuda_timer(struct tv_kernels *k, int end);
int tv_cuda_timer_read(struct tv_kernels *k, double *ret_us);
int tv_cuda_side(struct tv_kernels *k, struct tv_kernels **ret_side);
/* stream.c: what a table holds of streams and moments. */
void tv_cuda_stream_finish(struct tv_cuda *cuda);

#ifdef __cplusplus
}
#endif

#endif
