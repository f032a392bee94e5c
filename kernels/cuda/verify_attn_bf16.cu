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
#define STAGE_BYTES  (TV_PLAN_TOKENS * ROW_STRIDE)
#define STAGES_MAX   4
#define FRAGMENT     512 /* bytes of a 16 x 16 bf16 operand, 16 a lane */
#define Q_STEPS      (TV_MLA_ROW / 16)
#define Q_SHARED     8 /* of the steps, kept in shared memory */
#define Q_REGISTERS  (Q_STEPS - Q_SHARED)
#define COLUMNS      (TV_MLA_LATENT / VALUE_WARPS)
#define RESCALE_LOG2 8.0f
#define BARRIER_MASK 1
#define BARRIER_END  2
#define MASK_BYTES(stages)                                                                         \
    (TV_CUDA_SHARED_MAX - (int32_t)sizeof(struct shared_fixed) -                                   \
     (stages) * (int32_t)sizeof(struct shared_stage))

/* Shared memory that one KV tile in flight takes. */
struct shared_stage {
    uint8_t kv[STAGE_BYTES];
    uint8_t p[M_TILES_MAX][FRAGMENT];
    float alpha[M_TILES_MAX * TV_PLAN_M]; /* factor of the values so far, where moved is set */
    uint32_t moved[M_TILES_MAX];          /* the m-tile's maximum moved */
};

struct shared_fixed {
    uint8_t q[M_TILES_MAX][Q_SHARED][FRAGMENT];
    float inverse[M_TILES_MAX * TV_PLAN_M]; /* 1 / sum, at the end */
    uint64_t kv_full[STAGES_MAX];           /* tile has arrived */
    uint64_t kv_empty[STAGES_MAX];          /* every value warp is through with it */
    uint64_t p_full[STAGES_MAX];            /* its probabilities are written */
};

static_assert(SCORE_WARPS == M_TILES_MAX, "a score warp owns an m-tile");
static_assert(sizeof(struct shared_stage) % 16 == 0, "stages are loaded in 16-byte pieces");
static_assert(sizeof(struct shared_fixed) + STAGES_MAX * sizeof(struct shared_stage) <=
                  TV_CUDA_SHARED_MAX,
              "the block must fit sm_120");

/* Position in the ring: stage and the parity of its current use. */
struct ring {
    int32_t stage;
    uint32_t parity;
};

TV_DEVICE void ring_advance(struct ring *r, int32_t stages)
{
    if (++r->stage == stages) {
        r->stage = 0;
        r->parity ^= 1u;
    }
}

/* Where things are in shared memory, as shared-space addresses. */
struct layout {
    struct shared_fixed *fixed;
    struct shared_stage *stage;
    uint32_t *mask;
};

TV_DEVICE struct layout layout_of(unsigned char *memory, int32_t stages)
{
    struct layout l;
    l.stage = (struct shared_stage *)memory;
    l.fixed = (struct shared_fixed *)(l.stage + stages);
    l.mask = (uint32_t *)(l.fixed + 1);
    return l;
}

/* Start the copy of one KV tile, by one whole warp. Rows past the end repeat the last one: their
 * scores are masked, but what is multiplied by zero must be finite. */
TV_DEVICE void tile_fetch(const struct tv_flash_params &p, const struct flash_block &b,
                          struct layout l, int32_t tile, int32_t stage)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t last = b.prefix + b.nodes - 1;
    const int32_t *table = p.page_table + (int64_t)b.request * p.max_pages;
    int64_t page = table[tile >> p.page_tiles_log2];
    int32_t slot = min(tile * TV_PLAN_TOKENS + (lane & 15), last);
    int32_t page_mask = (TV_PLAN_TOKENS << p.page_tiles_log2) - 1;
    int64_t row = (page * (page_mask + 1)) + (slot & page_mask);
    uint32_t full = ptx_shared(&l.fixed->kv_full[stage]);
    if (lane == 0) {
        ptx_mbarrier_expect(full, TV_PLAN_TOKENS * ROW_BYTES);
    }
    __syncwarp();
    if (lane < TV_PLAN_TOKENS) {
        ptx_bulk_copy(ptx_shared(l.stage[stage].kv + lane * ROW_STRIDE),
                      (const unsigned char *)p.kv + row * ROW_BYTES, ROW_BYTES, full);
    }
}

