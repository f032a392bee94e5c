/*
 * rows.c - operations whose rows are independent: the row functions spread over the pool.
 *
 * Router, draw, top-k, rotation and the naive attention run the reference's row functions, so they
 * agree with it bit for bit; norms and activations have vector forms.
 */
#include "cpu.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"
#include "../ref/ref.h"

struct norm_job {
    const struct tv_cpu_micro *micro;
    const float *x;
    int64_t x_stride;
    const float *weight;
    float *y;
    int64_t y_stride;
    int32_t dim;
    float eps;
};

static void norm_row(void *arg, int32_t item, int32_t thread)
{
    const struct norm_job *job = arg;
    (void)thread;
    job->micro->rmsnorm(job->dim, job->x + item * job->x_stride, job->weight, job->eps,
                        job->y + item * job->y_stride);
}

int tv_cpu_rmsnorm(struct tv_kernels *k, int32_t rows, int32_t dim, const float *x,
                   int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride)
{
    if (rows < 0 || dim < 1) {
        return -EINVAL;
    }
    struct norm_job job = {tv_cpu_of(k)->micro, x, x_stride, weight, y, y_stride, dim, eps};
    tv_cpu_run(k, rows, (int64_t)rows * dim * 2, norm_row, &job);
    return 0;
}

static void rope_row(void *arg, int32_t item, int32_t thread)
{
    const struct tv_rope *args = arg;
    (void)thread;
    for (int32_t h = 0; h < args->heads; h++) {
        tv_ref_rope_vector(args->x + item * args->row_stride + h * args->head_stride, &args->table,
                           args->positions[item]);
    }
}

int tv_cpu_rope(struct tv_kernels *k, const struct tv_rope *args)
{
    int rc = tv_args_rope(args);
    if (rc != 0) {
        return rc;
    }
    struct tv_rope job = *args;
    int64_t work = (int64_t)args->rows * args->heads * args->table.rope_dim * 8;
    tv_cpu_run(k, args->rows, work, rope_row, &job);
    return 0;
}

struct latent_job {
    const struct tv_latent_write *args;
    const struct tv_cpu_micro *micro;
};

static void latent_row(void *arg, int32_t item, int32_t thread)
{
    enum { CHUNK = 256 };
    const struct latent_job *job = arg;
    const struct tv_latent_write *a = job->args;
    (void)thread;
    int32_t rope = a->table.rope_dim;
    const float *row = a->ckv + item * a->row_stride;
    int64_t base = a->slots[item] * (a->latent_dim + rope);
    float key[TV_ARGS_ROPE_MAX];
    memcpy(key, row + a->latent_dim, (size_t)rope * sizeof *key);
    tv_ref_rope_vector(key, &a->table, a->positions[item]);
    for (int32_t i = 0; i < rope; i++) {
        tv_store_f32(a->kv_pages, a->kv_dtype, base + a->latent_dim + i, key[i]);
    }
    if (a->kv_dtype == TV_F32) {
        job->micro->rmsnorm(a->latent_dim, row, a->norm_weight, a->eps,
                            (float *)a->kv_pages + base);
        return;
    }
    /* The normed row goes through the pool's own element type once, without a row of scratch. */
    double sum = 0.0;
    for (int32_t i = 0; i < a->latent_dim; i++) {
        sum += (double)row[i] * (double)row[i];
    }
    float factor = (float)(1.0 / sqrt(sum / a->latent_dim + (double)a->eps));
    for (int32_t i = 0; i < a->latent_dim; i++) {
        tv_store_f32(a->kv_pages, a->kv_dtype, base + i, row[i] * factor * a->norm_weight[i]);
    }
}

int tv_cpu_latent_write(struct tv_kernels *k, const struct tv_latent_write *args)
{
    int rc = tv_args_latent_write(args);
    if (rc != 0) {
        return rc;
    }
    struct latent_job job = {args, tv_cpu_of(k)->micro};
    tv_cpu_run(k, args->rows, (int64_t)args->rows * args->latent_dim * 4, latent_row, &job);
    return 0;
}

