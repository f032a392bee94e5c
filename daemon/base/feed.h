/*
 * feed.h - the newest texts of one source, numbered, for readers that follow it at their own pace.
 *
 * Owns copies of the texts, within a number and a sum of bytes: the oldest go, and a reader who
 * has not read them is told which they were. Never waits for a reader and knows none by name: a
 * reader is a cursor of its own. Any thread may call anything; locks nothing beside itself.
 */
#ifndef TV_BASE_FEED_H
#define TV_BASE_FEED_H

#include <stddef.h>
#include <stdint.h>

#define TV_FEED_TEXTS_MAX 64
#define TV_FEED_BYTES_MAX (32u << 10) /* of the texts; one that is larger is kept alone */

struct tv_feed;

/* NULL: no memory. The caller has one reference; unref of NULL is fine. */
struct tv_feed *tv_feed_create(void);
struct tv_feed *tv_feed_ref(struct tv_feed *feed);
void tv_feed_unref(struct tv_feed *feed);

/* The source. Numbers of 0 and more, each above the one before. Takes over the text (malloc'd);
 * NULL: there was none to be had, which is as one that has gone. Nothing is taken behind the end.
 */
void tv_feed_push(struct tv_feed *feed, int32_t number, char *text, size_t bytes);
/* Nothing follows; why is the source's own code, above 0. The first end stays. */
void tv_feed_end(struct tv_feed *feed, int why);
/* A number that readers may look up beside the texts; only its newest value counts. */
void tv_feed_note_set(struct tv_feed *feed, int64_t note);
int64_t tv_feed_note(const struct tv_feed *feed);
/* How many follow it now. */
int32_t tv_feed_readers(const struct tv_feed *feed);

/* A reader. */
struct tv_feed_cursor {
    uint64_t next; /* place of the text that it has not read */
    int32_t last;  /* number of the newest that it has read, or was told of */
};
enum tv_feed_found { TV_FEED_NOTHING, TV_FEED_TEXT, TV_FEED_LOST, TV_FEED_NO_MEMORY };

/* Begin and end to follow: behind everything there is, which is numbered up to `last` at most; or
 * (resume) behind the text with the number `last`. */
void tv_feed_follow(struct tv_feed *feed, int32_t last, int resume,
                    struct tv_feed_cursor *ret_cursor);
void tv_feed_leave(struct tv_feed *feed);
/* Would a read find something now, or is it the end? Locks nothing. */
int tv_feed_waits(const struct tv_feed *feed, const struct tv_feed_cursor *cursor);
/* TEXT: *ret_text is malloc'd, the caller's. LOST: texts numbered from *ret_from to *ret_to at most
 * have gone unread, and the next read goes on behind them. */
enum tv_feed_found tv_feed_read(struct tv_feed *feed, struct tv_feed_cursor *cursor,
                                char **ret_text, size_t *ret_bytes, int32_t *ret_from,
                                int32_t *ret_to);
/* Why it ended; 0: it has not. What stands before the end can still be read. */
int tv_feed_ended(const struct tv_feed *feed);

#endif
