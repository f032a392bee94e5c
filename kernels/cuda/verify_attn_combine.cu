/*
 * verify_attn_combine.cu - joins the splits of a request: out = sum of 2^(lse_s - lse) * out_s.
 *
 * Sums run over the splits in one order that depends on their number alone: eight interleaved
 * partial sums (splits j, j + 8, ...), then these in turn. The warps of a block may share a slice
 * of a row, one partial sum each, or one warp may compute them one after the other: the arithmetic
 * is the same, so the choice (which depends on the launch's size and the request's) never shows in
 * the result. Everything a warp needs is asked for at once: what takes time is how often it waits.
 */
#include "verify_attn.cuh"

#define WAYS         8   /* interleaved sums, and warps of a block */
#define COLUMNS      128 /* of a slice: four a lane */
#define SLICES       (TV_MLA_LATENT / COLUMNS)
#define DEPTH        16   /* loads of 16 bytes that a lane has in flight */
#define ROWS_FEW     64   /* of a launch: a block for each slice of them has the device to itself */
#define ROWS_MANY    2400 /* from where on a warp takes a whole row */
#define LSE_ROUNDS   ((TV_PLAN_SPLITS_MAX + 31) / 32)
#define BLOCK_ROUNDS ((TV_PLAN_SPLITS_MAX + WAYS - 1) / WAYS)

/* One row's splits. */
struct row_splits {
    const float *lse; /* of its splits */
    const float *out; /* of split 0, this lane's first columns */
    int64_t stride;   /* rows between splits */
    int32_t splits;
};

/* lse of a row's splits, a lane's: lane, lane + 32, ... */
struct splits_own {
    float lse[LSE_ROUNDS];
};

TV_DEVICE struct splits_own splits_ask(const struct row_splits &r, int32_t lane)
{
    struct splits_own own;
#pragma unroll
    for (int k = 0; k < LSE_ROUNDS; k++) {
        int32_t s = lane + 32 * k;
        own.lse[k] = s < r.splits ? r.lse[s] : -CUDART_INF_F;
    }
    return own;
}

/* lse of the row, -inf where every split is empty; and each split's weight, for the warp. */
TV_DEVICE float splits_weigh(const struct row_splits &r, const struct splits_own &own,
                             float *weight, int32_t lane)
{
    float top = own.lse[0], sum = 0.0f;
#pragma unroll
    for (int k = 1; k < LSE_ROUNDS; k++) {
        top = fmaxf(top, own.lse[k]);
    }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
    }
    if (top == -CUDART_INF_F) {
        return top;
    }
#pragma unroll
    for (int k = 0; k < LSE_ROUNDS; k++) {
        if (32 * k < r.splits) {
            sum += exp2f(own.lse[k] - top);
        }
    }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
    }
    float lse = top + log2f(sum);
#pragma unroll
    for (int k = 0; k < LSE_ROUNDS; k++) {
        if (32 * k < r.splits) {
            weight[lane + 32 * k] = exp2f(own.lse[k] - lse);
        }
    }
    __syncwarp();
    return lse;
}

/* This lane's columns of splits first, first + step, ..., all asked for at once. */
template <int N>
TV_DEVICE void splits_load(float4 (&x)[N], const struct row_splits &r, const float *out,
                           int32_t first, int32_t step)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        int32_t s = first + i * step;
        if (s < r.splits) {
            x[i] = *(const float4 *)(out + s * r.stride * TV_MLA_LATENT);
        }
    }
}

TV_DEVICE void fold(float4 &sum, float weight, const float4 &x)
{
    sum.x = fmaf(weight, x.x, sum.x);
    sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z);
    sum.w = fmaf(weight, x.w, sum.w);
}

TV_DEVICE void row_write(const struct tv_flash_params &p, int64_t row, int32_t slice, int32_t lane,
                         float4 x, float lse)
{
    int64_t at = row * TV_MLA_LATENT + slice * COLUMNS + lane * 4;
    if (p.out_bf16) {
        *(uint2 *)((__nv_bfloat16 *)p.out + at) =
            make_uint2(ptx_pack(x.x, x.y), ptx_pack(x.z, x.w));
    } else {
        *(float4 *)((float *)p.out + at) = x;
    }
    if (slice == 0 && lane == 0) {
        p.lse[row] = lse * CUDART_LN2_F;
    }
}

TV_DEVICE float4 add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

