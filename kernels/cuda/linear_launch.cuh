/*
 * linear_launch.cuh - which kernel of the matrix product a problem takes, and its launch.
 *
 * The choice of a tile shape is free, since none changes a result: few rows leave room for more
 * blocks, many rows for more reuse.
 */
#ifndef TV_KERNELS_CUDA_LINEAR_LAUNCH_CUH
#define TV_KERNELS_CUDA_LINEAR_LAUNCH_CUH

#include <type_traits>

#include "launch.cuh"
#include "linear_slab.cuh"
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
    /* Smaller tiles where larger ones leave a good part of the device idle. */
    blocks = matrices * linear_blocks(rows, 32) * linear_blocks(n, paired ? SLAB_W / 2 : SLAB_W);
    return rows <= 8 ? 8 : rows <= 16 || blocks < WIDE_BLOCKS_LEAST ? 16 : 32;
}

/* Dynamic shared memory of a kernel. */
template <size_t BYTES> static int linear_prepare_kernel(const void *kernel)
{
    static_assert(BYTES <= TV_CUDA_SHARED_MAX, "fits every promised device");
    return tv_cuda_errno(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)BYTES));
}

template <typename P, int B> static int linear_prepare_few(void)
{
    int rc = linear_prepare_kernel<sizeof(struct slab_shared<typename P::X, B>)>(
        (const void *)linear_slab<P, B>);
    if constexpr (!P::paired && B <= 2) {
        rc = rc < 0 ? rc
                    : linear_prepare_kernel<sizeof(struct stream_shared<B, 8>)>(
                          (const void *)linear_stream<P, B, 8>);
    }
    return rc;
}

/* Whether the kernels of linear_round<P> exist beside those of P. */
template <typename P> static constexpr bool linear_has_rounds(void)
{
    return std::is_same<typename P::X, float>::value;
}

/* Once per device, problem type and source file (each has kernels of its own), before the first
 * launch: of linear_stream_rows, and of all. -ENOTSUP: not enough shared memory. */
template <typename P> static int linear_prepare_rows(void)
{
    int rc = linear_prepare_few<P, 1>();
    rc = rc < 0 ? rc : linear_prepare_few<P, 2>();
    rc = rc < 0 ? rc : linear_prepare_few<P, 4>();
    if constexpr (linear_has_rounds<P>()) {
        rc = rc < 0 ? rc : linear_prepare_rows<struct linear_round<P>>();
    }
    return rc;
}

template <typename P> static int linear_prepare(void)
{
    int rc = linear_prepare_kernel<WIDE_STAGES * sizeof(struct wide_stage<typename P::X>)>(
        (const void *)linear_wide<P>);
    if constexpr (linear_has_rounds<P>()) {
        rc = rc < 0
                 ? rc
                 : linear_prepare_kernel<WIDE_STAGES * sizeof(struct wide_stage<linear_rounded>)>(
                       (const void *)linear_wide<struct linear_round<P>>);
    }
    if constexpr (P::streamed) {
        rc = rc < 0 ? rc : linear_prepare_rows<P>();
    }
    return rc;
}

template <typename P, int B, int W>
static int linear_stream_launch(const struct tv_kernels *k, const P &p)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int64_t items = p.items_bound(STREAM_W);
    int64_t blocks = (int64_t)cuda->sm_count * (W == 1 ? 16 : STREAM_BLOCKS);
    if (items > INT32_MAX) {
        return -EINVAL;
    }
    return launch(linear_stream<P, B, W>, dim3((uint32_t)(items < blocks ? items : blocks)), W * 32,
                  sizeof(struct stream_shared<B, W>), tv_cuda_stream(k), p);
}

template <typename P, int B> static int linear_slab_launch(const struct tv_kernels *k, const P &p)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    int64_t items = p.items_bound(P::paired ? SLAB_W / 2 : SLAB_W);
    int64_t blocks = (int64_t)cuda->sm_count * slab_shared<typename P::X, B>::BLOCKS;
    if (items > INT32_MAX) {
        return -EINVAL;
    }
    return launch(linear_slab<P, B>, dim3((uint32_t)(items < blocks ? items : blocks)),
                  SLAB_THREADS, sizeof(struct slab_shared<typename P::X, B>), tv_cuda_stream(k), p);
}

