/*
 * verify_attn_naive_f32.cu - the oracle with f32 sums, for bf16 rows of the published dims: as
 * naive as the other, and quick enough to run beside live rounds.
 *
 * A block computes two heads of one node: their full score rows in global memory, softmax, and the
 * second product. No tiling, no online softmax, no split, no tensor cores; shares nothing with the
 * flash kernels, since it judges them. Refuses every other shape: -ENOTSUP.
 */
#include <cuda_bf16.h>
#include <math_constants.h>

#include "internal.h"

#define THREADS     256
#define WARPS       (THREADS / 32)
#define HEADS       2                     /* of a block */
#define LANE_PAIRS  (TV_MLA_ROW / 2 / 32) /* of a KV row's values, that a lane multiplies */
#define KEYS        2                     /* at a time, of a warp in the first product */
#define PAIR_DEVICE static __device__ __forceinline__

/* What the two heads' rows read. */
struct pair_rows {
    const __nv_bfloat162 *kv; /* the pool, as pairs */
    const int32_t *table;
    const int32_t *ancestors; /* ascending, self last */
    int32_t prefix, count;
    int32_t page_shift; /* page sizes are powers of two */
    int32_t heads;      /* 1: the second is none */
};

/* The j-th attended slot's KV row. */
PAIR_DEVICE const __nv_bfloat162 *row_at(const struct pair_rows &r, int32_t j)
{
    int32_t slot = j < r.prefix ? j : r.prefix + r.ancestors[j - r.prefix];
    int64_t page = r.table[slot >> r.page_shift];
    int64_t row = (page << r.page_shift) + (slot & ((1 << r.page_shift) - 1));
    return r.kv + row * (TV_MLA_ROW / 2);
}

PAIR_DEVICE float warp_sum(float x)
{
    for (int i = 16; i > 0; i >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, i);
    }
    return x;
}

/* Sum (or maximum) over the block, in a fixed order; the same in every thread. */
PAIR_DEVICE float block_reduce(float x, bool maximum)
{
    __shared__ float parts[WARPS];
    for (int i = 16; i > 0; i >>= 1) {
        float y = __shfl_xor_sync(0xffffffffu, x, i);
        x = maximum ? fmaxf(x, y) : x + y;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    x = parts[0];
    for (int w = 1; w < WARPS; w++) {
        x = maximum ? fmaxf(x, parts[w]) : x + parts[w];
    }
    return x;
}

/* Scores of both heads, a key after the other; *top: the largest that this thread's warp saw. */
PAIR_DEVICE void scores_of(const struct pair_rows &r, const __nv_bfloat162 *q, float scale,
                           float2 *score, float *top)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    float2 query[HEADS][LANE_PAIRS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int i = 0; i < LANE_PAIRS; i++) {
            int at = h * (TV_MLA_ROW / 2) + i * 32 + lane;
            query[h][i] = h < r.heads ? __bfloat1622float2(q[at]) : make_float2(0.0f, 0.0f);
        }
    }
    for (int32_t j = ((int32_t)threadIdx.x >> 5) * KEYS; j < r.count; j += WARPS * KEYS) {
        const __nv_bfloat162 *row[KEYS];
        __nv_bfloat162 values[KEYS][LANE_PAIRS];
        float dot[KEYS][HEADS] = {};
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            row[k] = row_at(r, j + k < r.count ? j + k : j);
#pragma unroll
            for (int i = 0; i < LANE_PAIRS; i++) {
                values[k][i] = row[k][i * 32 + lane];
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
#pragma unroll
            for (int i = 0; i < LANE_PAIRS; i++) {
                float2 v = __bfloat1622float2(values[k][i]);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    dot[k][h] += query[h][i].x * v.x;
                    dot[k][h] += query[h][i].y * v.y;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < KEYS; k++) {
            float2 s = make_float2(warp_sum(dot[k][0]) * scale, warp_sum(dot[k][1]) * scale);
            if (j + k < r.count) {
                top[0] = fmaxf(top[0], s.x);
                top[1] = fmaxf(top[1], s.y);
                if (lane == 0) {
                    score[j + k] = s;
                }
            }
        }
    }
}

PAIR_DEVICE float rounded(float p, float by)
{
    return __bfloat162float(__float2bfloat16_rn(p * by)) / by;
}

/* Scores to probabilities; returns the log-sum-exps. */
PAIR_DEVICE float2 softmax(const struct pair_rows &r, float2 *score, const float *top,
                           int32_t round_p)
{
    float2 most = make_float2(block_reduce(top[0], true), block_reduce(top[1], true));
    float2 total = make_float2(0.0f, 0.0f);
    for (int32_t j = (int32_t)threadIdx.x; j < r.count; j += THREADS) {
        float2 s = score[j];
        s = make_float2(expf(s.x - most.x), expf(s.y - most.y));
        total.x += s.x;
        total.y += s.y;
        score[j] = s;
    }
    total = make_float2(block_reduce(total.x, false), block_reduce(total.y, false));
    float by = (float)exp2(__brev((uint32_t)round_p - 1) * 0x1p-32); /* of what is rounded */
    for (int32_t j = (int32_t)threadIdx.x; j < r.count; j += THREADS) {
        float2 p = make_float2(score[j].x / total.x, score[j].y / total.y);
        score[j] = round_p != 0 ? make_float2(rounded(p.x, by), rounded(p.y, by)) : p;
    }
    __syncthreads();
    return make_float2(most.x + logf(total.x), most.y + logf(total.y));
}

