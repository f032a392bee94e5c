/*
 * verify_attn_naive.cu - the oracle: textbook attention, one row at a time.
 *
 * A block computes one row after the other: its list of attended slots, the full score row in
 * global memory, softmax, and the second product, with sums in f64 (f32 on request). No tiling, no
 * online softmax, no split, no length limit, any latent and rope dims; shares nothing with the
 * flash kernels, since it judges them.
 */
#include <cuda_bf16.h>
#include <math_constants.h>

#include "internal.h"

#define THREADS      256
#define WARPS        (THREADS / 32)
#define SCORE_BYTES  (256ll << 20) /* of score rows at a time, where one fits at all */
#define BLOCKS_MAX   1056
#define NAIVE_DEVICE static __device__ __forceinline__

/* Bytes of one score row; rows of f32 sums take the same room, for one workspace size. */
static int64_t score_row_bytes(const struct tv_verify_attn *args)
{
    return (int64_t)args->kv_len_max * (int64_t)sizeof(double);
}

/* Blocks that there is work for. */
static int64_t blocks_wanted(const struct tv_verify_attn *args)
{
    int64_t blocks = (int64_t)args->batch * args->q_len * args->heads;
    blocks = blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX;
    return args->blocks_max <= 0 || blocks < args->blocks_max ? blocks : args->blocks_max;
}

static int64_t block_count(const struct tv_verify_attn *args)
{
    int64_t wanted = blocks_wanted(args), blocks = SCORE_BYTES / score_row_bytes(args);
    blocks = blocks < wanted ? blocks : wanted;
    return blocks > 1 ? blocks : 1;
}

NAIVE_DEVICE double element(const float *p, int64_t i)
{
    return (double)p[i];
}

NAIVE_DEVICE double element(const __nv_bfloat16 *p, int64_t i)
{
    return (double)__bfloat162float(p[i]);
}

NAIVE_DEVICE double exponential(double x)
{
    return exp(x);
}

NAIVE_DEVICE float exponential(float x)
{
    return expf(x);
}

