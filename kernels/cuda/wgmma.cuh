/*
 * wgmma.cuh - the matrix products of a warpgroup (four warps, 64 rows) that sm_90a has and no other
 * target: A from registers or shared memory, B from shared memory. Also the exchange of registers
 * between warpgroups.
 *
 * Products run beside the warps that issued them: between ptx_wgmma_fence and a wait nobody may
 * touch their registers. Refuses everything that plain sm_90 knows (ptx.cuh).
 */
#ifndef TV_KERNELS_CUDA_WGMMA_CUH
#define TV_KERNELS_CUDA_WGMMA_CUH

#include "ptx.cuh"

/* What an operand is described by, but for where it starts, in two layouts. Rows of 128 bytes,
 * swizzled in groups of eight (1,024 bytes), as the copy engine leaves them; `apart`: bytes between
 * blocks of 64 columns, where columns run along N. */
TV_DEVICE uint64_t ptx_wgmma_swizzled(uint32_t apart)
{
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(apart >> 4) << 16;
}

/* Pieces of eight rows of 16 bytes, 128 bytes apart along the rows, and `apart` along K. */
TV_DEVICE uint64_t ptx_wgmma_pieces(uint32_t apart)
{
    return (uint64_t)(128 >> 4) << 32 | (uint64_t)(apart >> 4) << 16;
}

/* An operand from a shared address on; 16 bytes further are one more. */
TV_DEVICE uint64_t ptx_wgmma_operand(uint64_t layout, uint32_t address)
{
    return layout | (uint64_t)((address & 0x3ffffu) >> 4);
}

TV_DEVICE void ptx_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

TV_DEVICE void ptx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Wait for all products issued, c among them: nobody reads it before. */
template <int N> TV_DEVICE void ptx_wgmma_wait(float (&c)[N][4])
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < N; n++) {
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
    }
}

#define TV_WGMMA_F4(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define TV_WGMMA_F16(c, i)                                                                         \
    TV_WGMMA_F4(c[i]), TV_WGMMA_F4(c[(i) + 1]), TV_WGMMA_F4(c[(i) + 2]), TV_WGMMA_F4(c[(i) + 3])
#define TV_WGMMA_F64(c, i)                                                                         \
    TV_WGMMA_F16(c, i), TV_WGMMA_F16(c, (i) + 4), TV_WGMMA_F16(c, (i) + 8),                        \
        TV_WGMMA_F16(c, (i) + 12)

/* c[64][32] (+)= a[64][16] * b[32][16]^T: b has 16 values of each of 32 rows. `add` is a constant.
 */
TV_DEVICE void ptx_wgmma_scores(float (&c)[4][4], const uint32_t (&a)[4], uint64_t b, int add)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n"
                 "}"
                 : TV_WGMMA_F16(c, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* The same with a from shared memory. */
TV_DEVICE void ptx_wgmma_scores(float (&c)[4][4], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 1, 1, 1, 0, 0;"
                 : TV_WGMMA_F16(c, 0)
                 : "l"(a), "l"(b));
}

/* c[64][256] += a[64][16] * b[16][256]: a from shared memory, b has 256 values of each of 16 rows.
 */
TV_DEVICE void ptx_wgmma_values(float (&c)[32][4], uint64_t a, uint64_t b)
{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
        "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "
        "%125, %126, %127}, %128, %129, 1, 1, 1, 0, 1;"
        : TV_WGMMA_F64(c, 0), TV_WGMMA_F64(c, 16)
        : "l"(a), "l"(b));
}

/* The registers of c[64][16 * n], by name and as operands. */
#define TV_WGMMA_R1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TV_WGMMA_R2 TV_WGMMA_R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TV_WGMMA_R3 TV_WGMMA_R2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TV_WGMMA_R4 TV_WGMMA_R3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TV_WGMMA_R5 TV_WGMMA_R4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TV_WGMMA_R6 TV_WGMMA_R5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TV_WGMMA_R7 TV_WGMMA_R6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TV_WGMMA_R8 TV_WGMMA_R7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TV_WGMMA_C1 TV_WGMMA_F4(c[0]), TV_WGMMA_F4(c[1])
#define TV_WGMMA_C2 TV_WGMMA_C1, TV_WGMMA_F4(c[2]), TV_WGMMA_F4(c[3])
#define TV_WGMMA_C3 TV_WGMMA_C2, TV_WGMMA_F4(c[4]), TV_WGMMA_F4(c[5])
#define TV_WGMMA_C4 TV_WGMMA_C3, TV_WGMMA_F4(c[6]), TV_WGMMA_F4(c[7])
#define TV_WGMMA_C5 TV_WGMMA_C4, TV_WGMMA_F4(c[8]), TV_WGMMA_F4(c[9])
#define TV_WGMMA_C6 TV_WGMMA_C5, TV_WGMMA_F4(c[10]), TV_WGMMA_F4(c[11])
#define TV_WGMMA_C7 TV_WGMMA_C6, TV_WGMMA_F4(c[12]), TV_WGMMA_F4(c[13])
#define TV_WGMMA_C8 TV_WGMMA_C7, TV_WGMMA_F4(c[14]), TV_WGMMA_F4(c[15])

/* c[64][N] (+)= a[64][16] * b[N][16]^T, a from registers, add a constant; a0 to p0: the names of
 * what follows c. */
#define TV_WGMMA_HELD(N, I, a0, a1, a2, a3, b0, p0)                                                \
    TV_DEVICE void ptx_wgmma_held(float(&c)[N / 8][4], const uint32_t(&a)[4], uint64_t b, int add) \
    {                                                                                              \
        asm volatile("{\n"                                                                         \
                     ".reg .pred p;\n"                                                             \
                     "setp.ne.b32 p, " p0 ", 0;\n"                                                 \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "                   \
                     "{" TV_WGMMA_R##I "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b0                  \
                                       ", p, 1, 1, 0;\n"                                           \
                                       "}"                                                         \
                     : TV_WGMMA_C##I                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }

TV_WGMMA_HELD(32, 2, "%16", "%17", "%18", "%19", "%20", "%21")
TV_WGMMA_HELD(64, 4, "%32", "%33", "%34", "%35", "%36", "%37")
TV_WGMMA_HELD(96, 6, "%48", "%49", "%50", "%51", "%52", "%53")
TV_WGMMA_HELD(112, 7, "%56", "%57", "%58", "%59", "%60", "%61")
TV_WGMMA_HELD(128, 8, "%64", "%65", "%66", "%67", "%68", "%69")

/* Registers a thread, by all warps of a warpgroup: give away, or wait for. */
template <int REGISTERS> TV_DEVICE void ptx_registers_keep(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> TV_DEVICE void ptx_registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
