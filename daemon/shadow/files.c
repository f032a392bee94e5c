/*
 * files.c - reproducers under the state directory: the newest 32, at most 1 GiB together.
 *
 * Owns the files named violation-NNNNNNNN.kdtr and .json there. Refuses to let a full disk matter:
 * what cannot be written is counted, and the violation stays listed without its file.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "shadow/round.h"

static const char *const kinds[] = {"kernel", "path"};
static const char *const suffixes[] = {"kdtr", "json"};

static int kind_index(const char *kind)
{
    return strcmp(kind, kinds[0]) == 0 ? 0 : 1;
}

static int path_of(const struct tv_shadow_files *files, int32_t n, const char *suffix, char *path,
                   size_t path_bytes)
{
    int length = snprintf(path, path_bytes, "%s/violation-%08d.%s", files->dir, n, suffix);
    return length < 0 || (size_t)length >= path_bytes ? -ENAMETOOLONG : 0;
}

/* Drop the oldest entry and its file. Lock held, except at start. */
static void oldest_drop(struct tv_shadow_files *files)
{
    char path[PATH_MAX];
    const struct tv_shadow_file *oldest = &files->files[0];
    if (oldest->bytes > 0 &&
        path_of(files, oldest->n, suffixes[kind_index(oldest->kind)], path, sizeof path) == 0) {
        (void)unlink(path); /* already gone is as good */
    }
    files->count--;
    memmove(&files->files[0], &files->files[1], (size_t)files->count * sizeof files->files[0]);
}

static int64_t bytes_kept(const struct tv_shadow_files *files)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < files->count; i++) {
        bytes += files->files[i].bytes;
    }
    return bytes;
}

/* Insert in order of n; the oldest make room. Lock held, except at start. */
static void entry_add(struct tv_shadow_files *files, const struct tv_shadow_file *entry)
{
    while (files->count > 0 && (files->count == TV_SHADOW_FILES_MAX ||
                                bytes_kept(files) + entry->bytes > TV_SHADOW_FILES_BYTES_MAX)) {
        oldest_drop(files);
    }
    int32_t at = files->count;
    while (at > 0 && files->files[at - 1].n > entry->n) {
        files->files[at] = files->files[at - 1];
        at--;
    }
    files->files[at] = *entry;
    files->count++;
}

/* n of a reproducer's name and its kind, or -1. */
static int32_t name_parse(const char *name, const char **ret_kind)
{
    static const char prefix[] = "violation-";
    char digits[9] = {0};
    if (strlen(name) != sizeof prefix - 1 + 8 + 5 ||
        strncmp(name, prefix, sizeof prefix - 1) != 0) {
        return -1;
    }
    memcpy(digits, name + sizeof prefix - 1, 8);
    const char *rest = name + sizeof prefix - 1 + 8;
    for (int kind = 0; kind < 2; kind++) {
        if (strspn(digits, "0123456789") == 8 && rest[0] == '.' &&
            strcmp(rest + 1, suffixes[kind]) == 0) {
            *ret_kind = kinds[kind];
            return (int32_t)strtol(digits, NULL, 10);
        }
    }
    return -1;
}

static int entry_order(const void *a, const void *b)
{
    const struct tv_shadow_file *left = a, *right = b;
    return left->n < right->n ? -1 : left->n > right->n;
}

/* What an earlier run left, so that numbers go on and old files make room. */
void tv_shadow_files_open(struct tv_shadow_files *files, const char *dir)
{
    memset(files, 0, sizeof *files);
    files->dir = dir;
    files->next_n = 1;
    DIR *folder = dir != NULL ? opendir(dir) : NULL;
    if (folder == NULL) {
        return; /* the first write says what is wrong with it */
    }
    struct tv_shadow_file *found = NULL;
    size_t count = 0;
    for (struct dirent *item = readdir(folder); item != NULL; item = readdir(folder)) {
        struct tv_shadow_file entry = {0};
        struct stat status;
        entry.n = name_parse(item->d_name, &entry.kind);
        if (entry.n < 0 || fstatat(dirfd(folder), item->d_name, &status, 0) != 0) {
            continue;
        }
        entry.bytes = (int64_t)status.st_size;
        entry.at_unix_ms = (int64_t)status.st_mtime * 1000;
        struct tv_shadow_file *grown = realloc(found, (count + 1) * sizeof *found);
        if (grown == NULL) {
            break;
        }
        found = grown;
        found[count++] = entry;
    }
    (void)closedir(folder);
    if (count > 0) {
        qsort(found, count, sizeof *found, entry_order);
    }
    for (size_t i = 0; i < count; i++) {
        entry_add(files, &found[i]);
        files->next_n = found[i].n + 1;
    }
    free(found);
}

