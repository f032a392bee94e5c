/*
 * log.c - one line per event on stderr.
 *
 * Owns the level and the shape of a line. Refuses to let foreign text forge a line: every byte that
 * is not printable ASCII is written as \xNN, and a line has a fixed bound. Refuses to wait for who
 * reads it too: a line that stderr does not take at once is lost, counted, and said later.
 */
#include "base/log.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define LOG_TEXT_BYTES 1000
#define LOG_LINE_BYTES (4 * LOG_TEXT_BYTES + 32)
_Static_assert(LOG_LINE_BYTES <= PIPE_BUF, "a pipe that can be written takes a line as a whole");

/* Relaxed: the level guards nothing but itself, and a line more or less at a change is harmless. */
static _Atomic int log_level = TV_LOG_INFO;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER; /* one line after the other */
static _Atomic uint64_t log_lost; /* relaxed: a number; written with the lock */
static uint64_t log_lost_said;    /* with the lock: of them, how many the log knows of */

/* systemd reads "<N>" as the syslog priority of a line. */
static const char *const log_prefixes[] = {
    [TV_LOG_ERROR] = "<3>error: ",
    [TV_LOG_WARNING] = "<4>warning: ",
    [TV_LOG_INFO] = "<6>",
    [TV_LOG_DEBUG] = "<7>debug: ",
};

void tv_log_level_set(enum tv_log_level level)
{
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

/* Append text with everything unprintable escaped; returns the new length. */
static size_t line_append_escaped(char *line, size_t length, const char *text)
{
    static const char hex[] = "0123456789abcdef";
    for (const unsigned char *c = (const unsigned char *)text; *c != '\0'; c++) {
        if (*c >= 0x20 && *c < 0x7f) {
            line[length++] = (char)*c;
        } else {
            line[length++] = '\\';
            line[length++] = 'x';
            line[length++] = hex[*c >> 4];
            line[length++] = hex[*c & 15];
        }
    }
    return length;
}

/* With the lock. 0; -EAGAIN: stderr takes nothing at the moment, or nothing any more. */
static int line_write(const char *line, size_t bytes)
{
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    int found;
    do {
        found = poll(&ready, 1, 0);
    } while (found < 0 && errno == EINTR);
    if (found <= 0) {
        return -EAGAIN;
    }
    while (bytes > 0) {
        ssize_t written = write(STDERR_FILENO, line, bytes);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return -EAGAIN;
        }
        line += written;
        bytes -= (size_t)written;
    }
    return 0;
}

/* With the lock: what was lost is said before the first line that is not. */
static void lost_say(void)
{
    char line[128];
    uint64_t lost = atomic_load_explicit(&log_lost, memory_order_relaxed);
    if (lost == log_lost_said) {
        return;
    }
    int bytes = snprintf(line, sizeof line, "%s%llu lines of the log were lost: nobody took them\n",
                         log_prefixes[TV_LOG_WARNING], (unsigned long long)(lost - log_lost_said));
    if (bytes > 0 && line_write(line, (size_t)bytes) == 0) {
        log_lost_said = lost;
    }
}

uint64_t tv_log_lost(void)
{
    return atomic_load_explicit(&log_lost, memory_order_relaxed);
}

void tv_log(enum tv_log_level level, const char *format, ...)
{
    if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed)) {
        return;
    }
    char text[LOG_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    int wanted = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (wanted < 0) {
        return;
    }
    char line[LOG_LINE_BYTES];
    size_t length = 0;
    for (const char *c = log_prefixes[level]; *c != '\0'; c++) {
        line[length++] = *c;
    }
    length = line_append_escaped(line, length, text);
    if ((size_t)wanted >= sizeof text) {
        length = line_append_escaped(line, length, "...");
    }
    line[length++] = '\n';
    (void)pthread_mutex_lock(&log_lock); /* an ordinary mutex */
    lost_say();
    if (line_write(line, length) != 0) {
        (void)atomic_fetch_add_explicit(&log_lost, 1, memory_order_relaxed);
    }
    (void)pthread_mutex_unlock(&log_lock);
}
