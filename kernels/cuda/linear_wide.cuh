/*
 * linear_wide.cuh - the matrix product of linear.cuh for many rows: 128 columns of 64 rows a block.
 *
 * The same products in the same order as linear_slab, so the same bits; only who computes what
 * differs. Weights and rows pass through shared memory in slabs of 32 k, four in flight; floats are
 * cut into their pieces once on the way in. Each warp keeps 32 columns of 16 rows and walks all of
 * k. Owns no kernel choice: linear.cuh decides when there are enough blocks for it.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_WIDE_CUH
#define TV_KERNELS_CUDA_LINEAR_WIDE_CUH

#include "linear.cuh"

#define WIDE_ROWS    64
#define WIDE_COLUMNS 128 /* of one matrix; half of them of each when paired */
#define WIDE_SLAB    32  /* k of a stage */
#define WIDE_STAGES  4
#define WIDE_THREADS 512

/* One slab in shared memory: rows of 64 bytes, so that a quarter of a warp reads 128 in a row. */
template <typename X> struct wide_stage {
    __nv_bfloat16 w[WIDE_COLUMNS][WIDE_SLAB];
    __nv_bfloat16 x[linear_x<X>::exact ? 1 : 3][WIDE_ROWS][WIDE_SLAB]; /* hi, mid, lo */
};

TV_DEVICE void wide_copy(void *shared, const void *global, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx_shared(shared)),
                 "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
}

/* What a thread brings in: 16 bytes of weights and, in the first half of the block, eight elements
 * of a row. */
template <typename X> struct wide_source {
    const __nv_bfloat16 *w;
    const X *x;
    bool vector;
    int32_t k;
};

template <typename X>
TV_DEVICE void wide_fetch_w(const struct wide_source<X> &from, struct wide_stage<X> *to,
                            int32_t slab)
{
    int32_t thread = (int32_t)threadIdx.x, at = slab * WIDE_SLAB + thread % 4 * 8;
    bool inside = at < from.k;
    wide_copy(&to->w[thread / 4][thread % 4 * 8], from.w + (inside ? at : 0), inside);
}

template <typename X>
TV_DEVICE void wide_fetch_x(const struct wide_source<X> &from, int32_t slab,
                            typename linear_x<X>::raw *ret)
{
    int32_t at = slab * WIDE_SLAB + (int32_t)threadIdx.x % 4 * 8;
    typename linear_x<X>::raw raw = {};
    if (from.x != NULL && at < from.k) {
        linear_read(from.x + at, from.vector, &raw);
    }
    *ret = raw;
}

template <typename X>
TV_DEVICE void wide_store_x(const typename linear_x<X>::raw &raw, struct wide_stage<X> *to)
{
    struct linear_pieces p;
    linear_cut(raw, &p);
    int32_t row = (int32_t)threadIdx.x / 4, at = (int32_t)threadIdx.x % 4 * 8;
    if (row >= WIDE_ROWS) {
        return;
    }
    *(uint4 *)&to->x[0][row][at] = *(const uint4 *)p.hi;
    if constexpr (!linear_x<X>::exact) {
        *(uint4 *)&to->x[1][row][at] = *(const uint4 *)p.mid;
        *(uint4 *)&to->x[2][row][at] = *(const uint4 *)p.lo;
    }
}

/* One warp, one slab: the products of one step of linear_chunk, in its order. */
template <typename X>
TV_DEVICE void wide_step(const struct wide_stage<X> *from, float (&sum)[2][2][4],
                         float (&rest)[2][2][4])
{
    int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5;
    int32_t column = warp % 4 * 32 + lane / 4, row = warp / 4 * 16 + lane / 4, at = lane % 4 * 8;
    uint4 wide[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wide[i] = *(const uint4 *)&from->w[column + i * 8][at];
    }
#pragma unroll
    for (int b = 0; b < 2; b++) {
        uint4 hi = *(const uint4 *)&from->x[0][row + b * 8][at], mid = {}, lo = {};
        if constexpr (!linear_x<X>::exact) {
            mid = *(const uint4 *)&from->x[1][row + b * 8][at];
            lo = *(const uint4 *)&from->x[2][row + b * 8][at];
        }
#pragma unroll
        for (int a = 0; a < 2; a++) {
            const uint4 &top = wide[2 * a], &bottom = wide[2 * a + 1];
            uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y};
            uint32_t high[4] = {top.z, bottom.z, top.w, bottom.w};
            if (!linear_x<X>::exact) {
                ptx_mma(rest[a][b], low, lo.x, lo.y);
                ptx_mma(rest[a][b], low, mid.x, mid.y);
                ptx_mma(rest[a][b], high, lo.z, lo.w);
                ptx_mma(rest[a][b], high, mid.z, mid.w);
            }
            ptx_mma(sum[a][b], low, hi.x, hi.y);
            ptx_mma(sum[a][b], high, hi.z, hi.w);
        }
    }
}

