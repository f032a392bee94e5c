/*
 * prefill_attn_any.cuh - expanded causal attention for dimensions that the tensor-core form has no
 * room for: f32 products and sums, 64 rows of one head a block, tiles of 64 tokens.
 */
#ifndef TV_KERNELS_CUDA_PREFILL_ATTN_ANY_CUH
#define TV_KERNELS_CUDA_PREFILL_ATTN_ANY_CUH

#include "prefill_attn.cuh"

#define THREADS      256
#define ROWS         64 /* of a block */
#define TOKENS       64 /* of a tile */
#define DEPTH        32 /* of keys in shared memory at a time */
#define PAD          4
#define VALUE_FLOATS 2048

/* Element d of the key of a token of the segment. */
TV_DEVICE float key_element(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                            int32_t head, int32_t token, int32_t d)
{
    if (d < a.nope_dim) {
        return (
            (const float *)
                s.expanded)[((int64_t)head * PREFILL_SEGMENT + token - s.first) * a.nope_dim + d];
    }
    int64_t page = a.page_table[token / a.page_size];
    int64_t row = page * a.page_size + token % a.page_size;
    return load_f32(a.kv_pages, a.kv_dtype,
                    row * (a.latent_dim + a.rope_dim) + a.latent_dim + d - a.nope_dim);
}

/* Scores of a tile: score[i][j] of row 4 * (thread / 16) + i and token 4 * (thread % 16) + j. */
TV_DEVICE void any_scores(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                          int32_t row0, int32_t token0, float (*q)[ROWS + PAD],
                          float (*keys)[TOKENS + PAD], float (&score)[4][4])
{
    int32_t head = (int32_t)blockIdx.y, thread = (int32_t)threadIdx.x;
    int32_t dim = a.nope_dim + a.rope_dim, ty = thread / 16, tx = thread % 16;
    for (int32_t d0 = 0; d0 < dim; d0 += DEPTH) {
        __syncthreads();
#pragma unroll
        for (int32_t i = 0; i < ROWS * DEPTH / THREADS; i++) {
            int32_t e = thread + i * THREADS, d = e % DEPTH, at = e / DEPTH;
            bool deep = d0 + d < dim;
            q[d][at] = deep && row0 + at < a.rows
                           ? a.q[((int64_t)(row0 + at) * a.heads + head) * dim + d0 + d]
                           : 0.0f;
            keys[d][at] =
                deep && token0 + at < s.end ? key_element(a, s, head, token0 + at, d0 + d) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int32_t d = 0; d < DEPTH; d++) {
            float4 x = *(const float4 *)&q[d][4 * ty], y = *(const float4 *)&keys[d][4 * tx];
            const float rows[4] = {x.x, x.y, x.z, x.w}, tokens[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    score[i][j] = fmaf(rows[i], tokens[j], score[i][j]);
                }
            }
        }
    }
}

/* Maximum or sum over the 16 threads that share rows; the same bits in each. */
template <bool MAXIMUM> TV_DEVICE float row_reduce(float x)
{
    for (int i = 8; i > 0; i >>= 1) {
        float y = __shfl_xor_sync(0xffffffffu, x, i);
        x = MAXIMUM ? fmaxf(x, y) : x + y;
    }
    return x;
}

/*
 * Online softmax over the tile: scores become probabilities in p[token][row]; alpha rescales what
 * was summed before. A row that sees none of the tile is left as it is: its alpha is 1, its
 * probabilities are 0.
 */
TV_DEVICE void any_softmax(float scale, int32_t position0, int32_t token0, float (&score)[4][4],
                           float (&top)[4], float (&total)[4], float (&alpha)[4],
                           float (*p)[ROWS + PAD])
{
    int32_t ty = (int32_t)threadIdx.x / 16, tx = (int32_t)threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float most = -CUDART_INF_F, sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool seen = token0 + 4 * tx + j <= position0 + 4 * ty + i;
            score[i][j] = seen ? score[i][j] * scale : -CUDART_INF_F;
            most = fmaxf(most, score[i][j]);
        }
        most = fmaxf(top[i], row_reduce<true>(most));
        alpha[i] = expf(top[i] - most);
        top[i] = most;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            score[i][j] = expf(score[i][j] - most);
            sum += score[i][j];
            p[4 * tx + j][4 * ty + i] = score[i][j];
        }
        total[i] = fmaf(total[i], alpha[i], row_reduce<false>(sum));
    }
}

