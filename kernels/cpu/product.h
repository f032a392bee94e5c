/*
 * product.h - rows times a dense panel of weights, on whatever this processor does best.
 *
 * Owns the choice between the tile kernels and the vector loops, and the packed rows of each
 * thread. The choice is a function of the caller, the weights' type and k, never of the rows.
 */
#ifndef TV_KERNELS_CPU_PRODUCT_H
#define TV_KERNELS_CPU_PRODUCT_H

#include "cpu.h"

/* y[r * y_stride + c] (+)= sum over i < k of x[r * x_stride + i] * w[c * k + i] */
struct tv_cpu_product {
    int32_t rows, cols, k;
    const float *x;
    int64_t x_stride;
    const void *w; /* [cols, k] */
    enum tv_dtype w_dtype;
    float *y;
    int64_t y_stride;
    int accumulate;
    /* Whether the tile kernels may serve it: they want many rows in every call, since what serves
     * many has to serve one. */
    int many_rows;
};

/* A thread's packed rows. */
struct tv_cpu_packed {
    char *memory;   /* TV_CPU_PACKED_BYTES */
    int64_t serial; /* job that packed, 0: none */
    int64_t key;    /* and the caller's name for the rows */
};

/* Room for 16 rows of the longest sum, 1.7 MB; untouched pages of it cost nothing. */
#define TV_CPU_PACKED_BYTES (tv_cpu_amx_bytes(TV_CPU_AMX_ROWS, TV_CPU_AMX_K_MAX))

/* One block for all threads, which the caller frees. -ENOMEM. */
int tv_cpu_packed_create(int32_t threads, struct tv_cpu_packed **ret_packed);

/* Inside a job, on one of its threads. Within a job, equal keys mean equal x, rows and k. */
void tv_cpu_product_run(const struct tv_cpu *cpu, int32_t thread, int64_t key,
                        const struct tv_cpu_product *product);

#endif