template <typename P>
static int linear_stream_tiles(const struct tv_kernels *k, const P &p, int32_t block_rows,
                               int32_t depth)
{
    if constexpr (!P::paired) {
        const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
        if (block_rows <= 16 && p.items_bound(SLAB_W) < cuda->sm_count) {
            if (depth <= LINEAR_CHUNK) { /* one chunk needs but one warp */
                return block_rows == 8 ? linear_stream_launch<P, 1, 1>(k, p)
                                       : linear_stream_launch<P, 2, 1>(k, p);
            }
            return block_rows == 8 ? linear_stream_launch<P, 1, 8>(k, p)
                                   : linear_stream_launch<P, 2, 8>(k, p);
        }
    }
    return block_rows == 8    ? linear_slab_launch<P, 1>(k, p)
           : block_rows == 16 ? linear_slab_launch<P, 2>(k, p)
                              : linear_slab_launch<P, 4>(k, p);
}

/*
 * Tiles of 8, 16 or 32 rows; depth: the largest k. Where 64 columns at a time leave part of the
 * device idle, few rows take 16 columns, whose k the warps of a block share.
 */
template <typename P>
static int linear_stream_rows(const struct tv_kernels *k, const P &p, enum tv_products products,
                              int32_t block_rows, int32_t depth)
{
    return linear_rounds_x(products, TV_BF16)
               ? linear_stream_tiles(k, linear_round<P>{p}, block_rows, depth)
               : linear_stream_tiles(k, p, block_rows, depth);
}

template <typename P>
static int linear_launch_as(const struct tv_kernels *kernels, const P &p, enum tv_dtype w_dtype,
                            int32_t block_rows, uint32_t tiles, int32_t groups, int32_t n,
                            int32_t k)
{
    cudaStream_t stream = tv_cuda_stream(kernels);
    bool mma = linear_uses_mma(w_dtype, k);
    if constexpr (P::streamed) {
        if (mma && block_rows < WIDE_ROWS) {
            return linear_stream_tiles(kernels, p, block_rows, k);
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
    if constexpr (!std::is_same<typename P::X, linear_rounded>::value) {
        if constexpr (!P::paired) {
            dim3 few(tiles, linear_blocks(n, LINEAR_ANY_MANY), (uint32_t)groups);
            if (w_dtype == TV_F32 && few.y <= 65535 &&
                (int64_t)few.x * few.y * few.z >= WIDE_BLOCKS_LEAST) {
                return launch(linear_any<P, float, LINEAR_ANY_MANY>, few, LINEAR_ANY_THREADS, 0,
                              stream, p); /* a row of x serves several columns */
            }
        }
        if (w_dtype == TV_F32) {
            return launch(linear_any<P, float, 1>, grid, LINEAR_ANY_THREADS, 0, stream, p);
        }
        if (w_dtype == TV_F16) {
            return launch(linear_any<P, __half, 1>, grid, LINEAR_ANY_THREADS, 0, stream, p);
        }
    }
    return launch(linear_any<P, __nv_bfloat16, 1>, grid, LINEAR_ANY_THREADS, 0, stream, p);
}

/*
 * Launch over `tiles` tiles of block_rows rows (blockIdx.x), n columns (y) and `groups` (z), with
 * products of length k. -EINVAL when the grid is larger than a grid can be.
 */
template <typename P>
static int linear_launch(const struct tv_kernels *kernels, const P &p, enum tv_products products,
                         enum tv_dtype w_dtype, int32_t block_rows, uint32_t tiles, int32_t groups,
                         int32_t n, int32_t k)
{
    if constexpr (linear_has_rounds<P>()) {
        if (linear_rounds_x(products, w_dtype)) {
            return linear_launch_as(kernels, linear_round<P>{p}, w_dtype, block_rows, tiles, groups,
                                    n, k);
        }
    }
    return linear_launch_as(kernels, p, w_dtype, block_rows, tiles, groups, n, k);
}

#endif
