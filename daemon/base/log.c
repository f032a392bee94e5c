/*
 * log.c - one line per event on stderr.
 *
 * Owns the level and the shape of a line. Refuses to let foreign text forge a line: every byte that
 * is not printable ASCII is written as \xNN, and a line has a fixed bound.
 */
#include "base/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define LOG_TEXT_BYTES 1024
#define LOG_LINE_BYTES (4 * LOG_TEXT_BYTES + 32)

/* Relaxed: the level guards nothing but itself, and a line more or less at a change is harmless. */
static _Atomic int log_level = TV_LOG_INFO;

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

static void line_write(const char *line, size_t bytes)
{
    while (bytes > 0) {
        ssize_t written = write(STDERR_FILENO, line, bytes);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return; /* there is nowhere left to say that stderr is gone */
        }
        line += written;
        bytes -= (size_t)written;
    }
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
    /* One write: lines of several threads do not interleave. */
    line_write(line, length);
}
