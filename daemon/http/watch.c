/*
 * watch.c - one thread with a clock: cuts what is too slow, notices clients that left.
 *
 * libmicrohttpd 0.9.75 times out idle connections only, does not look at suspended ones at all, and
 * misses the end of a peer's side when it comes with the last bytes. Whose answer is given up when
 * all of them hold too much memory is decided here too. Acts on descriptors by
 * shutdown() alone; closing stays with libmicrohttpd, so no descriptor is ever closed twice.
 * Registry lock first, then whatever sched/ locks.
 */
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "http/conn.h"

#define POLL_BATCH 64

/* Bytes the peer has acknowledged: grows as long as it reads. */
static uint64_t bytes_acked(int fd)
{
    struct tcp_info info;
    socklen_t bytes = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) {
        return 0;
    }
    return info.tcpi_bytes_acked;
}

static void cut(struct http_conn *conn, int64_t now_us)
{
    if (conn->phase == HTTP_HEADERS || conn->phase == HTTP_BODY) {
        tv_http_answer_timeout(conn);
    }
    tv_http_answer_unweigh(conn); /* its memory is on the way back */
    tv_log(TV_LOG_DEBUG, "http: a connection was cut in phase %d after %lld ms", (int)conn->phase,
           (long long)(now_us - conn->active_us) / 1000);
    conn->cut = 1;
    (void)shutdown(conn->fd, SHUT_RDWR); /* fails only when the peer is gone */
}

/* A peer that has taken something since the last look has its whole time again. */
static void progress_note(struct http_conn *conn, int64_t now_us)
{
    uint64_t acked = bytes_acked(conn->fd);
    if (acked != conn->acked) {
        conn->acked = acked;
        conn->deadline_us = now_us + HTTP_WRITE_US;
    }
}

void tv_http_answer_unweigh(struct http_conn *conn)
{
    conn->http->answers_bytes -= conn->answer_bytes;
    conn->answer_bytes = 0;
}

/* Whose peer has taken nothing for longest, other than this one; NULL: nobody writes. */
static struct http_conn *slowest_reader(const struct http_conn *conn, int64_t now_us)
{
    struct http_conn *slowest = NULL;
    for (struct http_conn *other = conn->http->conns; other != NULL; other = other->next) {
        if (other == conn || other->cut || other->phase != HTTP_WRITING) {
            continue;
        }
        progress_note(other, now_us);
        if (slowest == NULL || other->deadline_us < slowest->deadline_us) {
            slowest = other;
        }
    }
    return slowest;
}

void tv_http_answer_weigh(struct http_conn *conn, int64_t now_us)
{
    struct tv_http *http = conn->http;
    conn->answer_bytes = conn->call->reply.body.capacity;
    http->answers_bytes += conn->answer_bytes;
    while (http->answers_bytes > http->answers_bytes_max) {
        struct http_conn *slowest = slowest_reader(conn, now_us);
        if (slowest == NULL) {
            return; /* one answer alone is what it is */
        }
        if (now_us - http->relief_said_us > HTTP_RELIEF_SAID_US) {
            http->relief_said_us = now_us;
            tv_log(TV_LOG_WARNING,
                   "http: answers that clients do not read are more than %zu bytes "
                   "(answers_bytes): the slowest readers are cut",
                   http->answers_bytes_max);
        }
        tv_stats_add(&http->stats->http_unread, 1);
        cut(slowest, now_us);
    }
}

/* Is this connection past a limit? */
static int is_late(struct http_conn *conn, int64_t now_us)
{
    if (conn->phase == HTTP_WRITING || (conn->stream != NULL && !conn->stream->parked)) {
        progress_note(conn, now_us);
    }
    if (now_us >= conn->deadline_us) {
        return 1;
    }
    int64_t body_us = now_us - conn->body_start_us;
    if (conn->phase != HTTP_BODY || body_us < HTTP_BODY_START_US) {
        return 0;
    }
    size_t bytes = atomic_load_explicit(&conn->body_bytes, memory_order_relaxed);
    return (int64_t)bytes < body_us / 1000000 * HTTP_BODY_RATE;
}

/* Connections of which one poll() asks whether their peers are still there. */
struct batch {
    struct http_conn *conns[POLL_BATCH];
    struct pollfd polls[POLL_BATCH];
    nfds_t count;
};

/* Is this connection in a phase in which the end of its peer's side matters? While an answer is
 * written it does not: a client may half-close and read on. */
static int is_watched(const struct tv_http *http, const struct http_conn *conn)
{
    if (conn->cut || conn->phase == HTTP_WRITING) {
        return 0;
    }
    if (conn->phase == HTTP_STREAMING) { /* libmicrohttpd looks at it while it writes */
        return conn->stream != NULL && conn->stream->parked;
    }
    return conn->phase != HTTP_WAITING ||
           (!conn->cancelled && !http->closing &&
            atomic_load_explicit(&conn->call_state, memory_order_relaxed) != HTTP_CALL_DONE);
}

