/*
 * verify_attn_sm90.cu - the flash kernel for Hopper: bf16 inputs, wgmma, f32 sums. For sm_90a
 * alone; verify_attn_bf16.cu is the one that runs everywhere.
 *
 * A block holds up to 64 folded rows (4 m-tiles) and walks its share of the KV tiles once, 32
 * tokens (a pair of tiles) at a time, with five pairs in shared memory. Three warpgroups do two
 * jobs:
 *   - score: S = Q K^T with most of Q in registers, so that a warp has all scores of the 16 rows
 *     of its m-tile; mask, online softmax; P goes to shared memory. The next pair's products are
 *     started before this pair's softmax, which the matrix unit then need not wait for.
 *   - values, two of them, 256 of the 512 latent columns each: O += P V, with V the same rows read
 *     across. Each starts the copies of its own columns (the second also those of RoPE) for the
 *     pair five further as soon as it is through with a pair, without waiting for the other.
 * Shared memory is what an sm_90 device has, SM90_SHARED_MAX; only the kernels that also run
 * elsewhere keep to TV_CUDA_SHARED_MAX.
 *
 * Refuses: other dims than 512 + 64, other types (verify_attn.cu checks).
 */
#include <cuda.h>

#include "verify_attn_bf16_softmax.cuh"
#include "verify_attn_sm90.cuh"
#include "wgmma.cuh"

