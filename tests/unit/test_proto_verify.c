/*
 * test_proto_verify.c - the decoder: verify bodies, tree and inline limits at the cap and one above
 * it, the body hash.
 */
#include "proto_support.h"

static void test_verify(void **state)
{
    struct tv_request r;

    (void)state;
    accept(TV_CALL_VERIFY, "{" HEAD "," TREE "}", &r);
    assert_int_equal(r.seq, 1);
    assert_string_equal(r.epoch, "0123456789abcdef");
    assert_int_equal(r.expected_len, 10);
    assert_true(r.has_tree && !r.has_rule);
    assert_int_equal(r.tree.count, 3);
    assert_int_equal(r.tree.depth, 2);
    assert_int_equal(r.want.rows.kind, TV_ROWS_PATH);
    assert_int_equal(r.lease_s, 0);
    tv_request_finish(&r);
    accept(TV_CALL_VERIFY,
           "{\"want\":{\"logits\":{\"via\":\"fetch\",\"dtype\":\"bf16\"},\"rows\":[2,0],"
           "\"top_k\":64,\"logprobs\":true,\"shadow\":true},\"rule\":\"greedy\",\"ack\":7,"
           "\"deadline_ms\":600000,\"lease_s\":5," TREE "," HEAD "}",
           &r);
    assert_true(r.has_rule && r.rule == TV_RULE_GREEDY);
    assert_int_equal(r.want.top_k, 64);
    assert_true(r.want.logprobs && r.want.shadow && r.want.logits && r.want.logits_fetch);
    assert_int_equal(r.want.logits_dtype, TV_TENSOR_BF16);
    assert_int_equal(r.want.rows.kind, TV_ROWS_LIST);
    assert_int_equal(r.want.rows.nodes[0], 2);
    assert_int_equal(r.want.logits_rows.count, 2);
    assert_int_equal(r.want.logits_rows.nodes[1], 0);
    assert_true(r.want.logits_rows.nodes != r.want.rows.nodes);
    assert_int_equal(r.ack, 7);
    assert_int_equal(r.lease_s, 5);
    tv_request_finish(&r);
    accept(TV_CALL_VERIFY,
           "{" HEAD "," TREE ",\"want\":{\"rows\":\"all\",\"logits\":{\"rows\":\"stop\"}}}", &r);
    assert_int_equal(r.want.rows.kind, TV_ROWS_ALL);
    assert_int_equal(r.want.logits_rows.kind, TV_ROWS_STOP);
    tv_request_finish(&r);
}

static void refuse_verify(const char *members, enum tv_code code, const char *pointer)
{
    char body[512];

    snprintf(body, sizeof(body), "{" HEAD "," TREE "%s%s}", members[0] ? "," : "", members);
    refuse(TV_CALL_VERIFY, body, code, pointer);
}

