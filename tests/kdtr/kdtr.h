/*
 * kdtr.h - reads one .kdtr bundle: a safetensors file with a verify-attention problem and its
 * result.
 *
 * Strict: every named tensor must be there with the right type, the shapes must agree with each
 * other, offsets must lie inside the file. Owns the file's bytes; tensors point into them.
 */
#ifndef TV_TESTS_KDTR_H
#define TV_TESTS_KDTR_H

#include "kernels/types.h"

enum { KDTR_REASON_MAX = 160 };

struct kdtr {
    void *bytes;
    size_t size;
    int32_t batch, q_len, heads, page_size, max_pages;
    int64_t page_count;
    enum tv_dtype dtype;
    float softmax_scale;
    const void *q;             /* [batch, q_len, heads, 576] */
    const void *kv_pages;      /* [page_count, page_size, 576] */
    const int32_t *page_table; /* [batch, max_pages] */
    const int32_t *prefix_len; /* [batch] */
    const int32_t *node_count; /* [batch] */
    const int32_t *parents;    /* [batch, q_len] */
    const float *out;          /* [batch, q_len, heads, 512] */
    const float *lse;          /* [batch, q_len, heads] */
};

/* 0; -errno of the file; -EINVAL with the reason in `reason`, which holds KDTR_REASON_MAX bytes and
 * is set on every failure. */
int kdtr_read(const char *path, struct kdtr *ret_bundle, char *reason);
void kdtr_finish(struct kdtr *bundle);

#endif
