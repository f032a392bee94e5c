/*
 * linear_slab.cuh - the matrix product of linear.cuh for few rows of many columns: bound by reading
 * the weights.
 *
 * A block makes 64 columns (32 of each matrix when paired) of up to 8 * B rows, and then the next.
 * Weights come as whole lines, 128 k of 64 columns at a time, several of these in flight, over the
 * border from one item to the next and ahead of the launch's dependences; rows of x are cut into
 * their pieces once for all columns. A warp keeps 16 columns and walks all of k, for as many groups
 * of 8 rows as a tile really has, so that weights are read once whatever a tile holds. The same
 * products in the same order as linear_stream and linear_wide, so the same bits. Owns no kernel
 * choice.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_SLAB_CUH
#define TV_KERNELS_CUDA_LINEAR_SLAB_CUH

#include "linear_stream.cuh"

#define SLAB_W       64 /* rows of weights of an item */
#define SLAB_THREADS 128

#define SLAB_COLUMNS(P) (P::paired ? SLAB_W / 2 : SLAB_W) /* of an item */

/* What a block shares. Rows of 256 bytes; stream_place says where in them. */
template <typename X, int B> struct slab_shared {
    static constexpr int STAGES = 3; /* chunks of weights in flight, one of them being used */
    static constexpr int BLOCKS = B <= 2 ? 3 : 2; /* that a multiprocessor has room for */
    __nv_bfloat16 w[STAGES][SLAB_W][LINEAR_CHUNK];
    __nv_bfloat16 x[2][linear_x<X>::exact ? 1 : 3][8 * B][LINEAR_CHUNK]; /* hi, mid, lo */
};

/* Where a thread reads rows of x: 8 k of one row of each group of 8. */
template <typename X, int B> struct slab_rows {
    const X *x[B]; /* NULL: no such row */
    int32_t index, chunk, k;
};

template <typename P, int B>
TV_DEVICE void slab_rows_seek(const P &p, const struct stream_run &run,
                              struct slab_rows<typename P::X, B> *rows)
{
    rows->chunk = rows->k = 0;
    if (rows->index < run.count) {
        typename P::tile t;
        int32_t tile, group, column, row = (int32_t)threadIdx.x / 16;
        p.place(run.first + rows->index, SLAB_COLUMNS(P), &tile, &group, &column);
        (void)p.open(t, tile, group, 8 * B);
#pragma unroll
        for (int b = 0; b < B; b++) {
            rows->x[b] = row + 8 * b < t.rows ? p.x_row(t, row + 8 * b) : NULL;
        }
        rows->k = t.k;
    }
}

/* Read a thread's part of the next chunk of x, and move on. */
template <typename P, int B>
TV_DEVICE void slab_rows_read(const P &p, const struct stream_run &run,
                              struct slab_rows<typename P::X, B> *rows,
                              typename linear_x<typename P::X>::raw (&ret)[B])
{
    int32_t at = rows->chunk * LINEAR_CHUNK + (int32_t)threadIdx.x % 16 * 8;
#pragma unroll
    for (int b = 0; b < B; b++) {
        typename linear_x<typename P::X>::raw raw = {};
        if (at < rows->k && rows->x[b] != NULL) {
            linear_read(rows->x[b] + at, p.vector, &raw);
        }
        ret[b] = raw;
    }
    rows->chunk++;
    if (rows->k > 0 && rows->chunk * LINEAR_CHUNK >= rows->k) {
        rows->index++;
        slab_rows_seek<P, B>(p, run, rows);
    }
}

