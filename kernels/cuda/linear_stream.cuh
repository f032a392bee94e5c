/*
 * linear_stream.cuh - the matrix product of linear.cuh for few rows: bound by reading the weights.
 *
 * A block makes 16 * A columns (16 of each matrix when paired) of 8 * B rows, and then the next.
 * Its W warps take one chunk of k each, round after round, and its threads add the chunks' sums in
 * order. A warp always has the weights of its next chunk in flight, over the border from one item
 * to the next and ahead of the launch's dependences, so that memory is never waited for twice. The
 * same products in the same order as linear_wide, so the same bits. Owns no kernel choice.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_STREAM_CUH
#define TV_KERNELS_CUDA_LINEAR_STREAM_CUH

#include "linear.cuh"

#define STREAM_STEPS (LINEAR_CHUNK / 32) /* of a chunk; a step is 32 k */

/* Blocks of a multiprocessor that a kernel is compiled for. */
static constexpr int stream_blocks(int a, int b, int w)
{
    return w == 1 ? 8 : a == 1 && b <= 2 ? 2 : 1;
}

/* First item of block `block` of `blocks`: shares that differ by one at most. */
TV_DEVICE int32_t stream_share(int32_t items, uint32_t block, uint32_t blocks)
{
    return (int32_t)((int64_t)items * block / blocks);
}

/* The items of a block, in two runs: one that is known at the launch, and one behind it that is
 * known when the launch's dependences have ended. */
struct stream_items {
    int32_t early, early_count, late, late_count;
};

/* Groups of matrices with n columns and `tiles` tiles of rows: a block's share. The tiles of the
 * same columns come one after the other, so that the second finds their weights near. */
TV_DEVICE void stream_dense(int32_t tiles, int32_t groups, int32_t n, int32_t width,
                            struct stream_items *ret)
{
    int32_t items = tiles * ((n + width - 1) / width) * groups;
    ret->early = stream_share(items, blockIdx.x, gridDim.x);
    ret->early_count = stream_share(items, blockIdx.x + 1, gridDim.x) - ret->early;
}

TV_DEVICE void stream_dense_place(int32_t item, int32_t tiles, int32_t n, int32_t width,
                                  int32_t *tile, int32_t *group, int32_t *column)
{
    int32_t columns = (n + width - 1) / width;
    *tile = item % tiles;
    *column = item / tiles % columns;
    *group = item / tiles / columns;
}

TV_DEVICE int32_t stream_item(const struct stream_items &items, int32_t index)
{
    return index < items.early_count ? items.early + index : items.late + index - items.early_count;
}

/*
 * Where a warp reads next. A lane holds rows lane / 4 and lane / 4 + 8 of each 16 columns (w[2a],
 * w[2a + 1]; paired: the same column of either matrix) and row lane / 4 of each 8 rows; of every 32
 * k it reads 8 consecutive ones, which serve two products. k is a multiple of 8.
 */
template <int A> struct stream_cursor {
    const __nv_bfloat16 *w[2 * A];
    int32_t index, chunk, k;
};

/* Point at the weights of the cursor's item. */
template <typename P, int A, int B>
TV_DEVICE void stream_aim(const P &p, int32_t item, struct stream_cursor<A> *cursor)
{
    typename P::tile t;
    int32_t lane = (int32_t)threadIdx.x & 31, tile, group, column;
    p.place(item, P::paired ? 8 * A : 16 * A, &tile, &group, &column);
    (void)p.open(t, tile, group, 8 * B);
    column *= P::paired ? 8 * A : 16 * A;
#pragma unroll
    for (int i = 0; i < 2 * A; i++) {
        int32_t at = column + (P::paired ? i / 2 * 8 : i * 8) + lane / 4;
        at = min(at, t.n - 1); /* beyond the last: computed, not stored */
        cursor->w[i] = (const __nv_bfloat16 *)t.w[P::paired ? i % 2 : 0] + (int64_t)at * t.k;
    }
    cursor->k = t.k;
}

