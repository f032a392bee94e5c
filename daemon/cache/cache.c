/*
 * cache.c - the paged MLA cache.
 *
 * Owns the pool on the device, the reference count of every page and the free list. Refuses to
 * write a page that somebody else holds or finds, and never moves a committed row.
 */
#include "cache/cache.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "cache/cache_impl.h"

#define MOVES_MAX         TV_TREE_NODES_MAX /* rows per kv_move launch */
#define SEQ_PAGES_INITIAL 16

static int params_check(const struct tv_cache_params *params)
{
    int page_size_ok = params->page_size == 16 || params->page_size == 32 ||
                       params->page_size == 64 || params->page_size == 128;
    if (!page_size_ok || params->layers < 1 || params->row_dim < 1 || params->pages < 1 ||
        params->pages > INT32_MAX || params->dtype == TV_F16) {
        return -EINVAL;
    }
    return 0;
}

static int sizes_set(struct tv_cache *cache, size_t *ret_pool_bytes)
{
    const struct tv_cache_params *params = &cache->params;
    size_t page, layer, pool;
    cache->row_bytes = (size_t)params->row_dim * tv_dtype_size(params->dtype);
    if (tv_size_mul(cache->row_bytes, (size_t)params->page_size, &page) != 0 ||
        tv_size_mul(page, (size_t)params->pages, &layer) != 0 ||
        tv_size_mul(layer, (size_t)params->layers, &pool) != 0) {
        return -ENOMEM;
    }
    cache->page_bytes = page;
    cache->layer_bytes = layer;
    *ret_pool_bytes = pool;
    return 0;
}

static int memory_take(struct tv_cache *cache, size_t pool_bytes)
{
    struct tv_kernels *kernels = cache->kernels;
    size_t pages = (size_t)cache->params.pages;
    size_t moves_bytes = MOVES_MAX * sizeof(int64_t);
    cache->pool = kernels->alloc(kernels, pool_bytes);
    cache->device_src = kernels->alloc(kernels, moves_bytes);
    cache->device_dst = kernels->alloc(kernels, moves_bytes);
    cache->src = malloc(moves_bytes);
    cache->dst = malloc(moves_bytes);
    cache->refs = calloc(pages, sizeof *cache->refs);
    cache->free_pages = malloc(pages * sizeof *cache->free_pages);
    cache->stale = calloc(pages, sizeof *cache->stale);
    if (cache->pool == NULL || cache->device_src == NULL || cache->device_dst == NULL ||
        cache->src == NULL || cache->dst == NULL || cache->refs == NULL ||
        cache->free_pages == NULL || cache->stale == NULL) {
        return -ENOMEM;
    }
    return tv_cache_prefix_init(cache);
}

int tv_cache_create(struct tv_kernels *kernels, const struct tv_cache_params *params,
                    struct tv_cache **ret_cache)
{
    int err = params_check(params);
    if (err != 0) {
        return err;
    }
    struct tv_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL) {
        return -ENOMEM;
    }
    cache->kernels = kernels;
    cache->params = *params;
    if (pthread_mutex_init(&cache->lock, NULL) != 0) {
        free(cache);
        return -ENOMEM;
    }
    size_t pool_bytes = 0;
    err = sizes_set(cache, &pool_bytes);
    if (err == 0) {
        err = memory_take(cache, pool_bytes);
    }
    /* The NaN pattern of f32 and of bf16 alike; written even without poison mode to bring every
     * page of the pool into memory before the first request. */
    if (err == 0) {
        err = kernels->fill(kernels, cache->pool, params->poison ? 0xff : 0, pool_bytes);
    }
    if (err != 0) {
        tv_cache_destroy(cache);
        return err;
    }
    for (int64_t i = 0; i < params->pages; i++) {
        cache->free_pages[i] = (int32_t)(params->pages - 1 - i); /* page 0 is taken first */
    }
    cache->free_count = params->pages;
    *ret_cache = cache;
    return 0;
}

void tv_cache_destroy(struct tv_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    struct tv_kernels *kernels = cache->kernels;
    if (cache->pool != NULL) {
        kernels->free(kernels, cache->pool);
    }
    if (cache->device_src != NULL) {
        kernels->free(kernels, cache->device_src);
    }
    if (cache->device_dst != NULL) {
        kernels->free(kernels, cache->device_dst);
    }
    free(cache->src);
    free(cache->dst);
    free(cache->refs);
    free(cache->free_pages);
    free(cache->stale);
    tv_cache_prefix_finish(cache);
    (void)pthread_mutex_destroy(&cache->lock); /* nobody holds it: callers are gone */
    free(cache);
}

