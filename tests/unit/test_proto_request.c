/*
 * test_proto_request.c - the decoder: create and the small calls, number matrix (B42), limits at
 * the cap and one above it, foreign text in refusals (B45), queries, the body hash of a create.
 */
#include "proto_support.h"

static void test_create(void **state)
{
    struct tv_request r;

    (void)state;
    accept(TV_CALL_CREATE, "{\"tokens\":[1,2,306]}", &r);
    assert_int_equal(r.token_count, 3);
    assert_int_equal(r.tokens[2], 306);
    assert_int_equal(r.lease_s, TV_LEASE_S_DEFAULT);
    assert_int_equal(r.deadline_ms, TV_DEADLINE_MS_DEFAULT);
    assert_false(r.has_sampling || r.sampling.has_seed || r.has_expected_digest);
    assert_true(r.sampling.temperature == 1.0 && r.sampling.top_p == 1.0);
    tv_request_finish(&r);
    accept(TV_CALL_CREATE,
           "{\"tokens_b64\":\"AQAAAAIAAAAyAQAA\",\"sampling\":{\"rule\":\"greedy\","
           "\"temperature\":0.8,\"top_k\":307,\"top_p\":0.95,\"min_p\":1,"
           "\"seed\":\"18446744073709551615\"},\"stop\":{\"token_ids\":[2,3],\"max_len\":128},"
           "\"lease_s\":3600,\"cache_salt\":\"t\\u00e9\",\"expected_digest\":"
           "\"00112233445566778899aabbccddeeff\"}",
           &r);
    assert_int_equal(r.token_count, 3);
    assert_int_equal(r.tokens[0], 1);
    assert_int_equal(r.tokens[2], 306);
    assert_int_equal(r.sampling.rule, TV_RULE_GREEDY);
    assert_true(r.sampling.temperature == 0.8 && r.sampling.top_p == 0.95);
    assert_true(r.sampling.min_p == 1.0 && r.sampling.seed == UINT64_MAX && r.sampling.has_seed);
    assert_int_equal(r.sampling.top_k, 307);
    assert_int_equal(r.stop_count, 2);
    assert_int_equal(r.stop_ids[1], 3);
    assert_int_equal(r.max_len, 128);
    assert_int_equal(r.cache_salt_bytes, 3);
    assert_string_equal(r.cache_salt, "t\xc3\xa9");
    assert_int_equal(r.expected_digest[15], 0xff);
    assert_int_equal(r.prefix_len, 0);
    tv_request_finish(&r);
    accept(TV_CALL_CREATE, "{\"prefix\":{\"session\":\"s_8KfAx2m0QbT1vYw9ZcRk3g\",\"len\":7}}", &r);
    assert_int_equal(r.prefix_len, 7);
    assert_string_equal(r.prefix_session, "s_8KfAx2m0QbT1vYw9ZcRk3g");
    assert_int_equal(r.token_count, 0);
    assert_int_equal(r.lease_s, TV_LEASE_S_DEFAULT);
    tv_request_finish(&r);
}

