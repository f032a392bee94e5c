/*
 * feed.c - a ring of texts and the cursors over it.
 *
 * Refuses to keep more than its number and bytes, whoever has not read yet. The lock is held for
 * one copy of one text at most, so that a source never waits for a slow reader.
 */
#include "base/feed.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct text {
    int32_t number;
    char *data; /* owned */
    size_t bytes;
};

struct tv_feed {
    atomic_int refs;               /* relaxed up, acquire-release down: the last holder frees */
    atomic_int readers;            /* relaxed: a number */
    atomic_int ended;              /* relaxed: a reader that misses it looks again */
    atomic_uint_least64_t written; /* release: place of the next text; acquire by who waits */
    atomic_int_least64_t note;     /* relaxed: a number */

    pthread_mutex_t lock;                 /* guards the rest */
    struct text texts[TV_FEED_TEXTS_MAX]; /* the one of place p stands at p modulo the number */
    uint64_t first;                       /* place of the oldest that is kept */
    size_t bytes;                         /* of those that are kept */
    int32_t gone;                         /* number of the newest that is not kept; -1: none */
};

struct tv_feed *tv_feed_create(void)
{
    struct tv_feed *feed = calloc(1, sizeof *feed);
    if (feed == NULL) {
        return NULL;
    }
    atomic_init(&feed->refs, 1);
    atomic_init(&feed->readers, 0);
    atomic_init(&feed->ended, 0);
    atomic_init(&feed->written, 0);
    atomic_init(&feed->note, 0);
    (void)pthread_mutex_init(&feed->lock, NULL); /* cannot fail with default attributes */
    feed->gone = -1;
    return feed;
}

struct tv_feed *tv_feed_ref(struct tv_feed *feed)
{
    (void)atomic_fetch_add_explicit(&feed->refs, 1, memory_order_relaxed);
    return feed;
}

static struct text *text_at(struct tv_feed *feed, uint64_t place)
{
    return &feed->texts[place % TV_FEED_TEXTS_MAX];
}

void tv_feed_unref(struct tv_feed *feed)
{
    if (feed == NULL || atomic_fetch_sub_explicit(&feed->refs, 1, memory_order_acq_rel) > 1) {
        return;
    }
    for (size_t i = 0; i < TV_FEED_TEXTS_MAX; i++) {
        free(feed->texts[i].data);
    }
    (void)pthread_mutex_destroy(&feed->lock); /* nobody holds it any more */
    free(feed);
}

static uint64_t written_of(const struct tv_feed *feed)
{
    return atomic_load_explicit(&feed->written, memory_order_acquire);
}

static void forget_oldest(struct tv_feed *feed)
{
    struct text *oldest = text_at(feed, feed->first++);
    feed->gone = oldest->number;
    feed->bytes -= oldest->bytes;
    free(oldest->data);
    memset(oldest, 0, sizeof *oldest);
}

void tv_feed_push(struct tv_feed *feed, int32_t number, char *text, size_t bytes)
{
    (void)pthread_mutex_lock(&feed->lock);
    uint64_t place = written_of(feed);
    if (tv_feed_ended(feed)) {
        (void)pthread_mutex_unlock(&feed->lock);
        free(text);
        return;
    }
    if (place - feed->first == TV_FEED_TEXTS_MAX) {
        forget_oldest(feed);
    }
    *text_at(feed, place) = (struct text){.number = number, .data = text, .bytes = bytes};
    feed->bytes += bytes;
    while (feed->first < place && (feed->bytes > TV_FEED_BYTES_MAX || text == NULL)) {
        forget_oldest(feed); /* a hole is lost together with what stands before it */
    }
    if (text == NULL) {
        forget_oldest(feed);
    }
    atomic_store_explicit(&feed->written, place + 1, memory_order_release);
    (void)pthread_mutex_unlock(&feed->lock);
}

void tv_feed_end(struct tv_feed *feed, int why)
{
    int none = 0;
    assert(why > 0);
    (void)pthread_mutex_lock(&feed->lock); /* no text is written once it is over */
    (void)atomic_compare_exchange_strong_explicit(&feed->ended, &none, why, memory_order_relaxed,
                                                  memory_order_relaxed);
    (void)pthread_mutex_unlock(&feed->lock);
}

void tv_feed_note_set(struct tv_feed *feed, int64_t note)
{
    atomic_store_explicit(&feed->note, note, memory_order_relaxed);
}

int64_t tv_feed_note(const struct tv_feed *feed)
{
    return atomic_load_explicit(&feed->note, memory_order_relaxed);
}

int32_t tv_feed_readers(const struct tv_feed *feed)
{
    return atomic_load_explicit(&feed->readers, memory_order_relaxed);
}

int tv_feed_ended(const struct tv_feed *feed)
{
    return atomic_load_explicit(&feed->ended, memory_order_relaxed);
}

void tv_feed_follow(struct tv_feed *feed, int32_t last, int resume,
                    struct tv_feed_cursor *ret_cursor)
{
    (void)pthread_mutex_lock(&feed->lock);
    uint64_t place = written_of(feed);
    (void)atomic_fetch_add_explicit(&feed->readers, 1, memory_order_relaxed);
    if (resume && last < feed->gone) {
        place = feed->first - 1; /* of one that has gone: the first read tells */
    } else if (resume) {
        while (place > feed->first && text_at(feed, place - 1)->number > last) {
            place--;
        }
    }
    *ret_cursor = (struct tv_feed_cursor){.next = place, .last = last};
    (void)pthread_mutex_unlock(&feed->lock);
}

void tv_feed_leave(struct tv_feed *feed)
{
    (void)atomic_fetch_sub_explicit(&feed->readers, 1, memory_order_relaxed);
}

int tv_feed_waits(const struct tv_feed *feed, const struct tv_feed_cursor *cursor)
{
    return cursor->next < written_of(feed) || tv_feed_ended(feed) != 0;
}

/* With the lock. */
static enum tv_feed_found read_text(struct tv_feed *feed, struct tv_feed_cursor *cursor,
                                    char **ret_text, size_t *ret_bytes)
{
    const struct text *text = text_at(feed, cursor->next);
    char *copy = malloc(text->bytes + 1);
    if (copy == NULL) {
        return TV_FEED_NO_MEMORY;
    }
    memcpy(copy, text->data, text->bytes);
    copy[text->bytes] = '\0';
    *ret_text = copy;
    *ret_bytes = text->bytes;
    cursor->last = text->number;
    cursor->next++;
    return TV_FEED_TEXT;
}

enum tv_feed_found tv_feed_read(struct tv_feed *feed, struct tv_feed_cursor *cursor,
                                char **ret_text, size_t *ret_bytes, int32_t *ret_from,
                                int32_t *ret_to)
{
    enum tv_feed_found found = TV_FEED_NOTHING;
    (void)pthread_mutex_lock(&feed->lock);
    if (cursor->next < feed->first) {
        *ret_from = cursor->last + 1;
        *ret_to = feed->gone;
        cursor->next = feed->first;
        cursor->last = feed->gone;
        found = TV_FEED_LOST;
    } else if (cursor->next < written_of(feed)) {
        found = read_text(feed, cursor, ret_text, ret_bytes);
    }
    (void)pthread_mutex_unlock(&feed->lock);
    return found;
}
