/*
 * test_http_routes.c - which call a method and a request target name, and what is refused.
 *
 * Pure text in, struct out; the same table is met through sockets in tests/http.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "http/routes.h"
#include "proto/limits.h"

#define ID         "s_0123456789abcdefghijAB"
#define ADMIN_ONLY 2

static const struct tv_request_limits limits = {
    .tree = {.nodes_max = 256, .depth_max = 64, .vocab = 512},
    .max_len = 4096,
    .inline_bytes = 1 << 20,
};

static void test_every_route(void **state)
{
    (void)state;
    static const struct {
        const char *method, *uri;
        enum tv_call_kind kind;
        int on_admin; /* ADMIN_ONLY: and on no other */
    } cases[] = {
        {"GET", "/", TV_CALL_PAGE, ADMIN_ONLY},
        {"HEAD", "/?", TV_CALL_PAGE, ADMIN_ONLY},
        {"GET", "/v1/admin/status", TV_CALL_STATUS, ADMIN_ONLY},
        {"POST", "/v1/admin/drain", TV_CALL_DRAIN, ADMIN_ONLY},
        {"POST", "/v1/admin/undrain", TV_CALL_UNDRAIN, ADMIN_ONLY},
        {"POST", "/v1/sessions", TV_CALL_CREATE, 0},
        {"GET", "/v1/sessions", TV_CALL_LIST, 0},
        {"GET", "/v1/sessions/" ID, TV_CALL_STATE, 0},
        {"DELETE", "/v1/sessions/" ID, TV_CALL_DELETE, 0},
        {"POST", "/v1/sessions/" ID "/verify", TV_CALL_VERIFY, 0},
        {"POST", "/v1/sessions/" ID "/extend", TV_CALL_EXTEND, 0},
        {"POST", "/v1/sessions/" ID "/decode", TV_CALL_DECODE, 0},
        {"POST", "/v1/sessions/" ID "/renew", TV_CALL_RENEW, 0},
        {"GET", "/v1/sessions/" ID "/rounds/7", TV_CALL_ROUND, 0},
        {"GET", "/v1/sessions/" ID "/rounds/2147483647/tensor", TV_CALL_TENSOR, 0},
        {"POST", "/v1/sessions/" ID "/rollback", TV_CALL_ROLLBACK, 0},
        {"POST", "/v1/sessions/" ID "/fork", TV_CALL_FORK, 0},
        {"POST", "/v1/verify", TV_CALL_ONESHOT, 0},
        {"POST", "/v1/score", TV_CALL_SCORE, 0},
        {"POST", "/v1/verify:batch", TV_CALL_BATCH, 0},
        {"POST", "/v1/parity?strict=1", TV_CALL_PARITY, 1},
        {"GET", "/v1/parity", TV_CALL_PARITY_TOTALS, 1},
        {"GET", "/v1/parity/violations/3", TV_CALL_PARITY_VIOLATION, 1},
        {"GET", "/v1/model", TV_CALL_MODEL, 1},
        {"GET", "/healthz", TV_CALL_HEALTH, 1},
        {"HEAD", "/healthz", TV_CALL_HEALTH, 1},
        {"GET", "/livez", TV_CALL_HEALTH, 1},
        {"GET", "/health", TV_CALL_HEALTH, 1},
        {"GET", "/v1/health", TV_CALL_HEALTH, 1},
        {"GET", "/v2/health/live", TV_CALL_HEALTH, 1},
        {"GET", "/readyz?deep=1", TV_CALL_READY, 1},
        {"GET", "/v2/health/ready", TV_CALL_READY, 1},
        {"GET", "/metrics", TV_CALL_METRICS, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int admin = 0; admin < 2; admin++) {
            struct http_route route = {0};
            struct tv_request request = {0};
            struct tv_problem problem = {0};
            int rc =
                tv_http_route(cases[i].uri, cases[i].method, admin, &route, &request, &problem);
            if (admin ? !cases[i].on_admin : cases[i].on_admin == ADMIN_ONLY) {
                assert_int_equal(rc, -EINVAL);
                assert_int_equal(problem.code, TV_NOT_FOUND);
                continue;
            }
            assert_int_equal(rc, 0);
            assert_int_equal(route.kind, cases[i].kind);
            assert_int_equal(request.kind, cases[i].kind);
            int bare = strstr(cases[i].uri, "/v1/admin/") != NULL; /* says all by its path */
            assert_int_equal(route.body != HTTP_BODY_NONE,
                             strcmp(cases[i].method, "POST") == 0 && !bare);
            if (strstr(cases[i].uri, ID) != NULL) {
                assert_string_equal(request.session, ID);
            }
        }
    }
}

