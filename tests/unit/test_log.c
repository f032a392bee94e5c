/*
 * test_log.c - the log of a service: fields for the journal, and no more lines than anybody reads.
 *
 * The journal is a socket of the test's own, the clock too.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"
#include "folder.h"

#define KIND_LINES 200
#define KIND_US    (30 * INT64_C(1000000))

int64_t __wrap_tv_clock_us(void);

static int64_t clock_us = 1;
static char folder[256], path[300];
static int journal = -1;

int64_t __wrap_tv_clock_us(void)
{
    return clock_us;
}

static int journal_setup(void **state)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)state;
    tv_tiny_folder(folder, sizeof folder);
    (void)snprintf(path, sizeof path, "%s/socket", folder);
    assert_int_equal(tv_log_journal_open(path), -ENOENT); /* nobody is there: nothing changes */
    assert_true(strlen(path) < sizeof address.sun_path);
    memcpy(address.sun_path, path, strlen(path) + 1);
    journal = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_true(journal >= 0);
    assert_int_equal(bind(journal, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(tv_log_journal_open(path), 0);
    return 0;
}

static int journal_teardown(void **state)
{
    (void)state;
    (void)close(journal);
    tv_tiny_folder_remove(folder);
    return 0;
}

/* The next message, or "" when there is none. */
static const char *message(void)
{
    static char text[8192];
    ssize_t got = recv(journal, text, sizeof text - 1, MSG_DONTWAIT);
    text[got > 0 ? got : 0] = '\0';
    return text;
}

static void lines_have_fields(void **state)
{
    (void)state;
    tv_log(TV_LOG_ERROR, "no more of %d", 3);
    assert_string_equal(message(), "PRIORITY=3\nSYSLOG_IDENTIFIER=treeverifyd\n"
                                   "MESSAGE=error: no more of 3\n");
    tv_log_of(TV_LOG_WARNING, "s_0123456789abcdefghijAB", "r-1", "gone");
    assert_string_equal(message(), "PRIORITY=4\nSYSLOG_IDENTIFIER=treeverifyd\n"
                                   "MESSAGE=warning: gone\n"
                                   "TREEVERIFY_SESSION=s_0123456789abcdefghijAB\n"
                                   "TREEVERIFY_REQUEST=r-1\n");
    tv_log_of(TV_LOG_INFO, "", "r-2", "said");
    assert_string_equal(message(), "PRIORITY=6\nSYSLOG_IDENTIFIER=treeverifyd\nMESSAGE=said\n"
                                   "TREEVERIFY_REQUEST=r-2\n");
    tv_log_of(TV_LOG_DEBUG, "s", "r", "not asked for");
    assert_string_equal(message(), "");
}

static void b45_fields_cannot_be_forged(void **state)
{
    char text[300];
    (void)state;
    tv_log_of(TV_LOG_INFO, "s\nPRIORITY=0", "r\x01", "a\nTREEVERIFY_SESSION=other");
    assert_string_equal(message(), "PRIORITY=6\nSYSLOG_IDENTIFIER=treeverifyd\n"
                                   "MESSAGE=a\\x0aTREEVERIFY_SESSION=other\n"
                                   "TREEVERIFY_SESSION=s\\x0aPRIORITY=0\n"
                                   "TREEVERIFY_REQUEST=r\\x01\n");
    memset(text, '\n', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    tv_log_of(TV_LOG_INFO, text, text, "long");
    const char *got = message();
    int ends = 0;
    for (const char *c = got; *c != '\0'; c++) {
        ends += *c == '\n';
    }
    assert_int_equal(ends, 5); /* five fields, and no other end of a line */
}

static char last[8192];

/* One line of one kind: its format is written once. */
static void same(int number, int *count)
{
    tv_log(TV_LOG_WARNING, "the same kind %d", number);
    (void)snprintf(last, sizeof last, "%s", message());
    *count += last[0] != '\0';
}

static void lines_of_a_kind_are_limited(void **state)
{
    int count = 0;
    (void)state;
    clock_us += 2 * KIND_US;
    for (int i = 0; i < KIND_LINES + 79; i++) {
        same(i, &count);
        clock_us += i == KIND_LINES + 77 ? KIND_US - 1 : 0;
    }
    assert_int_equal(count, KIND_LINES);
    clock_us += 1;
    tv_log(TV_LOG_ERROR, "another kind");
    assert_non_null(strstr(message(), "another kind"));
    same(-2, &count);
    assert_non_null(strstr(last, "79 lines like the next one were left out"));
    assert_non_null(strstr(message(), "the same kind -2"));
    assert_string_equal(message(), "");
    tv_log_level_set(TV_LOG_DEBUG);
    for (int i = 0; i < KIND_LINES + 7; i++) {
        tv_log(TV_LOG_DEBUG, "asked for");
        assert_non_null(strstr(message(), "debug: asked for"));
    }
    tv_log_level_set(TV_LOG_INFO);
}

/* A socket that is full is not waited for. */
static void f42_nobody_reads_the_journal(void **state)
{
    uint64_t lost = tv_log_lost();
    int taken = 0;
    (void)state;
    tv_log_level_set(TV_LOG_DEBUG);
    for (int i = 0; i < 2000; i++) {
        tv_log(TV_LOG_DEBUG, "line %d", i);
    }
    tv_log_level_set(TV_LOG_INFO);
    uint64_t missed = tv_log_lost() - lost;
    while (message()[0] != '\0') {
        taken++;
    }
    assert_true(missed > 0 && taken > 0);
    assert_int_equal(missed + (uint64_t)taken, 2000);
    char said[64];
    (void)snprintf(said, sizeof said, "%llu lines of the log were lost",
                   (unsigned long long)missed);
    tv_log(TV_LOG_INFO, "here again");
    assert_non_null(strstr(message(), said));
    assert_non_null(strstr(message(), "here again"));
}

static void the_journal_is_known_by_its_stream(void **state)
{
    struct stat status;
    char text[64];
    (void)state;
    assert_int_equal(unsetenv("JOURNAL_STREAM"), 0);
    assert_int_equal(tv_log_is_journal(), 0);
    assert_int_equal(fstat(STDERR_FILENO, &status), 0);
    (void)snprintf(text, sizeof text, "%llu:%llu", (unsigned long long)status.st_dev,
                   (unsigned long long)status.st_ino);
    assert_int_equal(setenv("JOURNAL_STREAM", text, 1), 0);
    assert_int_equal(tv_log_is_journal(), 1);
    assert_int_equal(setenv("JOURNAL_STREAM", "8:1", 1), 0); /* of a parent whose stderr it was */
    assert_int_equal(tv_log_is_journal(), 0);
}

/* Who has gone is replaced by stderr. */
static void a_journal_that_has_gone(void **state)
{
    int fds[2], saved = dup(STDERR_FILENO);
    char line[256];
    (void)state;
    (void)close(journal);
    assert_int_equal(pipe(fds), 0);
    assert_true(saved >= 0 && dup2(fds[1], STDERR_FILENO) >= 0);
    tv_log_of(TV_LOG_INFO, "s_1", NULL, "still here");
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    ssize_t got = read(fds[0], line, sizeof line - 1);
    assert_true(got > 0);
    line[got] = '\0';
    assert_string_equal(line, "<6>still here\n");
    (void)close(saved);
    (void)close(fds[0]);
    (void)close(fds[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_have_fields),
        cmocka_unit_test(b45_fields_cannot_be_forged),
        cmocka_unit_test(lines_of_a_kind_are_limited),
        cmocka_unit_test(f42_nobody_reads_the_journal),
        cmocka_unit_test(the_journal_is_known_by_its_stream),
        cmocka_unit_test(a_journal_that_has_gone),
    };
    return cmocka_run_group_tests(tests, journal_setup, journal_teardown);
}