/* sum[i][j] += p . values for row 4 * (thread / 16) + i and value thread % 16 + 16 * j. */
template <int C>
TV_DEVICE void any_values(const struct tv_prefill_attn &a, const struct prefill_segment &s,
                          int32_t token0, const float (*p)[ROWS + PAD], float *values,
                          float (&sum)[4][C])
{
    constexpr int32_t WIDTH = 16 * C, STEP = VALUE_FLOATS / WIDTH;
    int32_t head = (int32_t)blockIdx.y, thread = (int32_t)threadIdx.x;
    int32_t ty = thread / 16, tx = thread % 16;
    for (int32_t t0 = 0; t0 < TOKENS; t0 += STEP) {
        __syncthreads();
#pragma unroll
        for (int32_t i = 0; i < VALUE_FLOATS / THREADS; i++) {
            int32_t e = thread + i * THREADS, c = e % WIDTH, token = token0 + t0 + e / WIDTH;
            values[e] =
                c < a.v_dim && token < s.end
                    ? s.values[((int64_t)head * PREFILL_SEGMENT + token - s.first) * a.v_dim + c]
                    : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int32_t t = 0; t < STEP; t++) {
            float4 x = *(const float4 *)&p[t0 + t][4 * ty];
            const float rows[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < C; j++) {
                float value = values[t * WIDTH + tx + 16 * j];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    sum[i][j] = fmaf(rows[i], value, sum[i][j]);
                }
            }
        }
    }
}

/* C: values a thread holds of a row, 16 * C >= v_dim. */
template <int C>
static __global__ void __launch_bounds__(THREADS)
    prefill_attn_any(const __grid_constant__ struct tv_prefill_attn a,
                     const __grid_constant__ struct prefill_segment s)
{
    __shared__ __align__(16) float q[DEPTH][ROWS + PAD], keys[DEPTH][TOKENS + PAD];
    __shared__ __align__(16) float p[TOKENS][ROWS + PAD], values[VALUE_FLOATS];
    int32_t row0 = (int32_t)blockIdx.x * ROWS, head = (int32_t)blockIdx.y;
    int32_t ty = (int32_t)threadIdx.x / 16, tx = (int32_t)threadIdx.x % 16;
    /* One past the last token that a row of this block sees. */
    int32_t seen = a.start + min(row0 + ROWS, a.rows);
    if (s.first >= seen) {
        return;
    }
    float top[4], total[4], alpha[4], sum[4][C];
    float *out[4];
    int64_t state[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t row = min(row0 + 4 * ty + i, a.rows - 1);
        state[i] = (int64_t)row * a.heads + head;
        out[i] = a.out + state[i] * a.v_dim;
        top[i] = s.first > 0 ? s.top[state[i]] : -CUDART_INF_F;
        total[i] = s.first > 0 ? s.total[state[i]] : 0.0f;
#pragma unroll
        for (int j = 0; j < C; j++) {
            int32_t c = tx + 16 * j;
            sum[i][j] = s.first > 0 && c < a.v_dim ? out[i][c] : 0.0f;
        }
    }
    for (int32_t token0 = s.first; token0 < min(s.end, seen); token0 += TOKENS) {
        float score[4][4] = {};
        any_scores(a, s, row0, token0, q, keys, score);
        any_softmax(a.softmax_scale, a.start + row0, token0, score, top, total, alpha, p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < C; j++) {
                sum[i][j] *= alpha[i];
            }
        }
        any_values(a, s, token0, p, values, sum);
    }
    bool last = s.end >= seen;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (row0 + 4 * ty + i >= a.rows) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < C; j++) {
            if (tx + 16 * j < a.v_dim) {
                out[i][tx + 16 * j] = last ? sum[i][j] / total[i] : sum[i][j];
            }
        }
        if (tx == 0) {
            s.top[state[i]] = top[i];
            s.total[state[i]] = total[i];
        }
    }
}

#endif
