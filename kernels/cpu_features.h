/*
 * cpu_features.h - what this processor can do.
 *
 * Owns the feature bits and their detection. Refuses to choose: the cpu backend picks its variant
 * from the bits it is given, so that a mask can forbid some of them.
 */
#ifndef TV_KERNELS_CPU_FEATURES_H
#define TV_KERNELS_CPU_FEATURES_H

#include <stdint.h>

enum tv_cpu_flag {
    TV_CPU_AVX2 =
        1u << 0, /* AVX2 together with FMA and F16C, as the avx2 variant needs all three */
    TV_CPU_AVX512F = 1u << 1, /* AVX-512 Foundation, and the operating system saves its registers */
    /* AMX tiles with bf16 products and AVX-512BW beside them. The operating system must still be
     * asked before the first use (tv_cpu_amx_permit). */
    TV_CPU_AMX_BF16 = 1u << 2,
};

/* Bits of enum tv_cpu_flag that this processor and its kernel support. Any thread. */
uint64_t tv_cpu_features_detect(void);

#endif
