/*
 * cpu.h - the cpu backend: threads and SIMD behind the slots that matter for speed.
 *
 * Private to kernels/. Owns the backend's state (pool, instruction set). A row's bits never depend
 * on threads, chunking, page layout or on what else is in the call: every file here keeps one
 * order of summation per (row, output).
 */
#ifndef TV_KERNELS_CPU_H
#define TV_KERNELS_CPU_H

#include "../kernels.h"
#include "amx.h"
#include "micro.h"
#include "pool.h"

/* kernels.impl of the cpu backend. */
struct tv_cpu {
    struct tv_cpu_pool *pool;
    const struct tv_cpu_micro *micro;
    const struct tv_cpu_amx *amx; /* NULL: no tiles */
    struct tv_cpu_packed *packed; /* [threads], with tiles only */
    int64_t serial;               /* of the running job; written by the caller between jobs */
};

/* Attention works on fixed logical tiles, whatever the page size. */
#define TV_CPU_TILE 64
/* Rows of a tile product; bounds scratch, not results. */
#define TV_CPU_BLOCK 32

/* Replace slots of a table that the reference filled. On failure nothing is owned. */
int tv_cpu_override(struct tv_kernels *k, const struct tv_kernels_options *options);

static inline struct tv_cpu *tv_cpu_of(const struct tv_kernels *k)
{
    return k->impl;
}

/* Run items on the pool, or inline when `work` (about the number of multiplications) is too small
 * to pay for waking threads. */
static inline void tv_cpu_run(const struct tv_kernels *k, int32_t items, int64_t work,
                              tv_cpu_pool_fn *fn, void *arg)
{
    tv_cpu_of(k)->serial++;
    tv_cpu_pool_run(tv_cpu_of(k)->pool, items, work >= 65536, fn, arg);
}

int tv_cpu_linear(struct tv_kernels *k, const struct tv_linear *args);
int tv_cpu_experts(struct tv_kernels *k, const struct tv_experts *args);
size_t tv_cpu_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args);
int tv_cpu_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args);
size_t tv_cpu_verify_attn_workspace(const struct tv_kernels *k, const struct tv_verify_attn *args);
int tv_cpu_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args);
size_t tv_cpu_prefill_attn_workspace(const struct tv_kernels *k,
                                     const struct tv_prefill_attn *args);

/* rows.c: operations whose rows are independent and cheap */
int tv_cpu_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                   int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride);
int tv_cpu_rope(struct tv_kernels *k, const struct tv_rope *args);
int tv_cpu_latent_write(struct tv_kernels *k, const struct tv_latent_write *args);
int tv_cpu_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up);
int tv_cpu_router(struct tv_kernels *k, const struct tv_router *args);
int tv_cpu_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args);
size_t tv_cpu_verify_attn_naive_workspace(const struct tv_kernels *k,
                                          const struct tv_verify_attn *args);
int tv_cpu_draw(struct tv_kernels *k, const struct tv_draw_args *args);
size_t tv_cpu_draw_workspace(const struct tv_kernels *k, const struct tv_draw_args *args);
int tv_cpu_topk(struct tv_kernels *k, const struct tv_topk *args);

#endif
