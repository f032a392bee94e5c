/*
 * test_proto_hidden.c - want.hidden in the decoder, and the values of its dtypes in the encoder.
 */
#include "proto_support.h"

#include <math.h>
#include <nettle/base64.h>

#include "proto/response.h"

#define WANT(hidden) "{" HEAD "," TREE ",\"want\":{\"hidden\":" hidden "}}"

/* Nodes 0 to 2 of the usual tree; a row of all taps has 3 * 8 values. */
static const struct tv_request_limits tapped = {
    .tree = {.nodes_max = TV_NODES_DEFAULT, .depth_max = TV_DEPTH_DEFAULT, .vocab = 307},
    .max_len = 128,
    .inline_bytes = 8000,
    .hidden_dim = 8,
    .tap_count = 3,
    .taps = {9, 1, 17},
    .project_dim = 5,
};

static void take(const struct tv_request_limits *limits, enum tv_call_kind kind, const char *body,
                 struct tv_request *request)
{
    struct tv_problem problem = {0};

    if (decode_under(limits, kind, body, request, &problem) != 0) {
        fail_msg("%s: %s", body, problem.detail);
    }
}

static void deny(const struct tv_request_limits *limits, enum tv_call_kind kind, const char *body,
                 enum tv_code code, const char *pointer)
{
    struct tv_request request;
    struct tv_problem problem = {0};

    if (decode_under(limits, kind, body, &request, &problem) != -EINVAL) {
        fail_msg("accepted: %s", body);
    }
    if (problem.code != code || strcmp(problem.pointer, pointer) != 0) {
        fail_msg("%s: %s at %s (%s)", body, tv_code_info(problem.code)->name, problem.pointer,
                 problem.detail);
    }
    tv_problem_finish(&problem);
}

static void deny_hidden(const char *hidden, enum tv_code code, const char *pointer)
{
    char body[256];

    snprintf(body, sizeof(body), "{" HEAD "," TREE ",\"want\":{\"hidden\":%s}}", hidden);
    deny(&tapped, TV_CALL_VERIFY, body, code, pointer);
}

static void test_defaults(void **state)
{
    struct tv_request r;

    (void)state;
    take(&tapped, TV_CALL_VERIFY, WANT("{}"), &r);
    assert_true(r.want.hidden.wanted && !r.want.hidden.fetch && !r.want.hidden.project);
    assert_int_equal(r.want.hidden.tap_count, 3);
    assert_int_equal(r.want.hidden.taps[2], 2);
    assert_int_equal(r.want.hidden.rows.kind, TV_ROWS_PATH);
    assert_int_equal(r.want.hidden.dtype, TV_TENSOR_F32);
    assert_int_equal(r.want.inline_bytes_most, 3 * 3 * 8 * 4); /* the longest path */
    tv_request_finish(&r);
    take(&tapped, TV_CALL_VERIFY, "{" HEAD "," TREE "}", &r);
    assert_int_equal(r.want.hidden.wanted, 0);
    tv_request_finish(&r);
    take(&tapped, TV_CALL_VERIFY,
         "{" HEAD "," TREE
         ",\"want\":{\"hidden\":{},\"rows\":[2,1],\"logits\":{\"via\":\"fetch\"}}}",
         &r);
    assert_int_equal(r.want.hidden.rows.kind, TV_ROWS_LIST);
    assert_int_equal(r.want.hidden.rows.nodes[0], 2);
    assert_true(r.want.hidden.rows.nodes != r.want.rows.nodes);
    assert_int_equal(r.want.inline_bytes_most, 2 * 3 * 8 * 4);
    tv_request_finish(&r);
}

static void test_all_members(void **state)
{
    struct tv_request r;

    (void)state;
    take(&tapped, TV_CALL_VERIFY,
         WANT("{\"project\":false,\"via\":\"fetch\",\"dtype\":\"fp8_e4m3\",\"rows\":\"stop\","
              "\"taps\":[17,9]}"),
         &r);
    assert_int_equal(r.want.hidden.tap_count, 2);
    assert_int_equal(r.want.hidden.taps[0], 2);
    assert_int_equal(r.want.hidden.taps[1], 0);
    assert_int_equal(r.want.hidden.rows.kind, TV_ROWS_STOP);
    assert_int_equal(r.want.hidden.dtype, TV_TENSOR_FP8_E4M3);
    assert_int_equal(r.want.hidden.fetch, 1);
    assert_int_equal(r.want.inline_bytes_most, 0);
    tv_request_finish(&r);
    take(&tapped, TV_CALL_VERIFY,
         WANT("{\"project\":true,\"taps\":[9,1,17],\"rows\":[1],\"dtype\":\"bf16\"}"), &r);
    assert_int_equal(r.want.hidden.project, 1);
    assert_int_equal(r.want.inline_bytes_most, 5 * 2);
    tv_request_finish(&r);
}