TV_DEVICE float4 zero4(void)
{
    return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

/* All partial sums of a slice by one warp, and their sum; x: the first splits. */
TV_DEVICE float4 splits_fold(float4 (&x)[DEPTH], const struct row_splits &r, const float *out,
                             const float *weight)
{
    float4 sum[WAYS];
#pragma unroll
    for (int j = 0; j < WAYS; j++) {
        sum[j] = zero4();
    }
#pragma unroll 1
    for (int32_t s = 0;;) {
#pragma unroll
        for (int j = 0; j < DEPTH; j++) {
            if (s + j < r.splits) {
                fold(sum[j % WAYS], weight[s + j], x[j]);
            }
        }
        s += DEPTH;
        if (s >= r.splits) {
            break;
        }
        splits_load(x, r, out, s, 1);
    }
#pragma unroll
    for (int j = 1; j < WAYS; j++) {
        if (j < r.splits) {
            sum[0] = add4(sum[0], sum[j]);
        }
    }
    return sum[0];
}

/* The same of up to N splits, all of them in x. */
template <int N>
TV_DEVICE float4 splits_fold_few(const float4 (&x)[N], const struct row_splits &r,
                                 const float *weight)
{
    float4 sum = zero4();
    fold(sum, weight[0], x[0]);
#pragma unroll
    for (int j = 1; j < N; j++) {
        if (j < r.splits) {
            float4 part = zero4();
            fold(part, weight[j], x[j]);
            sum = add4(sum, part);
        }
    }
    return sum;
}

/* A row of up to N splits by one warp, as many slices at a time as it has loads for. */
template <int N>
TV_DEVICE void row_few(const struct tv_flash_params &p, const struct row_splits &r, float *weight,
                       int64_t to, int32_t lane)
{
    struct splits_own own = splits_ask(r, lane);
    float4 x[DEPTH / N][N];
    float lse = 0.0f;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice += DEPTH / N) {
#pragma unroll
        for (int i = 0; i < DEPTH / N; i++) {
            splits_load(x[i], r, r.out + (slice + i) * COLUMNS, 0, 1);
        }
        if (slice == 0) {
            lse = splits_weigh(r, own, weight, lane);
        }
#pragma unroll
        for (int i = 0; i < DEPTH / N; i++) {
            row_write(p, to, slice + i, lane,
                      lse != -CUDART_INF_F ? splits_fold_few(x[i], r, weight) : zero4(), lse);
        }
    }
}

/* Where the splits of folded row `row` of a request lie. */
TV_DEVICE struct row_splits row_locate(const struct tv_flash_params &p, const struct tv_plan &plan,
                                       int32_t request, int32_t row, int32_t lane)
{
    int32_t m = row / TV_PLAN_M, full = plan.full.row_tiles;
    int32_t tile = tv_plan_div(m, plan.full.m_tiles), m_first = tile * plan.full.m_tiles;
    struct tv_plan_part part = tile < full ? plan.full : plan.rest;
    struct row_splits r;
    int64_t slot = (int64_t)tile * plan.full.splits * plan.full.m_tiles;
    int64_t first = (int64_t)request * p.partial_rows + TV_PLAN_M * slot;
    int32_t local = row - m_first * TV_PLAN_M;
    r.stride = (int64_t)TV_PLAN_M * part.m_tiles;
    r.splits = part.splits;
    r.lse = p.partial_lse + first + local * r.splits;
    r.out = p.partial_out + (first + local) * TV_MLA_LATENT + lane * 4;
    return r;
}

/* A slice of a row by the whole block, each warp one of the interleaved sums. */
TV_DEVICE void slice_by_block(const struct tv_flash_params &p, const struct row_splits &r,
                              float4 (*sums)[32], float *weight, int64_t to, int32_t slice)
{
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    struct splits_own own = splits_ask(r, lane);
    float4 x[BLOCK_ROUNDS], total = zero4();
    splits_load(x, r, r.out + slice * COLUMNS, warp, WAYS);
    float lse = splits_weigh(r, own, weight, lane);
    if (lse != -CUDART_INF_F) {
#pragma unroll
        for (int i = 0; i < BLOCK_ROUNDS; i++) {
            if (warp + i * WAYS < r.splits) {
                fold(total, weight[warp + i * WAYS], x[i]);
            }
        }
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp == 0) {
        for (int32_t j = 1; j < WAYS && j < r.splits; j++) {
            total = add4(total, sums[j][lane]);
        }
        row_write(p, to, slice, lane, total, lse);
    }
}

