/*
 * test_proto_response.c - the encoder: numbers, text, base64 and half formats, buffer caps,
 * problems for every code, no NaN ever (B41).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/json_read.h"
#include "proto/response.h"
#include "proto/response_write.h"

static struct tv_buf start(void)
{
    struct tv_buf buf;

    tv_buf_init(&buf, 1u << 20);
    return buf;
}

static void expect_text(struct tv_buf *buf, const char *want)
{
    assert_int_equal(buf->failed, 0);
    tv_buf_append(buf, "", 1);
    assert_string_equal(buf->data, want);
    tv_buf_finish(buf);
}

/* Everything written must be accepted by our own strict reader. */
static void expect_json(const struct tv_buf *buf)
{
    const struct tv_json_limits limits = {.depth_max = 8, .values_max = 100000};
    struct tv_json *doc = NULL;
    struct tv_json_error error = {0};

    assert_int_equal(buf->failed, 0);
    if (tv_json_parse(buf->data, buf->bytes, &limits, &doc, &error) != 0) {
        fail_msg("%s at %zu: %.*s", error.what, error.offset, (int)buf->bytes, buf->data);
    }
    tv_json_destroy(doc);
}

static void test_numbers(void **state)
{
    struct tv_buf buf = start();
    int32_t ints[] = {INT32_MIN, -1, 0, 7, INT32_MAX};

    (void)state;
    tv_write_int(&buf, INT64_MIN);
    tv_write_raw(&buf, " ");
    tv_write_int(&buf, INT64_MAX);
    tv_write_ints(&buf, ints, 5);
    tv_write_ints(&buf, NULL, 0);
    tv_write_flag(&buf, 2);
    tv_write_flag(&buf, 0);
    expect_text(&buf, "-9223372036854775808 9223372036854775807"
                      "[-2147483648,-1,0,7,2147483647][]truefalse");
    buf = start();
    tv_write_real(&buf, 0.8);
    tv_write_raw(&buf, " ");
    tv_write_real(&buf, 1.0 / 3.0);
    tv_write_raw(&buf, " ");
    tv_write_real(&buf, 100);
    tv_write_raw(&buf, " ");
    tv_write_real32(&buf, 0.031f);
    tv_write_raw(&buf, " ");
    tv_write_real32(&buf, -1.5e-30f);
    tv_write_raw(&buf, " ");
    tv_write_real32(&buf, -INFINITY);
    expect_text(&buf, "0.8 0.33333333333333331 100 0.0309999995 -1.5e-30 null");
}

static void test_b41_not_a_number(void **state)
{
    static const float bad[] = {1.0f, NAN};
    static const float low[] = {-INFINITY};
    struct tv_buf buf = start();

    (void)state;
    tv_write_real(&buf, NAN);
    assert_int_equal(buf.failed, -EDOM);
    tv_write_raw(&buf, "1");
    assert_int_equal(buf.bytes, 0); /* a failed buffer stays as it is */
    tv_buf_finish(&buf);
    buf = start();
    tv_write_real(&buf, INFINITY);
    assert_int_equal(buf.failed, -EDOM);
    tv_buf_finish(&buf);
    buf = start();
    tv_write_real32(&buf, NAN);
    assert_int_equal(buf.failed, -EDOM);
    tv_buf_finish(&buf);
    buf = start();
    tv_write_real32(&buf, INFINITY);
    assert_int_equal(buf.failed, -EDOM);
    tv_buf_finish(&buf);
    buf = start();
    tv_write_base64_floats(&buf, bad, 2, TV_TENSOR_F32);
    assert_int_equal(buf.failed, -EDOM);
    tv_buf_finish(&buf);
    buf = start();
    tv_encode_tensor(&buf, bad, 2, TV_TENSOR_BF16);
    assert_int_equal(buf.failed, -EDOM);
    tv_buf_finish(&buf);
    buf = start();
    tv_write_base64_floats(&buf, low, 1, TV_TENSOR_F32);
    expect_text(&buf, "\"AACA/w==\"");
    buf = start();
    tv_write_real32(&buf, -INFINITY);
    expect_text(&buf, "null");
}

