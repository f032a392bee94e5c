/*
 * micro_avx2.c - vector primitives on AVX2, FMA and F16C. Compiled with those flags alone, reached
 * only when the processor has them.
 */
#include <immintrin.h>
#include <stdint.h>

#define VL          8
#define MICRO_ROWS  4
#define MICRO_COLS  3
#define MICRO_MIX   2
#define MICRO_TABLE tv_cpu_micro_avx2
#define MICRO_NAME  "avx2"

typedef __m256 vf;

#define vf_zero()       _mm256_setzero_ps()
#define vf_set1(x)      _mm256_set1_ps(x)
#define vf_load(p)      _mm256_loadu_ps(p)
#define vf_store(p, v)  _mm256_storeu_ps(p, v)
#define vf_add(a, b)    _mm256_add_ps(a, b)
#define vf_mul(a, b)    _mm256_mul_ps(a, b)
#define vf_div(a, b)    _mm256_div_ps(a, b)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vf_max(a, b)    _mm256_max_ps(a, b)
#define vf_min(a, b)    _mm256_min_ps(a, b)
#define vf_round(v)     _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

static inline __m256i part_mask(int32_t count)
{
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
}

static inline vf vf_load_part(const float *p, int32_t count)
{
    return _mm256_maskload_ps(p, part_mask(count));
}

static inline void vf_store_part(float *p, vf v, int32_t count)
{
    _mm256_maskstore_ps(p, part_mask(count), v);
}

static inline vf vf_load_bf16(const uint16_t *p)
{
    __m128i bits = _mm_loadu_si128((const __m128i_u *)p);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

static inline vf vf_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)p));
}

/* 2^n for integral n in [-126, 127] */
static inline vf vf_pow2(vf n)
{
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

static inline float vf_sum(vf v)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/* ret = the vf_sum of each, the same pairs of lanes added: halves, then inside 128 bits. A blend
 * takes the place of every second shuffle, since those have one port. */
static inline void vf_sum4(vf a, vf b, vf c, vf d, float *ret)
{
    __m256 ab = _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21));
    __m256 cd = _mm256_add_ps(_mm256_blend_ps(c, d, 0xf0), _mm256_permute2f128_ps(c, d, 0x21));
    __m256 two = _mm256_add_ps(_mm256_blend_ps(ab, cd, 0xcc), _mm256_shuffle_ps(ab, cd, 0x4e));
    __m256 one = _mm256_add_ps(two, _mm256_permute_ps(two, 0xb1)); /* a a c c | b b d d */
    __m128 ac = _mm256_castps256_ps128(one);
    __m128 bd = _mm256_extractf128_ps(one, 1);
    _mm_storeu_ps(ret, _mm_blend_ps(ac, bd, 0xa));
}

#include "micro_body.h"
