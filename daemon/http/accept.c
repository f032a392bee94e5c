/*
 * accept.c - the thread that takes connections from both listening sockets.
 *
 * libmicrohttpd serves them, and would take them too. But to end that, MHD_quiesce_daemon and each
 * thread of a pool take the socket out of an epoll, and whichever finds it gone aborts the process;
 * and a thread without a connection tries again at once, with a whole processor, when no descriptor
 * is left (0.9.75 to 1.0). So its threads listen to a socket that nobody can reach, and are handed
 * connections from here. None is refused: over the limit of connections, or of the process's
 * descriptors, they wait in the kernel until others end.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "http/conn.h"

#define BATCH   64        /* then the other listener has its turn */
#define REST_MS 50        /* when there is no room: until the next look */
#define LOST_US 1000000LL /* a connection begins at once, or not at all */
#define SAID_US HTTP_RELIEF_SAID_US

int tv_http_accept_prepare(struct http_listener *listener)
{
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
        return -errno;
    }
    listener->silent_fd = pair[0];
    listener->silent_end = pair[1];
    return 0;
}

/* How many more may be open. What libmicrohttpd was handed and never began it gave up, for want of
 * memory. */
static int64_t room(struct http_listener *listener, int64_t now_us)
{
    uint64_t ended = atomic_load(&listener->ended); /* first: never above `begun` */
    uint64_t begun = atomic_load(&listener->begun);
    if (listener->handed < begun || now_us - listener->handed_us > LOST_US) {
        listener->handed = begun;
    }
    return listener->connections_max - (int64_t)(listener->handed - ended);
}

/* May accept() be called again at once: nobody waits, or who did has left? */
static int is_passing(int error)
{
    return error == EAGAIN || error == EINTR || error == ECONNABORTED || error == EPROTO ||
           error == ENETDOWN || error == ENETUNREACH || error == EHOSTDOWN ||
           error == EHOSTUNREACH || error == ENONET;
}

/* 0, or the error that does not pass by itself. */
static int take(struct http_listener *listener, int64_t now_us)
{
    for (int i = 0; i < BATCH && room(listener, now_us) > 0; i++) {
        struct sockaddr_storage peer;
        socklen_t bytes = sizeof peer;
        int fd =
            accept4(listener->fd, (struct sockaddr *)&peer, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            return is_passing(errno) ? 0 : errno;
        }
        listener->handed++;
        listener->handed_us = now_us;
        if (MHD_add_connection(listener->daemon, fd, (struct sockaddr *)&peer, bytes) != MHD_YES) {
            listener->handed--; /* and closed: too many of one address, or no memory */
        }
    }
    return 0;
}

static void say(int error)
{
    if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        tv_log(TV_LOG_WARNING,
               "http: descriptors or memory for connections are used up; new ones wait");
    } else {
        tv_log(TV_LOG_WARNING, "http: connections cannot be accepted: %s", strerror(error));
    }
}

/* The listeners that may take somebody are asked about; how long to wait for them, in ms. */
static int ask(struct http_listener *const listeners[2], int rests, struct pollfd ret_polls[2])
{
    int64_t now_us = tv_clock_us();
    int limit_ms = -1;
    for (int i = 0; i < 2; i++) {
        int waits = listeners[i]->daemon != NULL && (rests || room(listeners[i], now_us) <= 0);
        ret_polls[i] = (struct pollfd){.fd = waits ? -1 : listeners[i]->fd, .events = POLLIN};
        limit_ms = waits ? REST_MS : limit_ms;
    }
    return limit_ms;
}

static void *accept_main(void *context)
{
    struct tv_http *http = context;
    struct http_listener *const listeners[2] = {&http->work, &http->admin};
    int64_t said_us = -SAID_US;
    int error = 0;
    while (!atomic_load(&http->accept_ends)) {
        struct pollfd polls[3];
        int limit_ms = ask(listeners, error != 0, polls);
        polls[2] = (struct pollfd){.fd = http->accept_bell, .events = POLLIN};
        (void)poll(polls, 3, limit_ms); /* interrupted or failed: it says nothing of anybody */
        int64_t now_us = tv_clock_us();
        error = 0;
        for (int i = 0; i < 2; i++) {
            int rc = polls[i].revents != 0 ? take(listeners[i], now_us) : 0;
            error = rc != 0 ? rc : error;
        }
        if (error != 0 && now_us - said_us >= SAID_US) {
            said_us = now_us;
            say(error);
        }
    }
    return NULL;
}

int tv_http_accept_start(struct tv_http *http)
{
    http->accept_bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (http->accept_bell < 0) {
        return -errno;
    }
    int rc = pthread_create(&http->accept, NULL, accept_main, http);
    http->accept_started = rc == 0;
    return -rc;
}

void tv_http_accept_stop(struct tv_http *http)
{
    const uint64_t one = 1;
    if (http->accept_started) {
        atomic_store(&http->accept_ends, 1);
        ssize_t written = write(http->accept_bell, &one, sizeof one);
        (void)written;                          /* a counter that holds anything wakes */
        (void)pthread_join(http->accept, NULL); /* it is ours and joinable */
        http->accept_started = 0;
    }
    if (http->accept_bell >= 0) {
        (void)close(http->accept_bell); /* a counter */
        http->accept_bell = -1;
    }
}
