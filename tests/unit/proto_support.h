/*
 * proto_support.h - bodies decoded under usual limits, for the tests of the decoder.
 */
#ifndef TV_TESTS_PROTO_SUPPORT_H
#define TV_TESTS_PROTO_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request.h"

#define HEAD "\"seq\":1,\"epoch\":\"0123456789abcdef\",\"expected_len\":10"
#define TREE "\"tree\":{\"tokens\":[5,6,7],\"parents\":[-1,0,1]}"

static const struct tv_request_limits usual = {
    .tree = {.nodes_max = TV_NODES_DEFAULT, .depth_max = TV_DEPTH_DEFAULT, .vocab = 307},
    .max_len = 128,
    .inline_bytes = 8000,
};

static inline int decode_under(const struct tv_request_limits *limits, enum tv_call_kind kind,
                               const char *body, struct tv_request *request,
                               struct tv_problem *problem)
{
    size_t bytes = strlen(body);
    char *copy = malloc(bytes + 1); /* exact size, so that a sanitizer sees the edges */
    int rc;

    assert_non_null(copy);
    memcpy(copy, body, bytes);
    copy = realloc(copy, bytes > 0 ? bytes : 1);
    assert_non_null(copy);
    rc = tv_request_decode(kind, copy, bytes, limits, request, problem);
    free(copy);
    return rc;
}

/* Decode or fail the test. */
static inline void accept(enum tv_call_kind kind, const char *body, struct tv_request *request)
{
    struct tv_problem problem = {0};

    if (decode_under(&usual, kind, body, request, &problem) != 0) {
        fail_msg("%s: %s", body, problem.detail);
    }
    assert_int_equal(request->kind, kind);
}

static inline void refuse(enum tv_call_kind kind, const char *body, enum tv_code code,
                          const char *pointer)
{
    struct tv_request request;
    struct tv_problem problem = {0};

    if (decode_under(&usual, kind, body, &request, &problem) != -EINVAL) {
        fail_msg("accepted: %s", body);
    }
    if (problem.code != code || strcmp(problem.pointer, pointer) != 0) {
        fail_msg("%s: %s at %s (%s)", body, tv_code_info(problem.code)->name, problem.pointer,
                 problem.detail);
    }
    assert_null(request.tokens);
    assert_null(request.tree.tokens);
    assert_false(problem.committed);
    tv_problem_finish(&problem);
}

#endif
