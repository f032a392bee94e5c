/*
 * verify_attn_bf16_value.cuh - the value warps of the bf16 flash kernel: O += P V, the copies of
 * the tiles to come, and the result. Knows of scores only their P.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_VALUE_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_VALUE_CUH

#include <cuda.h>

#include "verify_attn_bf16.cuh"

/* Start the copy of tile k to its place, which must be free, by one warp. The line of the page
 * table is in the first cache but for once in 32 pages. */
template <int PLACES>
TV_DEVICE void fetch_tile(const struct tv_flash_params &p, const CUtensorMap *map,
                          const struct flash_block &b, const struct layout &l, int32_t k)
{
    if (ptx_elect()) {
        int32_t place = tile_place<PLACES>(k), tile = b.tile_first + k;
        const int32_t *table = p.page_table + (int64_t)b.request * p.max_pages;
        int32_t tile_mask = (1 << p.page_tiles_log2) - 1;
        int32_t page = table[tile >> p.page_tiles_log2];
        int32_t from = (page << p.page_tiles_log2) + (tile & tile_mask);
        uint32_t full = ptx_shared(&l.fixed->kv_full[place]);
        /* Score warps have stored to the place; they have been met at a barrier since. */
        ptx_fence_async();
        ptx_mbarrier_expect(full, TILE_BYTES);
        ptx_tensor_copy(ptx_shared(l.kv) + place * TILE_BYTES, map, from * TV_PLAN_TOKENS, full);
    }
    __syncwarp();
}

/* The first tiles: all places, the last two once Q has left them. */
template <int PLACES>
TV_DEVICE void fetch_first(const struct tv_flash_params &p, const CUtensorMap *map,
                           const struct flash_block &b, const struct layout &l)
{
#pragma unroll 1
    for (int32_t k = 0; k < PLACES; k++) {
        if (k == PLACES - 2) {
            ptx_mbarrier_wait(ptx_shared(&l.fixed->q_taken), 0);
        }
        if (k < b.tile_end - b.tile_first) {
            fetch_tile<PLACES>(p, map, b, l, k);
        }
    }
}

/* O *= alpha in the m-tiles whose reference moved: the first tile, and almost never again. */
template <int MT> TV_DEVICE void value_rescale(float (&o)[MT][8][4], const struct shared_fixed *at)
{
    int32_t lane = ptx_thread() & 31;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (at->warp[m].moved) {
            float a0 = at->warp[m].alpha[lane >> 2];
            float a1 = at->warp[m].alpha[(lane >> 2) + 8];
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

/* Two floats of each of two neighbouring 8-column tiles: the lanes of a pair of lanes exchange one
 * each, so that a lane has four columns in a row, of the first tile if its number is even. */
TV_DEVICE float4 value_gather(const float (&a)[4], const float (&b)[4], int r, float scale,
                              bool odd)
{
    float keep[2], got[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float first = a[2 * r + i] * scale, second = b[2 * r + i] * scale;
        keep[i] = odd ? second : first;
        got[i] = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
    }
    return odd ? make_float4(got[0], got[1], keep[0], keep[1])
               : make_float4(keep[0], keep[1], got[0], got[1]);
}

/* Write this warp's columns of the block's rows: the result, or the split's partial sums. */
template <int MT>
TV_DEVICE void value_finish(const struct tv_flash_params &p, const struct flash_block &b,
                            const struct layout &l, float (&o)[MT][8][4])
{
    int32_t thread = ptx_thread(), lane = thread & 31;
    bool odd = (lane & 1) != 0;
    int32_t column = ((thread >> 5) - SCORE_WARPS) * COLUMNS + (lane & 2) * 2 + (odd ? 8 : 0);
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t local = m * TV_PLAN_M + (lane >> 2) + 8 * r, row = b.row_first + local;
            float inverse = layout_inverse(l, m)[local % TV_PLAN_M];
            int64_t at = b.splits > 1 ? b.partial_base + local : b.base + row;
            float *base = b.splits > 1 ? p.partial_out : (float *)p.out;
            at = at * TV_MLA_LATENT + column;
#pragma unroll
            for (int n = 0; n < 8; n += 2) {
                float4 x = value_gather(o[m][n], o[m][n + 1], r, inverse, odd);
                if (row >= b.rows) {
                    continue;
                }
                if (b.splits == 1 && p.out_bf16) {
                    *(uint2 *)((__nv_bfloat16 *)p.out + at + n * 8) =
                        make_uint2(ptx_pack(x.x, x.y), ptx_pack(x.z, x.w));
                } else {
                    *(float4 *)(base + at + n * 8) = x;
                }
            }
        }
    }
}

/* O += P V of one tile. v: its V fragments; p_lane: this lane's piece of its P, of which a[0] has
 * the first already. */