static void test_text(void **state)
{
    struct tv_buf buf = start();

    (void)state;
    tv_write_text(&buf, "a\"\\\n\x01\x7f/\xc3\xa9");
    expect_text(&buf, "\"a\\\"\\\\\\u000a\\u0001\\u007f/\xc3\xa9\"");
    tv_write_text(&buf, NULL);
    assert_int_equal(buf.failed, -EMSGSIZE); /* a finished buffer has no room */
    buf = start();
    tv_write_text(&buf, NULL);
    expect_text(&buf, "null");
    buf = start();
    tv_write_time(&buf, 1795962660999);
    expect_text(&buf, "\"2026-11-29T14:31:00Z\"");
}

static uint16_t half_of(float number, enum tv_tensor_dtype dtype)
{
    struct tv_buf buf = start();
    uint16_t half;

    tv_encode_tensor(&buf, &number, 1, dtype);
    assert_int_equal(buf.failed, 0);
    assert_int_equal(buf.bytes, 2);
    half = (uint16_t)((unsigned char)buf.data[0] | (unsigned char)buf.data[1] << 8);
    tv_buf_finish(&buf);
    return half;
}

/* The value of a half, from the definition of the format. */
static double value_of_half(uint16_t half)
{
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    double size = exponent == 0    ? ldexp(mantissa, -24)
                  : exponent == 31 ? (mantissa ? (double)NAN : (double)INFINITY)
                                   : ldexp(1024 + mantissa, exponent - 25);

    return half & 0x8000 ? -size : size;
}

/* Every finite f16 comes back as itself; between two neighbours the nearer one is taken, the even
 * one in the middle. */
static void test_f16(void **state)
{
    uint32_t half;

    (void)state;
    for (half = 0; half < 0x7c00; half++) {
        float here = (float)value_of_half((uint16_t)half);
        double next = half == 0x7bff ? 65536.0 : value_of_half((uint16_t)(half + 1));
        float middle = (float)(((double)here + next) / 2);

        assert_int_equal(half_of(here, TV_TENSOR_F16), half);
        assert_int_equal(half_of(-here, TV_TENSOR_F16), half | 0x8000);
        assert_int_equal(half_of(middle, TV_TENSOR_F16), half + (half & 1));
        assert_int_equal(half_of(nextafterf(middle, 0), TV_TENSOR_F16), half);
        assert_int_equal(half_of(nextafterf(middle, 1e9f), TV_TENSOR_F16), half + 1);
    }
    assert_int_equal(half_of(65536.0f, TV_TENSOR_F16), 0x7c00);
    assert_int_equal(half_of(3e38f, TV_TENSOR_F16), 0x7c00);
    assert_int_equal(half_of(-INFINITY, TV_TENSOR_F16), 0xfc00);
    assert_int_equal(half_of(1e-30f, TV_TENSOR_F16), 0);
}

static void test_bf16(void **state)
{
    (void)state;
    assert_int_equal(half_of(1.0f, TV_TENSOR_BF16), 0x3f80);
    assert_int_equal(half_of(-2.5f, TV_TENSOR_BF16), 0xc020);
    assert_int_equal(half_of(0x1.01p0f, TV_TENSOR_BF16), 0x3f80);     /* middle, even below */
    assert_int_equal(half_of(0x1.03p0f, TV_TENSOR_BF16), 0x3f82);     /* middle, even above */
    assert_int_equal(half_of(0x1.010002p0f, TV_TENSOR_BF16), 0x3f81); /* just above the middle */
    assert_int_equal(half_of(0x1.fffffep127f, TV_TENSOR_BF16), 0x7f80);
    assert_int_equal(half_of(-INFINITY, TV_TENSOR_BF16), 0xff80);
    assert_int_equal(half_of(0x1p-149f, TV_TENSOR_BF16), 0);
}

/* A second base64 writer, plain and slow. */
static void base64_of(const uint8_t *data, size_t bytes, char *out)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t i;

    *out++ = '"';
    for (i = 0; i < bytes; i += 3) {
        size_t left = bytes - i;
        uint32_t group = (uint32_t)data[i] << 16 | (left > 1 ? (uint32_t)data[i + 1] << 8 : 0) |
                         (left > 2 ? data[i + 2] : 0);
        *out++ = alphabet[group >> 18];
        *out++ = alphabet[group >> 12 & 63];
        *out++ = left > 1 ? alphabet[group >> 6 & 63] : '=';
        *out++ = left > 2 ? alphabet[group & 63] : '=';
    }
    *out++ = '"';
    *out = '\0';
}

