/*
 * micro_avx512.c - vector primitives on AVX-512F. Compiled with that flag alone, reached only when
 * the processor has it.
 */
#include <immintrin.h>
#include <stdint.h>

#define VL          16
#define MICRO_ROWS  8
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

#include "micro_body.h"
