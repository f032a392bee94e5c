/*
 * prefill_attn_mma.cuh - expanded causal attention on the tensor cores, to f32's accuracy.
 *
 * A warp owns 16 rows of one head: their queries stay in registers as pairs of halves, results as
 * f32 sums. A block's warps share tiles of 32 tokens, which arrive by bulk copies, two in flight.
 * Every product of two pairs takes three of halves (the fourth is below f32's own rounding); with
 * TV_PRODUCTS_BF16 the upper halves stand for all, and it takes one. What
 * a tile adds to a result is summed from zero and then joins it in f32, since the tensor cores cut
 * off instead of rounding.
 *
 * Tokens' scales take part in the running maximum: it is that of score minus exponent, so a
 * probability times its scaled value never leaves the range of a half, and the row's sum takes
 * each probability times the scale. A row's bits depend on its position and the cache alone: tiles
 * and segments begin at fixed positions, and a token that a row does not see adds exact zeros.
 */
#ifndef TV_KERNELS_CUDA_PREFILL_ATTN_MMA_CUH
#define TV_KERNELS_CUDA_PREFILL_ATTN_MMA_CUH

#include "prefill_attn.cuh"

#define MMA_K_STEPS    (TILE_KEY / 16)
#define MMA_NOPE_STEPS (TILE_NOPE_MAX / 16)
#define LOG2_E         1.4426950408889634f

/* What has a low half: nothing; all but rotated keys, which were bf16 and need none; all. */
enum mma_low {
    MMA_LOW_NONE,
    MMA_LOW_EXPANDED,
    MMA_LOW_ALL,
};

/* A block's shared memory: a ring of keys, values and scales; barriers; the rest of queries. */
template <enum mma_low LOW> struct mma_shape {
    static constexpr bool LOWS = LOW != MMA_LOW_NONE;
    static constexpr int KEYS = LOWS ? TILE_V : TILE_K_LOW; /* bytes of a tile's */
    static constexpr int VALUES = LOWS ? 2 * TILE_V_LOW : TILE_V_LOW;
    static constexpr int SCALES = KEYS + VALUES; /* where they begin */
    static constexpr int STAGE = SCALES + SCALE_BYTES;
    static constexpr int STAGES = LOWS ? 2 : 3;
    static constexpr int BARRIERS = STAGES * STAGE;
    /* steps whose queries' low halves fit into registers beside all else */
    static constexpr int KEPT = LOWS ? 8 : 0;
    static constexpr int OTHERS = LOWS ? (MMA_K_STEPS - KEPT) * 512 : 0; /* a warp's others */
    static constexpr int QUERIES = OTHERS + 16 * 8;         /* and 8 for each of its rows */
    static constexpr int ROOM = (MMA_K_STEPS + KEPT) * 512; /* and of those that are kept */

    static constexpr int shared(int warps)
    {
        return BARRIERS + 128 + warps * QUERIES;
    }

    /* of a multiprocessor, as registers allow */
    static constexpr int blocks(int warps)
    {
        return warps == 8 ? 1 : LOWS ? 2 : 3;
    }
};

/* A block's shared memory by address. */
struct mma_ring {
    uint32_t stages;
    uint32_t barriers; /* keys here, values here, keys free, values free: of each stage */
};

#define KEYS_HERE   0
#define VALUES_HERE 1
#define KEYS_FREE   2
#define VALUES_FREE 3

template <enum mma_low LOW>
TV_DEVICE uint32_t ring_barrier(const struct mma_ring &r, int32_t which, int32_t tile)
{
    constexpr int STAGES = mma_shape<LOW>::STAGES;
    return r.barriers + (uint32_t)(which * STAGES + tile % STAGES) * 8;
}

template <enum mma_low LOW> TV_DEVICE uint32_t ring_stage(const struct mma_ring &r, int32_t tile)
{
    return r.stages + (uint32_t)(tile % mma_shape<LOW>::STAGES) * mma_shape<LOW>::STAGE;
}

template <enum mma_low LOW> TV_DEVICE uint32_t ring_parity(int32_t tile)
{
    return (uint32_t)(tile / mma_shape<LOW>::STAGES) & 1;
}

