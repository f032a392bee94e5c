/*
 * amx.h - products of f32 rows with bf16 weights on Intel's matrix unit.
 *
 * Owns the contract of the tile kernels; present only where the processor and its kernel have them,
 * next to the vector loops of micro.h and never instead of them.
 *
 * Numerics. A float is cut into three bf16 pieces by truncation, x = hi + mid + lo, which is exact:
 * 8 + 8 + 8 bits. TDPBF16PS then multiplies 16 x 32 by 32 x 16 elements: products of bf16 are exact
 * in f32, even and odd k are summed apart in ascending k, with one rounding to nearest each, and
 * their sum joins the accumulator. A result's order is: ascending steps of 32 in k, in a step lo,
 * then mid, then hi. Nothing in it depends on how many rows or columns a call has, nor on
 * their place: the hardware computes each element of a tile by itself, and tiles are always whole.
 * Scores and values of attention cut both factors and leave out the three products that are below
 * 2^-24 of the whole. A score sums the five small ones over all of dim, then hi times hi on top; a
 * value sums all six, small ones first, in each step of 32 tokens. Here a step pairs elements 16
 * apart. The unit flushes subnormals: pieces below 2^-126 count as zero (an element below 2^-102
 * loses its lowest bits, an error of at most 2^-126), subnormal products and sums too. Infinities
 * and NaN: an infinite x has no lower pieces, so it stays infinite; NaN stays NaN in the first or
 * second piece. An infinite weight gives infinity or, against a zero piece, NaN: never a finite
 * sum.
 */
#ifndef TV_KERNELS_CPU_AMX_H
#define TV_KERNELS_CPU_AMX_H

#include <stddef.h>

#include "../types.h"

enum {
    TV_CPU_AMX_ROWS = 16,   /* rows of x in a packed tile */
    TV_CPU_AMX_STEP = 32,   /* elements of k in it */
    TV_CPU_AMX_PARTS = 3,   /* bf16 pieces of a float */
    TV_CPU_AMX_TILE = 1024, /* bytes of one piece of a packed tile */
    /* The longest sums that are served: a tile of 16 packed rows fits a thread's scratch. */
    TV_CPU_AMX_K_MAX = 18432,
};

/* Bytes of `rows` packed rows: whole tiles, [rows / 16][k / 32][piece][16 pairs of k][16 rows]. */
static inline size_t tv_cpu_amx_bytes(int32_t rows, int32_t k)
{
    size_t tiles = ((size_t)rows + TV_CPU_AMX_ROWS - 1) / TV_CPU_AMX_ROWS;
    size_t steps = ((size_t)k + TV_CPU_AMX_STEP - 1) / TV_CPU_AMX_STEP;
    return tiles * steps * TV_CPU_AMX_PARTS * TV_CPU_AMX_TILE;
}

struct tv_cpu_amx {
    /* Cut and pack rows of x. `packed` starts at a multiple of 64; columns of missing rows are left
     * as they are or filled with another row, and reach no result. */
    void (*pack)(int32_t rows, int32_t k, const float *x, int64_t x_stride, char *packed);

    /* y[r * y_stride + c] (+)= sum over i < k of x[r][i] * w[c * k + i], w bf16. The calling
     * thread's tiles are configured and released inside. */
    void (*dot)(int32_t rows, int32_t cols, int32_t k, const char *packed, const uint16_t *w,
                float *y, int64_t y_stride, int accumulate);

    /* Attention over one tile of 64 tokens that are all visible; dim and latent are multiples of
     * 64. Queries [rows, dim] take tv_cpu_amx_bytes(rows, dim). */
    void (*pack_queries)(int32_t rows, int32_t dim, const float *q, char *packed);
    /* s[r * 64 + j] = q[r] . token j; s has room for whole tiles of 16 rows. The rows of
     * `ahead`, if any, are the tokens of the next call: they are fetched meanwhile. */
    void (*scores)(int32_t rows, int32_t dim, const char *queries, const float *const token[64],
                   const float *const *ahead, float *s);
    /* o[r][d] = o[r][d] * rescale[r] + sum over j of p[r * 64 + j] * token j [d], d < latent;
     * `packed` is scratch of tv_cpu_amx_bytes(rows, 64) */
    void (*values)(int32_t rows, int32_t latent, const float *p, const float *const token[64],
                   const float *rescale, char *packed, float *o);
};

extern const struct tv_cpu_amx tv_cpu_amx_tiles;

/* Ask the kernel to let this process's threads use the tiles; 0 or -ENOTSUP. Any thread. */
int tv_cpu_amx_permit(void);

#endif