static void test_verify_refusals(void **state)
{
    (void)state;
    refuse_verify("\"parents\":[]", TV_UNKNOWN_FIELD, "/parents");
    refuse_verify("\"want\":{\"hints\":{}}", TV_UNKNOWN_FIELD, "/want/hints");
    refuse_verify("\"want\":{\"top_k\":65}", TV_WRONG_VALUE, "/want/top_k");
    refuse_verify("\"want\":{\"rows\":\"leaf\"}", TV_WRONG_VALUE, "/want/rows");
    refuse_verify("\"want\":{\"rows\":7}", TV_WRONG_TYPE, "/want/rows");
    refuse_verify("\"want\":{\"rows\":[]}", TV_WRONG_VALUE, "/want/rows");
    refuse_verify("\"want\":{\"rows\":[0,3]}", TV_WRONG_VALUE, "/want/rows/1");
    refuse_verify("\"want\":{\"rows\":[0,1,0]}", TV_WRONG_VALUE, "/want/rows/2");
    refuse_verify("\"want\":{\"rows\":[-1]}", TV_WRONG_VALUE, "/want/rows/0");
    refuse_verify("\"want\":{\"rows\":[0.5]}", TV_WRONG_TYPE, "/want/rows/0");
    refuse_verify("\"want\":{\"logprobs\":1}", TV_WRONG_TYPE, "/want/logprobs");
    refuse_verify("\"want\":{\"logits\":true}", TV_WRONG_TYPE, "/want/logits");
    refuse_verify("\"want\":{\"logits\":{\"dtype\":\"f64\"}}", TV_WRONG_VALUE,
                  "/want/logits/dtype");
    refuse_verify("\"want\":{\"logits\":{\"via\":\"mail\"}}", TV_WRONG_VALUE, "/want/logits/via");
    refuse_verify("\"rule\":\"Typical\"", TV_WRONG_VALUE, "/rule");
    refuse_verify("\"deadline_ms\":0", TV_WRONG_VALUE, "/deadline_ms");
    refuse_verify("\"deadline_ms\":600001", TV_WRONG_VALUE, "/deadline_ms");
    refuse_verify("\"ack\":0", TV_WRONG_VALUE, "/ack");
    refuse_verify("\"seq\":2", TV_BAD_JSON, "");
    refuse(TV_CALL_VERIFY, "{" TREE "}", TV_MISSING_FIELD, "/seq");
    refuse(TV_CALL_VERIFY, "{" HEAD "}", TV_MISSING_FIELD, "/tree");
    refuse(TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":[1]}}", TV_MISSING_FIELD,
           "/tree/parents");
    refuse(TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":[1],\"parent\":[-1]}}", TV_UNKNOWN_FIELD,
           "/tree/parent");
    refuse(TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":[1,2],\"parents\":[-1]}}",
           TV_TREE_INVALID, "/tree/parents");
    refuse(TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":[],\"parents\":[]}}", TV_TREE_INVALID,
           "/tree/tokens");
    refuse(TV_CALL_VERIFY, "{" HEAD ",\"tree\":{\"tokens\":7,\"parents\":[]}}", TV_WRONG_TYPE,
           "/tree/tokens");
    refuse(TV_CALL_VERIFY,
           "{\"seq\":0,\"epoch\":\"0123456789abcdef\",\"expected_len\":10," TREE "}",
           TV_WRONG_VALUE, "/seq");
    refuse(TV_CALL_VERIFY, "{\"seq\":1,\"epoch\":\"0123456789ABCDEF\",\"expected_len\":1," TREE "}",
           TV_WRONG_VALUE, "/epoch");
    refuse(TV_CALL_VERIFY, "{\"seq\":1,\"epoch\":17,\"expected_len\":1," TREE "}", TV_WRONG_TYPE,
           "/epoch");
}

#define IF     "\"seq\":2,\"epoch\":\"0123456789abcdef\""
#define IF_LEN IF ",\"expected_len\":10"
#define ONE(leaf, token)                                                                           \
    "{\"leaf\":" leaf ",\"pending\":" token ",\"tree\":{\"tokens\":[" token "],\"parents\":[-1]}}"

static void test_if(void **state)
{
    static const char guess[] = ",\"if\":{\"seq\":1,\"leaf\":3,\"pending\":5}}";
    struct tv_request r, other;
    char body[512];

    (void)state;
    (void)snprintf(body, sizeof body, "{" IF_LEN "," TREE "%s", guess);
    accept(TV_CALL_VERIFY, body, &r);
    assert_true(r.has_if && r.has_tree && !r.len_implied);
    assert_int_equal(r.if_seq, 1);
    assert_int_equal(r.guess.leaf, 3);
    assert_int_equal(r.guess.pending, 5);
    assert_int_equal(r.alternative_count, 0);
    assert_ptr_equal(tv_request_tree(&r, -1), &r.tree);
    accept(TV_CALL_VERIFY, "{" IF_LEN "," TREE "}", &other);
    assert_false(other.has_if);
    assert_memory_not_equal(r.body_hash, other.body_hash, sizeof r.body_hash);
    tv_request_finish(&other);
    accept(TV_CALL_VERIFY, "{" IF_LEN "," TREE ",\"if\":{\"seq\":1,\"leaf\":2,\"pending\":5}}",
           &other);
    assert_memory_not_equal(r.body_hash, other.body_hash, sizeof r.body_hash);
    tv_request_finish(&other);
    tv_request_finish(&r);
    refuse(TV_CALL_VERIFY, "{" IF_LEN "," TREE ",\"if\":7}", TV_WRONG_TYPE, "/if");
    refuse(TV_CALL_VERIFY, "{" IF_LEN "," TREE ",\"if\":{\"seq\":1,\"leaf\":3}}", TV_MISSING_FIELD,
           "/if/pending");
    refuse(TV_CALL_VERIFY, "{" IF_LEN "," TREE ",\"if\":{\"seq\":1,\"leaf\":-1,\"pending\":5}}",
           TV_WRONG_VALUE, "/if/leaf");
    refuse(TV_CALL_VERIFY, "{" IF_LEN "," TREE ",\"if\":{\"seq\":2,\"leaf\":3,\"pending\":5}}",
           TV_WRONG_VALUE, "/if/seq");
    refuse(TV_CALL_VERIFY, "{" IF_LEN "," TREE ",\"if\":{\"seq\":1,\"leaf\":3,\"pending\":6}}",
           TV_WRONG_VALUE, "/if/pending");
    refuse(TV_CALL_VERIFY,
           "{" IF_LEN "," TREE ",\"if\":{\"seq\":1,\"leaf\":3,\"pending\":5,\"node\":1}}",
           TV_UNKNOWN_FIELD, "/if/node");
    refuse(TV_CALL_VERIFY, "{" HEAD "," TREE ",\"if\":{\"seq\":0,\"leaf\":3,\"pending\":5}}",
           TV_WRONG_VALUE, "/if/seq");
}

