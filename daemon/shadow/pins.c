/*
 * pins.c - the prefix pages that judgements hold, and how live traffic gets them back.
 *
 * Owns the count of holders of each page. Refuses to let a backlog of sampled judgements hold more
 * than a share of the pool, and any judgement to keep a page that a live round lacks.
 */
#include <errno.h>
#include <string.h>

#include "shadow/round.h"

/* Sampled judgements hold a quarter of the pool, or one round. */
#define POOL_SHARE 4

int tv_shadow_pin(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    int64_t fresh = 0;
    pthread_mutex_lock(&shadow->pins_lock);
    for (int32_t i = 0; i < round->full_pages; i++) {
        fresh += shadow->pins[round->pages[i]] == 0;
    }
    if (round->sampled && fresh > 0 && shadow->pinned > 0 &&
        shadow->pinned + fresh > tv_cache_params(shadow->cache)->pages / POOL_SHARE) {
        pthread_mutex_unlock(&shadow->pins_lock);
        return -ENOSPC;
    }
    for (int32_t i = 0; i < round->full_pages; i++) {
        shadow->pins[round->pages[i]]++;
    }
    shadow->pinned += fresh;
    tv_cache_pin(shadow->cache, round->pages, round->full_pages);
    round->cache_pinned = shadow->cache;
    pthread_mutex_unlock(&shadow->pins_lock);
    return 0;
}

void tv_shadow_unpin(struct tv_shadow *shadow, struct tv_shadow_round *round)
{
    pthread_mutex_lock(&shadow->pins_lock);
    if (round->cache_pinned != NULL) {
        for (int32_t i = 0; i < round->full_pages; i++) {
            shadow->pinned -= --shadow->pins[round->pages[i]] == 0;
        }
        tv_cache_unpin(round->cache_pinned, round->pages, round->full_pages);
        round->cache_pinned = NULL;
        atomic_store_explicit(&round->lost, 1, memory_order_relaxed);
    }
    pthread_mutex_unlock(&shadow->pins_lock);
}

int tv_shadow_pages_enter(const struct tv_shadow_round *round)
{
    pthread_mutex_lock(&round->shadow->reads_lock);
    if (atomic_load_explicit(&round->lost, memory_order_relaxed) == 0) {
        return 1;
    }
    pthread_mutex_unlock(&round->shadow->reads_lock);
    return 0;
}

void tv_shadow_pages_leave(const struct tv_shadow_round *round)
{
    pthread_mutex_unlock(&round->shadow->reads_lock);
}

static int is_short(const struct tv_shadow *shadow, int64_t pages)
{
    struct tv_cache_counts counts;
    tv_cache_counts(shadow->cache, &counts);
    return counts.free + counts.cached < pages;
}

/* Of the page nobody but judgements has hold, so that it becomes free, or evictable, without them.
 */
static int is_idle(const struct tv_shadow *shadow, int32_t page)
{
    uint32_t pins = shadow->pins[page];
    return pins > 0 && (uint32_t)tv_cache_holders(shadow->cache, page) == pins;
}

/* 1: would all judgements together be enough? What a live session holds too is no gain. */
static int is_enough(struct tv_shadow *shadow, int64_t pages)
{
    struct tv_cache_counts counts;
    pthread_mutex_lock(&shadow->pins_lock);
    tv_cache_counts(shadow->cache, &counts);
    int64_t gain = counts.free + counts.cached;
    for (int32_t page = 0; shadow->pinned > 0 && page < counts.total && gain < pages; page++) {
        gain += is_idle(shadow, page);
    }
    pthread_mutex_unlock(&shadow->pins_lock);
    return gain >= pages;
}

/* 1: without this judgement a page would be free, or nearer to it. */
static int is_gain(struct tv_shadow *shadow, const struct tv_shadow_round *round)
{
    int gain = 0;
    pthread_mutex_lock(&shadow->pins_lock);
    for (int32_t i = 0; round->cache_pinned != NULL && !gain && i < round->full_pages; i++) {
        gain = is_idle(shadow, round->pages[i]);
    }
    pthread_mutex_unlock(&shadow->pins_lock);
    return gain;
}

/* With the lock: queued rounds of one kind lose their pages and their place. */
static void queue_drop(struct tv_shadow *shadow, int waited, int64_t pages,
                       struct tv_shadow_round **ret_dropped)
{
    const struct tv_shadow_block block = {.skipped = "queue"};
    struct tv_shadow_round **link = &shadow->first, *before = NULL;
    while (*link != NULL && is_short(shadow, pages)) {
        struct tv_shadow_round *round = *link;
        if ((round->done != NULL) != waited || !is_gain(shadow, round)) {
            before = round;
            link = &round->next;
            continue;
        }
        *link = round->next;
        if (shadow->last == round) {
            shadow->last = before;
        }
        tv_shadow_unpin(shadow, round);
        if (round->done != NULL) {
            round->done(round->done_context, &block);
        }
        round->next = *ret_dropped;
        *ret_dropped = round;
    }
}

void tv_shadow_reclaim(void *context, int64_t pages)
{
    struct tv_shadow *shadow = context;
    struct tv_shadow_round *dropped = NULL;
    pthread_mutex_lock(&shadow->lock);
    int enough = is_enough(shadow, pages);
    for (int waited = 0; enough && waited < 2; waited++) {
        queue_drop(shadow, waited, pages, &dropped);
        struct tv_shadow_round *judged = shadow->judged; /* the thread sees it at its next layer */
        if (judged != NULL && (judged->done != NULL) == waited && is_short(shadow, pages) &&
            is_gain(shadow, judged)) {
            pthread_mutex_lock(&shadow->reads_lock); /* the thread may be in one of them */
            tv_shadow_unpin(shadow, judged);
            pthread_mutex_unlock(&shadow->reads_lock);
        }
    }
    pthread_mutex_unlock(&shadow->lock);
    while (dropped != NULL) {
        struct tv_shadow_round *round = dropped;
        dropped = round->next;
        tv_shadow_count(shadow, round->on_demand
                                    ? tv_shadow_both(TV_SHADOW_SKIPPED, round->path_verdict)
                                    : TV_SHADOW_SKIPPED);
        tv_shadow_round_free(shadow, round);
    }
}
