/*
 * planted_cuda.c - a CUDA library that cannot be used, for tests: TV_PLANT_CUDA says why: "abi" of
 * another program, or the negative errno that its creation gives.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

#pragma GCC visibility push(default)
uint32_t tv_cuda_abi(void);
int tv_cuda_create(int device, void *stream, struct tv_kernels **ret_kernels);
#pragma GCC visibility pop

static const char *why(void)
{
    const char *text = getenv("TV_PLANT_CUDA");
    return text != NULL ? text : "";
}

uint32_t tv_cuda_abi(void)
{
    return strcmp(why(), "abi") == 0 ? TV_KERNELS_ABI + 1 : TV_KERNELS_ABI;
}

int tv_cuda_create(int device, void *stream, struct tv_kernels **ret_kernels)
{
    (void)device; /* there is none */
    (void)stream;
    *ret_kernels = NULL;
    return (int)strtol(why(), NULL, 10);
}
