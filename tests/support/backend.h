/*
 * backend.h - opens any backend by name for tests: ref and cpu in process, cuda from its library.
 */
#ifndef TV_TESTS_BACKEND_H
#define TV_TESTS_BACKEND_H

#include "kernels/kernels.h"

/* `name` is ref, cpu or cuda; cuda is device 0 and the default stream. Prints the reason on
 * failure. The caller calls destroy; the library stays loaded. */
int tv_test_backend_open(const char *name, const struct tv_kernels_options *options,
                         struct tv_kernels **ret_kernels);

#endif