static void test_refusals(void **state)
{
    (void)state;
    deny_hidden("1", TV_WRONG_TYPE, "/want/hidden");
    deny_hidden("{\"tap\":[1]}", TV_UNKNOWN_FIELD, "/want/hidden/tap");
    deny_hidden("{\"taps\":1}", TV_WRONG_TYPE, "/want/hidden/taps");
    deny_hidden("{\"taps\":[]}", TV_WRONG_VALUE, "/want/hidden/taps");
    deny_hidden("{\"taps\":[1,8]}", TV_WRONG_VALUE, "/want/hidden/taps/1");
    deny_hidden("{\"taps\":[1,-1]}", TV_WRONG_VALUE, "/want/hidden/taps/1");
    deny_hidden("{\"taps\":[1,9,1]}", TV_WRONG_VALUE, "/want/hidden/taps/2");
    deny_hidden("{\"taps\":[1.5]}", TV_WRONG_TYPE, "/want/hidden/taps/0");
    deny_hidden("{\"taps\":[9,99999999999]}", TV_WRONG_VALUE, "/want/hidden/taps/1");
    deny_hidden("{\"rows\":[3]}", TV_WRONG_VALUE, "/want/hidden/rows/0");
    deny_hidden("{\"rows\":[0,0]}", TV_WRONG_VALUE, "/want/hidden/rows/1");
    deny_hidden("{\"rows\":\"window:2\"}", TV_WRONG_VALUE, "/want/hidden/rows");
    deny_hidden("{\"dtype\":\"f64\"}", TV_WRONG_VALUE, "/want/hidden/dtype");
    deny_hidden("{\"via\":\"mail\"}", TV_WRONG_VALUE, "/want/hidden/via");
    deny_hidden("{\"project\":1}", TV_WRONG_TYPE, "/want/hidden/project");
    deny_hidden("{\"project\":true,\"taps\":[1,9,17]}", TV_WRONG_VALUE, "/want/hidden");
    deny_hidden("{\"project\":true,\"taps\":[9,1]}", TV_WRONG_VALUE, "/want/hidden");
    deny(&usual, TV_CALL_VERIFY, WANT("{}"), TV_WRONG_VALUE, "/want/hidden");
    deny(&tapped, TV_CALL_ONESHOT,
         "{\"tokens\":[1]," TREE ",\"want\":{\"hidden\":{\"via\":\"fetch\"}}}", TV_WRONG_VALUE,
         "/want/hidden/via");
    deny(&tapped, TV_CALL_VERIFY,
         "{" HEAD "," TREE ",\"want\":{\"logits\":{\"dtype\":\"fp8_e4m3\"}}}", TV_WRONG_VALUE,
         "/want/logits/dtype");
    struct tv_request_limits bare = tapped;
    bare.project_dim = 0;
    deny(&bare, TV_CALL_VERIFY, WANT("{\"project\":true}"), TV_WRONG_VALUE, "/want/hidden");
}

/* At the limit and one byte above it, alone and beside other blocks. */
static void test_inline_bytes(void **state)
{
    struct tv_request_limits limits = tapped;
    struct tv_request r;

    (void)state;
    limits.inline_bytes = 3 * 3 * 8 * 4;
    take(&limits, TV_CALL_VERIFY, WANT("{\"rows\":\"all\"}"), &r);
    tv_request_finish(&r);
    take(&limits, TV_CALL_VERIFY,
         "{" HEAD "," TREE ",\"want\":{\"top_k\":16,\"hidden\":{\"rows\":[0],\"taps\":[1],"
         "\"dtype\":\"f16\"},\"rows\":[0,2]}}", /* 2 * (17 * 8 + 4) + 8 * 2 */
         &r);
    tv_request_finish(&r);
    limits.inline_bytes--;
    deny(&limits, TV_CALL_VERIFY, WANT("{\"rows\":\"all\"}"), TV_WRONG_VALUE, "/want");
    take(&limits, TV_CALL_VERIFY, WANT("{\"rows\":\"all\",\"via\":\"fetch\"}"), &r);
    tv_request_finish(&r);
}