template <typename X, int B>
TV_DEVICE void slab_rows_store(const typename linear_x<X>::raw (&raw)[B],
                               __nv_bfloat16 (*to)[8 * B][LINEAR_CHUNK])
{
    int32_t row = (int32_t)threadIdx.x / 16, at = stream_place(row, (int32_t)threadIdx.x % 16);
#pragma unroll
    for (int b = 0; b < B; b++) {
        struct linear_pieces p;
        linear_cut(raw[b], &p);
        *(uint4 *)&to[0][row + 8 * b][at] = *(const uint4 *)p.hi;
        if constexpr (!linear_x<X>::exact) {
            *(uint4 *)&to[1][row + 8 * b][at] = *(const uint4 *)p.mid;
            *(uint4 *)&to[2][row + 8 * b][at] = *(const uint4 *)p.lo;
        }
    }
}

/* One warp, one chunk: 16 columns and G groups of 8 rows, whose products go side by side, since
 * those of one sum wait for each other. */
template <typename X, int B, int G>
TV_DEVICE void slab_groups(const __nv_bfloat16 (*w)[LINEAR_CHUNK],
                           const __nv_bfloat16 (*x)[8 * B][LINEAR_CHUNK], float (&total)[B][4])
{
    int32_t lane = (int32_t)threadIdx.x & 31, first = ((int32_t)threadIdx.x >> 5) * 16;
    int32_t row = lane / 4;
    float sum[G][4] = {}, rest[G][4] = {};
#pragma unroll
    for (int step = 0; step < STREAM_STEPS; step++) {
        int32_t at = stream_place(row, step * 4 + lane % 4);
        uint4 top = *(const uint4 *)&w[first + row][at];
        uint4 bottom = *(const uint4 *)&w[first + row + 8][at];
        struct linear_pieces p[G];
#pragma unroll
        for (int g = 0; g < G; g++) {
            *(uint4 *)p[g].hi = *(const uint4 *)&x[0][row + 8 * g][at];
            if constexpr (!linear_x<X>::exact) {
                *(uint4 *)p[g].mid = *(const uint4 *)&x[1][row + 8 * g][at];
                *(uint4 *)p[g].lo = *(const uint4 *)&x[2][row + 8 * g][at];
            }
        }
        stream_step<X, G>(top, bottom, p, sum, rest);
    }
#pragma unroll
    for (int i = 0; i < G * 4; i++) {
        (&total[0][0])[i] += (&sum[0][0])[i] + (&rest[0][0])[i];
    }
}

/* As many groups as a tile has. */
template <typename X, int B>
TV_DEVICE void slab_chunk(const __nv_bfloat16 (*w)[LINEAR_CHUNK],
                          const __nv_bfloat16 (*x)[8 * B][LINEAR_CHUNK], int32_t groups,
                          float (&total)[B][4])
{
    if (B == 1 || groups == 1) {
        slab_groups<X, B, 1>(w, x, total);
    } else if (B == 2 || groups == 2) {
        slab_groups < X, B, B<2 ? B : 2>(w, x, total);
    } else {
        slab_groups<X, B, B>(w, x, total);
    }
}

template <typename P, int B>
TV_DEVICE void slab_write(const P &p, const typename P::tile &t, int32_t first_column,
                          const float (&total)[B][4])
{
    int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5;
    int32_t column = first_column + warp * (P::paired ? 8 : 16) + lane / 4;
#pragma unroll
    for (int b = 0; b < B; b++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int32_t row = b * 8 + lane % 4 * 2 + c;
            if (row >= t.rows) {
                continue;
            }
            if constexpr (P::paired) {
                if (column < t.n) {
                    p.store_pair(t, row, column, total[b][c], total[b][c + 2]);
                }
            } else {
                if (column < t.n) {
                    p.store(t, row, column, total[b][c]);
                }
                if (column + 8 < t.n) {
                    p.store(t, row, column + 8, total[b][c + 2]);
                }
            }
        }
    }
}

/* Weights ahead of the first item's rows: all places of the ring but one. */
template <typename P, int B>
TV_DEVICE void slab_fill(const P &p, const struct stream_run &run,
                         struct slab_shared<typename P::X, B> *shared, uint64_t policy,
                         struct stream_cursor<P> *next)
{
    next->index = 0;
    stream_seek(p, run, SLAB_COLUMNS(P), 8 * B, 0, next);
    for (int32_t place = 0; place < slab_shared<typename P::X, B>::STAGES - 1; place++) {
        stream_fetch<P, SLAB_W, SLAB_THREADS>(*next, (int32_t)threadIdx.x, shared->w[place],
                                              policy);
        stream_advance(p, run, SLAB_COLUMNS(P), 8 * B, 0, 1, next);
    }
}

