/*
 * http.c - the two listeners: bind, start, stop.
 *
 * Binds its own sockets, so that a used port has a clear text, or takes over what was handed to the
 * process. Stop order: no new connections, no
 * new calls, (the caller ends sched/, which completes what waits), write, stop.
 */
#include "http/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "http/conn.h"

#define BACKLOG               1024
#define CONNECTION_BYTES      (32u << 10)
#define ADMIN_CONNECTIONS_MAX 256
#define PER_ADDRESS_DEFAULT   64

/* A numeric address or "localhost" (IPv4) as a socket address. */
static int resolve(const char *host, int32_t port, struct sockaddr_storage *ret, socklen_t *ret_len)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    memset(ret, 0, sizeof *ret);
    if (inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, &v4.sin_addr) ==
        1) {
        memcpy(ret, &v4, sizeof v4);
        *ret_len = sizeof v4;
        return 0;
    }
    if (inet_pton(AF_INET6, host, &v6.sin6_addr) == 1) {
        memcpy(ret, &v6, sizeof v6);
        *ret_len = sizeof v6;
        return 0;
    }
    return -EINVAL;
}

/* The bound port, with the host as it was asked for; NULL: as the socket says. */
static int set_url(struct http_listener *listener, const char *host, int is_tls)
{
    struct sockaddr_storage address;
    socklen_t bytes = sizeof address;
    char text[INET6_ADDRSTRLEN];
    if (getsockname(listener->fd, (struct sockaddr *)&address, &bytes) != 0) {
        return -errno;
    }
    int is_v6 = address.ss_family == AF_INET6;
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&address;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&address;
    if (!is_v6 && address.ss_family != AF_INET) {
        return -EAFNOSUPPORT;
    }
    if (host == NULL) { /* both families fit */
        host = inet_ntop(address.ss_family,
                         is_v6 ? (const void *)&v6->sin6_addr : (const void *)&v4->sin_addr, text,
                         sizeof text);
    }
    (void)snprintf(listener->url, sizeof listener->url,
                   strchr(host, ':') != NULL ? "http%s://[%s]:%d" : "http%s://%s:%d",
                   is_tls ? "s" : "", host, (int)ntohs(is_v6 ? v6->sin6_port : v4->sin_port));
    return 0;
}

