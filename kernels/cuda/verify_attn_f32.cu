/*
 * verify_attn_f32.cu - the flash kernel for f32 inputs: plain f32 multiply-adds, no matrix unit.
 *
 * It exists for agreement to 2e-6, not for speed: dot products are summed in 32 short lanes, and
 * values in groups of four tokens that join the running sum with its rounding error carried along
 * (Kahan), so that 185,000 tokens lose no more than 2,000.
 *
 * A block holds 16 folded rows (one m-tile), two a warp; lane l owns dims 64 i + 2 l and the one
 * after, of the query, the key and the result alike, so a value is read from shared memory once
 * for both products. KV tiles come through a ring of two, one bulk copy a token.
 */
#include "verify_attn.cuh"

#define WARPS     8
#define THREADS   (WARPS * 32)
#define ROWS      (TV_PLAN_M / WARPS)
#define PAIRS     (TV_MLA_ROW / 64)    /* of dims, per lane */
#define PAIRS_OUT (TV_MLA_LATENT / 64) /* of those, in the result */
#define GROUP     4                    /* tokens per softmax step */
#define STAGES    2
#define ROW_BYTES (TV_MLA_ROW * 4)
#define NEVER     (-CUDART_INF_F)

struct shared_f32 {
    float kv[STAGES][TV_PLAN_TOKENS][TV_MLA_ROW];
    uint64_t full[STAGES];
};

static_assert(sizeof(struct shared_f32) + 4096 <= TV_CUDA_SHARED_MAX, "the block must fit sm_120");
static_assert(TV_PLAN_TOKENS % GROUP == 0, "a tile is a whole number of groups");

/* One row's running result, by lane. */
struct row_state {
    float2 q[PAIRS];
    float2 sum[PAIRS_OUT];
    float2 lost[PAIRS_OUT]; /* what rounding took from sum */
    float top;              /* exponent that sum and weight are relative to */
    float weight;           /* sum of probabilities, the same in every lane */
    float weight_lost;
};

TV_DEVICE void tile_fetch(const struct tv_flash_params &p, const struct flash_block &b,
                          struct shared_f32 *shared, int32_t tile, int32_t stage)
{
    int32_t lane = (int32_t)threadIdx.x & 31, last = b.prefix + b.nodes - 1;
    int32_t page_mask = (TV_PLAN_TOKENS << p.page_tiles_log2) - 1;
    int64_t page = p.page_table[(int64_t)b.request * p.max_pages + (tile >> p.page_tiles_log2)];
    int32_t slot = min(tile * TV_PLAN_TOKENS + (lane & 15), last);
    int64_t row = page * (page_mask + 1) + (slot & page_mask);
    uint32_t full = ptx_shared(&shared->full[stage]);
    if (page < 0 || row >= p.pool_rows) {
        /* No such page: zeros, which is what the copy engine gives the other kernels. */
        for (int32_t i = lane; i < TV_PLAN_TOKENS * TV_MLA_ROW; i += 32) {
            (&shared->kv[stage][0][0])[i] = 0.0f;
        }
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(full);
        }
        return;
    }
    if (lane == 0) {
        ptx_mbarrier_expect(full, TV_PLAN_TOKENS * ROW_BYTES);
    }
    __syncwarp();
    if (lane < TV_PLAN_TOKENS) {
        ptx_bulk_copy(ptx_shared(shared->kv[stage][lane]),
                      (const unsigned char *)p.kv + row * ROW_BYTES, ROW_BYTES, full);
    }
}

/* sum += x, with the rounding error of every addition carried to the next. */
TV_DEVICE void kahan_add(float &sum, float &lost, float x)
{
    float y = x - lost;
    float t = sum + y;
    lost = (t - sum) - y;
    sum = t;
}