/* The items of a run, the weights of the first of which are on their way. */
template <typename P, int B>
TV_DEVICE void slab_items(const P &p, const struct stream_run &run,
                          struct slab_shared<typename P::X, B> *shared, uint64_t policy,
                          struct stream_cursor<P> *next)
{
    typedef typename P::X X;
    constexpr int STAGES = slab_shared<X, B>::STAGES;
    struct slab_rows<X, B> rows;
    typename linear_x<X>::raw raw[B];
    int32_t slot = 0, turn = 0;
    rows.index = 0;
    slab_rows_seek<P, B>(p, run, &rows);
    slab_rows_read<P, B>(p, run, &rows, raw);
    slab_rows_store<X, B>(raw, shared->x[0]);
    slab_rows_read<P, B>(p, run, &rows, raw);
    for (int32_t index = 0; index < run.count; index++) {
        typename P::tile t;
        int32_t tile, group, column;
        p.place(run.first + index, SLAB_COLUMNS(P), &tile, &group, &column);
        (void)p.open(t, tile, group, 8 * B);
        float total[B][4] = {};
        for (int32_t at = 0; at < t.k; at += LINEAR_CHUNK) {
            ptx_copy_wait<STAGES - 2>();
            __syncthreads(); /* this chunk is here, and everybody is through with the one before */
            stream_fetch<P, SLAB_W, SLAB_THREADS>(
                *next, (int32_t)threadIdx.x, shared->w[slot == 0 ? STAGES - 1 : slot - 1], policy);
            stream_advance(p, run, SLAB_COLUMNS(P), 8 * B, 0, 1, next);
            slab_rows_store<X, B>(raw, shared->x[turn ^ 1]);
            slab_rows_read<P, B>(p, run, &rows, raw);
            slab_chunk<X, B>(shared->w[slot], shared->x[turn], (t.rows + 7) / 8, total);
            slot = slot == STAGES - 1 ? 0 : slot + 1;
            turn ^= 1;
        }
        slab_write<P, B>(p, t, column * SLAB_COLUMNS(P), total);
    }
}

/* Rows that are ready need no wait but the one at the end; a problem with late items has its early
 * ones' rows ready. */
template <typename P, int B>
static __global__ void __launch_bounds__(SLAB_THREADS, slab_shared<typename P::X, B>::BLOCKS)
    linear_slab(const __grid_constant__ P p)
{
    extern __shared__ __align__(128) char slab_bytes[];
    struct slab_shared<typename P::X, B> *shared =
        (struct slab_shared<typename P::X, B> *)slab_bytes;
    struct stream_run run;
    struct stream_cursor<P> next;
    uint64_t policy = ptx_policy_once();
    if (P::rows_ready || P::items_ready || P::has_late) {
        ptx_fence_device();
    }
    p.early(SLAB_COLUMNS(P), &run);
#pragma unroll 1
    for (int pass = 0; pass < (P::has_late ? 2 : 1); pass++) {
        if constexpr (P::has_late) {
            if (pass == 1) {
                ptx_wait_dependence();
                ptx_launch_dependents();
                p.late(SLAB_COLUMNS(P), &run);
                __syncthreads(); /* places are free */
            }
        }
        slab_fill<P, B>(p, run, shared, policy, &next);
        if (!P::has_late) {
            if (!P::rows_ready) {
                ptx_wait_dependence();
            }
            ptx_launch_dependents();
        }
        slab_items<P, B>(p, run, shared, policy, &next);
    }
    if (P::rows_ready) {
        ptx_wait_dependence();
    }
}

#endif
