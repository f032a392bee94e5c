/*
 * stream.c - answers that go on: server-sent events of a session, one stream for each such request.
 *
 * The listener's thread writes what there is and suspends the connection when there is nothing; the
 * watch thread resumes it when a session's bell has rung, or a comment is due. Nobody in sched/
 * ever waits for a stream: a reader that falls behind loses events, one that takes nothing is cut.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "http/conn.h"

#define RESUME_BATCH 64

/* With the lock: why is there nothing more to come than what the feed has? NULL: it goes on. */
static const char *end_of(const struct http_conn *conn, enum tv_stats_stream *ret_end)
{
    int why = tv_feed_ended(conn->call->reply.feed);
    if (why != 0) {
        *ret_end = TV_STATS_STREAM_SESSION;
        return tv_sched_events_end(why);
    }
    *ret_end = TV_STATS_STREAM_STOP;
    return conn->http->closing ? "stopping" : NULL;
}

/* With the lock: is there something to be written? */
static int has_news(const struct http_conn *conn, int64_t now_us)
{
    const struct tv_http *http = conn->http;
    const struct http_stream *stream = conn->stream;
    return stream->gone || http->closing ||
           tv_feed_waits(conn->call->reply.feed, &conn->call->reply.cursor) ||
           http->draining_unix_ms > stream->draining_unix_ms ||
           http->violation.n > stream->violation ||
           now_us - stream->written_us >= HTTP_STREAM_QUIET_US;
}

/* The block is to be written next. One that could not be made is as one that was lost on the way,
 * but for those of the feed, which the reader is told of. */
static void text_set(struct http_stream *stream, struct tv_buf *block)
{
    free(stream->text);
    stream->text = block->failed == 0 ? block->data : NULL;
    stream->bytes = block->failed == 0 ? block->bytes : 0;
    stream->at = 0;
    if (block->failed != 0) {
        tv_buf_finish(block);
    }
}

/* What the feed has: 1, or 0. */
static int next_of_feed(struct http_conn *conn)
{
    struct http_stream *stream = conn->stream;
    struct tv_reply *reply = &conn->call->reply;
    int32_t from = 0, to = 0;
    char *text = NULL;
    size_t bytes = 0;
    struct tv_buf block;
    switch (tv_feed_read(reply->feed, &reply->cursor, &text, &bytes, &from, &to)) {
    case TV_FEED_TEXT:
        free(stream->text);
        stream->text = text;
        stream->bytes = bytes;
        stream->at = 0;
        tv_stats_add(&conn->http->stats->events_told, 1);
        return 1;
    case TV_FEED_LOST:
        tv_buf_init(&block, HTTP_STREAM_BLOCK_BYTES);
        tv_encode_event_missed(&block, from, to);
        text_set(stream, &block);
        tv_stats_add(&conn->http->stats->events_missed, (uint64_t)to - (uint64_t)from + 1);
        return 1;
    case TV_FEED_NO_MEMORY: /* the connection's end tells: its reader comes again behind what it has
                             */
        stream->gone = 1;
        return 0;
    case TV_FEED_NOTHING:
        break;
    }
    return 0;
}

/* With the lock: what does not come from the session's rounds. 1, or 0: nothing. */
static int next_of_server(struct http_conn *conn, int64_t now_us)
{
    const struct tv_http *http = conn->http;
    struct http_stream *stream = conn->stream;
    enum tv_stats_stream end;
    const char *reason = end_of(conn, &end);
    int64_t lease_unix_ms = tv_feed_note(conn->call->reply.feed);
    struct tv_buf block;
    tv_buf_init(&block, HTTP_STREAM_BLOCK_BYTES);
    if (http->violation.n > stream->violation) {
        stream->violation = http->violation.n;
        tv_encode_event_parity(&block, &http->violation);
    } else if (http->draining_unix_ms > stream->draining_unix_ms) {
        stream->draining_unix_ms = http->draining_unix_ms;
        tv_encode_event_draining(&block, http->draining_unix_ms);
    } else if (reason != NULL) {
        stream->ended = 1;
        stream->end = end;
        tv_encode_event_end(&block, reason);
    } else if (now_us - stream->written_us < HTTP_STREAM_QUIET_US) {
        return 0;
    } else if (lease_unix_ms / 1000 != stream->lease_unix_ms / 1000) {
        stream->lease_unix_ms = lease_unix_ms;
        tv_encode_event_lease(&block, lease_unix_ms);
    } else {
        tv_encode_event_quiet(&block);
    }
    text_set(stream, &block);
    return 1;
}

