/*
 * fuzz_request.c - bytes to the request decoder.
 *
 * The first byte chooses the call, the rest is the body. What is accepted must keep the decoder's
 * promises and decode to the same hash again; what is refused must own nothing and encode to JSON
 * that our strict reader accepts.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "proto/json_read.h"
#include "proto/request.h"
#include "proto/response.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define FIRST_LATER     0xe0

static const struct tv_request_limits limits = {
    .tree = {.nodes_max = 32, .depth_max = 8, .vocab = 307},
    .max_len = 128,
    .inline_bytes = 20000,
    .hidden_dim = 8,
    .tap_count = 3,
    .taps = {1, 9, 17},
    .project_dim = 16,
};

static void check_rows(const struct tv_rows *rows, const struct tv_tree *tree)
{
    int32_t i;

    if (rows->kind != TV_ROWS_LIST) {
        REQUIRE(rows->nodes == NULL);
        return;
    }
    REQUIRE(rows->count >= 1 && rows->count <= tree->count);
    for (i = 0; i < rows->count; i++) {
        REQUIRE(rows->nodes[i] >= 0 && rows->nodes[i] < tree->count);
    }
}

/* Every child can have been drawn from its parent's row. */
static void check_draft(const struct tv_tree *tree)
{
    int32_t i;

    for (i = 1; tree->draft.width > 0 && i < tree->count; i++) {
        double p = tv_tree_draft_prob(tree, tree->parents[i], tree->tokens[i]);
        REQUIRE(p > 0 && p <= 1.001);
    }
}

static void check_accepted(const struct tv_request *request)
{
    const struct tv_sampling_request *sampling = &request->sampling;
    int32_t i;

    for (i = 0; i < request->token_count; i++) {
        REQUIRE(request->tokens[i] >= 0 && request->tokens[i] < limits.tree.vocab);
    }
    for (i = 0; i < request->stop_count; i++) {
        REQUIRE(request->stop_ids[i] >= 0 && request->stop_ids[i] < limits.tree.vocab);
    }
    REQUIRE(request->stop_count <= TV_STOP_IDS_MAX);
    REQUIRE(request->len >= 0 && request->pending >= 0);
    REQUIRE(request->pending < limits.tree.vocab);
    REQUIRE(sampling->temperature >= 0 && sampling->temperature <= 100);
    REQUIRE(sampling->top_p > 0 && sampling->top_p <= 1);
    REQUIRE(sampling->min_p >= 0 && sampling->min_p <= 1);
    REQUIRE(sampling->typical_epsilon >= 0 && sampling->typical_epsilon <= 1);
    REQUIRE(sampling->typical_delta >= 0 && sampling->typical_delta <= 1);
    REQUIRE(sampling->top_k >= 0 && sampling->top_k <= limits.tree.vocab);
    REQUIRE(request->deadline_ms >= 1 && request->deadline_ms <= TV_DEADLINE_MS_MAX);
    REQUIRE(request->lease_s >= 0 && request->lease_s <= TV_LEASE_S_MAX);
    REQUIRE(request->max_len >= 0 && request->max_len <= limits.max_len);
    REQUIRE(request->cache_salt_bytes <= TV_SALT_BYTES_MAX);
    REQUIRE(strlen(request->cache_salt) == (size_t)request->cache_salt_bytes);
    if (request->has_tree) {
        REQUIRE(request->tree.count >= 1 && request->tree.count <= limits.tree.nodes_max);
        REQUIRE(request->tree.depth <= limits.tree.depth_max);
        check_draft(&request->tree);
        check_rows(&request->want.rows, &request->tree);
        check_rows(&request->want.logits_rows, &request->tree);
        check_rows(&request->want.hidden.rows, &request->tree);
    }
    REQUIRE(request->want.hidden.tap_count >= 0);
    REQUIRE(request->want.hidden.tap_count <= limits.tap_count);
    for (i = 0; i < request->want.hidden.tap_count; i++) {
        REQUIRE(request->want.hidden.taps[i] >= 0);
        REQUIRE(request->want.hidden.taps[i] < limits.tap_count);
    }
    REQUIRE(request->want.inline_bytes_most <= limits.inline_bytes);
    REQUIRE(request->kind != TV_CALL_VERIFY || request->has_tree);
    REQUIRE(request->kind != TV_CALL_CREATE || request->token_count >= 1);
}

static void check_refused(struct tv_request *request, struct tv_problem *problem)
{
    const struct tv_json_limits json_limits = {.depth_max = 8, .values_max = 1000};
    struct tv_json_error error;
    struct tv_json *doc = NULL;
    struct tv_buf buf;

    REQUIRE(request->tokens == NULL && request->tree.tokens == NULL);
    REQUIRE(request->want.rows.nodes == NULL && request->want.logits_rows.nodes == NULL);
    REQUIRE(request->want.hidden.rows.nodes == NULL);
    REQUIRE(problem->code > TV_OK && problem->code < TV_CODE_COUNT);
    REQUIRE(tv_code_info(problem->code)->http_status / 100 == 4);
    tv_buf_init(&buf, 4096);
    tv_encode_problem(&buf, problem, "fuzz", NULL);
    REQUIRE(buf.failed == 0);
    REQUIRE(tv_json_parse(buf.data, buf.bytes, &json_limits, &doc, &error) == 0);
    tv_json_destroy(doc);
    tv_buf_finish(&buf);
    tv_problem_finish(problem);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static const enum tv_call_kind kinds[] = {TV_CALL_CREATE, TV_CALL_VERIFY,  TV_CALL_EXTEND,
                                              TV_CALL_DECODE, TV_CALL_ONESHOT, TV_CALL_PARITY,
                                              TV_CALL_RENEW};
    static const enum tv_call_kind later[] = {TV_CALL_SCORE, TV_CALL_ROLLBACK, TV_CALL_FORK,
                                              TV_CALL_BATCH};
    struct tv_request request, again;
    struct tv_problem problem = {0};
    enum tv_call_kind kind;
    char *body;
    int rc;

    if (bytes < 1) {
        return 0;
    }
    /* high first bytes are those of calls that came after the first corpora */
    kind = data[0] < FIRST_LATER ? kinds[data[0] % COUNT_OF(kinds)]
                                 : later[(data[0] - FIRST_LATER) % COUNT_OF(later)];
    body = malloc(bytes); /* exact size, so that a sanitizer sees the edges */
    if (body == NULL) {
        return 0;
    }
    memcpy(body, data + 1, bytes - 1);
    rc = tv_request_decode(kind, body, bytes - 1, &limits, &request, &problem);
    if (rc == 0) {
        check_accepted(&request);
        REQUIRE(tv_request_decode(kind, body, bytes - 1, &limits, &again, &problem) == 0);
        REQUIRE(memcmp(request.body_hash, again.body_hash, 32) == 0);
        tv_request_finish(&again);
    } else {
        check_refused(&request, &problem);
    }
    tv_request_finish(&request);
    free(body);
    return 0;
}
