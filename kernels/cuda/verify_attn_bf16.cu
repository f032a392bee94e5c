/*
 * verify_attn_bf16.cu - the portable flash kernel: bf16 inputs, mma.sync, f32 sums.
 *
 * A block holds up to 64 folded rows (4 m-tiles) and walks its share of the KV tiles once. Its
 * twelve warps do two jobs, which meet in shared memory and nowhere else:
 *   - 4 score warps, one m-tile each: S = Q K^T over all 576 dims, mask, online softmax. Q stays in
 *     registers (the last steps in shared memory); a warp owns its rows, so no score is ever
 *     exchanged. It writes P as the matrix fragments that the next product reads.
 *   - 8 value warps, 64 of the 512 latent columns each, for all rows: O += P V, with V the same
 *     tile read transposed. The first of them also keeps the ring of KV tiles full: one bulk copy
 *     per token, into rows padded to 1,168 bytes, so that matrix loads meet no bank twice.
 * The score warp of a scheduler and its two value warps wait at different times, which is what
 * keeps the matrix unit busy. The running maximum moves only when a score passes it by 2^8, so
 * values are almost never rescaled; the result is divided by the sum taken with the same reference.
 *
 * Refuses: other dims than 512 + 64, other types (verify_attn.cu checks).
 */
#include "verify_attn.cuh"

#define SCORE_WARPS  4
#define VALUE_WARPS  8
#define THREADS      ((SCORE_WARPS + VALUE_WARPS) * 32)
#define M_TILES_MAX  TV_FLASH_BF16_M_TILES
#define ROW_BYTES    (TV_MLA_ROW * 2)
#define ROW_STRIDE   (ROW_BYTES + 16) /* of a token in shared memory: 4 banks further each */
#define TILE_BYTES   (TV_PLAN_TOKENS * ROW_STRIDE)
#define PAIRS_MAX    2   /* pairs of tiles in shared memory */
#define FRAGMENT     512 /* bytes of a 16 x 16 bf16 operand, 16 a lane */
#define Q_STEPS      (TV_MLA_ROW / 16)
#define Q_SHARED     10 /* of the steps, kept in shared memory */
#define Q_REGISTERS  (Q_STEPS - Q_SHARED)
#define COLUMNS      (TV_MLA_LATENT / VALUE_WARPS)
#define FETCH_ROWS   (TV_PLAN_TOKENS / VALUE_WARPS) /* of a tile, by each value warp */
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
    uint64_t kv_full[2 * PAIRS_MAX];        /* tile has arrived */
    uint64_t kv_empty[2 * PAIRS_MAX];       /* every value warp is through with it, and its P */
    uint64_t p_full;                        /* the pair's probabilities are written */
    struct flash_block block;
};

#define MASK_BYTES(pairs)                                                                          \
    (TV_CUDA_SHARED_MAX - (int32_t)sizeof(struct shared_fixed) - 2 * (pairs)*TILE_BYTES)

static_assert(SCORE_WARPS == M_TILES_MAX, "a score warp owns an m-tile");
static_assert(sizeof(struct shared_fixed) % 16 == 0 && TILE_BYTES % 128 == 0,
              "pieces are loaded 16 bytes at a time");
static_assert(MASK_BYTES(PAIRS_MAX) >= 0, "the block must fit sm_120");
static_assert(MASK_BYTES(PAIRS_MAX - 1) >= M_TILES_MAX * TV_PLAN_M * TV_TREE_NODES_MAX / 8,
              "the widest mask must fit");

/* A block's shared memory, and its share of the tiles, counted from 0 here. */
struct layout {
    unsigned char *kv;
    struct shared_fixed *fixed;
    uint32_t *mask;
    int32_t stages; /* tiles in flight: 2 or 4 */
    int32_t stages_log2;
};

TV_DEVICE struct layout layout_of(unsigned char *memory, int32_t pairs)
{
    struct layout l;
    l.kv = memory;
    l.stages = 2 * pairs;
    l.stages_log2 = pairs;
    l.fixed = (struct shared_fixed *)(memory + 2 * pairs * TILE_BYTES);
    l.mask = (uint32_t *)(l.fixed + 1);
    return l;
}

static_assert(PAIRS_MAX == 2, "layout_of takes the logarithm of 2 and 4 to be their half");

/* Where tile i is kept, and the parity of its barriers' phase. */
TV_DEVICE int32_t tile_stage(const struct layout &l, int32_t i)
{
    return i & (l.stages - 1);
}

