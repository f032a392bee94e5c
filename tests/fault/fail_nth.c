/*
 * fail_nth.c - preloaded into a whole daemon: one allocation of it fails.
 *
 * The file TV_FAIL_FILE is two int64: how many more succeed before one fails (below 0: all do), and
 * how many have failed. Whoever has the file mapped arms it, while the daemon runs or before.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *block, size_t bytes);

struct control {
    _Atomic int64_t left, failed;
};
static struct control *control;

__attribute__((constructor)) static void control_map(void)
{
    const char *path = getenv("TV_FAIL_FILE");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        void *map = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        control = map == MAP_FAILED ? NULL : map;
        (void)close(fd); /* the map stays */
    }
}

static int fails(void)
{
    if (control == NULL || atomic_load(&control->left) < 0 ||
        atomic_fetch_sub(&control->left, 1) != 0) {
        return 0;
    }
    (void)atomic_fetch_add(&control->failed, 1);
    errno = ENOMEM;
    return 1;
}

__attribute__((visibility("default"))) void *malloc(size_t bytes)
{
    return fails() ? NULL : __libc_malloc(bytes);
}

__attribute__((visibility("default"))) void *calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __libc_calloc(count, bytes);
}

__attribute__((visibility("default"))) void *realloc(void *block, size_t bytes)
{
    return fails() ? NULL : __libc_realloc(block, bytes);
}