static int write_all(int fd, const struct tv_shadow_part *parts, int32_t part_count)
{
    for (int32_t i = 0; i < part_count; i++) {
        const char *at = parts[i].data;
        size_t left = parts[i].bytes;
        while (left > 0) {
            ssize_t written = write(fd, at, left);
            if (written < 0 && errno == EINTR) {
                continue;
            }
            if (written <= 0) {
                return written < 0 ? -errno : -EIO;
            }
            at += written;
            left -= (size_t)written;
        }
    }
    return 0;
}

/* Whole or not at all: a temporary name first. */
static int file_write(const char *path, const struct tv_shadow_part *parts, int32_t part_count)
{
    char temporary[PATH_MAX + 8];
    (void)snprintf(temporary, sizeof temporary, "%s.tmp", path);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) {
        return -errno;
    }
    int rc = write_all(fd, parts, part_count);
    if (close(fd) != 0 && rc == 0) {
        rc = -errno;
    }
    if (rc == 0 && rename(temporary, path) != 0) {
        rc = -errno;
    }
    if (rc != 0) {
        (void)unlink(temporary); /* nothing more can be done about it */
    }
    return rc;
}

void tv_shadow_files_add(struct tv_shadow *shadow, const char *kind,
                         const struct tv_shadow_part *parts, int32_t part_count)
{
    struct tv_shadow_files *files = &shadow->files;
    struct tv_shadow_file entry = {.at_unix_ms = tv_clock_unix_ms(), .kind = kind};
    char path[PATH_MAX] = "";
    int64_t bytes = 0;
    for (int32_t i = 0; i < part_count; i++) {
        bytes += (int64_t)parts[i].bytes;
    }
    pthread_mutex_lock(&shadow->lock);
    entry.n = files->next_n++;
    pthread_mutex_unlock(&shadow->lock);

    int rc = files->dir == NULL ? -ENOENT : 0;
    if (rc == 0 && bytes > TV_SHADOW_FILES_BYTES_MAX) {
        rc = -EFBIG;
    }
    if (rc == 0) {
        rc = path_of(files, entry.n, suffixes[kind_index(kind)], path, sizeof path);
    }
    if (rc == 0) {
        rc = file_write(path, parts, part_count);
    }
    entry.bytes = rc == 0 ? bytes : 0;
    pthread_mutex_lock(&shadow->lock);
    files->write_failures += rc != 0 && files->dir != NULL ? 1 : 0;
    entry_add(files, &entry);
    pthread_mutex_unlock(&shadow->lock);
    if (rc == 0) {
        tv_log(TV_LOG_WARNING, "shadow: violation %d (%s), reproducer %s", entry.n, kind, path);
    } else {
        tv_log(TV_LOG_WARNING, "shadow: violation %d (%s), no reproducer: %s", entry.n, kind,
               files->dir == NULL ? "no state directory" : strerror(-rc));
    }
}

static int file_read(const char *path, char **ret_data, size_t *ret_bytes)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    char *data = NULL;
    int rc = fstat(fd, &status) != 0 ? -errno : 0;
    size_t size = rc == 0 ? (size_t)status.st_size : 0;
    if (rc == 0) {
        data = malloc(size > 0 ? size : 1);
        rc = data == NULL ? -ENOMEM : 0;
    }
    for (size_t at = 0; rc == 0 && at < size;) {
        ssize_t got = read(fd, data + at, size - at);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            rc = got < 0 ? -errno : -EIO;
        } else {
            at += (size_t)got;
        }
    }
    (void)close(fd); /* nothing was written */
    if (rc != 0) {
        free(data);
        return rc;
    }
    *ret_data = data;
    *ret_bytes = size;
    return 0;
}

int tv_shadow_files_read(struct tv_shadow *shadow, int32_t n, const char **ret_kind,
                         char **ret_data, size_t *ret_bytes)
{
    const struct tv_shadow_files *files = &shadow->files;
    const char *kind = NULL;
    char path[PATH_MAX];
    pthread_mutex_lock(&shadow->lock);
    for (int32_t i = 0; i < files->count; i++) {
        if (files->files[i].n == n && files->files[i].bytes > 0) {
            kind = files->files[i].kind;
        }
    }
    pthread_mutex_unlock(&shadow->lock);
    if (kind == NULL) {
        return -ENOENT;
    }
    int rc = path_of(files, n, suffixes[kind_index(kind)], path, sizeof path);
    if (rc == 0) {
        rc = file_read(path, ret_data, ret_bytes);
    }
    if (rc == 0) {
        *ret_kind = kind;
    }
    return rc;
}
