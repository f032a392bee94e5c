/*
 * product.c - a panel product by tiles or by vectors.
 *
 * A thread that takes several panels of the same rows packs them once.
 */
#include "product.h"

#include <errno.h>
#include <stdlib.h>

#include "../convert.h"
#include "amx.h"

enum { COLUMNS = 64 };

int tv_cpu_packed_create(int32_t threads, struct tv_cpu_packed **ret_packed)
{
    size_t head = ((size_t)threads * sizeof(struct tv_cpu_packed) + 63) / 64 * 64;
    struct tv_cpu_packed *packed = aligned_alloc(64, head + (size_t)threads * TV_CPU_PACKED_BYTES);
    if (!packed) {
        return -ENOMEM;
    }
    for (int32_t i = 0; i < threads; i++) {
        packed[i] = (struct tv_cpu_packed){
            .memory = (char *)packed + head + (size_t)i * TV_CPU_PACKED_BYTES,
        };
    }
    *ret_packed = packed;
    return 0;
}

static void by_vectors(const struct tv_cpu *cpu, const struct tv_cpu_product *p)
{
    const void *w[COLUMNS] = {NULL};
    for (int32_t first = 0; first < p->cols; first += COLUMNS) {
        int32_t cols = p->cols - first < COLUMNS ? p->cols - first : COLUMNS;
        for (int32_t c = 0; c < cols; c++) {
            w[c] = tv_element(p->w, p->w_dtype, (int64_t)(first + c) * p->k);
        }
        cpu->micro->dot(p->rows, cols, p->k, p->x, p->x_stride, w, p->w_dtype, p->y + first,
                        p->y_stride, p->accumulate);
    }
}

void tv_cpu_product_run(const struct tv_cpu *cpu, int32_t thread, int64_t key,
                        const struct tv_cpu_product *p)
{
    if (!cpu->amx || !p->many_rows || p->w_dtype != TV_BF16 || p->k > TV_CPU_AMX_K_MAX) {
        by_vectors(cpu, p);
        return;
    }
    struct tv_cpu_packed *packed = &cpu->packed[thread];
    size_t tile = tv_cpu_amx_bytes(TV_CPU_AMX_ROWS, p->k);
    int32_t block = (int32_t)(TV_CPU_PACKED_BYTES / tile) * TV_CPU_AMX_ROWS;
    for (int32_t r = 0; r < p->rows; r += block) {
        int32_t rows = p->rows - r < block ? p->rows - r : block;
        if (p->rows > block || packed->serial != cpu->serial || packed->key != key) {
            cpu->amx->pack(rows, p->k, p->x + r * p->x_stride, p->x_stride, packed->memory);
            packed->serial = p->rows > block ? 0 : cpu->serial;
            packed->key = key;
        }
        cpu->amx->dot(rows, p->cols, p->k, packed->memory, p->w, p->y + r * p->y_stride,
                      p->y_stride, p->accumulate);
    }
}
