/*
 * faults.c - libc's functions with a failure planted in the n-th call.
 */
#include "faults.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "internal.h"

/* Plain sequential consistency: a test's speed does not matter. */
static atomic_uint armed;
static atomic_int left, hits;
static atomic_llong blocks, descriptors;

void fault_arm(unsigned kinds, int n)
{
    atomic_store(&hits, 0);
    atomic_store(&left, n);
    atomic_store(&armed, kinds);
}

int fault_disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&hits);
}

int fault_meets(unsigned kind)
{
    if ((atomic_load(&armed) & kind) == 0 || atomic_fetch_sub(&left, 1) != 1) {
        return 0;
    }
    atomic_store(&hits, 1);
    return 1;
}

int64_t fault_blocks(void)
{
    return atomic_load(&blocks);
}

int64_t fault_descriptors(void)
{
    return atomic_load(&descriptors);
}

void fault_settle(int64_t wanted)
{
    time_t until = time(NULL) + 30; /* only a leak gets there */
    while (fault_blocks() != wanted && time(NULL) < until) {
        (void)sched_yield();
    }
    if (fault_blocks() != wanted) {
        fail_msg("%lld blocks are left, %lld were there before", (long long)fault_blocks(),
                 (long long)wanted);
    }
}

int fault_stride(void)
{
    const char *text = getenv("TV_TEST_SCALE");
    double scale = text != NULL ? strtod(text, NULL) : 1.0;
    return scale > 0.0 && scale < 1.0 ? (int)(1.0 / scale) : 1;
}

static void *born(void *block)
{
    (void)atomic_fetch_add(&blocks, block != NULL);
    return block;
}

void *__wrap_malloc(size_t bytes)
{
    return fault_meets(FAULT_MEMORY) ? NULL : born(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fault_meets(FAULT_MEMORY) ? NULL : born(__real_calloc(count, bytes));
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return fault_meets(FAULT_MEMORY) ? NULL : born(__real_aligned_alloc(alignment, bytes));
}

void *__wrap_realloc(void *at, size_t bytes)
{
    if (fault_meets(FAULT_MEMORY)) {
        return NULL;
    }
    return at == NULL ? born(__real_realloc(NULL, bytes)) : __real_realloc(at, bytes);
}

char *__wrap_strdup(const char *text)
{
    return fault_meets(FAULT_MEMORY) ? NULL : born(__real_strdup(text));
}

char *__wrap_strndup(const char *text, size_t bytes)
{
    return fault_meets(FAULT_MEMORY) ? NULL : born(__real_strndup(text, bytes));
}

/* The tests' own: it never fails, but what it gives is freed as the others. */
FILE *__wrap_open_memstream(char **data, size_t *bytes)
{
    (void)atomic_fetch_add(&blocks, 1);
    return __real_open_memstream(data, bytes);
}

void __wrap_free(void *at)
{
    (void)atomic_fetch_sub(&blocks, at != NULL);
    __real_free(at);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *argument)
{
    return fault_meets(FAULT_THREAD) ? EAGAIN
                                     : __real_pthread_create(thread, attributes, run, argument);
}

int __wrap_pthread_condattr_setclock(pthread_condattr_t *attributes, clockid_t clock)
{
    return fault_meets(FAULT_CLOCK) ? EINVAL : __real_pthread_condattr_setclock(attributes, clock);
}

ssize_t __wrap_getrandom(void *buffer, size_t bytes, unsigned flags)
{
    if (fault_meets(FAULT_RANDOM)) {
        errno = EIO;
        return -1;
    }
    return __real_getrandom(buffer, bytes, flags);
}

static int file_meets(void)
{
    if (!fault_meets(FAULT_FILE)) {
        return 0;
    }
    errno = EIO;
    return 1;
}

static int opened(int fd)
{
    (void)atomic_fetch_add(&descriptors, fd >= 0);
    return fd;
}

static mode_t mode_of(int flags, va_list arguments)
{
    return (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
}

int __wrap_open64(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    return file_meets() ? -1 : opened(__real_open64(path, flags, mode));
}

int __wrap_openat64(int folder, const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    return file_meets() ? -1 : opened(__real_openat64(folder, path, flags, mode));
}

int __wrap_close(int fd)
{
    int rc = __real_close(fd);
    (void)atomic_fetch_sub(&descriptors, rc == 0);
    return rc;
}

int __wrap_fstat64(int fd, struct stat *info)
{
    return file_meets() ? -1 : __real_fstat64(fd, info);
}

ssize_t __wrap_pread64(int fd, void *buffer, size_t bytes, off_t offset)
{
    if (file_meets()) {
        return -1;
    }
    if (fault_meets(FAULT_AGAIN)) {
        errno = EINTR;
        return -1;
    }
    if (fault_meets(FAULT_END)) {
        return 0;
    }
    if (bytes > 1 && fault_meets(FAULT_SHORT)) {
        bytes--;
    }
    return __real_pread64(fd, buffer, bytes, offset);
}

ssize_t __wrap_read(int fd, void *buffer, size_t bytes)
{
    return file_meets() ? -1 : __real_read(fd, buffer, bytes);
}

ssize_t __wrap_write(int fd, const void *data, size_t bytes)
{
    if (fd > STDERR_FILENO && fault_meets(FAULT_KILL)) {
        ssize_t written = __real_write(fd, data, bytes / 2);
        _exit(written < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
    }
    return fd > STDERR_FILENO && file_meets() ? -1 : __real_write(fd, data, bytes);
}

int __wrap_fallocate64(int fd, int mode, off_t offset, off_t bytes)
{
    return file_meets() ? -1 : __real_fallocate64(fd, mode, offset, bytes);
}

int __wrap_rename(const char *from, const char *to)
{
    return file_meets() ? -1 : __real_rename(from, to);
}

DIR *__wrap_opendir(const char *path)
{
    return file_meets() ? NULL : __real_opendir(path);
}