TV_DEVICE uint32_t tile_parity(const struct layout &l, int32_t i)
{
    return (uint32_t)(i >> l.stages_log2) & 1u;
}

/* The rows of KV tiles that a value warp copies. */
struct fetch {
    const int32_t *table; /* of the request */
    int32_t page;         /* of tile `next` */
    int32_t next;         /* tile, from the block's first */
    int32_t slot;         /* of this warp's first row in it */
};

TV_DEVICE void fetch_page(struct fetch *f, const struct tv_flash_params &p, int32_t count)
{
    f->page = f->next < count ? f->table[f->slot / TV_PLAN_TOKENS >> p.page_tiles_log2] : 0;
}

/*
 * Start the copy of this warp's rows of the next tile, if there is one. Rows past the end repeat
 * the last one: their scores are masked, but what is multiplied by zero must be finite. The page
 * of the tile after is read ahead, so that no copy waits for its address.
 */
TV_DEVICE void fetch_next(struct fetch *f, const struct tv_flash_params &p,
                          const struct flash_block &b, const struct layout &l, int32_t count)
{
    if (f->next >= count) {
        return;
    }
    int32_t stage = tile_stage(l, f->next);
    if (f->next >= l.stages) {
        ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_empty[stage]),
                          tile_parity(l, f->next - l.stages));
    }
    if (ptx_elect()) {
        int32_t page_mask = (TV_PLAN_TOKENS << p.page_tiles_log2) - 1;
        uint32_t full = ptx_shared(&l.fixed->kv_full[stage]);
        uint32_t to = ptx_shared(l.kv) + stage * TILE_BYTES + (f->slot & 15) * ROW_STRIDE;
        const unsigned char *page =
            (const unsigned char *)p.kv + (int64_t)f->page * (page_mask + 1) * ROW_BYTES;
        ptx_mbarrier_expect(full, FETCH_ROWS * ROW_BYTES);
#pragma unroll
        for (int r = 0; r < FETCH_ROWS; r++) {
            int32_t row = min(f->slot + r, b.last) & page_mask;
            ptx_bulk_copy(to + r * ROW_STRIDE, page + row * ROW_BYTES, ROW_BYTES, full);
        }
    }
    __syncwarp();
    f->next++;
    f->slot += TV_PLAN_TOKENS;
    fetch_page(f, p, count);
}

/* The rows of Q of this warp's m-tile as matrix fragments: registers, then shared memory. */
TV_DEVICE void score_load_q(uint32_t (&q)[Q_REGISTERS][4], uint32_t q_lane,
                            const struct tv_flash_params &p, const struct flash_block &b,
                            int32_t row, int32_t lane)
{
    const uint32_t *words = (const uint32_t *)p.q;
    int32_t low = min(row + (lane >> 2), b.rows - 1), high = min(row + (lane >> 2) + 8, b.rows - 1);
    const uint32_t *q0 = words + (b.base + low) * (TV_MLA_ROW / 2) + (lane & 3);
    const uint32_t *q1 = words + (b.base + high) * (TV_MLA_ROW / 2) + (lane & 3);
#pragma unroll
    for (int k = 0; k < Q_SHARED; k++) {
        int c = (Q_REGISTERS + k) * 8;
        uint32_t a[4] = {q0[c], q1[c], q0[c + 4], q1[c + 4]};
        ptx_store4(q_lane + k * FRAGMENT, a);
    }
#pragma unroll
    for (int k = 0; k < Q_REGISTERS; k++) {
        q[k][0] = q0[k * 8];
        q[k][1] = q1[k * 8];
        q[k][2] = q0[k * 8 + 4];
        q[k][3] = q1[k * 8 + 4];
    }
    __syncwarp();
}

/*
 * S of one m-tile and a pair of KV tiles: four independent chains of products, which is what hides
 * their latency. k_lane is this lane's row address for matrix loads. Operands of the next step are
 * loaded before this one's products; the steps whose Q is in shared memory come first, when no
 * product of the pair waits yet.
 */
