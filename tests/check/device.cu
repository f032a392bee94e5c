/*
 * device.cu - graph timing and the measured ceilings of a CUDA device, for checkkern --bench.
 *
 * Owns its stream and its buffers; refuses to know any operation.
 */
#include "device.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

#include "../../kernels/cuda/internal.h"

#define MMA_FLOP     (2.0 * 16 * 8 * 16)
#define CHAINS       8 /* independent sums of a warp: more than the latency of an mma covers */
#define STEPS        4096
#define WARPS        8
#define BLOCKS_MAX   4 /* of a multiprocessor */
#define COPY_THREADS 512
#define COPY_PIECES  4 /* of 16 bytes, in flight in a thread */
#define WARM_UP      3
#define REPLAYS_MAX  30
#define COPY_BYTES   ((size_t)1 << 30)

/* Nothing but mma.sync on registers; the sums are stored only where they cannot be. */
static __global__ void mma_rate(float *never)
{
    float sum[CHAINS][4] = {};
    uint32_t a = 0x3f803f80u, b = 0x3f803f80u; /* ones */
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) {
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"
                         : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
                         : "r"(a), "r"(b));
        }
    }
    if (never != NULL) {
        for (int i = 0; i < CHAINS; i++) {
            never[threadIdx.x] += sum[i][0] + sum[i][1] + sum[i][2] + sum[i][3];
        }
    }
}

static __global__ void copy_rate(uint4 *to, const uint4 *from)
{
    size_t first = (size_t)blockIdx.x * COPY_THREADS * COPY_PIECES + threadIdx.x;
    uint4 piece[COPY_PIECES];
#pragma unroll
    for (int i = 0; i < COPY_PIECES; i++) {
        piece[i] = from[first + i * COPY_THREADS];
    }
#pragma unroll
    for (int i = 0; i < COPY_PIECES; i++) {
        to[first + i * COPY_THREADS] = piece[i];
    }
}

/* What the two ceilings launch. */
struct work {
    cudaStream_t stream;
    int blocks;
    void *from, *to;
};

static int launch_mma(void *what)
{
    const struct work *work = (const struct work *)what;
    mma_rate<<<work->blocks, WARPS * 32, 0, work->stream>>>(NULL);
    return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

static int launch_copy(void *what)
{
    const struct work *work = (const struct work *)what;
    copy_rate<<<work->blocks, COPY_THREADS, 0, work->stream>>>((uint4 *)work->to,
                                                               (const uint4 *)work->from);
    return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

extern "C" int device_stream_create(void **ret_stream)
{
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
        return -EIO;
    }
    *ret_stream = stream;
    return 0;
}

extern "C" void device_stream_destroy(void *stream)
{
    (void)cudaStreamDestroy((cudaStream_t)stream); /* nothing of it is used again */
}

/* `calls` launches as one graph. */
static cudaGraphExec_t capture(cudaStream_t stream, device_launch *launch, void *what, int calls)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    int failed = 0;
    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        return NULL;
    }
    for (int i = 0; i < calls && !failed; i++) {
        failed = launch(what);
    }
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess) {
        return NULL;
    }
    if (failed || cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) {
        exec = NULL;
    }
    (void)cudaGraphDestroy(graph); /* the instance is a copy */
    return exec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

extern "C" int device_time(void *stream_handle, device_launch *launch, void *what, int calls,
                           int replays, double *ret_seconds)
{
    cudaStream_t stream = (cudaStream_t)stream_handle;
    cudaEvent_t begin = NULL, end = NULL;
    double times[REPLAYS_MAX];
    int result = -EIO;
    replays = replays < REPLAYS_MAX ? replays : REPLAYS_MAX;
    cudaGraphExec_t exec = capture(stream, launch, what, calls);
    if (exec == NULL || cudaEventCreate(&begin) != cudaSuccess ||
        cudaEventCreate(&end) != cudaSuccess) {
        goto out;
    }
    for (int i = -WARM_UP; i < replays; i++) {
        float ms = 0.0f;
        if (cudaEventRecord(begin, stream) != cudaSuccess ||
            cudaGraphLaunch(exec, stream) != cudaSuccess ||
            cudaEventRecord(end, stream) != cudaSuccess ||
            cudaEventSynchronize(end) != cudaSuccess ||
            cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) {
            goto out;
        }
        if (i >= 0) {
            times[i] = 1e-3 * (double)ms / calls;
        }
    }
    qsort(times, (size_t)replays, sizeof *times, ascending);
    *ret_seconds = times[replays / 2];
    result = 0;
out:
    if (exec != NULL) {
        (void)cudaGraphExecDestroy(exec);
    }
    if (begin != NULL) {
        (void)cudaEventDestroy(begin);
    }
    if (end != NULL) {
        (void)cudaEventDestroy(end);
    }
    (void)cudaGetLastError(); /* a failure is reported once */
    return result;
}

extern "C" int device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        (void)cudaGetLastError(); /* no driver: no devices */
        return 0;
    }
    return count;
}

extern "C" void device_use(int device)
{
    (void)cudaSetDevice(device); /* the backend could */
}

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_fn *encode_real;
static uint64_t refused;

/* The portable kernel of verify attention copies all parts of a row at a time; nothing stands in
 * for it. */
static CUresult encode_refusing(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *at, const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    if (rank == 3 && box[2] > 1) {
        return encode_real(map, type, rank, at, dims, strides, box, steps, interleave, swizzle,
                           promotion, fill);
    }
    refused++;
    return CUDA_ERROR_INVALID_VALUE;
}

extern "C" void device_maps_refuse(struct tv_kernels *k)
{
    struct tv_cuda *cuda = (struct tv_cuda *)k->impl;
    encode_real = (encode_fn *)cuda->tensor_map_encode;
    cuda->tensor_map_encode = (void *)encode_refusing;
}

extern "C" uint64_t device_maps_refused(void)
{
    return refused;
}

extern "C" int device_measure_ceilings(void *stream, struct device_ceilings *ret_ceilings)
{
    struct work work = {(cudaStream_t)stream, 0, NULL, NULL};
    double mma = 0.0, copy = 0.0, best = 0.0;
    int device = 0, processors = 0, result = -EIO;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess ||
        cudaMalloc(&work.from, COPY_BYTES) != cudaSuccess ||
        cudaMalloc(&work.to, COPY_BYTES) != cudaSuccess) {
        goto out;
    }
    for (int blocks = 1; blocks <= BLOCKS_MAX; blocks *= 2) {
        work.blocks = processors * blocks;
        if (device_time(stream, launch_mma, &work, 4, REPLAYS_MAX, &mma) != 0) {
            goto out;
        }
        double flops = MMA_FLOP * CHAINS * STEPS * WARPS * work.blocks / mma;
        best = flops > best ? flops : best;
    }
    work.blocks = (int)(COPY_BYTES / (sizeof(uint4) * COPY_THREADS * COPY_PIECES));
    if (device_time(stream, launch_copy, &work, 4, REPLAYS_MAX, &copy) != 0) {
        goto out;
    }
    ret_ceilings->flops = best;
    ret_ceilings->bytes = 2.0 * COPY_BYTES / copy;
    result = 0;
out:
    (void)cudaFree(work.from);
    (void)cudaFree(work.to);
    return result;
}
