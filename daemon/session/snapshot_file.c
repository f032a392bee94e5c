/*
 * snapshot_file.c - where a snapshot lies: written, and read once.
 *
 * Refuses to read what somebody else could have written, through whatever name, and a file of which
 * a later process has begun another: what that one could not write is lost, not as it was before.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "session/snapshot.h"

#define NAME         "sessions.snapshot"
#define NAME_NEW     "sessions.snapshot.new"
#define NAME_READING "sessions.snapshot.reading"
#define NAME_REFUSED "sessions.snapshot.refused"
/* The disk is given pieces of this size as they come, and has the time of the next one to take
 * each: so at most two wait for it, and what time is left is judged by what it has taken. */
#define PIECE_BYTES (16u << 20)

int tv_snapshot_dir_open(const char *path, int *ret_dir)
{
    int dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir < 0) {
        return -errno;
    }
    /* who cannot write there cannot take a file away that it has read, either */
    if (flock(dir, LOCK_EX | LOCK_NB) != 0 || faccessat(dir, ".", W_OK | X_OK, AT_EACCESS) != 0) {
        int rc = -errno;
        (void)close(dir); /* nothing was written */
        return rc;
    }
    *ret_dir = dir;
    return 0;
}

int tv_snapshot_file_create(int dir, struct tv_snapshot_file *ret_file)
{
    *ret_file = (struct tv_snapshot_file){.dir = dir, .fd = -1};
    if ((unlinkat(dir, NAME_NEW, 0) != 0 && errno != ENOENT) ||
        (unlinkat(dir, NAME, 0) != 0 && errno != ENOENT)) {
        return -errno;
    }
    ret_file->fd = openat(dir, NAME_NEW, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                          S_IRUSR | S_IWUSR);
    return ret_file->fd < 0 ? -errno : 0;
}

/* 0, or what the disk says of the bytes from `at` on. */
static int piece_sync(const struct tv_snapshot_file *file, uint64_t at, unsigned flags)
{
    if (sync_file_range(file->fd, (off_t)at, PIECE_BYTES, flags) == 0) {
        return 0;
    }
    if (errno != ENOSYS && errno != EINVAL) {
        return -errno;
    }
    return fdatasync(file->fd) == 0 ? 0 : -errno; /* where there is no such call */
}

/* Begin with the pieces that are whole, and wait for those before them. */
static int disk_push(struct tv_snapshot_file *file)
{
    int rc = 0;
    while (rc == 0 && file->at - file->begun >= PIECE_BYTES) {
        rc = piece_sync(file, file->begun, SYNC_FILE_RANGE_WRITE);
        if (rc == 0 && file->begun >= PIECE_BYTES) {
            rc = piece_sync(file, file->begun - PIECE_BYTES,
                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                SYNC_FILE_RANGE_WAIT_AFTER);
            file->taken += PIECE_BYTES;
        }
        file->begun += PIECE_BYTES;
    }
    return rc;
}

int64_t tv_snapshot_file_flush_us(const struct tv_snapshot_file *file, uint64_t more,
                                  int64_t elapsed_us)
{
    uint64_t there = file->begun > PIECE_BYTES ? file->begun - PIECE_BYTES : 0;
    double bytes = (double)(file->at - there) + (double)more;
    return file->taken > 0 ? (int64_t)((double)elapsed_us * bytes / (double)file->taken) : 0;
}

int tv_snapshot_file_reserve(struct tv_snapshot_file *file, uint64_t bytes)
{
    int rc;
    do {
        rc = fallocate(file->fd, FALLOC_FL_KEEP_SIZE, (off_t)file->at, (off_t)bytes);
    } while (rc != 0 && errno == EINTR);
    return rc == 0 || errno == EOPNOTSUPP || errno == ENOSYS ? 0 : -errno;
}

int tv_snapshot_file_append(struct tv_snapshot_file *file, const void *data, size_t bytes)
{
    const char *at = data;
    while (bytes > 0) {
        ssize_t wrote = write(file->fd, at, bytes);
        if (wrote < 0 && errno == EINTR) {
            continue;
        }
        if (wrote <= 0) {
            return wrote < 0 ? -errno : -EIO;
        }
        at += wrote;
        bytes -= (size_t)wrote;
        file->at += (uint64_t)wrote;
    }
    return disk_push(file);
}

int tv_snapshot_file_cut(struct tv_snapshot_file *file, uint64_t at)
{
    if (ftruncate(file->fd, (off_t)at) != 0 || lseek(file->fd, (off_t)at, SEEK_SET) < 0) {
        return -errno;
    }
    file->at = at;
    if (file->begun > at) {
        file->begun = at / PIECE_BYTES * PIECE_BYTES;
    }
    return 0;
}

