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

static void silent_server_meets_the_deadline(void **state)
{
    (void)state;
    static const struct step steps[] = {{.silent_ms = 10000}, {.silent_ms = 10000}};
    struct server server;
    struct tv_client_answer answer;
    struct tv_client_problem problem;
    struct tv_client_options options;
    struct tv_client *client = NULL;
    start(&server, steps, 2);
    tv_client_options_init(&options);
    options.url = server.url;
    options.attempt_ms = 150;
    options.total_ms = 250;
    options.backoff_ms = 1;
    assert_int_equal(tv_client_create(&options, &client), 0);
    int64_t before = now_ms();
    assert_int_equal(tv_client_health(client, &answer, &problem), -ETIMEDOUT);
    assert_in_range(now_ms() - before, 150, 5000);
    tv_client_destroy(client);
    stop(&server);
    assert_int_equal(server.served, 2);
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
    tv_client_destroy(client);
}

static void urls(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",           "127.0.0.1:8471", "ftp://127.0.0.1",   "http://", "http://h/v1",
        "http://h?x", "http://user@h",  "file:///etc/passwd"};
    struct tv_client_options options;
    struct tv_client *client = NULL;
    tv_client_options_init(&options);
    assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        options.url = bad[i];
        assert_int_equal(tv_client_create(&options, &client), -EINVAL);
    }
    options.url = "http://localhost:8471/";
    assert_int_equal(tv_client_create(&options, &client), 0);
    tv_client_destroy(client);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(retries_are_bounded),
        cmocka_unit_test(silent_server_meets_the_deadline),
        cmocka_unit_test(nobody_listens),
        cmocka_unit_test(urls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
