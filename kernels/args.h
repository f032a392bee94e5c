/*
 * args.h - argument checks shared by the host backends.
 *
 * Owns the documented ranges of kernels.h as code. Checks shapes and, because host memory can be
 * read, the contents of index arrays; refuses to look at floating-point data.
 * Every function returns 0 or -EINVAL.
 */
#ifndef TV_KERNELS_ARGS_H
#define TV_KERNELS_ARGS_H

#include <stdbool.h>

#include "kernels.h"

int tv_args_linear(const struct tv_linear *args);
int tv_args_rope(const struct tv_rope *args);
int tv_args_latent_write(const struct tv_latent_write *args);
int tv_args_router(const struct tv_router *args);
int tv_args_experts(const struct tv_experts *args);
int tv_args_verify_attn(const struct tv_verify_attn *args);
int tv_args_prefill_attn(const struct tv_prefill_attn *args);
int tv_args_draw(const struct tv_draw_args *args);
int tv_args_topk(const struct tv_topk *args);
int tv_args_synthesize(const struct tv_synthesize *args);
int tv_args_kv_move(int64_t slot_count, const int64_t *src, const int64_t *dst, int32_t count);

/* What an enum of kernels.h may hold: weights of a product or an embedding, rows of the cache and
 * what is rounded to, and how rows meet weights. For cuda/ too. */
static inline bool tv_args_dtype_known(enum tv_dtype dtype)
{
    return dtype == TV_F32 || dtype == TV_BF16 || dtype == TV_F16;
}

static inline bool tv_args_dtype_kv(enum tv_dtype dtype)
{
    return dtype == TV_F32 || dtype == TV_BF16;
}

static inline bool tv_args_products_known(enum tv_products products)
{
    return products == TV_PRODUCTS_EXACT || products == TV_PRODUCTS_BF16;
}

/* The widest rotated key the host backends turn in a stack buffer. */
#define TV_ARGS_ROPE_MAX 256

/* First row of request b in q, parents, out and lse. */
static inline int64_t tv_args_row_base(const struct tv_verify_attn *args, int32_t b)
{
    return args->row_start ? args->row_start[b] : (int64_t)b * args->q_len;
}

#endif
