/*
 * types.h - element types and bit conversions shared by every backend.
 *
 * The common subset of C17 and CUDA C++: no includes of ours, no state.
 */
#ifndef TV_KERNELS_TYPES_H
#define TV_KERNELS_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

enum tv_dtype {
    TV_F32 = 0,
    TV_BF16 = 1,
    TV_F16 = 2,
};

/*
 * How activations meet bf16 weights. bf16: an element of x is rounded once, to nearest even, to
 * bf16 when it is read for a product; sums, and all that is not a product, stay as they are. Other
 * weights: no difference. The cpu backend has exact products alone (-ENOTSUP).
 */
enum tv_products {
    TV_PRODUCTS_EXACT = 0,
    TV_PRODUCTS_BF16 = 1,
};

/* Latent (kv_lora_rank) and rope dims of every published MLA checkpoint: compile-time constants of
 * the fast kernels, run-time values of the oracle. A KV row is latent followed by rotated key. */
#define TV_MLA_LATENT 512
#define TV_MLA_ROPE   64
#define TV_MLA_ROW    (TV_MLA_LATENT + TV_MLA_ROPE)

/* Upper bounds the kernels are built for (the HTTP limits in proto/limits.h are lower). */
#define TV_TREE_NODES_MAX 1024
#define TV_HEADS_MAX      128

/* Size of one element in bytes. */
static inline size_t tv_dtype_size(enum tv_dtype dtype)
{
    return dtype == TV_F32 ? 4u : 2u;
}

static inline float tv_bf16_to_f32(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t tv_f32_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((bits >> 16) | 0x40u);
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef __cplusplus
}
#endif

#endif