TV_DEVICE void score_product(float (&s)[4][4], const uint32_t (&q)[Q_REGISTERS][4], uint32_t q_lane,
                             uint32_t k_lane)
{
    uint32_t k_step[2][2][4], q_step[2][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        s[i >> 2][i & 3] = 0.0f;
    }
    ptx_load4(q_step[0], q_lane);
    ptx_ldmatrix(k_step[0][0], k_lane + Q_REGISTERS * 32);
    ptx_ldmatrix(k_step[0][1], k_lane + Q_REGISTERS * 32 + TILE_BYTES);
#pragma unroll
    for (int i = 0; i < Q_STEPS; i++) {
        int ahead = i + 1 < Q_SHARED ? Q_REGISTERS + i + 1 : i + 1 - Q_SHARED;
        if (i + 1 < Q_STEPS) {
            ptx_ldmatrix(k_step[(i + 1) & 1][0], k_lane + ahead * 32);
            ptx_ldmatrix(k_step[(i + 1) & 1][1], k_lane + ahead * 32 + TILE_BYTES);
        }
        if (i + 1 < Q_SHARED) {
            ptx_load4(q_step[(i + 1) & 1], q_lane + (i + 1) * FRAGMENT);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint32_t(&b)[4] = k_step[i & 1][n >> 1];
            if (i < Q_SHARED) {
                ptx_mma(s[n], q_step[i & 1], b[2 * (n & 1)], b[2 * (n & 1) + 1]);
            } else {
                ptx_mma(s[n], q[i - Q_SHARED], b[2 * (n & 1)], b[2 * (n & 1) + 1]);
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
    __syncwarp();
    if (lane == 0) {
        ptx_mbarrier_arrive(ptx_shared(&l.fixed->p_full));
    }
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

TV_DEVICE void score_warp(const struct tv_flash_params &p, const struct flash_block &b,
                          const struct layout &l, int32_t m, int32_t lane)
{
    uint32_t q[Q_REGISTERS][4];
    int32_t row = b.row_first + m * TV_PLAN_M, everyone = (b.m_tiles + VALUE_WARPS) * 32;
    uint32_t q_lane = ptx_shared(l.fixed->q[m]) + lane * 16;
    uint32_t k_lane =
        ptx_shared(l.kv) + ((lane & 7) + ((lane >> 4) << 3)) * ROW_STRIDE + ((lane >> 3) & 1) * 16;
    int32_t count = b.tile_end - b.tile_first;
    struct softmax state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    bool mask_ready = false;
    score_load_q(q, q_lane, p, b, row, lane);
    int32_t slot = b.tile_first * TV_PLAN_TOKENS - b.prefix;
#pragma unroll 1
    for (int32_t i = 0; i < count; i += 2, slot += 2 * TV_PLAN_TOKENS) {
        float s[4][4], alpha[2];
        int32_t stage = tile_stage(l, i);
        bool both = i + 1 < count;
        ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[stage]), tile_parity(l, i));
        if (both) {
            ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[stage + 1]), tile_parity(l, i));
        }
        score_product(s, q, q_lane, k_lane + stage * TILE_BYTES);
        if (slot > -2 * TV_PLAN_TOKENS || !both) {
            if (!mask_ready && slot > -2 * TV_PLAN_TOKENS && b.tree) {
                ptx_barrier_sync(BARRIER_MASK, everyone);
                mask_ready = true;
            }
            uint32_t window[2];
            score_window(window, p, b, l, row + (lane >> 2), slot, both);
            score_mask(s, window, lane);
        }
        bool moved = score_softmax(s, &state, alpha, p.scale_log2);
        if (i > 0) {
            /* P of the pair before is still being read until its last tile is let go. */
            ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_empty[tile_stage(l, i - 1)]),
                              tile_parity(l, i - 1));
        }
        score_publish(l, m, lane, s, alpha, moved);
    }
    score_finish(p, b, l, m, lane, &state);
    ptx_barrier_arrive(BARRIER_END, everyone);
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

/* The product of one tile: V fragments, then each m-tile's P against them. The pair's P is waited
 * for between the two, at its first tile. */
template <int MT>
TV_DEVICE void value_tile(float (&o)[MT][8][4], const struct layout &l, int32_t i, uint32_t v_lane,
                          uint32_t p_lane, int32_t lane)
{
    uint32_t v[4][4];
    int32_t stage = tile_stage(l, i);
    ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[stage]), tile_parity(l, i));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ptx_ldmatrix_trans(v[j], v_lane + stage * TILE_BYTES + j * 32);
    }
    if ((i & 1) == 0) {
        uint32_t moved[4];
        ptx_mbarrier_wait(ptx_shared(&l.fixed->p_full), (uint32_t)(i >> 1) & 1u);
        ptx_load4(moved, ptx_shared(l.fixed->moved));
        if (moved[0] | moved[1] | moved[2] | moved[3]) {
            value_rescale<MT>(o, l.fixed, lane);
        }
    }
    uint32_t a[2][4];
    p_lane += (i & 1) * M_TILES_MAX * FRAGMENT;
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
    __syncwarp();
    if (lane == 0) {
        ptx_mbarrier_arrive(ptx_shared(&l.fixed->kv_empty[stage]));
    }
}

