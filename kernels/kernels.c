/*
 * kernels.c - builds the operation table of a backend.
 *
 * Owns the choice between them: the reference fills every slot, the cpu backend then replaces those
 * it has faster versions of; cuda comes from its library. Refuses unknown names instead of falling
 * back.
 */
#include "kernels.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu.h"
#include "cuda_load.h"
#include "ref/ref.h"

int tv_kernels_create(const char *name, const struct tv_kernels_options *options,
                      struct tv_kernels **ret_kernels)
{
    struct tv_kernels_options defaults = {.threads = 0, .cpu_flags_mask = ~(uint64_t)0};
    int is_cpu = strcmp(name, "cpu") == 0;
    if (strcmp(name, "cuda") == 0) {
        return tv_cuda_load(options ? options : &defaults, ret_kernels);
    }
    if (!is_cpu && strcmp(name, "ref") != 0) {
        return -ENOTSUP;
    }
    struct tv_kernels *k = calloc(1, sizeof *k);
    if (!k) {
        return -ENOMEM;
    }
    tv_ref_fill(k);
    if (is_cpu) {
        int rc = tv_cpu_override(k, options ? options : &defaults);
        if (rc != 0) {
            free(k);
            return rc;
        }
    }
    *ret_kernels = k;
    return 0;
}
