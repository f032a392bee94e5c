/*
 * embed.cu - token embedding: a copy that widens; an id outside the table gives a row of NaN.
 */
#include "device.cuh"
#include "launch.cuh"
#include "ops.h"

#define THREADS 256

static __global__ void __launch_bounds__(THREADS)
    embed(int32_t hidden, int32_t vocab, const void *table, enum tv_dtype dtype, const int32_t *ids,
          float *x)
{
    ptx_launch_dependents();
    ptx_wait_dependence();
    int64_t row = blockIdx.x;
    int32_t id = ids[row];
    bool inside = id >= 0 && id < vocab;
    for (int32_t i = (int32_t)threadIdx.x; i < hidden; i += THREADS) {
        x[row * hidden + i] =
            inside ? load_f32(table, dtype, (int64_t)id * hidden + i) : CUDART_NAN_F;
    }
}

int tv_cuda_embed(struct tv_kernels *k, int32_t rows, int32_t hidden, int32_t vocab,
                  const void *table, enum tv_dtype dtype, const int32_t *ids, float *x)
{
    if (rows < 0 || hidden < 1 || vocab < 1 || !tv_args_dtype_known(dtype)) {
        return -EINVAL;
    }
    if (rows == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    return launch(embed, dim3((uint32_t)rows), THREADS, 0, tv_cuda_stream(k), hidden, vocab, table,
                  dtype, ids, x);
}
