/*
 * amx_tiles.h - what the tile kernels share: cutting floats into pieces, pairs, transposition.
 *
 * Private to the files that are compiled with the flags of AMX; everything is inlined.
 */
#ifndef TV_KERNELS_CPU_AMX_TILES_H
#define TV_KERNELS_CPU_AMX_TILES_H

#include <immintrin.h>
#include <stdint.h>

#include "amx.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
/* The compilers do not see what tile instructions read. */
#define PUBLISH() __asm__ volatile("" ::: "memory")

enum { ROWS = TV_CPU_AMX_ROWS, STEP = TV_CPU_AMX_STEP, TILE = TV_CPU_AMX_TILE, LINE = 64 };

/* LDTILECFG's memory: palette 1, every tile 16 rows of 64 bytes. */
static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tv_amx_whole_tiles = {
    .palette = 1,
    .row_bytes = {LINE, LINE, LINE, LINE, LINE, LINE, LINE, LINE},
    .rows = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS},
};

/* The bf16 pieces of x in the upper halves; the lower halves hold rubbish. */
INLINE void tv_amx_split(__m512 x, __m512i ret[3])
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    __m512 hi = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper));
    /* Equal also when infinite: then nothing is left, instead of the NaN of inf - inf. */
    __m512 rest = _mm512_maskz_sub_ps(_mm512_cmp_ps_mask(x, hi, _CMP_NEQ_UQ), x, hi);
    __m512 mid = _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(rest), upper));
    ret[0] = _mm512_castps_si512(x);
    ret[1] = _mm512_castps_si512(rest);
    ret[2] = _mm512_castps_si512(_mm512_sub_ps(rest, mid));
}

/* Upper halves of `even` and `odd` as pairs. */
INLINE __m512i tv_amx_pair(__m512i even, __m512i odd)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(even, 16), odd, upper, 0xf8);
}

/* ret[i] = elements at + i of 16 rows. Masked broadcasts put four rows into a register, which
 * leaves a transposition of 4 x 4 in each quarter. */
INLINE void tv_amx_transpose4(const float *const row[ROWS], int32_t at, __m512 ret[4])
{
    __m512 v[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_broadcast_f32x4(_mm_loadu_ps(row[i] + at));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_loadu_ps(row[i + 4] + at));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_loadu_ps(row[i + 8] + at));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_loadu_ps(row[i + 12] + at));
    }
    __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1]));
    __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
    __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
    __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
    ret[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    ret[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    ret[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(c, d));
    ret[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(c, d));
}

/* ret[r] = column r of a tile of sums. */
INLINE void tv_amx_transpose(const float sums[ROWS * ROWS], __m512 ret[ROWS])
{
    const float *line[ROWS];
    UNROLL
    for (int i = 0; i < ROWS; i++) {
        line[i] = sums + i * ROWS;
    }
    UNROLL
    for (int i = 0; i < ROWS; i += 4) {
        tv_amx_transpose4(line, i, ret + i);
    }
}

/* amx_attn.c */
void tv_amx_scores(int32_t rows, int32_t dim, const char *queries, const float *const token[64],
                   const float *const *ahead, float *s);
void tv_amx_values(int32_t rows, int32_t latent, const float *p, const float *const token[64],
                   const float *rescale, char *packed, float *o);

#endif
