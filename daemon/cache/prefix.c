/*
 * prefix.c - the prefix index: which page holds the rows of which known prefix, and which of those
 * that nobody holds is given up first.
 *
 * A key names a whole prefix, so the page behind it is right or it is not there. Refuses to find a
 * page whose rows may still be written, and to keep one that a reserve needs.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "cache/cache_impl.h"

#define NONE (-1)

int tv_cache_prefix_init(struct tv_cache *cache)
{
    cache->oldest = cache->newest = NONE;
    if (cache->params.prefix == TV_CACHE_PREFIX_OFF) {
        return 0;
    }
    cache->bucket_count = 64;
    while ((int64_t)cache->bucket_count < cache->params.pages) {
        cache->bucket_count *= 2;
    }
    cache->entries = calloc((size_t)cache->params.pages, sizeof *cache->entries);
    cache->buckets = malloc(cache->bucket_count * sizeof *cache->buckets);
    if (cache->entries == NULL || cache->buckets == NULL) {
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < cache->bucket_count; i++) {
        cache->buckets[i] = NONE;
    }
    return tv_random_bytes(cache->salt, sizeof cache->salt);
}

void tv_cache_prefix_finish(struct tv_cache *cache)
{
    free(cache->entries);
    free(cache->buckets);
}

static int32_t *bucket_of(const struct tv_cache *cache, const struct tv_cache_key *key)
{
    uint64_t words[4];
    static_assert(sizeof words == sizeof *key, "a key is four words");
    memcpy(words, key, sizeof words);
    uint64_t mix = cache->salt[0];
    for (int i = 0; i < 4; i++) {
        mix = (mix ^ words[i]) * (cache->salt[1] | 1);
        mix ^= mix >> 32;
    }
    return &cache->buckets[mix & (cache->bucket_count - 1)];
}

/* Lock held: the page that this key names, or NONE. */
static int32_t find(const struct tv_cache *cache, const struct tv_cache_key *key)
{
    int32_t page = *bucket_of(cache, key);
    while (page != NONE && memcmp(&cache->entries[page].key, key, sizeof *key) != 0) {
        page = cache->entries[page].next;
    }
    return page;
}

void tv_cache_prefix_forget(struct tv_cache *cache, int32_t page)
{
    if (cache->entries == NULL || !cache->entries[page].keyed) {
        return;
    }
    struct tv_cache_entry *entry = &cache->entries[page];
    int32_t *link = bucket_of(cache, &entry->key);
    while (*link != page) {
        link = &cache->entries[*link].next;
    }
    *link = entry->next;
    memset(entry, 0, sizeof *entry);
}

static void insert(struct tv_cache *cache, int32_t page, const struct tv_cache_key *key, int exact)
{
    int32_t *bucket = bucket_of(cache, key);
    cache->entries[page] =
        (struct tv_cache_entry){.key = *key, .next = *bucket, .keyed = 1, .exact = exact != 0};
    *bucket = page;
}

int tv_cache_prefix_keep(struct tv_cache *cache, int32_t page)
{
    if (cache->entries == NULL || !cache->entries[page].keyed) {
        return 0;
    }
    struct tv_cache_entry *entry = &cache->entries[page];
    entry->older = cache->newest;
    entry->newer = NONE;
    if (cache->newest != NONE) {
        cache->entries[cache->newest].newer = page;
    } else {
        cache->oldest = page;
    }
    cache->newest = page;
    cache->cached_count++;
    return 1;
}

/* Out of the list of the evictable. */
static void unlist(struct tv_cache *cache, int32_t page)
{
    const struct tv_cache_entry *entry = &cache->entries[page];
    if (entry->older != NONE) {
        cache->entries[entry->older].newer = entry->newer;
    } else {
        cache->oldest = entry->newer;
    }
    if (entry->newer != NONE) {
        cache->entries[entry->newer].older = entry->older;
    } else {
        cache->newest = entry->older;
    }
    cache->cached_count--;
}

int32_t tv_cache_prefix_evict(struct tv_cache *cache)
{
    int32_t page = cache->oldest;
    assert(page != NONE);
    unlist(cache, page);
    tv_cache_prefix_forget(cache, page);
    cache->evicted_count++;
    return page;
}

/* Lock held: hold a page of the index. */
static void take(struct tv_cache *cache, int32_t page)
{
    if (cache->refs[page] == 0) {
        unlist(cache, page);
    }
    tv_cache_page_ref(cache, page);
}

int tv_cache_adopt(struct tv_cache *cache, struct tv_cache_seq *seq,
                   const struct tv_cache_key *keys, int32_t count)
{
    int32_t page_size = cache->params.page_size;
    if (count < 0 || seq->scratch != 0 || seq->len % page_size != 0 ||
        count > (INT32_MAX - seq->len) / page_size) {
        return -EINVAL;
    }
    if (cache->entries == NULL || count == 0) {
        return 0;
    }
    int rc = tv_cache_seq_grow(seq, seq->page_count + count);
    if (rc != 0) {
        return rc;
    }
    pthread_mutex_lock(&cache->lock);
    for (int32_t i = 0; i < count; i++) {
        int32_t page = find(cache, &keys[i]);
        if (page == NONE) {
            break;
        }
        take(cache, page);
        cache->reused_count++;
        seq->pages[seq->page_count++] = page;
        if (cache->entries[page].exact && seq->exact == seq->len) {
            seq->exact += page_size;
        }
        seq->len += page_size;
    }
    pthread_mutex_unlock(&cache->lock);
    return 0;
}

/* Lock held: let others find this page of a sequence. Returns a page that the sequence gives up for
 * an equal one, which took its place, or NONE. */
static int32_t publish(struct tv_cache *cache, int32_t *page, const struct tv_cache_key *key,
                       int exact)
{
    struct tv_cache_entry *entries = cache->entries;
    int32_t known = find(cache, key), own = *page;
    if (known == own || entries[own].keyed) { /* a page has one content, so one key */
        return NONE;
    }
    if (known == NONE) {
        insert(cache, own, key, exact);
        return NONE;
    }
    if (exact && entries[known].exact) { /* bit for bit the same rows: one of the two is enough */
        take(cache, known);
        *page = known;
        return own;
    }
    if (exact) { /* better rows than those that rounds left */
        int idle = cache->refs[known] == 0;
        if (idle) {
            unlist(cache, known);
        }
        tv_cache_prefix_forget(cache, known);
        insert(cache, own, key, exact);
        if (idle) { /* free now, by the way every page becomes free */
            tv_cache_page_ref(cache, known);
            return known;
        }
    }
    return NONE;
}

void tv_cache_publish(struct tv_cache *cache, struct tv_cache_seq *seq, int32_t first,
                      const struct tv_cache_key *keys, int32_t count)
{
    int32_t page_size = cache->params.page_size;
    assert(first >= 0 && count >= 0 && first + count <= seq->len / page_size);
    for (int32_t i = 0; cache->entries != NULL && i < count; i++) {
        int exact = (first + i + 1) * page_size <= seq->exact;
        if (!exact && cache->params.prefix != TV_CACHE_PREFIX_ROUNDS) {
            break;
        }
        pthread_mutex_lock(&cache->lock);
        int32_t spare = publish(cache, &seq->pages[first + i], &keys[i], exact);
        pthread_mutex_unlock(&cache->lock);
        if (spare != NONE) {
            tv_cache_page_release(cache, spare);
        }
    }
}