/* Take the next text: 1; 0: there is none, or it is over; -EPIPE: nobody is to have one. */
static int next(struct http_conn *conn)
{
    struct http_stream *stream = conn->stream;
    int64_t now_us = tv_clock_us();
    (void)pthread_mutex_lock(&conn->http->lock);
    int found = !stream->gone && !stream->ended &&
                (next_of_feed(conn) || (!stream->gone && next_of_server(conn, now_us)));
    if (found) {
        stream->written_us = now_us;
        conn->deadline_us = now_us + HTTP_WRITE_US;
    }
    int rc = stream->gone ? -EPIPE : found;
    (void)pthread_mutex_unlock(&conn->http->lock);
    return rc;
}

/* Nothing to write: wait for the watch thread. Suspended first, so that it can resume. */
static void park(struct http_conn *conn)
{
    struct tv_http *http = conn->http;
    MHD_suspend_connection(conn->connection);
    (void)pthread_mutex_lock(&http->lock);
    int parked = !conn->cut && !has_news(conn, tv_clock_us());
    conn->stream->parked = parked;
    conn->deadline_us = parked ? INT64_MAX : conn->deadline_us;
    (void)pthread_mutex_unlock(&http->lock);
    if (!parked) {
        MHD_resume_connection(conn->connection);
    }
}

