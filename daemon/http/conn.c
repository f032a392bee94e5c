/*
 * conn.c - the registry of connections: their phases, deadlines and body buffers.
 *
 * Every change of phase goes through here, under the registry lock, so that the watch thread never
 * acts on a descriptor that has been closed or on a request that has ended.
 */
#include "http/conn.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"

static int64_t phase_deadline_us(enum http_phase phase, int64_t now_us)
{
    switch (phase) {
    case HTTP_IDLE:
        return now_us + HTTP_IDLE_US;
    case HTTP_HEADERS:
        return now_us + HTTP_HEADERS_US;
    case HTTP_BODY:
        return now_us + HTTP_BODY_US;
    case HTTP_WRITING:
    case HTTP_STREAMING:
        return now_us + HTTP_WRITE_US;
    case HTTP_REFUSED:
        return now_us + HTTP_LINGER_US;
    case HTTP_WAITING:
        break;
    }
    return INT64_MAX;
}

int tv_http_conn_enter(struct http_conn *conn, enum http_phase phase)
{
    struct tv_http *http = conn->http;
    int64_t now_us = tv_clock_us();
    int rc = -EPIPE;
    (void)pthread_mutex_lock(&http->lock); /* cannot fail: a plain mutex we initialised */
    if (!conn->cut) {
        tv_http_answer_unweigh(conn);
        conn->phase = phase;
        conn->active_us = now_us;
        conn->deadline_us = phase_deadline_us(phase, now_us);
        conn->body_start_us = now_us;
        conn->acked = 0;
        conn->cancelled = 0;
        if (phase == HTTP_WRITING) {
            tv_http_answer_weigh(conn, now_us);
        }
        rc = 0;
    }
    (void)pthread_mutex_unlock(&http->lock);
    return rc;
}

/* What a peer does not read is the kernel's, also after the close, which hides behind it: a peer
 * that takes nothing for so long is given up with all that waits for it. */
static void limit_unread(int fd)
{
    const unsigned int limit_ms = HTTP_WRITE_US / 1000;
    /* without it the connection only ends later */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, sizeof limit_ms);
}

struct http_conn *tv_http_conn_create(struct tv_http *http, struct MHD_Connection *connection,
                                      int admin)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct http_conn *conn = info == NULL ? NULL : calloc(1, sizeof *conn);
    if (conn == NULL) {
        return NULL;
    }
    conn->http = http;
    conn->connection = connection;
    conn->admin = admin;
    conn->fd = info->connect_fd;
    limit_unread(conn->fd);
    conn->tls = tv_http_tls_current(http);
    conn->phase = HTTP_HEADERS;
    conn->active_us = tv_clock_us();
    conn->deadline_us = conn->active_us + HTTP_HEADERS_US;
    atomic_init(&conn->body_bytes, 0);
    atomic_init(&conn->call_state, HTTP_CALL_RUNNING);
    (void)pthread_mutex_lock(&http->lock);
    conn->next = http->conns;
    if (http->conns != NULL) {
        http->conns->prev = conn;
    }
    http->conns = conn;
    http->conn_count++;
    (void)pthread_mutex_unlock(&http->lock);
    return conn;
}

void tv_http_conn_destroy(struct http_conn *conn)
{
    if (conn == NULL) {
        return;
    }
    struct tv_http *http = conn->http;
    (void)pthread_mutex_lock(&http->lock);
    if (conn->prev != NULL) {
        conn->prev->next = conn->next;
    } else {
        http->conns = conn->next;
    }
    if (conn->next != NULL) {
        conn->next->prev = conn->prev;
    }
    http->conn_count--;
    tv_http_answer_unweigh(conn);
    (void)pthread_mutex_unlock(&http->lock);
    tv_http_conn_body_free(conn);
    tv_http_conn_uri_free(conn);
    tv_call_destroy(conn->call);
    tv_http_tls_unref(conn->tls); /* libmicrohttpd has ended the session */
    free(conn);
}

void tv_http_gauges_set(struct tv_http *http)
{
    int64_t running = 0, readers, connections[2] = {0};
    (void)pthread_mutex_lock(&http->lock);
    for (const struct http_conn *conn = http->conns; conn != NULL; conn = conn->next) {
        running += conn->phase == HTTP_BODY || conn->phase == HTTP_WAITING;
        connections[conn->admin]++;
    }
    readers = http->stream_count;
    (void)pthread_mutex_unlock(&http->lock);
    atomic_store_explicit(&http->stats->http_running, running, memory_order_relaxed);
    atomic_store_explicit(&http->stats->streams_open, readers, memory_order_relaxed);
    for (int i = 0; i < 2; i++) {
        atomic_store_explicit(&http->stats->http_connections[i], connections[i],
                              memory_order_relaxed);
    }
}

void tv_http_conn_body_free(struct http_conn *conn)
{
    (void)atomic_fetch_sub_explicit(&conn->http->bodies_bytes, conn->body_capacity,
                                    memory_order_relaxed);
    free(conn->body);
    conn->body = NULL;
    conn->body_capacity = 0;
}

void tv_http_conn_uri_free(struct http_conn *conn)
{
    free(conn->uri);
    conn->uri = NULL;
    conn->uri_capacity = 0;
}

int tv_http_conn_uri(struct http_conn *conn, const char *uri)
{
    size_t bytes = strlen(uri);
    conn->uri_bad = bytes >= HTTP_URI_BYTES_MAX;
    bytes = conn->uri_bad ? 0 : bytes;
    if (bytes >= conn->uri_capacity) {
        size_t capacity = bytes < HTTP_URI_KEPT_BYTES ? HTTP_URI_KEPT_BYTES : bytes + 1;
        char *grown = realloc(conn->uri, capacity);
        if (grown == NULL) {
            return -ENOMEM;
        }
        conn->uri = grown;
        conn->uri_capacity = capacity;
    }
    memcpy(conn->uri, uri, bytes);
    conn->uri[bytes] = '\0';
    for (size_t i = 0; i < bytes; i++) {
        conn->uri_bad |= uri[i] <= 0x20 || uri[i] >= 0x7f || uri[i] == '#';
    }
    return 0;
}

/* Room for `wanted` bytes; grows by doubling, so that a client has to send what it occupies. */
static int body_grow(struct http_conn *conn, size_t wanted)
{
    struct tv_http *http = conn->http;
    size_t capacity = conn->body_capacity == 0 ? 4096 : conn->body_capacity;
    while (capacity < wanted) {
        capacity *= 2;
    }
    size_t added = capacity - conn->body_capacity;
    size_t held = atomic_fetch_add_explicit(&http->bodies_bytes, added, memory_order_relaxed);
    char *body = held + added > http->bodies_bytes_max ? NULL : realloc(conn->body, capacity);
    if (body == NULL) {
        (void)atomic_fetch_sub_explicit(&http->bodies_bytes, added, memory_order_relaxed);
        return held + added > http->bodies_bytes_max ? -ENOBUFS : -ENOMEM;
    }
    conn->body = body;
    conn->body_capacity = capacity;
    return 0;
}

int tv_http_conn_append(struct http_conn *conn, const char *data, size_t bytes)
{
    size_t held = atomic_load_explicit(&conn->body_bytes, memory_order_relaxed);
    if (bytes > conn->body_max - held) {
        return -EMSGSIZE;
    }
    if (held + bytes > conn->body_capacity) {
        int rc = body_grow(conn, held + bytes);
        if (rc != 0) {
            return rc;
        }
    }
    memcpy(conn->body + held, data, bytes);
    atomic_store_explicit(&conn->body_bytes, held + bytes, memory_order_relaxed);
    return 0;
}