/* Slices [slice, end) of a row by one warp. */
TV_DEVICE void slices_by_warp(const struct tv_flash_params &p, const struct row_splits &r,
                              float *weight, int64_t to, int32_t slice, int32_t end, int32_t lane)
{
    struct splits_own own = splits_ask(r, lane);
    float4 x[DEPTH];
    splits_load(x, r, r.out + slice * COLUMNS, 0, 1);
    float lse = splits_weigh(r, own, weight, lane);
#pragma unroll 1
    for (;;) {
        const float *out = r.out + slice * COLUMNS;
        float4 total = lse != -CUDART_INF_F ? splits_fold(x, r, out, weight) : zero4();
        row_write(p, to, slice, lane, total, lse);
        if (++slice == end) {
            break;
        }
        splits_load(x, r, out + COLUMNS, 0, 1);
    }
}

/* The grid is as large as the host thinks best for its bounds; what a request gets of it depends on
 * how many rows it has: a block for each slice of a row, or a warp, or a warp for the row. */
__global__ void __launch_bounds__(WAYS * 32, 2)
    verify_attn_combine(const __grid_constant__ struct tv_flash_params p)
{
    __shared__ float4 sums[WAYS][32];
    __shared__ float weights[WAYS][32 * LSE_ROUNDS];
    __shared__ struct tv_plan plan;
    __shared__ int64_t base;
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    int32_t request = (int32_t)blockIdx.y, blocks = (int32_t)gridDim.x;
    ptx_launch_dependents();
    /* The kernel before lets this one start when its own wait is over: what a request is like may
     * be read already (launch.cuh), partial sums may not. */
    if (threadIdx.x == 0) {
        struct flash_request is = flash_request_read(p, request);
        plan = tv_plan_request(p.device, is.nodes, p.heads, is.prefix);
        base = is.base;
    }
    __syncthreads();
    bool by_block = plan.rows * SLICES <= blocks;
    bool few = max(plan.full.splits, plan.rest.splits) <= DEPTH / SLICES;
    bool by_row = !by_block && (few || plan.rows * SLICES > blocks * WAYS);
    int32_t first = 0;
    if (by_row) {
        /* Blocks that have nothing to do make place for those that have, which come last. */
        first = blocks - max(tv_plan_ceil(plan.rows, WAYS), 1);
        if ((int32_t)blockIdx.x < first) {
            return;
        }
    }
    int32_t index = (int32_t)blockIdx.x - first + (by_block ? 0 : warp * (blocks - first));
    int32_t row = by_row ? index : index / SLICES, slice = by_row ? 0 : index % SLICES;
    struct row_splits r = row_locate(p, plan, request, row, lane);
    /* Some block of every request waits, also without a row: who comes next trusts that this launch
     * did. */
    ptx_wait_dependence();
    if (row >= plan.rows || r.splits == 1) {
        return;
    }
    int64_t to = base + row;
    if (by_block) {
        slice_by_block(p, r, sums, weights[warp], to, slice);
    } else if (!by_row) {
        slices_by_warp(p, r, weights[warp], to, slice, slice + 1, lane);
    } else if (r.splits <= DEPTH / SLICES) {
        row_few<DEPTH / SLICES>(p, r, weights[warp], to, lane);
    } else if (r.splits <= WAYS) {
        row_few<WAYS>(p, r, weights[warp], to, lane);
    } else {
        slices_by_warp(p, r, weights[warp], to, 0, SLICES, lane);
    }
}

int tv_flash_combine_prepare(void)
{
    return tv_flash_prepare_kernel((const void *)verify_attn_combine, 0);
}

int tv_flash_combine_image(int32_t *ret_image)
{
    struct cudaFuncAttributes attributes;
    TV_CUDA_CHECK(cudaFuncGetAttributes(&attributes, (const void *)verify_attn_combine));
    *ret_image = attributes.binaryVersion;
    return 0;
}

int tv_flash_combine_launch(const struct tv_flash_params *p, int32_t batch, int32_t splits,
                            cudaStream_t stream)
{
    int32_t rows = p->q_len * p->heads;
    int64_t all = (int64_t)rows * batch;
    /* Few rows are bound by latency, the more the more splits they have; many, and those of few
     * splits, by how many warps a multiprocessor holds. */
    int32_t pieces = all <= ROWS_FEW                               ? rows * SLICES * WAYS
                     : all > ROWS_MANY || splits <= DEPTH / SLICES ? rows
                                                                   : rows * SLICES;
    dim3 grid((uint32_t)tv_plan_ceil(pieces, WAYS), (uint32_t)batch);
    void *kernel_args[1] = {(void *)p};
    return tv_flash_launch((const void *)verify_attn_combine, grid, WAYS * 32, 0, stream,
                           kernel_args);
}
