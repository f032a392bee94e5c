/*
 * cache_impl.h - private to cache/: the pool's state, shared by its files.
 */
#ifndef TV_CACHE_CACHE_IMPL_H
#define TV_CACHE_CACHE_IMPL_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/cache.h"

/* What the prefix index knows of a page. Pages are named by number; -1: none. */
struct tv_cache_entry {
    struct tv_cache_key key;
    int32_t next;         /* in its bucket */
    int32_t older, newer; /* among the evictable pages */
    uint8_t keyed;
    uint8_t exact; /* prefill alone wrote its rows, and all before them */
};

struct tv_cache {
    struct tv_kernels *kernels;
    struct tv_cache_params params;
    char *pool;         /* device [layers][pages, page_size, row_dim] */
    size_t row_bytes;   /* one KV row */
    size_t page_bytes;  /* one page of one layer */
    size_t layer_bytes; /* all pages of one layer */
    int64_t *src, *dst; /* host [MOVES_MAX], of one move */
    int64_t *device_src, *device_dst;
    tv_cache_reclaim *reclaim; /* NULL: nobody can give pages back */
    void *reclaim_context;

    pthread_mutex_t lock; /* guards everything below */
    int32_t *refs;        /* [pages]: holders; 0 = free or evictable */
    int32_t *free_pages;  /* [pages]: a stack, the first free_count are free */
    uint8_t *stale;       /* [pages]: not poisoned yet, though nobody needs it any more */
    int64_t free_count;
    int64_t shared_count, scratch_count;

    struct tv_cache_entry *entries; /* [pages]; NULL: no prefix is kept */
    int32_t *buckets;               /* [bucket_count] */
    uint32_t bucket_count;          /* a power of two */
    uint64_t salt[2];               /* who sends tokens must not choose the bucket */
    int32_t oldest, newest;         /* of the evictable pages */
    int64_t cached_count, reused_count, evicted_count;
};

/* prefix.c. init: 0, -ENOMEM or -EIO; finish copes with a failed one. */
int tv_cache_prefix_init(struct tv_cache *cache);
void tv_cache_prefix_finish(struct tv_cache *cache);
/* All with the lock held. A page without holders whose content is known: 1, it is kept as evictable
 * from now on; 0: nobody knows it. */
int tv_cache_prefix_keep(struct tv_cache *cache, int32_t page);
/* The content of a page that has one holder is about to change: nobody finds it any more. */
void tv_cache_prefix_forget(struct tv_cache *cache, int32_t page);
/* The least recently used evictable page, which is not in the index any more; there is one. */
int32_t tv_cache_prefix_evict(struct tv_cache *cache);

/* cache.c, with the lock held: one holder more or less. unref: 1 when the page became free. */
void tv_cache_page_ref(struct tv_cache *cache, int32_t page);
int tv_cache_page_unref(struct tv_cache *cache, int32_t page);
/* cache.c, worker thread, without the lock: give back a sequence's hold on one page. */
void tv_cache_page_release(struct tv_cache *cache, int32_t page);
/* cache.c, worker thread, without the lock: take `count` free pages, each with one holder, or none.
 * 0, or as tv_cache_reserve. */
int tv_cache_pages_take(struct tv_cache *cache, int32_t count, int32_t *pages,
                        struct tv_cache_shortage *ret_shortage);
/* cache.c: room for so many pages in the table. 0 or -ENOMEM. */
int tv_cache_seq_grow(struct tv_cache_seq *seq, int32_t page_count);

#endif