/* What is kept to be fetched counts as f32, beside logits, to the limit and not above it. */
static void test_fetch_bytes(void **state)
{
    static const char body[] = "{" HEAD "," TREE ",\"want\":{\"rows\":\"all\",\"logits\":"
                               "{\"via\":\"fetch\",\"rows\":[0]},\"hidden\":"
                               "{\"via\":\"fetch\",\"dtype\":\"f16\"}}}";
    struct tv_request_limits limits = tapped;
    struct tv_request r;

    (void)state;
    limits.fetch_bytes = 307 * 4 + 3 * 3 * 8 * 4;
    take(&limits, TV_CALL_VERIFY, body, &r);
    assert_int_equal(r.want.fetch_bytes_most, limits.fetch_bytes);
    assert_int_equal(r.want.inline_bytes_most, 0);
    tv_request_finish(&r);
    limits.fetch_bytes--;
    deny(&limits, TV_CALL_VERIFY, body, TV_WRONG_VALUE, "/want");
    limits.fetch_bytes = 3 * 5 * 4;
    take(&limits, TV_CALL_VERIFY, WANT("{\"via\":\"fetch\",\"project\":true}"), &r);
    tv_request_finish(&r);
    deny(&limits, TV_CALL_VERIFY, WANT("{\"via\":\"fetch\"}"), TV_WRONG_VALUE, "/want");
}

static void test_create(void **state)
{
    struct tv_request_limits limits = tapped;
    struct tv_request r;

    (void)state;
    take(&tapped, TV_CALL_CREATE, "{\"tokens\":[1,2,3],\"want\":{\"hidden\":{}}}", &r);
    assert_true(r.want.hidden.wanted && r.want.hidden.window == 0);
    assert_int_equal(r.want.inline_bytes_most, 3 * 3 * 8 * 4);
    tv_request_finish(&r);
    take(&tapped, TV_CALL_CREATE,
         "{\"want\":{\"hidden\":{\"rows\":\"window:2147483647\",\"taps\":[1]}},\"tokens\":[1,2,3]}",
         &r);
    assert_int_equal(r.want.hidden.window, 2147483647);
    assert_int_equal(r.want.inline_bytes_most, 3 * 8 * 4);
    tv_request_finish(&r);
    take(&tapped, TV_CALL_CREATE, "{\"tokens\":[1],\"want\":{}}", &r);
    assert_int_equal(r.want.hidden.wanted, 0);
    tv_request_finish(&r);
    limits.inline_bytes = 2 * 3 * 8 * 4;
    take(&limits, TV_CALL_CREATE,
         "{\"tokens\":[1,2,3],\"want\":{\"hidden\":{\"rows\":\"window:2\"}}}", &r);
    tv_request_finish(&r);
    deny(&limits, TV_CALL_CREATE,
         "{\"tokens\":[1,2,3],\"want\":{\"hidden\":{\"rows\":\"window:3\"}}}", TV_WRONG_VALUE,
         "/want/hidden");
    deny(&limits, TV_CALL_CREATE,
         "{\"prefix\":{\"session\":\"s_0123456789012345678901\",\"len\":3},"
         "\"want\":{\"hidden\":{\"rows\":\"all\"}}}",
         TV_WRONG_VALUE, "/want/hidden");
    static const char *const bad[] = {"window:0", "window:", "window:01",         "window:-1",
                                      "window",   "path",    "window:2147483648", "window:1 "};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char body[128];
        snprintf(body, sizeof(body), "{\"tokens\":[1],\"want\":{\"hidden\":{\"rows\":\"%s\"}}}",
                 bad[i]);
        deny(&tapped, TV_CALL_CREATE, body, TV_WRONG_VALUE, "/want/hidden/rows");
    }
    deny(&tapped, TV_CALL_CREATE, "{\"tokens\":[1],\"want\":{\"hidden\":{\"via\":\"fetch\"}}}",
         TV_WRONG_VALUE, "/want/hidden/via");
    deny(&usual, TV_CALL_CREATE, "{\"tokens\":[1],\"want\":{\"hidden\":{}}}", TV_WRONG_VALUE,
         "/want/hidden");
}

/* Each member makes another request, spelling out a default does not. */
static void test_body_hash(void **state)
{
    static const char *const hidden[] = {
        "{}",
        "{\"taps\":[9,1]}",
        "{\"taps\":[1,9]}",
        "{\"rows\":\"stop\"}",
        "{\"dtype\":\"f16\"}",
        "{\"via\":\"fetch\"}",
        "{\"project\":true}",
    };
    uint8_t hashes[8][32];
    struct tv_request r;
    size_t count = sizeof(hidden) / sizeof(hidden[0]);

    (void)state;
    for (size_t i = 0; i < count; i++) {
        char body[256];
        snprintf(body, sizeof(body), "{" HEAD "," TREE ",\"want\":{\"hidden\":%s}}", hidden[i]);
        take(&tapped, TV_CALL_VERIFY, body, &r);
        memcpy(hashes[i], r.body_hash, 32);
        tv_request_finish(&r);
    }
    take(&tapped, TV_CALL_VERIFY, "{" HEAD "," TREE "}", &r);
    memcpy(hashes[count], r.body_hash, 32);
    tv_request_finish(&r);
    for (size_t i = 0; i <= count; i++) {
        for (size_t j = 0; j < i; j++) {
            assert_memory_not_equal(hashes[i], hashes[j], 32);
        }
    }
    take(&tapped, TV_CALL_VERIFY,
         WANT("{\"taps\":[9,1,17],\"rows\":\"path\",\"dtype\":\"f32\",\"via\":\"inline\","
              "\"project\":false}"),
         &r);
    assert_memory_equal(r.body_hash, hashes[0], 32);
    tv_request_finish(&r);
}

