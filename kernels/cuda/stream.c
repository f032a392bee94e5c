/*
 * stream.c - what is done with streams as such: copies inside the device, time on it, and the table
 * of a second thread.
 *
 * Streams have two priorities: recordings are captured with the higher one, all else has the lower.
 */
#include <stdlib.h>

#include "ops.h"

/* One call a row: the runtime may refuse rows that are 2 GiB apart and more (cudaDeviceProp's
 * memPitch), as those of two layers of a large pool are. */
static int rows_copy(struct tv_kernels *k, char *to, size_t to_stride, const char *from,
                     size_t from_stride, size_t row_bytes, int32_t rows)
{
    for (size_t row = 0; row < (size_t)rows; row++) {
        TV_CUDA_CHECK(cudaMemcpyAsync(to + row * to_stride, from + row * from_stride, row_bytes,
                                      cudaMemcpyDeviceToDevice, tv_cuda_stream(k)));
    }
    return 0;
}

int tv_cuda_copy(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                 size_t from_stride, size_t row_bytes, int32_t rows)
{
    if (rows < 0 || to_stride < row_bytes || from_stride < row_bytes) {
        return -EINVAL;
    }
    if (rows == 0 || row_bytes == 0) {
        return 0;
    }
    TV_CUDA_ENTER(k);
    int rc =
        tv_cuda_errno(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, (size_t)rows,
                                        cudaMemcpyDeviceToDevice, tv_cuda_stream(k)));
    int far_apart = to_stride > INT32_MAX || from_stride > INT32_MAX;
    if (rc == 0 || rc == -ENOTRECOVERABLE || !far_apart) {
        return rc;
    }
    return rows_copy(k, to, to_stride, from, from_stride, row_bytes, rows);
}

int tv_cuda_timer(struct tv_kernels *k, int end)
{
    struct tv_cuda *cuda = k->impl;
    TV_CUDA_ENTER(k);
    for (int i = 0; i < 2; i++) {
        if (cuda->moments[i] == NULL) {
            TV_CUDA_CHECK(cudaEventCreate(&cuda->moments[i]));
        }
    }
    TV_CUDA_CHECK(cudaEventRecord(cuda->moments[end != 0], tv_cuda_stream(k)));
    return 0;
}

int tv_cuda_timer_read(struct tv_kernels *k, double *ret_us)
{
    const struct tv_cuda *cuda = k->impl;
    float ms = 0.0f;
    if (cuda->moments[0] == NULL || cuda->moments[1] == NULL) {
        return -EINVAL;
    }
    TV_CUDA_ENTER(k);
    TV_CUDA_CHECK(cudaEventSynchronize(cuda->moments[1]));
    TV_CUDA_CHECK(cudaEventElapsedTime(&ms, cuda->moments[0], cuda->moments[1]));
    *ret_us = 1000.0 * (double)ms;
    return 0;
}

int tv_cuda_side(struct tv_kernels *k, struct tv_kernels **ret_side)
{
    const struct tv_cuda *main_cuda = k->impl;
    int result = -ENOMEM;
    struct tv_kernels *side = calloc(1, sizeof *side);
    struct tv_cuda *cuda = calloc(1, sizeof *cuda);
    if (side == NULL || cuda == NULL) {
        goto fail;
    }
    *side = *k;
    *cuda = *main_cuda;
    cuda->allocations = 0;
    cuda->record_stream = NULL;
    cuda->recording = 0;
    cuda->own_stream = NULL;
    cuda->scratch = NULL; /* the other stream's */
    cuda->moments[0] = cuda->moments[1] = NULL;
    cuda->layer_words = NULL; /* two launches whose blocks wait for each other would never end */
    /* does not wait for the default stream, nor that for it */
    result = tv_cuda_enter(k);
    if (result == 0) {
        result = tv_cuda_errno(cudaStreamCreateWithFlags(&cuda->own_stream, cudaStreamNonBlocking));
    }
    if (result < 0) {
        goto fail;
    }
    side->impl = cuda;
    side->layer = NULL;
    side->variant = cuda->variant;
    side->stream = cuda->own_stream;
    *ret_side = side;
    return 0;
fail:
    free(cuda);
    free(side);
    return result;
}

void tv_cuda_stream_finish(struct tv_cuda *cuda)
{
    /* nobody is told of what fails here */
    if (cuda->record_stream != NULL) {
        (void)tv_cuda_errno(cudaStreamDestroy(cuda->record_stream));
    }
    if (cuda->own_stream != NULL) {
        (void)tv_cuda_errno(cudaStreamDestroy(cuda->own_stream));
    }
    for (int i = 0; i < 2; i++) {
        if (cuda->moments[i] != NULL) {
            (void)tv_cuda_errno(cudaEventDestroy(cuda->moments[i]));
        }
    }
}
