/*
 * test_proto_draft.c - q_topk and q_dense: what is read, what each fault is called, and which rule
 * takes them.
 */
#include "proto_support.h"

#include <math.h>

#include "proto/response.h"

#define VOCAB 307 /* of proto_support.h's limits */

/* A body of the one-shot call with this tree and draft, written by the encoder of reproducers. */
static const char *body_of(struct tv_buf *buf, struct tv_tree *tree, const char *rule)
{
    int32_t i;

    tv_buf_finish(buf);
    tv_buf_init(buf, 1u << 20);
    tv_buf_printf(buf, "{\"tokens\":[1],\"tree\":{\"tokens\":[");
    for (i = 0; i < tree->count; i++) {
        tv_buf_printf(buf, "%s%d", i > 0 ? "," : "", (int)tree->tokens[i]);
    }
    tv_buf_printf(buf, "],\"parents\":[");
    for (i = 0; i < tree->count; i++) {
        tv_buf_printf(buf, "%s%d", i > 0 ? "," : "", (int)tree->parents[i]);
    }
    tv_buf_printf(buf, "]");
    tv_encode_draft(buf, tree);
    tv_buf_printf(buf, "},\"sampling\":{\"rule\":\"%s\"}}", rule);
    tv_buf_append(buf, "", 1);
    assert_int_equal(buf->failed, 0);
    return buf->data;
}

/* Node 0 with children 1 and 2, node 1 with child 3. */
struct sample {
    int32_t tokens[4], parents[4], ids[12];
    float probs[12];
    struct tv_tree tree;
};

static void sample_make(struct sample *sample)
{
    static const struct sample good = {
        .tokens = {9, 17, 88, 5},
        .parents = {-1, 0, 0, 1},
        .ids = {17, 88, 3, 5, -1, -1, 0, 0, 0, 306, -1, -1},
        .probs = {0.5f, 0.25f, 0.25f, 1.0f, 0, 0, 7.0f, -1.0f, 0, 2.0f, 0, 0},
    };

    *sample = good;
    sample->tree = (struct tv_tree){
        .count = 4,
        .tokens = sample->tokens,
        .parents = sample->parents,
        .draft = {.width = 3, .ids = sample->ids, .probs = sample->probs},
    };
}

static void refused(struct tv_buf *buf, struct sample *sample, const char *pointer, int32_t node)
{
    const char *body = body_of(buf, &sample->tree, "ratio_wor");
    struct tv_request request;
    struct tv_problem problem = {0};

    assert_int_equal(decode_under(&usual, TV_CALL_ONESHOT, body, &request, &problem), -EINVAL);
    assert_int_equal(problem.code, TV_WRONG_VALUE);
    assert_string_equal(problem.pointer, pointer);
    assert_int_equal(problem.node, node);
}

static void test_sparse(void **state)
{
    struct sample sample;
    struct tv_request r, again;
    struct tv_buf buf = {0};

    (void)state;
    sample_make(&sample);
    accept(TV_CALL_ONESHOT, body_of(&buf, &sample.tree, "ratio_wor"), &r);
    assert_int_equal(r.tree.draft.width, 3);
    assert_memory_equal(r.tree.draft.ids, sample.ids, 6 * sizeof(int32_t));
    assert_memory_equal(r.tree.draft.probs, sample.probs, 6 * sizeof(float));
    for (int i = 6; i < 12; i++) { /* leaves: whatever stood there */
        assert_true(r.tree.draft.ids[i] == -1 && r.tree.draft.probs[i] == 0.0f);
    }
    assert_true(tv_tree_draft_prob(&r.tree, 0, 88) == 0.25);
    assert_true(tv_tree_draft_prob(&r.tree, 1, 88) == 0.0);

    sample.probs[1] = 0.2499f; /* another draft is another body; another leaf's row is not */
    accept(TV_CALL_ONESHOT, body_of(&buf, &sample.tree, "ratio_wor"), &again);
    assert_memory_not_equal(r.body_hash, again.body_hash, 32);
    tv_request_finish(&again);
    sample.probs[1] = 0.25f;
    sample.probs[11] = 0.5f;
    accept(TV_CALL_ONESHOT, body_of(&buf, &sample.tree, "ratio_wor"), &again);
    assert_memory_equal(r.body_hash, again.body_hash, 32);
    tv_request_finish(&again);
    tv_request_finish(&r);
    tv_buf_finish(&buf);
}

