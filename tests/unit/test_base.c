/*
 * test_base.c - digests against known answers, log lines that cannot be forged, checked sizes.
 */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/digest.h"
#include "base/log.h"
#include "base/random.h"
#include "base/wait.h"

static void hex(const uint8_t *bytes, size_t count, char *text)
{
    for (size_t i = 0; i < count; i++) {
        (void)snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    }
}

static void test_sha256_known_answers(void **state)
{
    (void)state;
    struct tv_sha256 hash;
    uint8_t sum[32];
    char text[65];
    tv_sha256_init(&hash);
    tv_sha256_finish(&hash, sum);
    hex(sum, sizeof sum, text);
    assert_string_equal(text, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, "a", 1);
    tv_sha256_update(&hash, "bc", 2);
    tv_sha256_finish(&hash, sum);
    hex(sum, sizeof sum, text);
    assert_string_equal(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

/* The chain digest is the truncated hash of exactly the documented bytes. */
static void test_digest_chain(void **state)
{
    (void)state;
    struct tv_digest digest;
    struct tv_sha256 hash;
    uint8_t model_id[32], sum[32], token[4] = {0x78, 0x56, 0x34, 0x12};
    memset(model_id, 0xab, sizeof model_id);
    tv_digest_start(&digest, model_id, "salt", 4);
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, "treeverify-kv-v1", 16);
    tv_sha256_update(&hash, model_id, sizeof model_id);
    tv_sha256_update(&hash, "salt", 4);
    tv_sha256_finish(&hash, sum);
    assert_memory_equal(digest.bytes, sum, 16);
    tv_digest_push(&digest, 0x12345678);
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, sum, 16);
    tv_sha256_update(&hash, token, 4);
    tv_sha256_finish(&hash, sum);
    assert_memory_equal(digest.bytes, sum, 16);
}

/* What tv_log writes to stderr for one text. */
static size_t log_capture(enum tv_log_level level, const char *text, char *line, size_t bytes)
{
    int pipe_fds[2];
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0);
    assert_int_equal(pipe(pipe_fds), 0);
    assert_true(dup2(pipe_fds[1], STDERR_FILENO) >= 0);
    (void)close(pipe_fds[1]);
    tv_log(level, "%s", text);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    (void)close(saved);
    ssize_t got = read(pipe_fds[0], line, bytes - 1);
    (void)close(pipe_fds[0]);
    assert_true(got >= 0);
    line[got] = '\0';
    return (size_t)got;
}

static void test_b45_log_lines_cannot_be_forged(void **state)
{
    (void)state;
    char line[8192], text[4096];
    assert_true(log_capture(TV_LOG_INFO, "a\n<3>error: forged\x1b[2J\xff", line, sizeof line) > 0);
    assert_string_equal(line, "<6>a\\x0a<3>error: forged\\x1b[2J\\xff\n");
    memset(text, '\n', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    size_t bytes = log_capture(TV_LOG_ERROR, text, line, sizeof line);
    assert_true(bytes < 4200);
    assert_ptr_equal(strchr(line, '\n'), line + bytes - 1);
    assert_string_equal(line + bytes - 4, "...\n");
}

static void test_log_level(void **state)
{
    (void)state;
    char line[256];
    assert_int_equal(log_capture(TV_LOG_DEBUG, "x", line, sizeof line), 0);
    tv_log_level_set(TV_LOG_WARNING);
    assert_int_equal(log_capture(TV_LOG_INFO, "x", line, sizeof line), 0);
    assert_true(log_capture(TV_LOG_WARNING, "x", line, sizeof line) > 0);
    tv_log_level_set(TV_LOG_INFO);
}

static void test_checked_sizes(void **state)
{
    (void)state;
    size_t result = 7;
    assert_int_equal(tv_size_mul(SIZE_MAX / 2 + 1, 2, &result), -EOVERFLOW);
    assert_int_equal(result, 7);
    assert_int_equal(tv_size_mul(1u << 16, 3, &result), 0);
    assert_int_equal(result, 3u << 16);
}

static void test_clocks_and_random(void **state)
{
    (void)state;
    uint8_t a[32], b[32];
    int64_t before = tv_clock_us();
    assert_true(tv_clock_us() >= before);
    assert_true(tv_clock_unix_ms() > 1600000000000);
    assert_int_equal(tv_random_bytes(a, sizeof a), 0);
    assert_int_equal(tv_random_bytes(b, sizeof b), 0);
    assert_memory_not_equal(a, b, sizeof a);
}

static void test_a_wait_ends_by_the_clock(void **state)
{
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t cond;
    (void)state;
    assert_int_equal(tv_wait_init(&cond), 0);
    (void)pthread_mutex_lock(&lock);
    int64_t until_us = tv_clock_us() + 20000;
    int32_t waits = 0;
    do { /* also when this thread was not let run until then */
        tv_wait_until(&cond, &lock, until_us);
        waits++;
    } while (tv_clock_us() < until_us);
    assert_in_range(waits, 1, 10);         /* it sleeps; it may wake for no reason */
    tv_wait_until(&cond, &lock, until_us); /* which is over: at once */
    (void)pthread_mutex_unlock(&lock);
    assert_int_equal(pthread_cond_destroy(&cond), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256_known_answers),
        cmocka_unit_test(test_digest_chain),
        cmocka_unit_test(test_b45_log_lines_cannot_be_forged),
        cmocka_unit_test(test_log_level),
        cmocka_unit_test(test_checked_sizes),
        cmocka_unit_test(test_clocks_and_random),
        cmocka_unit_test(test_a_wait_ends_by_the_clock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
