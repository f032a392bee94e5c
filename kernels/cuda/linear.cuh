/*
 * linear.cuh - the matrix product behind linear, experts and prefill_attn: y[r][n] = x[r] . w[n].
 *
 * One order of summation for every launch shape. k is cut into chunks of 128; a chunk's products
 * are summed by the tensor cores from zero; the chunks' sums are added in f32, ascending. So a
 * result depends on its row of x and its row of w alone, however many rows share the launch and
 * however they are tiled.
 *
 * bf16 weights meet f32 rows without a rounding of the rows: a float is cut into three bf16 pieces
 * that add up to it exactly, and each piece is multiplied. Other weights, and rows of w that are
 * not a whole number of 16-byte words, take linear_any: one warp a column, f32 products.
 *
 * What is multiplied, and where results go, is told by a problem type P:
 *   X (float or bf16), paired (two matrices share x: gate and up), n, k, vector (rows of x may be
 *   read 16 bytes at a time), struct tile { w[], rows, ... }, open, x_row, store or store_pair.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_CUH
#define TV_KERNELS_CUDA_LINEAR_CUH

#include "device.cuh"

#define LINEAR_WARPS   8
#define LINEAR_THREADS (LINEAR_WARPS * 32)
#define LINEAR_CHUNK   128 /* k of one partial sum */
#define LINEAR_ANY     8   /* rows and columns of a block of linear_any */

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

TV_DEVICE void linear_cut(const struct linear_halves &x, struct linear_pieces *ret)
{
    *(uint4 *)ret->hi = x.v;
}

TV_DEVICE uint4 linear_load_w(const __nv_bfloat16 *w)
{
    uint4 r;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
        : "l"(w));
    return r;
}

/* How a type of x is read, and whether one piece is the whole element. */
template <typename X> struct linear_x;
template <> struct linear_x<float> {
    typedef linear_floats raw;
    static constexpr bool exact = false;
};
template <> struct linear_x<__nv_bfloat16> {
    typedef linear_halves raw;
    static constexpr bool exact = true;
};

/* What a warp's lane reads of 32 k. */
template <int A, int B, typename X> struct linear_step {
    uint4 w[2 * A];
    typename linear_x<X>::raw x[B];
};

template <int A, int B, typename X>
TV_DEVICE void linear_fetch(const __nv_bfloat16 *const (&w)[2 * A], const X *const (&x)[B],
                            bool vector, int32_t at, int32_t k, struct linear_step<A, B, X> *ret)
{
    if (at < k) {
#pragma unroll
        for (int i = 0; i < 2 * A; i++) {
            ret->w[i] = linear_load_w(w[i] + at);
        }
#pragma unroll
        for (int b = 0; b < B; b++) {
            linear_read(x[b] + at, vector, &ret->x[b]);
        }
    } else {
        struct linear_step<A, B, X> zero = {
        };
        *ret = zero;
    }
}

/*
 * One warp, one chunk: sum[a][b] = 16 columns of w times 8 rows of x. A lane holds rows lane / 4
 * and lane / 4 + 8 of each 16 columns (w[2a], w[2a + 1]) and row lane / 4 of each 8 rows; of every
 * 32 k it reads 8 consecutive ones, which serve two products. k is a multiple of 8.
 */
