/*
 * topk.cu - the largest raw logits of a row and its log-sum-exp, one cluster of blocks a row.
 */
#include "ops.h"
#include "select.cuh"

#define K_MAX 64

/* NaN counts as -inf. */
TV_DEVICE float ordered(float logit)
{
    return isnan(logit) ? -CUDART_INF_F : logit;
}

/* The selected elements, gathered in the first block's shared memory. */
struct found {
    int32_t count, ids[K_MAX];
    uint32_t keys[K_MAX];
};

TV_DEVICE float row_lse(const float *logits, int32_t vocab, int &turn)
{
    float top = -CUDART_INF_F, sum = 0.0f;
    select_each(vocab, [&](int32_t i) { top = fmaxf(top, logits[i]); });
    top = select_max(top, turn);
    select_each(vocab, [&](int32_t i) { sum += expf(logits[i] - top); });
    return (float)((double)top + log(select_sum((double)sum, turn)));
}

/* By the first block: each element goes to its rank. */
TV_DEVICE void found_write(const struct tv_topk &a, int64_t row, const struct found &f)
{
    int32_t thread = (int32_t)threadIdx.x;
    if (thread >= a.k) {
        return;
    }
    int32_t rank = 0, id = f.ids[thread];
    for (int32_t j = 0; j < a.k; j++) {
        rank += f.keys[j] > f.keys[thread] || (f.keys[j] == f.keys[thread] && f.ids[j] < id);
    }
    a.ids[row * a.k + rank] = id;
    a.values[row * a.k + rank] = ordered(a.logits[row * a.vocab + id]);
}

static __global__ void __cluster_dims__(SELECT_BLOCKS) __launch_bounds__(SELECT_THREADS)
    topk(const __grid_constant__ struct tv_topk a)
{
    __shared__ struct found mine;
    struct found *found = cooperative_groups::this_cluster().map_shared_rank(&mine, 0);
    int64_t row = select_row();
    const float *logits = a.logits + row * a.vocab;
    int turn = 0;
    if (threadIdx.x == 0) {
        mine.count = 0; /* seen by the others after the next sum over the cluster */
    }
    float lse = row_lse(logits, a.vocab, turn);
    if (select_thread() == 0) {
        a.lse[row] = lse;
    }
    if (a.k > 0) {
        struct select_set set = select_largest(
            a.vocab, a.k, [=](int32_t i) { return select_key(ordered(logits[i])); }, turn);
        select_each(a.vocab, [&](int32_t i) {
            uint32_t key = select_key(ordered(logits[i]));
            if (select_has(set, key, i)) {
                int32_t at = atomicAdd(&found->count, 1); /* any order: they are ranked below */
                found->ids[at] = i;
                found->keys[at] = key;
            }
        });
    }
    select_end();
    if (blockIdx.x % SELECT_BLOCKS == 0) {
        found_write(a, row, mine);
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
    if (args->rows > INT32_MAX / SELECT_BLOCKS) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    topk<<<(uint32_t)args->rows * SELECT_BLOCKS, SELECT_THREADS, 0, tv_cuda_stream(k)>>>(*args);
    return tv_cuda_errno(cudaGetLastError());
}