/* Tile `at` of the block's head. */
TV_DEVICE const char *tile_of(const struct prefill_segment &s, int32_t at)
{
    int64_t tile = (int64_t)blockIdx.y * (PREFILL_SEGMENT / TILE_TOKENS) + at;
    return (const char *)s.expanded + tile * TILE_BYTES;
}

/* Ask for a tile's keys and scales, once the tile two before it is done with. One thread. */
template <enum mma_low LOW>
TV_DEVICE void ring_fetch_keys(const struct mma_ring &r, const struct prefill_segment &s,
                               int32_t at)
{
    typedef mma_shape<LOW> shape;
    if (at >= shape::STAGES) {
        ptx_mbarrier_wait(ring_barrier<LOW>(r, KEYS_FREE, at),
                          ring_parity<LOW>(at - shape::STAGES));
    }
    uint32_t here = ring_barrier<LOW>(r, KEYS_HERE, at), stage = ring_stage<LOW>(r, at);
    ptx_mbarrier_expect(here, shape::KEYS + SCALE_BYTES);
    ptx_bulk_copy(stage, tile_of(s, at), shape::KEYS, here);
    ptx_bulk_copy(stage + shape::SCALES, s.scales + at * 3 * TILE_TOKENS, SCALE_BYTES, here);
}

template <enum mma_low LOW>
TV_DEVICE void ring_fetch_values(const struct mma_ring &r, const struct prefill_segment &s,
                                 int32_t at)
{
    typedef mma_shape<LOW> shape;
    if (at >= shape::STAGES) {
        ptx_mbarrier_wait(ring_barrier<LOW>(r, VALUES_FREE, at),
                          ring_parity<LOW>(at - shape::STAGES));
    }
    uint32_t here = ring_barrier<LOW>(r, VALUES_HERE, at);
    ptx_mbarrier_expect(here, shape::VALUES);
    ptx_bulk_copy(ring_stage<LOW>(r, at) + shape::KEYS, tile_of(s, at) + TILE_V, shape::VALUES,
                  here);
}

/* Element d of the padded query of a row, nope part first. */
TV_DEVICE float query_element(const struct tv_prefill_attn &a, const float *q, int32_t d)
{
    int32_t rope = d - TILE_NOPE_MAX;
    bool inside = rope < 0 ? d < a.nope_dim : rope < a.rope_dim;
    return inside ? q[rope < 0 ? d : a.nope_dim + rope] : 0.0f;
}

/* Row i (0 or 1) of the thread's two; beyond the launch's last: the last. */
TV_DEVICE int32_t thread_row(const struct tv_prefill_attn &a, int32_t first_row, int i,
                             bool *ret_real)
{
    int32_t thread = ptx_thread();
    int32_t row = first_row + (thread >> 5) * 16 + (thread & 31) / 4 + 8 * i;
    *ret_real = row < a.rows;
    return min(row, a.rows - 1);
}

/* What a thread holds of the warp's queries: rows lane / 4 and lane / 4 + 8. */
template <enum mma_low LOW> struct mma_queries {
    uint32_t top[MMA_K_STEPS][4];
    uint32_t rest[mma_shape<LOW>::LOWS ? mma_shape<LOW>::KEPT : 1][4];
    uint32_t others; /* shared: rest of the further steps, 16 bytes a lane */
    /* shared, of row lane / 4, the other one 64 bytes on: running maximum, and what turns products
     * into scores in units of log 2 */
    uint32_t rows;
};

/*
 * Queries of the warp's rows into registers, by way of shared memory: `room` for the pieces that
 * registers keep (taken back after a barrier), `others` for those that stay there. A piece of 16
 * rows x 16 elements lies in the order of a product's operand, 16 bytes a lane.
 */
