/*
 * state_dir.c - where reproducers are kept, and whether a folder is one that can hold them.
 *
 * Refuses to guess further: without a folder that can be written nothing is kept, and the list of
 * violations says so.
 */
#include "state_dir.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SYSTEM_DIR "/var/lib/treeverify"

static int text_take(char *ret_dir, size_t dir_bytes, const char *text, size_t length,
                     const char *rest)
{
    int written = snprintf(ret_dir, dir_bytes, "%.*s%s", (int)length, text, rest);
    return written < 0 || (size_t)written >= dir_bytes ? -ENAMETOOLONG : 0;
}

int tv_state_dir_check(const char *dir)
{
    struct stat info;
    if (stat(dir, &info) != 0) {
        return -errno;
    }
    if (!S_ISDIR(info.st_mode)) {
        return -ENOTDIR;
    }
    return access(dir, W_OK | X_OK) == 0 ? 0 : -errno;
}

int tv_state_dir_default(char *ret_dir, size_t dir_bytes)
{
    const char *systemd = getenv("STATE_DIRECTORY");
    const char *home = getenv("XDG_STATE_HOME");
    if (systemd != NULL && systemd[0] == '/' &&
        text_take(ret_dir, dir_bytes, systemd, strcspn(systemd, ":"), "") == 0 &&
        tv_state_dir_check(ret_dir) == 0) {
        return 0;
    }
    if (home != NULL && home[0] == '/' &&
        text_take(ret_dir, dir_bytes, home, strlen(home), "/treeverify") == 0 &&
        (mkdir(ret_dir, 0700) == 0 || errno == EEXIST) && tv_state_dir_check(ret_dir) == 0) {
        return 0;
    }
    if (text_take(ret_dir, dir_bytes, SYSTEM_DIR, strlen(SYSTEM_DIR), "") == 0 &&
        tv_state_dir_check(ret_dir) == 0) {
        return 0;
    }
    return -ENOENT;
}
