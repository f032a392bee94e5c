/*
 * status.c - the table of error codes and the making of problems.
 *
 * Text that may quote a client's bytes leaves here as printable ASCII (detail) or without control
 * characters (pointer), so neither a log line nor a terminal can be forged with it.
 */
#include "proto/status.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/response.h"

static const struct tv_code_info codes[TV_CODE_COUNT] = {
    [TV_OK] = {"ok", "OK", 200, 0},
    [TV_BAD_REQUEST] = {"bad-request", "Bad request header or query", 400, 0},
    [TV_BAD_JSON] = {"bad-json", "Body is not JSON", 400, 0},
    [TV_UNKNOWN_FIELD] = {"unknown-field", "Unknown field", 400, 0},
    [TV_MISSING_FIELD] = {"missing-field", "Missing field", 400, 0},
    [TV_WRONG_TYPE] = {"wrong-type", "Wrong type", 400, 0},
    [TV_UNAUTHENTICATED] = {"unauthenticated", "Key missing or unknown", 401, 0},
    [TV_FORBIDDEN] = {"forbidden", "Not allowed to this caller", 403, 0},
    [TV_SESSION_NOT_FOUND] = {"session-not-found", "No such session", 404, 0},
    [TV_NOT_FOUND] = {"not-found", "No such resource", 404, 0},
    [TV_ROUND_NOT_FOUND] = {"round-not-found", "No such round", 404, 0},
    [TV_METHOD_NOT_ALLOWED] = {"method-not-allowed", "Method not allowed", 405, 0},
    [TV_TIMEOUT] = {"timeout", "Request arrived too slowly", 408, 1},
    [TV_LENGTH_MISMATCH] = {"length-mismatch", "Committed lengths differ", 409, 0},
    [TV_DIGEST_MISMATCH] = {"digest-mismatch", "Committed tokens differ", 409, 0},
    [TV_PENDING_MISMATCH] = {"pending-mismatch", "Node 0 is not the pending token", 409, 0},
    [TV_SEQ_GAP] = {"seq-gap", "Round number is ahead", 409, 0},
    [TV_EPOCH_CHANGED] = {"epoch-changed", "Server was restarted", 409, 0},
    [TV_SESSION_BUSY] = {"session-busy", "Another operation is in flight", 409, 1},
    [TV_SESSION_FINISHED] = {"session-finished", "Session is finished", 409, 0},
    [TV_ROUND_HELD] = {"round-held", "A held round is not settled", 409, 0},
    [TV_PARITY_MISMATCH] = {"parity-mismatch", "Fast path and oracle differ", 409, 0},
    [TV_SESSION_EXPIRED] = {"session-expired", "Lease is over", 410, 0},
    [TV_ROUND_EVICTED] = {"round-evicted", "Round is no longer kept", 410, 0},
    [TV_BODY_TOO_LARGE] = {"body-too-large", "Body is too large", 413, 0},
    [TV_MEDIA_TYPE] = {"media-type", "Body must be application/json", 415, 0},
    [TV_WRONG_VALUE] = {"wrong-value", "Value outside its range", 422, 0},
    [TV_TREE_INVALID] = {"tree-invalid", "Not a draft tree", 422, 0},
    [TV_TREE_TOO_LARGE] = {"tree-too-large", "Draft tree is over the limit", 422, 0},
    [TV_CONTEXT_FULL] = {"context-full", "Context length is used up", 422, 0},
    [TV_SEQ_REUSED] = {"seq-reused", "Round number or key used for another body", 422, 0},
    [TV_RATE_LIMITED] = {"rate-limited", "Too many requests", 429, 1},
    [TV_WORK_BUDGET] = {"work-budget", "Work budget is used up", 429, 1},
    [TV_KERNEL_FAULT] = {"kernel-fault", "Device failed", 500, 0},
    [TV_INTERNAL] = {"internal", "Internal error", 500, 0},
    [TV_NUMERIC_FAULT] = {"numeric-fault", "A deciding logit is not finite", 500, 0},
    [TV_LOADING] = {"loading", "Model is loading", 503, 1},
    [TV_DRAINING] = {"draining", "Server is draining", 503, 1},
    [TV_OVERLOADED] = {"overloaded", "Queue is full", 503, 1},
    [TV_KV_FULL] = {"kv-full", "Cache pages are used up", 503, 1},
    [TV_PARITY_QUARANTINE] = {"parity-quarantine", "Quarantined after a parity violation", 503, 1},
    [TV_DEADLINE] = {"deadline", "Not started in time", 504, 1},
};

const struct tv_code_info *tv_code_info(enum tv_code code)
{
    assert(code >= TV_OK && code < TV_CODE_COUNT);
    return &codes[code];
}

/* Length of s without a UTF-8 sequence that was cut at its end. */
static size_t whole_characters(const char *s)
{
    size_t bytes = strlen(s), start = bytes;

    while (start > 0 && bytes - start < 4 && ((unsigned char)s[start - 1] & 0xc0) == 0x80) {
        start--;
    }
    if (start > 0 && (unsigned char)s[start - 1] >= 0xc0) {
        unsigned char lead = (unsigned char)s[start - 1];
        size_t want = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
        return bytes - start + 1 < want ? start - 1 : bytes;
    }
    return bytes;
}

static void fill(struct tv_problem *problem, enum tv_code code, const char *format, va_list args)
{
    char *p;

    *problem = (struct tv_problem){.code = code, .node = -1, .pages_needed = -1, .pages_free = -1};
    (void)vsnprintf(problem->detail, sizeof(problem->detail), format, args); /* cut when long */
    for (p = problem->detail; *p != '\0'; p++) {
        if (*p < 0x20 || *p > 0x7e) {
            *p = '?';
        }
    }
}

void tv_problem_set(struct tv_problem *problem, enum tv_code code, const char *pointer,
                    const char *format, ...)
{
    va_list args;
    char *p;

    va_start(args, format);
    fill(problem, code, format, args);
    va_end(args);
    if (pointer == NULL) {
        return;
    }
    (void)snprintf(problem->pointer, sizeof(problem->pointer), "%s", pointer); /* cut when long */
    problem->pointer[whole_characters(problem->pointer)] = '\0';
    for (p = problem->pointer; *p != '\0'; p++) {
        if ((unsigned char)*p < 0x20 || *p == 0x7f) {
            *p = '?';
        }
    }
}

void tv_problem_set_node(struct tv_problem *problem, enum tv_code code, const char *array,
                         int32_t node, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    fill(problem, code, format, args);
    va_end(args);
    (void)snprintf(problem->pointer, sizeof(problem->pointer), "/tree/%s/%d", array, (int)node);
    problem->node = node;
}

void tv_problem_finish(struct tv_problem *problem)
{
    if (problem == NULL) {
        return;
    }
    tv_session_state_destroy(problem->state);
    problem->state = NULL;
}
