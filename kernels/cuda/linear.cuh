/*
 * linear.cuh - the matrix product behind linear, experts and prefill_attn: y[r][n] = x[r] . w[n].
 *
 * One order of summation for every launch shape. k is cut into chunks of 128; a chunk's products
 * are summed by the tensor cores from zero; the chunks' sums are added in f32, ascending. So a
 * result depends on its row of x and its row of w alone, however many rows share the launch and
 * however they are tiled.
 *
 * bf16 weights meet f32 rows without a rounding of the rows: a float is cut into three bf16 pieces
 * that add up to it exactly, and each piece is multiplied; TV_PRODUCTS_BF16 rounds it to one where
 * it is read. Other weights, and rows of w that are not a whole number of 16-byte words, take
 * linear_any: f32 products.
 *
 * What is multiplied, and where results go, is told by a problem type P:
 *   X (float, bf16, or linear_rounded: f32 in memory, rounded to bf16);
 *   paired (two matrices share x: gate and up);
 *   vector (rows of x may be read 16 bytes at a time);
 *   struct tile { w[], n, k, rows, ... };
 *   open (tile `at` of the rows of a group; false: there is none); x_row; store or store_pair;
 *   streamed (few rows take linear_slab or linear_stream: also early, which names a block's items,
 *   a tile of rows and some columns, and place, which finds one);
 *   items_ready: early, and then open, read what was there when the launch began, as launch.cuh
 *   says; rows_ready: so do x_row and the reads of rows;
 *   has_late: late names further items, when the launch before has ended; the rows of the early
 *   ones are ready.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_CUH
#define TV_KERNELS_CUDA_LINEAR_CUH

#include "device.cuh"

#define LINEAR_CHUNK       128 /* k of one partial sum */
#define LINEAR_ANY         8   /* rows of a block of linear_any */
#define LINEAR_ANY_THREADS 256
#define LINEAR_ANY_MANY    4 /* columns of a block, for many rows */

/* An element of a row of x that is rounded to bf16 where it is read. */
struct linear_rounded {
    float value;
};

TV_DEVICE float widen(struct linear_rounded x)
{
    return __bfloat162float(__float2bfloat16_rn(x.value));
}

/* Eight consecutive elements of a row of x as bf16 pairs; hi + mid + lo is the element. */
struct linear_pieces {
    uint32_t hi[4], mid[4], lo[4];
};

/* The upper halves of two floats, the first in the low half: bf16, cut off. */
TV_DEVICE uint32_t linear_upper(float a, float b)
{
    return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
}

/* What cutting off leaves; exact. */
TV_DEVICE float linear_remainder(float x)
{
    return x - __uint_as_float(__float_as_uint(x) & 0xffff0000u);
}

/* Eight elements of a row of x as they are read. */
struct linear_floats {
    float v[8];
};

struct linear_rounds {
    struct linear_floats all;
};

struct linear_halves {
    uint4 v;
};

TV_DEVICE void linear_read(const float *x, bool vector, struct linear_floats *ret)
{
    if (vector) {
        *(float4 *)ret->v = *(const float4 *)x;
        *(float4 *)(ret->v + 4) = *(const float4 *)(x + 4);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        ret->v[i] = x[i];
    }
}

TV_DEVICE void linear_read(const struct linear_rounded *x, bool vector, struct linear_rounds *ret)
{
    linear_read(&x->value, vector, &ret->all);
}

TV_DEVICE void linear_read(const __nv_bfloat16 *x, bool vector, struct linear_halves *ret)
{
    if (vector) {
        ret->v = *(const uint4 *)x;
        return;
    }
    const uint16_t *bits = (const uint16_t *)x;
    ret->v.x = (uint32_t)bits[0] | (uint32_t)bits[1] << 16;
    ret->v.y = (uint32_t)bits[2] | (uint32_t)bits[3] << 16;
    ret->v.z = (uint32_t)bits[4] | (uint32_t)bits[5] << 16;
    ret->v.w = (uint32_t)bits[6] | (uint32_t)bits[7] << 16;
}

TV_DEVICE void linear_cut(const struct linear_floats &x, struct linear_pieces *ret)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a = x.v[2 * i], b = x.v[2 * i + 1];
        ret->hi[i] = linear_upper(a, b);
        a = linear_remainder(a);
        b = linear_remainder(b);
        ret->mid[i] = linear_upper(a, b);
        ret->lo[i] = linear_upper(linear_remainder(a), linear_remainder(b));
    }
}

TV_DEVICE void linear_cut(const struct linear_rounds &x, struct linear_pieces *ret)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(x.all.v[2 * i], x.all.v[2 * i + 1]);
        ret->hi[i] = *reinterpret_cast<uint32_t *>(&pair);
    }
}

