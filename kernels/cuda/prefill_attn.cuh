/*
 * prefill_attn.cuh - what both forms of prefill attention share: the segment that a launch works
 * on, and how the tensor-core form keeps keys and values.
 *
 * A float times a power of two is the sum of two halves to 22 bits. Keys and values of a token are
 * kept as such pairs, scaled by a power of two of the token's own, so that neither half leaves the
 * range of its type whatever a cache row holds. A tile is the image that a block copies into shared
 * memory in one piece: 32 tokens of one head, rows of 16-byte words in the order that keeps matrix
 * loads free of bank conflicts. With TV_PRODUCTS_BF16 the low halves are neither written nor read.
 * Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_PREFILL_ATTN_CUH
#define TV_KERNELS_CUDA_PREFILL_ATTN_CUH

#include "device.cuh"

#define PREFILL_SEGMENT 4096 /* tokens that are expanded at a time */

/* What a launch over one segment needs beside the arguments. */
struct prefill_segment {
    const void *expanded; /* tiles [heads, tokens / TILE_TOKENS], or f32 keys and values */
    const float *values;  /* f32 form alone: [heads, SEGMENT, v]; keys [heads, SEGMENT, nope] */
    const float *scales;  /* tiles alone: [tokens / TILE_TOKENS][3][TILE_TOKENS] */
    float *top, *total;   /* [rows, heads]: running maximum and sum */
    int32_t first, end;   /* tokens of the segment */
    int32_t last_row;     /* tiles alone: the first row of the last block */
};

#define TILE_TOKENS   32
#define TILE_NOPE_MAX 128
#define TILE_ROPE_MAX 64
#define TILE_KEY      (TILE_NOPE_MAX + TILE_ROPE_MAX)
#define TILE_VALUE    128
#define TILE_K_LOW    (TILE_TOKENS * TILE_KEY * 2) /* bytes from a key's high half to its low one */
#define TILE_V        (2 * TILE_K_LOW)
#define TILE_V_LOW    (TILE_TOKENS * TILE_VALUE * 2)
#define TILE_BYTES    (TILE_V + 2 * TILE_V_LOW)
#define TILE_EXPONENT 15 /* scaled values are below 2 to this power */

/* Of a token's three numbers: what undoes its scale, minus the scale's exponent, the scale. */
#define SCALE_UNDO  0
#define SCALE_MINUS 1
#define SCALE_UP    2
#define SCALE_BYTES (3 * TILE_TOKENS * 4)

/* Byte offset of element d of a row of `width` halves, of token t of a tile. */
TV_DEVICE int32_t tile_offset(int32_t width, int32_t t, int32_t d)
{
    int32_t word = d >> 3;
    return t * width * 2 + ((word & ~7) | ((word ^ t) & 7)) * 16 + (d & 7) * 2;
}

/* low: bytes to the low half; 0: there is none. */
TV_DEVICE void tile_store(char *high, int32_t low, float value)
{
    __half top = __float2half_rn(value);
    *(__half *)high = top;
    if (low > 0) {
        *(__half *)(high + low) = __float2half_rn(value - __half2float(top));
    }
}

/* Two neighbours. */
TV_DEVICE void tile_store_pair(char *high, int32_t low, float x, float y)
{
    __half2 top = __floats2half2_rn(x, y);
    *(__half2 *)high = top;
    if (low > 0) {
        *(__half2 *)(high + low) = __floats2half2_rn(x - __low2float(top), y - __high2float(top));
    }
}

/* 2 to the power n, -126 <= n <= 127. */
TV_DEVICE float power_of_two(int32_t n)
{
    return __int_as_float((n + 127) << 23);
}

TV_DEVICE float warp_most(float x)
{
    for (int i = 16; i > 0; i >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
    }
    return x;
}

/* Whether tiles have low halves: only bf16 weights do without. */
static __host__ __device__ __forceinline__ bool prefill_has_low(const struct tv_prefill_attn &a)
{
    return a.products != TV_PRODUCTS_BF16 || a.w_dtype != TV_BF16;
}

/* Whether the tensor-core form takes these dimensions. */
static inline bool prefill_uses_tiles(const struct tv_prefill_attn *a)
{
    return a->nope_dim <= TILE_NOPE_MAX && a->rope_dim <= TILE_ROPE_MAX && a->v_dim <= TILE_VALUE;
}

static inline int32_t prefill_tiles(int32_t tokens)
{
    return (tokens + TILE_TOKENS - 1) / TILE_TOKENS;
}

#endif
