/*
 * checked.h - size arithmetic that cannot wrap.
 */
#ifndef TV_BASE_CHECKED_H
#define TV_BASE_CHECKED_H

#include <errno.h>
#include <stddef.h>

/* *ret = a * b, or -EOVERFLOW with *ret untouched. */
static inline int tv_size_mul(size_t a, size_t b, size_t *ret)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) {
        return -EOVERFLOW;
    }
    *ret = product;
    return 0;
}

#endif
