/*
 * state_dir.h - where reproducers are kept when the configuration does not say.
 */
#ifndef TV_STATE_DIR_H
#define TV_STATE_DIR_H

#include <stddef.h>

/* 0: a directory that can be written; else a negative errno. */
int tv_state_dir_check(const char *dir);
/* What systemd made for the service ($STATE_DIRECTORY, the first of a list), or
 * $XDG_STATE_HOME/treeverify (made here), or /var/lib/treeverify: the first that can be written. 0;
 * -ENOENT: there is none. Main thread, before others exist. */
int tv_state_dir_default(char *ret_dir, size_t dir_bytes);

#endif