template <int MT>
TV_DEVICE void value_product(float (&o)[MT][8][4], uint32_t (&a)[2][4], const uint32_t (&v)[4][4],
                             uint32_t p_lane)
{
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (m + 1 < MT) {
            ptx_load4(a[(m + 1) & 1], p_lane + (m + 1) * WARP_BYTES);
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

/* Zero the tokens of a tile from `count` on: nothing that lies behind the request's last slot may
 * meet a product, not even times zero. Registers 0 and 2 hold tokens 2 (lane % 4) and the next one,
 * 1 and 3 those eight later. */
TV_DEVICE void value_trim(uint32_t (&v)[4][4], int32_t count)
{
    int32_t token = (ptx_thread() & 3) * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t left = count - token - half * 8;
        uint32_t keep = left <= 0 ? 0 : left == 1 ? 0xffffu : 0xffffffffu;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j][half] &= keep;
            v[j][half + 2] &= keep;
        }
    }
}

/* Tile k, the first or the second of its pair. Its V is loaded while its P is still awaited. */
template <int MT, int PLACES>
TV_DEVICE void value_tile(float (&o)[MT][8][4], const struct flash_block &b, const struct layout &l,
                          int32_t k, bool last, uint32_t fixed, uint32_t v_lane, uint32_t lane16)
{
    int32_t place = tile_place<PLACES>(k);
    uint32_t v[4][4], a[2][4], moved = 0;
    uint32_t p_lane = lane16 + fixed + WARP_AT(p) + (k & 1) * FRAGMENT;
    v_lane += place * TILE_BYTES;
    ptx_mbarrier_wait(fixed + FIXED_AT(kv_full) + place * 8, tile_parity<PLACES>(k));
    value_load(v, v_lane);
    if (__builtin_expect(last, 0)) {
        value_trim(v, b.last + 1 - (b.tile_first + k) * TV_PLAN_TOKENS);
    }
    if ((k & 1) == 0) {
        ptx_mbarrier_wait(fixed + FIXED_AT(p_full), (uint32_t)(k >> 1) & 1u);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            moved |= ptx_load1(fixed + m * WARP_BYTES + WARP_AT(moved));
        }
    }
    ptx_load4(a[0], p_lane);
    if (moved != 0) {
        value_rescale<MT>(o, l.fixed);
    }
    value_product<MT>(o, a, v, p_lane);
}

/* Tile k's place is filled again at once, when there is something to fill it with. */
template <int PLACES>
TV_DEVICE void value_refill(const struct tv_flash_params &p, const CUtensorMap *map,
                            const struct flash_block &b, const struct layout &l, int32_t k)
{
    if (k + PLACES < l.fixed->count) {
        if (ptx_thread() >= (SCORE_WARPS + 1) * 32) {
            ptx_barrier_arrive(BARRIER_FREE + (k & 1), VALUE_LANES);
        } else {
            ptx_barrier_sync(BARRIER_FREE + (k & 1), VALUE_LANES);
            fetch_tile<PLACES>(p, map, b, l, k + PLACES);
        }
    }
}

template <int MT, int PLACES>
TV_DEVICE void value_warp(const struct tv_flash_params &p, const CUtensorMap *map,
                          const struct flash_block &b, const struct layout &l)
{
    float o[MT][8][4] = {};
    int32_t thread = ptx_thread(), warp = (thread >> 5) - SCORE_WARPS, lane = thread & 31;
    uint32_t v_lane = ptx_shared(l.kv) + warp * BLOCK_STRIDE + tile_piece(lane & 15, lane >> 4);
    uint32_t fixed = ptx_shared(l.fixed);
    int32_t count = (int32_t)ptx_uniform((uint32_t)(b.tile_end - b.tile_first));
    if (warp == 0) {
        fetch_first<PLACES>(p, map, b, l);
    }
    if (b.tree) {
        flash_build_mask(p, b, l.mask, warp * 32 + lane, VALUE_LANES);
        ptx_barrier_arrive(BARRIER_MASK, softmax_threads(MT));
    }
#pragma unroll 1
    for (int32_t k = 0; k < count; k++) {
        value_tile<MT, PLACES>(o, b, l, k, k + 1 == count, fixed, v_lane, lane * 16);
        value_refill<PLACES>(p, map, b, l, k);
        /* In this order: no value warp may pass here twice before the first has met all. */
        if ((k & 1) != 0 && k + 1 < count) {
            ptx_barrier_arrive(BARRIER_P_EMPTY, softmax_threads(MT));
        }
    }
    ptx_mbarrier_wait(fixed + FIXED_AT(sum_full), 0);
    value_finish<MT>(p, b, l, o);
}

#endif
