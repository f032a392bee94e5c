/*
 * internal.h - what the files of the CUDA backend share: the device handle, the check macro, and
 * the launchers. Private to kernels/cuda.
 *
 * Errors of the runtime become errno values in tv_cuda_errno alone.
 */
#ifndef TV_KERNELS_CUDA_INTERNAL_H
#define TV_KERNELS_CUDA_INTERNAL_H

#include <cuda_runtime_api.h>
#include <errno.h>

#include "../args.h"
#include "../kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Shared memory of one block that every promised device offers (sm_120: 99 KB). */
#define TV_CUDA_SHARED_MAX 101376

/* What `impl` of the table points to. */
struct tv_cuda {
    int device;
    int sm_count;
    void *tensor_map_encode; /* the driver's cuTensorMapEncodeTiled */
    int portable;            /* 1: no kernel for one architecture alone is used */
    char variant[160];
    struct tv_device facts;
    uint64_t allocations;       /* read by any thread, written by the one that owns the device */
    cudaStream_t record_stream; /* made by the first recording */
    int recording;              /* 1 between record_begin and record_end */
    cudaStream_t own_stream;    /* a side table's; else NULL */
    cudaEvent_t moments[2];     /* of the timer; made by its first use */
    void *scratch;              /* of one launch to the next; NULL: where nothing needs it */
    size_t scratch_bytes;
    uint32_t *layer_words; /* device: where the blocks of a launch meet; NULL: no such launch */
    int layer_blocks;      /* of such a launch: as many as run at a time */
};

/* Device memory was taken; kernels.h, allocations. */
static inline void tv_cuda_allocation_count(struct tv_cuda *cuda)
{
    /* relaxed: a number that is only looked at */
    (void)__atomic_add_fetch(&cuda->allocations, 1, __ATOMIC_RELAXED);
}

/* Make the table's device the calling thread's: every entry that asks the runtime for anything does
 * so first, since threads begin with device 0. 0 or a negative errno. */
int tv_cuda_enter(const struct tv_kernels *k);

/* The errno of a runtime error; clears the runtime's sticky error. 0 for cudaSuccess. */
int tv_cuda_errno(cudaError_t error);

/* Evaluates a runtime call; returns from the enclosing function with its errno on failure. */
#define TV_CUDA_CHECK(call)                                                                        \
    do {                                                                                           \
        int check_result_ = tv_cuda_errno(call);                                                   \
        if (check_result_ < 0) {                                                                   \
            return check_result_;                                                                  \
        }                                                                                          \
    } while (0)

/* Enters, or returns from the enclosing function. */
#define TV_CUDA_ENTER(k)                                                                           \
    do {                                                                                           \
        int enter_result_ = tv_cuda_enter(k);                                                      \
        if (enter_result_ < 0) {                                                                   \
            return enter_result_;                                                                  \
        }                                                                                          \
    } while (0)

/* Where an operation is launched: the caller's stream, or the recorder's while it records. */
static inline cudaStream_t tv_cuda_stream(const struct tv_kernels *k)
{
    const struct tv_cuda *cuda = (const struct tv_cuda *)k->impl;
    return cuda->recording ? cuda->record_stream : (cudaStream_t)k->stream;
}

/* Raise the dynamic shared memory limits of every kernel and check that the compiled kernels fit
 * TV_CUDA_SHARED_MAX and keep nothing in local memory. -ENOTSUP when one does not. */
int tv_cuda_verify_attn_prepare(const struct tv_cuda *cuda);

/* The machine code that this device runs: 10 * major + minor. */
int tv_cuda_verify_attn_image(int32_t *ret_image);

/* Table entries; contracts in kernels.h. */
int tv_cuda_verify_attn(struct tv_kernels *k, const struct tv_verify_attn *args);
size_t tv_cuda_verify_attn_workspace(const struct tv_kernels *k, const struct tv_verify_attn *args);
int tv_cuda_verify_attn_naive(struct tv_kernels *k, const struct tv_verify_attn *args);
size_t tv_cuda_verify_attn_naive_workspace(const struct tv_kernels *k,
                                           const struct tv_verify_attn *args);

/* verify_attn_naive_f32.cu: the same with f32 sums of bf16 rows, so many blocks at a time; each has
 * as much of the workspace as a block of the other. -ENOTSUP: not for these arguments. */
int tv_cuda_verify_attn_naive_f32(const struct tv_verify_attn *args, int64_t blocks,
                                  cudaStream_t stream);

/* 0, or -EINVAL when the arguments are outside the documented ranges; a size query needs the shape
 * alone. */
int tv_cuda_verify_attn_check_shape(const struct tv_verify_attn *args);
int tv_cuda_verify_attn_check(const struct tv_verify_attn *args);

#ifdef __cplusplus
}
#endif

#endif
