/*
 * state_dir.c - where reproducers are kept when the configuration does not say.
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

int tv_state_dir_default(char *ret_dir, size_t dir_bytes)
{
    const char *systemd = getenv("STATE_DIRECTORY");
    const char *home = getenv("XDG_STATE_HOME");
    if (systemd != NULL && systemd[0] == '/') {
        return text_take(ret_dir, dir_bytes, systemd, strcspn(systemd, ":"), "");
    }
    if (home != NULL && home[0] == '/') {
        int rc = text_take(ret_dir, dir_bytes, home, strlen(home), "/treeverify");
        if (rc == 0 && mkdir(ret_dir, 0700) != 0 && errno != EEXIST) {
            rc = -ENOENT;
        }
        return rc != 0 || access(ret_dir, W_OK | X_OK) == 0 ? rc : -ENOENT;
    }
    if (access(SYSTEM_DIR, W_OK | X_OK) == 0) {
        return text_take(ret_dir, dir_bytes, SYSTEM_DIR, strlen(SYSTEM_DIR), "");
    }
    return -ENOENT;
}
