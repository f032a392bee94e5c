/*
 * log.c - one line per event on stderr.
 *
 * Owns the level and the shape of a line. Refuses to let foreign text forge a line: every byte that
 * is not printable ASCII is written as \xNN, and a line has a fixed bound. Refuses to wait for who
 * reads it too: a line that is not taken at once is lost, counted, and said later. Of one kind of
 * line (one format) at most KIND_LINES are written in KIND_US, and how many were left out is said.
 */
#include "base/log.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"

#define KINDS          64
#define KIND_LINES     200
#define KIND_US        (30 * 1000000LL)
#define JOURNAL_SOCKET "/run/systemd/journal/socket"
#define FIELD_BYTES    80
#define LOG_TEXT_BYTES 1000
#define LOG_LINE_BYTES (4 * LOG_TEXT_BYTES + 32)
_Static_assert(LOG_LINE_BYTES <= PIPE_BUF, "a pipe that can be written takes a line as a whole");

/* Relaxed: the level guards nothing but itself, and a line more or less at a change is harmless. */
static _Atomic int log_level = TV_LOG_INFO;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER; /* one line after the other */
static _Atomic uint64_t log_lost; /* relaxed: a number; written with the lock */
static uint64_t log_lost_said;    /* with the lock: of them, how many the log knows of */

/* With the lock. Formats that meet in a place share it. */
struct kind {
    int64_t start_us; /* of its time; 0: none yet */
    int32_t lines, left_out;
};
static struct kind log_kinds[KINDS];

static int log_journal = -1; /* a connected socket; written before there are threads */

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

/* With the lock. -ECONNREFUSED and the like: nobody is there; -EAGAIN: it takes nothing now. */
static int journal_write(enum tv_log_level level, const char *text, const char *session,
                         const char *request)
{
    static const char priorities[] = "3467";
    char message[LOG_LINE_BYTES + 3 * FIELD_BYTES + 64];
    int bytes = snprintf(message, sizeof message,
                         "PRIORITY=%c\nSYSLOG_IDENTIFIER=treeverifyd\nMESSAGE=%s\n",
                         priorities[level], text);
    if (session[0] != '\0') {
        bytes += snprintf(message + bytes, sizeof message - (size_t)bytes,
                          "TREEVERIFY_SESSION=%s\n", session);
    }
    if (request[0] != '\0') {
        bytes += snprintf(message + bytes, sizeof message - (size_t)bytes,
                          "TREEVERIFY_REQUEST=%s\n", request);
    }
    ssize_t sent;
    do {
        sent = send(log_journal, message, (size_t)bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent >= 0 ? 0 : errno == EWOULDBLOCK || errno == ENOBUFS ? -EAGAIN : -errno;
}

/* With the lock. line: prefix, text and an end. */
static int either_write(enum tv_log_level level, const char *line, size_t bytes,
                        const char *session, const char *request)
{
    if (log_journal >= 0) {
        char text[LOG_LINE_BYTES];
        size_t mark = strlen("<N>");
        memcpy(text, line + mark, bytes - mark - 1);
        text[bytes - mark - 1] = '\0';
        int rc = journal_write(level, text, session, request);
        if (rc == 0 || rc == -EAGAIN) {
            return rc;
        }
    }
    return line_write(line, bytes);
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
    if (bytes > 0 && either_write(TV_LOG_WARNING, line, (size_t)bytes, "", "") == 0) {
        log_lost_said = lost;
    }
}

/* With the lock: may one more line of this kind be written? Those that were left out are said
 * before the first one behind them. */
static int kind_has_room(enum tv_log_level level, const char *format)
{
    struct kind *kind = &log_kinds[((uintptr_t)format >> 3) % KINDS];
    int64_t now_us = tv_clock_us();
    char line[128];
    if (level == TV_LOG_DEBUG) {
        return 1; /* who asks for all of it gets it */
    }
    if (kind->start_us == 0 || now_us - kind->start_us >= KIND_US) {
        if (kind->left_out > 0) {
            int bytes = snprintf(line, sizeof line, "%s%d lines like the next one were left out\n",
                                 log_prefixes[TV_LOG_WARNING], (int)kind->left_out);
            (void)either_write(TV_LOG_WARNING, line, (size_t)bytes, "", ""); /* or it is lost too */
        }
        *kind = (struct kind){.start_us = now_us};
    }
    if (kind->lines >= KIND_LINES) {
        kind->left_out++;
        return 0;
    }
    kind->lines++;
    return 1;
}

int tv_log_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM"); /* device and inode */
    struct stat status;
    char text[64];
    if (stream == NULL || fstat(STDERR_FILENO, &status) != 0) {
        return 0;
    }
    (void)snprintf(text, sizeof text, "%llu:%llu", (unsigned long long)status.st_dev,
                   (unsigned long long)status.st_ino); /* fits */
    return strcmp(stream, text) == 0;
}

int tv_log_journal_open(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t bytes = strlen(path != NULL ? path : JOURNAL_SOCKET);
    if (bytes >= sizeof address.sun_path) {
        return -ENAMETOOLONG;
    }
    memcpy(address.sun_path, path != NULL ? path : JOURNAL_SOCKET, bytes + 1);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof address) != 0) {
        int rc = -errno;
        if (fd >= 0) {
            (void)close(fd); /* nothing was sent */
        }
        return rc;
    }
    log_journal = fd;
    return 0;
}

uint64_t tv_log_lost(void)
{
    return atomic_load_explicit(&log_lost, memory_order_relaxed);
}

/* A field's value or "": ids have no byte that needs escaping, and what has one is cut short. */
static void field_make(const char *text, char ret_field[FIELD_BYTES])
{
    size_t length = 0;
    for (const char *c = text == NULL ? "" : text; *c != '\0' && length + 4 < FIELD_BYTES; c++) {
        const char one[2] = {*c, '\0'};
        length = line_append_escaped(ret_field, length, one);
    }
    ret_field[length] = '\0';
}

static void write_va(enum tv_log_level level, const char *session, const char *request,
                     const char *format, va_list arguments)
{
    char text[LOG_TEXT_BYTES], line[LOG_LINE_BYTES], fields[2][FIELD_BYTES];
    size_t length = 0;
    int wanted = vsnprintf(text, sizeof text, format, arguments);
    if (wanted < 0) {
        return;
    }
    for (const char *c = log_prefixes[level]; *c != '\0'; c++) {
        line[length++] = *c;
    }
    length = line_append_escaped(line, length, text);
    if ((size_t)wanted >= sizeof text) {
        length = line_append_escaped(line, length, "...");
    }
    line[length++] = '\n';
    field_make(session, fields[0]);
    field_make(request, fields[1]);
    (void)pthread_mutex_lock(&log_lock); /* an ordinary mutex */
    if (kind_has_room(level, format)) {
        lost_say();
        if (either_write(level, line, length, fields[0], fields[1]) != 0) {
            (void)atomic_fetch_add_explicit(&log_lost, 1, memory_order_relaxed);
        }
    }
    (void)pthread_mutex_unlock(&log_lock);
}

static int is_logged(enum tv_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_level, memory_order_relaxed);
}

void tv_log(enum tv_log_level level, const char *format, ...)
{
    if (is_logged(level)) {
        va_list arguments;
        va_start(arguments, format);
        write_va(level, NULL, NULL, format, arguments);
        va_end(arguments);
    }
}

void tv_log_of(enum tv_log_level level, const char *session, const char *request,
               const char *format, ...)
{
    if (is_logged(level)) {
        va_list arguments;
        va_start(arguments, format);
        write_va(level, session, request, format, arguments);
        va_end(arguments);
    }
}
