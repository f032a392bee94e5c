/*
 * verify_attn.cu - table entry of verify attention: checks arguments, sizes and cuts the workspace,
 * and issues one or two launches: the flash kernel of the input type, then the combine when some
 * request may be split.
 *
 * Refuses to look at device memory: what depends on lengths is decided on the device (plan.h).
 */
#include "verify_attn.cuh"

#include <cfloat>

int tv_cuda_verify_attn_check_shape(const struct tv_verify_attn *a)
{
    bool dtypes = (a->dtype == TV_F32 || a->dtype == TV_BF16) &&
                  (a->out_dtype == TV_F32 || a->out_dtype == TV_BF16);
    bool page =
        a->page_size == 16 || a->page_size == 32 || a->page_size == 64 || a->page_size == 128;
    bool shape = a->batch >= 1 && a->batch <= 65535 && a->q_len >= 1 &&
                 a->q_len <= TV_TREE_NODES_MAX && a->heads >= 1 && a->heads <= TV_HEADS_MAX;
    bool dims =
        a->latent_dim >= 8 && a->latent_dim % 8 == 0 && a->rope_dim >= 0 && a->rope_dim % 2 == 0;
    bool cache = a->page_count >= 1 && a->page_count <= INT32_MAX && a->max_pages >= 1 &&
                 a->kv_len_max >= 1 &&
                 (int64_t)a->kv_len_max <= (int64_t)a->max_pages * a->page_size;
    bool splits = a->splits >= 0 && a->splits <= 64;
    return dtypes && page && shape && dims && cache && splits ? 0 : -EINVAL;
}

int tv_cuda_verify_attn_check(const struct tv_verify_attn *a)
{
    bool pointers = a->q != NULL && a->kv_pages != NULL && a->page_table != NULL &&
                    a->prefix_len != NULL && a->node_count != NULL && a->parents != NULL &&
                    a->out != NULL && a->lse != NULL;
    bool scale = a->softmax_scale > 0.0f && a->softmax_scale <= FLT_MAX;
    return pointers && scale ? tv_cuda_verify_attn_check_shape(a) : -EINVAL;
}

/* Whether a launch may load and store 16 bytes at a time: a fault of one that may not would take
 * the whole context along. */
static bool can_be_pieces(const struct tv_verify_attn *a, size_t workspace)
{
    uintptr_t all = (uintptr_t)a->q | (uintptr_t)a->kv_pages | (uintptr_t)a->out;
    if (workspace > 0) {
        all |= (uintptr_t)a->workspace;
    }
    return all % 16 == 0 && (workspace == 0 || a->workspace != NULL);
}

int tv_flash_prepare_kernel(const void *kernel, int32_t dynamic)
{
    return tv_flash_prepare_within(kernel, dynamic, TV_CUDA_SHARED_MAX);
}

int tv_flash_prepare_within(const void *kernel, int32_t dynamic, int32_t most)
{
    struct cudaFuncAttributes attributes;
    TV_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    if ((int64_t)attributes.sharedSizeBytes + dynamic > most || attributes.localSizeBytes != 0) {
        return -ENOTSUP;
    }
    TV_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic));
    return 0;
}

int tv_flash_launch(const void *kernel, dim3 grid, int32_t threads, int32_t shared,
                    cudaStream_t stream, void **args)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3((uint32_t)threads);
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return tv_cuda_errno(cudaLaunchKernelExC(&config, kernel, args));
}

/* Where the library has no kernel for sm_90a, there is only the portable one. */
#ifdef TV_CUDA_SM90
#define sm90_prepare tv_flash_sm90_prepare
#define sm90_launch  tv_flash_sm90_launch
#else
#define sm90_prepare tv_flash_bf16_prepare
#define sm90_launch  tv_flash_bf16_launch
#endif

int tv_cuda_verify_attn_prepare(const struct tv_cuda *cuda)
{
    int result = tv_flash_bf16_prepare();
    if (result == 0 && !cuda->portable) {
        result = sm90_prepare();
    }
    if (result == 0) {
        result = tv_flash_f32_prepare();
    }
    if (result == 0) {
        result = tv_flash_combine_prepare();
    }
    return result;
}