typedef CUresult (*tv_cuda_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                      const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                      const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* First row in the pool of a pair of tiles, or of its second tile. */
TV_DEVICE int32_t pool_row(const struct tv_flash_params &p, const struct flash_block &b,
                           int32_t tile)
{
    const int32_t *table = p.page_table + (int64_t)b.request * p.max_pages;
    int32_t page = table[tile >> p.page_tiles_log2];
    int32_t tile_mask = (1 << p.page_tiles_log2) - 1;
    return ((page << p.page_tiles_log2) + (tile & tile_mask)) * TV_PLAN_TOKENS;
}

/* Start the copies of pair `pair` that are a value warp's, whose place must be free: its columns,
 * and those of RoPE by the last warp. One lane takes about a hundred clocks for each. row: where
 * the first tile lies in the pool. */
TV_DEVICE void fetch_pair(const struct tv_flash_params &p, const CUtensorMap *map,
                          const struct flash_block &b, int32_t pair, int32_t row, uint64_t policy)
{
    int32_t first = ptx_warp() - GROUP_WARPS, group = first / GROUP_WARPS;
    int32_t tile = b.tile_first + 2 * pair, blocks = first == BLOCKS - 2 ? 2 : 1;
    uint32_t to = sm90_stage(pair) + first * BLOCK_STRIDE;
    uint32_t full = SM90_AT(kv_full) + (pair % STAGES * VALUE_GROUPS + group) * 8;
    /* Pages of 16 rows: a copy for each tile, and none for one behind the end. */
    bool halves = p.page_tiles_log2 == 0, both = !halves || tile + 1 < b.tile_end;
    if (ptx_elect()) {
        int32_t next = halves && both ? pool_row(p, b, tile + 1) : 0;
        ptx_mbarrier_expect(full, (uint32_t)blocks * (both ? BLOCK_STRIDE : BLOCK_STRIDE / 2));
#pragma unroll 1
        for (int32_t c = first; c < first + blocks; c++) {
            ptx_tensor_copy2(to, map, c * (BLOCK_BYTES / 2), row, full, policy);
            if (halves && both) {
                ptx_tensor_copy2(to + BLOCK_STRIDE / 2, map, c * (BLOCK_BYTES / 2), next, full,
                                 policy);
            }
            to += BLOCK_STRIDE;
        }
    }
    __syncwarp();
}

/* Where the 16 rows of m-tile m wait to become fragments: in the last stages, while those before
 * them are filled. */
TV_DEVICE uint32_t query_place(const struct flash_block &b, int32_t m)
{
    return sm90_stage(0) + STAGES * STAGE_BYTES - (b.m_tiles - m) * Q_TILE_BYTES;
}

/* Start the copies of the warp's share of an m-tile's rows: a warp of each warpgroup has a third of
 * them. Past the request's end its last row is read. */
TV_DEVICE void query_copy(const struct tv_flash_params &p, const struct flash_block &b)
{
    int32_t warp = ptx_warp(), m = warp % GROUP_WARPS, part = warp / GROUP_WARPS;
    int32_t r = part * Q_SHARE + (ptx_thread() & 31), end = min((part + 1) * Q_SHARE, TV_PLAN_M);
    if (m < b.m_tiles && r < end) {
        int32_t row = min(b.row_first + m * TV_PLAN_M + r, b.rows - 1);
        ptx_bulk_copy(query_place(b, m) + r * Q_STRIDE,
                      (const unsigned char *)p.q + (b.base + row) * ROW_BYTES, ROW_BYTES,
                      SM90_AT(q_full) + m * 8);
    }
    __syncwarp();
}

/* Fragments of the warp's m-tile, and its last blocks to their place in shared memory; whatever
 * lies there where the block has no such m-tile. */
TV_DEVICE void query_load(uint32_t (&q)[STEPS_HELD][4], const struct tv_flash_params &p,
                          const struct flash_block &b)
{
    int32_t lane = ptx_thread() & 31, m = ptx_warp();
    if (m < b.m_tiles) {
        uint32_t full = SM90_AT(q_full) + m * 8;
        if (lane == 0) {
            ptx_mbarrier_expect(full, TV_PLAN_M * ROW_BYTES);
        }
        __syncwarp();
        query_copy(p, b);
        ptx_mbarrier_wait(full, 0);
        uint32_t from = query_place(b, m) + (lane & 15) * Q_STRIDE + (lane >> 4) * 16;
#pragma unroll
        for (int j = 0; j < STEPS_HELD; j++) {
            ptx_ldmatrix(q[j], from + j * 32);
        }
#pragma unroll
        for (int j = STEPS_HELD; j < STEPS; j++) {
            uint32_t piece[4];
            ptx_load4(piece, from + j * 32);
            ptx_store4(SM90_AT(q) + (2 * (j - STEPS_HELD) + (lane >> 4)) * PIECES +
                           (m * TV_PLAN_M + (lane & 15)) * 16,
                       piece);
        }
    } else {
#pragma unroll
        for (int j = 0; j < STEPS_HELD; j++) {
            q[j][0] = q[j][1] = q[j][2] = q[j][3] = 0;
        }
    }
    ptx_fence_async();
    ptx_barrier_sync(BARRIER_SCORE, GROUP_LANES);
}

/* Start the product of step j of a pair whose K begins at k; q_last: the steps of Q that are in
 * shared memory. */
TV_DEVICE void score_step(float (&x)[4][4], const uint32_t (&q)[STEPS_HELD][4], uint64_t q_last,
                          uint64_t k, int j)
{
    k += (j / BLOCK_STEPS * BLOCK_STRIDE + j % BLOCK_STEPS * 32) / 16;
    if (j < STEPS_HELD) {
        ptx_wgmma_scores(x, q[j], k, j > 0);
    } else {
        ptx_wgmma_scores(x, q_last + (j - STEPS_HELD) * 2 * PIECES / 16, k);
    }
}

/* Start the products S of a pair: each half of the dims as soon as it is there. */
TV_DEVICE void score_product(float (&x)[4][4], const uint32_t (&q)[STEPS_HELD][4], int32_t pair)
{
    constexpr int half = GROUP_BLOCKS * BLOCK_STEPS;
    uint32_t full = SM90_AT(kv_full) + pair % STAGES * VALUE_GROUPS * 8;
    uint64_t k = ptx_wgmma_operand(ptx_wgmma_swizzled(16), sm90_stage(pair));
    uint64_t q_last = ptx_wgmma_operand(ptx_wgmma_pieces(PIECES), SM90_AT(q));
    ptx_mbarrier_wait(full, pair_parity(pair));
    ptx_wgmma_fence();
#pragma unroll
    for (int j = 0; j < half; j++) {
        score_step(x, q, q_last, k, j);
    }
    ptx_wgmma_commit();
    ptx_mbarrier_wait(full + 8, pair_parity(pair));
    ptx_wgmma_fence();
#pragma unroll
    for (int j = half; j < STEPS; j++) {
        score_step(x, q, q_last, k, j);
    }
    ptx_wgmma_commit();
}

/* Write P of a pair for the value warpgroups, once they have read that of the pair before last. */
TV_DEVICE void score_publish(int32_t pair, const float (&x)[4][4], const float (&alpha)[2],
                             bool moved)
{
    int32_t lane = ptx_thread() & 31, m = ptx_thread() >> 5, stage = pair % P_STAGES,
            at = stage * M_TILES_MAX + m;
    uint32_t a[2][4];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        score_operand(a[t], x[2 * t], x[2 * t + 1]);
    }
    if (pair >= P_STAGES) {
        ptx_mbarrier_wait(SM90_AT(p_empty) + stage * 8, p_parity(pair - P_STAGES));
    }
    uint32_t to = SM90_AT(p) + stage * P_BYTES + m * (TV_PLAN_M * 16) + lane * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        ptx_store1(to + i / 2 * PIECES + i % 2 * 128, a[i / 4][i % 4]);
    }
    if (__builtin_expect(moved, 0) && (lane & 3) == 0) {
        uint32_t factor = SM90_AT(alpha) + (at * TV_PLAN_M + (lane >> 2)) * 4;
        ptx_store1(factor, __float_as_uint(alpha[0]));
        ptx_store1(factor + 32, __float_as_uint(alpha[1]));
    }
    if (lane == 0) {
        ptx_store1(SM90_AT(moved) + at * 4, moved);
    }
    ptx_fence_async();
    ptx_mbarrier_arrive(SM90_AT(p_full) + stage * 8);
}

