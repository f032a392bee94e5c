/*
 * random.c - unpredictable bytes from the kernel.
 */
#include "base/random.h"

#include <errno.h>
#include <stdint.h>
#include <sys/random.h>

int tv_random_bytes(void *buffer, size_t bytes)
{
    uint8_t *next = buffer;
    while (bytes > 0) {
        ssize_t got = getrandom(next, bytes, 0);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            return -errno;
        }
        next += got;
        bytes -= (size_t)got;
    }
    return 0;
}
