/*
 * verify_attn_combine.cu - joins the splits of a request: out = sum of 2^(lse_s - lse) * out_s.
 *
 * Sums run over the splits in one order that depends on their number alone: eight interleaved
 * partial sums (splits j, j + 8, ...), then these in turn. A group of eight warps may share a row's
 * columns, one partial sum each, or one warp may compute them one after the other: the arithmetic
 * is the same, so the choice (which depends on the launch's size) never shows in the result.
 */
#include "verify_attn.cuh"

#define WAYS    8   /* interleaved sums, and warps of a block */
#define COLUMNS 128 /* of a warp: four a lane */
#define SLICES  (TV_MLA_LATENT / COLUMNS)

/* One row's splits. */
struct row_splits {
    const float *lse; /* of split 0 */
    const float *out; /* of split 0, this lane's columns */
    int64_t stride;   /* rows between splits */
    int32_t splits;
};

/* Largest lse, and the scale that makes the weights sum to one; 0 where every split is empty. */
TV_DEVICE float splits_lse(const struct row_splits &r, int32_t lane)
{
    float top = -CUDART_INF_F, sum = 0.0f;
    for (int32_t s = lane; s < r.splits; s += 32) {
        top = fmaxf(top, r.lse[s * r.stride]);
    }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
    }
    if (top == -CUDART_INF_F) {
        return top;
    }
    for (int32_t s = lane; s < r.splits; s += 32) {
        sum += exp2f(r.lse[s * r.stride] - top);
    }
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) {
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
    }
    return top + log2f(sum);
}

/* Partial sum j: splits j, j + 8, ... in turn. An empty split weighs nothing, whatever it holds. */
TV_DEVICE float4 splits_fold(const struct row_splits &r, int32_t j, float lse)
{
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int32_t s = j; s < r.splits; s += WAYS) {
        float weight = exp2f(r.lse[s * r.stride] - lse);
        float4 x = *(const float4 *)(r.out + s * r.stride * TV_MLA_LATENT);
        sum.x = fmaf(weight, x.x, sum.x);
        sum.y = fmaf(weight, x.y, sum.y);
        sum.z = fmaf(weight, x.z, sum.z);
        sum.w = fmaf(weight, x.w, sum.w);
    }
    return sum;
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

/* All partial sums by one warp, and their sum: the same arithmetic as splits_fold for each, but
 * with the loads of eight splits in flight. */
