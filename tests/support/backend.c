/*
 * backend.c - opens any backend by name for tests.
 */
#include "tests/support/backend.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int cuda_create_fn(int device, void *stream, struct tv_kernels **ret_kernels);

static int open_cuda(struct tv_kernels **ret_kernels)
{
    const char *path = getenv("TREEVERIFY_CUDA_LIB");
    void *library = dlopen(path ? path : "libtreeverify-cuda.so", RTLD_NOW | RTLD_LOCAL);
    cuda_create_fn *create = NULL;
    if (!library) {
        fprintf(stderr, "cuda: %s\n", dlerror());
        return -ENOENT;
    }
    void *symbol = dlsym(library, "tv_cuda_create");
    if (!symbol) {
        fprintf(stderr, "cuda: the library has no tv_cuda_create\n");
        return -ENOTSUP;
    }
    memcpy(&create, &symbol, sizeof create); /* POSIX allows it, ISO C has no cast for it */
    int rc = create(0, NULL, ret_kernels);
    if (rc != 0) {
        fprintf(stderr, "cuda: device 0: %s\n", strerror(-rc));
        return rc;
    }
    if ((*ret_kernels)->abi != TV_KERNELS_ABI) {
        fprintf(stderr, "cuda: ABI %u, this program has %d\n", (*ret_kernels)->abi, TV_KERNELS_ABI);
        return -ENOTSUP;
    }
    return 0;
}

int tv_test_backend_open(const char *name, const struct tv_kernels_options *options,
                         struct tv_kernels **ret_kernels)
{
    if (strcmp(name, "cuda") == 0) {
        return open_cuda(ret_kernels);
    }
    int rc = tv_kernels_create(name, options, ret_kernels);
    if (rc != 0) {
        fprintf(stderr, "%s: %s\n", name, strerror(-rc));
    }
    return rc;
}