/* Scores of a group of tokens for one row, times log2(e); the same in every lane. */
TV_DEVICE void row_scores(float (&score)[GROUP], const struct row_state &row,
                          const float2 (&k)[GROUP][PAIRS], float scale_log2)
{
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            x = fmaf(row.q[i].x, k[t][i].x, x);
            y = fmaf(row.q[i].y, k[t][i].y, y);
        }
        score[t] = x + y;
    }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            score[t] += __shfl_xor_sync(0xffffffffu, score[t], i);
        }
    }
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        score[t] *= scale_log2;
    }
}

/* Take a group of tokens into one row's result. Scores of masked tokens are -inf. */
TV_DEVICE void row_update(struct row_state *row, float (&score)[GROUP],
                          const float2 (&k)[GROUP][PAIRS])
{
    float top = row->top, weight = 0.0f;
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        top = fmaxf(top, score[t]);
    }
    if (top == NEVER) {
        return;
    }
    if (top > row->top) {
        float alpha = exp2f(row->top - top);
        row->weight *= alpha;
        row->weight_lost *= alpha;
#pragma unroll
        for (int i = 0; i < PAIRS_OUT; i++) {
            row->sum[i].x *= alpha;
            row->sum[i].y *= alpha;
            row->lost[i].x *= alpha;
            row->lost[i].y *= alpha;
        }
        row->top = top;
    }
#pragma unroll
    for (int t = 0; t < GROUP; t++) {
        score[t] = exp2f(score[t] - top);
        weight += score[t];
    }
    kahan_add(row->weight, row->weight_lost, weight);
#pragma unroll
    for (int i = 0; i < PAIRS_OUT; i++) {
        float x = 0.0f, y = 0.0f;
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
            x = fmaf(score[t], k[t][i].x, x);
            y = fmaf(score[t], k[t][i].y, y);
        }
        kahan_add(row->sum[i].x, row->lost[i].x, x);
        kahan_add(row->sum[i].y, row->lost[i].y, y);
    }
}

TV_DEVICE void row_init(struct row_state *row, const struct tv_flash_params &p,
                        const struct flash_block &b, int32_t index, int32_t lane)
{
    const float2 *q =
        (const float2 *)p.q + (b.base + min(index, b.rows - 1)) * (TV_MLA_ROW / 2) + lane;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        row->q[i] = q[i * 32];
    }
#pragma unroll
    for (int i = 0; i < PAIRS_OUT; i++) {
        row->sum[i] = make_float2(0.0f, 0.0f);
        row->lost[i] = make_float2(0.0f, 0.0f);
    }
    row->top = NEVER;
    row->weight = 0.0f;
    row->weight_lost = 0.0f;
}

TV_DEVICE void row_finish(const struct row_state &row, const struct tv_flash_params &p,
                          const struct flash_block &b, int32_t index, int32_t lane)
{
    float inverse = row.weight > 0.0f ? 1.0f / row.weight : 0.0f;
    float lse2 = flash_lse2(row.top, row.weight);
    bool partial = b.splits > 1;
    if (index >= b.rows) {
        return;
    }
    int64_t at = partial ? b.partial_base + (index - b.row_first) : b.base + index;
    float2 *out = (float2 *)(partial ? p.partial_out : (float *)p.out);
    int64_t pair = at * (TV_MLA_LATENT / 2) + lane;
#pragma unroll
    for (int i = 0; i < PAIRS_OUT; i++) {
        float2 x = make_float2(row.sum[i].x * inverse, row.sum[i].y * inverse);
        if (!partial && p.out_bf16) {
            ((uint32_t *)p.out)[pair + i * 32] = ptx_pack(x.x, x.y);
        } else {
            out[pair + i * 32] = x;
        }
    }
    if (lane == 0) {
        float *to =
            partial ? p.partial_lse + b.partial_lse + (index - b.row_first) * b.splits : p.lse + at;
        *to = partial ? lse2 : lse2 * CUDART_LN2_F;
    }
}

