/*
 * random.h - unpredictable bytes from the kernel, for ids, epochs and seeds nobody gave.
 */
#ifndef TV_BASE_RANDOM_H
#define TV_BASE_RANDOM_H

#include <stddef.h>

/* 0 or negative errno. */
int tv_random_bytes(void *buffer, size_t bytes);

#endif
