/*
 * wait.h - conditions that are waited for until a moment of tv_clock_us.
 */
#ifndef TV_BASE_WAIT_H
#define TV_BASE_WAIT_H

#include <pthread.h>
#include <stdint.h>

/* Ended with pthread_cond_destroy. 0, or what the system said: -ENOMEM, -EAGAIN. */
int tv_wait_init(pthread_cond_t *cond);
/* Until it is signalled, the moment has come, or for no reason: the caller looks again. */
void tv_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t until_us);

#endif
