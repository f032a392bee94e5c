/*
 * attn.c - builds verify-attention problems and runs them in any layout.
 */
#include "tests/check/attn.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

int64_t attn_lse_count(const struct attn_problem *p)
{
    return (int64_t)p->batch * p->q_len * p->heads;
}

int64_t attn_out_count(const struct attn_problem *p)
{
    return attn_lse_count(p) * p->latent;
}

static float *rounded_normals(struct check *c, int64_t count, enum tv_dtype dtype)
{
    float *values = check_normals(c, count, 1.0f);
    for (int64_t i = 0; i < count && dtype == TV_BF16; i++) {
        values[i] = tv_bf16_to_f32(tv_f32_to_bf16(values[i]));
    }
    return values;
}

struct attn_problem attn_make(struct check *c, int32_t batch, const int32_t *prefix,
                              const int32_t *nodes, int32_t heads, enum attn_tree tree,
                              enum tv_dtype dtype)
{
    struct attn_problem p = {.batch = batch, .heads = heads, .dtype = dtype};
    p.latent = TV_MLA_LATENT;
    p.rope = TV_MLA_ROPE;
    p.out_dtype = TV_F32;
    p.scale = 0.07216878f; /* 192^-0.5 */
    p.prefix = check_host(c, (size_t)batch * sizeof *p.prefix);
    p.nodes = check_host(c, (size_t)batch * sizeof *p.nodes);
    p.kv = check_host(c, (size_t)batch * sizeof *p.kv);
    for (int32_t b = 0; b < batch; b++) {
        p.prefix[b] = prefix[b];
        p.nodes[b] = nodes[b];
        p.q_len = nodes[b] > p.q_len ? nodes[b] : p.q_len;
        p.kv[b] = rounded_normals(c, (int64_t)(prefix[b] + nodes[b]) * TV_MLA_ROW, dtype);
    }
    p.parents = check_host(c, (size_t)batch * (size_t)p.q_len * sizeof *p.parents);
    for (int32_t b = 0; b < batch; b++) {
        int32_t *parents = p.parents + (int64_t)b * p.q_len;
        for (int32_t i = 0; i < p.q_len; i++) {
            parents[i] = i == 0 || i >= nodes[b] ? -1
                         : tree == ATTN_CHAIN    ? i - 1
                         : tree == ATTN_STAR     ? 0
                                                 : check_range(c, 0, i - 1);
        }
    }
    p.q = rounded_normals(c, attn_lse_count(&p) * TV_MLA_ROW, dtype);
    return p;
}

/* Device memory of one run, freed at its end so that many runs fit one case. */
struct run {
    struct tv_kernels *k;
    void *device[16];
    int32_t device_count;
    void *host[16];
    int32_t host_count;
};

static void *run_host(struct run *run, size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) {
        abort();
    }
    run->host[run->host_count++] = memory;
    return memory;
}

static void *run_device(struct run *run, const void *host, size_t bytes)
{
    void *device = run->k->alloc(run->k, bytes ? bytes : 1);
    int rc = !device ? -ENOMEM
             : host  ? run->k->upload(run->k, device, host, bytes)
                     : run->k->fill(run->k, device, 0xff, bytes);
    if (rc != 0) {
        abort();
    }
    run->device[run->device_count++] = device;
    return device;
}

static void run_finish(struct run *run)
{
    (void)run->k->sync(run->k);
    while (run->device_count > 0) {
        run->k->free(run->k, run->device[--run->device_count]);
    }
    while (run->host_count > 0) {
        free(run->host[--run->host_count]);
    }
}

static void store(void *data, enum tv_dtype dtype, int64_t index, float value)
{
    if (dtype == TV_F32) {
        ((float *)data)[index] = value;
    } else {
        ((uint16_t *)data)[index] = tv_f32_to_bf16(value);
    }
}