static double fp8_value(int code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double size = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
    return code & 128 ? -size : size;
}

static int fp8_code(float value)
{
    struct tv_buf buf;
    tv_buf_init(&buf, 16);
    tv_encode_tensor(&buf, &value, 1, TV_TENSOR_FP8_E4M3);
    assert_true(buf.failed == 0 && buf.bytes == 1);
    int code = (uint8_t)buf.data[0];
    tv_buf_finish(&buf);
    return code;
}

/* Every value is its own code; between two the nearer one, in the middle the even one; then the
 * largest for everything above. */
static void test_fp8_e4m3(void **state)
{
    (void)state;
    for (int code = 0; code < 127; code++) {
        for (int sign = 0; sign < 256; sign += 128) {
            float value = (float)fp8_value(code + sign);
            assert_int_equal(fp8_code(value), code + sign);
            if (code < 126) {
                float next = (float)fp8_value(code + 1 + sign), middle = (value + next) / 2;
                int even = code % 2 == 0 ? code : code + 1;
                assert_int_equal(fp8_code(middle), even + sign);
                assert_int_equal(fp8_code(nextafterf(middle, value)), code + sign);
                assert_int_equal(fp8_code(nextafterf(middle, next)), code + 1 + sign);
            }
        }
    }
    assert_int_equal(fp8_code(449.0f), 126);
    assert_int_equal(fp8_code(1e30f), 126);
    assert_int_equal(fp8_code(-INFINITY), 128 + 126);
    assert_int_equal(fp8_code(1e-30f), 0);
    assert_int_equal(fp8_code(-1e-42f), 128);
    float nan = NAN;
    struct tv_buf buf;
    tv_buf_init(&buf, 16);
    tv_encode_tensor(&buf, &nan, 1, TV_TENSOR_FP8_E4M3);
    assert_int_equal(buf.failed, -EDOM);
    tv_buf_finish(&buf);
}

/* Long blocks are encoded in pieces, which must join in every width. */
static void test_long_blocks_join(void **state)
{
    enum { COUNT = 2000 };
    static float values[COUNT];
    static const int32_t rows[2] = {0, 1}, taps[1] = {1};

    (void)state;
    for (int i = 0; i < COUNT; i++) {
        values[i] = (float)fp8_value(i % 127);
    }
    for (int dtype = TV_TENSOR_F32; dtype <= TV_TENSOR_FP8_E4M3; dtype++) {
        struct tv_hidden_block block = {.tap_count = 1,
                                        .taps = taps,
                                        .row_count = 2,
                                        .dim = COUNT / 2,
                                        .rows = rows,
                                        .dtype = (enum tv_tensor_dtype)dtype,
                                        .data = values};
        struct tv_round round = {.kind = TV_CALL_CREATE, .hidden = &block};
        struct tv_buf text, raw;
        tv_buf_init(&text, 1 << 20);
        tv_buf_init(&raw, 1 << 20);
        tv_encode_round(&text, &round, 0);
        tv_encode_tensor(&raw, values, COUNT, (enum tv_tensor_dtype)dtype);
        assert_true(text.failed == 0 && raw.failed == 0);
        tv_buf_append(&text, "", 1);
        char *at = strstr(text.data, "\"data_b64\":\"");
        assert_non_null(at);
        at += strlen("\"data_b64\":\"");
        char *expected = malloc(BASE64_ENCODE_RAW_LENGTH(raw.bytes));
        assert_non_null(expected);
        base64_encode_raw(expected, raw.bytes, (const uint8_t *)raw.data);
        assert_memory_equal(at, expected, BASE64_ENCODE_RAW_LENGTH(raw.bytes));
        assert_int_equal(at[BASE64_ENCODE_RAW_LENGTH(raw.bytes)], '"');
        free(expected);
        tv_buf_finish(&text);
        tv_buf_finish(&raw);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),         cmocka_unit_test(test_all_members),
        cmocka_unit_test(test_refusals),         cmocka_unit_test(test_inline_bytes),
        cmocka_unit_test(test_fetch_bytes),      cmocka_unit_test(test_create),
        cmocka_unit_test(test_body_hash),        cmocka_unit_test(test_fp8_e4m3),
        cmocka_unit_test(test_long_blocks_join),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