template <enum mma_low LOW>
TV_DEVICE void queries_load(const struct tv_prefill_attn &a, int32_t warp_row, char *room,
                            char *others, struct mma_queries<LOW> *ret)
{
    constexpr int KEPT = mma_shape<LOW>::KEPT, OTHERS = mma_shape<LOW>::OTHERS;
    int32_t lane = (int32_t)threadIdx.x & 31;
#pragma unroll 1
    for (int32_t r = 0; r < 16; r++) {
        int64_t row = min(warp_row + r, a.rows - 1);
        const float *q = a.q + (row * a.heads + blockIdx.y) * (a.nope_dim + a.rope_dim);
        float x[TILE_KEY / 32], most = 0.0f;
#pragma unroll
        for (int i = 0; i < TILE_KEY / 32; i++) {
            x[i] = query_element(a, q, i * 32 + lane);
            most = fmaxf(most, fabsf(x[i]));
        }
        most = warp_most(most);
        bool has_scale = most > 0.0f && most < CUDART_INF_F;
        int32_t exponent = has_scale ? min(TILE_EXPONENT - 1 - ilogbf(most), 126) : 0;
        float factor = a.softmax_scale * LOG2_E * power_of_two(-exponent);
        if (lane == 0) {
            *(float *)(others + OTHERS + r * 8 + 4) = factor;
        }
#pragma unroll
        for (int i = 0; i < TILE_KEY / 32; i++) {
            int32_t step = i * 2 + lane / 16, d = lane % 16;
            int32_t at = (r % 8 * 4 + d % 8 / 2) * 16 + (d / 8 * 2 + r / 8) * 4 + d % 2 * 2;
            float value = x[i] * power_of_two(exponent);
            __half top = __float2half_rn(value), rest = __float2half_rn(value - __half2float(top));
            *(__half *)(room + step * 512 + at) = top;
            if (mma_shape<LOW>::LOWS) {
                char *low =
                    step < KEPT ? room + (MMA_K_STEPS + step) * 512 : others + (step - KEPT) * 512;
                *(__half *)(low + at) = rest;
            }
        }
    }
    __syncwarp();
    ret->others = ptx_shared(others) + (uint32_t)lane * 16;
    ret->rows = ptx_shared(others) + OTHERS + (uint32_t)(lane / 4 * 8);
#pragma unroll
    for (int32_t step = 0; step < MMA_K_STEPS; step++) {
        ptx_load4(ret->top[step], ptx_shared(room) + (uint32_t)(step * 512 + lane * 16));
        if (step < KEPT) {
            ptx_load4(ret->rest[step < KEPT ? step : 0],
                      ptx_shared(room) + (uint32_t)((MMA_K_STEPS + step) * 512 + lane * 16));
        }
    }
}

/* Products of the warp's queries with the tile's keys: 16 rows x 32 tokens. */
template <enum mma_low LOW>
TV_DEVICE void tile_products(const struct mma_queries<LOW> &q, uint32_t keys, float (&score)[4][4])
{
    constexpr int KEPT = mma_shape<LOW>::KEPT;
    float rest[4][4] = {};
    int32_t lane = ptx_thread() & 31;
    int32_t t = lane / 16 * 8 + lane % 8, word = lane / 8 % 2;
    uint32_t row = keys + (uint32_t)(t * TILE_KEY * 2), turn = (uint32_t)((t & 7) ^ word) * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        (&score[0][0])[i] = 0.0f;
    }
