/*
 * device.c - a backend's operations with a failure planted in the n-th call.
 */
#include <errno.h>

#include "faults.h"
#include "internal.h"
#include "kernels/kernels.h"

static struct tv_kernels real; /* the table as it was */

#define CALL(name, ...) (fault_meets(FAULT_DEVICE) ? -EIO : real.name(k, __VA_ARGS__))

static void *device_alloc(struct tv_kernels *k, size_t bytes)
{
    return fault_meets(FAULT_DEVICE) ? NULL : real.alloc(k, bytes);
}

static int device_upload(struct tv_kernels *k, void *device, const void *host, size_t bytes)
{
    return CALL(upload, device, host, bytes);
}

static int device_download(struct tv_kernels *k, void *host, const void *device, size_t bytes)
{
    return CALL(download, host, device, bytes);
}

static int device_fill(struct tv_kernels *k, void *device, int byte, size_t bytes)
{
    return CALL(fill, device, byte, bytes);
}

static int device_sync(struct tv_kernels *k)
{
    return fault_meets(FAULT_DEVICE) ? -EIO : real.sync(k);
}

static int device_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                        const void *table, enum tv_dtype dtype, const int32_t *ids, float *x)
{
    return CALL(embed, rows, hidden, vocab, table, dtype, ids, x);
}

static int device_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                          int64_t x_stride, const float *weight, float eps, float *y,
                          int64_t y_stride)
{
    return CALL(rmsnorm, rows, dim, x, x_stride, weight, eps, y, y_stride);
}

static int device_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    return CALL(linear, args);
}

static int device_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    return CALL(rope, args);
}

static int device_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    return CALL(latent_write, args);
}

static int device_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate,
                         const float *up)
{
    return CALL(swiglu, rows, dim, gate, up);
}

static int device_router(struct tv_kernels *k, const struct tv_router *args)
{
    return CALL(router, args);
}

static int device_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    return CALL(experts, args);
}

static int device_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    return CALL(verify_attn, args);
}

static int device_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    return CALL(verify_attn_naive, args);
}

static int device_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    return CALL(prefill_attn, args);
}

static int device_kv_move(struct tv_kernels *k, void *kv_pages, size_t row_bytes,
                          int64_t slot_count, const int64_t *src, const int64_t *dst, int32_t count)
{
    return CALL(kv_move, kv_pages, row_bytes, slot_count, src, dst, count);
}

static int device_copy(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                       size_t from_stride, size_t row_bytes, int32_t rows)
{
    return CALL(copy, to, to_stride, from, from_stride, row_bytes, rows);
}

static int device_draw(struct tv_kernels *k, const struct tv_draw_args *args)
{
    return CALL(draw, args);
}

static int device_topk(struct tv_kernels *k, const struct tv_topk *args)
{
    return CALL(topk, args);
}

void fault_device_wrap(struct tv_kernels *kernels)
{
    real = *kernels;
    kernels->alloc = device_alloc;
    kernels->upload = device_upload;
    kernels->download = device_download;
    kernels->fill = device_fill;
    kernels->sync = device_sync;
    kernels->embed = device_embed;
    kernels->rmsnorm = device_rmsnorm;
    kernels->linear = device_linear;
    kernels->rope = device_rope;
    kernels->latent_write = device_latent_write;
    kernels->swiglu = device_swiglu;
    kernels->router = device_router;
    kernels->experts = device_experts;
    kernels->verify_attn = device_verify_attn;
    kernels->verify_attn_naive = device_verify_attn_naive;
    kernels->prefill_attn = device_prefill_attn;
    kernels->kv_move = device_kv_move;
    kernels->copy = device_copy;
    kernels->draw = device_draw;
    kernels->topk = device_topk;
}
