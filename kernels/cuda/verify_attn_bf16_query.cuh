/*
 * verify_attn_bf16_query.cuh - how the score warps of the bf16 flash kernel get their part of Q: as
 * matrix fragments, from rows in device memory, by way of a place for KV tiles not yet in use.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_QUERY_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_QUERY_CUH

#include "verify_attn_bf16.cuh"

/*
 * A block's four score warps share its work in one of two ways, by SHARE:
 *   2: two warps compute two m-tiles, each over half of the dims;
 *   4: four warps compute one m-tile, each over a quarter.
 * A warp takes the same part of each 128-byte block of a row: 4 / SHARE steps of 16 dims.
 */
template <int SHARE> struct share {
    static constexpr int m_tiles = SHARE == 2 ? 2 : 1;
    static constexpr int block_steps = 4 / SHARE;
    static constexpr int steps = BLOCKS * block_steps;
    static constexpr int fragments = steps * m_tiles;
    static constexpr int shared = SHARE == 2 ? Q_SHARED : 0;
    static constexpr int registers = fragments - shared;
    static constexpr int piece_bytes = 32 * block_steps; /* of a row and a block */
};

/* Every third fragment is in shared memory, so that others' products lie between its load and its
 * use. */
template <int SHARE> TV_DEVICE constexpr bool fragment_shared(int f)
{
    return f % 3 == 1 && f / 3 < share<SHARE>::shared;
}

template <int SHARE> TV_DEVICE constexpr int fragment_register(int f)
{
    return f - ((f + 1) / 3 < share<SHARE>::shared ? (f + 1) / 3 : share<SHARE>::shared);
}

/* Where a 16-byte piece of a warp's part of a row lies while it is turned into fragments. Eight
 * rows of one piece lie in eight groups of banks. */
template <int SHARE> TV_DEVICE uint32_t query_piece(int32_t row, int32_t piece)
{
    int32_t swizzle = SHARE == 2 ? row >> 1 & 3 : row >> 2 & 1;
    return (uint32_t)(row * share<SHARE>::piece_bytes + ((piece ^ swizzle) << 4));
}

/* The rows of one m-tile: this warp's part of all blocks, 16 bytes a lane and load. */
template <int SHARE>
TV_DEVICE void query_read(uint4 (&piece)[BLOCKS * 4 / SHARE], const struct tv_flash_params &p,
                          const struct flash_block &b, int32_t part, int32_t row, int32_t lane)
{
    constexpr int pieces = share<SHARE>::piece_bytes / 16, loads = pieces / 2;
    const unsigned char *q =
        (const unsigned char *)p.q + part * share<SHARE>::piece_bytes + lane % pieces * 16;
#pragma unroll
    for (int i = 0; i < loads; i++) {
        int32_t r = min(row + i * (32 / pieces) + lane / pieces, b.rows - 1);
        const unsigned char *from = q + (b.base + r) * ROW_BYTES;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            piece[block * loads + i] = *(const uint4 *)(from + block * BLOCK_BYTES);
        }
    }
}

template <int SHARE>
TV_DEVICE void query_store(const uint4 (&piece)[BLOCKS * 4 / SHARE], uint32_t stage, int32_t lane)
{
    constexpr int pieces = share<SHARE>::piece_bytes / 16, loads = pieces / 2;
#pragma unroll
    for (int i = 0; i < loads; i++) {
        uint32_t to = stage + query_piece<SHARE>(i * (32 / pieces) + lane / pieces, lane % pieces);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const uint4 &x = piece[block * loads + i];
            uint32_t r[4] = {x.x, x.y, x.z, x.w};
            ptx_store4(to + block * TV_PLAN_M * share<SHARE>::piece_bytes, r);
        }
    }
    __syncwarp();
}

/* The fragments of local m-tile m, to their registers or their place in shared memory. */
template <int SHARE>
TV_DEVICE void query_fragments(uint32_t (&q)[share<SHARE>::registers][4], uint32_t q_lane,
                               uint32_t stage, int m, int32_t lane)
{
    uint32_t from = stage + query_piece<SHARE>(lane & 15, lane >> 4);
#pragma unroll
    for (int j = 0; j < share<SHARE>::steps; j++) {
        int block = j / share<SHARE>::block_steps, step = j % share<SHARE>::block_steps;
        int f = j * share<SHARE>::m_tiles + m;
        uint32_t a[4];
        ptx_ldmatrix(a, (from ^ (uint32_t)(step << 5)) +
                            block * TV_PLAN_M * share<SHARE>::piece_bytes);
        if (fragment_shared<SHARE>(f)) {
            ptx_store4(q_lane + f / 3 * FRAGMENT, a);
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                q[fragment_register<SHARE>(f)][i] = a[i];
            }
        }
    }
    __syncwarp();
}

/*
 * All of a warp's fragments. m_tile[m]: the block's m-tile that is the warp's m-th; rows past the
 * request's are read from its last. `stage` is shared memory of this warp alone, half of a place;
 * once all score warps have passed here the places may be filled.
 */
template <int SHARE>
TV_DEVICE void query_load(uint32_t (&q)[share<SHARE>::registers][4], uint32_t q_lane,
                          uint32_t stage, const struct tv_flash_params &p,
                          const struct flash_block &b, int32_t part, const int32_t (&m_tile)[2],
                          int32_t lane)
{
    uint4 piece[2][BLOCKS * 4 / SHARE];
    query_read<SHARE>(piece[0], p, b, part, b.row_first + m_tile[0] * TV_PLAN_M, lane);
    query_store<SHARE>(piece[0], stage, lane);
    if (share<SHARE>::m_tiles == 2) {
        query_read<SHARE>(piece[1], p, b, part, b.row_first + m_tile[1] * TV_PLAN_M, lane);
    }
    query_fragments<SHARE>(q, q_lane, stage, 0, lane);
    if (share<SHARE>::m_tiles == 2) {
        query_store<SHARE>(piece[1], stage, lane);
        query_fragments<SHARE>(q, q_lane, stage, 1, lane);
    }
}

#endif
