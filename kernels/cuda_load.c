/*
 * cuda_load.c - opens libtreeverify-cuda.so and creates its table.
 *
 * Owns where the library is looked for and the check that it speaks this program's ABI. Never
 * closes a library it has opened: the runtime inside registers handlers that run at exit.
 */
#include "cuda_load.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint32_t cuda_abi_fn(void);
typedef int cuda_create_fn(int device, void *stream, struct tv_kernels **ret_kernels);

static void reason_set(const struct tv_kernels_options *options, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

static void reason_set(const struct tv_kernels_options *options, const char *format, ...)
{
    va_list arguments;
    if (options->reason != NULL && options->reason_bytes > 0) {
        va_start(arguments, format);
        /* a cut sentence is still one */
        (void)vsnprintf(options->reason, options->reason_bytes, format, arguments);
        va_end(arguments);
    }
}

/* The open library, or NULL with the dynamic loader's own words kept for the reason. */
static void *library_open(const struct tv_kernels_options *options)
{
    const char *named = secure_getenv("TREEVERIFY_CUDA_LIB");
    const char *path = named != NULL ? named : TV_CUDA_LIBRARY;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL && named == NULL) {
        library = dlopen(TV_CUDA_LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == NULL) {
        const char *said = dlerror();
        reason_set(options, "%s", said != NULL ? said : "the library cannot be opened");
    }
    return library;
}

static const char *create_failure(int rc)
{
    switch (rc) {
    case -ENODEV:
        return "there is no such device, or no driver that this library can use";
    case -EBUSY:
        return "the device is another process's alone, or does not answer";
    case -ENOTSUP:
        return "the device is older than sm_90, or the library holds no code for it";
    default:
        return strerror(-rc);
    }
}

int tv_cuda_load(const struct tv_kernels_options *options, struct tv_kernels **ret_kernels)
{
    cuda_abi_fn *abi = NULL;
    cuda_create_fn *create = NULL;
    void *library = library_open(options);
    if (library == NULL) {
        return -ENOENT;
    }
    /* POSIX allows a function behind dlsym's pointer; ISO C has no cast for it. */
    void *symbol = dlsym(library, "tv_cuda_abi");
    memcpy(&abi, &symbol, sizeof abi);
    symbol = dlsym(library, "tv_cuda_create");
    memcpy(&create, &symbol, sizeof create);
    if (abi == NULL || create == NULL || abi() != TV_KERNELS_ABI) {
        reason_set(options, "the library's ABI is %u, this program's is %d",
                   abi != NULL ? abi() : 0u, TV_KERNELS_ABI);
        return -EPROTO;
    }
    int rc = create(options->device, NULL, ret_kernels);
    if (rc != 0) {
        reason_set(options, "device %d: %s", options->device, create_failure(rc));
    }
    return rc;
}
