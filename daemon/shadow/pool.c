/*
 * pool.c - the memory of captured rounds: bounded, counted, and kept for the rounds to come.
 *
 * Owns the stores that no round has. A fresh block of memory costs four times its copy, in page
 * faults: the last stores that were given back are therefore kept, with their pages. Refuses to go
 * over the bound, those kept included; and to hold its lock while memory is taken or given back.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "shadow/round.h"

#define STORE_BYTES_MIN 65536u /* the small things of a round share one */
#define ALIGNMENT       64u    /* of what is taken: no two pieces share a line */

static_assert(sizeof(struct tv_shadow_store) <= ALIGNMENT, "the data begin on the second line");

static char *data_of(struct tv_shadow_store *store)
{
    return (char *)store + ALIGNMENT;
}

/* Up to a multiple of a quarter of its power of two: rounds of nearly the same size take each
 * other's stores. */
static size_t capacity_for(size_t bytes)
{
    size_t step = STORE_BYTES_MIN / 4;
    while (bytes / 8 >= step) {
        step *= 2;
    }
    size_t capacity = (bytes + step - 1) / step * step;
    return capacity > STORE_BYTES_MIN ? capacity : STORE_BYTES_MIN;
}

void tv_shadow_pool_init(struct tv_shadow_pool *pool, size_t bytes_max)
{
    *pool = (struct tv_shadow_pool){.bytes_max = bytes_max};
    (void)pthread_mutex_init(&pool->lock, NULL); /* default attributes cannot fail */
}

static void list_free(struct tv_shadow_store *list)
{
    while (list != NULL) {
        struct tv_shadow_store *store = list;
        list = store->next;
        free(store);
    }
}

void tv_shadow_pool_finish(struct tv_shadow_pool *pool)
{
    list_free(pool->idle);
    (void)pthread_mutex_destroy(&pool->lock);
}

/* With the lock: take it out of the idle ones. */
static struct tv_shadow_store *unlink_at(struct tv_shadow_pool *pool, struct tv_shadow_store **link)
{
    struct tv_shadow_store *store = *link;
    *link = store->next;
    store->next = NULL;
    pool->idle_count--;
    pool->bytes_idle -= store->capacity;
    return store;
}

/* With the lock: the one that was not used for longest. */
static struct tv_shadow_store *oldest_unlink(struct tv_shadow_pool *pool)
{
    struct tv_shadow_store **link = &pool->idle;
    while ((*link)->next != NULL) {
        link = &(*link)->next;
    }
    return unlink_at(pool, link);
}

/* With the lock: an idle store for `capacity` bytes that is not more than twice as large, so that
 * small rounds do not fill the bound with large stores. NULL: there is none. */
static struct tv_shadow_store *idle_take(struct tv_shadow_pool *pool, size_t capacity)
{
    struct tv_shadow_store **link = &pool->idle;
    while (*link != NULL && ((*link)->capacity < capacity || (*link)->capacity / 2 > capacity)) {
        link = &(*link)->next;
    }
    return *link != NULL ? unlink_at(pool, link) : NULL;
}

/* An empty store with room for `bytes`. NULL: over the bound, or no memory. */
static struct tv_shadow_store *store_take(struct tv_shadow_pool *pool, size_t bytes)
{
    struct tv_shadow_store *dropped = NULL;
    size_t capacity = capacity_for(bytes);
    pthread_mutex_lock(&pool->lock);
    struct tv_shadow_store *store = idle_take(pool, capacity);
    capacity = store != NULL ? store->capacity : capacity;
    int fits = capacity <= pool->bytes_max - pool->bytes_held;
    while (fits && pool->bytes_max - pool->bytes_held - pool->bytes_idle < capacity) {
        struct tv_shadow_store *oldest = oldest_unlink(pool);
        oldest->next = dropped;
        dropped = oldest;
    }
    pool->bytes_held += fits ? capacity : 0;
    pthread_mutex_unlock(&pool->lock);
    list_free(dropped);
    if (!fits) {
        return NULL; /* and none was idle: those are within the bound */
    }
    if (store == NULL) {
        store = aligned_alloc(ALIGNMENT, ALIGNMENT + capacity);
        if (store == NULL) {
            pthread_mutex_lock(&pool->lock);
            pool->bytes_held -= capacity;
            pthread_mutex_unlock(&pool->lock);
            return NULL;
        }
    }
    *store = (struct tv_shadow_store){.capacity = capacity};
    return store;
}

void tv_shadow_pool_give_back(struct tv_shadow_pool *pool, struct tv_shadow_store *stores)
{
    struct tv_shadow_store *dropped = NULL;
    pthread_mutex_lock(&pool->lock);
    while (stores != NULL) {
        struct tv_shadow_store *store = stores;
        stores = store->next;
        store->next = pool->idle;
        pool->idle = store;
        pool->idle_count++;
        pool->bytes_idle += store->capacity;
        pool->bytes_held -= store->capacity;
        if (pool->idle_count > TV_SHADOW_IDLE_MAX) {
            struct tv_shadow_store *oldest = oldest_unlink(pool);
            oldest->next = dropped;
            dropped = oldest;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    list_free(dropped);
}

void *tv_shadow_round_take(struct tv_shadow_round *round, size_t bytes)
{
    struct tv_shadow_pool *pool = &round->shadow->pool;
    struct tv_shadow_store *store = round->stores;
    if (bytes > pool->bytes_max) {
        round->failed = -ENOMEM;
        return NULL;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    while (store != NULL && store->capacity - store->used < bytes) {
        store = store->next;
    }
    if (store == NULL) {
        store = store_take(pool, bytes);
        if (store == NULL) {
            round->failed = -ENOMEM;
            return NULL;
        }
        store->next = round->stores;
        round->stores = store;
    }
    void *piece = data_of(store) + store->used;
    store->used += bytes;
    return piece;
}