/* Page tables and the pool; every row that is nobody's is NaN. */
static void lay_pages(struct check *c, struct run *run, const struct attn_problem *p,
                      const struct attn_layout *layout, struct tv_verify_attn *a)
{
    int32_t dim = p->latent + p->rope, used = 0;
    for (int32_t b = 0; b < p->batch; b++) {
        int32_t tokens = p->prefix[b] + p->nodes[b];
        int32_t pages = (tokens + layout->page_size - 1) / layout->page_size;
        a->max_pages = pages + 1 > a->max_pages ? pages + 1 : a->max_pages;
        a->kv_len_max = tokens > a->kv_len_max ? tokens : a->kv_len_max;
        used += pages;
    }
    a->page_count = used + (layout->shuffled ? 3 : 0);
    int32_t *order = run_host(run, (size_t)a->page_count * sizeof *order);
    for (int32_t i = 0; i < a->page_count; i++) {
        order[i] = i;
    }
    for (int32_t i = (int32_t)a->page_count - 1; i > 0 && layout->shuffled; i--) {
        int32_t other = check_range(c, 0, i), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    int64_t elements = a->page_count * layout->page_size * dim;
    size_t bytes = (size_t)elements * tv_dtype_size(p->dtype);
    void *pool = run_host(run, bytes);
    memset(pool, 0xff, bytes);
    size_t table_bytes = (size_t)p->batch * (size_t)a->max_pages * sizeof(int32_t);
    int32_t *table = run_host(run, table_bytes), next = 0;
    memset(table, 0xff, table_bytes);
    for (int32_t b = 0; b < p->batch; b++) {
        for (int32_t t = 0; t < p->prefix[b] + p->nodes[b]; t++) {
            int32_t *page = &table[(int64_t)b * a->max_pages + t / layout->page_size];
            if (*page < 0) {
                *page = order[next++];
            }
            int64_t row = (int64_t)*page * layout->page_size + t % layout->page_size;
            for (int32_t d = 0; d < dim; d++) {
                store(pool, p->dtype, row * dim + d, p->kv[b][(int64_t)t * dim + d]);
            }
        }
    }
    a->kv_pages = run_device(run, pool, bytes);
    a->page_table = run_device(run, table, table_bytes);
}

/* Queries and parents, padded or packed; row_of maps a padded row to its place. */
static int32_t lay_rows(struct run *run, const struct attn_problem *p,
                        const struct attn_layout *layout, struct tv_verify_attn *a, int32_t *row_of)
{
    int32_t rows = 0;
    int64_t width = (int64_t)p->heads * (p->latent + p->rope);
    int32_t *starts = run_host(run, (size_t)p->batch * sizeof *starts);
    for (int32_t b = 0; b < p->batch; b++) {
        starts[b] = rows;
        for (int32_t i = 0; i < p->q_len; i++) {
            row_of[(int64_t)b * p->q_len + i] = !layout->packed || i < p->nodes[b] ? rows++ : -1;
        }
    }
    size_t bytes = (size_t)(rows * width) * tv_dtype_size(p->dtype);
    void *q = run_host(run, bytes);
    int32_t *parents = run_host(run, (size_t)rows * sizeof *parents);
    for (int32_t r = 0; r < p->batch * p->q_len; r++) {
        if (row_of[r] >= 0) {
            parents[row_of[r]] = p->parents[r];
            for (int64_t d = 0; d < width; d++) {
                store(q, p->dtype, row_of[r] * width + d, p->q[r * width + d]);
            }
        }
    }
    a->q = run_device(run, q, bytes);
    a->parents = run_device(run, parents, (size_t)rows * sizeof *parents);
    a->row_start =
        layout->packed ? run_device(run, starts, (size_t)p->batch * sizeof *starts) : NULL;
    return rows;
}

static void gather(struct run *run, const struct attn_problem *p, const struct tv_verify_attn *a,
                   int32_t rows, const int32_t *row_of, struct attn_result *result)
{
    size_t count = (size_t)rows * (size_t)p->heads * (size_t)p->latent;
    size_t lse_count = (size_t)rows * (size_t)p->heads;
    void *out = run_host(run, count * tv_dtype_size(p->out_dtype));
    float *lse = run_host(run, lse_count * sizeof *lse);
    if (run->k->download(run->k, out, a->out, count * tv_dtype_size(p->out_dtype)) != 0 ||
        run->k->download(run->k, lse, a->lse, lse_count * sizeof *lse) != 0 ||
        run->k->sync(run->k) != 0) {
        abort();
    }
    int64_t width = (int64_t)p->heads * p->latent;
    for (int32_t r = 0; r < p->batch * p->q_len; r++) {
        for (int64_t d = 0; d < width; d++) {
            int64_t from = row_of[r] * width + d;
            result->out[r * width + d] = row_of[r] < 0 ? 0.0f
                                         : p->out_dtype == TV_F32
                                             ? ((float *)out)[from]
                                             : tv_bf16_to_f32(((uint16_t *)out)[from]);
        }
        for (int32_t h = 0; h < p->heads; h++) {
            result->lse[(int64_t)r * p->heads + h] =
                row_of[r] < 0 ? -INFINITY : lse[(int64_t)row_of[r] * p->heads + h];
        }
    }
}

/* Run again on poisoned memory; fails the check when a bit of the outputs differs. */
static void repeat(struct check *c, struct run *run, const struct attn_layout *layout,
                   const struct tv_verify_attn *a, size_t out_bytes, size_t lse_bytes)
{
    struct tv_kernels *k = run->k;
    char *first = run_host(run, out_bytes + lse_bytes);
    char *again = run_host(run, out_bytes + lse_bytes);
    for (int32_t i = 0; i <= layout->repeats; i++) {
        char *to = i == 0 ? first : again;
        int rc = 0;
        if (i > 0) {
            rc = k->fill(k, a->workspace, 0xff, a->workspace_bytes);
            rc = rc != 0 ? rc : k->fill(k, a->out, 0xff, out_bytes);
            rc = rc != 0 ? rc : k->fill(k, a->lse, 0xff, lse_bytes);
            rc = rc != 0 ? rc : k->verify_attn(k, a);
        }
        rc = rc != 0 ? rc : k->download(k, to, a->out, out_bytes);
        rc = rc != 0 ? rc : k->download(k, to + out_bytes, a->lse, lse_bytes);
        rc = rc != 0 ? rc : k->sync(k);
        if (rc != 0 || (i > 0 && memcmp(first, again, out_bytes + lse_bytes) != 0)) {
            check_fail(c, "repeat %d of %d splits: %s", i, layout->splits,
                       rc != 0 ? "failed" : "other bits");
            return;
        }
    }
}

int attn_run(struct check *c, struct tv_kernels *k, const struct attn_problem *p,
             const struct attn_layout *layout, struct attn_result *ret_result)
{
    struct run run = {.k = k};
    struct tv_verify_attn a = {.batch = p->batch, .q_len = p->q_len, .heads = p->heads};
    a.latent_dim = p->latent;
    a.rope_dim = p->rope;
    a.softmax_scale = p->scale;
    a.dtype = p->dtype;
    a.out_dtype = p->out_dtype;
    a.page_size = layout->page_size;
    a.splits = layout->splits;
    a.round_p_bf16 = layout->round_p;
    a.sum_f32 = layout->sum_f32;
    a.blocks_max = layout->blocks;
    int32_t *row_of = run_host(&run, (size_t)p->batch * (size_t)p->q_len * sizeof *row_of);
    lay_pages(c, &run, p, layout, &a);
    int32_t rows = lay_rows(&run, p, layout, &a, row_of);
    a.prefix_len = run_device(&run, p->prefix, (size_t)p->batch * sizeof(int32_t));
    a.node_count = run_device(&run, p->nodes, (size_t)p->batch * sizeof(int32_t));
    size_t out_bytes = (size_t)rows * (size_t)p->heads * (size_t)p->latent;
    a.out = run_device(&run, NULL, out_bytes * tv_dtype_size(p->out_dtype));
    a.lse = run_device(&run, NULL, (size_t)rows * (size_t)p->heads * sizeof(float));
    a.workspace_bytes =
        layout->naive ? k->verify_attn_naive_workspace(k, &a) : k->verify_attn_workspace(k, &a);
    a.workspace = run_device(&run, NULL, a.workspace_bytes);
    int rc = layout->naive ? k->verify_attn_naive(k, &a) : k->verify_attn(k, &a);
    ret_result->out = check_host(c, (size_t)attn_out_count(p) * sizeof(float));
    ret_result->lse = check_host(c, (size_t)attn_lse_count(p) * sizeof(float));
    if (rc == 0 && layout->repeats > 0 && !layout->naive) {
        repeat(c, &run, layout, &a, out_bytes * tv_dtype_size(p->out_dtype),
               (size_t)rows * (size_t)p->heads * sizeof(float));
    }
    if (rc == 0) {
        gather(&run, p, &a, rows, row_of, ret_result);
    } else if (rc != -ENOTSUP) {
        check_fail(c, "%s returned %d", layout->naive ? "verify_attn_naive" : "verify_attn", rc);
    }
    run_finish(&run);
    return rc;
}
