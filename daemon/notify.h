/*
 * notify.h - what the service manager is told (readiness, a line of status, the watchdog, the
 * stop), and the sockets it hands over.
 *
 * Without a manager that listens ($NOTIFY_SOCKET), and in a build without libsystemd, nothing is
 * sent. A message that cannot be sent is said once in the log, and the service goes on.
 */
#ifndef TV_NOTIFY_H
#define TV_NOTIFY_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "model/model.h"

/* Was this build made with libsystemd? */
int tv_notify_built(void);
/* Does a manager listen? */
int tv_notify_wanted(void);
/* Microseconds from one WATCHDOG=1 to the next; 0: nobody waits for any. */
int64_t tv_notify_watchdog_us(void);
/* Listening sockets that the manager has bound and named "work" and "admin"; -1: none, and both in
 * a build without libsystemd. 0 or -EINVAL with text. Main thread, before others exist. */
int tv_notify_sockets(int *ret_work, int *ret_admin, char *error, size_t error_bytes);
/* Lines of NAME=value. Any thread. */
void tv_notify_send(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* How a load is told of. */
struct tv_herald_times {
    int64_t look_us;   /* from one look at the load to the next */
    int64_t extend_us; /* more time, each time that bytes have come */
    int64_t rest_us;   /* once, for what follows the last byte */
    int64_t max_us;    /* no more time after so long */
};
extern const struct tv_herald_times tv_herald_usual;

/* A thread that watches a load. */
struct tv_herald {
    const struct tv_model_progress *progress;
    const struct tv_herald_times *times;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int ending; /* guarded by the lock */
    int running;
};
/* progress and times outlive it. 0: also when nobody listens, and nothing runs; -EAGAIN. */
int tv_herald_start(struct tv_herald *herald, const struct tv_model_progress *progress,
                    const struct tv_herald_times *times);
void tv_herald_stop(struct tv_herald *herald);

#endif
