/*
 * cuda_load.h - opening the CUDA backend's library at run time. Private to kernels/.
 */
#ifndef TV_KERNELS_CUDA_LOAD_H
#define TV_KERNELS_CUDA_LOAD_H

#include "kernels.h"

/*
 * Open libtreeverify-cuda.so (the file that the environment names in TREEVERIFY_CUDA_LIB; else the
 * installed one; else whatever the dynamic loader finds) and create its table for a device.
 * Failures leave a sentence in options->reason. -ENOENT: no such library; -EPROTO: one of another
 * ABI; else what tv_cuda_create says.
 */
int tv_cuda_load(const struct tv_kernels_options *options, struct tv_kernels **ret_kernels);

#endif
