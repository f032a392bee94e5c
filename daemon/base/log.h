/*
 * log.h - one line per event on stderr, with a level; foreign text is escaped and bounded.
 *
 * Thread-safe, and never waits for who reads stderr. Before tv_log_level_set everything down to
 * info is logged.
 */
#ifndef TV_BASE_LOG_H
#define TV_BASE_LOG_H

#include <stdint.h>

enum tv_log_level { TV_LOG_ERROR, TV_LOG_WARNING, TV_LOG_INFO, TV_LOG_DEBUG };

void tv_log_level_set(enum tv_log_level level);
/* Lines that stderr did not take. */
uint64_t tv_log_lost(void);
void tv_log(enum tv_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