static void test_create_refusals(void **state)
{
    (void)state;
    refuse(TV_CALL_CREATE, "", TV_BAD_JSON, "");
    refuse(TV_CALL_CREATE, "[]", TV_WRONG_TYPE, "");
    refuse(TV_CALL_CREATE, "{}", TV_MISSING_FIELD, "/tokens");
    refuse(TV_CALL_CREATE, "{\"tokens\":[]}", TV_WRONG_VALUE, "/tokens");
    refuse(TV_CALL_CREATE, "{\"tokens_b64\":\"\"}", TV_WRONG_VALUE, "/tokens_b64");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"tokens_b64\":\"\"}", TV_WRONG_VALUE, "/tokens_b64");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"tokens_b64\":\"\",\"x\":1}", TV_UNKNOWN_FIELD, "/x");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1,307]}", TV_WRONG_VALUE, "/tokens/1");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"Tokens\":[1]}", TV_UNKNOWN_FIELD, "/Tokens");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"prefix\":{}}", TV_WRONG_VALUE, "/prefix");
    refuse(TV_CALL_CREATE, "{\"prefix\":{\"len\":1}}", TV_MISSING_FIELD, "/prefix/session");
    refuse(TV_CALL_CREATE, "{\"prefix\":{\"session\":\"s_8KfAx2m0QbT1vYw9ZcRk3g\",\"len\":0}}",
           TV_WRONG_VALUE, "/prefix/len");
    refuse(TV_CALL_CREATE, "{\"prefix\":{\"session\":\"s_8\",\"len\":1}}", TV_WRONG_VALUE,
           "/prefix/session");
    refuse(TV_CALL_EXTEND,
           "{\"seq\":1,\"epoch\":\"0123456789abcdef\",\"expected_len\":1,\"prefix\":{}}",
           TV_UNKNOWN_FIELD, "/prefix");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"want\":{\"top_k\":1}}", TV_UNKNOWN_FIELD,
           "/want/top_k");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"sampling\":{\"typical\":{\"x\":1}}}",
           TV_UNKNOWN_FIELD, "/sampling/typical/x");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"sampling\":null}", TV_WRONG_TYPE, "/sampling");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"sampling\":{\"rule\":\"best\"}}", TV_WRONG_VALUE,
           "/sampling/rule");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"sampling\":{\"rule\":\"Greedy\"}}", TV_WRONG_VALUE,
           "/sampling/rule");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"expected_digest\":\"00\"}", TV_WRONG_VALUE,
           "/expected_digest");
    refuse(TV_CALL_CREATE,
           "{\"tokens\":[1],\"expected_digest\":\"00112233445566778899AABBCCDDEEFF\"}",
           TV_WRONG_VALUE, "/expected_digest");
}

/* Ranges: just inside and just outside. */
static void test_ranges(void **state)
{
    static const struct {
        const char *member;
        int ok;
        const char *pointer;
    } cases[] = {
        {"\"sampling\":{\"temperature\":0}", 1, ""},
        {"\"sampling\":{\"temperature\":100}", 1, ""},
        {"\"sampling\":{\"temperature\":100.001}", 0, "/sampling/temperature"},
        {"\"sampling\":{\"temperature\":-0.1}", 0, "/sampling/temperature"},
        {"\"sampling\":{\"temperature\":1e999}", 0, "/sampling/temperature"},
        {"\"sampling\":{\"top_p\":0}", 0, "/sampling/top_p"},
        {"\"sampling\":{\"top_p\":1e-300}", 1, ""},
        {"\"sampling\":{\"top_p\":1}", 1, ""},
        {"\"sampling\":{\"top_p\":1.0001}", 0, "/sampling/top_p"},
        {"\"sampling\":{\"min_p\":0}", 1, ""},
        {"\"sampling\":{\"min_p\":1.0001}", 0, "/sampling/min_p"},
        {"\"sampling\":{\"top_k\":307}", 1, ""},
        {"\"sampling\":{\"top_k\":308}", 0, "/sampling/top_k"},
        {"\"sampling\":{\"top_k\":-1}", 0, "/sampling/top_k"},
        {"\"lease_s\":1", 1, ""},
        {"\"lease_s\":0", 0, "/lease_s"},
        {"\"lease_s\":3601", 0, "/lease_s"},
        {"\"stop\":{\"max_len\":129}", 0, "/stop/max_len"},
        {"\"stop\":{\"max_len\":0}", 0, "/stop/max_len"},
        {"\"stop\":{\"token_ids\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]}", 1, ""},
        {"\"stop\":{\"token_ids\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}", 0,
         "/stop/token_ids"},
        {"\"stop\":{\"token_ids\":[0,307]}", 0, "/stop/token_ids/1"},
        {"\"stop\":{\"token_ids\":[]}", 1, ""},
        {"\"cache_salt\":\"0123456789012345678901234567890123456789012345678901234567890123\"", 1,
         ""},
        {"\"cache_salt\":\"01234567890123456789012345678901234567890123456789012345678901234\"", 0,
         "/cache_salt"},
    };
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tv_request r;
        char body[256];

        snprintf(body, sizeof(body), "{\"tokens\":[1],%s}", cases[i].member);
        if (cases[i].ok) {
            accept(TV_CALL_CREATE, body, &r);
            tv_request_finish(&r);
        } else {
            refuse(TV_CALL_CREATE, body, TV_WRONG_VALUE, cases[i].pointer);
        }
    }
}