static void test_alternatives(void **state)
{
    struct tv_request r, other;

    (void)state;
    accept(TV_CALL_VERIFY,
           "{" IF ",\"if\":{\"seq\":1},\"alternatives\":[" ONE("0", "5") "," ONE("1", "5") "]}",
           &r);
    assert_true(r.has_if && !r.has_tree && r.len_implied);
    assert_int_equal(r.alternative_count, 2);
    assert_int_equal(r.alternatives[1].guess.leaf, 1);
    assert_int_equal(tv_request_tree(&r, 1)->tokens[0], 5);
    assert_int_equal(tv_request_tree(&r, 1)->depths[0], 0);
    accept(TV_CALL_VERIFY,
           "{" IF_LEN ",\"if\":{\"seq\":1},\"alternatives\":[" ONE("1", "5") "," ONE("0", "5") "]}",
           &other);
    assert_true(!other.len_implied && other.expected_len == 10);
    assert_memory_not_equal(r.body_hash, other.body_hash, sizeof r.body_hash);
    tv_request_finish(&other);
    tv_request_finish(&r);
    refuse(TV_CALL_VERIFY, "{" IF ",\"if\":{\"seq\":1},\"alternatives\":[]}", TV_WRONG_VALUE,
           "/alternatives");
    refuse(TV_CALL_VERIFY, "{" IF ",\"if\":{\"seq\":1},\"alternatives\":[1,2]}", TV_WRONG_TYPE,
           "/alternatives/0");
    refuse(TV_CALL_VERIFY, "{" IF ",\"alternatives\":[" ONE("0", "5") "]}", TV_MISSING_FIELD,
           "/if");
    refuse(TV_CALL_VERIFY,
           "{" IF ",\"if\":{\"seq\":1,\"leaf\":0},\"alternatives\":[" ONE("0", "5") "]}",
           TV_WRONG_VALUE, "/if/leaf");
    refuse(TV_CALL_VERIFY,
           "{" IF "," TREE ",\"if\":{\"seq\":1},\"alternatives\":[" ONE("0", "5") "]}",
           TV_WRONG_VALUE, "/tree");
    refuse(TV_CALL_VERIFY,
           "{" IF ",\"if\":{\"seq\":1},\"alternatives\":[" ONE("0", "5") "," ONE("0", "5") "]}",
           TV_WRONG_VALUE, "/alternatives/1/pending");
    refuse(
        TV_CALL_VERIFY,
        "{" IF ",\"if\":{\"seq\":1},\"alternatives\":[" ONE(
            "0",
            "5") ",{\"leaf\":0,\"pending\":6,\"tree\":{\"tokens\":[6,7,7],\"parents\":[-1,0,0]}}]}",
        TV_TREE_INVALID, "/alternatives/1/tree/tokens/2");
    refuse(TV_CALL_VERIFY,
           "{" IF ",\"if\":{\"seq\":1},\"want\":{\"rows\":[1]},\"alternatives\":["
           "{\"leaf\":0,\"pending\":6,\"tree\":{\"tokens\":[6,7],\"parents\":[-1,0]}}," ONE(
               "0", "5") "]}",
           TV_WRONG_VALUE, "/want/rows/0"); /* not a node of the second */
}

