/*
 * linear.c - grouped matrix product: panels of output columns over all threads.
 *
 * A panel's weights are read from memory once and stay in the second-level cache while all rows
 * pass over them.
 */
#include "cpu.h"

#include <errno.h>

#include "../args.h"
#include "../convert.h"
#include "product.h"

enum { PANEL_MAX = 64 };

struct job {
    const struct tv_linear *args;
    const struct tv_cpu *cpu;
    int32_t panel;  /* columns of an item */
    int32_t panels; /* per group */
};

static void run_panel(void *arg, int32_t item, int32_t thread)
{
    const struct job *job = arg;
    const struct tv_linear *a = job->args;
    int64_t group = item / job->panels;
    int32_t first = item % job->panels * job->panel;
    int32_t cols = a->n - first < job->panel ? a->n - first : job->panel;
    struct tv_cpu_product product = {
        .rows = a->rows,
        .cols = cols,
        .k = a->k,
        .x = a->x + group * a->x_group_stride,
        .x_stride = a->x_row_stride,
        .w = tv_element(a->w, a->w_dtype, group * a->w_group_stride + (int64_t)first * a->k),
        .w_dtype = a->w_dtype,
        .y = a->y + group * a->y_group_stride + first,
        .y_stride = a->y_row_stride,
        .accumulate = a->accumulate,
    };
    tv_cpu_product_run(job->cpu, thread, group, &product);
}

int tv_cpu_linear(struct tv_kernels *k, const struct tv_linear *args)
{
    int rc = tv_args_linear(args);
    if (rc != 0 || args->rows == 0) {
        return rc;
    }
    if (args->products != TV_PRODUCTS_EXACT) {
        return -ENOTSUP;
    }
    struct job job = {.args = args, .cpu = tv_cpu_of(k)};
    int32_t threads = tv_cpu_pool_threads(tv_cpu_of(k)->pool);
    /* A few items per thread even out unequal cores; panels stay multiples of the widest tile. */
    int64_t share = (int64_t)args->n * args->groups / ((int64_t)threads * 4);
    job.panel = share >= PANEL_MAX ? PANEL_MAX : (int32_t)(share < 16 ? 16 : share / 8 * 8);
    job.panels = (args->n + job.panel - 1) / job.panel;
    int64_t work = (int64_t)args->rows * args->n * args->k * args->groups;
    tv_cpu_run(k, job.panels * args->groups, work, run_panel, &job);
    return 0;
}