static void test_b42_number_matrix(void **state)
{
    static const struct {
        const char *text;
        enum tv_code code; /* for an int32 field whose range starts at 1 */
    } numbers[] = {
        {"1e3", TV_WRONG_TYPE},
        {"1.0", TV_WRONG_TYPE},
        {"1.5", TV_WRONG_TYPE},
        {"-0", TV_WRONG_TYPE},
        {"-1", TV_WRONG_VALUE},
        {"1e400", TV_WRONG_TYPE},
        {"-1e400", TV_WRONG_TYPE},
        {"2147483648", TV_WRONG_VALUE},
        {"4294967296", TV_WRONG_VALUE},
        {"9007199254740993", TV_WRONG_VALUE},
        {"4294967297", TV_WRONG_VALUE},
        {"9223372036854775808", TV_WRONG_VALUE},
        {"01", TV_BAD_JSON},
        {"2.", TV_BAD_JSON},
        {".5", TV_BAD_JSON},
        {"0x10", TV_BAD_JSON},
        {"+1", TV_BAD_JSON},
        {"NaN", TV_BAD_JSON},
        {"\"5\"", TV_WRONG_TYPE},
        {"true", TV_WRONG_TYPE},
        {"null", TV_WRONG_TYPE},
        {"[]", TV_WRONG_TYPE},
    };
    static const struct {
        enum tv_call_kind kind;
        const char *format, *pointer;
    } places[] = {
        {TV_CALL_CREATE, "{\"tokens\":[1,%s]}", "/tokens/1"},
        {TV_CALL_CREATE, "{\"tokens\":[1],\"stop\":{\"max_len\":%s}}", "/stop/max_len"},
        {TV_CALL_CREATE, "{\"tokens\":[1],\"stop\":{\"token_ids\":[%s]}}", "/stop/token_ids/0"},
        {TV_CALL_VERIFY, "{\"seq\":%s,\"epoch\":\"0123456789abcdef\",\"expected_len\":1," TREE "}",
         "/seq"},
        {TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":[5,%s],\"parents\":[-1,0]}}",
         "/tree/tokens/1"},
        {TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":[5,6,7],\"parents\":[-1,0,%s]}}",
         "/tree/parents/2"},
        {TV_CALL_DECODE, "{" HEAD ",\"max_tokens\":%s}", "/max_tokens"},
    };
    size_t i, place;

    (void)state;
    for (place = 0; place < sizeof(places) / sizeof(places[0]); place++) {
        int in_tree = strncmp(places[place].pointer, "/tree", 5) == 0;
        for (i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
            enum tv_code code = numbers[i].code;
            char body[256];

            snprintf(body, sizeof(body), places[place].format, numbers[i].text);
            code = in_tree && code == TV_WRONG_VALUE ? TV_TREE_INVALID : code;
            refuse(places[place].kind, body, code,
                   code == TV_BAD_JSON ? "" : places[place].pointer);
        }
    }
    refuse(TV_CALL_CREATE, "{\"tokens\":[2147483647]}", TV_WRONG_VALUE, "/tokens/0");
}

