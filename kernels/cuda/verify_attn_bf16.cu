/*
 * verify_attn_bf16.cu - the portable flash kernel: bf16 inputs, mma.sync, f32 sums.
 *
 * A block holds up to 64 folded rows (4 m-tiles) and walks its share of the KV tiles once. Its
 * twelve warps do two jobs, which meet in shared memory and nowhere else:
 *   - 4 score warps, one m-tile each: S = Q K^T over all 576 dims, mask, online softmax. Q stays in
 *     registers (the last steps in shared memory); a warp owns its rows, so no score is ever
 *     exchanged. It writes P as the matrix fragments that the next product reads.
 *   - 8 value warps, 64 of the 512 latent columns each, for all rows: O += P V, with V the same
 *     tile read transposed. The first of them also starts the copies of the tiles to come.
 * The score warp of a scheduler and its two value warps wait at different times, which is what
 * keeps the matrix unit busy. The running maximum moves only when a score passes it by 2^8, so
 * values are almost never rescaled; the result is divided by the sum taken with the same reference.
 *
 * Refuses: other dims than 512 + 64, other types (verify_attn.cu checks).
 */
#include <cuda.h>

#include "verify_attn_bf16_score.cuh"
#include "verify_attn_bf16_value.cuh"

typedef CUresult (*tv_cuda_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

template <int PAIRS>
__global__ void __launch_bounds__(THREADS, 1)
    verify_attn_flash_bf16(const __grid_constant__ struct tv_flash_params p,
                           const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    struct layout l = layout_of<PAIRS>(memory);
    const struct flash_block &b = l.fixed->block;
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    ptx_launch_dependents();
    if (threadIdx.x == VALUE_WARPS * 32) {
        ptx_prefetch_map(&map);
    }
    ptx_wait_dependence();
    if (threadIdx.x == 0) {
        flash_block_init(&l.fixed->block, p);
        for (int i = 0; i < PAIRS; i++) {
            ptx_mbarrier_init(ptx_shared(&l.fixed->kv_full[i]), 1);
            ptx_mbarrier_init(ptx_shared(&l.fixed->kv_empty[i]), VALUE_WARPS * 32);
        }
        ptx_mbarrier_init(ptx_shared(&l.fixed->p_full), (uint32_t)max(b.m_tiles, 1) * 32);
        ptx_mbarrier_init(ptx_shared(&l.fixed->sum_full), (uint32_t)max(b.m_tiles, 1) * 32);
        for (int m = b.m_tiles; m < M_TILES_MAX; m++) {
            l.fixed->moved[m] = 0;
        }
        ptx_fence_async();
    }
    __syncthreads();
    flash_fill_padding(p);
    if (b.m_tiles == 0) {
        return;
    }
    if (warp < SCORE_WARPS) {
        if (warp < b.m_tiles) {
            score_warp<PAIRS>(p, b, l, warp, lane);
        }
    } else if (b.m_tiles == 4) {
        value_warp<4, PAIRS>(p, &map, b, l, warp - SCORE_WARPS, lane);
    } else if (b.m_tiles == 3) {
        value_warp<3, PAIRS>(p, &map, b, l, warp - SCORE_WARPS, lane);
    } else if (b.m_tiles == 2) {
        value_warp<2, PAIRS>(p, &map, b, l, warp - SCORE_WARPS, lane);
    } else {
        value_warp<1, PAIRS>(p, &map, b, l, warp - SCORE_WARPS, lane);
    }
}

/* Ancestor sets of as many nodes as a block's rows can touch. */
static int32_t mask_bytes(const struct tv_flash_params *p)
{
    int32_t nodes = (M_TILES_MAX * TV_PLAN_M - 2) / p->heads + 2;
    nodes = nodes < p->q_len ? nodes : p->q_len;
    return nodes * p->mask_words * 4;
}

int tv_flash_bf16_prepare(void)
{
    int result =
        tv_flash_prepare_kernel((const void *)verify_attn_flash_bf16<1>, TV_CUDA_SHARED_MAX);
    return result < 0 ? result
                      : tv_flash_prepare_kernel((const void *)verify_attn_flash_bf16<2>,
                                                TV_CUDA_SHARED_MAX);
}

/* The pool as [9][rows][64] for the copy engine: a box is one tile. */
static int encode_map(CUtensorMap *map, const struct tv_cuda *cuda, const void *kv, int64_t rows)
{
    cuuint64_t dims[3] = {BLOCK_BYTES / 2, (cuuint64_t)rows, BLOCKS};
    cuuint64_t strides[2] = {ROW_BYTES, BLOCK_BYTES};
    cuuint32_t box[3] = {BLOCK_BYTES / 2, TV_PLAN_TOKENS, BLOCKS}, steps[3] = {1, 1, 1};
    tv_cuda_encode_fn encode = (tv_cuda_encode_fn)cuda->tensor_map_encode;
    if (rows > INT32_MAX) {
        return -EINVAL;
    }
    CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizeof box / sizeof box[0], (void *)kv, dims,
               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? 0 : -EINVAL;
}

int tv_flash_bf16_launch(const struct tv_cuda *cuda, const struct tv_flash_params *p,
                         int64_t pool_rows, int32_t batch, int32_t blocks, cudaStream_t stream)
{
    CUtensorMap map;
    dim3 grid((uint32_t)blocks, (uint32_t)batch);
    int32_t mask = mask_bytes(p), result = encode_map(&map, cuda, p->kv, pool_rows);
    if (result < 0) {
        return result;
    }
    /* Very wide trees of few heads take the place of a pair of tiles. */
    bool wide = mask > MASK_BYTES(2);
    int32_t room = wide ? MASK_BYTES(1) : MASK_BYTES(2);
    void *args[2] = {(void *)p, &map};
    return tv_flash_launch(wide ? (const void *)verify_attn_flash_bf16<1>
                                : (const void *)verify_attn_flash_bf16<2>,
                           grid, THREADS, TV_CUDA_SHARED_MAX - room + mask, stream, args);
}
