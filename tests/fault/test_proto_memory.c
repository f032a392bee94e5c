/*
 * test_proto_memory.c - the n-th allocation fails, for n = 1 and up until the operation succeeds.
 *
 * Every n must end in -ENOMEM with nothing left allocated. The linker wraps the allocator of the
 * contract's library (--wrap); cJSON gets the same functions through its hooks.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>
#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request.h"
#include "proto/response.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *at, size_t bytes);
void __real_free(void *at);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *at, size_t bytes);
void __wrap_free(void *at);

static int counting;         /* the sweep is on */
static int countdown, calls; /* allocations left before the failing one; seen so far */
static int live;             /* allocated and not freed while counting */

static int fails(void)
{
    if (!counting) {
        return 0;
    }
    calls++;
    return --countdown == 0;
}

static void *born(void *at)
{
    live += counting && at != NULL;
    return at;
}

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : born(__real_malloc(bytes));
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : born(__real_calloc(count, bytes));
}

void *__wrap_realloc(void *at, size_t bytes)
{
    if (fails()) {
        return NULL;
    }
    return at == NULL ? born(__real_realloc(NULL, bytes)) : __real_realloc(at, bytes);
}

void __wrap_free(void *at)
{
    live -= counting && at != NULL;
    __real_free(at);
}

static const struct tv_request_limits limits = {
    .tree = {.nodes_max = 256, .depth_max = 64, .vocab = 307},
    .max_len = 4096,
    .inline_bytes = TV_INLINE_BYTES_DEFAULT,
};

/* Decode until it succeeds; returns how many allocations that took. */
static int sweep_decode(enum tv_call_kind kind, const char *body, int want)
{
    int n;

    for (n = 1;; n++) {
        struct tv_request request;
        struct tv_problem problem = {0};
        int rc;

        counting = 1;
        countdown = n;
        calls = live = 0;
        rc = tv_request_decode(kind, body, strlen(body), &limits, &request, &problem);
        if (calls < n) {
            assert_int_equal(rc, want);
            tv_request_finish(&request);
            counting = 0;
            assert_int_equal(live, 0);
            return n - 1;
        }
        counting = 0;
        if (rc != -ENOMEM || live != 0) {
            fail_msg("allocation %d: %d, %d left", n, rc, live);
        }
    }
}

static void test_f03_decode(void **state)
{
    static const char verify[] =
        "{\"seq\":1,\"epoch\":\"0123456789abcdef\",\"expected_len\":1,\"tree\":{\"tokens\":"
        "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],\"parents\":"
        "[-1,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]},\"want\":{\"rows\":[0,1,2],\"logits\":{}}}";
    static const char create[] =
        "{\"tokens_b64\":\"AQAAAA==\",\"sampling\":{\"seed\":\"1\",\"temperature\":0.5},"
        "\"stop\":{\"token_ids\":[1,2]},\"cache_salt\":\"a\\u00e9\"}";
    static const char refused[] = "{\"tokens\":[1,2],\"stop\":{\"token_ids\":[1,307]}}";
    char wide[16384];
    size_t used = 0;
    int i;

    (void)state;
    assert_true(sweep_decode(TV_CALL_VERIFY, verify, 0) > 20);
    assert_true(sweep_decode(TV_CALL_CREATE, create, 0) > 15);
    assert_true(sweep_decode(TV_CALL_CREATE, refused, -EINVAL) > 5);
    /* Enough names, spans and text that every table of the scanner grows. */
    wide[used++] = '{';
    for (i = 0; i < 200; i++) {
        used += (size_t)snprintf(wide + used, sizeof(wide) - used, "%s\"member-number-%d\":[%d,%d]",
                                 i > 0 ? "," : "", i, i, i);
    }
    memcpy(wide + used, "}", 2);
    assert_true(sweep_decode(TV_CALL_CREATE, wide, -EINVAL) > 400);
}

static void test_f06_encode(void **state)
{
    static float row[5000];
    static const int32_t zero[1] = {0};
    const struct tv_logits_block block = {.row_count = 1, .vocab = 5000, .rows = zero, .data = row};
    const struct tv_round round = {
        .kind = TV_CALL_ONESHOT, .logits = &block, .sampling = {.temperature = 1, .top_p = 1}};
    int n;

    (void)state;
    for (n = 1;; n++) {
        struct tv_buf buf;
        int failed;

        counting = 1;
        countdown = n;
        calls = live = 0;
        tv_buf_init(&buf, 1u << 20);
        tv_encode_round(&buf, &round, 0);
        failed = buf.failed;
        tv_buf_finish(&buf);
        counting = 0;
        assert_int_equal(live, 0);
        if (calls < n) {
            assert_int_equal(failed, 0);
            break;
        }
        assert_int_equal(failed, -ENOMEM);
    }
    assert_true(n > 2);
}

int main(void)
{
    cJSON_Hooks hooks = {__wrap_malloc, __wrap_free};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f03_decode),
        cmocka_unit_test(test_f06_encode),
    };

    cJSON_InitHooks(&hooks);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
