/*
 * micro.h - the few inner loops that exist once per instruction set.
 *
 * Owns their contract. Every function keeps one order of summation per result element: lanes over
 * the summed index, ascending steps, one fixed reduction; how many rows or columns share a call
 * changes nothing. No threads, no scratch, any alignment.
 */
#ifndef TV_KERNELS_CPU_MICRO_H
#define TV_KERNELS_CPU_MICRO_H

#include "../types.h"

struct tv_cpu_micro {
    const char *name;

    /* y[r * y_stride + c] (+)= sum over i < k of x[r * x_stride + i] * w[c][i], w of `dtype`. */
    void (*dot)(int32_t rows, int32_t cols, int32_t k, const float *x, int64_t x_stride,
                const void *const *w, enum tv_dtype dtype, float *y, int64_t y_stride,
                int accumulate);

    /* o[r][d] = o[r][d] * rescale[r] + sum over j < count of p[r][j] * v[j][d] */
    void (*mix)(int32_t rows, int32_t count, int32_t dim, const float *p, int64_t p_stride,
                const float *const *v, const float *rescale, float *o, int64_t o_stride);

    /* One tile of an online softmax: s[0..count) becomes exp(scale * s - max), *max and *sum are
     * updated; returns the factor of what was summed before (0 at the first tile, *max = -inf). */
    float (*softmax)(int32_t count, float scale, float *s, float *max, float *sum);

    /* total[d] = total[d] * total_factor + o[d] * o_factor: a split joins the earlier ones */
    void (*join)(int32_t dim, const float *o, double o_factor, double *total, double total_factor);
    /* y[d] = total[d] * factor, rounded once */
    void (*narrow)(int32_t dim, const double *total, double factor, float *y);

    void (*swiglu)(int64_t count, float *gate, const float *up);
    void (*rmsnorm)(int32_t dim, const float *x, const float *weight, float eps, float *y);
    /* bf16 to f32 */
    void (*widen)(int32_t count, const uint16_t *bits, float *values);
};

extern const struct tv_cpu_micro tv_cpu_micro_portable;
#if defined(__x86_64__)
extern const struct tv_cpu_micro tv_cpu_micro_avx2;
extern const struct tv_cpu_micro tv_cpu_micro_avx512;
#endif

#endif
