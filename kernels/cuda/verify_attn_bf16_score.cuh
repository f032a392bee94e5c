/*
 * verify_attn_bf16_score.cuh - the score warps of the bf16 flash kernel: S = Q K^T, mask, softmax,
 * and the end of a row. Touches no value and no result but lse.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_SCORE_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_SCORE_CUH

#include "verify_attn_bf16.cuh"

/* The order of the 36 steps of 16 dims: those at the same place in their block one after the other,
 * so that their addresses differ by a constant in spite of the swizzle. */
TV_DEVICE constexpr int step_at(int i)
{
    return i % BLOCKS * 4 + i / BLOCKS;
}

/* Every third step has its part of Q in shared memory, so that a step's time lies between its load
 * and its use; the others have it in registers, at step_register. */
TV_DEVICE constexpr bool step_shared(int i)
{
    return i % 3 == 1 && i / 3 < Q_SHARED;
}

TV_DEVICE constexpr int step_register(int i)
{
    return i - ((i + 1) / 3 < Q_SHARED ? (i + 1) / 3 : Q_SHARED);
}

/* The rows of Q of this warp's m-tile as matrix fragments. */
TV_DEVICE void score_load_q(uint32_t (&q)[Q_REGISTERS][4], uint32_t q_lane,
                            const struct tv_flash_params &p, const struct flash_block &b,
                            int32_t row, int32_t lane)
{
    const uint32_t *words = (const uint32_t *)p.q;
    int32_t low = min(row + (lane >> 2), b.rows - 1), high = min(row + (lane >> 2) + 8, b.rows - 1);
    const uint32_t *q0 = words + (b.base + low) * (TV_MLA_ROW / 2) + (lane & 3);
    const uint32_t *q1 = words + (b.base + high) * (TV_MLA_ROW / 2) + (lane & 3);
#pragma unroll
    for (int i = 0; i < Q_STEPS; i++) {
        int c = step_at(i) * 8;
        uint32_t a[4] = {q0[c], q1[c], q0[c + 4], q1[c + 4]};
        if (step_shared(i)) {
            ptx_store4(q_lane + i / 3 * FRAGMENT, a);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                q[step_register(i)][j] = a[j];
            }
        }
    }
    __syncwarp();
}

/* K of step i for both tiles of a pair. */
TV_DEVICE void score_load_k(uint32_t (&k)[2][4], uint32_t k_lane, int i)
{
    uint32_t at = (k_lane ^ (uint32_t)(i / BLOCKS * 32)) + i % BLOCKS * BLOCK_STRIDE;
    ptx_ldmatrix(k[0], at);
    ptx_ldmatrix(k[1], at + TILE_BYTES);
}

/*
 * S of one m-tile and a pair of KV tiles: four independent chains of products, which is what hides
 * their latency. Operands of the next step are loaded before this one's products.
 */
TV_DEVICE void score_product(float (&s)[4][4], const uint32_t (&q)[Q_REGISTERS][4], uint32_t q_lane,
                             uint32_t k_lane)
{
    uint32_t k_step[2][2][4], q_step[4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        s[i >> 2][i & 3] = 0.0f;
    }
    score_load_k(k_step[0], k_lane, 0);
#pragma unroll
    for (int i = 0; i < Q_STEPS; i++) {
        if (i + 1 < Q_STEPS) {
            score_load_k(k_step[(i + 1) & 1], k_lane, i + 1);
        }
        if (step_shared(i + 1)) {
            ptx_load4(q_step, q_lane + (i + 1) / 3 * FRAGMENT);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint32_t(&b)[4] = k_step[i & 1][n >> 1];
            if (step_shared(i)) {
                ptx_mma(s[n], q_step, b[2 * (n & 1)], b[2 * (n & 1) + 1]);
            } else {
                ptx_mma(s[n], q[step_register(i)], b[2 * (n & 1)], b[2 * (n & 1) + 1]);
            }
        }
    }
}

/* Softmax state of a lane's two rows (lane / 4 and 8 more): the exponent that probabilities are
 * relative to, and this lane's share of their sum. */
struct softmax {
    float reference[2];
    float sum[2];
};

/* Bits of a pair's tokens that this lane's two rows attend to. A tile that is not there was
 * computed from whatever lay in its place. */
TV_DEVICE void score_window(uint32_t (&window)[2], const struct tv_flash_params &p,
                            const struct flash_block &b, const struct layout &l, int32_t row,
                            int32_t slot, bool both)
{
    int32_t node_first = flash_node(b, b.row_first, p.heads);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int32_t node = flash_node(b, row + 8 * r, p.heads) - node_first;
        window[r] = flash_mask_window(l.mask + node * p.mask_words, p.mask_words, slot) &
                    (both ? 0xffffffffu : 0xffffu);
    }
}

/* Set masked scores to -inf. window[r]: bits of the pair's 32 tokens that row r attends to. */
TV_DEVICE void score_mask(float (&s)[4][4], const uint32_t (&window)[2], int32_t lane)
{
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = n * 8 + (lane & 3) * 2 + (i & 1);
            if (!(window[i >> 1] >> column & 1u)) {
                s[n][i] = -CUDART_INF_F;
            }
        }
    }
}

/* Raw scores to probabilities, in place; alpha[r] is what the values so far must be multiplied by.
 * Returns whether some row of the warp moved its reference. */