#pragma unroll
    for (int32_t step = 0; step < MMA_K_STEPS; step++) {
        uint32_t address = row + (turn ^ (uint32_t)(step % 4 * 32)) + (uint32_t)(step / 4 * 128);
        uint32_t own[4];
        if (step < KEPT) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                own[i] = q.rest[step < KEPT ? step : 0][i];
            }
        } else if (mma_shape<LOW>::LOWS) {
            ptx_load4(own, q.others + (uint32_t)(step - KEPT) * 512);
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            uint32_t top[4], low[4];
            ptx_ldmatrix(top, address + g * (16 * TILE_KEY * 2));
            if (LOW == MMA_LOW_ALL || (LOW == MMA_LOW_EXPANDED && step < MMA_NOPE_STEPS)) {
                ptx_ldmatrix(low, address + g * (16 * TILE_KEY * 2) + TILE_K_LOW);
                ptx_mma_f16(rest[2 * g], q.top[step], low[0], low[1]);
                ptx_mma_f16(rest[2 * g + 1], q.top[step], low[2], low[3]);
            }
            ptx_mma_f16(score[2 * g], q.top[step], top[0], top[1]);
            ptx_mma_f16(score[2 * g + 1], q.top[step], top[2], top[3]);
            if (mma_shape<LOW>::LOWS) {
                ptx_mma_f16(rest[2 * g], own, top[0], top[1]);
                ptx_mma_f16(rest[2 * g + 1], own, top[2], top[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        (&score[0][0])[i] += (&rest[0][0])[i];
    }
}

/* What a thread holds of its two rows' softmax; total is its own columns' share. */
struct mma_state {
    float total[2], alpha[2];
};

/* Largest over the four lanes that share rows; the same bits in each. */
TV_DEVICE float quad_most(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

TV_DEVICE float2 pair_load(uint32_t address)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

TV_DEVICE float2 scale_pair(uint32_t scales, int32_t which, int32_t column)
{
    return pair_load(scales + (uint32_t)(which * TILE_TOKENS + column) * 4);
}

/* What a row does not see is nothing. */
TV_DEVICE void tile_mask(int32_t seen, float (&score)[4][4])
{
    int32_t column = (ptx_thread() & 3) * 2, row = (ptx_thread() & 31) / 4;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int32_t t = i / 4 * 8 + column + i % 2;
        float &x = score[i / 4][i % 4];
        x = t < seen + row + i % 4 / 2 * 8 ? x : -CUDART_INF_F;
    }
}

/* Products become probabilities times 2^TILE_EXPONENT over the token's scale. `seen`: how many of
 * the tile's tokens the warp's first row sees; each further row sees one more. */
TV_DEVICE void tile_probabilities(uint32_t rows, uint32_t scales, int32_t seen,
                                  float (&score)[4][4], struct mma_state *state)
{
    int32_t column = (ptx_thread() & 3) * 2;
    float2 row[2] = {pair_load(rows), pair_load(rows + 64)};
    float most[2] = {row[0].x, row[1].x};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 undo = scale_pair(scales, SCALE_UNDO, j * 8 + column);
        float2 minus = scale_pair(scales, SCALE_MINUS, j * 8 + column);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float &x = score[j][c];
            x = fmaf(x * (c % 2 ? undo.y : undo.x), row[c / 2].y, c % 2 ? minus.y : minus.x);
        }
    }
    if (seen < TILE_TOKENS) {
        tile_mask(seen, score);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        most[i % 4 / 2] = fmaxf(most[i % 4 / 2], score[i / 4][i % 4]);
    }
    float shift[2], sum[2] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = quad_most(most[i]);
        state->alpha[i] = ptx_exp2(row[i].x - most[i]);
        ptx_store1(rows + (uint32_t)i * 64, __float_as_uint(most[i]));
        shift[i] = most[i] - (float)TILE_EXPONENT;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float2 up = scale_pair(scales, SCALE_UP, j * 8 + column);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            score[j][c] = ptx_exp2(score[j][c] - shift[c / 2]);
            sum[c / 2] = fmaf(score[j][c], c % 2 ? up.y : up.x, sum[c / 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        state->total[i] = fmaf(state->total[i], state->alpha[i], sum[i]);
    }
}

/* sum = sum * alpha + p . values of the tile. */
template <enum mma_low LOW>
TV_DEVICE void tile_values(const float (&p)[4][4], uint32_t values, const float (&alpha)[2],
                           float (&sum)[TILE_VALUE / 8][4])
{
    uint32_t top[2][4], rest[2][4];
    int32_t lane = ptx_thread() & 31;
    int32_t t = lane % 16, word = lane / 16;
    uint32_t row = values + (uint32_t)(t * TILE_VALUE * 2), turn = (uint32_t)((t & 7) ^ word) * 16;
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&pair)[4] = p[2 * k + i / 2];
            ptx_pack_pieces(pair[i % 2 * 2], pair[i % 2 * 2 + 1], &top[k][i], &rest[k][i]);
        }
    }
