/*
 * linear_sm90.h - products of many rows on Hopper (linear_sm90.cuh), for linear.cu, experts.cu and
 * prefill_attn.cu.
 *
 * All give the bits of the kernels that run everywhere; -ENOTSUP, and nothing done: not for these
 * arguments, or not built. Their callers have checked the arguments, and that rows are many.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_SM90_H
#define TV_KERNELS_CUDA_LINEAR_SM90_H

#include "internal.h"

struct expert_plan;
struct prefill_segment;

#ifdef TV_CUDA_SM90
#define TV_LINEAR_SM90 1
/* Once per device, before the first launch. */
int tv_linear_sm90_prepare(void);
int tv_experts_sm90_prepare(void);
int tv_prefill_expand_sm90_prepare(void);

/* One or two products of the same rows of x. */
int tv_linear_sm90(const struct tv_kernels *k, const struct tv_linear *args, int count);

/* Rows of a tile of an expert's. */
int32_t tv_experts_sm90_rows(const struct tv_experts *args);

/* gate and up, and down, of sorted rows. */
int tv_experts_sm90(const struct tv_kernels *k, const struct tv_experts *args,
                    const struct expert_plan *plan);

/* Keys and values of a segment, as tiles. */
int tv_prefill_expand_sm90(const struct tv_kernels *k, const struct tv_prefill_attn *args,
                           const struct prefill_segment *segment);
#else
#define TV_LINEAR_SM90                       0
#define tv_linear_sm90_prepare()             0
#define tv_experts_sm90_prepare()            0
#define tv_prefill_expand_sm90_prepare()     0
#define tv_linear_sm90(k, args, count)       (-ENOTSUP)
#define tv_experts_sm90_rows(args)           WIDE_ROWS
#define tv_experts_sm90(kernels, args, plan) (-ENOTSUP)
#define tv_prefill_expand_sm90(k, args, s)   (-ENOTSUP)
#endif

#endif
