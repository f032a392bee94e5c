/*
 * prefill_attn_tiles.cuh - what the tiles of a segment hold beside expanded keys and values: the
 * scale of every token, rotated keys, and zeros where a tile is wider or longer than the data.
 *
 * A token's scale comes from a bound, not from its expanded keys, so it is known before they are:
 * no element of k_up or v_up is beyond `largest`, so none of their products with a latent is beyond
 * largest * |latent|_1. It depends on weights and on the token's row alone.
 */
#ifndef TV_KERNELS_CUDA_PREFILL_ATTN_TILES_CUH
#define TV_KERNELS_CUDA_PREFILL_ATTN_TILES_CUH

#include "prefill_attn.cuh"

#define LARGEST_PARTS   128
#define LARGEST_THREADS 256
#define SCALE_MOST      60 /* exponents; a token of next to nothing stays next to nothing */
#define TOKEN_WARPS     4

/* The largest magnitude in the grid's share of a matrix that this thread has. */
TV_DEVICE float share_most(const void *x, int64_t count, enum tv_dtype dtype)
{
    float most = 0.0f;
    int64_t step = (int64_t)gridDim.x * LARGEST_THREADS;
    int64_t from = (int64_t)blockIdx.x * LARGEST_THREADS + threadIdx.x;
    int64_t words = dtype == TV_BF16 && (uintptr_t)x % 16 == 0 ? count / 8 : 0;
#pragma unroll 4
    for (int64_t i = from; i < words; i += step) {
        const uint4 word = ((const uint4 *)x)[i];
        const __nv_bfloat162 *pairs = (const __nv_bfloat162 *)&word;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 pair = __bfloat1622float2(pairs[j]);
            most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
    }
#pragma unroll 8
    for (int64_t i = 8 * words + from; i < count; i += step) {
        most = fmaxf(most, fabsf(load_f32(x, dtype, i)));
    }
    return most;
}

/* parts[block]: the largest magnitude in the block's share of both matrices. */
static __global__ void __launch_bounds__(LARGEST_THREADS)
    prefill_largest(const void *k_up, int64_t k_count, const void *v_up, int64_t v_count,
                    enum tv_dtype dtype, float *parts)
{
    float most = fmaxf(share_most(k_up, k_count, dtype), share_most(v_up, v_count, dtype));
    most = block_max(most);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = most;
    }
}

/* The exponent of the scale that keeps a token's keys and values in range. */
TV_DEVICE int32_t token_exponent(const struct tv_prefill_attn &a, int64_t row, const float *parts)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    float sum = 0.0f, rope = 0.0f, largest = 0.0f;
    for (int32_t i = lane; i < a.latent_dim; i += 32) {
        sum += fabsf(load_f32(a.kv_pages, a.kv_dtype, row + i));
    }
    for (int32_t i = lane; i < a.rope_dim; i += 32) {
        rope = fmaxf(rope, fabsf(load_f32(a.kv_pages, a.kv_dtype, row + a.latent_dim + i)));
    }
    for (int32_t i = lane; i < LARGEST_PARTS; i += 32) {
        largest = fmaxf(largest, parts[i]);
    }
    float bound = fmaxf(warp_most(largest) * warp_sum(sum), warp_most(rope));
    if (!(bound > 0.0f && bound < CUDART_INF_F)) {
        return 0; /* nothing to scale, or nothing that a scale would help */
    }
    return min(TILE_EXPONENT - 1 - ilogbf(bound), SCALE_MOST);
}

/* Zeros from element `from` on, in both halves of a row of `width`. */
TV_DEVICE void row_clear(char *rows, int32_t low, int32_t width, int32_t t, int32_t from,
                         int32_t end)
{
    for (int32_t d = from + ((int32_t)threadIdx.x & 31); d < end; d += 32) {
        tile_store(rows + tile_offset(width, t, d), low, 0.0f);
    }
}

/* One warp a token; tokens behind the segment's last are zeros. */
static __global__ void __launch_bounds__(TOKEN_WARPS * 32)
    prefill_tokens(const __grid_constant__ struct tv_prefill_attn a,
                   const __grid_constant__ struct prefill_segment s, const float *parts,
                   float *scales, char *tiles)
{
    int32_t at = (int32_t)(blockIdx.x * TOKEN_WARPS + (threadIdx.x >> 5));
    int32_t lane = (int32_t)threadIdx.x & 31, t = at % TILE_TOKENS;
    int32_t token = s.first + at, exponent = 0;
    bool inside = token < s.end;
    int64_t row = 0;
    if (inside) {
        int64_t page = a.page_table[token / a.page_size];
        row = (page * a.page_size + token % a.page_size) * (a.latent_dim + a.rope_dim);
        exponent = token_exponent(a, row, parts);
    }
    if (lane < 3) {
        float undo = power_of_two(-exponent), up = power_of_two(exponent);
        scales[(at / TILE_TOKENS * 3 + lane) * TILE_TOKENS + t] = lane == SCALE_UNDO ? undo
                                                                  : lane == SCALE_MINUS
                                                                      ? -(float)exponent
                                                                      : up;
    }
    float scale = power_of_two(exponent);
    int32_t k_low = prefill_has_low(a) ? TILE_K_LOW : 0,
            v_low = prefill_has_low(a) ? TILE_V_LOW : 0;
    for (int32_t head = (int32_t)blockIdx.y; head < a.heads; head += (int32_t)gridDim.y) {
        char *tile = tiles + ((int64_t)head * (PREFILL_SEGMENT / TILE_TOKENS) + at / TILE_TOKENS) *
                                 TILE_BYTES;
        row_clear(tile, k_low, TILE_KEY, t, inside ? a.nope_dim : 0, TILE_NOPE_MAX);
        row_clear(tile + TILE_V, v_low, TILE_VALUE, t, inside ? a.v_dim : 0, TILE_VALUE);
        for (int32_t d = lane; d < TILE_ROPE_MAX; d += 32) {
            float value = inside && d < a.rope_dim
                              ? load_f32(a.kv_pages, a.kv_dtype, row + a.latent_dim + d) * scale
                              : 0.0f;
            tile_store(tile + tile_offset(TILE_KEY, t, TILE_NOPE_MAX + d), k_low, value);
        }
    }
}

#endif
