/*
 * linear_stream.cuh - the matrix product of linear.cuh for few rows and few columns: bound by
 * reading the weights; and the walk over items that it shares with linear_slab.
 *
 * A block makes 16 columns of 8 * B rows, and then the next. Its W warps take one chunk of k each,
 * round after round, and its threads add the chunks' sums in order. A warp always has the weights
 * of its next two chunks in flight, whole lines into shared memory, over the border from one item
 * to the next and ahead of the launch's dependences, so that memory is never waited for twice. The
 * same products in the same order as linear_wide, so the same bits. Owns no kernel choice.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_STREAM_CUH
#define TV_KERNELS_CUDA_LINEAR_STREAM_CUH

#include "linear.cuh"

#define STREAM_STEPS  (LINEAR_CHUNK / 32) /* of a chunk; a step is 32 k */
#define STREAM_W      16                  /* columns of an item */
#define STREAM_PLACES 2                   /* chunks of a warp in flight */
#define STREAM_BLOCKS 2                   /* of a multiprocessor, when they have eight warps */

/* First item of block `block` of `blocks`: shares that differ by one at most. */
TV_DEVICE int32_t stream_share(int32_t items, uint32_t block, uint32_t blocks)
{
    return (int32_t)((int64_t)items * block / blocks);
}

/* Items one after the other. */
struct stream_run {
    int32_t first, count;
};

/* Groups of matrices with n columns and `tiles` tiles of rows: a block's share. The tiles of the
 * same columns come one after the other, so that the second finds their weights near. */
TV_DEVICE void stream_dense(int32_t tiles, int32_t groups, int32_t n, int32_t width,
                            struct stream_run *ret)
{
    int32_t items = tiles * ((n + width - 1) / width) * groups;
    ret->first = stream_share(items, blockIdx.x, gridDim.x);
    ret->count = stream_share(items, blockIdx.x + 1, gridDim.x) - ret->first;
}

TV_DEVICE void stream_dense_place(int32_t item, int32_t tiles, int32_t n, int32_t width,
                                  int32_t *tile, int32_t *group, int32_t *column)
{
    int32_t columns = (n + width - 1) / width;
    *tile = item % tiles;
    *column = item / tiles % columns;
    *group = item / tiles / columns;
}

/* What problems have in common whose items are all known at the launch: matrices side by side, the
 * same rows of each. */
struct stream_plain {
    typedef float X;
    static constexpr bool paired = false, streamed = true, has_late = false;
    static constexpr bool rows_ready = false, items_ready = false;
    int32_t rows, tiles, groups, n, k; /* tiles: of rows */
    bool vector;

    int64_t items_bound(int32_t width) const
    {
        return (int64_t)tiles * ((n + width - 1) / width) * groups;
    }

    __device__ __forceinline__ void early(int32_t width, struct stream_run *ret) const
    {
        stream_dense(tiles, groups, n, width, ret);
    }

    __device__ __forceinline__ void place(int32_t item, int32_t width, int32_t *tile,
                                          int32_t *group, int32_t *column) const
    {
        stream_dense_place(item, tiles, n, width, tile, group, column);
    }
};

/* What is read next of the weights; k 0: nothing more. */
template <typename P> struct stream_cursor {
    const __nv_bfloat16 *w[P::paired ? 2 : 1];
    int32_t index, chunk, column, n, k;
};

/* To chunk `first` of the first item, from the cursor's on, that has one. */
template <typename P>
TV_DEVICE void stream_seek(const P &p, const struct stream_run &run, int32_t columns,
                           int32_t block_rows, int32_t first, struct stream_cursor<P> *cursor)
{
    cursor->chunk = first;
    for (; cursor->index < run.count; cursor->index++) {
        typename P::tile t;
        int32_t tile, group, column;
        p.place(run.first + cursor->index, columns, &tile, &group, &column);
        (void)p.open(t, tile, group, block_rows);
        if (first * LINEAR_CHUNK < t.k) {
            cursor->w[0] = (const __nv_bfloat16 *)t.w[0];
            if constexpr (P::paired) {
                cursor->w[1] = (const __nv_bfloat16 *)t.w[1];
            }
            cursor->column = column * columns;
            cursor->n = t.n;
            cursor->k = t.k;
            return;
        }
    }
    cursor->k = 0;
}

