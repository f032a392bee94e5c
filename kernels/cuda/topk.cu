/*
 * topk.cu - the largest raw logits of a row and its log-sum-exp, one block a row.
 */
#include "ops.h"
#include "select.cuh"

#define K_MAX 64

/* NaN counts as -inf. */
TV_DEVICE float ordered(float logit)
{
    return isnan(logit) ? -CUDART_INF_F : logit;
}

TV_DEVICE void row_lse(const float *logits, int32_t vocab, float *ret_lse)
{
    float top = -CUDART_INF_F, sum = 0.0f;
    for (int32_t i = (int32_t)threadIdx.x; i < vocab; i += SELECT_THREADS) {
        top = fmaxf(top, logits[i]);
    }
    top = block_max(top);
    for (int32_t i = (int32_t)threadIdx.x; i < vocab; i += SELECT_THREADS) {
        sum += expf(logits[i] - top);
    }
    double total = block_sum((double)sum);
    if (threadIdx.x == 0) {
        *ret_lse = (float)((double)top + log(total));
    }
}

static __global__ void __launch_bounds__(SELECT_THREADS)
    topk(const __grid_constant__ struct tv_topk a)
{
    __shared__ int32_t found, found_ids[K_MAX];
    __shared__ uint32_t found_keys[K_MAX];
    int64_t row = blockIdx.x;
    const float *logits = a.logits + row * a.vocab;
    int32_t thread = (int32_t)threadIdx.x;
    row_lse(logits, a.vocab, a.lse + row);
    if (a.k == 0) {
        return;
    }
    struct select_set set =
        select_largest(a.vocab, a.k, [=](int32_t i) { return select_key(ordered(logits[i])); });
    if (thread == 0) {
        found = 0;
    }
    __syncthreads();
    for (int32_t i = thread; i < a.vocab; i += SELECT_THREADS) {
        uint32_t key = select_key(ordered(logits[i]));
        if (select_has(set, key, i)) {
            int32_t at = atomicAdd(&found, 1); /* the order here is mended below */
            found_ids[at] = i;
            found_keys[at] = key;
        }
    }
    __syncthreads();
    if (thread < a.k) {
        int32_t rank = 0, id = found_ids[thread];
        for (int32_t j = 0; j < a.k; j++) {
            rank += found_keys[j] > found_keys[thread] ||
                    (found_keys[j] == found_keys[thread] && found_ids[j] < id);
        }
        a.ids[row * a.k + rank] = id;
        a.values[row * a.k + rank] = ordered(logits[id]);
    }
}

int tv_cuda_topk(struct tv_kernels *k, const struct tv_topk *args)
{
    if (args->rows < 0 || args->vocab < 1 || args->k < 0 || args->k > K_MAX ||
        args->k > args->vocab) {
        return -EINVAL;
    }
    if (args->rows == 0) {
        return 0;
    }
    topk<<<(uint32_t)args->rows, SELECT_THREADS, 0, tv_cuda_stream(k)>>>(*args);
    return tv_cuda_errno(cudaGetLastError());
}
