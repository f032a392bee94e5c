/*
 * experts.c - routed experts: rows gathered by expert, so that each expert's weights are read once.
 *
 * The sum over a row's experts runs in ascending j whatever the order in which they were computed.
 */
#include "cpu.h"

#include <errno.h>

#include "../args.h"
#include "../convert.h"
#include "product.h"

enum { PANEL = 32 };

struct job {
    const struct tv_experts *args;
    const struct tv_cpu *cpu;
    int32_t *first; /* [experts + 1]: where an expert's entries begin */
    int32_t *entry; /* [rows * top_k]: place in expert order of (row, j) */
    int32_t *used;  /* [experts]: experts with at least one entry */
    int32_t used_count;
    int32_t panels;
    float *x;    /* [entries, hidden] in expert order */
    float *gate; /* [entries, inter] */
    float *up;   /* [entries, inter] */
    float *down; /* [entries, hidden] */
};

static int64_t entry_count(const struct tv_experts *args)
{
    return (int64_t)args->rows * args->top_k;
}

static size_t index_bytes(const struct tv_experts *args)
{
    size_t count = 2 * (size_t)args->experts + 1 + (size_t)entry_count(args);
    return (count * sizeof(int32_t) + 63) / 64 * 64;
}

size_t tv_cpu_experts_workspace(const struct tv_kernels *k, const struct tv_experts *args)
{
    (void)k;
    size_t floats = 2 * ((size_t)args->hidden + (size_t)args->inter);
    return index_bytes(args) + (size_t)entry_count(args) * floats * sizeof(float);
}

static void carve(struct job *job)
{
    const struct tv_experts *a = job->args;
    int64_t entries = entry_count(a);
    job->first = a->workspace;
    job->used = job->first + a->experts + 1;
    job->entry = job->used + a->experts;
    job->x = (float *)((char *)a->workspace + index_bytes(a));
    job->gate = job->x + entries * a->hidden;
    job->up = job->gate + entries * a->inter;
    job->down = job->up + entries * a->inter;
}

/* Counting sort of (row, j) by expert, keeping row order inside one. */
static void group_rows(struct job *job)
{
    const struct tv_experts *a = job->args;
    int64_t entries = entry_count(a);
    memset(job->first, 0, ((size_t)a->experts + 1) * sizeof *job->first);
    for (int64_t i = 0; i < entries; i++) {
        job->first[a->ids[i] + 1]++;
    }
    for (int32_t e = 0; e < a->experts; e++) {
        if (job->first[e + 1] > 0) {
            job->used[job->used_count++] = e;
        }
        job->first[e + 1] += job->first[e];
    }
    for (int64_t i = 0; i < entries; i++) {
        job->entry[i] = job->first[a->ids[i]]++;
    }
    /* The cursors stand at each expert's end now: shift back to its beginning. */
    for (int32_t e = a->experts; e > 0; e--) {
        job->first[e] = job->first[e - 1];
    }
    job->first[0] = 0;
    for (int64_t i = 0; i < entries; i++) {
        memcpy(job->x + (int64_t)job->entry[i] * a->hidden, a->x + i / a->top_k * a->hidden,
               (size_t)a->hidden * sizeof(float));
    }
}

static void run_up(void *arg, int32_t item, int32_t thread)
{
    const struct job *job = arg;
    const struct tv_experts *a = job->args;
    int32_t e = job->used[item / job->panels];
    int32_t col = item % job->panels * PANEL;
    int32_t cols = a->inter - col < PANEL ? a->inter - col : PANEL;
    int32_t first = job->first[e];
    int32_t rows = job->first[e + 1] - first;
    float *gate = job->gate + (int64_t)first * a->inter + col;
    float *up = job->up + (int64_t)first * a->inter + col;
    struct tv_cpu_product product = {
        .rows = rows,
        .cols = cols,
        .k = a->hidden,
        .x = job->x + (int64_t)first * a->hidden,
        .x_stride = a->hidden,
        .w = tv_element(a->gate[e], a->w_dtype, (int64_t)col * a->hidden),
        .w_dtype = a->w_dtype,
        .y = gate,
        .y_stride = a->inter,
    };
    tv_cpu_product_run(job->cpu, thread, e, &product);
    product.w = tv_element(a->up[e], a->w_dtype, (int64_t)col * a->hidden);
    product.y = up;
    tv_cpu_product_run(job->cpu, thread, e, &product);
    for (int32_t r = 0; r < rows; r++) {
        job->cpu->micro->swiglu(cols, gate + (int64_t)r * a->inter, up + (int64_t)r * a->inter);
    }
}

static void run_down(void *arg, int32_t item, int32_t thread)
{
    const struct job *job = arg;
    const struct tv_experts *a = job->args;
    int32_t e = job->used[item / job->panels];
    int32_t col = item % job->panels * PANEL;
    int32_t cols = a->hidden - col < PANEL ? a->hidden - col : PANEL;
    int32_t first = job->first[e];
    const struct tv_cpu_product product = {
        .rows = job->first[e + 1] - first,
        .cols = cols,
        .k = a->inter,
        .x = job->gate + (int64_t)first * a->inter,
        .x_stride = a->inter,
        .w = tv_element(a->down[e], a->w_dtype, (int64_t)col * a->inter),
        .w_dtype = a->w_dtype,
        .y = job->down + (int64_t)first * a->hidden + col,
        .y_stride = a->hidden,
    };
    tv_cpu_product_run(job->cpu, thread, e, &product);
}

static void run_sum(void *arg, int32_t item, int32_t thread)
{
    const struct job *job = arg;
    const struct tv_experts *a = job->args;
    (void)thread;
    float *y = a->y + (int64_t)item * a->hidden;
    float *total = job->x + (int64_t)item * a->hidden; /* the gathered input is done with */
    for (int32_t j = 0; j < a->top_k; j++) {
        int64_t i = (int64_t)item * a->top_k + j;
        const float *down = job->down + (int64_t)job->entry[i] * a->hidden;
        float weight = a->weights[i];
        for (int32_t d = 0; d < a->hidden; d++) {
            total[d] = weight * down[d] + (j == 0 ? 0.0f : total[d]);
        }
    }
    for (int32_t d = 0; d < a->hidden; d++) {
        y[d] += total[d];
    }
}

int tv_cpu_experts(struct tv_kernels *k, const struct tv_experts *args)
{
    int rc = tv_args_experts(args);
    if (rc != 0 || args->rows == 0) {
        return rc;
    }
    if (args->products != TV_PRODUCTS_EXACT) {
        return -ENOTSUP;
    }
    if (args->workspace_bytes < tv_cpu_experts_workspace(k, args)) {
        return -ENOSPC;
    }
    struct job job = {.args = args, .cpu = tv_cpu_of(k)};
    carve(&job);
    group_rows(&job);
    int64_t work = entry_count(args) * args->hidden * args->inter;
    job.panels = (args->inter + PANEL - 1) / PANEL;
    tv_cpu_run(k, job.used_count * job.panels, 2 * work, run_up, &job);
    job.panels = (args->hidden + PANEL - 1) / PANEL;
    tv_cpu_run(k, job.used_count * job.panels, work, run_down, &job);
    tv_cpu_run(k, args->rows, entry_count(args) * args->hidden, run_sum, &job);
    return 0;
}
