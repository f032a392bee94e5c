/*
 * verify_attn_bf16_score.cuh - the score warps of the bf16 flash kernel: S = Q K^T, mask, softmax,
 * and the end of a row. Touches no value and no result but lse.
 *
 * Two tiles are taken at a time: eight independent chains of products hide each other's latency.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_SCORE_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_SCORE_CUH

#include "verify_attn_bf16_query.cuh"
#include "verify_attn_bf16_softmax.cuh"

/* What a score warp needs besides its state; what is the same in all its lanes is uniform. */
struct score_loop {
    uint32_t fixed;  /* shared_fixed */
    uint32_t k_lane; /* this lane's first row of K, in place 0 */
    uint32_t lane;   /* this lane's 16 bytes of a fragment, from the start of its shared_warp */
    bool odd;        /* the second of two warps that share m-tiles */
    bool late;       /* ... or of such groups */
    bool first;      /* lane 0 */
};

/* Read where they are needed: no register is left to keep them. */
TV_DEVICE int32_t score_count(const struct score_loop &w)
{
    return (int32_t)ptx_load1(w.fixed + FIXED_AT(count));
}

/* The first pair, by its first tile, that holds tree nodes or lacks its second tile; and the first
 * of the former. */
TV_DEVICE int32_t score_masked(const struct score_loop &w)
{
    return (int32_t)ptx_load1(w.fixed + FIXED_AT(masked));
}

TV_DEVICE int32_t score_masked_first(const struct score_loop &w)
{
    return (int32_t)ptx_load1(w.fixed + FIXED_AT(tree_first));
}

/* K of step j of a pair of tiles: 16 tokens each, 16 of the warp's dims. */
template <int SHARE> TV_DEVICE void score_load_k(uint32_t (&k)[2][4], uint32_t k_lane, int j)
{
    uint32_t at = (k_lane ^ (uint32_t)(j % share<SHARE>::block_steps << 5)) +
                  j / share<SHARE>::block_steps * BLOCK_STRIDE;
    ptx_ldmatrix(k[0], at);
    ptx_ldmatrix(k[1], at + TILE_BYTES);
}

/* S of two m-tiles and a pair of tiles, over half of the dims. Operands are loaded ahead of their
 * use. */
TV_DEVICE void score_product_two(float (&s)[2][4][4], const uint32_t (&q)[share<2>::registers][4],
                                 uint32_t q_lane, uint32_t k_lane)
{
    uint32_t k[2][2][4], staged[4];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        s[i >> 4][i >> 2 & 3][i & 3] = 0.0f;
    }
    score_load_k<2>(k[0], k_lane, 0);
    ptx_load4(staged, q_lane);
#pragma unroll
    for (int j = 0; j < share<2>::steps; j++) {
        if (j + 1 < share<2>::steps) {
            score_load_k<2>(k[(j + 1) & 1], k_lane, j + 1);
        }
#pragma unroll
        for (int f = 2 * j; f < 2 * j + 2; f++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint32_t(&b)[4] = k[j & 1][n >> 1];
                if (fragment_shared<2>(f)) {
                    ptx_mma(s[f & 1][n], staged, b[2 * (n & 1)], b[2 * (n & 1) + 1]);
                } else {
                    ptx_mma(s[f & 1][n], q[fragment_register<2>(f)], b[2 * (n & 1)],
                            b[2 * (n & 1) + 1]);
                }
            }
            if (fragment_shared<2>(f) && fragment_shared<2>(f + 3)) {
                ptx_load4(staged, q_lane + (f + 3) / 3 * FRAGMENT);
            }
        }
    }
}

/* One m-tile and a pair of tiles, over a quarter of the dims. */
TV_DEVICE void score_product_one(float (&s)[4][4], const uint32_t (&q)[share<4>::registers][4],
                                 uint32_t k_lane)
{
    uint32_t k[2][2][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        s[i >> 2][i & 3] = 0.0f;
    }
    score_load_k<4>(k[0], k_lane, 0);
#pragma unroll
    for (int j = 0; j < share<4>::steps; j++) {
        if (j + 1 < share<4>::steps) {
            score_load_k<4>(k[(j + 1) & 1], k_lane, j + 1);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint32_t(&b)[4] = k[j & 1][n >> 1];
            ptx_mma(s[n], q[j], b[2 * (n & 1)], b[2 * (n & 1) + 1]);
        }
    }
}

TV_DEVICE void score_send(uint32_t to, const float (&s)[4])
{
    uint32_t r[4] = {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
                     __float_as_uint(s[3])};
    ptx_store4(to, r);
}

TV_DEVICE void score_add(float (&s)[4], uint32_t from)
{
    uint32_t r[4];
    ptx_load4(r, from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[i] += __uint_as_float(r[i]);
    }
}