/* Mask a pair that holds tree nodes. Everything is read again: it is rare, and registers are few.
 */
TV_DEVICE void score_mask_pair(float (&x)[4][4], const struct tv_flash_params &p, int32_t pair)
{
    const struct flash_block &b = sm90_block();
    int32_t lane = ptx_thread() & 31, row = b.row_first + (ptx_thread() >> 5) * TV_PLAN_M;
    uint32_t window[2];
    ptx_mbarrier_wait(SM90_AT(mask_full), 0);
    score_window(window, p, b, sm90_mask(), row + (lane >> 2),
                 (b.tile_first + 2 * pair) * TV_PLAN_TOKENS - b.prefix);
    score_mask(x, window, lane);
}

/* The score warpgroup. */
TV_DEVICE void score_group(const struct tv_flash_params &p, const struct flash_block &b)
{
    uint32_t q[STEPS_HELD][4];
    struct softmax state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
    query_load(q, p, b);
    ptx_mbarrier_arrive(SM90_AT(q_taken));
    int32_t pairs = (int32_t)ptx_load1(SM90_AT(pairs));
    float x[4][4], next[4][4];
    score_product(x, q, 0);
    ptx_wgmma_wait(x);
#pragma unroll 1
    for (int32_t i = 0; i < pairs; i++) {
        float alpha[2];
        int32_t tree = (int32_t)ptx_load1(SM90_AT(tree));
        bool ahead = i + 1 < pairs;
        /* The matrix unit works on while this pair becomes probabilities. */
        if (ahead) {
            score_product(next, q, i + 1);
        }
        if (__builtin_expect(i >= tree, 0)) {
            score_mask_pair(x, p, i);
        }
        bool moved = score_move(x, &state, alpha, p.scale_log2);
        score_exp(x, &state, p.scale_log2);
        score_publish(i, x, alpha, moved);
        /* Behind P, which others wait for. */
        score_sum(x, &state);
        ptx_wgmma_wait(next);
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[n][j] = next[n][j];
            }
        }
    }
    int32_t m = ptx_warp();
    if (m < b.m_tiles) {
        score_finish(p, b, sm90_fixed_part()->inverse[m], m, ptx_thread() & 31, &state);
    }
    ptx_mbarrier_arrive(SM90_AT(sum_full));
}

/* Clear a value warpgroup's columns of a pair's rows from `row` on: nothing that lies behind the
 * request's last slot may meet a product, not even times zero. Scores have been read from it. */
TV_DEVICE void value_clear(int32_t pair, int32_t group, int32_t row)
{
    int32_t thread = ptx_thread() % GROUP_LANES;
    unsigned char *at = sm90_memory + pair % STAGES * STAGE_BYTES +
                        (group * GROUP_BLOCKS + thread / 32) * BLOCK_STRIDE + thread % 32 * 4;
    for (; row < PAIR_TOKENS; row++) {
        *(uint32_t *)(at + row * BLOCK_BYTES) = 0;
    }
    ptx_fence_async();
    ptx_barrier_sync(BARRIER_GROUP + group, GROUP_LANES);
}