/* The rows of Q of this warp's m-tile as matrix fragments: registers, then shared memory. */
TV_DEVICE void score_load_q(uint32_t (&q)[Q_REGISTERS][4], uint32_t q_shared,
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
        ptx_store4(q_shared + k * FRAGMENT + lane * 16, a);
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

/* S of one m-tile and one KV tile. Even and odd steps sum apart: four chains hide the latency of
 * the product. k_base is this lane's row address for matrix loads. */
TV_DEVICE void score_product(float (&s)[2][4], const uint32_t (&q)[Q_REGISTERS][4], uint32_t q_base,
                             uint32_t k_base)
{
    float odd[2][4] = {};
    uint32_t k_step[3][4], q_step[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[0][i] = 0.0f;
        s[1][i] = 0.0f;
    }
    ptx_ldmatrix(k_step[0], k_base);
    ptx_ldmatrix(k_step[1], k_base + 32);
#pragma unroll
    for (int k = 0; k < Q_STEPS; k++) {
        if (k + 2 < Q_STEPS) {
            ptx_ldmatrix(k_step[(k + 2) % 3], k_base + (k + 2) * 32);
        }
        if (k + 1 >= Q_REGISTERS && k + 1 < Q_STEPS) {
            ptx_load4(q_step[(k + 1) & 1], q_base + (k + 1 - Q_REGISTERS) * FRAGMENT);
        }
        const uint32_t(&b)[4] = k_step[k % 3];
        float(&c0)[4] = k & 1 ? odd[0] : s[0], (&c1)[4] = k & 1 ? odd[1] : s[1];
        if (k < Q_REGISTERS) {
            ptx_mma(c0, q[k], b[0], b[1]);
            ptx_mma(c1, q[k], b[2], b[3]);
        } else {
            ptx_mma(c0, q_step[k & 1], b[0], b[1]);
            ptx_mma(c1, q_step[k & 1], b[2], b[3]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s[0][i] += odd[0][i];
        s[1][i] += odd[1][i];
    }
}

/* Softmax state of a lane's two rows (lane / 4 and 8 more): the exponent that probabilities are
 * relative to, and this lane's share of their sum. */
struct softmax {
    float reference[2];
    float sum[2];
};

/* Set masked scores to -inf. window[r]: bits of the tile's tokens that row r attends to. */
TV_DEVICE void score_mask(float (&s)[2][4], const uint32_t (&window)[2], int32_t lane)
{
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = n * 8 + (lane & 3) * 2 + (i & 1);
            if (!(window[i >> 1] >> column & 1u)) {
                s[n][i] = -CUDART_INF_F;
            }
        }
    }
}

/* Scores (times log2 e) to probabilities, in place; alpha[r] is what the values so far must be
 * multiplied by. Returns whether some row of the warp moved its reference. */
TV_DEVICE bool score_softmax(float (&s)[2][4], struct softmax *state, float (&alpha)[2])
{
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = fmaxf(fmaxf(s[0][2 * r], s[0][2 * r + 1]), fmaxf(s[1][2 * r], s[1][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        alpha[r] = 1.0f;
        if (top > state->reference[r] + RESCALE_LOG2) {
            alpha[r] = ptx_exp2(state->reference[r] - top);
            state->reference[r] = top;
            moved = true;
        }
        float zero = state->reference[r] == -CUDART_INF_F ? 0.0f : state->reference[r];
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                s[n][i] = ptx_exp2(s[n][i] - zero);
                sum += s[n][i];
            }
        }
        state->sum[r] = state->sum[r] * alpha[r] + sum;
    }
    return __any_sync(0xffffffffu, moved);
}

/* Hand P of one tile to the value warps. */
TV_DEVICE void score_publish(struct layout l, int32_t stage, int32_t m, int32_t lane,
                             const float (&s)[2][4], const float (&alpha)[2], bool moved)
{
    struct shared_stage *at = &l.stage[stage];
    uint32_t a[4] = {ptx_pack(s[0][0], s[0][1]), ptx_pack(s[0][2], s[0][3]),
                     ptx_pack(s[1][0], s[1][1]), ptx_pack(s[1][2], s[1][3])};
    ptx_store4(ptx_shared(at->p[m] + lane * 16), a);
    if (moved && (lane & 3) == 0) {
        at->alpha[m * TV_PLAN_M + (lane >> 2)] = alpha[0];
        at->alpha[m * TV_PLAN_M + (lane >> 2) + 8] = alpha[1];
    }
    if (lane == 0) {
        at->moved[m] = moved;
    }
    __syncwarp();
    if (lane == 0) {
        ptx_mbarrier_arrive(ptx_shared(&l.fixed->p_full[stage]));
    }
}

/* Write lse, or its partial, of this warp's rows, and 1 / sum for the value warps. */
TV_DEVICE void score_finish(const struct tv_flash_params &p, const struct flash_block &b,
                            struct layout l, int32_t m, int32_t lane, struct softmax *state)
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
                          struct layout l, int32_t m, int32_t lane)
{
    uint32_t q[Q_REGISTERS][4];
    int32_t row = b.row_first + m * TV_PLAN_M, everyone = (b.m_tiles + VALUE_WARPS) * 32;
    uint32_t q_base = ptx_shared(l.fixed->q[m]) + lane * 16;
    uint32_t k_lane = ((lane & 7) + ((lane >> 4) << 3)) * ROW_STRIDE + ((lane >> 3) & 1) * 16;
    int32_t node_first = flash_node(b, b.row_first, p.heads);
    const uint32_t *set[2];
    struct softmax state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    struct ring ring = {0, 0};
    bool mask_ready = false;
    score_load_q(q, q_base - lane * 16, p, b, row, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int32_t node = flash_node(b, row + (lane >> 2) + 8 * r, p.heads);
        set[r] = l.mask + (node - node_first) * p.mask_words;
    }
    for (int32_t tile = b.tile_first; tile < b.tile_end; tile++) {
        float s[2][4], alpha[2];
        ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[ring.stage]), ring.parity);
        score_product(s, q, q_base, ptx_shared(l.stage[ring.stage].kv) + k_lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[0][i] *= p.scale_log2;
            s[1][i] *= p.scale_log2;
        }
        int32_t slot = tile * TV_PLAN_TOKENS - b.prefix;
        if (slot > -TV_PLAN_TOKENS) {
            if (!mask_ready) {
                ptx_barrier_sync(BARRIER_MASK, everyone);
                mask_ready = true;
            }
            uint32_t window[2] = {flash_mask_window(set[0], p.mask_words, slot),
                                  flash_mask_window(set[1], p.mask_words, slot)};
            score_mask(s, window, lane);
        }
        bool moved = score_softmax(s, &state, alpha);
        score_publish(l, ring.stage, m, lane, s, alpha, moved);
        ring_advance(&ring, p.stages);
    }
    score_finish(p, b, l, m, lane, &state);
    ptx_barrier_arrive(BARRIER_END, everyone);
}

