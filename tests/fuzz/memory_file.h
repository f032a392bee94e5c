/*
 * memory_file.h - a file of given bytes without a file system; for readers that take a path.
 */
#ifndef TV_TESTS_FUZZ_MEMORY_FILE_H
#define TV_TESTS_FUZZ_MEMORY_FILE_H

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

struct memory_file {
    int fd;
    char name[16]; /* in /proc/self/fd */
    char path[40];
};

static inline struct memory_file memory_file_make(const void *data, size_t bytes)
{
    struct memory_file file = {.fd = memfd_create("fuzz", MFD_CLOEXEC)};
    size_t done = 0;
    REQUIRE(file.fd >= 0 && fchmod(file.fd, 0600) == 0);
    while (done < bytes) {
        ssize_t written = write(file.fd, (const char *)data + done, bytes - done);
        REQUIRE(written > 0);
        done += (size_t)written;
    }
    (void)snprintf(file.name, sizeof file.name, "%d", file.fd);
    (void)snprintf(file.path, sizeof file.path, "/proc/self/fd/%d", file.fd);
    return file;
}

static inline void memory_file_drop(struct memory_file *file)
{
    (void)close(file->fd); /* nobody needs what is in it */
}

#endif