/* To this warp's first chunk in the first item from the cursor's on that has one for it. */
template <typename P, int A, int B>
TV_DEVICE void stream_seek(const P &p, const struct stream_items &items,
                           struct stream_cursor<A> *cursor)
{
    cursor->chunk = (int32_t)threadIdx.x >> 5;
    for (; cursor->index < items.early_count + items.late_count; cursor->index++) {
        stream_aim<P, A, B>(p, stream_item(items, cursor->index), cursor);
        if (cursor->chunk * LINEAR_CHUNK < cursor->k) {
            return;
        }
    }
    cursor->k = 0; /* nothing more to read */
}

template <typename P, int A, int B, int W>
TV_DEVICE void stream_advance(const P &p, const struct stream_items &items,
                              struct stream_cursor<A> *cursor)
{
    cursor->chunk += W;
    if (cursor->chunk * LINEAR_CHUNK >= cursor->k) {
        cursor->index++;
        stream_seek<P, A, B>(p, items, cursor);
    }
}

/* One step of the cursor's chunk. */
template <int A>
TV_DEVICE void stream_fetch(const struct stream_cursor<A> &cursor, int step, uint4 (&ret)[2 * A])
{
    int32_t at = cursor.chunk * LINEAR_CHUNK + step * 32 + (int32_t)(threadIdx.x & 3) * 8;
    bool inside = at < cursor.k;
#pragma unroll
    for (int i = 0; i < 2 * A; i++) {
        ret[i] = inside ? linear_load_w(cursor.w[i] + at) : make_uint4(0, 0, 0, 0);
    }
}

template <typename X, int B>
TV_DEVICE void stream_read_x(const X *const (&x)[B], bool vector, int32_t at, int32_t k,
                             typename linear_x<X>::raw (&ret)[B])
{
#pragma unroll
    for (int b = 0; b < B; b++) {
        typename linear_x<X>::raw raw = {};
        if (at < k) {
            linear_read(x[b] + at, vector, &raw);
        }
        ret[b] = raw;
    }
}

/* The products of one step: sum[a][b] is of 16 columns of w and 8 rows of x. */
template <int A, int B, typename X>
TV_DEVICE void stream_step(const uint4 (&w)[2 * A], const typename linear_x<X>::raw (&x)[B],
                           float (&sum)[A][B][4], float (&rest)[A][B][4])
{
#pragma unroll
    for (int b = 0; b < B; b++) {
        struct linear_pieces p;
        linear_cut(x[b], &p);
#pragma unroll
        for (int a = 0; a < A; a++) {
            const uint4 &top = w[2 * a], &bottom = w[2 * a + 1];
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

/* One warp, one chunk, its weights in `ring`; `next` is read into their place. */
template <typename P, int A, int B>
TV_DEVICE void stream_chunk(const P &p, const typename P::X *const (&x)[B], int32_t chunk,
                            int32_t k, const struct stream_cursor<A> &next,
                            uint4 (&ring)[STREAM_STEPS][2 * A], float (&sum)[A][B][4])
{
    typedef typename P::X X;
    constexpr int DEPTH = B == 1 ? STREAM_STEPS : 2; /* steps of x in flight */
    typename linear_x<X>::raw raw[DEPTH][B];
    float rest[A][B][4] = {};
    int32_t at = chunk * LINEAR_CHUNK + (int32_t)(threadIdx.x & 3) * 8;
#pragma unroll
    for (int step = 0; step < DEPTH; step++) {
        stream_read_x<X, B>(x, p.vector, at + 32 * step, k, raw[step]);
    }
#pragma unroll
    for (int step = 0; step < STREAM_STEPS; step++) {
        stream_step<A, B, X>(ring[step], raw[step % DEPTH], sum, rest);
        stream_fetch<A>(next, step, ring[step]);
        if (step + DEPTH < STREAM_STEPS) {
            stream_read_x<X, B>(x, p.vector, at + 32 * (step + DEPTH), k, raw[step % DEPTH]);
        }
    }
#pragma unroll
    for (int i = 0; i < A * B * 4; i++) {
        (&sum[0][0][0])[i] += (&rest[0][0][0])[i];
    }
}

/* Results of an item. */
template <typename P, int A, int B, int EACH, int THREADS>
TV_DEVICE void stream_write(const P &p, const typename P::tile &t, int32_t first_column,
                            const float (&total)[EACH], float *shared)
{
    constexpr int ELEMENTS = A * B * 128;
    int32_t thread = (int32_t)threadIdx.x;
    if constexpr (P::paired) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int32_t e = thread + i * THREADS;
            if (e < ELEMENTS) {
                shared[e] = total[i];
            }
        }
        __syncthreads();
        for (int32_t e = thread; e < ELEMENTS; e += THREADS) {
            int32_t column = first_column + linear_column<B, true>(e), row = linear_row<B>(e);
            if ((e & 64) == 0 && column < t.n && row < t.rows) {
                p.store_pair(t, row, column, shared[e], shared[e + 64]);
            }
        }
        __syncthreads();
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int32_t e = thread + i * THREADS;
            int32_t column = first_column + linear_column<B, false>(e), row = linear_row<B>(e);
            if (e < ELEMENTS && column < t.n && row < t.rows) {
                p.store(t, row, column, total[i]);
            }
        }
    }
}