static void test_b42_seed(void **state)
{
    static const char *const good[] = {"0", "5", "9007199254740993", "9223372036854775808",
                                       "18446744073709551615"};
    static const char *const bad[] = {"\"\"",
                                      "\"-1\"",
                                      "\"-0\"",
                                      "\"01\"",
                                      "\"+1\"",
                                      "\"1.0\"",
                                      "\"1e3\"",
                                      "\" 1\"",
                                      "\"0x10\"",
                                      "\"NaN\"",
                                      "\"18446744073709551616\"",
                                      "\"99999999999999999999\"",
                                      "\"100000000000000000000\""};
    static const char *const mistyped[] = {"5", "1.0", "true", "null", "[]", "{}"};
    char body[128];
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct tv_request r;
        snprintf(body, sizeof(body), "{\"tokens\":[1],\"sampling\":{\"seed\":\"%s\"}}", good[i]);
        accept(TV_CALL_CREATE, body, &r);
        assert_true(r.sampling.has_seed && r.sampling.seed == strtoull(good[i], NULL, 10));
        tv_request_finish(&r);
    }
    for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(body, sizeof(body), "{\"tokens\":[1],\"sampling\":{\"seed\":%s}}", bad[i]);
        refuse(TV_CALL_CREATE, body, TV_WRONG_VALUE, "/sampling/seed");
    }
    for (i = 0; i < sizeof(mistyped) / sizeof(mistyped[0]); i++) {
        snprintf(body, sizeof(body), "{\"tokens\":[1],\"sampling\":{\"seed\":%s}}", mistyped[i]);
        refuse(TV_CALL_CREATE, body, TV_WRONG_TYPE, "/sampling/seed");
    }
}

static void test_tokens_b64(void **state)
{
    static const char *const bad[] = {
        "AQAAAA",                                            /* no padding */
        "AQAAAA=",                                           /* half of it */
        "AQAAAA===",                                         /* too much */
        "AQAAAA==\\n",                                       /* space around */
        "AQAA AA==",                                         /* space inside */
        "AQAAAB==",                                          /* left-over bits set */
        "AQAAA_==",                                          /* url alphabet */
        "AQ==AQAA",                                          /* padding inside */
        "AQAA",                                              /* three bytes */
        "AQAAAAI=",                                          /* five bytes */
        "====",        "A===", "\\u00e9\\u00e9", "MwEAAA==", /* 307 */
        "/////w==",                                          /* -1 */
    };
    struct tv_request r;
    char body[128];
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(body, sizeof(body), "{\"tokens_b64\":\"%s\"}", bad[i]);
        refuse(TV_CALL_CREATE, body, TV_WRONG_VALUE, "/tokens_b64");
    }
    refuse(TV_CALL_CREATE, "{\"tokens_b64\":[1]}", TV_WRONG_TYPE, "/tokens_b64");
    accept(TV_CALL_CREATE, "{\"tokens_b64\":\"AQAAAA==\"}", &r);
    assert_int_equal(r.token_count, 1);
    assert_int_equal(r.tokens[0], 1);
    tv_request_finish(&r);
    accept(TV_CALL_ONESHOT, "{\"tokens_b64\":\"\"," TREE "}", &r);
    assert_int_equal(r.token_count, 0);
    tv_request_finish(&r);
}

