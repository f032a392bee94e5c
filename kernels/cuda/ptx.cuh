/*
 * ptx.cuh - the instructions the flash kernels use that C has no name for: matrix products,
 * matrix loads, bulk copies and the barriers they complete on, named barriers, launch dependence.
 *
 * Everything here is plain sm_90 (no architecture-specific "a" features), so it assembles for
 * sm_120 too. Loads carry "volatile" and barriers "memory", so that no load moves over a barrier;
 * the matrix product touches registers alone and may be scheduled freely.
 */
#ifndef TV_KERNELS_CUDA_PTX_CUH
#define TV_KERNELS_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define TV_DEVICE static __device__ __forceinline__

/* Shared-space address of a pointer into shared memory. */
TV_DEVICE uint32_t ptx_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

TV_DEVICE void ptx_ldmatrix(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

TV_DEVICE void ptx_ldmatrix_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

/* c[16][8] += a[16][16] * b[16][8], bf16 inputs, f32 sums. */
TV_DEVICE void ptx_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same for f16 inputs. */
TV_DEVICE void ptx_mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TV_DEVICE void ptx_load4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

TV_DEVICE void ptx_store4(uint32_t address, const uint32_t (&r)[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* Two floats as bf16, round to nearest even; the first in the low half. */
TV_DEVICE uint32_t ptx_pack(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

/* Two floats as a pair of f16, and what that leaves of them as another; the first in the low half.
 */
TV_DEVICE void ptx_pack_pieces(float low, float high, uint32_t *ret_top, uint32_t *ret_rest)
{
    __half2 top = __floats2half2_rn(low, high);
    float2 back = __half22float2(top);
    __half2 rest = __floats2half2_rn(low - back.x, high - back.y);
    *ret_top = *reinterpret_cast<uint32_t *>(&top);
    *ret_rest = *reinterpret_cast<uint32_t *>(&rest);
}

/* 2 to the power x, to 2 ulp; 0 for -inf. */
TV_DEVICE float ptx_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

TV_DEVICE void ptx_mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Make barrier initialisation and ordinary stores visible to the bulk copy engine. */
TV_DEVICE void ptx_fence_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

TV_DEVICE void ptx_mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrive, and announce `bytes` of bulk copies that the phase also waits for. */
TV_DEVICE void ptx_mbarrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Wait until the phase of this parity is complete. */
TV_DEVICE void ptx_mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Copy bytes (a multiple of 16, both ends 16-byte aligned) and complete on the barrier. */
TV_DEVICE void ptx_bulk_copy(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Of what is read once: the first to leave L2, so that what every layer reads again stays. */
TV_DEVICE uint64_t ptx_policy_once(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Of what others read as well. */
TV_DEVICE uint64_t ptx_policy_shared(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Copy 16 bytes, of which the first `bytes` are read and the rest is zero, past L1. */
TV_DEVICE void ptx_copy_once(uint32_t shared, const void *global, uint32_t bytes, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
                 "l"(global), "r"(bytes), "l"(policy)
                 : "memory");
}

TV_DEVICE void ptx_copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until all but the last `Left` groups of this thread's copies are there. */
template <int Left> TV_DEVICE void ptx_copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

/* Bring a tensor map near, so that the first copy does not wait for it. */
TV_DEVICE void ptx_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Copy the box from row `row` on of a [blocks][rows][64] tensor, and complete on the barrier. */
TV_DEVICE void ptx_tensor_copy(uint32_t shared, const void *map, int32_t row, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
                 "l"(map), "r"(0), "r"(row), "r"(0), "r"(barrier)
                 : "memory");
}

/* Copy the box from (column, row) on of a [rows][columns] tensor, and complete on the barrier. */
TV_DEVICE void ptx_tensor_copy2(uint32_t shared, const void *map, int32_t column, int32_t row,
                                uint32_t barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
}

/* A value that is the same in all lanes, known to the compiler to be so: it then takes a register
 * of the warp instead of one of every lane. */
TV_DEVICE uint32_t ptx_uniform(uint32_t x)
{
    return __reduce_max_sync(0xffffffffu, x);
}

TV_DEVICE uint32_t ptx_load1(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

TV_DEVICE void ptx_store1(uint32_t address, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

TV_DEVICE void ptx_store2(uint32_t address, uint32_t x, uint32_t y)
{
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

/* threadIdx.x, read again wherever it is asked for: a register that nothing needs to hold. */
TV_DEVICE int32_t ptx_thread(void)
{
    int32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* Number of the warp, known to the compiler to be the same in all its lanes. */
TV_DEVICE int32_t ptx_warp(void)
{
    return __shfl_sync(0xffffffffu, ptx_thread() >> 5, 0);
}

/* True in one lane of a converged warp, which the compiler then knows to be one. */
TV_DEVICE bool ptx_elect(void)
{
    uint32_t elected;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(elected));
    return elected != 0;
}

TV_DEVICE void ptx_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

TV_DEVICE void ptx_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Let the next launch of the stream start its blocks before this grid has ended. */
TV_DEVICE void ptx_launch_dependents(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* What this thread reads from here on is not older than what it could know of before. */
TV_DEVICE void ptx_fence_device(void)
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/* A number as the whole device sees it now, which no block keeps near: reading it again later gives
 * what has been written meanwhile. */
TV_DEVICE int32_t ptx_load_device(const int32_t *p)
{
    int32_t x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

/* Wait until the grids this launch depends on have ended and their writes are visible. */
TV_DEVICE void ptx_wait_dependence(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

#endif
