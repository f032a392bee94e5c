/*
 * restore.c - pages as bytes: out of the pool when a process ends, and into that of the next one.
 *
 * A page's bytes are [layers, page_size, row_dim] in host memory, whatever the backend. Refuses to
 * write a page that more than one holds or that anybody finds.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "cache/cache_impl.h"

int tv_cache_page_read(struct tv_cache *cache, int32_t page, void *host)
{
    struct tv_kernels *kernels = cache->kernels;
    int rc = 0;
    assert(page >= 0 && page < cache->params.pages);
    for (int32_t layer = 0; rc == 0 && layer < cache->params.layers; layer++) {
        const char *from =
            (const char *)tv_cache_layer(cache, layer) + (size_t)page * cache->page_bytes;
        rc = kernels->download(kernels, (char *)host + (size_t)layer * cache->page_bytes, from,
                               cache->page_bytes);
    }
    return rc == 0 ? kernels->sync(kernels) : rc;
}

int tv_cache_page_write(struct tv_cache *cache, int32_t page, const void *host)
{
    struct tv_kernels *kernels = cache->kernels;
    int rc = 0;
    assert(tv_cache_holders(cache, page) == 1);
    for (int32_t layer = 0; rc == 0 && layer < cache->params.layers; layer++) {
        char *to = (char *)tv_cache_layer(cache, layer) + (size_t)page * cache->page_bytes;
        rc = kernels->upload(kernels, to, (const char *)host + (size_t)layer * cache->page_bytes,
                             cache->page_bytes);
    }
    return rc == 0 ? kernels->sync(kernels) : rc; /* the bytes are the caller's again */
}

int tv_cache_restore(struct tv_cache *cache, struct tv_cache_seq *seq,
                     const struct tv_cache_seq *like, struct tv_cache_shortage *ret_shortage)
{
    int32_t page_size = cache->params.page_size, count = like->page_count, fresh = 0;
    if (seq->len != 0 || seq->scratch != 0 || seq->page_count != 0 || like->len < 1 ||
        count != like->len / page_size + (like->len % page_size != 0) || like->exact < 0 ||
        like->exact > like->len || like->scratch < 0) {
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        if (like->pages[i] >= cache->params.pages ||
            (like->pages[i] >= 0 && tv_cache_holders(cache, like->pages[i]) == 0)) {
            return -EINVAL;
        }
        fresh += like->pages[i] < 0;
    }
    const int32_t taken = fresh;
    int rc = tv_cache_seq_grow(seq, count);
    if (rc == 0) {
        rc = tv_cache_pages_take(cache, fresh, seq->pages, ret_shortage);
    }
    if (rc != 0) {
        return rc;
    }
    /* the taken ones stand in front: to their places, from the last on */
    for (int32_t i = count - 1; i >= 0; i--) {
        if (like->pages[i] < 0) {
            seq->pages[i] = seq->pages[--fresh];
        }
    }
    for (int32_t i = 0; i < count; i++) {
        if (like->pages[i] >= 0) {
            tv_cache_pin(cache, &like->pages[i], 1);
            seq->pages[i] = like->pages[i];
        }
    }
    seq->page_count = count;
    seq->len = like->len;
    seq->exact = like->exact;
    if (like->scratch > 0) {
        rc = tv_cache_reserve(cache, seq, like->scratch, ret_shortage);
    }
    if (rc != 0) {
        ret_shortage->pages_needed += taken; /* which are given back, and were free before */
        ret_shortage->pages_free += taken;
        tv_cache_seq_finish(cache, seq);
    }
    return rc;
}