TV_DEVICE float4 splits_fold_all(const struct row_splits &r, float lse)
{
    float4 sum[WAYS];
#pragma unroll
    for (int j = 0; j < WAYS; j++) {
        sum[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    for (int32_t s = 0; s < r.splits; s += WAYS) {
#pragma unroll
        for (int j = 0; j < WAYS; j++) {
            if (s + j < r.splits) {
                float weight = exp2f(r.lse[(s + j) * r.stride] - lse);
                float4 x = *(const float4 *)(r.out + (s + j) * r.stride * TV_MLA_LATENT);
                sum[j].x = fmaf(weight, x.x, sum[j].x);
                sum[j].y = fmaf(weight, x.y, sum[j].y);
                sum[j].z = fmaf(weight, x.z, sum[j].z);
                sum[j].w = fmaf(weight, x.w, sum[j].w);
            }
        }
    }
    for (int j = 1; j < WAYS; j++) {
        if (j < r.splits) {
            sum[0] = add4(sum[0], sum[j]);
        }
    }
    return sum[0];
}

/* Where the splits of folded row `row` of a request lie. */
TV_DEVICE struct row_splits row_locate(const struct tv_flash_params &p, const struct tv_plan &plan,
                                       int32_t request, int32_t row, int32_t slice, int32_t lane)
{
    int32_t m = row / TV_PLAN_M, full = plan.full.row_tiles;
    int32_t tile = m / plan.full.m_tiles, m_first = tile * plan.full.m_tiles;
    struct tv_plan_part part = tile < full ? plan.full : plan.rest;
    struct row_splits r;
    int64_t slot = (int64_t)tile * plan.full.splits * plan.full.m_tiles;
    int64_t at = (int64_t)request * p.partial_rows + TV_PLAN_M * slot + (row - m_first * TV_PLAN_M);
    r.stride = (int64_t)TV_PLAN_M * part.m_tiles;
    r.splits = part.splits;
    r.lse = p.partial_lse + at;
    r.out = p.partial_out + at * TV_MLA_LATENT + slice * COLUMNS + lane * 4;
    return r;
}

/* How a row's columns are shared out. */
enum form {
    FORM_BLOCK, /* the block's warps share one slice */
    FORM_SLICE, /* each warp has a slice */
    FORM_ROW    /* each warp has all slices, one after the other */
};

template <enum form FORM>
__global__ void __launch_bounds__(WAYS * 32, 2)
    verify_attn_combine(const __grid_constant__ struct tv_flash_params p)
{
    __shared__ float4 sums[WAYS][32];
    __shared__ struct tv_plan plan;
    __shared__ int64_t base;
    int32_t warp = (int32_t)threadIdx.x >> 5, lane = (int32_t)threadIdx.x & 31;
    int32_t request = (int32_t)blockIdx.y, index = (int32_t)blockIdx.x;
    ptx_launch_dependents();
    /* The kernel before lets this one start when its own wait is over: what a request is like may
     * be read already (launch.cuh), partial sums may not. */
    if (threadIdx.x == 0) {
        struct flash_request is = flash_request_read(p, request);
        plan = tv_plan_request(p.device, is.nodes, p.heads, is.prefix);
        base = is.base;
    }
    __syncthreads();
    index = FORM == FORM_BLOCK ? index : index * WAYS + warp;
    int32_t row = FORM == FORM_ROW ? index : index / SLICES;
    int32_t slice = FORM == FORM_ROW ? 0 : index % SLICES;
    struct row_splits r = row_locate(p, plan, request, row, slice, lane);
    /* Every block waits, also one without a row: who comes next trusts that this launch did. */
    ptx_wait_dependence();
    if (row >= plan.rows || r.splits == 1) {
        return;
    }
    float lse = splits_lse(r, lane);
    bool any = lse != -CUDART_INF_F;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if constexpr (FORM == FORM_BLOCK) {
        sums[warp][lane] = any ? splits_fold(r, warp, lse) : total;
        __syncthreads();
        if (warp != 0) {
            return;
        }
        total = sums[0][lane];
        for (int32_t j = 1; j < WAYS && j < r.splits; j++) {
            total = add4(total, sums[j][lane]);
        }
        row_write(p, base + row, slice, lane, total, lse);
    } else {
#pragma unroll 1
        for (int32_t i = 0; i < (FORM == FORM_ROW ? SLICES : 1); i++) {
            total = any ? splits_fold_all(r, lse) : total;
            row_write(p, base + row, slice + i, lane, total, lse);
            r.out += COLUMNS;
        }
    }
}

static const void *combine_kernel(enum form form)
{
    return form == FORM_BLOCK   ? (const void *)verify_attn_combine<FORM_BLOCK>
           : form == FORM_SLICE ? (const void *)verify_attn_combine<FORM_SLICE>
                                : (const void *)verify_attn_combine<FORM_ROW>;
}

int tv_flash_combine_prepare(void)
{
    static const enum form forms[] = {FORM_BLOCK, FORM_SLICE, FORM_ROW};
    int result = 0;
    for (size_t i = 0; i < sizeof forms / sizeof forms[0] && result == 0; i++) {
        result = tv_flash_prepare_kernel(combine_kernel(forms[i]), 0);
    }
    return result;
}

int tv_flash_combine_image(int32_t *ret_image)
{
    struct cudaFuncAttributes attributes;
    TV_CUDA_CHECK(cudaFuncGetAttributes(&attributes, combine_kernel(FORM_BLOCK)));
    *ret_image = attributes.binaryVersion;
    return 0;
}

int tv_flash_combine_launch(const struct tv_flash_params *p, int32_t batch, int32_t splits,
                            cudaStream_t stream)
{
    int32_t rows = p->q_len * p->heads;
    /* Few rows with many splits are bound by latency: spread each slice over a block. Many rows are
     * bound by instructions: find out once for all slices where a row's splits lie. */
    enum form form = (int64_t)rows * batch > 4096                         ? FORM_ROW
                     : splits > 2 * WAYS && (int64_t)rows * batch <= 1024 ? FORM_BLOCK
                                                                          : FORM_SLICE;
    int32_t pieces = form == FORM_ROW ? rows : rows * SLICES;
    dim3 grid((uint32_t)(form == FORM_BLOCK ? pieces : tv_plan_ceil(pieces, WAYS)),
              (uint32_t)batch);
    void *kernel_args[1] = {(void *)p};
    return tv_flash_launch(combine_kernel(form), grid, WAYS * 32, 0, stream, kernel_args);
}