template <int A, int B, typename X>
TV_DEVICE void linear_chunk(const __nv_bfloat16 *const (&w)[2 * A], const X *const (&x)[B],
                            bool vector, int32_t first, int32_t k, float (&sum)[A][B][4])
{
    constexpr int STEPS = LINEAR_CHUNK / 32;
    constexpr int DEPTH = A * B == 1   ? 4
                          : A * B == 2 ? 3
                                       : 2; /* steps in flight: what registers hold */
    float rest[A][B][4] = {};
    struct linear_step<A, B, X> steps[DEPTH];
    int32_t at = first + (int32_t)(threadIdx.x & 3) * 8;
#pragma unroll
    for (int step = 0; step < DEPTH - 1; step++) {
        linear_fetch<A, B>(w, x, vector, at + 32 * step, k, &steps[step]);
    }
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const struct linear_step<A, B, X> &now = steps[step % DEPTH];
        int ahead = step + DEPTH - 1;
        if (ahead < STEPS) {
            linear_fetch<A, B>(w, x, vector, at + 32 * ahead, k, &steps[ahead % DEPTH]);
        }
#pragma unroll
        for (int b = 0; b < B; b++) {
            struct linear_pieces p;
            linear_cut(now.x[b], &p);
#pragma unroll
            for (int a = 0; a < A; a++) {
                const uint4 &top = now.w[2 * a], &bottom = now.w[2 * a + 1];
                uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y};
                uint32_t high[4] = {top.z, bottom.z, top.w, bottom.w};
                if constexpr (!linear_x<X>::exact) {
                    ptx_mma(rest[a][b], low, p.lo[0], p.lo[1]);
                    ptx_mma(rest[a][b], low, p.mid[0], p.mid[1]);
                    ptx_mma(rest[a][b], high, p.lo[2], p.lo[3]);
                    ptx_mma(rest[a][b], high, p.mid[2], p.mid[3]);
                }
                ptx_mma(sum[a][b], low, p.hi[0], p.hi[1]);
                ptx_mma(sum[a][b], high, p.hi[2], p.hi[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < A * B * 4; i++) {
        (&sum[0][0][0])[i] += (&rest[0][0][0])[i];
    }
}

/* Where element e of a block's [A][B][4][32] sums belongs: column and row inside the block. */
template <int B> TV_DEVICE int32_t linear_column(int32_t e)
{
    return e / (B * 128) * 16 + (e & 31) / 4 + (e & 64) / 8;
}

template <int B> TV_DEVICE int32_t linear_row(int32_t e)
{
    return e / 128 % B * 8 + (e & 3) * 2 + (e & 32) / 32;
}

/*
 * A block makes 16 * A columns (16 of each matrix when paired) of 8 * B rows. Its warps take one
 * chunk of k each, round after round, and its threads add the chunks' sums in order.
 */
template <typename P, int A, int B>
static __global__ void __launch_bounds__(LINEAR_THREADS, A *B >= 8 ? 1 : 2)
    linear_mma(const __grid_constant__ P p)
{
    constexpr int ELEMENTS = A * B * 128;
    constexpr int EACH = (ELEMENTS + LINEAR_THREADS - 1) / LINEAR_THREADS;
    __shared__ float parts[LINEAR_WARPS][ELEMENTS];
    typename P::tile t;
    if (!p.open(t, 8 * B)) {
        return;
    }
    int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5;
    int32_t first_column = (int32_t)blockIdx.y * (P::paired ? 16 : 16 * A);
    const __nv_bfloat16 *w[2 * A];
    const typename P::X *x[B];
#pragma unroll
    for (int i = 0; i < 2 * A; i++) {
        int32_t column = first_column + (P::paired ? 0 : i / 2 * 16) + i % 2 * 8 + lane / 4;
        column = min(column, p.n - 1); /* beyond the last: computed, not stored */
        w[i] = (const __nv_bfloat16 *)t.w[P::paired ? i / 2 : 0] + (int64_t)column * p.k;
    }
#pragma unroll
    for (int b = 0; b < B; b++) {
        x[b] = p.x_row(t, min(b * 8 + lane / 4, t.rows - 1));
    }
    float total[EACH] = {};
    int32_t chunks = (p.k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
    for (int32_t first = 0; first < chunks; first += LINEAR_WARPS) {
        if (first + warp < chunks) {
            float sum[A][B][4] = {};
            linear_chunk<A, B>(w, x, p.vector, (first + warp) * LINEAR_CHUNK, p.k, sum);
#pragma unroll
            for (int i = 0; i < A * B * 4; i++) {
                parts[warp][i * 32 + lane] = (&sum[0][0][0])[i];
            }
        }
        __syncthreads();
        int32_t count = min(LINEAR_WARPS, chunks - first);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int32_t e = thread + i * LINEAR_THREADS;
            for (int32_t c = 0; c < count && e < ELEMENTS; c++) {
                total[i] += parts[c][e];
            }
        }
        __syncthreads();
    }
    if constexpr (P::paired) {
        static_assert(A == 2, "one 16 columns of each matrix");
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            parts[0][thread + i * LINEAR_THREADS] = total[i];
        }
        __syncthreads();
        for (int32_t e = thread; e < ELEMENTS / 2; e += LINEAR_THREADS) {
            int32_t column = first_column + linear_column<B>(e), row = linear_row<B>(e);
            if (column < p.n && row < t.rows) {
                p.store_pair(t, row, column, parts[0][e], parts[0][e + ELEMENTS / 2]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int32_t e = thread + i * LINEAR_THREADS;
            int32_t column = first_column + linear_column<B>(e), row = linear_row<B>(e);
            if (e < ELEMENTS && column < p.n && row < t.rows) {
                p.store(t, row, column, total[i]);
            }
        }
    }
}

/* Any weights: a warp makes one column of up to eight rows, its lanes share k. */
template <typename P, typename W>
static __global__ void __launch_bounds__(LINEAR_ANY * 32) linear_any(const __grid_constant__ P p)
{
    constexpr int MATRICES = P::paired ? 2 : 1;
    typename P::tile t;
    int32_t column = (int32_t)blockIdx.y * LINEAR_ANY + (int32_t)(threadIdx.x >> 5);
    int32_t lane = (int32_t)threadIdx.x & 31;
    if (!p.open(t, LINEAR_ANY) || column >= p.n) {
        return;
    }
    const W *w[MATRICES];
    const typename P::X *x[LINEAR_ANY];
    float sum[MATRICES][LINEAR_ANY] = {};
#pragma unroll
    for (int m = 0; m < MATRICES; m++) {
        w[m] = (const W *)t.w[m] + (int64_t)column * p.k;
    }
#pragma unroll
    for (int r = 0; r < LINEAR_ANY; r++) {
        x[r] = p.x_row(t, min(r, t.rows - 1));
    }
    for (int32_t i = lane; i < p.k; i += 32) {
#pragma unroll
        for (int r = 0; r < LINEAR_ANY; r++) {
            float value = widen(x[r][i]);
#pragma unroll
            for (int m = 0; m < MATRICES; m++) {
                sum[m][r] = fmaf(value, widen(w[m][i]), sum[m][r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < LINEAR_ANY; r++) {
        float first = warp_sum(sum[0][r]);
        if constexpr (P::paired) {
            float second = warp_sum(sum[1][r]);
            if (lane == r && r < t.rows) {
                p.store_pair(t, r, column, first, second);
            }
        } else if (lane == r && r < t.rows) {
            p.store(t, r, column, first);
        }
    }
}

#endif
