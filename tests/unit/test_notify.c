/*
 * test_notify.c - what the service manager hears of a load (B62): more time only while bytes come,
 * once for what follows the last, none after the bound, nothing when nobody listens.
 *
 * The load is a counter that the test moves, the manager a datagram socket of its own.
 */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "folder.h"
#include "notify.h"

#define WATCHDOG_MS 30000 /* of the test itself: a message that does not come */
#define QUIET_MS    200   /* in which ten looks are made */

static int manager = -1;
static char folder[96], path[sizeof((struct sockaddr_un *)0)->sun_path];

static int manager_open(void **state)
{
    (void)state;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    tv_tiny_folder(folder, sizeof folder);
    (void)snprintf(path, sizeof path, "%s/n", folder);
    (void)snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    return manager < 0 || bind(manager, (struct sockaddr *)&address, sizeof address) != 0 ||
                   setenv("NOTIFY_SOCKET", path, 1) != 0
               ? -1
               : 0;
}

static int manager_close(void **state)
{
    (void)state;
    (void)close(manager);
    tv_tiny_folder_remove(folder);
    return unsetenv("NOTIFY_SOCKET");
}

/* The next message within the time, or "". */
static const char *hear(int wait_ms)
{
    static char message[1024];
    struct pollfd wait = {.fd = manager, .events = POLLIN};
    message[0] = '\0';
    if (poll(&wait, 1, wait_ms) > 0) {
        ssize_t bytes = recv(manager, message, sizeof message - 1, 0);
        assert_true(bytes >= 0);
        message[bytes] = '\0';
    }
    return message;
}

static const struct tv_herald_times times = {
    .look_us = 20000, .extend_us = 60000000, .rest_us = 300000000, .max_us = 3600 * 1000000LL};

static void add(struct tv_model_progress *progress, int64_t bytes)
{
    (void)atomic_fetch_add(&progress->bytes_read, bytes);
}

static void test_b62_time_only_while_bytes_come(void **state)
{
    (void)state;
    struct tv_model_progress progress = {0};
    struct tv_herald herald;
    atomic_store(&progress.bytes_total, 100 << 20);
    assert_int_equal(tv_herald_start(&herald, &progress, &times), 0);
    assert_string_equal(hear(QUIET_MS), ""); /* nothing has come */
    for (int i = 1; i <= 3; i++) {
        char wanted[96];
        add(&progress, 10 << 20);
        (void)snprintf(wanted, sizeof wanted,
                       "EXTEND_TIMEOUT_USEC=60000000\nSTATUS=loading: %d of 100 MiB", 10 * i);
        assert_string_equal(hear(WATCHDOG_MS), wanted);
        assert_string_equal(hear(QUIET_MS), ""); /* it stands still: its time is not extended */
    }
    atomic_store(&progress.bytes_total, 40 << 20); /* the rest was never wanted */
    add(&progress, 10 << 20);
    assert_string_equal(hear(WATCHDOG_MS), "EXTEND_TIMEOUT_USEC=300000000\n"
                                           "STATUS=loaded; the self-test runs");
    add(&progress, 1);
    assert_string_equal(hear(QUIET_MS), ""); /* once */
    tv_herald_stop(&herald);
    assert_string_equal(hear(0), "");
}

/* A load that moves for ever is not given time for ever. */
static void test_b62_time_has_a_bound(void **state)
{
    (void)state;
    const struct tv_herald_times bounded = {
        .look_us = 20000, .extend_us = 1000000, .rest_us = 1000000, .max_us = 1};
    struct tv_model_progress progress = {0};
    struct tv_herald herald;
    atomic_store(&progress.bytes_total, 100);
    assert_int_equal(tv_herald_start(&herald, &progress, &bounded), 0);
    add(&progress, 1);
    assert_string_equal(hear(QUIET_MS), "");
    tv_herald_stop(&herald);
}

static void test_watchdog_variables(void **state)
{
    (void)state;
    char pid[32];
    assert_int_equal(tv_notify_watchdog_us(), 0);
    assert_int_equal(setenv("WATCHDOG_USEC", "8000000", 1), 0);
    int64_t each_us = tv_notify_watchdog_us();
    assert_in_range(each_us, 1, 4000000); /* half of it, or more often */
    (void)snprintf(pid, sizeof pid, "%d", (int)getpid());
    assert_int_equal(setenv("WATCHDOG_PID", pid, 1), 0);
    assert_int_equal(tv_notify_watchdog_us(), each_us);
    assert_int_equal(setenv("WATCHDOG_PID", "1", 1), 0);
    assert_int_equal(tv_notify_watchdog_us(), 0); /* another process is meant */
    assert_int_equal(unsetenv("WATCHDOG_PID"), 0);
    assert_int_equal(setenv("WATCHDOG_USEC", "soon", 1), 0);
    assert_int_equal(tv_notify_watchdog_us(), 0);
    assert_int_equal(unsetenv("WATCHDOG_USEC"), 0);
}

static void test_nobody_listens(void **state)
{
    (void)state;
    struct tv_model_progress progress = {0};
    struct tv_herald herald;
    char saved[sizeof path];
    (void)snprintf(saved, sizeof saved, "%s", path);
    assert_int_equal(unsetenv("NOTIFY_SOCKET"), 0);
    assert_int_equal(tv_notify_wanted(), 0);
    assert_int_equal(tv_herald_start(&herald, &progress, &times), 0);
    assert_int_equal(herald.running, 0);
    tv_herald_stop(&herald);
    tv_notify_send("READY=1");
    assert_int_equal(setenv("NOTIFY_SOCKET", "/nonexistent/socket", 1), 0);
    tv_notify_send("READY=1"); /* one warning */
    assert_int_equal(setenv("NOTIFY_SOCKET", saved, 1), 0);
    assert_string_equal(hear(0), "");
    tv_notify_send("STATUS=%d", 7);
    assert_string_equal(hear(WATCHDOG_MS), "STATUS=7");
}

int main(void)
{
    if (!tv_notify_built()) {
        return 77; /* this build tells nobody */
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_b62_time_only_while_bytes_come),
        cmocka_unit_test(test_b62_time_has_a_bound),
        cmocka_unit_test(test_watchdog_variables),
        cmocka_unit_test(test_nobody_listens),
    };
    return cmocka_run_group_tests(tests, manager_open, manager_close);
}