/* Lengths around the pieces the writer works in. */
static void test_base64_lengths(void **state)
{
    static const int lengths[] = {0, 1, 2, 3, 4, 5, 767, 768, 769, 1535, 1536, 1537, 2305};
    float data[2400];
    int32_t ints[2400];
    size_t i;
    int n;

    (void)state;
    for (n = 0; n < 2400; n++) {
        data[n] = (float)n * 1.25f - 77.0f;
        memcpy(&ints[n], &data[n], 4);
    }
    for (i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        char want[16384];
        struct tv_buf buf = start();

        base64_of((const uint8_t *)ints, (size_t)lengths[i] * 4, want);
        tv_write_base64_floats(&buf, data, lengths[i], TV_TENSOR_F32);
        expect_text(&buf, want);
        buf = start();
        tv_write_base64_ints(&buf, ints, lengths[i]);
        expect_text(&buf, want);
        buf = start();
        tv_encode_tensor(&buf, data, lengths[i], TV_TENSOR_BF16);
        base64_of((const uint8_t *)buf.data, buf.bytes, want);
        tv_buf_finish(&buf);
        buf = start();
        tv_write_base64_floats(&buf, data, lengths[i], TV_TENSOR_BF16);
        expect_text(&buf, want);
    }
}

static void test_buffer_cap(void **state)
{
    struct tv_buf buf;
    char text[1000];

    (void)state;
    memset(text, 'x', sizeof(text));
    tv_buf_init(&buf, 1000);
    tv_buf_append(&buf, text, 1000);
    assert_int_equal(buf.failed, 0);
    tv_buf_append(&buf, text, 0);
    assert_int_equal(buf.failed, 0);
    tv_buf_append(&buf, text, 1);
    assert_int_equal(buf.failed, -EMSGSIZE);
    assert_int_equal(buf.bytes, 1000);
    tv_buf_finish(&buf);
    tv_buf_init(&buf, 2000);
    tv_buf_printf(&buf, "%.999s|%d", text, 5); /* longer than the formatter's own room */
    assert_int_equal(buf.failed, 0);
    assert_int_equal(buf.bytes, 1001);
    assert_memory_equal(buf.data + 998, "x|5", 3);
    tv_buf_finish(&buf);
}

static void test_mark_replayed(void **state)
{
    const struct tv_round round = {
        .kind = TV_CALL_DECODE, .seq = 3, .sampling = {.temperature = 1, .top_p = 1}};
    struct tv_buf first = start(), again = start();

    (void)state;
    tv_encode_round(&first, &round, 0);
    tv_encode_round(&again, &round, 1);
    assert_int_equal(tv_encode_mark_replayed(&first), 0);
    assert_int_equal(first.bytes, again.bytes);
    assert_memory_equal(first.data, again.data, first.bytes);
    assert_int_equal(tv_encode_mark_replayed(&first), -EINVAL); /* only once */
    tv_buf_finish(&first);
    tv_buf_finish(&again);
}

/* Every code: a complete problem, and a unique name. */
static void test_problems(void **state)
{
    int code, other;

    (void)state;
    for (code = TV_OK + 1; code < TV_CODE_COUNT; code++) {
        const struct tv_code_info *info = tv_code_info((enum tv_code)code);
        struct tv_problem problem;
        struct tv_buf buf = start();
        char want[512];

        assert_true(info->name != NULL && info->title != NULL);
        assert_true(info->http_status >= 400 && info->http_status <= 504);
        for (other = TV_OK; other < code; other++) {
            assert_string_not_equal(info->name, tv_code_info((enum tv_code)other)->name);
        }
        tv_problem_set(&problem, (enum tv_code)code, "/a", "what \"%s\"", "happened\n\xff");
        tv_encode_problem(&buf, &problem, "req-1", NULL);
        expect_json(&buf);
        snprintf(want, sizeof(want),
                 "{\"type\":\"urn:treeverify:error:%s\",\"title\":\"%s\",\"status\":%d,"
                 "\"detail\":\"what \\\"happened??\\\"\",\"code\":\"%s\",\"pointer\":\"/a\","
                 "\"retryable\":%s,\"committed\":false,%s\"instance\":\"req-1\"}",
                 info->name, info->title, info->http_status, info->name,
                 info->retryable ? "true" : "false",
                 code == TV_KV_FULL ? "\"pages_needed\":-1,\"pages_free\":-1," : "");
        expect_text(&buf, want);
        tv_problem_finish(&problem);
    }
}