#pragma unroll
    for (int g = 0; g < TILE_VALUE / 32; g++) {
        __syncwarp(); /* 32 columns at a time: four chains of products, no fewer */
        float part[4][4] = {};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t high[2][4], low[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int32_t step = g * 2 + h; /* 16 columns */
                uint32_t address = row + k * (16 * TILE_VALUE * 2) +
                                   (turn ^ (uint32_t)(step % 4 * 32)) + (uint32_t)(step / 4 * 128);
                ptx_ldmatrix_trans(high[h], address);
                if (mma_shape<LOW>::LOWS) {
                    ptx_ldmatrix_trans(low[h], address + TILE_V_LOW);
                }
            }
#pragma unroll
            for (int j = 0; j < 4 && mma_shape<LOW>::LOWS; j++) {
                ptx_mma_f16(part[j], rest[k], high[j / 2][j % 2 * 2], high[j / 2][j % 2 * 2 + 1]);
            }
#pragma unroll
            for (int j = 0; j < 4 && mma_shape<LOW>::LOWS; j++) {
                ptx_mma_f16(part[j], top[k], low[j / 2][j % 2 * 2], low[j / 2][j % 2 * 2 + 1]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                ptx_mma_f16(part[j], top[k], high[j / 2][j % 2 * 2], high[j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sum[g * 4 + j][c] = fmaf(sum[g * 4 + j][c], alpha[c / 2], part[j][c]);
            }
        }
    }
}

TV_DEVICE void state_load(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                          int32_t first_row, uint32_t rows, struct mma_state *state,
                          float (&sum)[TILE_VALUE / 8][4])
{
    int32_t column = (int32_t)(threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool first = s.first == 0, real;
        int64_t at = (int64_t)thread_row(a, first_row, i, &real) * a.heads + blockIdx.y;
        ptx_store1(rows + (uint32_t)i * 64, __float_as_uint(first ? -CUDART_INF_F : s.top[at]));
        state->total[i] = first || column > 0 ? 0.0f : s.total[at];
#pragma unroll
        for (int j = 0; j < TILE_VALUE / 8 * 2; j++) {
            int32_t c = j / 2 * 8 + column + j % 2;
            sum[j / 2][2 * i + j % 2] = !first && c < a.v_dim ? a.out[at * a.v_dim + c] : 0.0f;
        }
    }
}

TV_DEVICE void state_store(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                           int32_t first_row, bool last, uint32_t rows, struct mma_state *state,
                           const float (&sum)[TILE_VALUE / 8][4])
{
    int32_t column = (ptx_thread() & 3) * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool real;
        int64_t at = (int64_t)thread_row(a, first_row, i, &real) * a.heads + blockIdx.y;
        float total = state->total[i];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (!real) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < TILE_VALUE / 8 * 2; j++) {
            int32_t c = j / 2 * 8 + column + j % 2;
            float x = sum[j / 2][2 * i + j % 2];
            if (c < a.v_dim) {
                a.out[at * a.v_dim + c] = last ? x / total : x;
            }
        }
        if (column == 0) {
            s.top[at] = pair_load(rows + (uint32_t)i * 64).x;
            s.total[at] = total;
        }
    }
}

/* The first row of a block; read again wherever it is asked for, like ptx_thread. */
template <int WARPS> TV_DEVICE int32_t block_row(const struct prefill_segment &s)
{
    uint32_t block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
    return s.last_row - (int32_t)block * (WARPS * 16);
}

/* One past the last token that a row of the block sees. */
template <int WARPS>
TV_DEVICE int32_t block_seen(const struct tv_prefill_attn &a, const struct prefill_segment &s)
{
    return a.start + min(block_row<WARPS>(s) + WARPS * 16, a.rows);
}

/* Whether a row of the block sees something of the segment's tile i. */
template <int WARPS>
TV_DEVICE bool block_sees(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                          int32_t i)
{
    return s.first + i * TILE_TOKENS < min(s.end, block_seen<WARPS>(a, s));
}

