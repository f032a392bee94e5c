/*
 * prefill_attn.c - expanded causal attention: a head's keys and values are expanded one 64-token
 * tile at a time, once for all rows of the chunk.
 *
 * Tiles start at position 0 of the sequence and a row takes them in order, so how a prompt was cut
 * into chunks cannot be seen in the result.
 */
#include "cpu.h"

#include <errno.h>
#include <math.h>

#include "../args.h"
#include "../convert.h"
#include "product.h"

enum { BLOCK = TV_CPU_BLOCK, TILE = TV_CPU_TILE };

_Static_assert(TILE == TV_PREFILL_KEYS, "calls are cut between tiles");

struct job {
    const struct tv_prefill_attn *args;
    const struct tv_cpu *cpu;
    int32_t key_dim;
    int32_t kv_dim;
    size_t scratch_bytes;
};

/* A thread's part of the workspace. */
struct scratch {
    float *kv;     /* [TILE, kv_dim] */
    float *keys;   /* [TILE, key_dim] */
    float *values; /* [TILE, v] */
    float *p;      /* [BLOCK, TILE] */
    float *max;    /* [rows] */
    float *sum;    /* [rows] */
};

static size_t round_up(size_t floats)
{
    return (floats * sizeof(float) + 63) / 64 * 64;
}

static size_t carve(const struct tv_prefill_attn *args, char *memory, struct scratch *s)
{
    size_t key_dim = (size_t)args->nope_dim + (size_t)args->rope_dim;
    size_t sizes[5] = {
        round_up(TILE * ((size_t)args->latent_dim + (size_t)args->rope_dim)),
        round_up(TILE * key_dim),
        round_up(TILE * (size_t)args->v_dim),
        round_up(BLOCK * TILE),
        round_up((size_t)args->rows),
    };
    if (memory) {
        s->kv = (float *)memory;
        s->keys = (float *)(memory + sizes[0]);
        s->values = (float *)(memory + sizes[0] + sizes[1]);
        s->p = (float *)(memory + sizes[0] + sizes[1] + sizes[2]);
        s->max = (float *)(memory + sizes[0] + sizes[1] + sizes[2] + sizes[3]);
        s->sum = (float *)(memory + sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4]);
    }
    return sizes[0] + sizes[1] + sizes[2] + sizes[3] + 2 * sizes[4];
}

/* scratch.kv = rows of positions [first, first + count) */
static void load_rows(const struct job *job, const struct scratch *s, int32_t first, int32_t count)
{
    const struct tv_prefill_attn *a = job->args;
    for (int32_t j = 0; j < count; j++) {
        int32_t at = first + j;
        int64_t row = (int64_t)a->page_table[at / a->page_size] * a->page_size + at % a->page_size;
        float *kv = s->kv + (int64_t)j * job->kv_dim;
        if (a->kv_dtype == TV_F32) {
            memcpy(kv, (const float *)a->kv_pages + row * job->kv_dim,
                   (size_t)job->kv_dim * sizeof *kv);
        } else {
            job->cpu->micro->widen(job->kv_dim, (const uint16_t *)a->kv_pages + row * job->kv_dim,
                                   kv);
        }
    }
}

/* keys[j] = [k_up[h] . latent j | rope key j], values[j] = v_up[h] . latent j */
static void expand_tile(const struct job *job, const struct scratch *s, int32_t thread, int32_t h,
                        int32_t first, int32_t count)
{
    const struct tv_prefill_attn *a = job->args;
    int64_t key = ((int64_t)h << 32) + first;
    struct tv_cpu_product product = {
        .rows = count,
        .cols = a->nope_dim,
        .k = a->latent_dim,
        .x = s->kv,
        .x_stride = job->kv_dim,
        .w = tv_element(a->k_up, a->w_dtype, (int64_t)h * a->nope_dim * a->latent_dim),
        .w_dtype = a->w_dtype,
        .y = s->keys,
        .y_stride = job->key_dim,
        .many_rows = 1, /* a tile of tokens, however few rows attend to it */
    };
    load_rows(job, s, first, count);
    tv_cpu_product_run(job->cpu, thread, key, &product);
    product.cols = a->v_dim;
    product.w = tv_element(a->v_up, a->w_dtype, (int64_t)h * a->v_dim * a->latent_dim);
    product.y = s->values;
    product.y_stride = a->v_dim;
    tv_cpu_product_run(job->cpu, thread, key, &product);
    for (int32_t j = 0; j < count; j++) {
        memcpy(s->keys + (int64_t)j * job->key_dim + a->nope_dim,
               s->kv + (int64_t)j * job->kv_dim + a->latent_dim,
               (size_t)a->rope_dim * sizeof(float));
    }
}