/* Sum (or maximum) over the block, in a fixed tree; the same in every thread. */
template <typename Sum> NAIVE_DEVICE Sum block_reduce(Sum x, bool maximum)
{
    __shared__ Sum parts[WARPS];
    for (int i = 16; i > 0; i >>= 1) {
        Sum y = __shfl_xor_sync(0xffffffffu, x, i);
        x = maximum ? (x > y ? x : y) : x + y;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        parts[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    x = parts[0];
    for (int w = 1; w < WARPS; w++) {
        x = maximum ? (x > parts[w] ? x : parts[w]) : x + parts[w];
    }
    return x;
}

/* What one row reads. */
template <typename T> struct naive_row {
    const T *q;
    const T *kv;
    const int32_t *table;
    const int32_t *ancestors; /* ascending, self last */
    int32_t prefix;
    int32_t count; /* slots attended to */
    int32_t page_size, dims, latent;
};

/* Offset in the pool of the j-th attended slot's KV row. */
template <typename T> NAIVE_DEVICE int64_t row_offset(const struct naive_row<T> &r, int32_t j)
{
    int32_t slot = j < r.prefix ? j : r.prefix + r.ancestors[j - r.prefix];
    int64_t page = r.table[slot / r.page_size];
    return (page * r.page_size + slot % r.page_size) * (int64_t)r.dims;
}

/* Scores, then probabilities, in the score row; returns log-sum-exp. */
template <typename T, typename Sum>
NAIVE_DEVICE Sum row_softmax(const struct naive_row<T> &r, Sum *score, float scale, int32_t round_p)
{
    int32_t lane = (int32_t)threadIdx.x & 31;
    Sum top = (Sum)-CUDART_INF, total = 0;
    for (int32_t j = (int32_t)threadIdx.x >> 5; j < r.count; j += WARPS) {
        int64_t at = row_offset(r, j);
        Sum dot = 0;
        for (int32_t d = lane; d < r.dims; d += 32) {
            dot += (Sum)element(r.q, d) * (Sum)element(r.kv, at + d);
        }
        for (int i = 16; i > 0; i >>= 1) {
            dot += __shfl_xor_sync(0xffffffffu, dot, i);
        }
        dot *= (Sum)scale;
        if (lane == 0) {
            score[j] = dot;
        }
        top = top > dot ? top : dot;
    }
    Sum by = (Sum)exp2(__brev((uint32_t)round_p - 1) * 0x1p-32); /* of what is rounded */
    top = block_reduce(top, true);
    for (int32_t j = (int32_t)threadIdx.x; j < r.count; j += THREADS) {
        score[j] = exponential(score[j] - top);
        total += score[j];
    }
    total = block_reduce(total, false);
    for (int32_t j = (int32_t)threadIdx.x; j < r.count; j += THREADS) {
        Sum p = score[j] / total;
        score[j] =
            round_p != 0 ? (Sum)__bfloat162float(__float2bfloat16_rn((float)(p * by))) / by : p;
    }
    __syncthreads();
    return top + (Sum)log((double)total);
}

template <typename T, typename Sum>
NAIVE_DEVICE void row_values(const struct naive_row<T> &r, const Sum *score, void *out, int64_t at,
                             bool out_bf16)
{
    for (int32_t c = (int32_t)threadIdx.x; c < r.latent; c += THREADS) {
        Sum sum = 0;
#pragma unroll 8
        for (int32_t j = 0; j < r.count; j++) {
            sum += score[j] * (Sum)element(r.kv, row_offset(r, j) + c);
        }
        if (out_bf16) {
            ((__nv_bfloat16 *)out)[at + c] = __float2bfloat16_rn((float)sum);
        } else {
            ((float *)out)[at + c] = (float)sum;
        }
    }
}

/* The list of a node and its ancestors, ascending, by one thread; returns its length. */
NAIVE_DEVICE int32_t list_ancestors(const int32_t *parents, int32_t node, int32_t *list)
{
    int32_t count = 0;
    while (node >= 0 && count < TV_TREE_NODES_MAX) {
        list[count++] = node;
        node = parents[node];
    }
    for (int32_t i = 0; i < count / 2; i++) {
        int32_t other = list[i];
        list[i] = list[count - 1 - i];
        list[count - 1 - i] = other;
    }
    return count;
}

NAIVE_DEVICE void row_zero(const struct tv_verify_attn &a, int64_t row)
{
    for (int32_t c = (int32_t)threadIdx.x; c < a.latent_dim; c += THREADS) {
        if (a.out_dtype == TV_BF16) {
            ((__nv_bfloat16 *)a.out)[row * a.latent_dim + c] = __float2bfloat16_rn(0.0f);
        } else {
            ((float *)a.out)[row * a.latent_dim + c] = 0.0f;
        }
    }
    if (threadIdx.x == 0) {
        a.lse[row] = -CUDART_INF_F;
    }
}

template <typename T, typename Sum>
NAIVE_DEVICE void row_attend(const struct tv_verify_attn &a, Sum *score, int32_t *ancestors,
                             int32_t request, int32_t node, int64_t row_node, int32_t head)
{
    __shared__ int32_t depth;
    struct naive_row<T> r;
    int64_t row = row_node * a.heads + head;
    __syncthreads();
    if (threadIdx.x == 0) {
        depth = list_ancestors(a.parents + (row_node - node), node, ancestors);
    }
    __syncthreads();
    r.dims = a.latent_dim + a.rope_dim;
    r.latent = a.latent_dim;
    r.q = (const T *)a.q + row * r.dims;
    r.kv = (const T *)a.kv_pages;
    r.table = a.page_table + (int64_t)request * a.max_pages;
    r.ancestors = ancestors;
    r.prefix = a.prefix_len[request];
    r.count = r.prefix + depth;
    r.page_size = a.page_size;
    Sum lse = row_softmax(r, score, a.softmax_scale, a.round_p_bf16);
    row_values(r, score, a.out, row * a.latent_dim, a.out_dtype == TV_BF16);
    if (threadIdx.x == 0) {
        a.lse[row] = (float)lse;
    }
}

/* Rows [first, end) of all. */
template <typename T, typename Sum>
__global__ void __launch_bounds__(THREADS)
    verify_attn_naive(const __grid_constant__ struct tv_verify_attn a, int64_t first_row,
                      int64_t end_row)
{
    __shared__ int32_t ancestors[TV_TREE_NODES_MAX];
    Sum *score = (Sum *)((double *)a.workspace + (int64_t)blockIdx.x * a.kv_len_max);
    for (int64_t i = first_row + blockIdx.x; i < end_row; i += gridDim.x) {
        int32_t head = (int32_t)(i % a.heads);
        int32_t node = (int32_t)(i / a.heads % a.q_len);
        int32_t request = (int32_t)(i / a.heads / a.q_len);
        int64_t first =
            a.row_start != NULL ? (int64_t)a.row_start[request] : (int64_t)request * a.q_len;
        if (node < a.node_count[request]) {
            row_attend<T, Sum>(a, score, ancestors, request, node, first + node, head);
        } else if (a.row_start == NULL) {
            row_zero(a, (first + node) * a.heads + head);
        }
    }
}

/* Room for the score rows of block_count, and no less for a longer request than for a shorter one,
 * of which more rows fit: whoever takes it once takes it for the longest. */
size_t tv_cuda_verify_attn_naive_workspace(const struct tv_kernels *k,
                                           const struct tv_verify_attn *args)
{
    (void)k;
    if (tv_cuda_verify_attn_check_shape(args) < 0) {
        return 0;
    }
    int64_t row = score_row_bytes(args), bytes = blocks_wanted(args) * row;
    int64_t most = SCORE_BYTES > row ? SCORE_BYTES : row;
    return (size_t)(bytes < most ? bytes : most);
}

static int launch(const struct tv_verify_attn *args, uint32_t blocks, int64_t first, int64_t end,
                  cudaStream_t stream)
{
    if (args->dtype == TV_BF16 && args->sum_f32) {
        verify_attn_naive<__nv_bfloat16, float><<<blocks, THREADS, 0, stream>>>(*args, first, end);
    } else if (args->dtype == TV_BF16) {
        verify_attn_naive<__nv_bfloat16, double><<<blocks, THREADS, 0, stream>>>(*args, first, end);
    } else if (args->sum_f32) {
        verify_attn_naive<float, float><<<blocks, THREADS, 0, stream>>>(*args, first, end);
    } else {
        verify_attn_naive<float, double><<<blocks, THREADS, 0, stream>>>(*args, first, end);
    }
    return tv_cuda_errno(cudaGetLastError());
}

int tv_cuda_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int result = tv_cuda_verify_attn_check(args);
    if (result < 0) {
        return result;
    }
    if (args->workspace_bytes < tv_cuda_verify_attn_naive_workspace(k, args)) {
        return -ENOSPC;
    }
    TV_CUDA_ENTER(k);
    int64_t rows = (int64_t)args->batch * args->q_len * args->heads;
    int64_t blocks = block_count(args);
    result = tv_cuda_verify_attn_naive_f32(args, blocks, tv_cuda_stream(k));
    if (result != -ENOTSUP) {
        return result;
    }
    result = 0;
    /* few blocks at a time: each for one row, so that none is in another stream's way for long */
    int64_t step = args->blocks_max > 0 ? blocks : rows;
    for (int64_t first = 0; result == 0 && first < rows; first += step) {
        int64_t end = first + step < rows ? first + step : rows;
        result = launch(args, (uint32_t)blocks, first, end, tv_cuda_stream(k));
    }
    return result;
}