static void test_other_calls(void **state)
{
    struct tv_request r;

    (void)state;
    accept(TV_CALL_EXTEND, "{" HEAD ",\"tokens\":[1],\"keep_pending\":true}", &r);
    assert_true(r.keep_pending);
    tv_request_finish(&r);
    refuse(TV_CALL_EXTEND, "{" HEAD ",\"tokens\":[]}", TV_WRONG_VALUE, "/tokens");
    refuse(TV_CALL_EXTEND, "{" HEAD "}", TV_MISSING_FIELD, "/tokens");
    refuse(TV_CALL_EXTEND, "{\"tokens\":[1]}", TV_MISSING_FIELD, "/seq");
    accept(TV_CALL_DECODE, "{" HEAD ",\"max_tokens\":1024}", &r);
    assert_int_equal(r.max_tokens, 1024);
    tv_request_finish(&r);
    refuse(TV_CALL_DECODE, "{" HEAD ",\"max_tokens\":1025}", TV_WRONG_VALUE, "/max_tokens");
    refuse(TV_CALL_DECODE, "{" HEAD ",\"max_tokens\":0}", TV_WRONG_VALUE, "/max_tokens");
    refuse(TV_CALL_DECODE, "{" HEAD "}", TV_MISSING_FIELD, "/max_tokens");
    accept(TV_CALL_RENEW, "{\"lease_s\":3600}", &r);
    assert_int_equal(r.lease_s, 3600);
    tv_request_finish(&r);
    refuse(TV_CALL_RENEW, "{}", TV_MISSING_FIELD, "/lease_s");
    accept(TV_CALL_ONESHOT, "{\"tokens\":[]," TREE "}", &r);
    assert_int_equal(r.token_count, 0);
    tv_request_finish(&r);
    refuse(TV_CALL_ONESHOT, "{\"tokens\":[1]}", TV_MISSING_FIELD, "/tree");
    refuse(TV_CALL_ONESHOT, "{" TREE "}", TV_MISSING_FIELD, "/tokens");
    refuse(TV_CALL_ONESHOT, "{\"tokens\":[1]," TREE ",\"want\":{\"logits\":{\"via\":\"fetch\"}}}",
           TV_WRONG_VALUE, "/want/logits/via");
    refuse(TV_CALL_ONESHOT, "{\"tokens\":[1]," TREE ",\"seq\":1}", TV_UNKNOWN_FIELD, "/seq");
    accept(TV_CALL_PARITY, "{}", &r);
    assert_true(!r.has_tree && r.tokens == NULL && r.session[0] == '\0');
    tv_request_finish(&r);
    accept(TV_CALL_PARITY, "{\"session\":\"s_0123456789abcdefghij-_\"," TREE "}", &r);
    assert_string_equal(r.session, "s_0123456789abcdefghij-_");
    tv_request_finish(&r);
    accept(TV_CALL_PARITY, "{\"tokens\":[1,2]," TREE "}", &r);
    assert_true(r.has_tree && r.token_count == 2);
    tv_request_finish(&r);
    refuse(TV_CALL_PARITY, "{\"session\":\"s_0123456789abcdefghij-_\"}", TV_MISSING_FIELD, "/tree");
    refuse(TV_CALL_PARITY, "{\"session\":\"s_0123456789abcdefghij-+\"," TREE "}", TV_WRONG_VALUE,
           "/session");
    refuse(TV_CALL_PARITY, "{\"session\":\"s_0123456789abcdefghij\"," TREE "}", TV_WRONG_VALUE,
           "/session");
    refuse(TV_CALL_PARITY, "[]", TV_WRONG_TYPE, "");
}

/* A prompt fills the context exactly, or is one too long; a tree needs its depth on top. */
static void test_context(void **state)
{
    struct tv_request r;
    char body[1024];
    int count, i;

    (void)state;
    for (count = 124; count <= 129; count++) {
        size_t used = (size_t)snprintf(body, sizeof(body), "{\"tokens\":[0");

        for (i = 1; i < count; i++) {
            used += (size_t)snprintf(body + used, sizeof(body) - used, ",%d", i);
        }
        snprintf(body + used, sizeof(body) - used, "]}");
        if (count <= 128) {
            accept(TV_CALL_CREATE, body, &r);
            tv_request_finish(&r);
        } else {
            refuse(TV_CALL_CREATE, body, TV_CONTEXT_FULL, "");
        }
        snprintf(body + used, sizeof(body) - used, "]," TREE "}");
        if (count + 3 <= 128) {
            accept(TV_CALL_ONESHOT, body, &r);
            tv_request_finish(&r);
        } else {
            refuse(TV_CALL_ONESHOT, body, TV_CONTEXT_FULL, "");
        }
    }
}

/* 2,048 values besides long arrays of numbers: the object, its array and 2,046 strings. */
static void test_values_limit(void **state)
{
    char body[8192];
    int count, i;

    (void)state;
    for (count = 2046; count <= 2047; count++) {
        size_t used = (size_t)snprintf(body, sizeof(body), "{\"tokens\":[\"\"");

        for (i = 1; i < count; i++) {
            memcpy(body + used, ",\"\"", 3);
            used += 3;
        }
        memcpy(body + used, "]}", 3);
        refuse(TV_CALL_CREATE, body, count == 2046 ? TV_WRONG_TYPE : TV_BAD_JSON,
               count == 2046 ? "/tokens/0" : "");
    }
}

