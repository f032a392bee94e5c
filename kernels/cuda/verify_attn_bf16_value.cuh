/*
 * verify_attn_bf16_value.cuh - the value warps of the bf16 flash kernel: O += P V, the copies of
 * the tiles to come, and the result. Knows of scores only their P.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_VALUE_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_VALUE_CUH

#include <cuda.h>

#include "verify_attn_bf16.cuh"

/* Pages of the two tiles of the pair that starts `tile` tiles into the block's share. */
TV_DEVICE void fetch_pages(int32_t (&page)[2], const struct tv_flash_params &p,
                           const struct flash_block &b, int32_t tile)
{
    const int32_t *table = p.page_table + (int64_t)blockIdx.y * p.max_pages;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        page[t] = table[min(b.tile_first + tile + t, b.tile_end - 1) >> p.page_tiles_log2];
    }
}

/* Start the copy of pair i (or of the last tile) to its place, which must be free, by one warp.
 * Then read the pages of the pair after, so that no copy waits for its address. */
template <int PAIRS>
TV_DEVICE void fetch_pair(int32_t (&page)[2], const struct tv_flash_params &p,
                          const CUtensorMap *map, const struct flash_block &b,
                          const struct layout &l, int32_t i)
{
    if (ptx_elect()) {
        int32_t tile = b.tile_first + 2 * i, place = pair_place<PAIRS>(i);
        int32_t tile_mask = (1 << p.page_tiles_log2) - 1, both = tile + 1 < b.tile_end;
        uint32_t full = ptx_shared(&l.fixed->kv_full[place]);
        uint32_t to = ptx_shared(l.kv) + place * PAIR_BYTES;
        ptx_mbarrier_expect(full, both ? PAIR_BYTES : TILE_BYTES);
#pragma unroll
        for (int t = 0; t < 2; t++) {
            if (t == 0 || both) {
                int32_t from = (page[t] << p.page_tiles_log2) + (tile + t & tile_mask);
                ptx_tensor_copy(to + t * TILE_BYTES, map, from * TV_PLAN_TOKENS, full);
            }
        }
    }
    __syncwarp();
    fetch_pages(page, p, b, 2 * i + 2);
}

/* O *= alpha in the m-tiles whose reference moved: the first tile, and almost never again. */
template <int MT>
TV_DEVICE void value_rescale(float (&o)[MT][8][4], const struct shared_fixed *at, int32_t lane)
{
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (at->moved[m]) {
            float a0 = at->alpha[m * TV_PLAN_M + (lane >> 2)];
            float a1 = at->alpha[m * TV_PLAN_M + (lane >> 2) + 8];
#pragma unroll
            for (int n = 0; n < 8; n++) {
                o[m][n][0] *= a0;
                o[m][n][1] *= a0;
                o[m][n][2] *= a1;
                o[m][n][3] *= a1;
            }
        }
    }
}

/* Write this warp's columns of the block's rows: the result, or the split's partial sums. */
template <int MT>
TV_DEVICE void value_finish(const struct tv_flash_params &p, const struct flash_block &b,
                            const struct layout &l, float (&o)[MT][8][4], int32_t column,
                            int32_t lane)
{
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t local = m * TV_PLAN_M + (lane >> 2) + 8 * r, row = b.row_first + local;
            float inverse = l.fixed->inverse[local];
            if (row >= b.rows) {
                continue;
            }
            int64_t at = b.splits > 1 ? b.partial_base + local : b.base + row;
            float *base = b.splits > 1 ? p.partial_out : (float *)p.out;
            at = at * TV_MLA_LATENT + column;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float x = o[m][n][2 * r] * inverse, y = o[m][n][2 * r + 1] * inverse;
                int64_t i = at + n * 8 + (lane & 3) * 2;
                if (b.splits == 1 && p.out_bf16) {
                    *(uint32_t *)((__nv_bfloat16 *)p.out + i) = ptx_pack(x, y);
                } else {
                    *(float2 *)(base + i) = make_float2(x, y);
                }
            }
        }
    }
}

/* O += P V of one tile. v: its V fragments; p_lane: this lane's piece of its P. */
template <int MT>
TV_DEVICE void value_product(float (&o)[MT][8][4], const uint32_t (&v)[4][4], uint32_t p_lane)
{
    uint32_t a[2][4];
    ptx_load4(a[0], p_lane);
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (m + 1 < MT) {
            ptx_load4(a[(m + 1) & 1], p_lane + (m + 1) * FRAGMENT);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            ptx_mma(o[m][2 * j], a[m & 1], v[j][0], v[j][1]);
            ptx_mma(o[m][2 * j + 1], a[m & 1], v[j][2], v[j][3]);
        }
    }
}

