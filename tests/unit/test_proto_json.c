/*
 * test_proto_json.c - the strict JSON reader: the JSONTestSuite corpus, limits, exact numbers,
 * bytes that are not text (B45), nesting and stack (B44).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/json_read.h"
#include "proto/limits.h"

static const struct tv_json_limits usual = {.depth_max = TV_JSON_DEPTH_MAX, .values_max = 1000000};

/* Parse; the document is destroyed again. */
static int try_parse(const char *text, size_t bytes, const struct tv_json_limits *limits,
                     struct tv_json_error *ret_error)
{
    struct tv_json *doc = NULL;
    int rc = tv_json_parse(text, bytes, limits, &doc, ret_error);

    if (rc == 0) {
        tv_json_destroy(doc);
    } else if (rc == -EINVAL) {
        assert_non_null(ret_error->what);
        assert_true(ret_error->offset <= bytes);
    }
    return rc;
}

static int accepts(const char *text)
{
    struct tv_json_error error;
    int rc = try_parse(text, strlen(text), &usual, &error);

    assert_true(rc == 0 || rc == -EINVAL);
    return rc == 0;
}

static struct tv_json *parse(const char *text)
{
    struct tv_json *doc = NULL;
    struct tv_json_error error;

    if (tv_json_parse(text, strlen(text), &usual, &doc, &error) != 0) {
        fail_msg("refused at %zu (%s): %s", error.offset, error.what, text);
    }
    return doc;
}

/* Grammatical files that our rules refuse, with the rule. */
static const char *refused_by_rule(const char *name)
{
    static const char *const rules[][2] = {
        {"y_object_duplicated_key.json", "duplicate member"},
        {"y_object_duplicated_key_and_value.json", "duplicate member"},
        {"y_object_escaped_null_in_key.json", "NUL character in a string"},
        {"y_string_null_escape.json", "NUL character in a string"},
    };
    size_t i;

    for (i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        if (strcmp(rules[i][0], name) == 0) {
            return rules[i][1];
        }
    }
    return NULL;
}

/* One file of the suite. Undefined ones: numbers of any size are JSON (their readers decide on the
 * range); everything else RFC 8259 leaves open is refused. */
static void check_case(const char *name, const char *data, size_t bytes, int *counts)
{
    struct tv_json_error error = {0};
    int rc = try_parse(data, bytes, &usual, &error);
    const char *rule = refused_by_rule(name);

    if (name[0] == 'y' && rule == NULL) {
        if (rc != 0) {
            fail_msg("%s refused: %s at %zu", name, error.what, error.offset);
        }
        counts[0]++;
    } else if (name[0] == 'y') {
        assert_int_equal(rc, -EINVAL);
        assert_string_equal(error.what, rule);
        counts[1]++;
    } else if (name[0] == 'n') {
        if (rc != -EINVAL) {
            fail_msg("%s accepted", name);
        }
        counts[2]++;
    } else {
        int want = strncmp(name, "i_number_", 9) == 0 ? 0 : -EINVAL;
        if (rc != want) {
            fail_msg("%s: %d, not %d", name, rc, want);
        }
        counts[want == 0 ? 3 : 4]++;
    }
}

static char *read_file(const char *path, size_t *ret_bytes)
{
    FILE *file = fopen(path, "rb");
    char *data = NULL;
    size_t bytes = 0, got;

    if (file == NULL) {
        fail_msg("cannot open %s", path);
    }
    do {
        data = realloc(data, bytes + 65536);
        assert_non_null(data);
        got = fread(data + bytes, 1, 65536, file);
        bytes += got;
    } while (got > 0);
    fclose(file);
    *ret_bytes = bytes;
    return data;
}

