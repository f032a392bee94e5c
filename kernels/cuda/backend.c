/*
 * backend.c - creates the CUDA backend's table: device choice, memory operations, error mapping.
 *
 * Launches nothing itself; each operation's launcher is in the file named like it.
 */
#include "cuda.h"

#include <stdio.h>
#include <stdlib.h>

#include "internal.h"
#include "linear_sm90.h"
#include "ops.h"

/* Rows cut for the Hopper products: 1,792 of 6,144 elements in three pieces. */
#define SCRATCH_BYTES ((size_t)64 << 20)

int tv_cuda_errno(cudaError_t error)
{
    if (error == cudaSuccess) {
        return 0;
    }
    /* Reading the last error clears it, so that the next call is judged on its own. */
    (void)cudaGetLastError();
    switch (error) {
    case cudaErrorMemoryAllocation:
        return -ENOMEM;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
        return -EINVAL;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady: /* fabric manager or persistence daemon are still to come */
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorStubLibrary:
        return -ENODEV;
    case cudaErrorDevicesUnavailable: /* another process has it for itself */
        return -EBUSY;
    /* The context is in an unknown state, and so is every result of it: only a new process helps.
     */
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorExternalDevice:
    case cudaErrorMpsClientTerminated:
    case cudaErrorUnknown:
        return -ENOTRECOVERABLE;
#if CUDART_VERSION >= 13000 /* older toolkits do not know them */
    case cudaErrorContained:
    case cudaErrorTensorMemoryLeak:
        return -ENOTRECOVERABLE;
#endif
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNotSupported:
    case cudaErrorCooperativeLaunchTooLarge: /* fewer multiprocessors than the device has */
        return -ENOTSUP;
    default:
        return -EIO;
    }
}

int tv_cuda_enter(const struct tv_kernels *k)
{
    const struct tv_cuda *cuda = k->impl;
    int device = -1;
    TV_CUDA_CHECK(cudaGetDevice(&device));
    if (device != cuda->device) {
        TV_CUDA_CHECK(cudaSetDevice(cuda->device));
    }
    return 0;
}

static void *backend_alloc(struct tv_kernels *k, size_t bytes)
{
    void *device = NULL;
    if (tv_cuda_enter(k) < 0 || tv_cuda_errno(cudaMalloc(&device, bytes == 0 ? 1 : bytes)) < 0) {
        return NULL;
    }
    tv_cuda_allocation_count(k->impl);
    return device;
}

static void backend_free(struct tv_kernels *k, void *device)
{
    /* Nothing can be done about a failure: a fault shows again at the next checked call. */
    (void)tv_cuda_enter(k);
    (void)tv_cuda_errno(cudaFree(device));
}

static int backend_upload(struct tv_kernels *k, void *device, const void *host, size_t bytes)
{
    TV_CUDA_ENTER(k);
    TV_CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, tv_cuda_stream(k)));
    return 0;
}

static int backend_download(struct tv_kernels *k, void *host, const void *device, size_t bytes)
{
    TV_CUDA_ENTER(k);
    TV_CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, tv_cuda_stream(k)));
    return 0;
}

static int backend_fill(struct tv_kernels *k, void *device, int byte, size_t bytes)
{
    TV_CUDA_ENTER(k);
    TV_CUDA_CHECK(cudaMemsetAsync(device, byte, bytes, tv_cuda_stream(k)));
    return 0;
}

static int backend_sync(struct tv_kernels *k)
{
    TV_CUDA_ENTER(k);
    TV_CUDA_CHECK(cudaStreamSynchronize(tv_cuda_stream(k)));
    return 0;
}

static int backend_device(const struct tv_kernels *k, struct tv_device *ret_device)
{
    const struct tv_cuda *cuda = k->impl;
    *ret_device = cuda->facts;
    return 0;
}

static int backend_device_memory(const struct tv_kernels *k, size_t *ret_free, size_t *ret_total)
{
    TV_CUDA_ENTER(k); /* what is told is the calling thread's device */
    TV_CUDA_CHECK(cudaMemGetInfo(ret_free, ret_total));
    return 0;
}

static uint64_t backend_allocations(const struct tv_kernels *k)
{
    const struct tv_cuda *cuda = k->impl;
    return __atomic_load_n(&cuda->allocations, __ATOMIC_RELAXED); /* as where it is counted */
}

static void backend_destroy(struct tv_kernels *k)
{
    if (k != NULL) {
        struct tv_cuda *cuda = k->impl;
        (void)tv_cuda_enter(k); /* nobody is told of what fails here */
        tv_cuda_stream_finish(cuda);
        backend_free(k, cuda->scratch);
        tv_cuda_layer_finish(cuda);
        free(cuda);
        free(k);
    }
}

