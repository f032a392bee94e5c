/*
 * test_client_http.c - calls of the client library against a scripted server: deadlines, the number
 * of retries, addresses. Sessions are test_client_session.c's.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "client_fixture.h"
#include "clients/c/internal.h"

static void retries_are_bounded(void **state)
{
    (void)state;
    static const struct step steps[] = {{.hang_up = 1}, {.hang_up = 1}, {.hang_up = 1},
                                        {.hang_up = 1}, {.hang_up = 1}, {.hang_up = 1}};
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    start(&server, steps, 6);
    struct tv_client *client = client_of(&server);
    assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), -EIO);
    stop(&server);
    assert_int_equal(server.served, 5); /* the first and four retries */
    assert_int_equal(problem.committed, -1);
    tv_client_destroy(client);
}

/* One attempt's deadline, and that of a call with all its attempts; how many there were is counted
 * here, since a server on a busy machine may come to the last one too late. */
static void silent_server_meets_the_deadline(void **state)
{
    (void)state;
    static const struct {
        int32_t attempt_ms, total_ms, attempts;
    } cases[] = {{150, 30000, 2}, {20000, 250, 1}};
    static const struct step steps[] = {{.silent_ms = 20000}, {.silent_ms = 20000}};
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    struct tv_client_options options;
    struct tv_client *client = NULL;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        start(&server, steps, 2);
        tv_client_options_init(&options);
        options.url = server.url;
        options.attempt_ms = cases[i].attempt_ms;
        options.total_ms = cases[i].total_ms;
        options.retries_max = 1;
        options.backoff_ms = 1;
        assert_int_equal(tv_client_create(&options, &client), 0);
        int64_t before = now_ms();
        assert_int_equal(tv_client_health(client, &answer, &problem), -ETIMEDOUT);
        assert_in_range(now_ms() - before, 240, 10000); /* timers end a little early */
        assert_int_equal(tv_client_attempts(client), cases[i].attempts);
        tv_client_destroy(client);
        stop(&server);
    }
}

static void nobody_listens(void **state)
{
    (void)state;
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    start(&server, NULL, 0);
    struct tv_client *client = client_of(&server);
    stop(&server);
    assert_int_equal(tv_client_health(client, &answer, &problem), -ECONNREFUSED);
    assert_true(problem.detail[0] != '\0');
    /* nor was anybody ever there: no restart is waited for */
    assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), -ECONNREFUSED);
    assert_int_equal(tv_client_attempts(client), 2 * 5);
    tv_client_destroy(client);
}

/* Where somebody was and nobody listens now, the time for a restart counts instead of retries; not
 * for probes, and not where there are no retries at all. */
static void restart_is_waited_for(void **state)
{
    (void)state;
    static const struct {
        int32_t retries_max, restart_ms, least_ms, attempts; /* 0: as many as there is time for */
    } cases[] = {{1, 300, 300, 0}, {1, 0, 0, 2}, {0, 300, 0, 1}};
    static const struct step steps[] = {
        {.status = "200 OK", .type = "application/json", .body = "{}"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct server server;
        struct tv_client_answer answer = {0};
        struct tv_client_problem problem;
        struct tv_client_options options;
        struct tv_client *client = NULL;
        start(&server, steps, 1);
        tv_client_options_init(&options);
        assert_int_equal(options.restart_ms, 30000);
        options.url = server.url;
        options.retries_max = cases[i].retries_max;
        options.backoff_ms = 1;
        options.restart_ms = -1;
        assert_int_equal(tv_client_create(&options, &client), -EINVAL);
        options.restart_ms = cases[i].restart_ms;
        assert_int_equal(tv_client_create(&options, &client), 0);
        assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), 0);
        tv_client_answer_finish(&answer);
        stop(&server);
        int64_t before = now_ms(), attempts = tv_client_attempts(client);
        assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), -ECONNREFUSED);
        assert_true(now_ms() - before >= cases[i].least_ms);
        attempts = tv_client_attempts(client) - attempts;
        assert_true(cases[i].attempts == 0 || attempts == cases[i].attempts);
        attempts = tv_client_attempts(client);
        assert_int_equal(tv_client_health(client, &answer, &problem), -ECONNREFUSED);
        assert_int_equal(tv_client_attempts(client) - attempts, cases[i].retries_max + 1);
        tv_client_destroy(client);
    }
}

/* A proxy in front of a server that restarts: its own words, not a problem document. */
static void restart_behind_a_proxy_is_waited_for(void **state)
{
    (void)state;
    static const struct step away = {
        .status = "503 Service Unavailable", .type = "text/html", .body = "<h1>No server</h1>"};
    static const struct step there = {.status = "200 OK", .type = "application/json", .body = "{}"};
    const struct step steps[] = {away, away, away, there, away, away, away, away, away, there};
    for (int first = 0; first < 4; first += 3) { /* nobody has answered yet; somebody has */
        struct server server;
        struct tv_client_answer answer = {0};
        struct tv_client_problem problem;
        struct tv_client_options options;
        struct tv_client *client = NULL;
        start(&server, steps + first, 10 - first);
        tv_client_options_init(&options);
        options.url = server.url;
        options.retries_max = 2;
        options.backoff_ms = 1;
        assert_int_equal(tv_client_create(&options, &client), 0);
        int rc = tv_client_parity_run(client, NULL, 0, &answer, &problem);
        if (first == 0) {
            assert_int_equal(rc, -EPROTO);
            assert_int_equal(problem.http_status, 503);
            assert_int_equal(tv_client_attempts(client), 3);
        } else {
            assert_int_equal(rc, 0);
            tv_client_answer_finish(&answer);
            assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), 0);
            assert_int_equal(tv_client_attempts(client), 1 + 6);
            tv_client_answer_finish(&answer);
        }
        stop(&server);
        tv_client_destroy(client);
    }
}