/* `step` chunks further, or to chunk `first` of the next item. */
template <typename P>
TV_DEVICE void stream_advance(const P &p, const struct stream_run &run, int32_t columns,
                              int32_t block_rows, int32_t first, int32_t step,
                              struct stream_cursor<P> *cursor)
{
    cursor->chunk += step;
    if (cursor->k > 0 && cursor->chunk * LINEAR_CHUNK >= cursor->k) {
        cursor->index++;
        stream_seek(p, run, columns, block_rows, first, cursor);
    }
}

/* Where 8 k of a row of 256 bytes lie in shared memory: odd rows have their halves of a line
 * exchanged, so that the four pieces that a quarter of a warp reads of each of two rows meet in no
 * bank. */
TV_DEVICE int32_t stream_place(int32_t row, int32_t piece)
{
    return (piece ^ (row & 1) * 4) * 8;
}

/*
 * One chunk of weights: COUNT rows of 256 bytes, 16 threads to a row; `thread` of `threads`.
 * Paired: every 8 rows are of the one matrix and of the other in turn.
 */
template <typename P, int COUNT, int THREADS>
TV_DEVICE void stream_fetch(const struct stream_cursor<P> &from, int32_t thread,
                            __nv_bfloat16 (*to)[LINEAR_CHUNK], uint64_t policy)
{
    constexpr int EACH = THREADS / 16;
    static_assert(EACH % 2 == 0 && (!P::paired || EACH == 8), "a thread's rows are alike");
    int32_t row = thread / 16, piece = thread % 16, at = from.chunk * LINEAR_CHUNK + piece * 8;
    if (from.k > 0) {
        bool inside = at < from.k;
#pragma unroll
        for (int i = 0; i < COUNT / EACH; i++) {
            int32_t column = from.column + (P::paired ? i / 2 : i) * EACH + row;
            column = min(column, from.n - 1); /* beyond the last: computed, not stored */
            const __nv_bfloat16 *w = from.w[P::paired ? i % 2 : 0] + (int64_t)column * from.k;
            ptx_copy_once(ptx_shared(&to[i * EACH + row][stream_place(row, piece)]),
                          w + (inside ? at : 0), inside ? 16 : 0, policy);
        }
    }
    ptx_copy_commit();
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

/* The products of one step: 16 columns of w, of which a lane has two, and G groups of 8 rows. */
template <typename X, int G>
TV_DEVICE void stream_step(const uint4 &top, const uint4 &bottom,
                           const struct linear_pieces (&p)[G], float (&sum)[G][4],
                           float (&rest)[G][4])
{
    uint32_t low[4] = {top.x, bottom.x, top.y, bottom.y};
    uint32_t high[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
    for (int i = 0; i < 4 && !linear_x<X>::exact; i++) {
#pragma unroll
        for (int g = 0; g < G; g++) {
            const uint32_t(&piece)[4] = i % 2 == 0 ? p[g].lo : p[g].mid;
            ptx_mma(rest[g], i < 2 ? low : high, piece[i / 2 * 2], piece[i / 2 * 2 + 1]);
            if (i % 2 == 0) {
                ptx_mma(sum[g], i < 2 ? low : high, p[g].hi[i], p[g].hi[i + 1]);
            }
        }
    }
#pragma unroll
    for (int g = 0; g < G && linear_x<X>::exact; g++) {
        ptx_mma(sum[g], low, p[g].hi[0], p[g].hi[1]);
        ptx_mma(sum[g], high, p[g].hi[2], p[g].hi[3]);
    }
}

/* What a block of linear_stream shares. */
template <int B, int W> struct stream_shared {
    __nv_bfloat16 w[W][STREAM_PLACES][STREAM_W][LINEAR_CHUNK];
    float parts[W][B * 128];
};

/* One warp, one chunk, its weights in `w`. */
template <typename P, int B>
TV_DEVICE void stream_chunk(const P &p, const __nv_bfloat16 (*w)[LINEAR_CHUNK],
                            const typename P::X *const (&x)[B], int32_t chunk, int32_t k,
                            float (&sum)[B][4])
{
    typedef typename P::X X;
    constexpr int DEPTH = B == 1 ? STREAM_STEPS : 2; /* steps of x in flight */
    typename linear_x<X>::raw raw[DEPTH][B];
    float rest[B][4] = {};
    int32_t lane = (int32_t)threadIdx.x & 31, row = lane / 4;
    int32_t at = chunk * LINEAR_CHUNK + lane % 4 * 8;
#pragma unroll
    for (int step = 0; step < DEPTH; step++) {
        stream_read_x<X, B>(x, p.vector, at + 32 * step, k, raw[step]);
    }
    ptx_copy_wait<STREAM_PLACES - 1>();
    __syncwarp();
#pragma unroll
    for (int step = 0; step < STREAM_STEPS; step++) {
        int32_t place = stream_place(row, step * 4 + lane % 4);
        uint4 top = *(const uint4 *)&w[row][place], bottom = *(const uint4 *)&w[row + 8][place];
        struct linear_pieces pieces[B];
#pragma unroll
        for (int b = 0; b < B; b++) {
            linear_cut(raw[step % DEPTH][b], &pieces[b]);
        }
        stream_step<X, B>(top, bottom, pieces, sum, rest);
        if (step + DEPTH < STREAM_STEPS) {
            stream_read_x<X, B>(x, p.vector, at + 32 * (step + DEPTH), k, raw[step % DEPTH]);
        }
    }
    __syncwarp(); /* the place may be filled again */
#pragma unroll
    for (int i = 0; i < B * 4; i++) {
        (&sum[0][0])[i] += (&rest[0][0])[i];
    }
}

/* The sums of a round's chunks join the totals, in order. */
template <int B, int W, int EACH>
TV_DEVICE void stream_add(const struct stream_shared<B, W> &shared, int32_t count,
                          float (&total)[EACH])
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int32_t e = (int32_t)threadIdx.x + i * W * 32;
        for (int32_t c = 0; c < count && e < B * 128; c++) {
            total[i] += shared.parts[c][e];
        }
    }
}