/* O *= alpha in the m-tiles whose reference moved: the first tile, and almost never again. */
template <int MT>
TV_DEVICE void value_rescale(float (&o)[MT][8][4], const struct shared_stage *at, int32_t lane)
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
                            struct layout l, float (&o)[MT][8][4], int32_t column, int32_t lane)
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

/* The product of one tile: V fragments, then each m-tile's P against them. */
template <int MT>
TV_DEVICE void value_tile(float (&o)[MT][8][4], struct layout l, struct ring ring, uint32_t v_lane,
                          int32_t lane)
{
    uint32_t v[4][4];
    struct shared_stage *at = &l.stage[ring.stage];
    ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_full[ring.stage]), ring.parity);
    uint32_t v_base = ptx_shared(at->kv) + v_lane, p_base = ptx_shared(at->p) + lane * 16;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ptx_ldmatrix_trans(v[j], v_base + j * 32);
    }
    ptx_mbarrier_wait(ptx_shared(&l.fixed->p_full[ring.stage]), ring.parity);
    uint32_t moved[4];
    ptx_load4(moved, ptx_shared(at->moved));
    if (moved[0] | moved[1] | moved[2] | moved[3]) {
        value_rescale<MT>(o, at, lane);
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
        uint32_t a[4];
        ptx_load4(a, p_base + m * FRAGMENT);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            ptx_mma(o[m][2 * j], a, v[j][0], v[j][1]);
            ptx_mma(o[m][2 * j + 1], a, v[j][2], v[j][3]);
        }
    }
    __syncwarp();
    if (lane == 0) {
        ptx_mbarrier_arrive(ptx_shared(&l.fixed->kv_empty[ring.stage]));
    }
}