/* A peer that closed, reset or half-closed its side. Its waiting call: sched/ is told, once.
 * Otherwise libmicrohttpd is woken to read the end itself, behind whatever is still unread: an end
 * that arrives together with the last bytes is one edge of its epoll, which a short read uses up,
 * and the descriptor would stay until a timeout. Told again every tick, because that can happen to
 * the wake-up too. */
static void tell_gone(struct tv_http *http, struct batch *batch)
{
    int found = batch->count == 0 ? 0 : poll(batch->polls, batch->count, 0);
    for (nfds_t i = 0; i < batch->count && found > 0; i++) {
        struct http_conn *conn = batch->conns[i];
        if ((batch->polls[i].revents & (POLLRDHUP | POLLERR | POLLHUP)) == 0) {
            continue;
        }
        if (conn->phase == HTTP_WAITING) {
            conn->cancelled = 1;
            tv_sched_cancel(http->sched, conn->call);
        } else if (conn->phase == HTTP_STREAMING) {
            conn->stream->gone =
                1; /* a half-close cannot be told from a close; it is woken below */
        } else {
            (void)shutdown(conn->fd, SHUT_RD); /* fails only when the peer has reset */
        }
    }
    batch->count = 0;
}

static void tick(struct tv_http *http)
{
    struct batch batch;
    int64_t now_us = tv_clock_us();
    batch.count = 0;
    for (struct http_conn *conn = http->conns; conn != NULL; conn = conn->next) {
        if (!conn->cut && is_late(conn, now_us)) {
            cut(conn, now_us);
        }
        if (!is_watched(http, conn)) {
            continue;
        }
        batch.conns[batch.count] = conn;
        batch.polls[batch.count] = (struct pollfd){.fd = conn->fd, .events = POLLRDHUP};
        if (++batch.count == POLL_BATCH) {
            tell_gone(http, &batch);
        }
    }
    tell_gone(http, &batch);
}

void tv_http_bell_ring(void *http)
{
    const struct tv_http *rung = http;
    const uint64_t one = 1;
    if (rung->bell >= 0) {
        /* full: it rings already */
        ssize_t written = write(rung->bell, &one, sizeof one);
        (void)written;
    }
}

/* The rest of a tick, or the bell; whichever comes first. */
static void rest(const struct tv_http *http, int64_t until_us)
{
    struct pollfd bell = {.fd = http->bell, .events = POLLIN};
    int64_t left_us = until_us - tv_clock_us();
    int left_ms = left_us <= 0 ? 0 : (int)(left_us / 1000) + 1;
    /* interrupted or failed: an early look does no harm */
    if (poll(&bell, 1, left_ms < HTTP_TICK_MS ? left_ms : HTTP_TICK_MS) > 0) {
        uint64_t count;
        ssize_t got = read(http->bell, &count, sizeof count);
        (void)got; /* silent again; how often it rang says nothing */
    }
}

static void *watch_main(void *context)
{
    struct tv_http *http = context;
    int64_t tick_us = tv_clock_us();
    int watching = 1;
    while (watching) {
        rest(http, tick_us);
        int64_t now_us = tv_clock_us();
        int due = now_us >= tick_us;
        (void)pthread_mutex_lock(&http->lock);
        if (due) {
            tick_us = now_us + HTTP_TICK_MS * 1000;
            tick(http);
            if (!http->closing) {
                tv_sched_look(http->sched);
                if (http->stream_count > 0) {
                    (void)tv_sched_violation(http->sched, &http->violation); /* n stays 0 */
                }
            }
        }
        watching = http->watching;
        (void)pthread_mutex_unlock(&http->lock);
        tv_http_streams_wake(http, 0);
        if (due) {
            tv_http_tls_look(http);
        }
    }
    return NULL;
}

int tv_http_watch_start(struct tv_http *http)
{
    http->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (http->bell < 0) {
        return -errno;
    }
    tv_sched_events_watch(http->sched, tv_http_bell_ring, http);
    http->watching = 1;
    int rc = pthread_create(&http->watch, NULL, watch_main, http);
    http->watch_started = rc == 0;
    return -rc;
}

void tv_http_watch_stop(struct tv_http *http)
{
    if (!http->watch_started) {
        return;
    }
    (void)pthread_mutex_lock(&http->lock);
    http->watching = 0;
    (void)pthread_mutex_unlock(&http->lock);
    (void)pthread_join(http->watch, NULL); /* it is ours and joinable */
    http->watch_started = 0;
}