/*
 * Two warps with halves of the same two m-tiles give each other their half of the other's scores:
 * those of the first tile where the other will write its P, those of the second in the pair's RoPE
 * blocks, which nobody reads again. Before that, the value warps must be through with P, and all
 * score warps with the pair.
 */
TV_DEVICE void score_exchange(float (&own)[4][4], const float (&other)[4][4],
                              const struct score_loop &w, uint32_t pair, bool again)
{
    uint32_t partner = w.odd ? 0u - WARP_BYTES : WARP_BYTES, mine = w.lane + WARP_AT(p);
    uint32_t rope = pair + (w.late ? TILE_BYTES : 0) + ROPE_BLOCK * BLOCK_STRIDE +
                    (uint32_t)(ptx_thread() & 31) * 16;
    uint32_t first = rope + (w.odd ? 2 * FRAGMENT : 0), second = rope + (w.odd ? 0 : 2 * FRAGMENT);
    if (again) {
        ptx_barrier_sync(BARRIER_P_EMPTY, softmax_threads(2));
    } else {
        ptx_barrier_sync(BARRIER_SCORE, SCORE_LANES);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        score_send(mine + partner + n * FRAGMENT, other[n]);
        score_send(second + n * FRAGMENT, other[2 + n]);
    }
    ptx_barrier_sync(w.late ? BARRIER_GROUP + 1 : BARRIER_GROUP, 64);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        score_add(own[n], mine + n * FRAGMENT);
        score_add(own[2 + n], first + n * FRAGMENT);
    }
}

/* Four warps with quarters of one m-tile: the first one sums all. In pairs of tiles that alternate
 * between two parts of Q's memory, so that the others need not wait for it. */
TV_DEVICE void score_gather(float (&s)[4][4], const struct score_loop &w, int32_t pair)
{
    uint32_t at = w.lane + (pair & 1) * 2048;
    bool first = !w.odd && !w.late;
    if (!first) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            score_send(at + n * 512, s[n]);
        }
    }
    ptx_barrier_sync(BARRIER_SCORE, SCORE_LANES);
    if (first) {
#pragma unroll
        for (int part = 1; part < SCORE_WARPS; part++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                score_add(s[n], at + part * WARP_BYTES + n * 512);
            }
        }
    }
}

/* Write P of the pair from tile k on. That of the pair before has been used: two warps that share
 * m-tiles have waited for that already. */
template <int SHARE>
TV_DEVICE void score_publish(const struct score_loop &w, int32_t k, const float (&s)[4][4],
                             const float (&alpha)[2], bool moved)
{
    uint32_t a[2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        score_operand(a[t], s[2 * t], s[2 * t + 1]);
    }
    if (SHARE == 4 && k > 0) {
        ptx_barrier_sync(BARRIER_P_EMPTY, softmax_threads(1));
    }
    ptx_store4(w.lane + WARP_AT(p), a[0]);
    ptx_store4(w.lane + WARP_AT(p) + FRAGMENT, a[1]);
    if (__builtin_expect(moved, 0)) {
        int32_t lane = ptx_thread() & 31;
        uint32_t at = w.lane - lane * 16 + WARP_AT(alpha) + lane / 4 * 4;
        if ((lane & 3) == 0) {
            ptx_store1(at, __float_as_uint(alpha[0]));
            ptx_store1(at + 32, __float_as_uint(alpha[1]));
        }
    }
    if (w.first) {
        ptx_store1(w.lane + WARP_AT(moved), moved);
    }
    ptx_mbarrier_arrive(w.fixed + FIXED_AT(p_full));
}

/* Mask the pair from tile k on. `first`: no pair was masked before. */
template <int SHARE>
TV_DEVICE void score_mask_pair(float (&s)[4][4], const struct tv_flash_params &p,
                               const struct flash_block &b, const struct layout &l, int32_t k,
                               bool first)
{
    uint32_t window[2];
    int32_t thread = ptx_thread(), lane = thread & 31, m = SHARE == 2 ? thread >> 5 : 0;
    int32_t row = b.row_first + m * TV_PLAN_M + (lane >> 2);
    if (first && b.tree) {
        ptx_barrier_sync(BARRIER_MASK, softmax_threads(SHARE == 2 ? 2 : 1));
    }
    score_window(window, p, b, l.mask, row, (b.tile_first + k) * TV_PLAN_TOKENS - b.prefix);
    if (b.tile_first + k + 1 == b.tile_end) {
        /* The second tile is not there: it was computed from whatever lay in its place. */
        window[0] &= 0xffffu;
        window[1] &= 0xffffu;
    }
    score_mask(s, window, lane);
}