/* Start the products O += P V of a pair. */
TV_DEVICE void value_product(float (&o)[COLUMNS / 8][4], const struct flash_block &b, int32_t i,
                             int32_t group, bool last)
{
    int32_t lane = ptx_thread() & 31, m = ptx_warp() & 3, stage = i % P_STAGES;
    int32_t at = stage * M_TILES_MAX + m;
    uint64_t a = ptx_wgmma_operand(ptx_wgmma_pieces(PIECES), SM90_AT(p) + stage * P_BYTES);
    uint64_t v = ptx_wgmma_operand(ptx_wgmma_swizzled(BLOCK_STRIDE),
                                   sm90_stage(i) + group * GROUP_BLOCKS * BLOCK_STRIDE);
    ptx_mbarrier_wait(SM90_AT(kv_full) + (i % STAGES * VALUE_GROUPS + group) * 8, pair_parity(i));
    ptx_mbarrier_wait(SM90_AT(p_full) + stage * 8, p_parity(i));
    if (__builtin_expect(ptx_load1(SM90_AT(moved) + at * 4), 0)) {
        uint32_t factor = SM90_AT(alpha) + (at * TV_PLAN_M + (lane >> 2)) * 4;
        float a0 = __uint_as_float(ptx_load1(factor)), a1 = __uint_as_float(ptx_load1(factor + 32));
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            o[n][0] *= a0;
            o[n][1] *= a0;
            o[n][2] *= a1;
            o[n][3] *= a1;
        }
    }
    if (__builtin_expect(last, 0)) {
        value_clear(i, group, b.last + 1 - (b.tile_first + 2 * i) * TV_PLAN_TOKENS);
    }
    ptx_wgmma_fence();
    ptx_wgmma_values(o, a, v);
    ptx_wgmma_values(o, a + 2 * PIECES / 16, v + BLOCK_STRIDE / 2 / 16);
    ptx_wgmma_commit();
}

/* A warp's part of shared memory for results, 16 rows of 512 bytes: a quarter of what its
 * warpgroup's columns of the pairs took. */
TV_DEVICE uint32_t result_place(int32_t m, int32_t group)
{
    return sm90_stage(m >> 1) + group * GROUP_BLOCKS * BLOCK_STRIDE +
           (m & 1) * (TV_PLAN_M * RESULT_BYTES);
}

/* Write 512 bytes of each of the warp's rows from its place, a row at a time. Pieces of 16 bytes
 * lie there swizzled, by `swizzle` of the row. */
template <int SWIZZLE>
TV_DEVICE void value_store(const struct flash_block &b, uint32_t place, unsigned char *to,
                           int64_t stride, int32_t m, int32_t lane)
{
    __syncwarp();
#pragma unroll 4
    for (int32_t r = 0; r < TV_PLAN_M; r++) {
        uint32_t piece[4], swizzle = SWIZZLE == 2 ? (r & 3) << 1 : r & 7;
        ptx_load4(piece, place + r * RESULT_BYTES + ((lane ^ swizzle) << 4));
        if (b.row_first + m * TV_PLAN_M + r < b.rows) {
            *(uint4 *)(to + r * stride + lane * 16) =
                make_uint4(piece[0], piece[1], piece[2], piece[3]);
        }
    }
    __syncwarp();
}

/* Write a warp's columns of its rows, by way of shared memory, where nobody needs the pairs any
 * more: the result in bf16 at once, or floats in two parts. */
