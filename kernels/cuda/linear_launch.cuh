/*
 * linear_launch.cuh - which kernel of the matrix product a problem takes, and its launch.
 *
 * The choice of a tile shape is free, since none changes a result: few rows leave room for more
 * blocks, many rows for more reuse.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_LAUNCH_CUH
#define TV_KERNELS_CUDA_LINEAR_LAUNCH_CUH

#include "launch.cuh"
#include "linear_stream.cuh"
#include "linear_wide.cuh"

#define WIDE_BLOCKS_LEAST 96 /* fewer leave most of a large device idle */

/* Which kernel a problem's weights take; a function of the weights alone. */
static inline bool linear_uses_mma(enum tv_dtype w_dtype, int32_t k)
{
    return w_dtype == TV_BF16 && k % 8 == 0;
}

static inline uint32_t linear_blocks(int64_t count, int32_t each)
{
    return (uint32_t)((count + each - 1) / each);
}

/*
 * Rows of a block for `matrices` matrices of n columns with about `rows` rows behind each. `paired`
 * as in the problem.
 */
static inline int32_t linear_block_rows(bool mma, bool paired, int64_t matrices, int32_t rows,
                                        int32_t n)
{
    if (!mma) {
        return LINEAR_ANY;
    }
    int64_t blocks = matrices * linear_blocks(rows, WIDE_ROWS) *
                     linear_blocks(n, paired ? WIDE_COLUMNS / 2 : WIDE_COLUMNS);
    if (rows > 32 && blocks >= WIDE_BLOCKS_LEAST) {
        return WIDE_ROWS;
    }
    return rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
}

/* Once per device and problem type, before the first launch. -ENOTSUP: not enough shared memory. */
template <typename P> static int linear_prepare(void)
{
    int32_t bytes = WIDE_STAGES * (int32_t)sizeof(struct wide_stage<typename P::X>);
    static_assert(WIDE_STAGES * sizeof(struct wide_stage<typename P::X>) <= TV_CUDA_SHARED_MAX,
                  "fits every promised device");
    return tv_cuda_errno(cudaFuncSetAttribute((const void *)linear_wide<P>,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

template <typename P, int A, int B, int W>
static int linear_stream_launch(const struct tv_kernels *k, const P &p)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int64_t items = p.items_bound(P::paired ? 8 * A : 16 * A);
    int64_t blocks = (int64_t)cuda->sm_count * (W == 1 ? 16 : stream_blocks(A, B, W));
    if (items > INT32_MAX) {
        return -EINVAL;
    }
    return launch(linear_stream<P, A, B, W>, dim3((uint32_t)(items < blocks ? items : blocks)),
                  W * 32, 0, tv_cuda_stream(k), p);
}

/*
 * Tiles of 8, 16 or 32 rows; depth: the largest k. Twice the columns halve what is read of x for a
 * weight, which several rows ask for; a single row asks for more blocks.
 */
template <typename P>
static int linear_stream_rows(const struct tv_kernels *k, const P &p, int32_t block_rows,
                              int32_t depth)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    if constexpr (P::paired) {
        return block_rows == 8    ? linear_stream_launch<P, 2, 1, 8>(k, p)
               : block_rows == 16 ? linear_stream_launch<P, 2, 2, 8>(k, p)
                                  : linear_stream_launch<P, 2, 4, 8>(k, p);
    } else {
        bool twice = p.rows > 1 && p.items_bound(32) >= 2 * (int64_t)cuda->sm_count;
        if (depth <= LINEAR_CHUNK) { /* one chunk needs but one warp */
            return block_rows == 8    ? linear_stream_launch<P, 1, 1, 1>(k, p)
                   : block_rows == 16 ? linear_stream_launch<P, 1, 2, 1>(k, p)
                                      : linear_stream_launch<P, 2, 4, 1>(k, p);
        }
        if (block_rows == 8) {
            return twice ? linear_stream_launch<P, 2, 1, 8>(k, p)
                         : linear_stream_launch<P, 1, 1, 8>(k, p);
        }
        return block_rows > 16 ? linear_stream_launch<P, 2, 4, 8>(k, p)
               : twice         ? linear_stream_launch<P, 2, 2, 8>(k, p)
                               : linear_stream_launch<P, 1, 2, 8>(k, p);
    }
}

/*
 * Launch over `tiles` tiles of block_rows rows (blockIdx.x), n columns (y) and `groups` (z), with
 * products of length k. -EINVAL when the grid is larger than a grid can be.
 */
template <typename P>
static int linear_launch(const struct tv_kernels *kernels, const P &p, enum tv_dtype w_dtype,
                         int32_t block_rows, uint32_t tiles, int32_t groups, int32_t n, int32_t k)
{
    cudaStream_t stream = tv_cuda_stream(kernels);
    bool mma = linear_uses_mma(w_dtype, k);
    if constexpr (P::streamed) {
        if (mma && block_rows < WIDE_ROWS) {
            return linear_stream_rows(kernels, p, block_rows, k);
        }
    }
    int32_t columns = mma ? WIDE_COLUMNS / (P::paired ? 2 : 1) : 1;
    dim3 grid(tiles, linear_blocks(n, columns), (uint32_t)groups);
    if (!mma && grid.y > 65535) {
        grid.y = 65535; /* a block takes several columns */
    }
    if (grid.y > 65535 || grid.z > 65535 || tiles > INT32_MAX) {
        return -EINVAL;
    }
    if (mma) {
        size_t bytes = WIDE_STAGES * sizeof(struct wide_stage<typename P::X>);
        return launch(linear_wide<P>, grid, WIDE_THREADS, bytes, stream, p);
    }
    if (w_dtype == TV_F32) {
        return launch(linear_any<P, float>, grid, LINEAR_ANY_THREADS, 0, stream, p);
    }
    return w_dtype == TV_BF16
               ? launch(linear_any<P, __nv_bfloat16>, grid, LINEAR_ANY_THREADS, 0, stream, p)
               : launch(linear_any<P, __half>, grid, LINEAR_ANY_THREADS, 0, stream, p);
}

#endif