static void test_r01_json_test_suite(void **state)
{
    char path[512], *data, *at, *end, *big;
    int counts[5] = {0}, i;
    size_t bytes;

    (void)state;
    assert_non_null(getenv("TV_GOLDEN_DIR"));
    snprintf(path, sizeof(path), "%s/json-test-suite/suite.pack", getenv("TV_GOLDEN_DIR"));
    data = read_file(path, &bytes);
    end = data + bytes;
    for (at = data; at < end;) {
        char name[128];
        size_t size;
        char *body = memchr(at, '\n', (size_t)(end - at));

        assert_non_null(body);
        *body++ = '\0';
        assert_int_equal(sscanf(at, "%127s %zu", name, &size), 2);
        assert_true(size < (size_t)(end - body));
        check_case(name, body, size, counts);
        at = body + size + 1;
    }
    free(data);
    big = malloc(250001);
    assert_non_null(big);
    memset(big, '[', 100000);
    check_case("n_structure_100000_opening_arrays.json", big, 100000, counts);
    for (i = 0; i < 50000; i++) {
        memcpy(big + 5 * i, "[{\"\":", 5);
    }
    big[250000] = '\n';
    check_case("n_structure_open_array_object.json", big, 250001, counts);
    free(big);
    assert_int_equal(counts[0], 91); /* legal and accepted */
    assert_int_equal(counts[1], 4);  /* legal, refused by a rule of ours */
    assert_int_equal(counts[2], 188);
    assert_int_equal(counts[3], 10); /* left open: accepted */
    assert_int_equal(counts[4], 25); /* left open: refused */
}

static void test_tree_of_values(void **state)
{
    struct tv_json *doc = parse(" {\"a\":[1,-2,\"x\"],\"A\":{\"b\":null,\"c\":true,\"d\":false},"
                                "\"e\\u0301\\ud834\\udd1e\":\"\\\"\\\\\\/"
                                "\\b\\f\\n\\r\\t\\u00e9\",\"n\":12.5e1} ");
    const struct tv_json_value *root = tv_json_root(doc), *a = tv_json_member(root, "a"), *v;
    size_t bytes = 0;
    int64_t number = 0;
    double real = 0;

    (void)state;
    assert_int_equal(tv_json_type(root), TV_JSON_OBJECT);
    assert_int_equal(tv_json_count(root), 4);
    assert_int_equal(tv_json_type(a), TV_JSON_ARRAY);
    assert_int_equal(tv_json_count(a), 3);
    v = tv_json_next(tv_json_first(a));
    assert_int_equal(tv_json_int(doc, v, &number), 0);
    assert_int_equal(number, -2);
    assert_string_equal(tv_json_string(tv_json_next(v), &bytes), "x");
    assert_null(tv_json_next(tv_json_next(v)));
    v = tv_json_member(root, "A");
    assert_int_equal(tv_json_type(tv_json_member(v, "b")), TV_JSON_NULL);
    assert_int_equal(tv_json_type(tv_json_member(v, "c")), TV_JSON_TRUE);
    assert_int_equal(tv_json_type(tv_json_member(v, "d")), TV_JSON_FALSE);
    assert_null(tv_json_member(v, "B"));
    v = tv_json_next(v);
    assert_string_equal(tv_json_name(v), "e\xcc\x81\xf0\x9d\x84\x9e");
    assert_string_equal(tv_json_string(v, &bytes), "\"\\/\b\f\n\r\t\xc3\xa9");
    assert_int_equal(bytes, 10);
    v = tv_json_member(root, "n");
    assert_int_equal(tv_json_int(doc, v, &number), -EINVAL);
    assert_int_equal(tv_json_double(doc, v, &real), 0);
    assert_true(real == 125.0);
    assert_null(tv_json_string(v, NULL));
    assert_null(tv_json_first(v));
    tv_json_destroy(doc);
}