struct swiglu_job {
    const struct tv_cpu_micro *micro;
    float *gate;
    const float *up;
    int32_t dim;
};

static void swiglu_row(void *arg, int32_t item, int32_t thread)
{
    const struct swiglu_job *job = arg;
    (void)thread;
    int64_t base = (int64_t)item * job->dim;
    job->micro->swiglu(job->dim, job->gate + base, job->up + base);
}

int tv_cpu_swiglu(struct tv_kernels *k, int32_t rows, int32_t dim, float *gate, const float *up)
{
    if (rows < 0 || dim < 1) {
        return -EINVAL;
    }
    struct swiglu_job job = {tv_cpu_of(k)->micro, gate, up, dim};
    tv_cpu_run(k, rows, (int64_t)rows * dim * 16, swiglu_row, &job);
    return 0;
}

static void router_row(void *arg, int32_t item, int32_t thread)
{
    (void)thread;
    tv_ref_router_row(arg, item);
}

int tv_cpu_router(struct tv_kernels *k, const struct tv_router *args)
{
    int rc = tv_args_router(args);
    if (rc != 0) {
        return rc;
    }
    struct tv_router job = *args;
    tv_cpu_run(k, args->rows, (int64_t)args->rows * args->experts * args->top_k * 100, router_row,
               &job);
    return 0;
}

struct naive_job {
    const struct tv_verify_attn *args;
    size_t scratch_bytes;
    int32_t b;
};

/* Item: one node with all its heads. */
static void naive_node(void *arg, int32_t item, int32_t thread)
{
    const struct naive_job *job = arg;
    char *scratch = (char *)job->args->workspace + (size_t)thread * job->scratch_bytes;
    for (int32_t h = 0; h < job->args->heads; h++) {
        tv_ref_verify_attn_row(job->args, job->b, item, h, scratch);
    }
}

size_t tv_cpu_verify_attn_naive_workspace(const struct tv_kernels *k,
                                          const struct tv_verify_attn *args)
{
    return tv_ref_verify_attn_naive_workspace(k, args) *
           (size_t)tv_cpu_pool_threads(tv_cpu_of(k)->pool);
}

int tv_cpu_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int rc = tv_args_verify_attn(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_cpu_verify_attn_naive_workspace(k, args)) {
        return -ENOSPC;
    }
    struct naive_job job = {args, tv_ref_verify_attn_naive_workspace(k, args), 0};
    for (int32_t b = 0; b < args->batch; b++) {
        job.b = b;
        tv_cpu_run(k, args->node_count[b], INT64_MAX, naive_node, &job);
        tv_ref_verify_attn_padding(args, b);
    }
    return 0;
}

static void draw_row(void *arg, int32_t item, int32_t thread)
{
    const struct tv_draw_args *args = arg;
    tv_ref_draw_row(args, item, (uint64_t *)args->workspace + (int64_t)thread * args->vocab);
}

size_t tv_cpu_draw_workspace(const struct tv_kernels *k, const struct tv_draw_args *args)
{
    return tv_ref_draw_workspace(k, args) * (size_t)tv_cpu_pool_threads(tv_cpu_of(k)->pool);
}

int tv_cpu_draw(struct tv_kernels *k, const struct tv_draw_args *args)
{
    int rc = tv_args_draw(args);
    if (rc != 0) {
        return rc;
    }
    if (args->workspace_bytes < tv_cpu_draw_workspace(k, args)) {
        return -ENOSPC;
    }
    struct tv_draw_args job = *args;
    tv_cpu_run(k, args->rows, (int64_t)args->rows * args->vocab * 32, draw_row, &job);
    return 0;
}

static void topk_row(void *arg, int32_t item, int32_t thread)
{
    (void)thread;
    tv_ref_topk_row(arg, item);
}

int tv_cpu_topk(struct tv_kernels *k, const struct tv_topk *args)
{
    int rc = tv_args_topk(args);
    if (rc != 0) {
        return rc;
    }
    struct tv_topk job = *args;
    tv_cpu_run(k, args->rows, (int64_t)args->rows * args->vocab * 16, topk_row, &job);
    return 0;
}
