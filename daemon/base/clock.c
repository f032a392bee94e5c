/*
 * clock.c - the two clocks.
 */
#include "base/clock.h"

#include <time.h>

int64_t tv_clock_us(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now); /* cannot fail with this clock id */
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int64_t tv_clock_unix_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now); /* cannot fail with this clock id */
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}
