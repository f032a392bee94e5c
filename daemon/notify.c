/*
 * notify.c - messages to the service manager, the thread that tells it of a load, its sockets.
 *
 * More time is asked for only while bytes come, and not for ever: a load that stands still is the
 * manager's to end.
 */
#include "notify.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "have_systemd.h"
#if TV_HAVE_SYSTEMD
#include <systemd/sd-daemon.h>
#endif

#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"

#define MESSAGE_BYTES 512
#define MIB           (1 << 20)

const struct tv_herald_times tv_herald_usual = {
    .look_us = 10 * 1000000LL,
    .extend_us = 60 * 1000000LL,
    .rest_us = 300 * 1000000LL,
    .max_us = 1800 * 1000000LL,
};

int tv_notify_built(void)
{
    return TV_HAVE_SYSTEMD;
}

#if TV_HAVE_SYSTEMD

int tv_notify_wanted(void)
{
    const char *name = getenv("NOTIFY_SOCKET");
    return name != NULL && name[0] != '\0';
}

int64_t tv_notify_watchdog_us(void)
{
    uint64_t limit_us = 0;
    /* below 0: the variables cannot be read, and a watchdog that nobody asked for is not fed */
    if (!tv_notify_wanted() || sd_watchdog_enabled(0, &limit_us) <= 0) {
        return 0;
    }
    return (int64_t)(limit_us / 4); /* told late by half of it, it is still told in time */
}

void tv_notify_send(const char *format, ...)
{
    static atomic_int told; /* relaxed: one line in the log is wanted, and two do no harm */
    char message[MESSAGE_BYTES];
    va_list arguments;
    if (!tv_notify_wanted()) {
        return;
    }
    va_start(arguments, format);
    (void)vsnprintf(message, sizeof message, format, arguments); /* a status may be cut */
    va_end(arguments);
    int rc = sd_notify(0, message);
    if (rc < 0 && atomic_exchange_explicit(&told, 1, memory_order_relaxed) == 0) {
        tv_log(TV_LOG_WARNING, "the service manager cannot be told of the state: %s",
               strerror(-rc));
    }
}

int tv_notify_sockets(int *ret_work, int *ret_admin, char *error, size_t error_bytes)
{
    char **names = NULL;
    int work = -1, admin = -1, rc = 0;
    int count = sd_listen_fds_with_names(1, &names);
    if (count < 0) {
        (void)snprintf(error, error_bytes, "the sockets that were handed over: %s",
                       strerror(-count));
        return -EINVAL;
    }
    for (int i = 0; i < count; i++) {
        int *socket = strcmp(names[i], "work") == 0    ? &work
                      : strcmp(names[i], "admin") == 0 ? &admin
                                                       : NULL;
        if (socket == NULL || *socket >= 0) {
            (void)snprintf(error, error_bytes,
                           "a socket named %.100s was handed over: FileDescriptorName is work or "
                           "admin, each once",
                           names[i]);
            rc = -EINVAL;
        } else {
            *socket = SD_LISTEN_FDS_START + i;
        }
        free(names[i]);
    }
    free(names);
    *ret_work = work;
    *ret_admin = admin;
    return rc;
}

#else

int tv_notify_wanted(void)
{
    return 0;
}

int tv_notify_sockets(int *ret_work, int *ret_admin, char *error, size_t error_bytes)
{
    (void)error; /* this build asks nobody */
    (void)error_bytes;
    *ret_work = *ret_admin = -1;
    return 0;
}

int64_t tv_notify_watchdog_us(void)
{
    return 0;
}

void tv_notify_send(const char *format, ...)
{
    (void)format; /* this build has nobody to tell */
}

#endif

static int64_t load_relaxed(const _Atomic int64_t *number)
{
    return atomic_load_explicit(number, memory_order_relaxed);
}

/* One look. */
static void tell(const struct tv_herald *herald, int64_t since_us, int64_t *seen, int *rested)
{
    const struct tv_herald_times *times = herald->times;
    int64_t bytes = load_relaxed(&herald->progress->bytes_read);
    int64_t total = load_relaxed(&herald->progress->bytes_total);
    if (bytes == *seen || tv_clock_us() - since_us > times->max_us) {
        return;
    }
    *seen = bytes;
    if (total > 0 && bytes >= total) {
        if (!*rested) {
            tv_notify_send("EXTEND_TIMEOUT_USEC=%lld\nSTATUS=loaded; the self-test runs",
                           (long long)times->rest_us);
            *rested = 1;
        }
        return;
    }
    tv_notify_send("EXTEND_TIMEOUT_USEC=%lld\nSTATUS=loading: %lld of %lld MiB",
                   (long long)times->extend_us, (long long)(bytes / MIB), (long long)(total / MIB));
}

static void *herald_main(void *context)
{
    struct tv_herald *herald = context;
    int64_t start_us = tv_clock_us(), seen = 0;
    int rested = 0;
    (void)pthread_mutex_lock(&herald->lock); /* an ordinary mutex */
    while (!herald->ending) {
        /* woken early, it looks early */
        tv_wait_until(&herald->changed, &herald->lock, tv_clock_us() + herald->times->look_us);
        if (!herald->ending) {
            (void)pthread_mutex_unlock(&herald->lock);
            tell(herald, start_us, &seen, &rested);
            (void)pthread_mutex_lock(&herald->lock);
        }
    }
    (void)pthread_mutex_unlock(&herald->lock);
    return NULL;
}

int tv_herald_start(struct tv_herald *herald, const struct tv_model_progress *progress,
                    const struct tv_herald_times *times)
{
    sigset_t all, before;
    *herald = (struct tv_herald){.progress = progress, .times = times};
    if (!tv_notify_wanted()) {
        return 0;
    }
    int rc = tv_wait_init(&herald->changed);
    if (rc != 0) {
        return rc;
    }
    (void)pthread_mutex_init(&herald->lock, NULL); /* default attributes cannot fail */
    (void)sigfillset(&all);                        /* signals are main's */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = -pthread_create(&herald->thread, NULL, herald_main, herald);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL); /* it was a valid mask */
    herald->running = rc == 0;
    if (rc != 0) {
        (void)pthread_cond_destroy(&herald->changed);
        (void)pthread_mutex_destroy(&herald->lock);
    }
    return rc;
}

void tv_herald_stop(struct tv_herald *herald)
{
    if (!herald->running) {
        return;
    }
    (void)pthread_mutex_lock(&herald->lock);
    herald->ending = 1;
    (void)pthread_cond_signal(&herald->changed);
    (void)pthread_mutex_unlock(&herald->lock);
    (void)pthread_join(herald->thread, NULL); /* ours and joinable */
    (void)pthread_cond_destroy(&herald->changed);
    (void)pthread_mutex_destroy(&herald->lock);
    herald->running = 0;
}
