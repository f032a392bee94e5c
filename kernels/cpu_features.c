/*
 * cpu_features.c - feature detection through the compiler's processor model.
 *
 * __builtin_cpu_supports checks XGETBV too, so a bit here means that the registers are usable and
 * not merely present.
 */
#include "cpu_features.h"

uint64_t tv_cpu_features_detect(void)
{
    uint64_t flags = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    /* F16C has no name in this builtin for every supported compiler; each processor with AVX2 and
     * FMA has it (AMD since Piledriver, Intel since Ivy Bridge). */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        flags |= TV_CPU_AVX2;
    }
    if (__builtin_cpu_supports("avx512f")) {
        flags |= TV_CPU_AVX512F;
    }
#endif
    return flags;
}
