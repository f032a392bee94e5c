/*
 * cuda.h - entry point of libtreeverify-cuda.so, the CUDA backend of the operation table.
 *
 * Plain C. Needs the driver alone: the runtime is linked statically. The library keeps no state
 * outside the table it creates, allocates only in alloc and when a table is created, and
 * synchronises only in upload, download and sync; every other operation is a sequence of launches
 * on the caller's stream and may be captured into a graph.
 */
#ifndef TV_KERNELS_CUDA_CUDA_H
#define TV_KERNELS_CUDA_CUDA_H

#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The TV_KERNELS_ABI that the library was built with: asked before anything else. */
__attribute__((visibility("default"))) uint32_t tv_cuda_abi(void);

/*
 * Create the backend on `device` (CUDA ordinal), launching on `stream` (a cudaStream_t of that
 * device, NULL for the legacy default stream); the stream stays the caller's. Creating it, and
 * every call through it that asks the device for anything, makes the device the calling thread's.
 * The caller owns *ret_kernels and calls its destroy. -ENODEV: no such device, or no driver.
 * -ENOTSUP: the device is older than sm_90, or offers less shared memory than the kernels were
 * built for. -ENOMEM: no memory. On Hopper, TREEVERIFY_CUDA_PORTABLE=1 in the environment leaves
 * out the kernels that only Hopper has, for figures and checks of those that run everywhere.
 */
__attribute__((visibility("default"))) int tv_cuda_create(int device, void *stream,
                                                          struct tv_kernels **ret_kernels);

#ifdef __cplusplus
}
#endif

#endif