TV_DEVICE void value_load(uint32_t (&v)[4][4], uint32_t v_lane)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ptx_ldmatrix_trans(v[j], v_lane ^ (j << 5));
    }
}

/* Clear this warp's columns of a tile's rows from `row` on: nothing that lies behind the request's
 * last slot may meet a product, not even times zero. */
TV_DEVICE void value_clear(unsigned char *tile, int32_t row, int32_t warp, int32_t lane)
{
    for (row = max(row, 0); row < TV_PLAN_TOKENS; row++) {
        *(uint32_t *)(tile + warp * BLOCK_STRIDE + row * BLOCK_BYTES + lane * 4) = 0;
    }
    __syncwarp();
}

/* Clear what the block's last pair of tiles holds behind the request's last slot, in this warp's
 * columns; the score warps have read it by now. */
TV_DEVICE void value_clear_pair(const struct flash_block &b, unsigned char *kv, int32_t i,
                                int32_t warp, int32_t lane)
{
    int32_t used = b.last + 1 - (b.tile_first + 2 * i) * TV_PLAN_TOKENS;
    value_clear(kv, used, warp, lane);
    value_clear(kv + TILE_BYTES, used - TV_PLAN_TOKENS, warp, lane);
}

/* Pair i, which lies at v_lane. V of its first tile is loaded while its P is still awaited, but for
 * the last pair, part of which may have to be cleared in between. */
template <int MT>
TV_DEVICE void value_pair(float (&o)[MT][8][4], const struct flash_block &b, const struct layout &l,
                          int32_t place, int32_t i, bool last, uint32_t v_lane, int32_t warp,
                          int32_t lane)
{
    uint32_t v[4][4], moved[4], p_lane = ptx_shared(l.fixed->p) + lane * 16;
    if (!last) {
        value_load(v, v_lane);
    }
    ptx_mbarrier_wait(ptx_shared(&l.fixed->p_full), (uint32_t)i & 1u);
    if (last) {
        value_clear_pair(b, l.kv + place * PAIR_BYTES, i, warp, lane);
        value_load(v, v_lane);
    }
    ptx_load4(moved, ptx_shared(l.fixed->moved));
    if (moved[0] | moved[1] | moved[2] | moved[3]) {
        value_rescale<MT>(o, l.fixed, lane);
    }
    value_product<MT>(o, v, p_lane);
    if (!last || b.tile_first + 2 * i + 1 < b.tile_end) {
        value_load(v, v_lane + TILE_BYTES);
        value_product<MT>(o, v, p_lane + M_TILES_MAX * FRAGMENT);
    }
}

template <int MT, int PAIRS>
TV_DEVICE void value_warp(const struct tv_flash_params &p, const CUtensorMap *map,
                          const struct flash_block &b, const struct layout &l, int32_t warp,
                          int32_t lane)
{
    float o[MT][8][4] = {};
    int32_t pairs = (b.tile_end - b.tile_first + 1) / 2, page[2];
    uint32_t v_lane = ptx_shared(l.kv) + warp * BLOCK_STRIDE + tile_piece(lane & 15, lane >> 4);
    if (warp == 0) {
        fetch_pages(page, p, b, 0);
        for (int32_t i = 0; i < PAIRS && i < pairs; i++) {
            fetch_pair<PAIRS>(page, p, map, b, l, i);
        }
    }
    if (b.tree) {
        flash_build_mask(p, b, l.mask, warp * 32 + lane, VALUE_WARPS * 32);
        ptx_barrier_arrive(BARRIER_MASK, (b.m_tiles + VALUE_WARPS) * 32);
    }
#pragma unroll 1
    for (int32_t i = 0; i < pairs; i++) {
        int32_t place = pair_place<PAIRS>(i);
        ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[place]), pair_parity<PAIRS>(i));
        value_pair<MT>(o, b, l, place, i, i + 1 == pairs, v_lane + place * PAIR_BYTES, warp, lane);
        ptx_mbarrier_arrive(ptx_shared(&l.fixed->kv_empty[place]));
        /* The place is refilled at once: the score warps are at the next pair by now, and what is
         * fetched here is what they need after that. */
        if (warp == 0 && i + PAIRS < pairs) {
            ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_empty[place]), pair_parity<PAIRS>(i));
            fetch_pair<PAIRS>(page, p, map, b, l, i + PAIRS);
        }
    }
    ptx_mbarrier_wait(ptx_shared(&l.fixed->sum_full), 0);
    value_finish<MT>(p, b, l, o, warp * COLUMNS, lane);
}

#endif