PAIR_DEVICE void store(void *out, int64_t at, float2 sum, bool out_bf16)
{
    if (out_bf16) {
        ((__nv_bfloat162 *)out)[at] = __float22bfloat162_rn(sum);
    } else {
        ((float2 *)out)[at] = sum;
    }
}

/* A thread has two columns of both heads. */
PAIR_DEVICE void values_of(const struct pair_rows &r, const float2 *score, void *out, int64_t at,
                           bool out_bf16)
{
    float2 sum[HEADS] = {};
    int32_t column = (int32_t)threadIdx.x;
#pragma unroll 8
    for (int32_t j = 0; j < r.count; j++) {
        float2 p = score[j], v = __bfloat1622float2(row_at(r, j)[column]);
        sum[0].x += p.x * v.x;
        sum[0].y += p.x * v.y;
        sum[1].x += p.y * v.x;
        sum[1].y += p.y * v.y;
    }
    store(out, at + column, sum[0], out_bf16);
    if (r.heads == HEADS) {
        store(out, at + TV_MLA_LATENT / 2 + column, sum[1], out_bf16);
    }
}

/* The list of a node and its ancestors, ascending, by one thread; returns its length. */
PAIR_DEVICE int32_t list_ancestors(const int32_t *parents, int32_t node, int32_t *list)
{
    int32_t count = 0;
    for (int32_t i = node; i >= 0 && count < TV_TREE_NODES_MAX; i = parents[i]) {
        count++;
    }
    for (int32_t i = node, left = count; left > 0; i = parents[i]) {
        list[--left] = i;
    }
    return count;
}

static __global__ void __launch_bounds__(THREADS, 2)
    verify_attn_naive_f32(const __grid_constant__ struct tv_verify_attn a, int64_t first_task)
{
    __shared__ int32_t ancestors[TV_TREE_NODES_MAX];
    __shared__ int32_t depth;
    float2 *score = (float2 *)a.workspace + (int64_t)blockIdx.x * a.kv_len_max;
    int32_t pairs = (a.heads + HEADS - 1) / HEADS;
    int64_t task = first_task + blockIdx.x;
    int32_t head = (int32_t)(task % pairs) * HEADS;
    int32_t node = (int32_t)(task / pairs % a.q_len);
    int32_t request = (int32_t)(task / pairs / a.q_len);
    int64_t first =
        a.row_start != NULL ? (int64_t)a.row_start[request] : (int64_t)request * a.q_len;
    int64_t row = (first + node) * a.heads + head;
    struct pair_rows r;
    r.heads = a.heads - head < HEADS ? a.heads - head : HEADS;
    bool out_bf16 = a.out_dtype == TV_BF16;
    if (node >= a.node_count[request]) {
        for (int h = 0; h < r.heads && a.row_start == NULL; h++) {
            store(a.out, (row + h) * (TV_MLA_LATENT / 2) + threadIdx.x, make_float2(0.0f, 0.0f),
                  out_bf16);
            a.lse[row + h] = -CUDART_INF_F;
        }
        return;
    }
    if (threadIdx.x == 0) {
        depth = list_ancestors(a.parents + first, node, ancestors);
    }
    __syncthreads();
    r.kv = (const __nv_bfloat162 *)a.kv_pages;
    r.table = a.page_table + (int64_t)request * a.max_pages;
    r.ancestors = ancestors;
    r.prefix = a.prefix_len[request];
    r.count = r.prefix + depth;
    r.page_shift = 31 - __clz(a.page_size);
    float top[HEADS] = {-CUDART_INF_F, -CUDART_INF_F};
    scores_of(r, (const __nv_bfloat162 *)a.q + row * (TV_MLA_ROW / 2), a.softmax_scale, score, top);
    float2 lse = softmax(r, score, top, a.round_p_bf16);
    values_of(r, score, a.out, row * (TV_MLA_LATENT / 2), out_bf16);
    if (threadIdx.x < (uint32_t)r.heads) {
        a.lse[row + threadIdx.x] = threadIdx.x == 0 ? lse.x : lse.y;
    }
}

int tv_cuda_verify_attn_naive_f32(const struct tv_verify_attn *args, int64_t blocks,
                                  cudaStream_t stream)
{
    static_assert(TV_MLA_LATENT == 2 * THREADS && TV_MLA_ROW % 64 == 0, "pairs of columns");
    if (args->dtype != TV_BF16 || !args->sum_f32 || args->latent_dim != TV_MLA_LATENT ||
        args->rope_dim != TV_MLA_ROPE) {
        return -ENOTSUP;
    }
    int64_t tasks = (int64_t)args->batch * args->q_len * ((args->heads + HEADS - 1) / HEADS);
    int result = 0;
    for (int64_t first = 0; result == 0 && first < tasks; first += blocks) {
        int64_t count = tasks - first < blocks ? tasks - first : blocks;
        verify_attn_naive_f32<<<(uint32_t)count, THREADS, 0, stream>>>(*args, first);
        result = tv_cuda_errno(cudaGetLastError());
    }
    return result;
}