/* Rows [from, from + rows) of the chunk against a tile of `count` tokens from position `first`. */
static void attend_block(const struct job *job, const struct scratch *s, int32_t h, int32_t from,
                         int32_t rows, int32_t first, int32_t count)
{
    const struct tv_prefill_attn *a = job->args;
    int64_t q_stride = (int64_t)a->heads * job->key_dim;
    int64_t o_stride = (int64_t)a->heads * a->v_dim;
    const float *q = a->q + from * q_stride + (int64_t)h * job->key_dim;
    float *out = a->out + from * o_stride + (int64_t)h * a->v_dim;
    const float *keys[TILE];
    const float *values[TILE];
    float rescale[BLOCK];
    for (int32_t j = 0; j < count; j++) {
        keys[j] = s->keys + (int64_t)j * job->key_dim;
        values[j] = s->values + (int64_t)j * a->v_dim;
    }
    job->cpu->micro->dot(rows, count, job->key_dim, q, q_stride, (const void *const *)keys, TV_F32,
                         s->p, TILE, 0);
    int32_t same = 0; /* rows that see the whole tile */
    for (int32_t r = 0; r < rows; r++) {
        int32_t seen = a->start + from + r - first + 1;
        seen = seen < count ? seen : count;
        rescale[r] = job->cpu->micro->softmax(seen, a->softmax_scale, s->p + r * TILE,
                                              &s->max[from + r], &s->sum[from + r]);
        same += seen == count;
    }
    /* Rows on the diagonal come first and see fewer tokens: one by one, so that what they do not
     * see is never multiplied by zero. */
    for (int32_t r = 0; r < rows - same; r++) {
        int32_t seen = a->start + from + r - first + 1;
        job->cpu->micro->mix(1, seen, a->v_dim, s->p + r * TILE, TILE, values, rescale + r,
                             out + r * o_stride, o_stride);
    }
    int32_t r = rows - same;
    job->cpu->micro->mix(same, count, a->v_dim, s->p + r * TILE, TILE, values, rescale + r,
                         out + r * o_stride, o_stride);
}

static void begin_head(const struct job *job, const struct scratch *s, int32_t h)
{
    const struct tv_prefill_attn *a = job->args;
    for (int32_t r = 0; r < a->rows; r++) {
        s->max[r] = -INFINITY;
        s->sum[r] = 0.0f;
        memset(a->out + ((int64_t)r * a->heads + h) * a->v_dim, 0,
               (size_t)a->v_dim * sizeof(float));
    }
}

static void end_head(const struct job *job, const struct scratch *s, int32_t h)
{
    const struct tv_prefill_attn *a = job->args;
    for (int32_t r = 0; r < a->rows; r++) {
        float *out = a->out + ((int64_t)r * a->heads + h) * a->v_dim;
        float factor = 1.0f / s->sum[r];
        for (int32_t d = 0; d < a->v_dim; d++) {
            out[d] *= factor;
        }
    }
}

static void run_head(void *arg, int32_t h, int32_t thread)
{
    const struct job *job = arg;
    const struct tv_prefill_attn *a = job->args;
    struct scratch s = {.kv = NULL};
    (void)carve(a, (char *)a->workspace + (size_t)thread * job->scratch_bytes, &s);
    if (a->key_count > 0) { /* a later call goes on from them */
        s.max = a->running + (int64_t)h * 2 * a->rows;
        s.sum = s.max + a->rows;
    }
    if (a->key_first == 0) {
        begin_head(job, &s, h);
    }
    int32_t tokens = a->start + a->rows;
    int32_t end = a->key_count > 0 ? a->key_first + a->key_count : tokens;
    for (int32_t first = a->key_first; first < end; first += TILE) {
        int32_t count = end - first < TILE ? end - first : TILE;
        int32_t from = first > a->start ? first - a->start : 0; /* the first row that sees it */
        expand_tile(job, &s, thread, h, first, count);
        for (; from < a->rows; from += BLOCK) {
            int32_t rows = a->rows - from < BLOCK ? a->rows - from : BLOCK;
            attend_block(job, &s, h, from, rows, first, count);
        }
        tv_cpu_pool_step(job->cpu->pool);
    }
    if (end == tokens) {
        end_head(job, &s, h);
    }
}

size_t tv_cpu_prefill_attn_workspace(const struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    return carve(args, NULL, NULL) * (size_t)tv_cpu_pool_threads(tv_cpu_of(k)->pool);
}

int tv_cpu_prefill_attn(struct tv_kernels *k, const struct tv_prefill_attn *args)
{
    int rc = tv_args_prefill_attn(args);
    if (rc != 0 || args->rows == 0) {
        return rc;
    }
    if (args->products != TV_PRODUCTS_EXACT) {
        return -ENOTSUP;
    }
    if (args->workspace_bytes < tv_cpu_prefill_attn_workspace(k, args)) {
        return -ENOSPC;
    }
    struct job job = {
        .args = args,
        .cpu = tv_cpu_of(k),
        .key_dim = args->nope_dim + args->rope_dim,
        .kv_dim = args->latent_dim + args->rope_dim,
        .scratch_bytes = carve(args, NULL, NULL),
    };
    tv_cpu_run(k, args->heads, INT64_MAX, run_head, &job);
    return 0;
}