TV_DEVICE bool score_softmax(float (&s)[4][4], struct softmax *state, float (&alpha)[2],
                             float scale_log2)
{
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < 4; n++) {
            top[r] = fmaxf(top[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
    }
#pragma unroll
    for (int i = 1; i <= 2; i <<= 1) {
        float other[2] = {__shfl_xor_sync(0xffffffffu, top[0], i),
                          __shfl_xor_sync(0xffffffffu, top[1], i)};
        top[0] = fmaxf(top[0], other[0]);
        top[1] = fmaxf(top[1], other[1]);
    }
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float reference = state->reference[r];
        alpha[r] = 1.0f;
        top[r] *= scale_log2;
        if (top[r] > reference + RESCALE_LOG2) {
            alpha[r] = ptx_exp2(reference - top[r]);
            reference = top[r];
            moved = true;
        }
        state->reference[r] = reference;
        float zero = reference == -CUDART_INF_F ? 0.0f : -reference;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                s[n][i] = ptx_exp2(fmaf(s[n][i], scale_log2, zero));
                sum += s[n][i];
            }
        }
        state->sum[r] = fmaf(state->sum[r], alpha[r], sum);
    }
    return __any_sync(0xffffffffu, moved);
}

/* Hand P of a pair of tiles to the value warps. */
TV_DEVICE void score_publish(const struct layout &l, int32_t m, int32_t lane,
                             const float (&s)[4][4], const float (&alpha)[2], bool moved)
{
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float(&low)[4] = s[2 * t], (&high)[4] = s[2 * t + 1];
        uint32_t a[4] = {ptx_pack(low[0], low[1]), ptx_pack(low[2], low[3]),
                         ptx_pack(high[0], high[1]), ptx_pack(high[2], high[3])};
        ptx_store4(ptx_shared(l.fixed->p[t][m] + lane * 16), a);
    }
    if (moved && (lane & 3) == 0) {
        l.fixed->alpha[m * TV_PLAN_M + (lane >> 2)] = alpha[0];
        l.fixed->alpha[m * TV_PLAN_M + (lane >> 2) + 8] = alpha[1];
    }
    if (lane == 0) {
        l.fixed->moved[m] = moved;
    }
    ptx_mbarrier_arrive(ptx_shared(&l.fixed->p_full));
}

/* Write lse, or its partial, of this warp's rows, and 1 / sum for the value warps. */
TV_DEVICE void score_finish(const struct tv_flash_params &p, const struct flash_block &b,
                            const struct layout &l, int32_t m, int32_t lane, struct softmax *state)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = state->sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int32_t local = m * TV_PLAN_M + (lane >> 2) + 8 * r, row = b.row_first + local;
        if ((lane & 3) == 0) {
            float lse2 = flash_lse2(state->reference[r], sum);
            l.fixed->inverse[local] = sum > 0.0f ? 1.0f / sum : 0.0f;
            if (b.splits > 1) {
                p.partial_lse[b.partial_base + local] = lse2;
            } else if (row < b.rows) {
                p.lse[b.base + row] = lse2 * CUDART_LN2_F;
            }
        }
    }
}

template <int PAIRS>
TV_DEVICE void score_warp(const struct tv_flash_params &p, const struct flash_block &b,
                          const struct layout &l, int32_t m, int32_t lane)
{
    uint32_t q[Q_REGISTERS][4];
    int32_t row = b.row_first + m * TV_PLAN_M, everyone = (b.m_tiles + VALUE_WARPS) * 32;
    uint32_t q_lane = ptx_shared(l.fixed->q[m]) + lane * 16;
    int32_t k_row = (lane & 7) + ((lane >> 4) << 3);
    uint32_t k_lane = ptx_shared(l.kv) + tile_piece(k_row, lane >> 3 & 1);
    int32_t count = b.tile_end - b.tile_first;
    int32_t slot = b.tile_first * TV_PLAN_TOKENS - b.prefix;
    struct softmax state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    bool mask_ready = false;
    score_load_q(q, q_lane, p, b, row, lane);
#pragma unroll 1
    for (int32_t i = 0; 2 * i < count; i++, slot += 2 * TV_PLAN_TOKENS) {
        float s[4][4], alpha[2];
        int32_t place = pair_place<PAIRS>(i);
        bool both = 2 * i + 1 < count;
        ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[place]), pair_parity<PAIRS>(i));
        score_product(s, q, q_lane, k_lane + place * PAIR_BYTES);
        if (slot > -2 * TV_PLAN_TOKENS || !both) {
            if (!mask_ready && b.tree) {
                ptx_barrier_sync(BARRIER_MASK, everyone);
                mask_ready = true;
            }
            uint32_t window[2];
            score_window(window, p, b, l, row + (lane >> 2), slot, both);
            score_mask(s, window, lane);
        }
        bool moved = score_softmax(s, &state, alpha, p.scale_log2);
        if (i > 0) {
            /* P of the pair before is being read until that is let go. */
            ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_empty[pair_place<PAIRS>(i - 1)]),
                              pair_parity<PAIRS>(i - 1));
        }
        score_publish(l, m, lane, s, alpha, moved);
    }
    score_finish(p, b, l, m, lane, &state);
    ptx_mbarrier_arrive(ptx_shared(&l.fixed->sum_full));
}

#endif
