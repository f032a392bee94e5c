/*
 * wait.c - conditions on the monotonic clock. Owns none; refuses the wall clock, which people set.
 */
#include "base/wait.h"

#include <time.h>

int tv_wait_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (rc != 0) {
        return -rc;
    }
    rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (rc == 0) {
        rc = pthread_cond_init(cond, &attr);
    }
    (void)pthread_condattr_destroy(&attr); /* cannot fail on an initialised one */
    return -rc;
}

void tv_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t until_us)
{
    struct timespec until = {.tv_sec = until_us / 1000000, .tv_nsec = until_us % 1000000 * 1000};
    (void)pthread_cond_timedwait(cond, lock, &until);
}
