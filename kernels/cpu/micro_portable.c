/*
 * micro_portable.c - vector primitives in plain C: eight lanes as an array, products and sums
 * rounded separately. What runs where no better variant may.
 */
#include <math.h>
#include <stdint.h>

#include "../convert.h"

#define VL          8
#define MICRO_ROWS  4
#define MICRO_COLS  2
#define MICRO_MIX   2
#define MICRO_TABLE tv_cpu_micro_portable
#define MICRO_NAME  "portable"

struct lanes {
    float v[VL];
};
#define vf struct lanes

#define LANES(expression)                                                                          \
    struct lanes result;                                                                           \
    for (int i = 0; i < VL; i++) {                                                                 \
        result.v[i] = (expression);                                                                \
    }                                                                                              \
    return result

static inline vf vf_zero(void)
{
    LANES(0.0f);
}

static inline vf vf_set1(float x)
{
    LANES(x);
}

static inline vf vf_load(const float *p)
{
    LANES(p[i]);
}

static inline vf vf_add(vf a, vf b)
{
    LANES(a.v[i] + b.v[i]);
}

static inline vf vf_mul(vf a, vf b)
{
    LANES(a.v[i] * b.v[i]);
}

static inline vf vf_div(vf a, vf b)
{
    LANES(a.v[i] / b.v[i]);
}

static inline vf vf_fma(vf a, vf b, vf c)
{
    LANES(a.v[i] * b.v[i] + c.v[i]);
}

/* As the instruction does it: the second operand when either is NaN. */
static inline vf vf_max(vf a, vf b)
{
    LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}

static inline vf vf_min(vf a, vf b)
{
    LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}

static inline vf vf_round(vf v)
{
    LANES(rintf(v.v[i]));
}

static inline vf vf_load_bf16(const uint16_t *p)
{
    LANES(tv_bf16_to_f32(p[i]));
}

static inline vf vf_load_f16(const uint16_t *p)
{
    LANES(tv_f16_to_f32(p[i]));
}

static inline vf vf_load_part(const float *p, int32_t count)
{
    LANES(i < count ? p[i] : 0.0f);
}

/* 2^n for integral n; NaN must not reach the integer conversion. */
static inline vf vf_pow2(vf n)
{
    LANES(ldexpf(1.0f, n.v[i] == n.v[i] ? (int)n.v[i] : 0));
}

static inline void vf_store(float *p, vf v)
{
    memcpy(p, v.v, sizeof v.v);
}

static inline void vf_store_part(float *p, vf v, int32_t count)
{
    memcpy(p, v.v, (size_t)count * sizeof *p);
}

static inline float vf_sum(vf v)
{
    return ((v.v[0] + v.v[4]) + (v.v[2] + v.v[6])) + ((v.v[1] + v.v[5]) + (v.v[3] + v.v[7]));
}

static inline void vf_sum4(vf a, vf b, vf c, vf d, float *ret)
{
    ret[0] = vf_sum(a);
    ret[1] = vf_sum(b);
    ret[2] = vf_sum(c);
    ret[3] = vf_sum(d);
}

#include "micro_body.h"
