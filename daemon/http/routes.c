/*
 * routes.c - the table of routes, path parts and the query.
 *
 * Works on the request target as it stood on the wire, so that nothing is decoded twice. Refuses
 * percent-escapes in paths (no path of ours needs one), malformed escapes in the query, and
 * parameters given twice.
 */
#include "http/routes.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "proto/limits.h"

#define QUERY_NAME_BYTES 32
#define QUERY_PARAMS_MAX 8
#define QUERY_BYTES      (TV_QUERY_BYTES_MAX + 1)
#define NO_CALL          (-1)

enum { ON_WORK = 1, ON_ADMIN = 2, ON_BOTH = 3 };

/* One path; '*' stands for one segment. get, post and del are call kinds or NO_CALL. */
struct path_entry {
    const char *pattern, *allow;
    int listeners, get, post, del;
    enum http_body body; /* of POST */
};

#define GET_ONLY  "GET, HEAD"
#define POST_ONLY "POST"

static const struct path_entry paths[] = {
    {"/healthz", GET_ONLY, ON_BOTH, TV_CALL_HEALTH, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/livez", GET_ONLY, ON_BOTH, TV_CALL_HEALTH, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/health", GET_ONLY, ON_BOTH, TV_CALL_HEALTH, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v1/health", GET_ONLY, ON_BOTH, TV_CALL_HEALTH, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v2/health/live", GET_ONLY, ON_BOTH, TV_CALL_HEALTH, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/readyz", GET_ONLY, ON_BOTH, TV_CALL_READY, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v2/health/ready", GET_ONLY, ON_BOTH, TV_CALL_READY, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/metrics", GET_ONLY, ON_BOTH, TV_CALL_METRICS, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/", GET_ONLY, ON_ADMIN, TV_CALL_PAGE, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v1/admin/status", GET_ONLY, ON_ADMIN, TV_CALL_STATUS, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v1/admin/drain", POST_ONLY, ON_ADMIN, NO_CALL, TV_CALL_DRAIN, NO_CALL, HTTP_BODY_NONE},
    {"/v1/admin/undrain", POST_ONLY, ON_ADMIN, NO_CALL, TV_CALL_UNDRAIN, NO_CALL, HTTP_BODY_NONE},
    {"/v1/model", GET_ONLY, ON_BOTH, TV_CALL_MODEL, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v1/parity", "GET, HEAD, POST", ON_BOTH, TV_CALL_PARITY_TOTALS, TV_CALL_PARITY, NO_CALL,
     HTTP_BODY_LARGE},
    {"/v1/parity/violations/*", GET_ONLY, ON_BOTH, TV_CALL_PARITY_VIOLATION, NO_CALL, NO_CALL,
     HTTP_BODY_NONE},
    {"/v1/sessions", "GET, HEAD, POST", ON_WORK, TV_CALL_LIST, TV_CALL_CREATE, NO_CALL,
     HTTP_BODY_LARGE},
    {"/v1/sessions/*", "GET, HEAD, DELETE", ON_WORK, TV_CALL_STATE, NO_CALL, TV_CALL_DELETE,
     HTTP_BODY_NONE},
    {"/v1/sessions/*/verify", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_VERIFY, NO_CALL,
     HTTP_BODY_SMALL},
    {"/v1/sessions/*/extend", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_EXTEND, NO_CALL,
     HTTP_BODY_LARGE},
    {"/v1/sessions/*/decode", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_DECODE, NO_CALL,
     HTTP_BODY_SMALL},
    {"/v1/sessions/*/commit", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_COMMIT, NO_CALL,
     HTTP_BODY_SMALL},
    {"/v1/sessions/*/rollback", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_ROLLBACK, NO_CALL,
     HTTP_BODY_SMALL},
    {"/v1/sessions/*/fork", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_FORK, NO_CALL, HTTP_BODY_SMALL},
    {"/v1/sessions/*/renew", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_RENEW, NO_CALL, HTTP_BODY_SMALL},
    {"/v1/sessions/*/events", GET_ONLY, ON_WORK, TV_CALL_EVENTS, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v1/sessions/*/rounds/*", GET_ONLY, ON_WORK, TV_CALL_ROUND, NO_CALL, NO_CALL, HTTP_BODY_NONE},
    {"/v1/sessions/*/rounds/*/tensor", GET_ONLY, ON_WORK, TV_CALL_TENSOR, NO_CALL, NO_CALL,
     HTTP_BODY_NONE},
    {"/v1/verify", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_ONESHOT, NO_CALL, HTTP_BODY_LARGE},
    {"/v1/verify:batch", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_BATCH, NO_CALL, HTTP_BODY_LARGE},
    {"/v1/score", POST_ONLY, ON_WORK, NO_CALL, TV_CALL_SCORE, NO_CALL, HTTP_BODY_LARGE},
};

_Static_assert(sizeof paths / sizeof paths[0] < TV_STATS_ROUTES, "a place for every path");

size_t tv_http_paths(const char **ret_names, size_t names_max)
{
    size_t count = sizeof paths / sizeof paths[0];
    for (size_t i = 0; i < count && i < names_max; i++) {
        ret_names[i] = paths[i].pattern;
    }
    return count < names_max ? count : names_max;
}

/* A piece of the path that stood where the pattern has '*'. */
struct path_part {
    const char *text;
    size_t bytes;
};

/* 1 when path[0..bytes) has the pattern's form; parts receive what the stars stood for. */
static int path_matches(const char *pattern, const char *path, size_t bytes,
                        struct path_part parts[2])
{
    size_t at = 0;
    int stars = 0;
    for (const char *c = pattern; *c != '\0'; c++) {
        if (*c != '*') {
            if (at == bytes || path[at] != *c) {
                return 0;
            }
            at++;
            continue;
        }
        size_t start = at;
        while (at < bytes && path[at] != '/') {
            at++;
        }
        if (at == start) {
            return 0;
        }
        parts[stars].text = path + start;
        parts[stars++].bytes = at - start;
    }
    return at == bytes;
}

/* A decimal number from 1 to 2^31 - 1 without leading zeros, or 0. */
static int32_t part_number(const struct path_part *part)
{
    int64_t value = 0;
    if (part->bytes < 1 || part->bytes > 10 || part->text[0] == '0') {
        return 0;
    }
    for (size_t i = 0; i < part->bytes; i++) {
        if (part->text[i] < '0' || part->text[i] > '9') {
            return 0;
        }
        value = value * 10 + (part->text[i] - '0');
    }
    return value <= INT32_MAX ? (int32_t)value : 0;
}

/* The stars of the path. A session id of impossible length becomes one that never exists, so that
 * every unknown id is answered alike. */
static int fill_parts(enum tv_call_kind kind, const char *pattern, const struct path_part parts[2],
                      struct tv_request *request, struct tv_problem *problem)
{
    request->kind = kind;
    if (kind == TV_CALL_PARITY_VIOLATION) {
        request->violation = part_number(&parts[0]);
        if (request->violation == 0) {
            tv_problem_set(problem, TV_NOT_FOUND, NULL, "violations are numbered from 1");
            return -EINVAL;
        }
        return 0;
    }
    if (strchr(pattern, '*') == NULL) {
        return 0;
    }
    if (parts[0].bytes < sizeof request->session) {
        memcpy(request->session, parts[0].text, parts[0].bytes);
        request->session[parts[0].bytes] = '\0';
    } else {
        request->session[0] = '?';
        request->session[1] = '\0';
    }
    if (kind == TV_CALL_ROUND || kind == TV_CALL_TENSOR) {
        request->seq = part_number(&parts[1]);
        if (request->seq == 0) {
            tv_problem_set(problem, TV_ROUND_NOT_FOUND, NULL, "rounds are numbered from 1");
            return -EINVAL;
        }
    }
    return 0;
}

int tv_http_route(const char *uri, const char *method, int admin, struct http_route *ret_route,
                  struct tv_request *request, struct tv_problem *problem)
{
    struct path_part parts[2];
    size_t bytes = strcspn(uri, "?");
    const struct path_entry *entry = NULL;
    ret_route->path = TV_STATS_ROUTES - 1;
    if (uri[0] != '/') {
        tv_problem_set(problem, TV_BAD_REQUEST, NULL, "the request target must start with /");
        return -EINVAL;
    }
    for (size_t i = 0; i < sizeof paths / sizeof paths[0] && entry == NULL; i++) {
        if ((paths[i].listeners & (admin ? ON_ADMIN : ON_WORK)) != 0 &&
            path_matches(paths[i].pattern, uri, bytes, parts)) {
            entry = &paths[i];
        }
    }
    if (entry == NULL) {
        tv_problem_set(problem, TV_NOT_FOUND, NULL, "no route %.*s",
                       (int)(bytes < 160 ? bytes : 160), uri);
        return -EINVAL;
    }
    ret_route->path = (size_t)(entry - paths);
    int kind = NO_CALL;
    int is_post = strcmp(method, "POST") == 0;
    if (strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0) {
        kind = entry->get;
    } else if (is_post) {
        kind = entry->post;
    } else if (strcmp(method, "DELETE") == 0) {
        kind = entry->del;
    }
    if (kind == NO_CALL) {
        tv_problem_set(problem, TV_METHOD_NOT_ALLOWED, NULL, "this path takes %s", entry->allow);
        problem->allow = entry->allow;
        return -EINVAL;
    }
    ret_route->kind = (enum tv_call_kind)kind;
    ret_route->body = is_post ? entry->body : HTTP_BODY_NONE;
    return fill_parts(ret_route->kind, entry->pattern, parts, request, problem);
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Percent-decode text[0..bytes) into out. -EINVAL: a bad escape, NUL, or too long. */
static int percent_decode(const char *text, size_t bytes, char *out, size_t out_bytes)
{
    size_t length = 0;
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        if (c == '%') {
            int high = i + 1 < bytes ? hex_value(text[i + 1]) : -1;
            int low = i + 2 < bytes ? hex_value(text[i + 2]) : -1;
            if (high < 0 || low < 0 || (high == 0 && low == 0)) {
                return -EINVAL;
            }
            c = (char)(high * 16 + low);
            i += 2;
        }
        if (length + 1 >= out_bytes) {
            return -EINVAL;
        }
        out[length++] = c;
    }
    out[length] = '\0';
    return 0;
}

int tv_http_query(const char *uri, const struct tv_request_limits *limits,
                  struct tv_request *request, struct tv_problem *problem)
{
    char names[QUERY_PARAMS_MAX][QUERY_NAME_BYTES];
    char value[QUERY_BYTES];
    int count = 0;
    const char *at = strchr(uri, '?');
    if (at == NULL || at[1] == '\0') {
        return 0;
    }
    do {
        at++;
        size_t bytes = strcspn(at, "&");
        size_t name_bytes = strcspn(at, "=&");
        const char *text = name_bytes < bytes ? at + name_bytes + 1 : at + bytes;
        if (count == QUERY_PARAMS_MAX ||
            percent_decode(at, name_bytes, names[count], QUERY_NAME_BYTES) != 0 ||
            percent_decode(text, (size_t)(at + bytes - text), value, sizeof value) != 0) {
            tv_problem_set(problem, TV_BAD_REQUEST, NULL,
                           "the query is too long or has a bad escape");
            return -EINVAL;
        }
        for (int i = 0; i < count; i++) {
            if (strcmp(names[i], names[count]) == 0) {
                tv_problem_set(problem, TV_BAD_REQUEST, NULL, "query parameter %s is given twice",
                               names[i]);
                return -EINVAL;
            }
        }
        int rc = tv_request_query(request, names[count], value, limits, problem);
        if (rc != 0) {
            return rc;
        }
        count++;
        at += bytes;
    } while (*at == '&');
    return 0;
}