static void test_b42_exact_integers(void **state)
{
    static const struct {
        const char *text;
        int rc;
        int64_t value;
    } cases[] = {
        {"0", 0, 0},
        {"-1", 0, -1},
        {"2147483647", 0, 2147483647},
        {"2147483648", 0, 2147483648},
        {"4294967296", 0, 4294967296},
        {"9007199254740993", 0, 9007199254740993},
        {"9223372036854775807", 0, INT64_MAX},
        {"-9223372036854775808", 0, INT64_MIN},
        {"9223372036854775808", -ERANGE, 0},
        {"-9223372036854775809", -ERANGE, 0},
        {"18446744073709551616", -ERANGE, 0},
        {"99999999999999999999999999999999", -ERANGE, 0},
        {"-0", -EINVAL, 0},
        {"1.0", -EINVAL, 0},
        {"1e3", -EINVAL, 0},
        {"1E3", -EINVAL, 0},
        {"1.5", -EINVAL, 0},
        {"0.0", -EINVAL, 0},
        {"1e400", -EINVAL, 0},
        {"-1e400", -EINVAL, 0},
        {"\"5\"", -EINVAL, 0},
        {"true", -EINVAL, 0},
        {"null", -EINVAL, 0},
        {"[]", -EINVAL, 0},
    };
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tv_json *doc = parse(cases[i].text);
        int64_t value = 77;
        int rc = tv_json_int(doc, tv_json_root(doc), &value);

        if (rc != cases[i].rc || value != (rc == 0 ? cases[i].value : 77)) {
            fail_msg("%s: %d %lld", cases[i].text, rc, (long long)value);
        }
        tv_json_destroy(doc);
    }
    assert_false(accepts("01"));
    assert_false(accepts("2."));
    assert_false(accepts(".5"));
    assert_false(accepts("0x10"));
    assert_false(accepts("+1"));
    assert_false(accepts("NaN"));
    assert_false(accepts("Infinity"));
    assert_false(accepts("-"));
    assert_false(accepts("1e"));
}

static void test_b42_doubles(void **state)
{
    static const struct {
        const char *text;
        int rc;
        double value;
    } cases[] = {
        {"0.8", 0, 0.8},     {"1", 0, 1.0},         {"-0", 0, -0.0},        {"1e-400", 0, 0.0},
        {"1e308", 0, 1e308}, {"1e309", -ERANGE, 0}, {"-1e400", -ERANGE, 0}, {"\"1\"", -EINVAL, 0},
        {"[1]", -EINVAL, 0}, {"true", -EINVAL, 0},
    };
    char text[700];
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tv_json *doc = parse(cases[i].text);
        double value = 77;

        assert_int_equal(tv_json_double(doc, tv_json_root(doc), &value), cases[i].rc);
        assert_true(value == (cases[i].rc == 0 ? cases[i].value : 77.0));
        tv_json_destroy(doc);
    }
    for (i = 512; i <= 513; i++) {
        memset(text, '0', sizeof(text));
        text[1] = '.';
        text[i] = '\0';
        assert_int_equal(accepts(text), i == 512);
    }
}

/* Arrays around the border between nodes and spans, with the fault at every place. */
static void test_int32_arrays(void **state)
{
    static const char *const bad[] = {"1.0",         "1e1",   "-0", "2147483648",
                                      "-2147483649", "\"1\"", "[]"};
    char text[4096];
    int count, at;
    size_t kind;

    (void)state;
    for (count = 0; count <= 40; count++) {
        for (at = -1; at < count; at++) {
            for (kind = 0; kind < sizeof(bad) / sizeof(bad[0]); kind++) {
                int32_t *items = NULL, got = -1;
                size_t index = 999, used = 1;
                struct tv_json *doc;
                int rc, i;

                text[0] = '[';
                for (i = 0; i < count; i++) {
                    used +=
                        (size_t)snprintf(text + used, sizeof(text) - used, "%s ", i > 0 ? "," : "");
                    used += i == at ? (size_t)snprintf(text + used, sizeof(text) - used, "%s",
                                                       bad[kind])
                                    : (size_t)snprintf(text + used, sizeof(text) - used, "%d\n",
                                                       (i % 2 ? -1 : 1) * (INT32_MAX - i));
                }
                memcpy(text + used, "]", 2);
                doc = parse(text);
                assert_int_equal(tv_json_count(tv_json_root(doc)), count);
                assert_int_equal(tv_json_type(tv_json_root(doc)), TV_JSON_ARRAY);
                rc = tv_json_int32_array(doc, tv_json_root(doc), &items, &got, &index);
                if (at >= 0) {
                    assert_int_equal(rc, kind == 3 || kind == 4 ? -ERANGE : -EINVAL);
                    assert_int_equal(index, at);
                    assert_null(items);
                } else {
                    assert_int_equal(rc, 0);
                    assert_int_equal(got, count);
                    for (i = 0; i < count; i++) {
                        assert_int_equal(items[i], (i % 2 ? -1 : 1) * (INT32_MAX - i));
                    }
                    free(items);
                }
                tv_json_destroy(doc);
            }
        }
    }
}

