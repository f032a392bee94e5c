/*
 * linear_launch.cuh - which kernel of the matrix product a problem takes, and its launch.
 *
 * The choice of a tile shape is free, since none changes a result: few rows leave room for more
 * blocks, many rows for more reuse.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_LAUNCH_CUH
#define TV_KERNELS_CUDA_LINEAR_LAUNCH_CUH

#include "linear.cuh"
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

/*
 * Launch over `tiles` tiles of block_rows rows (blockIdx.x), all columns (y) and `groups` (z).
 * -EINVAL when the grid is larger than a grid can be.
 */
template <typename P>
static int linear_launch(const P &p, enum tv_dtype w_dtype, int32_t block_rows, uint32_t tiles,
                         int32_t groups, cudaStream_t stream)
{
    bool mma = linear_uses_mma(w_dtype, p.k);
    constexpr int NARROW = P::paired ? 2 : 1;
    int32_t columns = LINEAR_ANY;
    if (mma) {
        columns = block_rows == WIDE_ROWS ? WIDE_COLUMNS : block_rows == 32 ? 32 : 16;
        columns = P::paired ? (columns == WIDE_COLUMNS ? WIDE_COLUMNS / 2 : 16) : columns;
    }
    dim3 grid(tiles, linear_blocks(p.n, columns), (uint32_t)groups);
    if (grid.y > 65535 || grid.z > 65535 || tiles > INT32_MAX) {
        return -EINVAL;
    }
    if (!mma && w_dtype == TV_F32) {
        linear_any<P, float><<<grid, LINEAR_ANY * 32, 0, stream>>>(p);
    } else if (!mma && w_dtype == TV_BF16) {
        linear_any<P, __nv_bfloat16><<<grid, LINEAR_ANY * 32, 0, stream>>>(p);
    } else if (!mma) {
        linear_any<P, __half><<<grid, LINEAR_ANY * 32, 0, stream>>>(p);
    } else if (block_rows == 8) {
        linear_mma<P, NARROW, 1><<<grid, LINEAR_THREADS, 0, stream>>>(p);
    } else if (block_rows == 16) {
        linear_mma<P, NARROW, 2><<<grid, LINEAR_THREADS, 0, stream>>>(p);
    } else if (block_rows == 32) {
        linear_mma<P, 2, 4><<<grid, LINEAR_THREADS, 0, stream>>>(p);
    } else {
        size_t bytes = WIDE_STAGES * sizeof(struct wide_stage<typename P::X>);
        linear_wide<P><<<grid, WIDE_THREADS, bytes, stream>>>(p);
    }
    return tv_cuda_errno(cudaGetLastError());
}

#endif
