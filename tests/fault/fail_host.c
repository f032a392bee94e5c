/*
 * fail_host.c - preloaded into a whole daemon: a wall clock that jumps, threads that are not made,
 * a disk that hangs or is slow, and a first thread that is late.
 *
 * The file TV_FAIL_HOST is five int64: the seconds that are added to the wall clock, how many more
 * threads are made before none is, how many more writes into files come to an end (below 0: all
 * do), the milliseconds that each read of a snapshot takes, and those by which the process's first
 * thread is late to take a descriptor out of an epoll. Whoever has the file mapped changes them
 * while the daemon runs. The clock that only goes forward is as it is.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

struct control {
    _Atomic int64_t shift_s, threads, writes, read_ms, unwatch_ms;
};
static struct control *control;

__attribute__((constructor)) static void control_map(void)
{
    const char *path = getenv("TV_FAIL_HOST");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        void *map = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        control = map == MAP_FAILED ? NULL : map;
        (void)close(fd); /* the map stays */
    }
}

static void rest(int64_t ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&left, NULL); /* a signal makes it shorter */
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *ret_now)
{
    if (syscall(SYS_clock_gettime, clock, ret_now) != 0) {
        return -1;
    }
    if (control != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        ret_now->tv_sec += (time_t)atomic_load(&control->shift_s);
    }
    return 0;
}

EXPORT int gettimeofday(struct timeval *restrict ret_now, void *restrict zone)
{
    struct timespec now;
    (void)zone; /* nobody asks for one */
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) {
        return -1;
    }
    *ret_now = (struct timeval){.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
    return 0;
}

EXPORT time_t time(time_t *ret_now)
{
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) {
        return -1;
    }
    if (ret_now != NULL) {
        *ret_now = now.tv_sec;
    }
    return now.tv_sec;
}

EXPORT int pthread_create(pthread_t *restrict ret_thread, const pthread_attr_t *restrict attributes,
                          void *(*start)(void *), void *restrict argument)
{
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (control != NULL && atomic_load(&control->threads) >= 0 &&
        atomic_fetch_sub(&control->threads, 1) <= 0) {
        atomic_store(&control->threads, 0);
        return EAGAIN;
    }
    void *symbol = dlsym(RTLD_NEXT, "pthread_create");
    memcpy(&create, &symbol, sizeof create); /* ISO C has no conversion between the two */
    return create(ret_thread, attributes, start, argument);
}

EXPORT ssize_t write(int fd, const void *data, size_t bytes)
{
    struct stat info;
    if (control != NULL && atomic_load(&control->writes) >= 0 && fd > STDERR_FILENO &&
        fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
        atomic_fetch_sub(&control->writes, 1) <= 0) {
        for (;;) {
            (void)pause(); /* as long as signals let it */
        }
    }
    return syscall(SYS_write, fd, data, bytes);
}

EXPORT ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset)
{
    char name[32], path[256] = "";
    int64_t ms = control != NULL ? atomic_load(&control->read_ms) : 0;
    (void)snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    if (ms > 0 && readlink(name, path, sizeof path - 1) > 0 &&
        strstr(path, "sessions.snapshot") != NULL) {
        rest(ms);
    }
    return syscall(SYS_pread64, fd, buffer, bytes, offset);
}

EXPORT int epoll_ctl(int epoll, int how, int fd, struct epoll_event *event)
{
    if (control != NULL && how == EPOLL_CTL_DEL && syscall(SYS_gettid) == getpid()) {
        rest(atomic_load(&control->unwatch_ms));
    }
    return (int)syscall(SYS_epoll_ctl, epoll, how, fd, event);
}