static void test_limits_of_values(void **state)
{
    struct tv_json_limits limits = {.depth_max = 8, .values_max = 101, .nodes_max = 0};
    struct tv_json_error error;
    char text[512] = "[0";
    int i;

    (void)state;
    for (i = 1; i < 100; i++) {
        strcat(text, ",0");
    }
    strcat(text, "]");
    assert_int_equal(try_parse(text, strlen(text), &limits, &error), 0);
    limits.values_max = 100;
    assert_int_equal(try_parse(text, strlen(text), &limits, &error), -EINVAL);
    assert_string_equal(error.what, "too many values");
    limits.values_max = 1000;
    limits.nodes_max = 1; /* the whole array is one node */
    assert_int_equal(try_parse(text, strlen(text), &limits, &error), 0);
    limits.nodes_max = 3;
    assert_int_equal(try_parse("[\"a\",1]", 7, &limits, &error), 0);
    assert_int_equal(try_parse("[\"a\",1,2]", 9, &limits, &error), -EINVAL);
}

static void test_long_strings(void **state)
{
    struct tv_json_limits borrow = {.depth_max = 8, .values_max = 100, .borrow_text = 1};
    char text[2200], want[1024];
    size_t length;

    (void)state;
    for (length = 250; length <= 1000; length += length < 260 ? 1 : 370) {
        struct tv_json_error error;
        struct tv_json *doc;
        size_t bytes = 0;

        memset(want, 'q', length);
        want[length] = '\0';
        snprintf(text, sizeof(text), "{\"k\":\"%s\",\"l\":\"\\n%s\",\"m\":7}", want, want);
        doc = parse(text);
        assert_string_equal(tv_json_string(tv_json_member(tv_json_root(doc), "k"), &bytes), want);
        assert_int_equal(bytes, length);
        assert_string_equal(tv_json_string(tv_json_member(tv_json_root(doc), "l"), &bytes) + 1,
                            want);
        assert_int_equal(bytes, length + 1);
        tv_json_destroy(doc);
        assert_int_equal(tv_json_parse(text, strlen(text), &borrow, &doc, &error), 0);
        assert_memory_equal(tv_json_string(tv_json_member(tv_json_root(doc), "k"), &bytes), want,
                            length);
        assert_int_equal(bytes, length);
        tv_json_destroy(doc);
    }
}

static void test_duplicate_members(void **state)
{
    (void)state;
    assert_false(accepts("{\"tokens\":1,\"tokens\":2}"));
    assert_false(accepts("{\"tokens\":1,\"\\u0074okens\":2}"));
    assert_false(accepts("{\"\\u00e9\":1,\"\xc3\xa9\":2}"));
    assert_false(accepts("{\"a\\/\":1,\"a/\":2}"));
    assert_false(accepts("{\"\":1,\"\":2}"));
    assert_false(accepts("{\"a\":{\"b\":{},\"c\":[{\"d\":1,\"d\":1}]}}"));
    assert_true(accepts("{\"tokens\":1,\"Tokens\":2}"));
    assert_true(accepts("{\"a\":{\"a\":{\"a\":1}},\"b\":[{\"a\":1},{\"a\":1}]}"));
    assert_true(accepts("{\"\xc3\xa9\":1,\"e\\u0301\":2}"));
}

