/*
 * convert.h - reading elements of any table dtype as f32, and as products see them, for host code.
 *
 * Owns the f16 conversion that types.h leaves out. Every widening is exact.
 */
#ifndef TV_KERNELS_CONVERT_H
#define TV_KERNELS_CONVERT_H

#include "types.h"

static inline float tv_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    uint32_t exponent = (bits >> 10) & 0x1fu;
    uint32_t mantissa = bits & 0x3ffu;
    uint32_t wide;
    float value;
    if (exponent == 0) {
        /* Zero and subnormals are mantissa * 2^-24, exact in f32. */
        value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    if (exponent == 31) {
        wide = sign | 0x7f800000u | (mantissa << 13);
    } else {
        wide = sign | ((exponent + 112u) << 23) | (mantissa << 13);
    }
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Element `index` of `data`. */
static inline float tv_load_f32(const void *data, enum tv_dtype dtype, int64_t index)
{
    if (dtype == TV_F32) {
        return ((const float *)data)[index];
    }
    uint16_t bits = ((const uint16_t *)data)[index];
    return dtype == TV_BF16 ? tv_bf16_to_f32(bits) : tv_f16_to_f32(bits);
}

/* An element of x where it meets a weight. */
static inline float tv_product_x(float x, enum tv_products products, enum tv_dtype w_dtype)
{
    return products == TV_PRODUCTS_BF16 && w_dtype == TV_BF16 ? tv_bf16_to_f32(tv_f32_to_bf16(x))
                                                              : x;
}

/* Address of element `index` of `data`. */
static inline const void *tv_element(const void *data, enum tv_dtype dtype, int64_t index)
{
    return (const char *)data + index * (int64_t)tv_dtype_size(dtype);
}

/* Store with one rounding; dtype is TV_F32 or TV_BF16. */
static inline void tv_store_f32(void *data, enum tv_dtype dtype, int64_t index, float value)
{
    if (dtype == TV_F32) {
        ((float *)data)[index] = value;
    } else {
        ((uint16_t *)data)[index] = tv_f32_to_bf16(value);
    }
}

#endif
