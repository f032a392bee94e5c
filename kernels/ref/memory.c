/*
 * memory.c - "device" memory of the host backends: the heap.
 */
#include "ref.h"

#include <errno.h>
#include <stdlib.h>

void *tv_ref_alloc(struct tv_kernels *k, size_t bytes)
{
    (void)k;
    if (bytes > SIZE_MAX - 64) {
        return NULL;
    }
    /* aligned_alloc wants a multiple of the alignment, and zero bytes must still be a pointer. */
    size_t rounded = (bytes + 63) / 64 * 64;
    return aligned_alloc(64, rounded ? rounded : 64);
}

void tv_ref_free(struct tv_kernels *k, void *device)
{
    (void)k;
    free(device);
}

int tv_ref_upload(struct tv_kernels *k, void *device, const void *host, size_t bytes)
{
    (void)k;
    if (bytes > 0) {
        memcpy(device, host, bytes);
    }
    return 0;
}

int tv_ref_download(struct tv_kernels *k, void *host, const void *device, size_t bytes)
{
    (void)k;
    if (bytes > 0) {
        memcpy(host, device, bytes);
    }
    return 0;
}

int tv_ref_fill_bytes(struct tv_kernels *k, void *device, int byte, size_t bytes)
{
    (void)k;
    if (bytes > 0) {
        memset(device, byte, bytes);
    }
    return 0;
}

int tv_ref_sync(struct tv_kernels *k)
{
    (void)k;
    return 0;
}

int tv_ref_copy(struct tv_kernels *k, void *to, size_t to_stride, const void *from,
                size_t from_stride, size_t row_bytes, int32_t rows)
{
    (void)k;
    if (rows < 0 || to_stride < row_bytes || from_stride < row_bytes) {
        return -EINVAL;
    }
    for (int32_t r = 0; row_bytes > 0 && r < rows; r++) {
        memcpy((char *)to + (size_t)r * to_stride, (const char *)from + (size_t)r * from_stride,
               row_bytes);
    }
    return 0;
}