/* The shape of a large weight file's header: no quadratic step, and the last duplicate is found. */
static void test_seventy_thousand_members(void **state)
{
    enum { MEMBERS = 70000 };
    char *text = NULL, last[32];
    struct tv_json_limits limits = {.depth_max = 8, .values_max = 2000000};
    struct tv_json_error error;
    struct timespec from, to;
    struct tv_json *doc = NULL;
    size_t used = 0;
    FILE *out = open_memstream(&text, &used);
    int i;

    (void)state;
    assert_non_null(out);
    for (i = 0; i < MEMBERS; i++) {
        assert_true(fprintf(out,
                            "%s\"model.layers.%d.w\":{\"dtype\":\"BF16\",\"shape\":[%d,4],"
                            "\"data_offsets\":[%d,%d]}",
                            i > 0 ? "," : "{", i, i, i * 8, i * 8 + 8) > 0);
    }
    assert_true(fprintf(out, "}") == 1);
    assert_int_equal(fflush(out), 0); /* text and used are set */
    clock_gettime(CLOCK_MONOTONIC, &from);
    assert_int_equal(tv_json_parse(text, used, &limits, &doc, &error), 0);
    clock_gettime(CLOCK_MONOTONIC, &to);
    print_message("%d members, %zu bytes: %.1f ms\n", MEMBERS, used,
                  (double)(to.tv_sec - from.tv_sec) * 1e3 +
                      (double)(to.tv_nsec - from.tv_nsec) / 1e6);
    assert_int_equal(tv_json_count(tv_json_root(doc)), MEMBERS);
    tv_json_destroy(doc);
    assert_int_equal(fseek(out, -1, SEEK_CUR), 0); /* over the last brace */
    assert_true(fprintf(out, ",\"model.layers.%d.w\":1}", MEMBERS / 2) > 0);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(try_parse(text, used, &limits, &error), -EINVAL);
    assert_string_equal(error.what, "duplicate member");
    snprintf(last, sizeof(last), "model.layers.%d.w", MEMBERS / 2);
    assert_true(error.offset > used - 10);
    free(text);
}

static void test_b45_bytes_that_are_not_text(void **state)
{
    static const struct {
        const char *text;
        size_t bytes;
        int ok;
    } cases[] = {
        {"\"\xe2\x80\xa8\"", 5, 1},     /* U+2028 is legal */
        {"\"\x7f\"", 3, 1},             /* so is DEL */
        {"\"\xf4\x8f\xbf\xbf\"", 6, 1}, /* U+10FFFF */
        {"\"\xef\xbf\xbf\"", 5, 1},     /* U+FFFF */
        {"\"\xf4\x90\x80\x80\"", 6, 0}, /* above it */
        {"\"\xc0\x80\"", 4, 0},         /* overlong NUL */
        {"\"\xc1\xbf\"", 4, 0},         /* overlong */
        {"\"\xe0\x9f\xbf\"", 5, 0},     /* overlong */
        {"\"\xf0\x8f\xbf\xbf\"", 6, 0}, /* overlong */
        {"\"\xed\xa0\x80\"", 5, 0},     /* surrogate in UTF-8 */
        {"\"\x80\"", 3, 0},             /* lone continuation */
        {"\"\xff\"", 3, 0},
        {"\"\xe2\x80\"", 4, 0}, /* cut short */
        {"\"\xe2\x80", 3, 0},
        {"\"\\ud800\"", 8, 0}, /* lone surrogates */
        {"\"\\udc00\"", 8, 0},
        {"\"\\ud800\\u0041\"", 14, 0},
        {"\"\\udc00\\ud800\"", 14, 0},
        {"\"\\ud800\\ue000\"", 14, 0},
        {"\"\\u0000\"", 8, 0}, /* NUL, escaped and raw */
        {"\"\0\"", 3, 0},
        {"\"a\x1f\"", 4, 0},
        {"\"a\n\"", 4, 0},
        {"\"a\t\"", 4, 0},
        {"\xef\xbb\xbf{}", 5, 0}, /* byte-order mark */
        {"{}\0", 3, 0},
        {"{}\xa0", 3, 0},
        {"{}\f", 3, 0},
        {"\xff\xfe{\0}\0", 6, 0}, /* UTF-16 */
    };
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tv_json_error error;
        char wrapped[64];
        size_t used = cases[i].bytes;

        if ((try_parse(cases[i].text, cases[i].bytes, &usual, &error) == 0) != cases[i].ok) {
            fail_msg("case %zu", i);
        }
        if (cases[i].text[0] != '"') {
            continue;
        }
        memcpy(wrapped, "{", 1); /* the same bytes as a member's name */
        memcpy(wrapped + 1, cases[i].text, used);
        memcpy(wrapped + 1 + used, ":1}", 3);
        if ((try_parse(wrapped, used + 4, &usual, &error) == 0) != cases[i].ok) {
            fail_msg("case %zu as a name", i);
        }
    }
}