static void test_problem_with_state(void **state)
{
    struct tv_problem problem;
    struct tv_buf buf = start();

    (void)state;
    tv_problem_set(&problem, TV_LENGTH_MISMATCH, NULL, "committed 5, expected 3");
    problem.state = calloc(1, sizeof(*problem.state));
    assert_non_null(problem.state);
    *problem.state = (struct tv_session_state){.session = "s_a",
                                               .epoch = "0123456789abcdef",
                                               .committed_len = 5,
                                               .pending = 9,
                                               .next_seq = 2,
                                               .finish = TV_FINISH_STOP,
                                               .sampling = {.temperature = 0.5, .top_p = 1},
                                               .has_tail = 1,
                                               .tail_count = 2,
                                               .tail_from = 3};
    problem.state->tail = malloc(2 * sizeof(int32_t));
    assert_non_null(problem.state->tail);
    problem.state->tail[0] = 4;
    problem.state->tail[1] = 6;
    tv_encode_problem(&buf, &problem, "req-2", NULL);
    expect_json(&buf);
    expect_text(
        &buf,
        "{\"type\":\"urn:treeverify:error:length-mismatch\",\"title\":\"Committed lengths differ\","
        "\"status\":409,\"detail\":\"committed 5, expected 3\",\"code\":\"length-mismatch\","
        "\"retryable\":false,\"committed\":false,\"session_state\":{\"session\":\"s_a\",\"epoch\":"
        "\"0123456789abcdef\",\"committed_len\":5,\"digest\":\"00000000000000000000000000000000\","
        "\"pending\":9,\"next_seq\":2,\"finish\":\"stop\",\"held_seq\":null,"
        "\"lease_expires_at\":\"1970-01-01T00:00:00Z\",\"sampling\":{\"rule\":\"target_walk\","
        "\"temperature\":0.5,\"top_k\":0,\"top_p\":1,\"min_p\":0,\"seed\":\"0\"},\"tail\":[4,6],"
        "\"tail_from\":3},\"instance\":\"req-2\"}");
    tv_problem_finish(&problem);
    assert_null(problem.state);
}

static void test_parity(void **state)
{
    const struct tv_parity_report report = {.kernel = {.layers = 3, .max_abs = INFINITY},
                                            .path_rows = 4,
                                            .argmax_equal = 3,
                                            .near_ties = 1,
                                            .logit_max_abs = (double)NAN,
                                            .bound_kernel_rel_l2 = 1e-5,
                                            .bound_logit_abs = 0.001,
                                            .oracle = "cpu-f32",
                                            .took_ms = 12};
    const struct tv_parity_violation violations[] = {{1, 1000, "kernel", 1}, {2, 2000, "path", 0}};
    const struct tv_parity_totals totals = {.mode = "sample",
                                            .p = 0.01,
                                            .exact = 10,
                                            .violation = 2,
                                            .violations = violations,
                                            .violation_count = 2};
    struct tv_problem problem;
    struct tv_buf buf = start();

    (void)state;
    tv_encode_parity_report(&buf, &report);
    expect_json(&buf);
    expect_text(&buf, "{\"ok\":false,\"kernel\":{\"layers\":3,\"max_abs\":null,\"max_rel\":0,"
                      "\"rel_l2\":0},\"path\":{\"rows\":4,\"logit_max_abs\":null,"
                      "\"argmax_equal\":3,\"near_ties\":1},\"accepted_equal\":false,"
                      "\"pending_equal\":false,\"kv_equal\":false,\"bounds\":{\"kernel_rel_l2\":"
                      "1e-05,\"logit_abs\":0.001},\"oracle\":\"cpu-f32\",\"took_ms\":12}");
    buf = start();
    tv_encode_parity_totals(&buf, &totals);
    expect_json(&buf);
    expect_text(&buf,
                "{\"mode\":\"sample\",\"p\":0.01,\"rounds\":{\"exact\":10,\"near_tie\":0,"
                "\"violation\":2,\"skipped\":0},\"kernel\":{\"layers\":0,\"max_abs\":0,"
                "\"max_rel\":0,\"rel_l2\":0},\"violations\":[{\"n\":1,\"at\":"
                "\"1970-01-01T00:00:01Z\",\"kind\":\"kernel\",\"reproducer\":true},{\"n\":2,\"at\":"
                "\"1970-01-01T00:00:02Z\",\"kind\":\"path\",\"reproducer\":false}]}");
    buf = start();
    tv_problem_set(&problem, TV_PARITY_MISMATCH, NULL, "1 of 4 rows differ");
    tv_encode_problem(&buf, &problem, "req-3", &report);
    expect_json(&buf);
    tv_buf_append(&buf, "", 1);
    assert_non_null(strstr(buf.data, "\"committed\":false,\"ok\":false,\"kernel\":{"));
    assert_non_null(strstr(buf.data, "\"took_ms\":12,\"instance\":\"req-3\"}"));
    tv_buf_finish(&buf);
}

