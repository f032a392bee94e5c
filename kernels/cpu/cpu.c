/*
 * cpu.c - creates the cpu backend over the reference's table.
 *
 * Owns the choice of the instruction set and the lifetime of the pool. Slots that are not replaced
 * here (embedding, moves, memory) are bound by memory and stay the reference's.
 */
#include "cpu.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "../cpu_features.h"
#include "product.h"

enum { THREADS_MAX = 256 };

static const struct tv_cpu_micro *pick_micro(uint64_t mask)
{
    const struct tv_cpu_micro *micro = &tv_cpu_micro_portable;
#if defined(__x86_64__)
    uint64_t flags = tv_cpu_features_detect() & mask;
    if (flags & TV_CPU_AVX2) {
        micro = &tv_cpu_micro_avx2;
    }
    if (flags & TV_CPU_AVX512F) {
        micro = &tv_cpu_micro_avx512;
    }
#else
    (void)mask;
#endif
    return micro;
}

/* The tiles work beside the AVX-512 loops, so they need those allowed as well. */
static const struct tv_cpu_amx *pick_amx(uint64_t mask)
{
#if defined(TV_CPU_HAVE_AMX)
    const uint64_t needed = TV_CPU_AVX512F | TV_CPU_AMX_BF16;
    uint64_t flags = tv_cpu_features_detect() & mask;
    if ((flags & needed) == needed && tv_cpu_amx_permit() == 0) {
        return &tv_cpu_amx_tiles;
    }
#else
    (void)mask;
#endif
    return NULL;
}

static void release(struct tv_cpu *cpu)
{
    tv_cpu_pool_destroy(cpu->pool);
    free(cpu->packed);
    free(cpu);
}

static void destroy(struct tv_kernels *k)
{
    release(k->impl);
    free(k);
}

static uint64_t progress(const struct tv_kernels *k)
{
    return tv_cpu_pool_steps(tv_cpu_of(k)->pool);
}

static void override_slots(struct tv_kernels *k)
{
    k->progress = progress;
    k->name = "cpu";
    k->rmsnorm = tv_cpu_rmsnorm;
    k->linear = tv_cpu_linear;
    k->rope = tv_cpu_rope;
    k->latent_write = tv_cpu_latent_write;
    k->swiglu = tv_cpu_swiglu;
    k->router = tv_cpu_router;
    k->experts = tv_cpu_experts;
    k->experts_workspace = tv_cpu_experts_workspace;
    k->verify_attn = tv_cpu_verify_attn;
    k->verify_attn_workspace = tv_cpu_verify_attn_workspace;
    k->verify_attn_naive = tv_cpu_verify_attn_naive;
    k->verify_attn_naive_workspace = tv_cpu_verify_attn_naive_workspace;
    k->prefill_attn = tv_cpu_prefill_attn;
    k->prefill_attn_workspace = tv_cpu_prefill_attn_workspace;
    k->draw = tv_cpu_draw;
    k->draw_workspace = tv_cpu_draw_workspace;
    k->topk = tv_cpu_topk;
    k->destroy = destroy;
}

int tv_cpu_override(struct tv_kernels *k, const struct tv_kernels_options *options)
{
    long threads = options->threads;
    if (threads <= 0) {
        threads = sysconf(_SC_NPROCESSORS_ONLN);
    }
    if (threads < 1) {
        threads = 1;
    }
    if (threads > THREADS_MAX) {
        threads = THREADS_MAX;
    }
    struct tv_cpu *cpu = calloc(1, sizeof *cpu);
    if (!cpu) {
        return -ENOMEM;
    }
    cpu->micro = pick_micro(options->cpu_flags_mask);
    /* Before the threads start: they inherit the permission. */
    cpu->amx = pick_amx(options->cpu_flags_mask);
    int rc = tv_cpu_pool_create((int32_t)threads, &cpu->pool);
    if (rc == 0 && cpu->amx) {
        rc = tv_cpu_packed_create((int32_t)threads, &cpu->packed);
    }
    if (rc != 0) {
        release(cpu);
        return rc;
    }
    k->variant = cpu->amx ? "amx_bf16" : cpu->micro->name;
    k->impl = cpu;
    override_slots(k);
    return 0;
}