const struct tv_cache_params *tv_cache_params(const struct tv_cache *cache)
{
    return &cache->params;
}

void *tv_cache_layer(const struct tv_cache *cache, int32_t layer)
{
    assert(layer >= 0 && layer < cache->params.layers);
    return cache->pool + (size_t)layer * cache->layer_bytes;
}

int64_t tv_cache_slot(const struct tv_cache *cache, const struct tv_cache_seq *seq, int32_t row)
{
    assert(row >= 0 && row < seq->len + seq->scratch);
    int32_t page_size = cache->params.page_size;
    return (int64_t)seq->pages[row / page_size] * page_size + row % page_size;
}

static int page_poison(struct tv_cache *cache, int32_t page)
{
    for (int32_t layer = 0; layer < cache->params.layers; layer++) {
        char *start = (char *)tv_cache_layer(cache, layer) + (size_t)page * cache->page_bytes;
        int err = cache->kernels->fill(cache->kernels, start, 0xff, cache->page_bytes);
        if (err != 0) {
            return err;
        }
    }
    return 0;
}

void tv_cache_page_ref(struct tv_cache *cache, int32_t page)
{
    cache->refs[page]++;
    if (cache->refs[page] == 2) {
        cache->shared_count++;
    }
}

int tv_cache_page_unref(struct tv_cache *cache, int32_t page)
{
    assert(cache->refs[page] > 0);
    cache->refs[page]--;
    if (cache->refs[page] == 1) {
        cache->shared_count--;
    }
    if (cache->refs[page] > 0 || tv_cache_prefix_keep(cache, page)) {
        return 0;
    }
    cache->free_pages[cache->free_count++] = page;
    return 1;
}

void tv_cache_page_release(struct tv_cache *cache, int32_t page)
{
    pthread_mutex_lock(&cache->lock);
    int freed = tv_cache_page_unref(cache, page);
    pthread_mutex_unlock(&cache->lock);
    /* Only the worker takes pages, so nobody reuses this one before it is poisoned. */
    if (freed && cache->params.poison && page_poison(cache, page) != 0) {
        pthread_mutex_lock(&cache->lock);
        cache->stale[page] = 1; /* tried again, and reported, when the page is taken */
        pthread_mutex_unlock(&cache->lock);
    }
}

int32_t tv_cache_holders(struct tv_cache *cache, int32_t page)
{
    pthread_mutex_lock(&cache->lock);
    int32_t holders = cache->refs[page];
    pthread_mutex_unlock(&cache->lock);
    return holders;
}

void tv_cache_reclaim_set(struct tv_cache *cache, tv_cache_reclaim *reclaim, void *context)
{
    if (reclaim != NULL || cache->reclaim_context == context) {
        cache->reclaim = reclaim;
        cache->reclaim_context = context;
    }
}

/* Lock held: evictable pages become free ones until there are `count`. */
static void pages_evict(struct tv_cache *cache, int32_t count)
{
    while (cache->free_count < count) {
        int32_t page = tv_cache_prefix_evict(cache);
        cache->stale[page] |= cache->params.poison != 0;
        cache->free_pages[cache->free_count++] = page;
    }
}

/* Lock held, and given up for a while: are there `count` pages that can be had? What nobody holds
 * is evicted for it, so it counts as free; only when that is not enough are holders asked. */
static int room_look(struct tv_cache *cache, int32_t count, struct tv_cache_shortage *ret_shortage)
{
    if (cache->free_count + cache->cached_count < count && cache->reclaim != NULL) {
        pthread_mutex_unlock(&cache->lock);
        cache->reclaim(cache->reclaim_context, count);
        pthread_mutex_lock(&cache->lock);
    }
    int64_t free_count = cache->free_count + cache->cached_count;
    if (free_count < count) {
        ret_shortage->pages_needed = count;
        ret_shortage->pages_free = free_count;
        return -ENOSPC;
    }
    return 0;
}

int tv_cache_room(struct tv_cache *cache, int64_t pages, struct tv_cache_shortage *ret_shortage)
{
    int32_t count = pages < INT32_MAX ? (int32_t)pages : INT32_MAX;
    pthread_mutex_lock(&cache->lock);
    int rc = room_look(cache, count, ret_shortage);
    pthread_mutex_unlock(&cache->lock);
    return rc;
}

