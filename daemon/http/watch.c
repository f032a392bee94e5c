/*
 * watch.c - one thread with a clock: cuts what is too slow, notices clients that left.
 *
 * libmicrohttpd 0.9.75 times out idle connections only, and does not look at suspended ones at all.
 * Acts on descriptors by shutdown() alone; closing stays with libmicrohttpd, so no descriptor is
 * ever closed twice. Registry lock first, then whatever sched/ locks.
 */
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

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
    tv_log(TV_LOG_DEBUG, "http: a connection was cut in phase %d after %lld ms", (int)conn->phase,
           (long long)(now_us - conn->active_us) / 1000);
    conn->cut = 1;
    (void)shutdown(conn->fd, SHUT_RDWR); /* fails only when the peer is gone */
}

/* Is this connection past a limit? */
static int is_late(struct http_conn *conn, int64_t now_us)
{
    if (conn->phase == HTTP_WRITING) {
        uint64_t acked = bytes_acked(conn->fd);
        if (acked != conn->acked) {
            conn->acked = acked;
            conn->deadline_us = now_us + HTTP_WRITE_US;
        }
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

/* A peer that closed, reset or half-closed its side while its call waits: sched/ is told once. */
static void cancel_gone(struct tv_http *http, struct http_conn **batch, struct pollfd *polls,
                        nfds_t count)
{
    if (count == 0 || poll(polls, count, 0) <= 0) {
        return;
    }
    for (nfds_t i = 0; i < count; i++) {
        if ((polls[i].revents & (POLLRDHUP | POLLERR | POLLHUP)) != 0) {
            batch[i]->cancelled = 1;
            tv_sched_cancel(http->sched, batch[i]->call);
        }
    }
}

static void tick(struct tv_http *http)
{
    struct http_conn *batch[POLL_BATCH];
    struct pollfd polls[POLL_BATCH];
    nfds_t count = 0;
    int64_t now_us = tv_clock_us();
    for (struct http_conn *conn = http->conns; conn != NULL; conn = conn->next) {
        if (!conn->cut && is_late(conn, now_us)) {
            cut(conn, now_us);
        }
        if (conn->phase != HTTP_WAITING || conn->cancelled || http->closing ||
            atomic_load_explicit(&conn->call_state, memory_order_relaxed) == HTTP_CALL_DONE) {
            continue;
        }
        batch[count] = conn;
        polls[count] = (struct pollfd){.fd = conn->fd, .events = POLLRDHUP};
        count++;
        if (count == POLL_BATCH) {
            cancel_gone(http, batch, polls, count);
            count = 0;
        }
    }
    cancel_gone(http, batch, polls, count);
}

static void *watch_main(void *context)
{
    struct tv_http *http = context;
    const struct timespec pause = {.tv_nsec = HTTP_TICK_MS * 1000000L};
    int watching = 1;
    while (watching) {
        (void)nanosleep(&pause, NULL); /* an interrupted pause is only a shorter one */
        (void)pthread_mutex_lock(&http->lock);
        tick(http);
        watching = http->watching;
        (void)pthread_mutex_unlock(&http->lock);
    }
    return NULL;
}

int tv_http_watch_start(struct tv_http *http)
{
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