/* One warp's two rows against one tile. */
TV_DEVICE void warp_tile(struct row_state (&rows)[ROWS], const float (*kv)[TV_MLA_ROW],
                         const uint32_t (&window)[ROWS], float scale_log2, int32_t lane)
{
#pragma unroll 1
    for (int g = 0; g < TV_PLAN_TOKENS; g += GROUP) {
        float2 k[GROUP][PAIRS];
#pragma unroll
        for (int t = 0; t < GROUP; t++) {
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                k[t][i] = ((const float2 *)kv[g + t])[i * 32 + lane];
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float score[GROUP];
            row_scores(score, rows[r], k, scale_log2);
#pragma unroll
            for (int t = 0; t < GROUP; t++) {
                if (!(window[r] >> (g + t) & 1u)) {
                    score[t] = NEVER;
                }
            }
            row_update(&rows[r], score, k);
        }
    }
}

__global__ void __launch_bounds__(THREADS, 1)
    verify_attn_flash_f32(const __grid_constant__ struct tv_flash_params p)
{
    extern __shared__ __align__(128) unsigned char memory[];
    struct shared_f32 *shared = (struct shared_f32 *)memory;
    uint32_t *mask = (uint32_t *)(shared + 1);
    struct flash_block b;
    struct row_state rows[ROWS];
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    ptx_wait_dependence();
    ptx_launch_dependents();
    flash_block_init(&b, p, flash_request_read(p, (int32_t)blockIdx.y), TV_FLASH_F32_M_TILES);
    flash_fill_padding(p, b, (int32_t)threadIdx.x, THREADS);
    if (b.m_tiles == 0) {
        return;
    }
    if (threadIdx.x < STAGES) {
        ptx_mbarrier_init(ptx_shared(&shared->full[threadIdx.x]), 1);
        ptx_fence_async();
    }
    flash_build_mask(p, b, mask, (int32_t)threadIdx.x, THREADS);
    __syncthreads();
    const uint32_t *set[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int32_t index = b.row_first + warp * ROWS + r;
        int32_t node = flash_node(b, index, p.heads) - flash_node(b, b.row_first, p.heads);
        set[r] = mask + node * p.mask_words;
        row_init(&rows[r], p, b, index, lane);
    }
    if (warp == 0) {
        for (int32_t i = 0; i < STAGES && b.tile_first + i < b.tile_end; i++) {
            tile_fetch(p, b, shared, b.tile_first + i, i);
        }
    }
    for (int32_t tile = b.tile_first; tile < b.tile_end; tile++) {
        int32_t i = tile - b.tile_first, stage = i % STAGES;
        int32_t slot = tile * TV_PLAN_TOKENS - b.prefix;
        uint32_t window[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            window[r] = flash_mask_window(set[r], p.mask_words, slot);
        }
        ptx_mbarrier_wait(ptx_shared(&shared->full[stage]), (uint32_t)(i / STAGES) & 1u);
        warp_tile(rows, shared->kv[stage], window, p.scale_log2, lane);
        /* The next copy writes what was read. */
        ptx_fence_async();
        __syncthreads();
        if (warp == 0 && tile + STAGES < b.tile_end) {
            tile_fetch(p, b, shared, tile + STAGES, stage);
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        row_finish(rows[r], p, b, b.row_first + warp * ROWS + r, lane);
    }
}

static int32_t shared_bytes(int32_t heads, int32_t q_len, int32_t mask_words)
{
    int32_t nodes = (TV_PLAN_M - 2) / heads + 2;
    nodes = nodes < q_len ? nodes : q_len;
    return (int32_t)sizeof(struct shared_f32) + nodes * mask_words * 4;
}

int tv_flash_f32_prepare(void)
{
    return tv_flash_prepare_kernel((const void *)verify_attn_flash_f32,
                                   shared_bytes(1, TV_TREE_NODES_MAX, TV_TREE_NODES_MAX / 32));
}

int tv_flash_f32_launch(const struct tv_flash_params *p, int32_t batch, int32_t blocks,
                        cudaStream_t stream)
{
    void *args[1] = {(void *)p};
    dim3 grid((uint32_t)blocks, (uint32_t)batch);
    return tv_flash_launch((const void *)verify_attn_flash_f32, grid, THREADS,
                           shared_bytes(p->heads, p->q_len, p->mask_words), stream, args);
}