TV_DEVICE void value_write(const struct tv_flash_params &p, const struct flash_block &b, int32_t m,
                           int32_t group, const float (&o)[COLUMNS / 8][4])
{
    int32_t lane = ptx_thread() & 31, row = lane >> 2;
    const float *inverse = sm90_fixed_part()->inverse[m];
    float scale[2] = {inverse[row], inverse[row + 8]};
    uint32_t place = result_place(m, group), at = place + row * RESULT_BYTES;
    int64_t first =
        b.splits > 1 ? b.partial_base + m * TV_PLAN_M : b.base + b.row_first + m * TV_PLAN_M;
    first = first * TV_MLA_LATENT + group * COLUMNS;
    if (b.splits == 1 && p.out_bf16) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; i++) {
            int n = i >> 1, r = i & 1;
            ptx_store1(at + r * 8 * RESULT_BYTES + ((n ^ row) << 4) + (lane & 3) * 4,
                       ptx_pack(o[n][2 * r] * scale[r], o[n][2 * r + 1] * scale[r]));
        }
        value_store<1>(b, place, (unsigned char *)((__nv_bfloat16 *)p.out + first),
                       TV_MLA_LATENT * 2, m, lane);
        return;
    }
    float *to = (b.splits > 1 ? p.partial_out : (float *)p.out) + first;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            int n = i >> 1, r = i & 1;
            const float(&x)[4] = o[half * (COLUMNS / 16) + n];
            uint32_t piece = (2 * n + ((lane & 3) >> 1)) ^ ((row & 3) << 1);
            ptx_store2(at + r * 8 * RESULT_BYTES + (piece << 4) + (lane & 1) * 8,
                       __float_as_uint(x[2 * r] * scale[r]),
                       __float_as_uint(x[2 * r + 1] * scale[r]));
        }
        value_store<2>(b, place, (unsigned char *)(to + half * (COLUMNS / 2)), TV_MLA_LATENT * 4, m,
                       lane);
    }
}

/* A value warpgroup. */
TV_DEVICE void value_group(const struct tv_flash_params &p, const CUtensorMap *map,
                           const struct flash_block &b)
{
    float o[COLUMNS / 8][4] = {};
    int32_t thread = ptx_thread(), group = ptx_warp() / GROUP_WARPS - 1;
    int32_t pairs = (b.tile_end - b.tile_first + 1) / 2;
    uint64_t policy = b.alone ? ptx_policy_once() : ptx_policy_shared();
    query_copy(p, b);
#pragma unroll 1
    for (int32_t i = 0; i < STAGES && i < pairs; i++) {
        if ((i + 1) * STAGE_BYTES > STAGES * STAGE_BYTES - b.m_tiles * Q_TILE_BYTES) {
            ptx_mbarrier_wait(SM90_AT(q_taken), 0);
            /* Q was read from the places. */
            ptx_fence_async();
        }
        fetch_pair(p, map, b, i, pool_row(p, b, b.tile_first + 2 * i), policy);
    }
    if (b.tree) {
        flash_build_mask(p, b, sm90_mask(), thread - GROUP_LANES, VALUE_LANES);
        ptx_mbarrier_arrive(SM90_AT(mask_full));
    }
#pragma unroll 1
    for (int32_t i = 0; i < pairs; i++) {
        int32_t next = i + STAGES;
        bool more = next < pairs;
        int32_t row = more ? pool_row(p, b, b.tile_first + 2 * next) : 0;
        value_product(o, b, i, group, i + 1 == pairs);
        ptx_wgmma_wait(o);
        ptx_mbarrier_arrive(SM90_AT(p_empty) + i % P_STAGES * 8);
        if (more) {
            ptx_barrier_sync(BARRIER_GROUP + group, GROUP_LANES);
            fetch_pair(p, map, b, next, row, policy);
        }
    }
    ptx_mbarrier_wait(SM90_AT(sum_full), 0);
    /* Every warp of the group is through with the pairs. */
    ptx_barrier_sync(BARRIER_GROUP + group, GROUP_LANES);
    int32_t m = ptx_warp() & 3;
    if (m < b.m_tiles) {
        value_write(p, b, m, group, o);
    }
}