/* Mask, softmax and P of the pair from tile k on. */
template <int SHARE>
TV_DEVICE void score_pair(float (&s)[4][4], struct softmax *state, const struct score_loop &w,
                          const struct tv_flash_params &p, const struct flash_block &b,
                          const struct layout &l, int32_t k)
{
    float alpha[2];
    if (__builtin_expect(k >= score_masked(w), 0)) {
        score_mask_pair<SHARE>(s, p, b, l, k, k == score_masked_first(w));
    }
    bool moved = score_move(s, state, alpha, p.scale_log2);
    score_exp(s, state, p.scale_log2);
    score_sum(s, state);
    score_publish<SHARE>(w, k, s, alpha, moved);
}

/* Two m-tiles by two warps. */
template <int PLACES>
TV_DEVICE void score_loop_two(const struct score_loop &w, const struct tv_flash_params &p,
                              const struct flash_block &b, const struct layout &l,
                              struct softmax *state, const uint32_t (&q)[share<2>::registers][4])
{
    int32_t count = score_count(w);
#pragma unroll 1
    for (int32_t k = 0; k < count; k += 2) {
        float s[2][4][4];
        int32_t place = tile_place<PLACES>(k);
        uint32_t full = w.fixed + FIXED_AT(kv_full) + place * 8;
        ptx_mbarrier_wait(full, tile_parity<PLACES>(k));
        if (k + 1 < count) {
            ptx_mbarrier_wait(full + 8, tile_parity<PLACES>(k));
        }
        score_product_two(s, q, w.lane, w.k_lane + place * TILE_BYTES);
        score_exchange(s[0], s[1], w, w.fixed - (PLACES - place) * TILE_BYTES, k > 0);
        score_pair<2>(s[0], state, w, p, b, l, k);
        count = score_count(w);
    }
}

/* One m-tile by four warps, two tiles at a time; the first warp computes softmax. */
template <int PLACES>
TV_DEVICE void score_loop_one(const struct score_loop &w, const struct tv_flash_params &p,
                              const struct flash_block &b, const struct layout &l,
                              struct softmax *state, const uint32_t (&q)[share<4>::registers][4])
{
    int32_t count = score_count(w);
#pragma unroll 1
    for (int32_t k = 0; k < count; k += 2) {
        float s[4][4];
        int32_t place = tile_place<PLACES>(k);
        uint32_t full = w.fixed + FIXED_AT(kv_full) + place * 8;
        bool both = k + 1 < count;
        ptx_mbarrier_wait(full, tile_parity<PLACES>(k));
        if (both) {
            ptx_mbarrier_wait(full + 8, tile_parity<PLACES>(k));
        }
        score_product_one(s, q, w.k_lane + place * TILE_BYTES);
        score_gather(s, w, k >> 1);
        if (w.odd || w.late) {
            continue;
        }
        score_pair<4>(s, state, w, p, b, l, k);
    }
}

template <int PLACES, int SHARE>
TV_DEVICE void score_warp(const struct tv_flash_params &p, const struct flash_block &b,
                          const struct layout &l)
{
    uint32_t q[share<SHARE>::registers][4];
    struct score_loop w;
    struct softmax state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    int32_t thread = ptx_thread(), lane = thread & 31, warp = thread >> 5, part = warp % SHARE;
    int32_t k_row = (lane & 7) + ((lane >> 4) << 3);
    uint32_t stage = ptx_shared(l.kv) + (PLACES - 2) * TILE_BYTES + warp * (TILE_BYTES / 2);
    const int32_t m_tile[2] = {SHARE == 2 ? warp : 0, warp ^ 1};
    w.fixed = ptx_uniform(ptx_shared(l.fixed));
    w.lane = w.fixed + warp * WARP_BYTES + lane * 16;
    w.odd = (warp & 1) != 0;
    w.late = warp >= 2;
    w.first = lane == 0;
    w.k_lane = (ptx_shared(l.kv) + tile_piece(k_row, lane >> 3 & 1)) ^
               (uint32_t)(part * share<SHARE>::piece_bytes);
    query_load<SHARE>(q, w.lane, stage, p, b, part, m_tile, lane);
    ptx_mbarrier_arrive(w.fixed + FIXED_AT(q_taken));
    if constexpr (SHARE == 2) {
        score_loop_two<PLACES>(w, p, b, l, &state, q);
    } else {
        score_loop_one<PLACES>(w, p, b, l, &state, q);
    }
    if (SHARE == 2 || (!w.odd && !w.late)) {
        thread = ptx_thread();
        score_finish(p, b, layout_inverse(l, thread >> 5), thread >> 5, thread & 31, &state);
        ptx_mbarrier_arrive(w.fixed + FIXED_AT(sum_full));
    }
}

#endif
