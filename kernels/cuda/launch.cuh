/*
 * launch.cuh - launches that may begin while the launch before them on the stream still runs.
 *
 * Owns the attribute. A kernel that is launched so calls ptx_wait_dependence before it touches what
 * another launch reads or writes; what no launch writes (weights) it may read ahead of that. Every
 * block waits, or none but blocks that do nothing: the end of a launch then means the end of all
 * before it. Where each block of the launch before waits first and then lets this one begin, all
 * that precedes that launch has ended, its writes in L2, when this one begins: behind
 * ptx_fence_device, or by ptx_load_device, it may read what those wrote, and wait later, for what
 * the launch before writes, or at its end. Behind a launch that lets the next one begin ahead of
 * its own wait nothing is known to have ended: whoever comes next reads ahead only what no launch
 * writes. The combine of verify attention is such a launch. What follows it may be any, and by its
 * wait has all: each of the combine's blocks waits for the flash kernel, each of whose blocks
 * waited for what was before.
 */
#ifndef TV_KERNELS_CUDA_LAUNCH_CUH
#define TV_KERNELS_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include "internal.h"

template <typename... K, typename... V>
static int launch(void (*kernel)(K...), dim3 grid, uint32_t threads, size_t shared,
                  cudaStream_t stream, const V &...values)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return tv_cuda_errno(cudaLaunchKernelEx(&config, kernel, K(values)...));
}

#endif