template <int MT>
TV_DEVICE void value_warp(const struct tv_flash_params &p, const struct flash_block &b,
                          const struct layout &l, int32_t warp, int32_t lane)
{
    float o[MT][8][4] = {};
    int32_t column = warp * COLUMNS, everyone = (b.m_tiles + VALUE_WARPS) * 32;
    int32_t count = b.tile_end - b.tile_first;
    uint32_t v_lane = ptx_shared(l.kv) + ((lane & 7) + ((lane >> 3) & 1) * 8) * ROW_STRIDE +
                      (lane >> 4) * 16 + column * 2;
    uint32_t p_lane = ptx_shared(l.fixed->p) + lane * 16;
    struct fetch f = {p.page_table + (int64_t)b.request * p.max_pages, 0, 0,
                      b.tile_first * TV_PLAN_TOKENS + warp * FETCH_ROWS};
    fetch_page(&f, p, count);
    for (int32_t i = 0; i < l.stages; i++) {
        fetch_next(&f, p, b, l, count);
    }
    if (b.tree) {
        flash_build_mask(p, b, l.mask, warp * 32 + lane, VALUE_WARPS * 32);
        ptx_barrier_arrive(BARRIER_MASK, everyone);
    }
    /* Both places of a pair are refilled as soon as it is done with: the score warps are at the
     * next pair by then, and what is fetched now is what they need after that. */
#pragma unroll 1
    for (int32_t i = 0; i < count; i++) {
        value_tile<MT>(o, l, i, v_lane, p_lane, lane);
        if (i & 1) {
            fetch_next(&f, p, b, l, count);
            fetch_next(&f, p, b, l, count);
        }
    }
    ptx_barrier_sync(BARRIER_END, everyone);
    value_finish<MT>(p, b, l, o, column, lane);
}

__global__ void __launch_bounds__(THREADS, 1)
    verify_attn_flash_bf16(const __grid_constant__ struct tv_flash_params p)
{
    extern __shared__ __align__(128) unsigned char memory[];
    struct layout l = layout_of(memory, p.pairs);
    const struct flash_block &b = l.fixed->block;
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    ptx_launch_dependents();
    if (threadIdx.x == 0) {
        flash_block_init(&l.fixed->block, p);
        for (int i = 0; i < l.stages; i++) {
            ptx_mbarrier_init(ptx_shared(&l.fixed->kv_full[i]), VALUE_WARPS);
            ptx_mbarrier_init(ptx_shared(&l.fixed->kv_empty[i]), VALUE_WARPS);
        }
        ptx_mbarrier_init(ptx_shared(&l.fixed->p_full), (uint32_t)max(b.m_tiles, 1));
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
            score_warp(p, b, l, warp, lane);
        }
    } else if (b.m_tiles == 4) {
        value_warp<4>(p, b, l, warp - SCORE_WARPS, lane);
    } else if (b.m_tiles == 3) {
        value_warp<3>(p, b, l, warp - SCORE_WARPS, lane);
    } else if (b.m_tiles == 2) {
        value_warp<2>(p, b, l, warp - SCORE_WARPS, lane);
    } else {
        value_warp<1>(p, b, l, warp - SCORE_WARPS, lane);
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
    return tv_flash_prepare_kernel((const void *)verify_attn_flash_bf16, TV_CUDA_SHARED_MAX);
}

int tv_flash_bf16_launch(const struct tv_flash_params *params, int32_t batch, int32_t blocks,
                         cudaStream_t stream)
{
    struct tv_flash_params p = *params;
    /* Very wide trees of few heads take the place of a pair of tiles. */
    p.pairs = mask_bytes(&p) <= MASK_BYTES(PAIRS_MAX) ? PAIRS_MAX : PAIRS_MAX - 1;
    int32_t shared = TV_CUDA_SHARED_MAX - MASK_BYTES(p.pairs) + mask_bytes(&p);
    dim3 grid((uint32_t)blocks, (uint32_t)batch);
    verify_attn_flash_bf16<<<grid, THREADS, (size_t)shared, stream>>>(p);
    return tv_cuda_errno(cudaGetLastError());
}