template <typename P, int B, int W>
static __global__ void __launch_bounds__(W * 32, W == 1 ? 8 : STREAM_BLOCKS)
    linear_stream(const __grid_constant__ P p)
{
    static_assert(!P::paired && !P::has_late, "linear_slab has those");
    constexpr int ELEMENTS = B * 128, THREADS = W * 32, ROWS = 8 * B;
    constexpr int EACH = (ELEMENTS + THREADS - 1) / THREADS;
    extern __shared__ __align__(128) char stream_bytes[];
    struct stream_shared<B, W> *shared = (struct stream_shared<B, W> *)stream_bytes;
    int32_t thread = (int32_t)threadIdx.x, lane = thread & 31, warp = thread >> 5, turn = 0;
    struct stream_run run;
    struct stream_cursor<P> next;
    uint64_t policy = ptx_policy_once();
    if (P::rows_ready || P::items_ready) {
        ptx_fence_device();
    }
    p.early(STREAM_W, &run);
    next.index = 0;
    stream_seek(p, run, STREAM_W, ROWS, warp, &next);
#pragma unroll
    for (int place = 0; place < STREAM_PLACES; place++) {
        stream_fetch<P, STREAM_W, 32>(next, lane, shared->w[warp][place], policy);
        stream_advance(p, run, STREAM_W, ROWS, warp, W, &next);
    }
    if (!P::rows_ready) {
        ptx_wait_dependence();
    }
    ptx_launch_dependents();
    for (int32_t index = 0; index < run.count; index++) {
        typename P::tile t;
        const typename P::X *x[B];
        int32_t tile, group, column;
        p.place(run.first + index, STREAM_W, &tile, &group, &column);
        (void)p.open(t, tile, group, ROWS);
#pragma unroll
        for (int b = 0; b < B; b++) {
            x[b] = p.x_row(t, min(b * 8 + lane / 4, t.rows - 1));
        }
        float total[EACH] = {};
        int32_t chunks = (t.k + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
        for (int32_t first = 0; first < chunks; first += W) {
            if (first + warp < chunks) {
                float sum[B][4] = {};
                stream_chunk<P, B>(p, shared->w[warp][turn], x, first + warp, t.k, sum);
                stream_fetch<P, STREAM_W, 32>(next, lane, shared->w[warp][turn], policy);
                stream_advance(p, run, STREAM_W, ROWS, warp, W, &next);
                turn ^= 1;
#pragma unroll
                for (int i = 0; i < B * 4; i++) {
                    shared->parts[warp][i * 32 + lane] = (&sum[0][0])[i];
                }
            }
            __syncthreads();
            stream_add(*shared, min(W, chunks - first), total);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int32_t e = thread + i * THREADS, row = linear_row(e);
            int32_t at = column * STREAM_W + linear_column(e);
            if (e < ELEMENTS && at < t.n && row < t.rows) {
                p.store(t, row, at, total[i]);
            }
        }
    }
    if (P::rows_ready) {
        ptx_wait_dependence();
    }
}

#endif