static void test_b45_foreign_text_in_refusals(void **state)
{
    struct tv_request r;
    struct tv_problem problem = {0};
    char body[2048], name[1024];
    const char *p;

    (void)state;
    assert_int_equal(
        decode_under(&usual, TV_CALL_CREATE,
                     "{\"tokens\":[1],\"a\\nlevel=err\\u001b[31m\\u007f/~\xc3\xa9\":1}", &r,
                     &problem),
        -EINVAL);
    assert_int_equal(problem.code, TV_UNKNOWN_FIELD);
    for (p = problem.detail; *p != '\0'; p++) {
        assert_true(*p >= 0x20 && *p < 0x7f);
    }
    assert_string_equal(problem.pointer, "/a?level=err?[31m?~1~0\xc3\xa9");
    memset(name, 'n', sizeof(name));
    for (p = name + 40; p < name + 1000; p += 2) {
        memcpy(name + (p - name), "\xc3\xa9", 2);
    }
    name[1000] = '\0';
    snprintf(body, sizeof(body), "{\"tokens\":[1],\"%s\":1}", name);
    assert_int_equal(decode_under(&usual, TV_CALL_CREATE, body, &r, &problem), -EINVAL);
    assert_true(strlen(problem.pointer) < 60);
    assert_int_equal((unsigned char)problem.pointer[strlen(problem.pointer) - 1], 0xa9);
    snprintf(body, sizeof(body), "{\"tokens\":[1],\"n%s\":1}", name);
    assert_int_equal(decode_under(&usual, TV_CALL_CREATE, body, &r, &problem), -EINVAL);
    assert_int_equal((unsigned char)problem.pointer[strlen(problem.pointer) - 1], 0xa9);
}

static int query(enum tv_call_kind kind, const char *name, const char *value,
                 struct tv_request *ret_request)
{
    struct tv_problem problem = {0};
    int rc;

    *ret_request = (struct tv_request){.kind = kind};
    rc = tv_request_query(ret_request, name, value, &usual, &problem);
    if (rc < 0) {
        assert_int_equal(rc, -EINVAL);
        assert_int_equal(problem.code, TV_BAD_REQUEST);
    }
    return rc;
}

static void test_queries(void **state)
{
    struct tv_request r;

    (void)state;
    assert_int_equal(query(TV_CALL_STATE, "tail", "4096", &r), 0);
    assert_int_equal(r.tail, 4096);
    assert_int_equal(query(TV_CALL_STATE, "tail", "4097", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_STATE, "tail", "", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_STATE, "tail", "-1", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_STATE, "tail", "01", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_STATE, "tail", "1 ", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_STATE, "tail", "99999999999999999999", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_STATE, "wait_ms", "1", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_ROUND, "wait_ms", "60000", &r), 0);
    assert_int_equal(r.wait_ms, 60000);
    assert_int_equal(query(TV_CALL_ROUND, "wait_ms", "60001", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_PARITY, "strict", "1", &r), 0);
    assert_int_equal(r.strict, 1);
    assert_int_equal(query(TV_CALL_PARITY, "strict", "2", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_READY, "deep", "1", &r), 0);
    assert_int_equal(r.deep, 1);
    assert_int_equal(query(TV_CALL_MODEL, "deep", "1", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_TENSOR, "what", "logits", &r), 0);
    assert_int_equal(r.tensor_hidden, 0);
    assert_int_equal(query(TV_CALL_TENSOR, "what", "hidden", &r), 0);
    assert_int_equal(r.tensor_hidden, 1);
    assert_int_equal(query(TV_CALL_TENSOR, "what", "hints", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_TENSOR, "dtype", "fp8_e4m3", &r), 0);
    assert_int_equal(query(TV_CALL_TENSOR, "dtype", "f16", &r), 0);
    assert_int_equal(r.tensor_dtype, TV_TENSOR_F16);
    assert_int_equal(query(TV_CALL_TENSOR, "dtype", "F16", &r), -EINVAL);
    assert_int_equal(query(TV_CALL_TENSOR, "rows", "stop", &r), 0);
    assert_int_equal(r.tensor_rows.kind, TV_ROWS_STOP);
    assert_int_equal(query(TV_CALL_TENSOR, "rows", "3,0,1023", &r), 0);
    assert_int_equal(r.tensor_rows.count, 3);
    assert_int_equal(r.tensor_rows.nodes[2], 1023);
    assert_int_equal(tv_request_query(&r, "rows", "1", &usual, &(struct tv_problem){0}), -EINVAL);
    tv_request_finish(&r);
    assert_int_equal(query(TV_CALL_TENSOR, "rows", "3,0,3", &r), -EINVAL);
    tv_request_finish(&r);
    assert_int_equal(query(TV_CALL_TENSOR, "rows", "1024", &r), -EINVAL);
    tv_request_finish(&r);
    assert_int_equal(query(TV_CALL_TENSOR, "rows", "1,", &r), -EINVAL);
    tv_request_finish(&r);
}