template <int MT>
TV_DEVICE void value_warp(const struct tv_flash_params &p, const struct flash_block &b,
                          struct layout l, int32_t warp, int32_t lane)
{
    float o[MT][8][4] = {};
    int32_t column = warp * COLUMNS, everyone = (b.m_tiles + VALUE_WARPS) * 32;
    uint32_t v_lane =
        ((lane & 7) + ((lane >> 3) & 1) * 8) * ROW_STRIDE + (lane >> 4) * 16 + column * 2;
    struct ring ring = {0, 0}, refill = {0, 0};
    int32_t next = b.tile_first;
    if (warp == 0) {
        for (int32_t i = 0; i < p.stages && next < b.tile_end; i++, next++) {
            tile_fetch(p, b, l, next, i);
        }
    }
    if (b.tile_end * TV_PLAN_TOKENS > b.prefix) {
        flash_build_mask(p, b, l.mask, warp * 32 + lane, VALUE_WARPS * 32);
        ptx_barrier_arrive(BARRIER_MASK, everyone);
    }
    for (int32_t tile = b.tile_first; tile < b.tile_end; tile++) {
        value_tile<MT>(o, l, ring, v_lane, lane);
        ring_advance(&ring, p.stages);
        if (warp == 0 && tile > b.tile_first && next < b.tile_end) {
            /* The tile before this one: the other value warps have left it by now. */
            ptx_mbarrier_wait(ptx_shared(&l.fixed->kv_empty[refill.stage]), refill.parity);
            tile_fetch(p, b, l, next++, refill.stage);
            ring_advance(&refill, p.stages);
        }
    }
    ptx_barrier_sync(BARRIER_END, everyone);
    value_finish<MT>(p, b, l, o, column, lane);
}

__global__ void __launch_bounds__(THREADS, 1)
    verify_attn_flash_bf16(const __grid_constant__ struct tv_flash_params p)
{
    extern __shared__ __align__(128) unsigned char memory[];
    struct layout l = layout_of(memory, p.stages);
    struct flash_block b;
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    ptx_launch_dependents();
    flash_fill_padding(p);
    if (!flash_block_init(&b, p)) {
        return;
    }
    if (threadIdx.x < (uint32_t)p.stages) {
        ptx_mbarrier_init(ptx_shared(&l.fixed->kv_full[threadIdx.x]), 1);
        ptx_mbarrier_init(ptx_shared(&l.fixed->kv_empty[threadIdx.x]), VALUE_WARPS);
        ptx_mbarrier_init(ptx_shared(&l.fixed->p_full[threadIdx.x]), b.m_tiles);
        for (int m = b.m_tiles; m < M_TILES_MAX; m++) {
            l.stage[threadIdx.x].moved[m] = 0;
        }
        ptx_fence_async();
    }
    __syncthreads();
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
    /* Very wide trees of few heads take the place of one tile in flight. */
    p.stages = mask_bytes(&p) <= MASK_BYTES(STAGES_MAX) ? STAGES_MAX : STAGES_MAX - 1;
    int32_t shared = TV_CUDA_SHARED_MAX - MASK_BYTES(p.stages) + mask_bytes(&p);
    dim3 grid((uint32_t)blocks, (uint32_t)batch);
    verify_attn_flash_bf16<<<grid, THREADS, (size_t)shared, stream>>>(p);
    return tv_cuda_errno(cudaGetLastError());
}