static void test_rows_that_are_none(void **state)
{
    static const float probs[] = {-0.25f, NAN, INFINITY, 0.2489f, 0.2511f, 2.5f};
    static const int32_t ids[] = {-2, VOCAB, 17, INT32_MAX, INT32_MIN};
    struct sample sample;
    struct tv_buf buf = {0};
    struct tv_request r;
    size_t i;

    (void)state;
    for (i = 0; i < sizeof(probs) / sizeof(probs[0]); i++) {
        sample_make(&sample);
        if (isnan(probs[i])) {
            continue; /* the encoder writes none; test_cells_by_hand has it */
        }
        sample.probs[2] = probs[i];
        refused(&buf, &sample, "/tree/q_topk", 0);
    }
    for (i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        sample_make(&sample);
        sample.ids[2] = ids[i];
        refused(&buf, &sample, "/tree/q_topk", 0);
    }
    sample_make(&sample); /* at the edges of the sum */
    sample.probs[2] = 0.2491f;
    accept(TV_CALL_ONESHOT, body_of(&buf, &sample.tree, "ratio_wor"), &r);
    tv_request_finish(&r);
    sample.probs[2] = 0.2509f;
    accept(TV_CALL_ONESHOT, body_of(&buf, &sample.tree, "ratio_wor"), &r);
    tv_request_finish(&r);
    sample_make(&sample); /* an unused entry with a probability */
    sample.ids[2] = -1;
    refused(&buf, &sample, "/tree/q_topk", 0);
    sample_make(&sample); /* a child that is not there, and one without a probability */
    sample.ids[1] = 89;
    refused(&buf, &sample, "/tree/q_topk", 2);
    sample_make(&sample);
    sample.probs[1] = 0.0f;
    sample.probs[2] = 0.5f;
    refused(&buf, &sample, "/tree/q_topk", 2);
    sample_make(&sample); /* of an inner node that is not the root */
    sample.ids[3] = 6;
    refused(&buf, &sample, "/tree/q_topk", 3);
    tv_buf_finish(&buf);
}

static void test_dense(void **state)
{
    static float probs[4 * VOCAB];
    struct sample sample;
    struct tv_request r;
    struct tv_buf buf = {0};

    (void)state;
    sample_make(&sample);
    for (int i = 0; i < 2 * VOCAB; i++) {
        probs[i] = 1.0f / VOCAB;
    }
    sample.tree.draft = (struct tv_draft){.width = VOCAB, .probs = probs};
    accept(TV_CALL_ONESHOT, body_of(&buf, &sample.tree, "ratio_wor"), &r);
    assert_int_equal(r.tree.draft.width, VOCAB);
    assert_null(r.tree.draft.ids);
    assert_true(tv_tree_draft_prob(&r.tree, 1, 5) == (double)probs[5]);
    tv_request_finish(&r);
    probs[88] = 0.0f;
    probs[89] *= 2.0f;
    refused(&buf, &sample, "/tree/q_dense", 2);
    probs[88] = 0.01f;
    refused(&buf, &sample, "/tree/q_dense", 0);
    tv_buf_finish(&buf);
}

#define THREE "\"tree\":{\"tokens\":[5,6],\"parents\":[-1,0],"
#define IDS   "\"ids_b64\":\"BgAAAP////8=\""   /* 6, -1 */
#define ONE   "\"probs_b64\":\"AACAPwAAAAA=\"" /* 1, 0 */

