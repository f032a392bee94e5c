/*
 * replay.c - the answers that a session keeps for retries: the newest rounds, within a number and a
 * sum of bytes, always the last one.
 *
 * Refuses to keep rows to fetch of any round but the last, and more of them in all than there is
 * room for.
 */
#include "session/session.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

struct tv_session_fetch *tv_session_fetch_ref(struct tv_session_fetch *fetch)
{
    (void)atomic_fetch_add_explicit(&fetch->refs, 1, memory_order_relaxed);
    return fetch;
}

void tv_session_fetch_unref(struct tv_session_fetch *fetch)
{
    if (fetch == NULL || atomic_fetch_sub_explicit(&fetch->refs, 1, memory_order_acq_rel) > 1) {
        return;
    }
    free(fetch->rows);
    free(fetch->path);
    free(fetch->data);
    free(fetch);
}

static void fetch_drop(struct tv_session_kept *kept)
{
    tv_session_fetch_unref(kept->fetch);
    tv_session_fetch_unref(kept->hidden);
    kept->fetch = NULL;
    kept->hidden = NULL;
}

void tv_session_kept_finish(struct tv_session_kept *kept)
{
    free(kept->body);
    fetch_drop(kept);
    memset(kept, 0, sizeof *kept);
}

static void forget_oldest(struct tv_session *session)
{
    session->kept_bytes -= session->kept[0].body_bytes;
    tv_session_kept_finish(&session->kept[0]);
    session->kept_count--;
    memmove(session->kept, session->kept + 1,
            (size_t)session->kept_count * sizeof session->kept[0]);
    memset(&session->kept[session->kept_count], 0, sizeof session->kept[0]);
}

void tv_session_keep(struct tv_session *session, struct tv_session_kept *kept)
{
    assert(kept->seq == session->next_seq);
    tv_session_held_finish(&session->held); /* whatever took a number has settled it */
    if (session->kept_count > 0) {          /* rows to fetch are the last round's alone */
        struct tv_session_kept *last = &session->kept[session->kept_count - 1];
        fetch_drop(last);
    }
    if (session->kept_count == TV_REPLAY_ROUNDS_MAX) {
        forget_oldest(session);
    }
    session->kept[session->kept_count++] = *kept;
    session->kept_bytes += kept->body_bytes;
    session->next_seq = kept->seq + 1;
    memset(kept, 0, sizeof *kept);
    while (session->kept_count > 1 && session->kept_bytes > TV_REPLAY_BYTES_MAX) {
        forget_oldest(session);
    }
}

const struct tv_session_kept *tv_session_kept_of(const struct tv_session *session, int32_t seq)
{
    for (int32_t i = 0; i < session->kept_count; i++) {
        if (session->kept[i].seq == seq) {
            return &session->kept[i];
        }
    }
    return NULL;
}

void tv_session_ack(struct tv_session *session, int32_t seq)
{
    while (session->kept_count > 1 && session->kept[0].seq <= seq) {
        forget_oldest(session);
    }
}

void tv_session_kept_drop(struct tv_session *session)
{
    while (session->kept_count > 0) {
        forget_oldest(session);
    }
}

static size_t fetch_bytes(const struct tv_session_kept *kept)
{
    return (kept->fetch != NULL ? kept->fetch->bytes : 0) +
           (kept->hidden != NULL ? kept->hidden->bytes : 0);
}

/* Rows to fetch are the last round's alone. */
static struct tv_session_kept *fetchable(struct tv_session *session)
{
    struct tv_session_kept *last =
        session->kept_count > 0 ? &session->kept[session->kept_count - 1] : NULL;
    return last != NULL && (last->fetch != NULL || last->hidden != NULL) ? last : NULL;
}

/* All sessions' rows to fetch; *ret_oldest: whose came first, or NULL. */
static size_t fetch_sum(const struct tv_sessions *table, struct tv_session_kept **ret_oldest)
{
    struct tv_session_kept *oldest = NULL;
    size_t bytes = 0;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (struct tv_session *one = table->buckets[i]; one != NULL; one = one->next) {
            struct tv_session_kept *kept = fetchable(one);
            if (kept != NULL) {
                bytes += fetch_bytes(kept);
                oldest =
                    oldest == NULL || kept->fetch_serial < oldest->fetch_serial ? kept : oldest;
            }
        }
    }
    *ret_oldest = oldest;
    return bytes;
}

size_t tv_sessions_fetch_bytes(const struct tv_sessions *table)
{
    struct tv_session_kept *oldest;
    return fetch_sum(table, &oldest);
}

void tv_sessions_fetch_bound(struct tv_sessions *table, struct tv_session *session,
                             size_t bytes_max)
{
    struct tv_session_kept *newest = fetchable(session), *oldest = NULL;
    if (newest == NULL || bytes_max == 0) {
        return;
    }
    newest->fetch_serial = ++table->fetch_serial;
    while (fetch_sum(table, &oldest) > bytes_max && oldest != newest && oldest != NULL) {
        fetch_drop(oldest);
    }
}