/* A chunk of 128 k is complete: its sum joins the total. */
TV_DEVICE void wide_fold(float (&sum)[2][2][4], float (&rest)[2][2][4], float (&total)[2][2][4])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float *s = &sum[0][0][0] + i, *r = &rest[0][0][0] + i;
        (&total[0][0][0])[i] += *s + *r;
        *s = *r = 0.0f;
    }
}

template <typename P>
TV_DEVICE void wide_write(const P &p, const typename P::tile &t, int32_t first_column,
                          const float (&total)[2][2][4])
{
    int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5;
    int32_t column0 = first_column + warp % 4 * (P::paired ? 16 : 32) + lane / 4;
    int32_t row0 = warp / 4 * 16 + lane % 4 * 2;
#pragma unroll
    for (int b = 0; b < 2; b++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int32_t row = row0 + b * 8 + c % 2, column = column0 + c / 2 * 8;
            if (row >= t.rows) {
                continue;
            }
            if constexpr (P::paired) {
                if (column < t.n) {
                    p.store_pair(t, row, column, total[0][b][c], total[1][b][c]);
                }
            } else {
#pragma unroll
                for (int a = 0; a < 2; a++) {
                    if (column + a * 16 < t.n) {
                        p.store(t, row, column + a * 16, total[a][b][c]);
                    }
                }
            }
        }
    }
}

template <typename P>
static __global__ void __launch_bounds__(WIDE_THREADS, 1) linear_wide(const __grid_constant__ P p)
{
    typedef typename P::X X;
    extern __shared__ __align__(16) char wide_shared[];
    struct wide_stage<X> *stages = (struct wide_stage<X> *)wide_shared;
    typename P::tile t;
    ptx_wait_dependence();
    ptx_launch_dependents();
    if (!p.open(t, (int32_t)blockIdx.x, (int32_t)blockIdx.z, WIDE_ROWS)) {
        return;
    }
    int32_t thread = (int32_t)threadIdx.x;
    int32_t first_column = (int32_t)blockIdx.y * (P::paired ? WIDE_COLUMNS / 2 : WIDE_COLUMNS);
    if (first_column >= t.n) {
        return;
    }
    struct wide_source<X> from;
    from.vector = p.vector;
    from.k = t.k;
    from.x = thread / 4 < WIDE_ROWS ? p.x_row(t, min(thread / 4, t.rows - 1)) : NULL;
    int32_t at = thread / 4; /* row of the stage's weights */
    int32_t column = P::paired ? at / 32 * 16 + at % 16 : at;
    const void *w = P::paired && at / 16 % 2 == 1 ? t.w[P::paired ? 1 : 0] : t.w[0];
    column = min(first_column + column, t.n - 1);
    from.w = (const __nv_bfloat16 *)w + (int64_t)column * t.k;
    int32_t slabs = (t.k + WIDE_SLAB - 1) / WIDE_SLAB;
    typename linear_x<X>::raw raw;
    for (int32_t s = 0; s < WIDE_STAGES - 1; s++) {
        if (s < slabs) {
            wide_fetch_w(from, &stages[s], s);
            wide_fetch_x(from, s, &raw);
            wide_store_x<X>(raw, &stages[s]);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float sum[2][2][4] = {}, rest[2][2][4] = {}, total[2][2][4] = {};
    for (int32_t s = 0; s < slabs; s++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(WIDE_STAGES - 2) : "memory");
        __syncthreads(); /* slab s is here, and everybody is through with slab s - 1 */
        int32_t next = s + WIDE_STAGES - 1;
        struct wide_stage<X> *free_stage = &stages[next % WIDE_STAGES];
        if (next < slabs) {
            wide_fetch_w(from, free_stage, next);
            wide_fetch_x(from, next, &raw);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        wide_step(&stages[s % WIDE_STAGES], sum, rest);
        if (s % (LINEAR_CHUNK / WIDE_SLAB) == LINEAR_CHUNK / WIDE_SLAB - 1 || s == slabs - 1) {
            wide_fold(sum, rest, total);
        }
        if (next < slabs) {
            wide_store_x<X>(raw, free_stage);
        }
    }
    wide_write(p, t, first_column, total);
}

#endif