static void test_cells_by_hand(void **state)
{
    static const struct {
        const char *draft;
        enum tv_code code;
        const char *pointer;
    } bad[] = {
        {"\"q_topk\":[]", TV_WRONG_TYPE, "/tree/q_topk"},
        {"\"q_topk\":{}", TV_MISSING_FIELD, "/tree/q_topk/shape"},
        {"\"q_topk\":{\"shape\":[2,1]," IDS "}", TV_MISSING_FIELD, "/tree/q_topk/probs_b64"},
        {"\"q_topk\":{\"shape\":[2,1],\"x\":1," IDS "," ONE "}", TV_UNKNOWN_FIELD,
         "/tree/q_topk/x"},
        {"\"q_topk\":{\"shape\":[2]," IDS "," ONE "}", TV_WRONG_TYPE, "/tree/q_topk/shape"},
        {"\"q_topk\":{\"shape\":[2,1,1]," IDS "," ONE "}", TV_WRONG_TYPE, "/tree/q_topk/shape"},
        {"\"q_topk\":{\"shape\":[2.0,1]," IDS "," ONE "}", TV_WRONG_TYPE, "/tree/q_topk/shape/0"},
        {"\"q_topk\":{\"shape\":[3,1]," IDS "," ONE "}", TV_WRONG_VALUE, "/tree/q_topk/shape/0"},
        {"\"q_topk\":{\"shape\":[2,0]," IDS "," ONE "}", TV_WRONG_VALUE, "/tree/q_topk/shape/1"},
        {"\"q_topk\":{\"shape\":[2,308]," IDS "," ONE "}", TV_WRONG_VALUE, "/tree/q_topk/shape/1"},
        {"\"q_topk\":{\"shape\":[2,99999999999999999999]," IDS "," ONE "}", TV_WRONG_VALUE,
         "/tree/q_topk/shape/1"},
        {"\"q_topk\":{\"shape\":[2,2]," IDS "," ONE "}", TV_WRONG_VALUE, "/tree/q_topk/ids_b64"},
        {"\"q_topk\":{\"shape\":[2,1],\"ids_b64\":[6]," ONE "}", TV_WRONG_TYPE,
         "/tree/q_topk/ids_b64"},
        {"\"q_topk\":{\"shape\":[2,1],\"ids_b64\":\"BgAAAP////\"," ONE "}", TV_WRONG_VALUE,
         "/tree/q_topk/ids_b64"},
        {"\"q_topk\":{\"shape\":[2,1]," IDS ",\"probs_b64\":\"AACAPwA=\"}", TV_WRONG_VALUE,
         "/tree/q_topk/probs_b64"},
        {"\"q_topk\":{\"shape\":[2,1]," IDS ",\"probs_b64\":\"AADAfwAAAAA=\"}", TV_WRONG_VALUE,
         "/tree/q_topk"}, /* NaN */
        {"\"q_dense\":{\"shape\":[2,1],\"dtype\":\"f32\",\"data_b64\":\"AACAPwAAAAA=\"}",
         TV_WRONG_VALUE, "/tree/q_dense"},
        {"\"q_dense\":{\"shape\":[2,1],\"dtype\":\"bf16\",\"data_b64\":\"\"}", TV_WRONG_VALUE,
         "/tree/q_dense/dtype"},
        {"\"q_dense\":{\"shape\":[2,1],\"dtype\":4,\"data_b64\":\"\"}", TV_WRONG_TYPE,
         "/tree/q_dense/dtype"},
        {"\"q_topk\":{\"shape\":[2,1]," IDS "," ONE "},\"q_dense\":{}", TV_WRONG_VALUE,
         "/tree/q_dense"},
    };
    char body[512];

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(body, sizeof(body), "{\"tokens\":[1]," THREE "%s},\"sampling\":%s}", bad[i].draft,
                 "{\"rule\":\"ratio_wor\"}");
        refuse(TV_CALL_ONESHOT, body, bad[i].code, bad[i].pointer);
    }
}

static void test_rule_and_draft(void **state)
{
    static const char *const draft = "\"q_topk\":{\"shape\":[2,1]," IDS "," ONE "}}";
    struct tv_request r;
    struct tv_problem problem;
    char body[512];

    (void)state;
    snprintf(body, sizeof(body), "{" HEAD "," THREE "%s}", draft);
    accept(TV_CALL_VERIFY, body, &r); /* the session's rule is not known here */
    assert_int_equal(tv_request_check_rule(&r, TV_RULE_RATIO_WOR, &problem), 0);
    assert_int_equal(tv_request_check_rule(&r, TV_RULE_TYPICAL, &problem), -EINVAL);
    assert_string_equal(problem.pointer, "/tree/q_topk");
    tv_request_finish(&r);
    snprintf(body, sizeof(body), "{" HEAD "," THREE "%s,\"rule\":\"greedy\"}", draft);
    refuse(TV_CALL_VERIFY, body, TV_WRONG_VALUE, "/tree/q_topk");
    snprintf(body, sizeof(body), "{\"tokens\":[1]," THREE "%s}", draft);
    refuse(TV_CALL_ONESHOT, body, TV_WRONG_VALUE, "/tree/q_topk");
    refuse(TV_CALL_SCORE, body, TV_WRONG_VALUE, "/tree/q_topk");
    snprintf(body, sizeof(body), "{" HEAD "," TREE ",\"rule\":\"ratio_wor\"}");
    refuse(TV_CALL_VERIFY, body, TV_WRONG_VALUE, "/tree");
    accept(TV_CALL_VERIFY,
           "{" HEAD ",\"tree\":{\"tokens\":[5],\"parents\":[-1]},\"rule\":\"ratio_wor\"}", &r);
    tv_request_finish(&r); /* without children nothing was drawn */
    accept(TV_CALL_CREATE,
           "{\"tokens\":[1],\"sampling\":{\"rule\":\"typical\",\"typical\":{\"delta\":0.5}}}", &r);
    assert_true(r.sampling.rule == TV_RULE_TYPICAL && r.sampling.has_typical);
    assert_true(r.sampling.typical_epsilon == 0.09 && r.sampling.typical_delta == 0.5);
    tv_request_finish(&r);
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"sampling\":{\"typical\":{\"delta\":1.5}}}",
           TV_WRONG_VALUE, "/sampling/typical/delta");
    refuse(TV_CALL_CREATE, "{\"tokens\":[1],\"sampling\":{\"typical\":{\"epsilon\":-0.1}}}",
           TV_WRONG_VALUE, "/sampling/typical/epsilon");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sparse),         cmocka_unit_test(test_rows_that_are_none),
        cmocka_unit_test(test_dense),          cmocka_unit_test(test_cells_by_hand),
        cmocka_unit_test(test_rule_and_draft),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
