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

#include "verify_attn.cuh"

#define SCORE_WARPS  4
#define VALUE_WARPS  8
#define THREADS      ((SCORE_WARPS + VALUE_WARPS) * 32)
#define M_TILES_MAX  TV_FLASH_BF16_M_TILES
#define ROW_BYTES    (TV_MLA_ROW * 2)
#define BLOCK_BYTES  128 /* a row is 9 of them; 16-byte pieces are swizzled within one */
#define BLOCKS       (ROW_BYTES / BLOCK_BYTES)
#define BLOCK_STRIDE (TV_PLAN_TOKENS * BLOCK_BYTES)
#define TILE_BYTES   (TV_PLAN_TOKENS * ROW_BYTES)
#define PAIR_BYTES   (2 * TILE_BYTES)
#define PAIRS_MAX    2   /* pairs of tiles in shared memory */
#define FRAGMENT     512 /* bytes of a 16 x 16 bf16 operand, 16 a lane */
#define Q_STEPS      (TV_MLA_ROW / 16)
#define Q_SHARED     11 /* of the steps, kept in shared memory */
#define Q_REGISTERS  (Q_STEPS - Q_SHARED)
#define COLUMNS      (TV_MLA_LATENT / VALUE_WARPS)
#define RESCALE_LOG2 8.0f
#define BARRIER_MASK 1
#define BARRIER_END  2

/* Shared memory besides the KV tiles, which come first, and the mask, which comes last. */
struct __align__(16) shared_fixed
{
    uint8_t q[M_TILES_MAX][Q_SHARED][FRAGMENT];
    uint8_t p[2][M_TILES_MAX][FRAGMENT];    /* of one pair of tiles */
    float alpha[M_TILES_MAX * TV_PLAN_M];   /* factor of the values so far, where moved is set */
    float inverse[M_TILES_MAX * TV_PLAN_M]; /* 1 / sum, at the end */
    uint32_t moved[M_TILES_MAX];            /* the m-tile's reference moved in this pair */
    uint64_t kv_full[PAIRS_MAX];            /* a pair of tiles has arrived */
    uint64_t kv_empty[PAIRS_MAX];           /* every value warp is through with it, and its P */
    uint64_t p_full;                        /* the pair's probabilities are written */
    struct flash_block block;
};

typedef CUresult (*tv_cuda_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

#define MASK_BYTES(pairs)                                                                          \
    (TV_CUDA_SHARED_MAX - (int32_t)sizeof(struct shared_fixed) - (pairs)*PAIR_BYTES)

static_assert(SCORE_WARPS == M_TILES_MAX, "a score warp owns an m-tile");
static_assert(sizeof(struct shared_fixed) % 16 == 0, "pieces are loaded 16 bytes at a time");
static_assert(TILE_BYTES % 1024 == 0 && COLUMNS * 2 == BLOCK_BYTES,
              "tiles start a swizzle pattern, and a value warp's columns are one block of a row");
static_assert(MASK_BYTES(PAIRS_MAX) >= 0, "the block must fit sm_120");
static_assert(MASK_BYTES(PAIRS_MAX - 1) >= M_TILES_MAX * TV_PLAN_M * TV_TREE_NODES_MAX / 8,
              "the widest mask must fit");

/* A block's shared memory. */
struct layout {
    unsigned char *kv;
    struct shared_fixed *fixed;
    uint32_t *mask;
};

template <int PAIRS> TV_DEVICE struct layout layout_of(unsigned char *memory)
{
    struct layout l;
    l.kv = memory;
    l.fixed = (struct shared_fixed *)(memory + PAIRS * PAIR_BYTES);
    l.mask = (uint32_t *)(l.fixed + 1);
    return l;
}

/* Where the block's i-th pair of tiles is kept, and the parity of its barriers' phase. */
template <int PAIRS> TV_DEVICE int32_t pair_place(int32_t i)
{
    return i & (PAIRS - 1);
}

template <int PAIRS> TV_DEVICE uint32_t pair_parity(int32_t i)
{
    return (uint32_t)(i / PAIRS) & 1u;
}

/*
 * Where piece `piece` (16 bytes, of 8) of a row lies in a block of a tile. The copy engine lays a
 * tile out as 9 blocks of 16 rows of 128 bytes, and swizzles the pieces of a row, so that eight
 * rows of one column lie in eight different groups of banks without any padding.
 */
TV_DEVICE uint32_t tile_piece(int32_t row, int32_t piece)
{
    return (uint32_t)(row * BLOCK_BYTES + ((piece ^ (row & 7)) << 4));
}

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
    ptx_barrier_sync(BARRIER_END, everyone);
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
    ptx_barrier_sync(BARRIER_END, (b.m_tiles + VALUE_WARPS) * 32);
    value_finish<MT>(p, b, l, o, warp * COLUMNS, lane);
}

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
