/*
 * decode_bodies.c - what the decoder says about bodies, one a line.
 *
 * Reads "CALL BODY" lines and prints "ok" or "code pointer" for each. A helper of
 * contract_differential.py; the limits are those that the schemas name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request.h"

static const struct {
    const char *name;
    enum tv_call_kind kind;
} calls[] = {
    {"create", TV_CALL_CREATE},     {"verify", TV_CALL_VERIFY}, {"extend", TV_CALL_EXTEND},
    {"decode", TV_CALL_DECODE},     {"renew", TV_CALL_RENEW},   {"oneshot", TV_CALL_ONESHOT},
    {"rollback", TV_CALL_ROLLBACK}, {"fork", TV_CALL_FORK},     {"score", TV_CALL_SCORE},
    {"batch", TV_CALL_BATCH},       {"parity", TV_CALL_PARITY},
};

static const struct tv_request_limits limits = {
    .tree = {.nodes_max = TV_ENGINE_NODES_MAX, .depth_max = TV_DEPTH_DEFAULT, .vocab = 307},
    .max_len = 2048,
    .inline_bytes = TV_INLINE_BYTES_DEFAULT,
    .hidden_dim = 64,
    .tap_count = 16,
    .taps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    .project_dim = 64,
};

static int answer(const char *call, const char *body, size_t bytes)
{
    struct tv_request request;
    struct tv_problem problem = {0};
    size_t i;

    for (i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        if (strcmp(calls[i].name, call) == 0) {
            break;
        }
    }
    if (i == sizeof(calls) / sizeof(calls[0])) {
        fprintf(stderr, "no call %s\n", call);
        return 1;
    }
    if (tv_request_decode(calls[i].kind, body, bytes, &limits, &request, &problem) == 0) {
        printf("ok\n");
        tv_request_finish(&request);
    } else {
        printf("%s %s\n", tv_code_info(problem.code)->name, problem.pointer);
        tv_problem_finish(&problem);
    }
    return 0;
}

int main(void)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t bytes;
    int failed = 0;

    while (!failed && (bytes = getline(&line, &capacity, stdin)) > 1) {
        char *body = strchr(line, ' ');

        if (body == NULL || line[bytes - 1] != '\n') {
            failed = 1;
            break;
        }
        *body++ = '\0';
        failed = answer(line, body, (size_t)(line + bytes - 1 - body));
    }
    free(line);
    return failed;
}
