/*
 * verify_attn_bf16.cu - the portable flash kernel: bf16 inputs, mma.sync, f32 sums.
 *
 * A block holds up to 64 folded rows (4 m-tiles) and walks its share of the KV tiles once, two at a
 * time. Its twelve warps do two jobs, which meet in shared memory and nowhere else:
 *   - 4 score warps: S = Q K^T, mask, online softmax. Two of them share two m-tiles, each with half
 *     of the 576 dims, so that K is read from shared memory twice and not four times; they exchange
 *     partial sums, and each then owns the rows of one m-tile. A block of one m-tile has all four
 *     share it, and one of them compute softmax. Q stays in registers (eleven fragments a warp in
 *     shared memory). P is written as the matrix fragments that the next product reads.
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

template <int PLACES>
__global__ void __launch_bounds__(THREADS, 1)
    verify_attn_flash_bf16(const __grid_constant__ struct tv_flash_params p,
                           const __grid_constant__ CUtensorMap map)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    struct layout l = layout_of<PLACES>(memory);
    const struct flash_block &b = l.fixed->block;
    int32_t warp = (int32_t)threadIdx.x >> 5;
    if (threadIdx.x == VALUE_WARPS * 32) {
        ptx_prefetch_map(&map);
    }
    ptx_wait_dependence();
    ptx_launch_dependents();
    if (threadIdx.x == 0) {
        flash_block_init(&l.fixed->block, p, flash_request_read(p, (int32_t)blockIdx.y),
                         M_TILES_MAX);
        l.fixed->count = b.tile_end - b.tile_first;
        int32_t first = max(b.prefix / TV_PLAN_TOKENS - b.tile_first, 0) & ~1;
        l.fixed->tree_first = first;
        l.fixed->masked = l.fixed->count % 2 == 0 ? first : min(first, l.fixed->count - 1);
        for (int i = 0; i < PLACES; i++) {
            ptx_mbarrier_init(ptx_shared(&l.fixed->kv_full[i]), 1);
        }
        int32_t softmax = softmax_threads(b.m_tiles) - VALUE_LANES;
        ptx_mbarrier_init(ptx_shared(&l.fixed->p_full), softmax);
        ptx_mbarrier_init(ptx_shared(&l.fixed->sum_full), softmax);
        ptx_mbarrier_init(ptx_shared(&l.fixed->q_taken), SCORE_LANES);
        for (int m = b.m_tiles; m < M_TILES_MAX; m++) {
            l.fixed->warp[m].moved = 0;
        }
        ptx_fence_async();
    }
    __syncthreads();
    if (b.m_tiles == 0) {
        flash_fill_padding(p, b, (int32_t)threadIdx.x, THREADS);
        return;
    }
    if (warp < SCORE_WARPS) {
        if (b.m_tiles == 1) {
            score_warp<PLACES, 4>(p, b, l);
        } else {
            score_warp<PLACES, 2>(p, b, l);
        }
        /* They are through well before the value warps. */
        flash_fill_padding(p, b, (int32_t)threadIdx.x, SCORE_LANES);
    } else if (b.m_tiles == 4) {
        value_warp<4, PLACES>(p, &map, b, l);
    } else if (b.m_tiles == 3) {
        value_warp<3, PLACES>(p, &map, b, l);
    } else if (b.m_tiles == 2) {
        value_warp<2, PLACES>(p, &map, b, l);
    } else {
        value_warp<1, PLACES>(p, &map, b, l);
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
    int result = tv_flash_prepare_kernel((const void *)verify_attn_flash_bf16<PLACES_MAX / 2>,
                                         TV_CUDA_SHARED_MAX);
    return result < 0 ? result
                      : tv_flash_prepare_kernel((const void *)verify_attn_flash_bf16<PLACES_MAX>,
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

int tv_flash_bf16_launch(const struct tv_cuda *cuda, const struct tv_flash_params *p, int32_t batch,
                         int32_t blocks, cudaStream_t stream)
{
    CUtensorMap map;
    dim3 grid((uint32_t)blocks, (uint32_t)batch);
    int32_t mask = mask_bytes(p), result = encode_map(&map, cuda, p->kv, p->pool_rows);
    if (result < 0) {
        return result;
    }
    /* Very wide trees of few heads take the place of a pair of tiles. */
    bool wide = mask > MASK_BYTES(PLACES_MAX);
    int32_t room = wide ? MASK_BYTES(PLACES_MAX / 2) : MASK_BYTES(PLACES_MAX);
    void *args[2] = {(void *)p, &map};
    return tv_flash_launch(wide ? (const void *)verify_attn_flash_bf16<PLACES_MAX / 2>
                                : (const void *)verify_attn_flash_bf16<PLACES_MAX>,
                           grid, THREADS, TV_CUDA_SHARED_MAX - room + mask, stream, args);
}