static void test_held(void **state)
{
    struct tv_request r, other;

    (void)state;
    accept(TV_CALL_VERIFY, "{" HEAD "," TREE ",\"commit\":\"hold\"}", &r);
    assert_true(r.hold && !r.has_prev);
    accept(TV_CALL_VERIFY, "{" HEAD "," TREE ",\"commit\":\"auto\"}", &other);
    assert_false(other.hold);
    assert_memory_not_equal(r.body_hash, other.body_hash, sizeof r.body_hash);
    tv_request_finish(&other);
    tv_request_finish(&r);
    accept(TV_CALL_VERIFY,
           "{" HEAD "," TREE ",\"commit_prev\":{\"seq\":7,\"path\":[0,2],\"next\":9}}", &r);
    assert_true(r.has_prev && r.has_next && r.prev_seq == 7 && r.next == 9);
    assert_true(r.path_count == 2 && r.path[1] == 2);
    tv_request_finish(&r);
    accept(TV_CALL_COMMIT, "{\"seq\":1,\"epoch\":\"0123456789abcdef\",\"path\":[]}", &r);
    assert_true(r.path_count == 0 && !r.has_next && r.len_implied);
    tv_request_finish(&r);
    refuse_verify("\"commit\":\"later\"", TV_WRONG_VALUE, "/commit");
    refuse_verify("\"commit\":true", TV_WRONG_TYPE, "/commit");
    refuse_verify("\"commit\":\"auto\",\"rule\":\"client\"", TV_WRONG_VALUE, "/commit");
    accept(TV_CALL_VERIFY, "{" HEAD "," TREE ",\"commit\":\"hold\",\"rule\":\"client\"}", &r);
    tv_request_finish(&r);
    refuse_verify("\"commit_prev\":{\"seq\":7,\"path\":[0]}", TV_MISSING_FIELD,
                  "/commit_prev/next");
    refuse_verify("\"commit_prev\":{\"seq\":7,\"path\":[],\"next\":1}", TV_WRONG_VALUE,
                  "/commit_prev/next");
    refuse_verify("\"commit_prev\":{\"path\":[]}", TV_MISSING_FIELD, "/commit_prev/seq");
    refuse_verify("\"commit_prev\":{\"seq\":7,\"path\":[1],\"next\":1}", TV_WRONG_VALUE,
                  "/commit_prev/path/0");
    refuse_verify("\"commit_prev\":{\"seq\":7,\"path\":[0,2,1],\"next\":1}", TV_WRONG_VALUE,
                  "/commit_prev/path/2");
    refuse_verify("\"commit_prev\":{\"seq\":7,\"path\":[0],\"next\":307}", TV_WRONG_VALUE,
                  "/commit_prev/next");
    refuse(TV_CALL_VERIFY,
           "{" IF_LEN "," TREE ",\"if\":{\"seq\":1,\"leaf\":3,\"pending\":5},"
           "\"commit_prev\":{\"seq\":1,\"path\":[]}}",
           TV_WRONG_VALUE, "/if");
    refuse(TV_CALL_COMMIT, "{\"seq\":1,\"epoch\":\"0123456789abcdef\"}", TV_MISSING_FIELD, "/path");
    refuse(TV_CALL_ONESHOT, "{\"tokens\":[1]," TREE ",\"sampling\":{\"rule\":\"client\"}}",
           TV_WRONG_VALUE, "/sampling/rule");
}

/* 32 are taken, 33 are not. */
static void test_alternatives_cap(void **state)
{
    (void)state;
    for (int count = TV_ALTERNATIVES_MAX; count <= TV_ALTERNATIVES_MAX + 1; count++) {
        char body[8192];
        struct tv_request r;
        int at = snprintf(body, sizeof body, "{" IF ",\"if\":{\"seq\":1},\"alternatives\":[");
        for (int i = 0; i < count; i++) {
            at += snprintf(body + at, sizeof body - (size_t)at,
                           "%s{\"leaf\":%d,\"pending\":5,\"tree\":{\"tokens\":[5,1,2,3],"
                           "\"parents\":[-1,0,0,0]}}",
                           i > 0 ? "," : "", i);
        }
        (void)snprintf(body + at, sizeof body - (size_t)at, "]}");
        if (count == TV_ALTERNATIVES_MAX) {
            accept(TV_CALL_VERIFY, body, &r);
            assert_int_equal(r.alternative_count, count);
            tv_request_finish(&r);
        } else {
            refuse(TV_CALL_VERIFY, body, TV_WRONG_VALUE, "/alternatives");
        }
    }
}