/* libmicrohttpd has room for max bytes. */
static ssize_t stream_read(void *context, uint64_t at, char *bytes, size_t max)
{
    struct http_conn *conn = context;
    struct http_stream *stream = conn->stream;
    size_t written = 0;
    int rc = 1;
    (void)at; /* nobody goes back */
    while (written < max) {
        rc = stream->at < stream->bytes ? 1 : next(conn);
        if (rc != 1) {
            break;
        }
        size_t count = stream->bytes - stream->at;
        count = count < max - written ? count : max - written;
        if (count > 0) {
            memcpy(bytes + written, stream->text + stream->at, count);
        }
        stream->at += count;
        written += count;
    }
    if (written > 0) {
        return (ssize_t)written;
    }
    if (rc < 0) {
        return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    if (stream->ended) {
        return MHD_CONTENT_READER_END_OF_STREAM;
    }
    park(conn);
    return 0;
}

/* With the lock: may this caller have one more? 0, or -EINVAL with *problem. */
static int admit(struct tv_http *http, const struct http_conn *conn, struct tv_problem *problem)
{
    int32_t own = 0, share = http->event_readers_max;
    const char *principal = conn->call->principal;
    for (const struct http_conn *other = http->streams; other != NULL;
         other = other->stream->next) {
        own += strcmp(other->call->principal, principal) == 0;
    }
    if (principal[0] != '\0') { /* of one key, where there are keys */
        share = (share + 1) / 2;
    }
    if (http->stream_count >= http->event_readers_max) {
        tv_problem_set(problem, TV_OVERLOADED, NULL, "%d streams of events are open",
                       http->stream_count);
    } else if (own >= share) {
        tv_problem_set(problem, TV_RATE_LIMITED, NULL, "%d streams of events of this key are open",
                       own);
        problem->rate_name = "streams";
        problem->rate_quota = share;
    } else {
        return 0;
    }
    problem->retry_after_s = HTTP_STREAM_RETRY_S;
    return -EINVAL;
}

/* A stream has little to say at a time: who does not read is to be noticed soon, and not to fill
 * the megabytes that the kernel has for an answer. */
static void limit_kernel(int fd)
{
    const int bytes = HTTP_STREAM_UNREAD_BYTES;
    /* without it slow readers are only noticed later */
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

int tv_http_stream_begin(struct http_conn *conn)
{
    struct tv_http *http = conn->http;
    struct tv_reply *reply = &conn->call->reply;
    struct http_stream *stream = conn->is_get ? calloc(1, sizeof *stream) : NULL;
    struct tv_problem problem;
    if (!conn->is_get) { /* HEAD: the headers alone */
        tv_sched_events_leave(reply);
        tv_buf_finish(&reply->body);
        return 0;
    }
    if (stream == NULL) {
        tv_problem_set(&problem, TV_OVERLOADED, NULL, "no memory for a stream");
        tv_sched_refuse(conn->call, &problem);
        return 0;
    }
    stream->written_us = tv_clock_us();
    stream->lease_unix_ms = tv_feed_note(reply->feed);
    (void)pthread_mutex_lock(&http->lock);
    int rc = admit(http, conn, &problem);
    if (rc == 0) {
        stream->violation = http->violation.n; /* what was found before is told by GET /v1/parity */
        stream->next = http->streams;
        if (http->streams != NULL) {
            http->streams->stream->prev = conn;
        }
        http->streams = conn;
        http->stream_count++;
        conn->stream = stream;
    }
    (void)pthread_mutex_unlock(&http->lock);
    if (rc != 0) {
        free(stream);
        tv_sched_refuse(conn->call, &problem);
        return 0;
    }
    text_set(stream, &reply->body);
    memset(&reply->body, 0, sizeof reply->body); /* the stream's now */
    conn->close = 1;
    limit_kernel(conn->fd);
    tv_stats_add(&http->stats->streams_opened, 1);
    return 1;
}

struct MHD_Response *tv_http_stream_response(struct http_conn *conn)
{
    return MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, HTTP_STREAM_BLOCK_BYTES, stream_read,
                                             conn, NULL);
}

void tv_http_stream_end(struct http_conn *conn, int timed_out)
{
    struct tv_http *http = conn->http;
    struct http_stream *stream = conn->stream;
    if (stream == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&http->lock);
    assert(!stream->parked);
    enum tv_stats_stream end = stream->ended            ? stream->end
                               : conn->cut || timed_out ? TV_STATS_STREAM_SLOW
                                                        : TV_STATS_STREAM_CLIENT;
    if (stream->prev != NULL) {
        stream->prev->stream->next = stream->next;
    } else {
        http->streams = stream->next;
    }
    if (stream->next != NULL) {
        stream->next->stream->prev = stream->prev;
    }
    http->stream_count--;
    conn->stream = NULL;
    (void)pthread_mutex_unlock(&http->lock);
    tv_stats_add(&http->stats->streams_ended[end], 1);
    free(stream->text);
    free(stream);
}

void tv_http_streams_review(struct tv_http *http)
{
    (void)pthread_mutex_lock(&http->lock);
    for (struct http_conn *conn = http->streams; conn != NULL; conn = conn->stream->next) {
        const char *principal = conn->call->principal;
        if (principal[0] != '\0' && !tv_http_key_named(http, principal)) {
            conn->stream->gone = 1;
        }
    }
    (void)pthread_mutex_unlock(&http->lock);
    tv_http_bell_ring(http);
}

/* With the lock: what waits and has something to do now, at most so many. */
static size_t unpark(struct tv_http *http, int all, struct MHD_Connection **ret_resumed)
{
    int64_t now_us = tv_clock_us();
    size_t count = 0;
    for (struct http_conn *conn = http->streams; conn != NULL && count < RESUME_BATCH;
         conn = conn->stream->next) {
        if (conn->stream->parked && (all || has_news(conn, now_us))) {
            conn->stream->parked = 0;
            conn->deadline_us = now_us + HTTP_WRITE_US;
            ret_resumed[count++] = conn->connection;
        }
    }
    return count;
}

void tv_http_streams_wake(struct tv_http *http, int all)
{
    struct MHD_Connection *resumed[RESUME_BATCH];
    size_t count;
    do {
        (void)pthread_mutex_lock(&http->lock);
        count = unpark(http, all, resumed);
        (void)pthread_mutex_unlock(&http->lock);
        for (size_t i = 0; i < count; i++) { /* suspended, so it is still there */
            MHD_resume_connection(resumed[i]);
        }
    } while (count == RESUME_BATCH);
}