static void test_route_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *method, *uri;
        enum tv_code code;
        const char *allow;
    } cases[] = {
        {"GET", "/", TV_NOT_FOUND, NULL},
        {"GET", "", TV_BAD_REQUEST, NULL},
        {"OPTIONS", "*", TV_BAD_REQUEST, NULL},
        {"GET", "http://h/healthz", TV_BAD_REQUEST, NULL},
        {"GET", "/healthz/", TV_NOT_FOUND, NULL},
        {"GET", "//healthz", TV_NOT_FOUND, NULL},
        {"GET", "/Healthz", TV_NOT_FOUND, NULL},
        {"GET", "/health%7a", TV_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/", TV_NOT_FOUND, NULL},
        {"POST", "/v1/sessions//verify", TV_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/" ID "/rounds", TV_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/" ID "/rounds/0", TV_ROUND_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/" ID "/rounds/01", TV_ROUND_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/" ID "/rounds/-1", TV_ROUND_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/" ID "/rounds/2147483648", TV_ROUND_NOT_FOUND, NULL},
        {"GET", "/v1/sessions/" ID "/rounds/99999999999999999999", TV_ROUND_NOT_FOUND, NULL},
        {"GET", "/v1/parity/violations/x", TV_NOT_FOUND, NULL},
        {"POST", "/healthz", TV_METHOD_NOT_ALLOWED, "GET, HEAD"},
        {"GET", "/v1/verify", TV_METHOD_NOT_ALLOWED, "POST"},
        {"HEAD", "/v1/verify", TV_METHOD_NOT_ALLOWED, "POST"},
        {"PUT", "/v1/sessions", TV_METHOD_NOT_ALLOWED, "GET, HEAD, POST"},
        {"POST", "/v1/sessions/" ID, TV_METHOD_NOT_ALLOWED, "GET, HEAD, DELETE"},
        {"get", "/healthz", TV_METHOD_NOT_ALLOWED, "GET, HEAD"},
        {"DELETE", "/v1/parity", TV_METHOD_NOT_ALLOWED, "GET, HEAD, POST"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct http_route route = {0};
        struct tv_request request = {0};
        struct tv_problem problem = {0};
        assert_int_equal(
            tv_http_route(cases[i].uri, cases[i].method, 0, &route, &request, &problem), -EINVAL);
        assert_int_equal(problem.code, cases[i].code);
        if (cases[i].allow != NULL) {
            assert_string_equal(problem.allow, cases[i].allow);
        }
    }
}

/* An id of any length that is no session's is answered like any other unknown id. */
static void test_session_ids_that_cannot_be(void **state)
{
    (void)state;
    char uri[200] = "/v1/sessions/";
    size_t head = strlen(uri);
    for (size_t bytes = 1; bytes < 100; bytes++) {
        struct http_route route = {0};
        struct tv_request request = {0};
        struct tv_problem problem = {0};
        memset(uri + head, 'x', bytes);
        uri[head + bytes] = '\0';
        assert_int_equal(tv_http_route(uri, "GET", 0, &route, &request, &problem), 0);
        assert_string_equal(request.session, bytes < sizeof request.session ? uri + head : "?");
    }
}

static void test_query(void **state)
{
    (void)state;
    static const struct {
        const char *uri;
        enum tv_call_kind kind;
        int rc;
    } cases[] = {
        {"/p", TV_CALL_STATE, 0},
        {"/p?", TV_CALL_STATE, 0},
        {"/p?tail=5", TV_CALL_STATE, 0},
        {"/p?%74ail=%35", TV_CALL_STATE, 0},
        {"/p?tail=5&tail=5", TV_CALL_STATE, -EINVAL},
        {"/p?tail=5&", TV_CALL_STATE, -EINVAL},
        {"/p?tail=%3", TV_CALL_STATE, -EINVAL},
        {"/p?tail=%zz", TV_CALL_STATE, -EINVAL},
        {"/p?tail=%00", TV_CALL_STATE, -EINVAL},
        {"/p?tail=+5", TV_CALL_STATE, -EINVAL},
        {"/p?tail", TV_CALL_STATE, -EINVAL},
        {"/p?tail=", TV_CALL_STATE, -EINVAL},
        {"/p?Tail=5", TV_CALL_STATE, -EINVAL},
        {"/p?other=5", TV_CALL_STATE, -EINVAL},
        {"/p?x", TV_CALL_HEALTH, -EINVAL},
        {"/p?strict=1", TV_CALL_PARITY, 0},
        {"/p?wait_ms=60000", TV_CALL_ROUND, 0},
        {"/p?wait_ms=60001", TV_CALL_ROUND, -EINVAL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct tv_request request = {.kind = cases[i].kind};
        struct tv_problem problem = {0};
        int rc = tv_http_query(cases[i].uri, &limits, &request, &problem);
        if (rc != cases[i].rc) {
            fail_msg("%s gave %d", cases[i].uri, rc);
        }
        if (rc != 0) {
            assert_int_equal(problem.code, TV_BAD_REQUEST);
        } else if (cases[i].kind == TV_CALL_STATE) {
            assert_int_equal(request.tail, strlen(cases[i].uri) > 3 ? 5 : 0);
        }
        tv_request_finish(&request);
    }
}

/* Every node that a tree can have, listed once in any order: the longest list that means something,
 * plain and with its commas escaped. One more byte is refused. */
static void test_query_lists_every_node(void **state)
{
    (void)state;
    static const char *const commas[] = {",", "%2C", "%2c"};
    static char uri[3 * TV_QUERY_BYTES_MAX];
    for (size_t c = 0; c < sizeof commas / sizeof commas[0]; c++) {
        struct tv_request request = {.kind = TV_CALL_TENSOR};
        struct tv_problem problem = {0};
        int at = snprintf(uri, sizeof uri, "/p?what=logits&rows=");
        for (int node = TV_ENGINE_NODES_MAX - 1; node >= 0; node--) {
            at += snprintf(uri + at, sizeof uri - (size_t)at, "%d%s", node,
                           node > 0 ? commas[c] : "");
        }
        assert_int_equal(tv_http_query(uri, &limits, &request, &problem), 0);
        assert_int_equal(request.tensor_rows.kind, TV_ROWS_LIST);
        assert_int_equal(request.tensor_rows.count, TV_ENGINE_NODES_MAX);
        for (int32_t i = 0; i < TV_ENGINE_NODES_MAX; i++) {
            assert_int_equal(request.tensor_rows.nodes[i], TV_ENGINE_NODES_MAX - 1 - i);
        }
        tv_request_finish(&request);
        memset(&request, 0, sizeof request);
        request.kind = TV_CALL_TENSOR;
        memcpy(uri + at, ",", 2);
        assert_int_equal(tv_http_query(uri, &limits, &request, &problem), -EINVAL);
        assert_int_equal(problem.code, TV_BAD_REQUEST);
        assert_non_null(strstr(problem.detail, "too long"));
        tv_request_finish(&request);
    }
}

/* A value of the longest form that fits is read and judged; a node twice is refused. */
static void test_query_caps(void **state)
{
    (void)state;
    static char uri[2 * TV_QUERY_BYTES_MAX] = "/p?rows=";
    size_t head = strlen(uri);
    struct tv_request request = {.kind = TV_CALL_TENSOR};
    struct tv_problem problem = {0};
    for (size_t i = head; i < head + TV_QUERY_BYTES_MAX; i++) {
        uri[i] = (i - head) % 2 == 0 ? '1' : ',';
    }
    assert_int_equal(tv_http_query(uri, &limits, &request, &problem), -EINVAL);
    assert_non_null(strstr(problem.detail, "rows")); /* the decoder's word: it was let through */
    tv_request_finish(&request);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_route),
        cmocka_unit_test(test_route_refusals),
        cmocka_unit_test(test_session_ids_that_cannot_be),
        cmocka_unit_test(test_query),
        cmocka_unit_test(test_query_lists_every_node),
        cmocka_unit_test(test_query_caps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