/* A chain tree of n nodes, or a star, at the limits of nodes and depth. */
static void tree_body(char *body, size_t size, int nodes, int chain)
{
    size_t used = (size_t)snprintf(body, size, "{" HEAD ",\"tree\":{\"tokens\":[");
    int i;

    for (i = 0; i < nodes; i++) {
        used += (size_t)snprintf(body + used, size - used, "%s%d", i > 0 ? "," : "", i);
    }
    used += (size_t)snprintf(body + used, size - used, "],\"parents\":[");
    for (i = 0; i < nodes; i++) {
        used += (size_t)snprintf(body + used, size - used, "%s%d", i > 0 ? "," : "",
                                 i == 0  ? -1
                                 : chain ? i - 1
                                         : 0);
    }
    snprintf(body + used, size - used, "]}}");
}

static void test_tree_limits(void **state)
{
    struct tv_request r;
    char body[8192];

    (void)state;
    tree_body(body, sizeof(body), 256, 0);
    accept(TV_CALL_VERIFY, body, &r);
    tv_request_finish(&r);
    tree_body(body, sizeof(body), 257, 0);
    refuse(TV_CALL_VERIFY, body, TV_TREE_TOO_LARGE, "/tree/tokens");
    tree_body(body, sizeof(body), 65, 1);
    accept(TV_CALL_VERIFY, body, &r);
    assert_int_equal(r.tree.depth, 64);
    tv_request_finish(&r);
    tree_body(body, sizeof(body), 66, 1);
    refuse(TV_CALL_VERIFY, body, TV_TREE_TOO_LARGE, "/tree/parents/65");
}

/* 8,000 bytes: 6 rows of 307 f32 values fit (7,368), 7 do not; the longest path counts. */
static void test_inline_limit(void **state)
{
    static const struct {
        int nodes;
        const char *want;
        int ok;
    } cases[] = {
        {6, "{\"logits\":{}}", 1},
        {7, "{\"logits\":{}}", 0},
        {7, "{\"logits\":{\"via\":\"fetch\"}}", 1},
        {13, "{\"logits\":{\"dtype\":\"bf16\"}}", 1},
        {14, "{\"logits\":{\"dtype\":\"bf16\"}}", 0},
        {14, "{\"logits\":{\"rows\":\"stop\"}}", 1},
        {14, "{\"logits\":{\"rows\":[0,1,2,3,4,5]}}", 1},
        {14, "{\"logits\":{\"rows\":[0,1,2,3,4,5,6]}}", 0},
        {15, "{\"top_k\":64}", 1}, /* 15 x 516 = 7,740 */
        {16, "{\"top_k\":64}", 0}, /* 8,256 */
        {6, "{\"top_k\":64,\"rows\":\"stop\",\"logits\":{\"rows\":\"all\"}}", 1},
        {6, "{\"top_k\":64,\"rows\":[0,1],\"logits\":{\"rows\":\"all\"}}", 0},
    };
    struct tv_request r;
    char body[8192];
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        tree_body(body, sizeof(body), cases[i].nodes, 1);
        snprintf(body + strlen(body) - 1, 128, ",\"want\":%s}", cases[i].want);
        if (cases[i].ok) {
            accept(TV_CALL_VERIFY, body, &r);
            tv_request_finish(&r);
        } else {
            refuse(TV_CALL_VERIFY, body, TV_WRONG_VALUE, "/want");
        }
    }
}

/* 2^14 nodes of 2^18 logits are 2^32 values and 2^34 bytes: in 32 bits both are none. */
static void test_b27_rows_beyond_32_bits(void **state)
{
    const struct tv_request_limits limits = {
        .tree = {.nodes_max = 16384, .depth_max = 64, .vocab = 1 << 18},
        .max_len = 32768,
        .inline_bytes = TV_INLINE_BYTES_DEFAULT,
    };
    const size_t size = 1u << 18;
    struct tv_request request;
    struct tv_problem problem;
    char *body = malloc(size);

    (void)state;
    assert_non_null(body);
    tree_body(body, size, 16384, 0);
    strcpy(body + strlen(body) - 1, ",\"want\":{\"rows\":\"all\",\"logits\":{}}}");
    assert_int_equal(
        tv_request_decode(TV_CALL_VERIFY, body, strlen(body), &limits, &request, &problem),
        -EINVAL);
    assert_int_equal(problem.code, TV_WRONG_VALUE);
    assert_non_null(strstr(problem.detail, " 17179869184 bytes"));
    free(body);
}

