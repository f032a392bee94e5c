/*
 * log.h - one line per event on stderr, with a level; foreign text is escaped and bounded.
 *
 * Where stderr is the journal's, lines go there with fields. Thread-safe, and never waits for who
 * reads. Before tv_log_level_set everything down to info is logged; of one kind of line at most so
 * many in a while, but for debug.
 */
#ifndef TV_BASE_LOG_H
#define TV_BASE_LOG_H

#include <stdint.h>

enum tv_log_level { TV_LOG_ERROR, TV_LOG_WARNING, TV_LOG_INFO, TV_LOG_DEBUG };

void tv_log_level_set(enum tv_log_level level);
/* From now on lines are datagrams to this socket (NULL: the journal's), with PRIORITY,
 * SYSLOG_IDENTIFIER, and what tv_log_of is told as TREEVERIFY_SESSION and TREEVERIFY_REQUEST; when
 * it is not there, they go to stderr as before. Once, before there are threads. 0, or a negative
 * errno. */
int tv_log_journal_open(const char *path);
/* 1: stderr is what the service manager says leads to the journal. */
int tv_log_is_journal(void);
/* Lines that stderr or the journal did not take. */
uint64_t tv_log_lost(void);
void tv_log(enum tv_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same about a session, a request or both; NULL or "": neither. */
void tv_log_of(enum tv_log_level level, const char *session, const char *request,
               const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
