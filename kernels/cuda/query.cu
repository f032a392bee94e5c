/*
 * query.cu - what stands between the first products of a layer and its verify attention.
 *
 * Two launches: one turns the rope part of every head's query and writes the KV rows, the other
 * multiplies the rest of the query into the latent space and rounds it to the type of the pages.
 * Their parts of the result do not meet.
 */
#include "latent.cuh"
#include "linear_launch.cuh"
#include "ops.h"

#define HEADS_EACH (LATENT_THREADS / 32) /* vectors of a block */

/* The first blocks write a KV row each, the others turn a vector a warp. */
static __global__ void __launch_bounds__(LATENT_THREADS)
    query_turn(const __grid_constant__ struct tv_query a)
{
    ptx_wait_dependence();
    ptx_launch_dependents(); /* absorb reads what the launch before this one wrote */
    if ((int32_t)blockIdx.x < a.latent.rows) {
        latent_row(a.latent, blockIdx.x);
        return;
    }
    int64_t vector = (int64_t)(blockIdx.x - (uint32_t)a.latent.rows) * HEADS_EACH;
    vector += threadIdx.x >> 5;
    if (vector >= (int64_t)a.latent.rows * a.heads) {
        return;
    }
    int32_t rope = a.latent.table.rope_dim;
    const float *from = a.q + vector * (a.nope_dim + rope) + a.nope_dim;
    int64_t base = vector * (a.latent.latent_dim + rope) + a.latent.latent_dim;
    void *out = a.out;
    enum tv_dtype dtype = a.out_dtype;
    rotate(from, a.latent.table, a.latent.positions[vector / a.heads],
           [=](int32_t i, float value) { store_rounded(out, dtype, base + i, value); });
}

/* Group: a head. */
struct absorb_problem : stream_plain {
    static constexpr bool rows_ready = true;
    const char *w;
    const float *x;
    void *y;
    enum tv_dtype y_dtype;
    int32_t x_dim, y_dim; /* of a head's part of a row */

    struct tile {
        const void *w[1];
        const float *x;
        int64_t y; /* element of y */
        int32_t n, k, rows;
    };

    __device__ __forceinline__ bool open(tile &t, int32_t at, int32_t group,
                                         int32_t block_rows) const
    {
        int64_t first = (int64_t)at * block_rows * groups + group;
        t.w[0] = w + (int64_t)group * n * k * (int64_t)sizeof(__nv_bfloat16);
        t.x = x + first * x_dim;
        t.y = first * y_dim;
        t.n = n;
        t.k = k;
        t.rows = min(block_rows, rows - at * block_rows);
        return true;
    }

    __device__ __forceinline__ const float *x_row(const tile &t, int32_t row) const
    {
        return t.x + (int64_t)row * groups * x_dim;
    }

    __device__ __forceinline__ void store(const tile &t, int32_t row, int32_t column,
                                          float value) const
    {
        store_rounded(y, y_dtype, t.y + (int64_t)row * groups * y_dim + column, value);
    }
};

int tv_cuda_query_prepare(void)
{
    return linear_prepare<struct absorb_problem>();
}

int tv_cuda_query(struct tv_kernels *k, const struct tv_query *args)
{
    const struct tv_latent_write *latent = &args->latent;
    int rc = latent_check(latent);
    if (rc < 0 || args->heads < 1 || args->nope_dim < 1 || !tv_args_dtype_kv(args->out_dtype) ||
        !tv_args_dtype_known(args->w_dtype) || !tv_args_products_known(args->products)) {
        return -EINVAL;
    }
    if (args->w_dtype != TV_BF16 || !linear_uses_mma(args->w_dtype, args->nope_dim) ||
        (uintptr_t)args->k_up_t % 16 != 0) {
        return -ENOTSUP;
    }
    if (latent->rows == 0) {
        return 0;
    }
    int64_t turns = ((int64_t)latent->rows * args->heads + HEADS_EACH - 1) / HEADS_EACH;
    if (turns + latent->rows > INT32_MAX) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    rc = launch(query_turn, dim3((uint32_t)(latent->rows + turns)), LATENT_THREADS, 0,
                tv_cuda_stream(k), *args);
    if (rc < 0) {
        return rc;
    }
    struct absorb_problem p;
    p.w = (const char *)args->k_up_t;
    p.x = args->q;
    p.y = args->out;
    p.y_dtype = args->out_dtype;
    p.rows = latent->rows;
    p.groups = args->heads;
    p.n = latent->latent_dim;
    p.k = args->nope_dim;
    p.x_dim = args->nope_dim + latent->table.rope_dim;
    p.y_dim = latent->latent_dim + latent->table.rope_dim;
    p.vector = (uintptr_t)args->q % 16 == 0 && p.x_dim % 4 == 0;
    int32_t block_rows = linear_block_rows(true, false, args->heads, p.rows, p.n);
    p.tiles = (int32_t)linear_blocks(p.rows, block_rows);
    return linear_launch(k, p, args->products, args->w_dtype, block_rows, (uint32_t)p.tiles,
                         args->heads, p.n, p.k);
}