static void hash_of(enum tv_call_kind kind, const char *body, uint8_t ret_hash[32])
{
    struct tv_request r;

    accept(kind, body, &r);
    memcpy(ret_hash, r.body_hash, 32);
    tv_request_finish(&r);
}

static void test_body_hash(void **state)
{
    static const char *const same[] = {
        "{" HEAD "," TREE ",\"deadline_ms\":5,\"lease_s\":9,\"ack\":3}",
        "{" TREE "," HEAD "}",
        "{ \"\\u0073eq\" : 1,\"want\":{},\"epoch\":\"0123456789abcdef\",\"expected_len\":10," TREE
        "}",
    };
    static const char *const other[] = {
        "{\"seq\":2,\"epoch\":\"0123456789abcdef\",\"expected_len\":10," TREE "}",
        "{\"seq\":1,\"epoch\":\"0123456789abcdee\",\"expected_len\":10," TREE "}",
        "{\"seq\":1,\"epoch\":\"0123456789abcdef\",\"expected_len\":11," TREE "}",
        "{" HEAD ",\"tree\":{\"tokens\":[5,6,8],\"parents\":[-1,0,1]}}",
        "{" HEAD ",\"tree\":{\"tokens\":[5,6,7],\"parents\":[-1,0,0]}}",
        "{" HEAD ",\"tree\":{\"tokens\":[5,6],\"parents\":[-1,0]}}",
        "{" HEAD "," TREE ",\"rule\":\"target_walk\"}",
        "{" HEAD "," TREE ",\"rule\":\"greedy\"}",
        "{" HEAD "," TREE ",\"want\":{\"top_k\":1}}",
        "{" HEAD "," TREE ",\"want\":{\"rows\":\"all\"}}",
        "{" HEAD "," TREE ",\"want\":{\"rows\":[0]}}",
        "{" HEAD "," TREE ",\"want\":{\"rows\":[1]}}",
        "{" HEAD "," TREE ",\"want\":{\"logprobs\":true}}",
        "{" HEAD "," TREE ",\"want\":{\"shadow\":true}}",
        "{" HEAD "," TREE ",\"want\":{\"logits\":{}}}",
        "{" HEAD "," TREE ",\"want\":{\"logits\":{\"dtype\":\"f16\"}}}",
        "{" HEAD "," TREE ",\"want\":{\"logits\":{\"rows\":\"stop\"}}}",
        "{" HEAD "," TREE ",\"want\":{\"logits\":{\"via\":\"fetch\"}}}",
        "{" HEAD "," TREE ",\"expected_digest\":\"00000000000000000000000000000000\"}",
    };
    uint8_t base[32], seen[19][32];
    size_t i, j;

    (void)state;
    hash_of(TV_CALL_VERIFY, "{" HEAD "," TREE "}", base);
    for (i = 0; i < sizeof(same) / sizeof(same[0]); i++) {
        uint8_t hash[32];
        hash_of(TV_CALL_VERIFY, same[i], hash);
        assert_memory_equal(hash, base, 32);
    }
    for (i = 0; i < sizeof(other) / sizeof(other[0]); i++) {
        hash_of(TV_CALL_VERIFY, other[i], seen[i]);
        assert_memory_not_equal(seen[i], base, 32);
        for (j = 0; j < i; j++) {
            assert_memory_not_equal(seen[i], seen[j], 32);
        }
    }
    hash_of(TV_CALL_EXTEND, "{" HEAD ",\"tokens\":[1]}", base);
    hash_of(TV_CALL_EXTEND, "{" HEAD ",\"tokens_b64\":\"AQAAAA==\"}", seen[0]);
    assert_memory_equal(base, seen[0], 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verify),
        cmocka_unit_test(test_verify_refusals),
        cmocka_unit_test(test_if),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_alternatives),
        cmocka_unit_test(test_alternatives_cap),
        cmocka_unit_test(test_tree_limits),
        cmocka_unit_test(test_inline_limit),
        cmocka_unit_test(test_b27_rows_beyond_32_bits),
        cmocka_unit_test(test_body_hash),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
