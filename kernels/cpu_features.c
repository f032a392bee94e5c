/*
 * cpu_features.c - feature detection through the compiler's processor model.
 *
 * __builtin_cpu_supports checks XGETBV too, so a bit here means that the registers are usable and
 * not merely present.
 */
#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* The builtin does not know AMX in every supported compiler: CPUID leaf 7 says what the processor
 * has, XCR0 whether the operating system saves tile configuration (bit 17) and data (bit 18). */
static int has_amx_bf16(void)
{
    enum { OSXSAVE = 1 << 27, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, XCR0_TILES = 3 << 17 };
    unsigned eax, ebx, ecx, edx, low, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & OSXSAVE) ||
        !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & AMX_BF16) ||
        !(edx & AMX_TILE)) {
        return 0;
    }
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & XCR0_TILES) == XCR0_TILES;
}
#endif

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
        if (__builtin_cpu_supports("avx512bw") && has_amx_bf16()) {
            flags |= TV_CPU_AMX_BF16;
        }
    }
#endif
    return flags;
}