void tv_snapshot_file_abandon(struct tv_snapshot_file *file)
{
    if (file->fd >= 0) {
        (void)close(file->fd); /* its bytes are not wanted */
        (void)unlinkat(file->dir, NAME_NEW, 0);
        file->fd = -1;
    }
}

int tv_snapshot_file_leave(struct tv_snapshot_file *file)
{
    int rc = fsync(file->fd) != 0 ? -errno : 0;
    if (close(file->fd) != 0 && rc == 0) {
        rc = -errno;
    }
    file->fd = -1;
    return rc;
}

int tv_snapshot_file_finish(struct tv_snapshot_file *file)
{
    int rc = tv_snapshot_file_leave(file);
    if (rc == 0 && renameat(file->dir, NAME_NEW, file->dir, NAME) != 0) {
        rc = -errno;
    }
    /* It is there. A machine that goes down before its name is on the disk takes it along, as it
     * does where folders cannot be synced. */
    (void)fsync(file->dir);
    return rc;
}

static int source_read(void *context, uint64_t offset, void *to, size_t bytes)
{
    const struct tv_snapshot_file *file = context;
    char *at = to;
    while (bytes > 0) {
        ssize_t got = pread(file->fd, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) { /* shorter than it was */
            return got < 0 ? -errno : -EIO;
        }
        at += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return 0;
}

/* NULL, or what is wrong with who may have written it. */
static const char *owner_wrong(const struct stat *info)
{
    if (!S_ISREG(info->st_mode)) {
        return "it is no plain file";
    }
    if (info->st_uid != geteuid() && info->st_uid != 0) {
        return "it belongs to another user";
    }
    return (info->st_mode & (S_IWGRP | S_IWOTH)) != 0 ? "others may write it" : NULL;
}

static int set_aside(int dir, const char *name)
{
    return renameat(dir, name, dir, NAME_REFUSED) == 0 ? 0 : -errno;
}

int tv_snapshot_file_open(int dir, struct tv_snapshot_file *ret_file,
                          struct tv_snapshot_source *ret_source, char *error, size_t error_bytes)
{
    struct stat info;
    int is_cut = 0;
    *ret_file = (struct tv_snapshot_file){.dir = dir, .fd = -1};
    if (set_aside(dir, NAME_READING) == 0) {
        (void)snprintf(error, error_bytes,
                       "an earlier start did not come to the end of it; it is not tried again");
        return -EPERM;
    }
    int rc = renameat(dir, NAME, dir, NAME_READING) != 0 ? -errno : 0;
    if (rc == 0) {
        (void)unlinkat(dir, NAME_NEW, 0); /* of no process that knows of the other one */
    } else if (rc == -ENOENT) {
        is_cut = 1; /* by a stop that did not come to its end */
        rc = renameat(dir, NAME_NEW, dir, NAME_READING) != 0 ? -errno : 0;
    }
    if (rc != 0) {
        if (rc != -ENOENT) {
            (void)snprintf(error, error_bytes, "it cannot be taken out of the way: %s",
                           strerror(-rc));
        }
        return rc;
    }
    /* NONBLOCK: a pipe of that name must not hold the start */
    ret_file->fd = openat(dir, NAME_READING, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    const char *wrong = NULL;
    if (ret_file->fd < 0 || fstat(ret_file->fd, &info) != 0) {
        wrong = errno == ELOOP ? "it is a link" : strerror(errno);
    } else {
        wrong = owner_wrong(&info);
    }
    if (wrong != NULL) {
        (void)snprintf(error, error_bytes, "%s", wrong);
        tv_snapshot_file_close(ret_file, 1);
        return -EPERM;
    }
    (void)posix_fadvise(ret_file->fd, 0, 0, POSIX_FADV_SEQUENTIAL); /* only a hint */
    *ret_source = (struct tv_snapshot_source){
        .read = source_read, .context = ret_file, .size = (uint64_t)info.st_size, .is_cut = is_cut};
    return 0;
}

void tv_snapshot_file_close(struct tv_snapshot_file *file, int keep)
{
    if (file->fd >= 0) {
        (void)close(file->fd); /* was only read */
        file->fd = -1;
    }
    if (keep) {
        (void)set_aside(file->dir, NAME_READING); /* else the next start does it */
    } else {
        (void)unlinkat(file->dir, NAME_READING, 0); /* the same */
    }
    (void)fsync(file->dir); /* a crash may bring it back; then it is refused as read before */
}

void tv_snapshot_file_put_back(struct tv_snapshot_file *file, int is_cut)
{
    (void)close(file->fd); /* was only read */
    file->fd = -1;
    (void)renameat(file->dir, NAME_READING, file->dir,
                   is_cut ? NAME_NEW : NAME); /* else the next start sets it aside */
    (void)fsync(file->dir);                   /* the same */
}