static int bind_listener(struct http_listener *listener, const char *host, int32_t port, int is_tls,
                         char *error, size_t error_bytes)
{
    struct sockaddr_storage address;
    socklen_t bytes = 0;
    const int on = 1;
    int rc = resolve(host, port, &address, &bytes);
    if (rc == 0) {
        listener->fd =
            socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
        if (listener->fd < 0 ||
            setsockopt(listener->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
            bind(listener->fd, (struct sockaddr *)&address, bytes) != 0 ||
            listen(listener->fd, BACKLOG) != 0) {
            rc = -errno;
        }
    }
    if (rc == 0) {
        rc = set_url(listener, host, is_tls);
    }
    if (rc != 0) {
        (void)snprintf(error, error_bytes, "cannot listen on %s port %d: %s", host, port,
                       strerror(-rc));
    }
    return rc;
}

static int is_loopback_url(const char *url)
{
    const char *host = strstr(url, "://");
    return host == NULL || strncmp(host, "://127.", 7) == 0 || strncmp(host, "://[::1]", 8) == 0 ||
           strncmp(host, "://localhost", 12) == 0;
}

/* A socket that the service manager has bound: what it is reached by decides as an address does. */
static int adopt_listener(struct http_listener *listener, const char *name, int is_tls, char *error,
                          size_t error_bytes)
{
    int listening = 0, rc = 0, flags = fcntl(listener->fd, F_GETFL);
    socklen_t bytes = sizeof listening;
    if (flags < 0 || getsockopt(listener->fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &bytes) != 0 ||
        fcntl(listener->fd, F_SETFL, flags | O_NONBLOCK) != 0) {
        rc = -errno;
    } else if (!listening) {
        rc = -EINVAL;
    } else {
        rc = set_url(listener, NULL, is_tls);
    }
    if (rc != 0) {
        (void)snprintf(error, error_bytes, "the %s socket that was handed over cannot be used: %s",
                       name, strerror(-rc));
    } else if (!is_loopback_url(listener->url) && listener->http->config->api_key_file[0] == '\0') {
        (void)snprintf(error, error_bytes,
                       "the %s socket that was handed over (%s): an address other than loopback "
                       "needs an api_key_file",
                       name, listener->url);
        rc = -EINVAL;
    }
    return rc;
}

int tv_http_probe(const struct tv_config *config, const struct tv_http_sockets *sockets,
                  char *error, size_t error_bytes)
{
    struct http_listener work = {.fd = -1}, admin = {.fd = -1};
    int rc = 0;
    if (sockets->work < 0) {
        rc = bind_listener(&work, config->listen_host, config->listen_port, 0, error, error_bytes);
    }
    if (rc == 0 && config->admin_on && sockets->admin < 0) {
        rc = bind_listener(&admin, config->admin_host, config->admin_port, 0, error, error_bytes);
    }
    if (work.fd >= 0) {
        (void)close(work.fd); /* nothing was accepted */
    }
    if (admin.fd >= 0) {
        (void)close(admin.fd);
    }
    return rc;
}

/* What libmicrohttpd says goes to the log, as detail: its lines are about single connections. */
static void library_log(void *context, const char *format, va_list arguments)
{
    char text[256];
    (void)context;
    if (vsnprintf(text, sizeof text, format, arguments) > 0) {
        text[strcspn(text, "\n")] = '\0';
        tv_log(TV_LOG_DEBUG, "http library: %s", text);
    }
}

static int start_listener(struct http_listener *listener, int threads, int connections,
                          int per_address)
{
    struct MHD_OptionItem options[8];
    size_t count = 0;
    int rc = tv_http_accept_prepare(listener);
    if (rc != 0) {
        return rc;
    }
    listener->connections_max = connections;
    unsigned int flags =
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    if (threads > 1) {
        options[count++] = (struct MHD_OptionItem){MHD_OPTION_THREAD_POOL_SIZE, threads, NULL};
    }
    if (per_address > 0) {
        options[count++] =
            (struct MHD_OptionItem){MHD_OPTION_PER_IP_CONNECTION_LIMIT, per_address, NULL};
    }
    if (listener->http->tls != NULL) { /* nothing reloads before all is started */
        flags |= MHD_USE_TLS;
        tv_http_tls_options(listener->http->config->tls_min, options + count);
        count += HTTP_TLS_OPTIONS;
    }
    /* divided among the threads; the limit is kept before them, whichever they fall to */
    options[count++] =
        (struct MHD_OptionItem){MHD_OPTION_CONNECTION_LIMIT, (intptr_t)connections * threads, NULL};
    options[count] = (struct MHD_OptionItem){MHD_OPTION_END, 0, NULL};
    listener->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, tv_http_access, listener, MHD_OPTION_EXTERNAL_LOGGER, library_log,
        NULL, MHD_OPTION_LISTEN_SOCKET, listener->silent_fd, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned int)HTTP_IDLE_S, MHD_OPTION_URI_LOG_CALLBACK, tv_http_uri, listener,
        MHD_OPTION_NOTIFY_COMPLETED, tv_http_completed, listener, MHD_OPTION_NOTIFY_CONNECTION,
        tv_http_connection, listener, MHD_OPTION_ARRAY, options, MHD_OPTION_END);
    listener->silent_fd = -1; /* after a failed start it may be closed, or not */
    return listener->daemon == NULL ? -EAGAIN : 0;
}

/* Loud: what is said on such a listener, keys included, can be read on the way. */
static void warn_open(const struct http_listener *listener)
{
    if (listener->http->tls == NULL && !is_loopback_url(listener->url)) {
        tv_log(
            TV_LOG_WARNING,
            "http: %s can be reached from other machines, and what is said there is NOT "
            "ENCRYPTED, keys included: set tls_cert and tls_key, or put a proxy with TLS in front",
            listener->url);
    }
}