/* The shortest of five, in microseconds of this thread's own: a busy machine only adds to it. */
static int64_t parse_us(const char *text, size_t bytes, int *ret_rc, struct tv_json_error *error)
{
    int64_t best_us = INT64_MAX;
    for (int i = 0; i < 5; i++) {
        struct timespec from, to;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &from);
        *ret_rc = try_parse(text, bytes, &usual, error);
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &to);
        int64_t us = (to.tv_sec - from.tv_sec) * 1000000 + (to.tv_nsec - from.tv_nsec) / 1000;
        best_us = us < best_us ? us : best_us;
    }
    return best_us;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STACK_BYTES = 512 * 1024, PARSE_US_MAX = INT32_MAX }; /* the tools' own are not judged */
#else
enum { STACK_BYTES = 64 * 1024, PARSE_US_MAX = 1000 };
#endif

/* Every nesting of B44: refused above depth 8, accepted (when closed) up to it; in 1 ms. */
static void *nest(void *argument)
{
    static const int depths[] = {8, 9, 1000, 1001, 1000000};
    static const char *const open[] = {"[", "{\"a\":", "[{\"a\":"}, *const close[] = {"]", "}",
                                                                                      "}]"};
    size_t *failures = argument, i, kind;
    char *text = malloc(8u << 20);
    for (i = 0; i < sizeof(depths) / sizeof(depths[0]) && text != NULL; i++) {
        for (kind = 0; kind < 3; kind++) {
            int units = kind == 2 ? depths[i] / 2 : depths[i];
            int depth = kind == 2 ? units * 2 : units;
            size_t used = 0, step = strlen(open[kind]);
            struct tv_json_error error = {0};
            int n, rc;
            for (n = 0; n < units; n++, used += step) {
                memcpy(text + used, open[kind], step);
            }
            *failures += parse_us(text, used, &rc, &error) > PARSE_US_MAX || rc != -EINVAL;
            text[used++] = '1';
            for (n = 0; n < units && used < (8u << 20) - 2; n++, used += strlen(close[kind])) {
                memcpy(text + used, close[kind], strlen(close[kind]));
            }
            *failures += parse_us(text, used, &rc, &error) > PARSE_US_MAX ||
                         rc != (depth <= 8 ? 0 : -EINVAL);
            *failures += depth > 8 && strcmp(error.what, "nested too deep") != 0;
        }
    }
    *failures += text == NULL;
    free(text);
    return NULL;
}

static void test_b44_nesting_on_a_small_stack(void **state)
{
    pthread_attr_t attributes;
    pthread_t thread;
    size_t failures = 0;
    (void)state;
    assert_int_equal(pthread_attr_init(&attributes), 0);
    assert_int_equal(pthread_attr_setstacksize(&attributes, STACK_BYTES), 0);
    assert_int_equal(pthread_create(&thread, &attributes, nest, &failures), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    pthread_attr_destroy(&attributes);
    assert_int_equal(failures, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_r01_json_test_suite),
        cmocka_unit_test(test_tree_of_values),
        cmocka_unit_test(test_b42_exact_integers),
        cmocka_unit_test(test_b42_doubles),
        cmocka_unit_test(test_int32_arrays),
        cmocka_unit_test(test_limits_of_values),
        cmocka_unit_test(test_long_strings),
        cmocka_unit_test(test_duplicate_members),
        cmocka_unit_test(test_seventy_thousand_members),
        cmocka_unit_test(test_b45_bytes_that_are_not_text),
        cmocka_unit_test(test_b44_nesting_on_a_small_stack),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