int tv_cache_pages_take(struct tv_cache *cache, int32_t count, int32_t *pages,
                        struct tv_cache_shortage *ret_shortage)
{
    pthread_mutex_lock(&cache->lock);
    int rc = room_look(cache, count, ret_shortage);
    if (rc != 0) {
        pthread_mutex_unlock(&cache->lock);
        return rc;
    }
    pages_evict(cache, count);
    int stale = 0;
    for (int32_t i = 0; i < count; i++) {
        pages[i] = cache->free_pages[--cache->free_count];
        cache->refs[pages[i]] = 1;
        stale |= cache->stale[pages[i]];
    }
    pthread_mutex_unlock(&cache->lock);

    int err = 0;
    for (int32_t i = 0; stale && err == 0 && i < count; i++) {
        /* A held page's flag is the worker's alone: unpin sets it only on freeing. */
        if (cache->stale[pages[i]]) {
            err = page_poison(cache, pages[i]);
            cache->stale[pages[i]] = err != 0;
        }
    }
    if (err != 0) {
        pthread_mutex_lock(&cache->lock);
        for (int32_t i = count - 1; i >= 0; i--) {
            (void)tv_cache_page_unref(cache, pages[i]); /* freed by us: nobody else saw it */
        }
        pthread_mutex_unlock(&cache->lock);
    }
    return err;
}

int tv_cache_seq_grow(struct tv_cache_seq *seq, int32_t page_count)
{
    if (page_count <= seq->page_capacity) {
        return 0;
    }
    int32_t capacity = seq->page_capacity > 0 ? seq->page_capacity : SEQ_PAGES_INITIAL;
    while (capacity < page_count) {
        capacity = capacity > INT32_MAX / 2 ? page_count : capacity * 2;
    }
    int32_t *pages = realloc(seq->pages, (size_t)capacity * sizeof *pages);
    if (pages == NULL) {
        return -ENOMEM;
    }
    seq->pages = pages;
    seq->page_capacity = capacity;
    return 0;
}

/* Pages that hold `rows` rows. */
static int32_t pages_for(const struct tv_cache *cache, int32_t rows)
{
    int32_t page_size = cache->params.page_size;
    return rows / page_size + (rows % page_size != 0);
}

/* How many moves from `first` on are one copy: neighbours that go to neighbours, without overlap.
 */
static int32_t run_length(const struct tv_cache *cache, int32_t first, int32_t count)
{
    const int64_t *src = cache->src + first, *dst = cache->dst + first;
    int64_t apart = src[0] > dst[0] ? src[0] - dst[0] : dst[0] - src[0];
    int32_t length = 1;
    while (length < count - first && length < apart && src[length] == src[0] + length &&
           dst[length] == dst[0] + length) {
        length++;
    }
    return length;
}

/* Every run is one copy that goes over all layers. */
static int runs_copy(struct tv_cache *cache, int32_t count)
{
    struct tv_kernels *kernels = cache->kernels;
    int err = 0;
    for (int32_t i = 0; err == 0 && i < count;) {
        int32_t length = run_length(cache, i, count);
        err = kernels->copy(
            kernels, cache->pool + (size_t)cache->dst[i] * cache->row_bytes, cache->layer_bytes,
            cache->pool + (size_t)cache->src[i] * cache->row_bytes, cache->layer_bytes,
            (size_t)length * cache->row_bytes, cache->params.layers);
        i += length;
    }
    return err;
}

/* Move rows src[i] -> dst[i] of every layer, in order: by as few calls as there are. */
static int rows_move(struct tv_cache *cache, int32_t count)
{
    struct tv_kernels *kernels = cache->kernels;
    int32_t runs = 0;
    for (int32_t i = 0; i < count; i += run_length(cache, i, count)) {
        runs++;
    }
    if (runs <= cache->params.layers) {
        return runs_copy(cache, count);
    }
    size_t bytes = (size_t)count * sizeof(int64_t);
    int64_t slot_count = cache->params.pages * cache->params.page_size;
    int err = kernels->upload(kernels, cache->device_src, cache->src, bytes);
    if (err == 0) {
        err = kernels->upload(kernels, cache->device_dst, cache->dst, bytes);
    }
    for (int32_t layer = 0; err == 0 && layer < cache->params.layers; layer++) {
        err = kernels->kv_move(kernels, tv_cache_layer(cache, layer), cache->row_bytes, slot_count,
                               cache->device_src, cache->device_dst, count);
    }
    return err;
}

