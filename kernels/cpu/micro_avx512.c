/*
 * micro_avx512.c - vector primitives on AVX-512F. Compiled with that flag alone, reached only when
 * the processor has it.
 */
#include <immintrin.h>
#include <stdint.h>

#define VL          16
#define MICRO_ROWS  6
#define MICRO_COLS  4
#define MICRO_MIX   4
#define MICRO_TABLE tv_cpu_micro_avx512
#define MICRO_NAME  "avx512f"

typedef __m512 vf;

#define vf_zero()       _mm512_setzero_ps()
#define vf_set1(x)      _mm512_set1_ps(x)
#define vf_load(p)      _mm512_loadu_ps(p)
#define vf_store(p, v)  _mm512_storeu_ps(p, v)
#define vf_add(a, b)    _mm512_add_ps(a, b)
#define vf_mul(a, b)    _mm512_mul_ps(a, b)
#define vf_div(a, b)    _mm512_div_ps(a, b)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vf_max(a, b)    _mm512_max_ps(a, b)
#define vf_min(a, b)    _mm512_min_ps(a, b)
#define vf_round(v)     _mm512_roundscale_ps(v, 0)

static inline __mmask16 part_mask(int32_t count)
{
    return (__mmask16)((1u << count) - 1u);
}

static inline vf vf_load_part(const float *p, int32_t count)
{
    return _mm512_maskz_loadu_ps(part_mask(count), p);
}

static inline void vf_store_part(float *p, vf v, int32_t count)
{
    _mm512_mask_storeu_ps(p, part_mask(count), v);
}

static inline vf vf_load_bf16(const uint16_t *p)
{
    __m256i bits = _mm256_loadu_si256((const __m256i_u *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)p));
}

/* 2^n for integral n in [-126, 127] */
static inline vf vf_pow2(vf n)
{
    __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
}

static inline float vf_sum(vf v)
{
    __m256 low = _mm512_castps512_ps256(v);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* ret = the vf_sum of each, the same pairs of lanes added: halves, quarters, then inside 128 bits.
 * A blend takes the place of every second shuffle, since those have one port. */
static inline void vf_sum4(vf a, vf b, vf c, vf d, float *ret)
{
    const __m512i cross =
        _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
    const __m512i firsts = _mm512_setr_epi32(0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12, 0, 8, 4, 12);
    __m512 ab = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
    __m512 cd = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, c, d), _mm512_shuffle_f32x4(c, d, 0x4e));
    __m512 acbd =
        _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, ab, cd), _mm512_permutex2var_ps(ab, cross, cd));
    __m512 two = _mm512_add_ps(acbd, _mm512_permute_ps(acbd, 0x0e));
    __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0x01));
    _mm_storeu_ps(ret, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one)));
}

#include "micro_body.h"
