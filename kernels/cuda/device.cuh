/*
 * device.cuh - small device functions that several operations share: widening loads, rounding
 * stores, and sums over a warp or a block in a fixed tree.
 *
 * Owns no kernel.
 */
#ifndef TV_KERNELS_CUDA_DEVICE_CUH
#define TV_KERNELS_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "internal.h"
#include "ptx.cuh"

/* The widest rotated vector (kernels/args.h has the same limit). */
#define ROPE_DIM_MAX 256

TV_DEVICE float widen(float x)
{
    return x;
}

TV_DEVICE float widen(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}

TV_DEVICE float widen(__half x)
{
    return __half2float(x);
}

/* Element `index` of an array of any table dtype. */
TV_DEVICE float load_f32(const void *data, enum tv_dtype dtype, int64_t index)
{
    if (dtype == TV_F32) {
        return ((const float *)data)[index];
    }
    return dtype == TV_BF16 ? widen(((const __nv_bfloat16 *)data)[index])
                            : widen(((const __half *)data)[index]);
}

/* One rounding to f32 or bf16, to nearest even. */
TV_DEVICE void store_rounded(void *data, enum tv_dtype dtype, int64_t index, float value)
{
    if (dtype == TV_F32) {
        ((float *)data)[index] = value;
    } else {
        ((__nv_bfloat16 *)data)[index] = __float2bfloat16_rn(value);
    }
}

/* Sum over the lanes of a warp; every lane gets the same bits. */
template <typename T> TV_DEVICE T warp_sum(T x)
{
    for (int i = 16; i > 0; i >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, i);
    }
    return x;
}

/* Sum over a block of whole warps; every thread gets the same bits. */
template <typename T> TV_DEVICE T block_sum(T x)
{
    __shared__ T parts[32];
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    T sum = parts[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++) {
        sum += parts[w];
    }
    return sum;
}

/* Largest over a block; NaN loses. */
TV_DEVICE float block_max(float x)
{
    __shared__ float parts[32];
    for (int i = 16; i > 0; i >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    float top = parts[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++) {
        top = fmaxf(top, parts[w]);
    }
    return top;
}

/* silu(gate) * up */
TV_DEVICE float gated(float gate, float up)
{
    return gate / (1.0f + expf(-gate)) * up;
}

/*
 * One warp turns one vector from interleaved pairs to halves; from and to may be the same memory.
 * A position outside the table gives NaN.
 */
template <typename Store>
TV_DEVICE void rotate(const float *from, const struct tv_rope_table &table, int32_t position,
                      Store store)
{
    int32_t half = table.rope_dim / 2;
    bool inside = position >= 0 && position < table.positions;
    const float *cosines = table.cos_sin + (int64_t)(inside ? position : 0) * table.rope_dim;
    float low[ROPE_DIM_MAX / 64], high[ROPE_DIM_MAX / 64];
#pragma unroll
    for (int j = 0; j < ROPE_DIM_MAX / 64; j++) {
        int32_t i = (int32_t)(threadIdx.x & 31) + 32 * j;
        low[j] = high[j] = CUDART_NAN_F;
        if (i < half && inside) {
            float even = from[2 * i], odd = from[2 * i + 1];
            float c = cosines[i], s = cosines[half + i];
            low[j] = fmaf(even, c, -(odd * s));
            high[j] = fmaf(odd, c, even * s);
        }
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < ROPE_DIM_MAX / 64; j++) {
        int32_t i = (int32_t)(threadIdx.x & 31) + 32 * j;
        if (i < half) {
            store(i, low[j]);
            store(half + i, high[j]);
        }
    }
}

#endif
