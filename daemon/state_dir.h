/*
 * state_dir.h - where reproducers are kept when the configuration does not say.
 */
#ifndef TV_STATE_DIR_H
#define TV_STATE_DIR_H

#include <stddef.h>

/* What systemd made for the service ($STATE_DIRECTORY, the first of a list), or
 * $XDG_STATE_HOME/treeverify (made here), or /var/lib/treeverify when it can be written. 0;
 * -ENOENT: there is none; -ENAMETOOLONG. Main thread, before others exist. */
int tv_state_dir_default(char *ret_dir, size_t dir_bytes);

#endif