/* Read what the kernels depend on, and the name for logs, into *cuda. */
static int device_describe(int device, struct tv_cuda *cuda)
{
    struct cudaDeviceProp prop;
    TV_CUDA_CHECK(cudaSetDevice(device));
    TV_CUDA_CHECK(cudaGetDeviceProperties(&prop, device));
    if (prop.major < 9 || prop.sharedMemPerBlockOptin < TV_CUDA_SHARED_MAX) {
        return -ENOTSUP;
    }
    enum cudaDriverEntryPointQueryResult found;
    TV_CUDA_CHECK(cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &cuda->tensor_map_encode, 12000, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess) {
        return -ENOTSUP;
    }
    cuda->device = device;
    cuda->sm_count = prop.multiProcessorCount;
    (void)snprintf(cuda->variant, sizeof cuda->variant, "%.120s sm_%d%d", prop.name, prop.major,
                   prop.minor);
    cuda->facts =
        (struct tv_device){.major = prop.major, .minor = prop.minor, .images = TV_CUDA_IMAGES};
    TV_CUDA_CHECK(cudaDriverGetVersion(&cuda->facts.driver));
    TV_CUDA_CHECK(cudaRuntimeGetVersion(&cuda->facts.toolkit));
    /* The kernel that the figures of other devices are told from can be had where a faster one is.
     */
    const char *portable = getenv("TREEVERIFY_CUDA_PORTABLE");
    cuda->portable = prop.major != 9 || prop.minor != 0 || (portable != NULL && *portable == '1');
    int rc = tv_cuda_verify_attn_prepare(cuda);
    if (rc == 0) {
        rc = tv_cuda_verify_attn_image(&cuda->facts.image);
    }
    if (rc == 0) {
        rc = tv_cuda_linear_prepare(cuda);
    }
    if (rc == 0) {
        rc = tv_cuda_experts_prepare(cuda);
    }
    if (rc == 0) {
        rc = tv_cuda_moe_prepare();
    }
    if (rc == 0) {
        rc = tv_cuda_query_prepare();
    }
    if (rc == 0) {
        rc = tv_cuda_prefill_attn_prepare(cuda);
    }
    return rc < 0 ? rc : tv_cuda_layer_prepare(cuda); /* last: it takes memory */
}

static void operations_fill(struct tv_kernels *k)
{
    k->embed = tv_cuda_embed;
    k->rmsnorm = tv_cuda_rmsnorm;
    k->linear = tv_cuda_linear;
    k->linear_pair = tv_cuda_linear_pair;
    k->query = tv_cuda_query;
    k->moe = tv_cuda_moe;
    k->moe_workspace = tv_cuda_moe_workspace;
    k->layer = tv_cuda_layer;
    k->rope = tv_cuda_rope;
    k->latent_write = tv_cuda_latent_write;
    k->swiglu = tv_cuda_swiglu;
    k->to_bf16 = tv_cuda_to_bf16;
    k->router = tv_cuda_router;
    k->experts = tv_cuda_experts;
    k->experts_workspace = tv_cuda_experts_workspace;
    k->prefill_attn = tv_cuda_prefill_attn;
    k->prefill_attn_workspace = tv_cuda_prefill_attn_workspace;
    k->kv_move = tv_cuda_kv_move;
    k->draw = tv_cuda_draw;
    k->draw_workspace = tv_cuda_draw_workspace;
    k->topk = tv_cuda_topk;
    k->synthesize = tv_cuda_synthesize;
    k->record_begin = tv_cuda_record_begin;
    k->record_end = tv_cuda_record_end;
    k->replay = tv_cuda_replay;
    k->recording_free = tv_cuda_recording_free;
    k->copy = tv_cuda_copy;
    k->timer = tv_cuda_timer;
    k->timer_read = tv_cuda_timer_read;
    k->side = tv_cuda_side;
}

uint32_t tv_cuda_abi(void)
{
    return TV_KERNELS_ABI;
}

int tv_cuda_create(int device, void *stream, struct tv_kernels **ret_kernels)
{
    int result = -ENOMEM;
    struct tv_kernels *k = calloc(1, sizeof *k);
    struct tv_cuda *cuda = calloc(1, sizeof *cuda);
    if (k == NULL || cuda == NULL) {
        goto out;
    }
    result = device_describe(device, cuda);
    if (result == 0 && TV_LINEAR_SM90 && !cuda->portable) {
        cuda->scratch_bytes = SCRATCH_BYTES;
        result = tv_cuda_errno(cudaMalloc(&cuda->scratch, cuda->scratch_bytes));
        if (result == 0) {
            tv_cuda_allocation_count(cuda);
        }
    }
    if (result < 0) {
        goto out;
    }
    k->abi = TV_KERNELS_ABI;
    k->name = "cuda";
    k->variant = cuda->variant;
    k->stream = stream;
    k->impl = cuda;
    k->alloc = backend_alloc;
    k->free = backend_free;
    k->upload = backend_upload;
    k->download = backend_download;
    k->fill = backend_fill;
    k->sync = backend_sync;
    operations_fill(k);
    k->verify_attn = tv_cuda_verify_attn;
    k->verify_attn_workspace = tv_cuda_verify_attn_workspace;
    k->verify_attn_naive = tv_cuda_verify_attn_naive;
    k->verify_attn_naive_workspace = tv_cuda_verify_attn_naive_workspace;
    k->device = backend_device;
    k->device_memory = backend_device_memory;
    k->allocations = backend_allocations;
    k->destroy = backend_destroy;
    *ret_kernels = k;
    k = NULL;
    cuda = NULL;
out:
    if (cuda != NULL) {
        tv_cuda_layer_finish(cuda);
    }
    free(cuda);
    free(k);
    return result;
}
