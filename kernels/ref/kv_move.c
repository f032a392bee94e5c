/*
 * kv_move.c - accepted rows move to the front of the tail, inside one pool.
 */
#include "ref.h"

#include "../args.h"

int tv_ref_kv_move(struct tv_kernels *k, void *kv_pages, size_t row_bytes, int64_t slot_count,
                   const int64_t *src, const int64_t *dst, int32_t count)
{
    (void)k;
    int rc = tv_args_kv_move(slot_count, src, dst, count);
    if (rc != 0) {
        return rc;
    }
    char *rows = kv_pages;
    for (int32_t i = 0; i < count; i++) {
        if (src[i] != dst[i]) {
            memcpy(rows + (size_t)dst[i] * row_bytes, rows + (size_t)src[i] * row_bytes, row_bytes);
        }
    }
    return 0;
}