static void hash_of(const char *rest, uint8_t ret_hash[32])
{
    struct tv_request r;
    char body[256];

    snprintf(body, sizeof(body), "{\"tokens\":[1]%s}", rest);
    accept(TV_CALL_CREATE, body, &r);
    memcpy(ret_hash, r.body_hash, 32);
    tv_request_finish(&r);
}

/* Every setting tells a create from another with the same key; defaults and the lease do not. */
static void test_create_hash(void **state)
{
    static const char *const same[] = {
        ",\"lease_s\":9",
        ",\"sampling\":{}",
        ",\"sampling\":{\"rule\":\"target_walk\",\"temperature\":1}",
        ",\"sampling\":{\"top_k\":0,\"top_p\":1.0,\"min_p\":0}",
    };
    static const char *const other[] = {
        ",\"sampling\":{\"rule\":\"greedy\"}",
        ",\"sampling\":{\"temperature\":0.5}",
        ",\"sampling\":{\"temperature\":0.25}",
        ",\"sampling\":{\"top_k\":1}",
        ",\"sampling\":{\"top_p\":0.5}",
        ",\"sampling\":{\"top_p\":0.25}",
        ",\"sampling\":{\"min_p\":0.5}",
        ",\"sampling\":{\"min_p\":1}",
        ",\"sampling\":{\"seed\":\"0\"}",
        ",\"sampling\":{\"seed\":\"1\"}",
        ",\"sampling\":{\"seed\":\"4294967296\"}",
        ",\"sampling\":{\"typical\":{\"epsilon\":0.5}}",
        ",\"sampling\":{\"typical\":{\"delta\":0.5}}",
        ",\"stop\":{\"token_ids\":[1]}",
        ",\"stop\":{\"max_len\":64}",
        ",\"cache_salt\":\"a\"",
        ",\"expected_digest\":\"00000000000000000000000000000000\"",
    };
    uint8_t base[32], seen[sizeof(other) / sizeof(other[0])][32];
    size_t i, j;

    (void)state;
    hash_of("", base);
    for (i = 0; i < sizeof(same) / sizeof(same[0]); i++) {
        uint8_t hash[32];
        hash_of(same[i], hash);
        assert_memory_equal(hash, base, 32);
    }
    for (i = 0; i < sizeof(other) / sizeof(other[0]); i++) {
        hash_of(other[i], seen[i]);
        assert_memory_not_equal(seen[i], base, 32);
        for (j = 0; j < i; j++) {
            assert_memory_not_equal(seen[i], seen[j], 32);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),       cmocka_unit_test(test_create_refusals),
        cmocka_unit_test(test_ranges),       cmocka_unit_test(test_b42_number_matrix),
        cmocka_unit_test(test_b42_seed),     cmocka_unit_test(test_tokens_b64),
        cmocka_unit_test(test_other_calls),  cmocka_unit_test(test_context),
        cmocka_unit_test(test_values_limit), cmocka_unit_test(test_b45_foreign_text_in_refusals),
        cmocka_unit_test(test_queries),      cmocka_unit_test(test_create_hash),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