static void urls(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",           "127.0.0.1:8471", "ftp://127.0.0.1",    "http://",         "http://h/v1",
        "http://h?x", "http://user@h",  "file:///etc/passwd", "http://[::1",     "http://[::1:80",
        "http://::1", "http://h:65536", "http://h:x",         "http://[::g]:80", "http://h\n:80"};
    struct tv_client_options options;
    struct tv_client *client = NULL;
    tv_client_options_init(&options);
    assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        options.url = bad[i];
        assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    }
    static const char *const good[] = {"http://localhost:8471/", "HTTP://127.0.0.1",
                                       "http://[::1]:8471", "https://gpu-host.example:443"};
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        options.url = good[i];
        assert_int_equal(tv_client_create(&options, &client), 0);
        tv_client_destroy(client);
    }
    char key[258];
    memset(key, 'k', sizeof(key));
    key[257] = '\0';
    static const char *const bad_keys[] = {"", "a b", "a\r\nX: y", "a\tb", "\x7f", "\xc3\xa9"};
    options.key = key;
    assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    for (size_t i = 0; i < sizeof(bad_keys) / sizeof(bad_keys[0]); i++) {
        options.key = bad_keys[i];
        assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    }
    key[256] = '\0';
    options.key = key;
    assert_int_equal(tv_client_create(&options, &client), 0);
    tv_client_destroy(client);
    tv_client_destroy(NULL);
}

/* What would be more than a method or a path is refused before anything is sent. */
static void methods_and_paths(void **state)
{
    (void)state;
    static const struct {
        const char *method, *path;
    } bad[] = {{"", "/"},
               {"get", "/"},
               {"GET\r\nX: y", "/"},
               {"GET\n", "/"},
               {"GET /x HTTP/1.1", "/"},
               {"G\xc3\x84T", "/"},
               {"ABCDEFGHIJKLMNOPQ", "/"},
               {"GET", ""},
               {"GET", "healthz"},
               {"GET", "/\r\nX: y"},
               {"GET", "/a b"},
               {"GET", "/a\tb"},
               {"GET", "/a#b"},
               {"GET", "/\x7f"},
               {"GET", "/\xc3\xa4"}};
    static const struct step steps[] = {
        {.status = "200 OK", .type = "application/json", .body = "{\"status\":\"ok\"}"}};
    struct server server;
    struct tv_client_answer answer = {0};
    struct tv_client_problem problem;
    start(&server, steps, 1);
    struct tv_client *client = client_of(&server);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(
            tv_client_request(client, bad[i].method, bad[i].path, NULL, 0, &answer, &problem),
            -EINVAL);
        assert_true(problem.detail[0] != '\0');
    }
    assert_int_equal(
        tv_client_request(client, "PROPFIND", "/a?b=%20&c=d", NULL, 0, &answer, &problem), 0);
    tv_client_answer_finish(&answer);
    tv_client_destroy(client);
    stop(&server);
    assert_int_equal(server.served, 1);
    assert_memory_equal(server.requests[0], "PROPFIND /a?b=%20&c=d HTTP/1.1\r\n", 32);
}

/* Nothing of an earlier refusal, nor of one that a retry met on the way, is left after a success.
 */
static void success_has_no_problem(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.status = "503 Service Unavailable",
         .type = "application/problem+json",
         .body = "{\"code\":\"overloaded\",\"detail\":\"busy\",\"pointer\":\"/x\",\"node\":3,"
                 "\"status\":503,\"retryable\":true,\"committed\":false}"},
        {.status = "200 OK", .type = "application/json", .body = "{}"}};
    static const struct tv_client_problem none = {.node = -1, .committed = -1};
    struct server server;
    struct tv_client_answer answer = {0};
    struct tv_client_problem problem;
    start(&server, steps, 2);
    struct tv_client *client = client_of(&server);
    assert_int_equal(tv_client_request(client, "GET", "x", NULL, 0, &answer, &problem), -EINVAL);
    assert_true(problem.detail[0] != '\0');
    assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), 0);
    stop(&server);
    assert_int_equal(server.served, 2);
    assert_memory_equal(&problem, &none, sizeof(none));
    tv_client_answer_finish(&answer);
    tv_client_destroy(client);
}

/* A server that wants to be left alone for days is not asked again within the call. */
static void retry_after_of_days(void **state)
{
    (void)state;
    static const struct step steps[] = {
        {.status = "429 Too Many Requests",
         .type = "application/problem+json",
         .body = "{}",
         .headers = "Retry-After: 100000\r\n"},
        {.status = "200 OK", .type = "application/json", .body = "{}"}};
    struct server server;
    struct tv_client_answer answer = {0};
    struct tv_client_problem problem;
    start(&server, steps, 2);
    struct tv_client *client = client_of(&server);
    assert_int_equal(tv_client_parity_run(client, NULL, 0, &answer, &problem), -EPROTO);
    assert_int_equal(problem.retry_after_s, 100000);
    tv_client_destroy(client);
    stop(&server);
    assert_int_equal(server.served, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(retries_are_bounded),
        cmocka_unit_test(silent_server_meets_the_deadline),
        cmocka_unit_test(nobody_listens),
        cmocka_unit_test(urls),
        cmocka_unit_test(methods_and_paths),
        cmocka_unit_test(success_has_no_problem),
        cmocka_unit_test(retry_after_of_days),
        cmocka_unit_test(restart_is_waited_for),
        cmocka_unit_test(restart_behind_a_proxy_is_waited_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