/* Grid: blocks of rows, the last rows (which see most) first; heads. */
template <int WARPS, enum mma_low LOW>
static __global__ void __launch_bounds__(WARPS * 32, mma_shape<LOW>::blocks(WARPS))
    prefill_attn_mma(const __grid_constant__ struct tv_prefill_attn a,
                     const __grid_constant__ struct prefill_segment s)
{
    typedef mma_shape<LOW> shape;
    extern __shared__ __align__(128) char mma_shared[];
    int32_t warp = (int32_t)threadIdx.x >> 5;
    if (!block_sees<WARPS>(a, s, 0)) {
        return;
    }
    struct mma_ring ring;
    ring.stages = ptx_shared(mma_shared);
    ring.barriers = ring.stages + shape::BARRIERS;
    if (threadIdx.x == 0) {
        for (int32_t i = 0; i < shape::STAGES; i++) {
            ptx_mbarrier_init(ring_barrier<LOW>(ring, KEYS_HERE, i), 1);
            ptx_mbarrier_init(ring_barrier<LOW>(ring, VALUES_HERE, i), 1);
            ptx_mbarrier_init(ring_barrier<LOW>(ring, KEYS_FREE, i), WARPS);
            ptx_mbarrier_init(ring_barrier<LOW>(ring, VALUES_FREE, i), WARPS);
        }
    }
    struct mma_queries<LOW> q;
    struct mma_state state;
    float sum[TILE_VALUE / 8][4];
    static_assert(WARPS * shape::ROOM <= shape::BARRIERS,
                  "the ring has room for all queries at first");
    queries_load<LOW>(a, block_row<WARPS>(s) + warp * 16, mma_shared + warp * shape::ROOM,
                      mma_shared + shape::BARRIERS + 128 + warp * shape::QUERIES, &q);
    state_load(a, s, block_row<WARPS>(s), q.rows, &state, sum);
    ptx_fence_async();
    __syncthreads(); /* barriers are there, and the ring is free */
    if (threadIdx.x == 0) {
        ring_fetch_keys<LOW>(ring, s, 0);
        ring_fetch_values<LOW>(ring, s, 0);
    }
    __syncwarp();
    for (int32_t i = 0; block_sees<WARPS>(a, s, i); i++) {
        int32_t token0 = s.first + i * TILE_TOKENS;
        uint32_t stage = ring_stage<LOW>(ring, i);
        /* of the tile, by the warp's first row; computed anew, since registers are short */
        int32_t seen_first = a.start + block_row<WARPS>(s) + (ptx_thread() >> 5) * 16 + 1 - token0;
        bool works = seen_first > -15;
        if (ptx_thread() == 0 && block_sees<WARPS>(a, s, i + 1)) {
            ring_fetch_keys<LOW>(ring, s, i + 1);
        }
        __syncwarp();
        ptx_mbarrier_wait(ring_barrier<LOW>(ring, KEYS_HERE, i), ring_parity<LOW>(i));
        float score[4][4];
        if (works) {
            tile_products<LOW>(q, stage, score);
        }
        if (ptx_thread() == 0 && block_sees<WARPS>(a, s, i + 1)) {
            ring_fetch_values<LOW>(ring, s, i + 1);
        }
        __syncwarp();
        if (works) {
            tile_probabilities(q.rows, stage + shape::SCALES, seen_first, score, &state);
        }
        __syncwarp();
        if ((ptx_thread() & 31) == 0) {
            ptx_mbarrier_arrive(ring_barrier<LOW>(ring, KEYS_FREE, i));
        }
        ptx_mbarrier_wait(ring_barrier<LOW>(ring, VALUES_HERE, i), ring_parity<LOW>(i));
        if (works) {
            tile_values<LOW>(score, stage + shape::KEYS, state.alpha, sum);
        }
        __syncwarp();
        if ((ptx_thread() & 31) == 0) {
            ptx_mbarrier_arrive(ring_barrier<LOW>(ring, VALUES_FREE, i));
        }
    }
    state_store(a, s, block_row<WARPS>(s), s.end >= block_seen<WARPS>(a, s), q.rows, &state, sum);
}

#endif
