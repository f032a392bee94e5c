/*
 * clock.h - the two clocks: monotonic for every decision, wall time for what people read.
 */
#ifndef TV_BASE_CLOCK_H
#define TV_BASE_CLOCK_H

#include <stdint.h>

int64_t tv_clock_us(void);      /* monotonic microseconds */
int64_t tv_clock_unix_ms(void); /* wall clock, milliseconds since 1970 */

#endif