template <typename P, int A, int B, int W>
static __global__ void __launch_bounds__(W * 32, stream_blocks(A, B, W))
    linear_stream(const __grid_constant__ P p)
{
    constexpr int ELEMENTS = A * B * 128, THREADS = W * 32, COLUMNS = P::paired ? 8 * A : 16 * A;
    constexpr int EACH = (ELEMENTS + THREADS - 1) / THREADS;
    __shared__ float parts[W][ELEMENTS];
    int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5;
    uint4 ring[STREAM_STEPS][2 * A];
    struct stream_items items = {};
    struct stream_cursor<A> next;
    p.early(COLUMNS, &items);
    next.index = 0;
    stream_seek<P, A, B>(p, items, &next);
#pragma unroll
    for (int step = 0; step < STREAM_STEPS; step++) {
        stream_fetch<A>(next, step, ring[step]);
    }
    ptx_wait_dependence();
    ptx_launch_dependents();
    p.late(COLUMNS, &items);
    if (P::has_late && next.index >= items.early_count) { /* nothing has been read yet */
        stream_seek<P, A, B>(p, items, &next);
#pragma unroll
        for (int step = 0; step < STREAM_STEPS; step++) {
            stream_fetch<A>(next, step, ring[step]);
        }
    }
    for (int32_t index = 0; index < items.early_count + items.late_count; index++) {
        typename P::tile t;
        const typename P::X *x[B];
        int32_t tile, group, column;
        p.place(stream_item(items, index), COLUMNS, &tile, &group, &column);
        (void)p.open(t, tile, group, 8 * B);
#pragma unroll
        for (int b = 0; b < B; b++) {
            x[b] = p.x_row(t, min(b * 8 + lane / 4, t.rows - 1));
        }
        float total[EACH] = {};
        int32_t chunks = (t.k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
        for (int32_t first = 0; first < chunks; first += W) {
            if (first + warp < chunks) {
                float sum[A][B][4] = {};
                stream_advance<P, A, B, W>(p, items, &next);
                stream_chunk<P, A, B>(p, x, first + warp, t.k, next, ring, sum);
#pragma unroll
                for (int i = 0; i < A * B * 4; i++) {
                    parts[warp][i * 32 + lane] = (&sum[0][0][0])[i];
                }
            }
            __syncthreads();
            int32_t count = min(W, chunks - first);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                int32_t e = thread + i * THREADS;
                for (int32_t c = 0; c < count && e < ELEMENTS; c++) {
                    total[i] += parts[c][e];
                }
            }
            __syncthreads();
        }
        stream_write<P, A, B, EACH, THREADS>(p, t, column * COLUMNS, total, parts[0]);
    }
}

#endif