/* Versions below 1.0.3 have known faults that our own checks and a proxy have to cover. */
static void say_library(struct tv_http *http)
{
    const char *version = MHD_get_version();
    int major = 0, minor = 0, patch = 0;
    int fields = sscanf(version, "%d.%d.%d", &major, &minor, &patch);
    int is_old = fields < 3 || major * 1000000 + minor * 1000 + patch < 1000003;
    tv_sched_http_library_set(http->sched, version);
    tv_log(TV_LOG_INFO, "http: libmicrohttpd %s", version);
    warn_open(&http->work);
    warn_open(&http->admin);
    if (is_old && !is_loopback_url(http->work.url)) {
        tv_log(TV_LOG_WARNING,
               "http: libmicrohttpd %s takes requests that two parsers can read differently; put a "
               "proxy in front, or use 1.0.3 or newer",
               version);
    }
}

static int listeners_bind(struct tv_http *http, const struct tv_config *config, char *error,
                          size_t error_bytes)
{
    int is_tls = http->tls != NULL, rc;
    if (http->work.fd >= 0) {
        rc = adopt_listener(&http->work, "work", is_tls, error, error_bytes);
    } else {
        rc = bind_listener(&http->work, config->listen_host, config->listen_port, is_tls, error,
                           error_bytes);
    }
    if (rc != 0 || !config->admin_on) {
        return rc;
    }
    return http->admin.fd >= 0 ? adopt_listener(&http->admin, "admin", is_tls, error, error_bytes)
                               : bind_listener(&http->admin, config->admin_host, config->admin_port,
                                               is_tls, error, error_bytes);
}

static int start_all(struct tv_http *http, const struct tv_config *config, char *error,
                     size_t error_bytes)
{
    int rc = listeners_bind(http, config, error, error_bytes);
    if (rc != 0) {
        return rc;
    }
    say_library(http);
    int per_address = config->connections_per_address;
    if (per_address == 0 && !is_loopback_url(http->work.url)) {
        per_address = PER_ADDRESS_DEFAULT;
    }
    rc = tv_http_watch_start(http);
    if (rc == 0) {
        rc =
            start_listener(&http->work, config->http_threads, config->connections_max, per_address);
    }
    if (rc == 0 && config->admin_on) {
        rc = start_listener(&http->admin, 1, ADMIN_CONNECTIONS_MAX, 0);
    }
    if (rc == 0) {
        rc = tv_http_accept_start(http);
    }
    if (rc != 0) {
        (void)snprintf(error, error_bytes, "the listeners' threads cannot be started: %s",
                       strerror(-rc));
    }
    return rc;
}

static void socket_drop(int fd)
{
    if (fd >= 0) {
        (void)close(fd); /* only a name for what the other side keeps */
    }
}

int tv_http_create(const struct tv_config *config, const struct tv_http_sockets *sockets,
                   struct tv_sched *sched, struct tv_stats *stats, struct tv_http **ret_http,
                   char *error, size_t error_bytes)
{
    const char *names[TV_STATS_ROUTES - 1];
    size_t names_count;
    struct tv_http *http = calloc(1, sizeof *http);
    if (http == NULL) {
        (void)snprintf(error, error_bytes, "no memory for the listeners");
        socket_drop(sockets->work);
        socket_drop(sockets->admin);
        return -ENOMEM;
    }
    http->sched = sched;
    http->stats = stats;
    names_count = tv_http_paths(names, sizeof names / sizeof names[0]);
    tv_sched_routes_set(sched, names, names_count);
    http->limits = *tv_sched_limits(sched);
    http->body_bytes = (size_t)config->body_bytes;
    http->body_bytes_large = (size_t)config->body_bytes_large;
    http->bodies_bytes_max = 4 * http->body_bytes_large;
    if (http->bodies_bytes_max < HTTP_BODIES_BYTES_MIN) {
        http->bodies_bytes_max = HTTP_BODIES_BYTES_MIN;
    }
    http->answers_bytes_max = (size_t)config->answers_bytes;
    http->relief_said_us = -HTTP_RELIEF_SAID_US;
    http->event_readers_max = config->event_readers_max;
    http->bell = -1;
    http->accept_bell = -1;
    http->work = (struct http_listener){.http = http, .fd = sockets->work, .silent_end = -1};
    http->admin = (struct http_listener){.http = http, .fd = sockets->admin, .silent_end = -1};
    (void)pthread_mutex_init(&http->lock, NULL); /* cannot fail with default attributes */
    (void)pthread_mutex_init(&http->secrets_lock, NULL);
    http->config = config;
    atomic_init(&http->closed, 0);
    atomic_init(&http->submitting, 0);
    atomic_init(&http->bodies_bytes, 0);
    atomic_init(&http->id_next, 1);
    int rc = tv_random_bytes(&http->id_prefix, sizeof http->id_prefix);
    if (rc != 0) {
        (void)snprintf(error, error_bytes, "no random bytes: %s", strerror(-rc));
    } else {
        rc = tv_http_secrets_load(http, error, error_bytes);
    }
    if (rc == 0) {
        rc = start_all(http, config, error, error_bytes);
    }
    if (rc != 0) {
        tv_http_close(http);
        tv_http_destroy(http);
        return rc;
    }
    *ret_http = http;
    return 0;
}

