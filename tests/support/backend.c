/*
 * backend.c - opens any backend by name for tests.
 */
#include "tests/support/backend.h"

#include <stdio.h>
#include <string.h>

int tv_test_backend_open(const char *name, const struct tv_kernels_options *options,
                         struct tv_kernels **ret_kernels)
{
    char reason[400] = "";
    struct tv_kernels_options asked = {.cpu_flags_mask = ~(uint64_t)0};
    if (options) {
        asked = *options;
    }
    asked.reason = reason;
    asked.reason_bytes = sizeof reason;
    int rc = tv_kernels_create(name, &asked, ret_kernels);
    if (rc != 0) {
        fprintf(stderr, "%s: %s\n", name, reason[0] ? reason : strerror(-rc));
    }
    return rc;
}