int tv_cuda_verify_attn_image(int32_t *ret_image)
{
    return tv_flash_combine_image(ret_image);
}

static struct tv_plan_device plan_device(const struct tv_kernels *k,
                                         const struct tv_verify_attn *args)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    bool hopper = args->dtype == TV_BF16 && !cuda->portable;
    struct tv_plan_device device;
    device.m_tiles_max = args->dtype == TV_BF16 ? TV_FLASH_BF16_M_TILES : TV_FLASH_F32_M_TILES;
    device.blocks = cuda->sm_count;
    device.splits = args->splits;
    /* A product of the Hopper kernel takes its time however few of its rows there are. */
    device.cost_least = hopper ? TV_PLAN_COST : TV_PLAN_COST / 2;
    device.cost_start = hopper ? 34 : 20;
    return device;
}

static struct tv_plan_bound plan_bound(const struct tv_kernels *k,
                                       const struct tv_verify_attn *args)
{
    return tv_plan_bound(plan_device(k, args), args->q_len, args->heads, args->kv_len_max);
}

size_t tv_cuda_verify_attn_workspace(const struct tv_kernels *k, const struct tv_verify_attn *args)
{
    if (tv_cuda_verify_attn_check_shape(args) < 0) {
        return 0;
    }
    struct tv_plan_bound bound = plan_bound(k, args);
    return (size_t)args->batch * (size_t)bound.partial_rows * (TV_MLA_LATENT + 1) * sizeof(float);
}

static int32_t log2_exact(int32_t power)
{
    int32_t result = 0;
    while (power > 1) {
        power >>= 1;
        result++;
    }
    return result;
}

int tv_cuda_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args)
{
    int result = tv_cuda_verify_attn_check(args);
    if (result < 0) {
        return result;
    }
    if (args->latent_dim != TV_MLA_LATENT || args->rope_dim != TV_MLA_ROPE) {
        return -ENOTSUP;
    }
    size_t workspace = tv_cuda_verify_attn_workspace(k, args);
    if (args->workspace_bytes < workspace) {
        return -ENOSPC;
    }
    if (!can_be_pieces(args, workspace)) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    struct tv_plan_bound bound = plan_bound(k, args);
    struct tv_flash_params p;
    memset(&p, 0, sizeof p);
    p.q = args->q;
    p.kv = args->kv_pages;
    p.page_table = args->page_table;
    p.prefix_len = args->prefix_len;
    p.node_count = args->node_count;
    p.parents = args->parents;
    p.row_start = args->row_start;
    p.out = args->out;
    p.lse = args->lse;
    p.partial_out = (float *)args->workspace;
    p.partial_rows = bound.partial_rows;
    p.partial_lse = p.partial_out + (int64_t)args->batch * bound.partial_rows * TV_MLA_LATENT;
    p.pool_rows = args->page_count * args->page_size;
    p.scale_log2 = (float)((double)args->softmax_scale * 1.4426950408889634);
    p.heads = args->heads;
    p.q_len = args->q_len;
    p.kv_len_max = args->kv_len_max;
    p.max_pages = args->max_pages;
    p.page_tiles_log2 = log2_exact(args->page_size / TV_PLAN_TOKENS);
    p.out_bf16 = args->out_dtype == TV_BF16;
    p.mask_words = (args->q_len + 31) / 32;
    p.device = plan_device(k, args);
    cudaStream_t stream = tv_cuda_stream(k);
    if (args->dtype == TV_F32) {
        result = tv_flash_f32_launch(&p, args->batch, bound.blocks, stream);
    } else {
        result =
            cuda->portable ? -ENOTSUP : sm90_launch(cuda, &p, args->batch, bound.blocks, stream);
        if (result == -ENOTSUP) { /* or the driver makes no map for it; any plan serves both */
            result = tv_flash_bf16_launch(cuda, &p, args->batch, bound.blocks, stream);
        }
    }
    if (result == 0 && bound.splits > 1) {
        result = tv_flash_combine_launch(&p, args->batch, bound.splits, stream);
    }
    return result;
}