const char *tv_http_url(const struct tv_http *http, int admin)
{
    return admin ? http->admin.url : http->work.url;
}

int32_t tv_http_open_count(struct tv_http *http, int64_t quiet_ms)
{
    int32_t count = 0;
    int64_t now_us = tv_clock_us();
    (void)pthread_mutex_lock(&http->lock);
    for (const struct http_conn *conn = http->conns; conn != NULL; conn = conn->next) {
        if (!conn->admin && conn->phase != HTTP_STREAMING && /* told to end, whenever that is */
            (conn->phase != HTTP_IDLE || now_us - conn->active_us < quiet_ms * 1000)) {
            count++;
        }
    }
    (void)pthread_mutex_unlock(&http->lock);
    return count;
}

void tv_http_drain(struct tv_http *http, int64_t deadline_unix_ms)
{
    (void)pthread_mutex_lock(&http->lock);
    http->draining_unix_ms = deadline_unix_ms;
    (void)pthread_mutex_unlock(&http->lock);
    tv_http_bell_ring(http);
}

void tv_http_close(struct tv_http *http)
{
    tv_http_accept_stop(http);
    tv_sched_events_watch(http->sched, NULL, NULL); /* it may outlive the bell */
    atomic_store(&http->closed, 1);
    while (atomic_load(&http->submitting) != 0) {
        (void)sched_yield(); /* a submit takes microseconds */
    }
    (void)pthread_mutex_lock(&http->lock);
    http->closing = 1;
    (void)pthread_mutex_unlock(&http->lock);
    tv_http_bell_ring(http);
}

/* Connections that still have an answer to write. */
static int32_t unwritten(struct tv_http *http)
{
    int32_t count = 0;
    (void)pthread_mutex_lock(&http->lock);
    for (const struct http_conn *conn = http->conns; conn != NULL; conn = conn->next) {
        count += conn->phase == HTTP_WAITING || conn->phase == HTTP_WRITING ||
                 conn->phase == HTTP_STREAMING;
    }
    (void)pthread_mutex_unlock(&http->lock);
    return count;
}

static void stop_listener(struct http_listener *listener)
{
    if (listener->daemon != NULL) {
        MHD_stop_daemon(listener->daemon);
    }
    if (listener->silent_end >= 0) {
        (void)close(listener->silent_end); /* nothing was ever said there */
    }
    if (listener->fd >= 0) {
        (void)close(listener->fd); /* a listening socket has nothing to lose */
    }
}

void tv_http_destroy(struct tv_http *http)
{
    if (http == NULL) {
        return;
    }
    const struct timespec pause = {.tv_nsec = 1000000L};
    int64_t limit_us = tv_clock_us() + HTTP_STOP_WRITE_US;
    while (unwritten(http) > 0 && tv_clock_us() < limit_us) {
        (void)nanosleep(&pause, NULL); /* an interrupted pause is only a shorter one */
    }
    tv_http_watch_stop(http);
    tv_http_streams_wake(http, 1); /* none may be suspended when its listener ends */
    stop_listener(&http->work);
    stop_listener(&http->admin);
    if (http->bell >= 0) {
        (void)close(http->bell); /* a counter */
    }
    (void)pthread_mutex_destroy(&http->lock);
    tv_http_secrets_finish(http); /* no connection is left */
    (void)pthread_mutex_destroy(&http->secrets_lock);
    free(http);
}