/* Copy the first `rows` rows of one page to another. */
static int page_copy(struct tv_cache *cache, int32_t from, int32_t to, int32_t rows)
{
    int32_t page_size = cache->params.page_size;
    static_assert(MOVES_MAX >= 128, "one page fits one move");
    for (int32_t i = 0; i < rows; i++) {
        cache->src[i] = (int64_t)from * page_size + i;
        cache->dst[i] = (int64_t)to * page_size + i;
    }
    return rows_move(cache, rows);
}

static int page_is_shared(struct tv_cache *cache, int32_t page)
{
    pthread_mutex_lock(&cache->lock);
    int shared = cache->refs[page] > 1;
    pthread_mutex_unlock(&cache->lock);
    return shared;
}

static void page_forget(struct tv_cache *cache, int32_t page)
{
    pthread_mutex_lock(&cache->lock);
    tv_cache_prefix_forget(cache, page);
    pthread_mutex_unlock(&cache->lock);
}

/* The sequence has so many pages for the nodes of a round from now on. */
static void scratch_count(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t pages)
{
    pthread_mutex_lock(&cache->lock);
    cache->scratch_count += pages - seq->scratch_pages;
    pthread_mutex_unlock(&cache->lock);
    seq->scratch_pages = pages;
}

int tv_cache_reserve(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t rows,
                     struct tv_cache_shortage *ret_shortage)
{
    if (rows < 1 || seq->scratch != 0 || rows > INT32_MAX - seq->len) {
        return -EINVAL;
    }
    int32_t tail_rows = seq->len % cache->params.page_size;
    int32_t tail = seq->page_count - 1;
    /* Every row of a tail page that is written is written for this sequence alone. */
    int copy = tail_rows != 0 && page_is_shared(cache, seq->pages[tail]);
    int32_t page_count = pages_for(cache, seq->len + rows);
    int32_t fresh = page_count - seq->page_count;
    /* One page more than the table needs, for the copy until it takes the tail's place. */
    int err = tv_cache_seq_grow(seq, page_count + 1);
    if (err != 0) {
        return err;
    }
    int32_t *taken = seq->pages + seq->page_count;
    err = tv_cache_pages_take(cache, fresh + copy, taken, ret_shortage);
    if (err != 0) {
        return err;
    }
    if (copy) {
        int32_t shared = seq->pages[tail];
        int32_t own = taken[fresh];
        err = page_copy(cache, shared, own, tail_rows);
        if (err != 0) {
            for (int32_t i = fresh; i >= 0; i--) {
                tv_cache_page_release(cache, taken[i]);
            }
            return err;
        }
        seq->pages[tail] = own;
        tv_cache_page_release(cache, shared);
    } else if (tail_rows != 0) { /* a page that was full once may be known by what it held */
        page_forget(cache, seq->pages[tail]);
    }
    seq->page_count = page_count;
    seq->scratch = rows;
    scratch_count(cache, seq, fresh);
    return 0;
}

/* Release the pages behind row `rows`. */
static void seq_shrink(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t rows)
{
    int32_t keep = pages_for(cache, rows);
    while (seq->page_count > keep) {
        tv_cache_page_release(cache, seq->pages[--seq->page_count]);
    }
}

int tv_cache_commit(struct tv_cache *cache, struct tv_cache_seq *seq, const int32_t *nodes,
                    int32_t count)
{
    if (count < 0 || count > seq->scratch) {
        return -EINVAL;
    }
    for (int32_t i = 0; nodes != NULL && i < count; i++) {
        if (nodes[i] < (i > 0 ? nodes[i - 1] + 1 : 0) || nodes[i] >= seq->scratch) {
            return -EINVAL;
        }
    }
    int err = 0;
    int32_t moves = 0;
    for (int32_t i = 0; nodes != NULL && err == 0 && i < count; i++) {
        if (nodes[i] != i) {
            cache->src[moves] = tv_cache_slot(cache, seq, seq->len + nodes[i]);
            cache->dst[moves] = tv_cache_slot(cache, seq, seq->len + i);
            moves++;
        }
        if (moves == MOVES_MAX || (i == count - 1 && moves > 0)) {
            err = rows_move(cache, moves);
            moves = 0;
        }
    }
    if (err == 0) {
        seq->len += count;
    }
    tv_cache_drop(cache, seq);
    return err;
}