/* Barriers by one thread; the block's description must be there. */
TV_DEVICE void barriers_init(void)
{
    for (int i = 0; i < STAGES; i++) {
        ptx_mbarrier_init(SM90_AT(kv_full) + i * VALUE_GROUPS * 8, GROUP_WARPS);
        ptx_mbarrier_init(SM90_AT(kv_full) + i * VALUE_GROUPS * 8 + 8, GROUP_WARPS);
    }
    for (int i = 0; i < P_STAGES; i++) {
        ptx_mbarrier_init(SM90_AT(p_full) + i * 8, GROUP_LANES);
        ptx_mbarrier_init(SM90_AT(p_empty) + i * 8, VALUE_LANES);
        for (int m = 0; m < M_TILES_MAX; m++) {
            sm90_fixed_part()->moved[i][m] = 0;
        }
    }
    for (int m = 0; m < M_TILES_MAX; m++) {
        ptx_mbarrier_init(SM90_AT(q_full) + m * 8, 1);
    }
    ptx_mbarrier_init(SM90_AT(q_taken), GROUP_LANES);
    ptx_mbarrier_init(SM90_AT(mask_full), VALUE_LANES);
    ptx_mbarrier_init(SM90_AT(sum_full), GROUP_LANES);
    ptx_fence_async();
}

__global__ void __launch_bounds__(THREADS, 1)
    verify_attn_flash_sm90(const __grid_constant__ struct tv_flash_params p,
                           const __grid_constant__ CUtensorMap map)
{
    const struct flash_block &b = sm90_block();
    if (threadIdx.x == 32) {
        ptx_prefetch_map(&map);
        barriers_init();
    }
    ptx_wait_dependence();
    ptx_launch_dependents();
    if (threadIdx.x == 0) {
        flash_block_init(&sm90_fixed_part()->block, p, flash_request_read(p, (int32_t)blockIdx.y),
                         M_TILES_MAX);
        sm90_fixed_part()->pairs = (b.tile_end - b.tile_first + 1) / 2;
        sm90_fixed_part()->tree = max(b.prefix / PAIR_TOKENS - b.tile_first / 2, 0);
    }
    __syncthreads();
    if (b.m_tiles == 0) {
        flash_fill_padding(p, b, (int32_t)threadIdx.x, THREADS);
        return;
    }
    if (ptx_warp() < GROUP_WARPS) {
        ptx_registers_take<SCORE_REGISTERS>();
        score_group(p, b);
        /* It is through well before the value warpgroups. */
        flash_fill_padding(p, b, (int32_t)threadIdx.x, GROUP_LANES);
    } else {
        ptx_registers_keep<VALUE_REGISTERS>();
        value_group(p, &map, b);
    }
}

/* Ancestor sets of as many nodes as a block's rows can touch. */
static int32_t mask_bytes(const struct tv_flash_params *p)
{
    int32_t nodes = (M_TILES_MAX * TV_PLAN_M - 2) / p->heads + 2;
    nodes = nodes < p->q_len ? nodes : p->q_len;
    return nodes * p->mask_words * 4;
}

int tv_flash_sm90_prepare(void)
{
    return tv_flash_prepare_within((const void *)verify_attn_flash_sm90, SM90_SHARED_MAX,
                                   SM90_SHARED_MAX);
}

/* The pool as [rows][576] for the copy engine: a box is one block of a pair, or of a tile where
 * pages have no more rows. */
static int encode_map(CUtensorMap *map, const struct tv_cuda *cuda, const struct tv_flash_params *p)
{
    cuuint64_t dims[2] = {TV_MLA_ROW, (cuuint64_t)p->pool_rows}, strides[1] = {ROW_BYTES};
    cuuint32_t box[2] = {BLOCK_BYTES / 2, PAIR_TOKENS};
    cuuint32_t steps[2] = {1, 1};
    tv_cuda_encode_fn encode = (tv_cuda_encode_fn)cuda->tensor_map_encode;
    if (p->pool_rows > INT32_MAX) {
        return -EINVAL;
    }
    if (p->page_tiles_log2 == 0) {
        box[1] = TV_PLAN_TOKENS;
    }
    CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, sizeof box / sizeof box[0], (void *)p->kv,
               dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? 0 : -ENOTSUP;
}

int tv_flash_sm90_launch(const struct tv_cuda *cuda, const struct tv_flash_params *p, int32_t batch,
                         int32_t blocks, cudaStream_t stream)
{
    CUtensorMap map;
    dim3 grid((uint32_t)blocks, (uint32_t)batch);
    int result = encode_map(&map, cuda, p);
    if (result < 0) {
        return result;
    }
    void *args[2] = {(void *)p, &map};
    return tv_flash_launch((const void *)verify_attn_flash_sm90, grid, THREADS,
                           SM90_SHARED + mask_bytes(p), stream, args);
}