TV_DEVICE void linear_cut(const struct linear_halves &x, struct linear_pieces *ret)
{
    *(uint4 *)ret->hi = x.v;
}

TV_DEVICE uint4 linear_load_w(const __nv_bfloat16 *w)
{
    uint4 r;
    /* volatile: asked for where it stands, ahead of what the launch waits for */
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(w));
    return r;
}

/* How a type of x is read, and whether one piece is all that is multiplied. */
template <typename X> struct linear_x;
template <> struct linear_x<float> {
    typedef linear_floats raw;
    static constexpr bool exact = false;
};
template <> struct linear_x<linear_rounded> {
    typedef linear_rounds raw;
    static constexpr bool exact = true;
};
template <> struct linear_x<__nv_bfloat16> {
    typedef linear_halves raw;
    static constexpr bool exact = true;
};

/* A problem of f32 rows whose elements are rounded where they are read. */
template <typename P> struct linear_round : P {
    typedef linear_rounded X;

    __device__ __forceinline__ const linear_rounded *x_row(const typename P::tile &t,
                                                           int32_t row) const
    {
        return (const linear_rounded *)P::x_row(t, row);
    }
};

/* Whether these products take linear_round. */
static inline bool linear_rounds_x(enum tv_products products, enum tv_dtype w_dtype)
{
    return products == TV_PRODUCTS_BF16 && w_dtype == TV_BF16;
}

/* Where element e of a block's [B][4][32] sums belongs: column and row inside the block. */
TV_DEVICE int32_t linear_column(int32_t e)
{
    return (e & 31) / 4 + (e & 64) / 8;
}

TV_DEVICE int32_t linear_row(int32_t e)
{
    return e / 128 * 8 + (e & 3) * 2 + (e & 32) / 32;
}

/*
 * Any weights: a block makes C columns of up to LINEAR_ANY rows, and then the next; its threads
 * share k, and its warps' sums are added in order.
 */
template <typename P, typename W, int C>
static __global__ void __launch_bounds__(LINEAR_ANY_THREADS) linear_any(const __grid_constant__ P p)
{
    constexpr int MATRICES = P::paired ? 2 : 1, WARPS = LINEAR_ANY_THREADS / 32, ALL = MATRICES * C;
    __shared__ float parts[WARPS][ALL][LINEAR_ANY];
    int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5;
    typename P::tile t;
    ptx_wait_dependence();
    ptx_launch_dependents();
    if (!p.open(t, (int32_t)blockIdx.x, (int32_t)blockIdx.z, LINEAR_ANY)) {
        return;
    }
    const typename P::X *x[LINEAR_ANY];
#pragma unroll
    for (int r = 0; r < LINEAR_ANY; r++) {
        x[r] = p.x_row(t, min(r, t.rows - 1));
    }
    for (int32_t column = (int32_t)blockIdx.y * C; column < t.n; column += (int32_t)gridDim.y * C) {
        float sum[ALL][LINEAR_ANY] = {};
#pragma unroll 4
        for (int32_t i = thread; i < t.k; i += LINEAR_ANY_THREADS) {
            float weight[ALL];
#pragma unroll
            for (int m = 0; m < ALL; m++) {
                int32_t mine = C == 1 ? column : min(column + m % C, t.n - 1);
                weight[m] = widen(((const W *)t.w[m / C])[(int64_t)mine * t.k + i]);
            }
#pragma unroll
            for (int r = 0; r < LINEAR_ANY; r++) {
                float value = widen(x[r][i]);
#pragma unroll
                for (int m = 0; m < ALL; m++) {
                    sum[m][r] = fmaf(value, weight[m], sum[m][r]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < ALL; m++) {
#pragma unroll
            for (int r = 0; r < LINEAR_ANY; r++) {
                float all = warp_sum(sum[m][r]);
                if (lane == r) {
                    parts[warp][m][r] = all;
                }
            }
        }
        __syncthreads();
        int32_t row = thread % LINEAR_ANY, mine = column + thread / LINEAR_ANY;
        if (thread < C * LINEAR_ANY && row < t.rows && mine < t.n) {
            float total[MATRICES] = {};
            for (int w = 0; w < WARPS; w++) {
#pragma unroll
                for (int m = 0; m < MATRICES; m++) {
                    total[m] += parts[w][m * C + thread / LINEAR_ANY][row];
                }
            }
            if constexpr (P::paired) {
                p.store_pair(t, row, mine, total[0], total[1]);
            } else {
                p.store(t, row, mine, total[0]);
            }
        }
        __syncthreads();
    }
}

#endif