/* The rows behind the last committed one, in the page that both are in: rejected nodes, which
 * nobody may read again. The page is this sequence's alone, as it has had scratch. */
static void tail_poison(struct tv_cache *cache, const struct tv_cache_seq *seq)
{
    int32_t rows = seq->len % cache->params.page_size;
    if (rows == 0) {
        return;
    }
    size_t at = (size_t)seq->pages[seq->page_count - 1] * cache->page_bytes +
                (size_t)rows * cache->row_bytes;
    size_t bytes = cache->page_bytes - (size_t)rows * cache->row_bytes;
    for (int32_t layer = 0; layer < cache->params.layers; layer++) {
        char *start = (char *)tv_cache_layer(cache, layer) + at;
        /* a device that fails here fails in the next launch */
        (void)cache->kernels->fill(cache->kernels, start, 0xff, bytes);
    }
}

void tv_cache_drop(struct tv_cache *cache, struct tv_cache_seq *seq)
{
    int had_scratch = seq->scratch > 0;
    seq->scratch = 0;
    scratch_count(cache, seq, 0);
    seq_shrink(cache, seq, seq->len);
    if (had_scratch && cache->params.poison) {
        tail_poison(cache, seq);
    }
}

int tv_cache_truncate(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t len)
{
    if (len < 0 || len > seq->len || seq->scratch != 0) {
        return -EINVAL;
    }
    seq->len = len;
    seq->exact = seq->exact < len ? seq->exact : len;
    seq_shrink(cache, seq, len);
    return 0;
}

int tv_cache_fork(struct tv_cache *cache, const struct tv_cache_seq *seq, int32_t len,
                  struct tv_cache_seq *fork)
{
    if (len < 0 || len > seq->len || seq->scratch != 0 || fork->len != 0 || fork->scratch != 0 ||
        fork->page_count != 0) {
        return -EINVAL;
    }
    int32_t page_count = pages_for(cache, len);
    int err = tv_cache_seq_grow(fork, page_count);
    if (err != 0) {
        return err;
    }
    tv_cache_pin(cache, seq->pages, page_count);
    if (page_count > 0) { /* without any there may be no table */
        memcpy(fork->pages, seq->pages, (size_t)page_count * sizeof *fork->pages);
    }
    fork->page_count = page_count;
    fork->len = len;
    fork->exact = seq->exact < len ? seq->exact : len;
    return 0;
}

void tv_cache_seq_finish(struct tv_cache *cache, struct tv_cache_seq *seq)
{
    scratch_count(cache, seq, 0);
    seq_shrink(cache, seq, 0);
    free(seq->pages);
    memset(seq, 0, sizeof *seq);
}

void tv_cache_pin(struct tv_cache *cache, const int32_t *pages, int32_t count)
{
    pthread_mutex_lock(&cache->lock);
    for (int32_t i = 0; i < count; i++) {
        assert(cache->refs[pages[i]] > 0);
        tv_cache_page_ref(cache, pages[i]);
    }
    pthread_mutex_unlock(&cache->lock);
}

void tv_cache_unpin(struct tv_cache *cache, const int32_t *pages, int32_t count)
{
    pthread_mutex_lock(&cache->lock);
    for (int32_t i = 0; i < count; i++) {
        /* This may not be the worker thread, which alone may use the device: it poisons later. */
        if (tv_cache_page_unref(cache, pages[i]) && cache->params.poison) {
            cache->stale[pages[i]] = 1;
        }
    }
    pthread_mutex_unlock(&cache->lock);
}

void tv_cache_counts(struct tv_cache *cache, struct tv_cache_counts *ret_counts)
{
    pthread_mutex_lock(&cache->lock);
    ret_counts->total = cache->params.pages;
    ret_counts->free = cache->free_count;
    /* Counted, not derived: free + cached + held = total is what the tests check. */
    int64_t held = 0;
    for (int64_t i = 0; i < cache->params.pages; i++) {
        held += cache->refs[i] > 0;
    }
    ret_counts->held = held;
    ret_counts->shared = cache->shared_count;
    ret_counts->scratch = cache->scratch_count;
    ret_counts->cached = cache->cached_count;
    ret_counts->reused = cache->reused_count;
    ret_counts->evicted = cache->evicted_count;
    pthread_mutex_unlock(&cache->lock);
}
