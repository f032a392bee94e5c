/*
 * request_query.c - query parameters of the calls that have some.
 *
 * Refuses unknown names, repeated ones where it would matter, and values that are not exactly in
 * form or range, as bad-request.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

static int refuse(struct tv_problem *problem, const char *name, const char *wanted)
{
    tv_problem_set(problem, TV_BAD_REQUEST, NULL, "query parameter %.32s: %s", name, wanted);
    return -EINVAL;
}

/* Decimal digits in one spelling, up to high; *ret_end is where they stop. */
static int read_digits(const char *text, int32_t high, int32_t *ret, const char **ret_end)
{
    int64_t number = 0;
    const char *p = text;

    while (*p >= '0' && *p <= '9') {
        number = number * 10 + (*p++ - '0');
        if (number > high) {
            return -ERANGE;
        }
    }
    if (p == text || (text[0] == '0' && p - text > 1)) {
        return -EINVAL;
    }
    *ret = (int32_t)number;
    *ret_end = p;
    return 0;
}

static int read_number(const char *name, const char *value, int32_t high, int32_t *ret,
                       struct tv_problem *problem)
{
    const char *end = value;
    char wanted[48];

    if (read_digits(value, high, ret, &end) < 0 || *end != '\0') {
        (void)snprintf(wanted, sizeof(wanted), "must be from 0 to %d", (int)high); /* fits */
        return refuse(problem, name, wanted);
    }
    return 0;
}

/* A comma-separated list of node indices, none twice. */
static int read_list(const char *text, struct tv_rows *rows)
{
    uint8_t listed[TV_ENGINE_NODES_MAX] = {0};
    const char *p = text;

    rows->nodes = malloc(TV_ENGINE_NODES_MAX * sizeof(*rows->nodes));
    if (rows->nodes == NULL) {
        return -ENOMEM;
    }
    rows->kind = TV_ROWS_LIST;
    for (;;) {
        int32_t node = 0;
        if (read_digits(p, TV_ENGINE_NODES_MAX - 1, &node, &p) < 0 || listed[node]) {
            return -EINVAL;
        }
        listed[node] = 1;
        rows->nodes[rows->count++] = node;
        if (*p == '\0') {
            return 0;
        }
        if (*p++ != ',') {
            return -EINVAL;
        }
    }
}

static int query_tensor(struct tv_request *request, const char *name, const char *value,
                        struct tv_problem *problem)
{
    int rc;

    if (strcmp(name, "what") == 0) {
        request->tensor_hidden = strcmp(value, "hidden") == 0;
        return request->tensor_hidden || strcmp(value, "logits") == 0
                   ? 0
                   : refuse(problem, name, "logits or hidden is expected");
    }
    if (strcmp(name, "dtype") == 0) {
        request->has_tensor_dtype = 1;
        return tv_request_dtype_from(value, TV_TENSOR_FP8_E4M3, &request->tensor_dtype) == 0
                   ? 0
                   : refuse(problem, name, "f32, bf16, f16 or fp8_e4m3 is expected");
    }
    if (strcmp(name, "rows") != 0) {
        return refuse(problem, name, "unknown");
    }
    if (request->has_tensor_rows) {
        return refuse(problem, name, "given twice");
    }
    request->has_tensor_rows = 1;
    if (tv_request_rows_kind_from(value, &request->tensor_rows.kind) == 0) {
        return 0;
    }
    rc = read_list(value, &request->tensor_rows);
    return rc == -EINVAL ? refuse(problem, name, "stop, path, all or a list of nodes is expected")
                         : rc;
}

int tv_request_query(struct tv_request *request, const char *name, const char *value,
                     const struct tv_request_limits *limits, struct tv_problem *problem)
{
    int32_t number = 0;
    int rc;

    (void)limits; /* today's parameters have fixed ranges */
    if (request->kind == TV_CALL_TENSOR) {
        return query_tensor(request, name, value, problem);
    }
    if (request->kind == TV_CALL_STATE && strcmp(name, "tail") == 0) {
        return read_number(name, value, TV_TAIL_TOKENS_MAX, &request->tail, problem);
    }
    if (request->kind == TV_CALL_ROUND && strcmp(name, "wait_ms") == 0) {
        return read_number(name, value, TV_WAIT_MS_MAX, &request->wait_ms, problem);
    }
    if (request->kind == TV_CALL_PARITY && strcmp(name, "strict") == 0) {
        rc = read_number(name, value, 1, &number, problem);
        request->strict = number;
        return rc;
    }
    if (request->kind == TV_CALL_READY && strcmp(name, "deep") == 0) {
        rc = read_number(name, value, 1, &number, problem);
        request->deep = number;
        return rc;
    }
    return refuse(problem, name, "unknown");
}