/* 64 nodes, up to every draft accepted, ids of a vocabulary of 129,280 as they come, and long
 * numbers: an answer is within 1.5 KB, and the request for it within 1 KB. */
static void test_body_sizes(void **state)
{
    static const int64_t curve[4][2] = {{1, 20100}, {32, 25300}, {64, 28400}, {256, 61700}};
    static const int32_t accepted[] = {64, 32, 10};
    struct tv_hint hint = {.max_useful_nodes = 128, .queue_depth = 1, .verify_us = curve};
    int32_t nodes[64], tokens[65];
    uint64_t random = 20261130;
    size_t largest = 0, asked = 0;

    (void)state;
    for (int32_t turn = 0; turn < 200; turn++) {
        for (int32_t i = 0; i < 65; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            tokens[i] = (int32_t)((random >> 33) % 129280);
            nodes[i < 64 ? i : 63] = i < 64 ? i : 63;
        }
        struct tv_round round = {.kind = TV_CALL_VERIFY,
                                 .seq = 842,
                                 .accepted_count = accepted[turn % 3],
                                 .accepted_nodes = nodes,
                                 .accepted_tokens = tokens,
                                 .pending = tokens[64],
                                 .new_count = accepted[turn % 3],
                                 .new_tokens = tokens + 1,
                                 .committed_len = 131072,
                                 .next_seq = 843,
                                 .has_margin = 1,
                                 .margin_min = 0.200911522f,
                                 .stat_nodes = 64,
                                 .stat_depth = 63,
                                 .accept_len_mean = 63.123456,
                                 .queue_us = 180,
                                 .gpu_us = 28400,
                                 .total_us = 28900,
                                 .batch = 16,
                                 .hint = &hint,
                                 .lease_expires_unix_ms = 1764486000000};
        struct tv_buf buf = start(), body = start();
        hint.verify_us_count = round.accepted_count > 32 ? 0 : 4; /* as sched/ makes it */
        tv_encode_round(&buf, &round, 0);
        assert_int_equal(buf.failed, 0);
        largest = buf.bytes > largest ? buf.bytes : largest;
        tv_buf_printf(&body, "{\"seq\":842,\"epoch\":\"17a4c09e5b2d8f61\",\"expected_len\":131072,"
                             "\"tree\":{\"tokens\":");
        tv_write_ints(&body, tokens, 64);
        tv_write_raw(&body, ",\"parents\":");
        nodes[0] = -1;
        tv_write_ints(&body, nodes, 64); /* as long as those of any tree */
        tv_write_raw(&body, "}}");
        asked = body.bytes > asked ? body.bytes : asked;
        tv_buf_finish(&buf);
        tv_buf_finish(&body);
    }
    print_message("answers of at most %zu bytes, requests of %zu\n", largest, asked);
    assert_true(largest <= 1536);
    assert_true(asked <= 1024);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),    cmocka_unit_test(test_b41_not_a_number),
        cmocka_unit_test(test_text),       cmocka_unit_test(test_f16),
        cmocka_unit_test(test_bf16),       cmocka_unit_test(test_base64_lengths),
        cmocka_unit_test(test_buffer_cap), cmocka_unit_test(test_mark_replayed),
        cmocka_unit_test(test_problems),   cmocka_unit_test(test_problem_with_state),
        cmocka_unit_test(test_parity),     cmocka_unit_test(test_body_sizes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
