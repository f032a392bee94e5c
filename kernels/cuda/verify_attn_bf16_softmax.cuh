/*
 * verify_attn_bf16_softmax.cuh - softmax of 16 rows and 32 tokens by one warp, in the registers
 * that the products of both bf16 kernels leave them in: what they share of mask, maximum and sum.
 */
#ifndef TV_KERNELS_CUDA_VERIFY_ATTN_BF16_SOFTMAX_CUH
#define TV_KERNELS_CUDA_VERIFY_ATTN_BF16_SOFTMAX_CUH

#include "verify_attn.cuh"

#define RESCALE_LOG2 8.0f

/* Softmax state of a lane's two rows (lane / 4 and 8 more): the exponent that probabilities are
 * relative to, and this lane's share of their sum. */
struct softmax {
    float reference[2];
    float sum[2];
};

/* Bits of 32 tokens from `slot` on that this lane's two rows attend to. */
TV_DEVICE void score_window(uint32_t (&window)[2], const struct tv_flash_params &p,
                            const struct flash_block &b, const uint32_t *mask, int32_t row,
                            int32_t slot)
{
    int32_t node_first = flash_node(b, b.row_first, p.heads);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int32_t node = flash_node(b, row + 8 * r, p.heads) - node_first;
        window[r] = flash_mask_window(mask + node * p.mask_words, p.mask_words, slot);
    }
}

/* Set masked scores to -inf. window[r]: bits of the tokens that row r attends to. */
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

/*
 * When some score of the warp passes its row's reference by too much, move the references of its
 * rows that do; alpha[r] is what the values so far must be multiplied by. Rare after the first
 * pair.
 */
TV_DEVICE bool score_move(const float (&s)[4][4], struct softmax *state, float (&alpha)[2],
                          float scale_log2)
{
    float top[2];
    bool above = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < 4; n++) {
            top[r] = fmaxf(top[r], fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        }
        top[r] *= scale_log2;
        alpha[r] = 1.0f;
        above = above || top[r] > state->reference[r] + RESCALE_LOG2;
    }
    above = __any_sync(0xffffffffu, above);
    if (__builtin_expect(above, 0)) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
            top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
            if (top[r] > state->reference[r] + RESCALE_LOG2) {
                alpha[r] = ptx_exp2(state->reference[r] - top[r]);
                state->reference[r] = top[r];
                state->sum[r] *= alpha[r];
            }
        }
    }
    return above;
}

/* Raw scores to probabilities, in place. */
TV_DEVICE void score_exp(float (&s)[4][4], const struct softmax *state, float scale_log2)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float reference = state->reference[r];
        float zero = reference == -CUDART_INF_F ? 0.0f : -reference;
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[n][2 * r + i] = ptx_exp2(fmaf(s[n][2 * r + i], scale_log2, zero));
            }
        }
    }
}

/* Add probabilities to the sums. */
TV_DEVICE void score_sum(const float (&s)[4][4], struct softmax *state)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            sum[0] += s[n][2 * r];
            sum[1] += s[n][2 * r + 1];
        }
        state->sum[r] += sum[0] + sum[1];
    }
}

/* Probabilities of the first or the second 16 tokens as the operand of the next product. */
TV_DEVICE void score_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4])
{
    a[0] = ptx_pack(low[0], low[1]);
    a[1] = ptx_pack(low[2], low[3]);
    a[2] = ptx_pack(high[0], high[1]);
    a[3] = ptx_pack(high[2], high[3]);
}

/* Write lse, or its partial, of the rows of m-tile m, and 1 / sum of each for the value
 * warps. */
TV_DEVICE void score_finish(const struct tv_flash_params &p, const struct flash_block &b,
                            float *inverse, int32_t m, int32_t lane, struct softmax *state)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = state->sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int32_t local = m * TV_PLAN_M + (lane >> 2) + 8 * r, row = b.row_first + local;
        if ((lane & 3) == 0) {
            float lse2 = flash_lse2(state->reference[r], sum);
            inverse[local % TV_PLAN_M] = sum > 0.0f ? 1.0f / sum : 0.0f;
            if (row < b.rows) {
                float *to = b.splits > 1 ? p.partial_lse + b.partial_lse + local * b.splits
                                         : p.lse + b.base + row;
                *to = b.splits > 1 ? lse2 : lse2 * CUDART_LN2_F;
            }
        }
    }
}

#endif
