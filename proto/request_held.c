/*
 * request_held.c - rounds that are held until the client settles them: hold, commit, commit_prev.
 *
 * Refuses a path that does not start at node 0 or does not ascend, a path without the token behind
 * it, and such a token without a path. Whether it follows the held tree, only the session knows.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/request_fields.h"

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define INT31_MAX       2147483647.0

TV_REQUEST_READER(tv_request_read_commit)
{
    struct tv_request *request = base;
    size_t bytes = 0;
    const char *text = tv_json_string(value, &bytes);

    (void)field; /* writes two members */
    if (text == NULL) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "a string is expected");
    }
    request->hold = bytes == 4 && memcmp(text, "hold", 4) == 0;
    request->commits = bytes == 4 && memcmp(text, "auto", 4) == 0;
    if (!request->hold && !request->commits) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "auto or hold is expected");
    }
    return 0;
}

TV_REQUEST_READER(tv_request_read_path)
{
    struct tv_request *request = base;
    size_t index = 0;
    int32_t i;
    int rc;

    (void)field; /* writes two members */
    if (tv_json_type(value) != TV_JSON_ARRAY) {
        return tv_request_refuse(reader, TV_WRONG_TYPE, "an array of nodes is expected");
    }
    rc = tv_json_int32_array(reader->doc, value, &request->path, &request->path_count, &index);
    if (rc == -EINVAL) {
        return tv_request_refuse_item(reader, TV_WRONG_TYPE, index, "an integer is expected");
    }
    if (rc == -ERANGE) {
        return tv_request_refuse_item(reader, TV_WRONG_VALUE, index, "integer out of range");
    }
    if (rc == 0 && request->path_count > reader->limits->tree.depth_max + 1) {
        return tv_request_refuse(reader, TV_WRONG_VALUE, "%d nodes, but no tree is deeper than %d",
                                 (int)request->path_count, (int)reader->limits->tree.depth_max);
    }
    for (i = 0; rc == 0 && i < request->path_count; i++) {
        if (i == 0 ? request->path[0] != 0 : request->path[i] <= request->path[i - 1]) {
            return tv_request_refuse_item(reader, TV_WRONG_VALUE, (size_t)i,
                                          i == 0 ? "a path starts at node 0"
                                                 : "a path ascends: node %d",
                                          (int)request->path[i]);
        }
    }
    return rc;
}

TV_REQUEST_READER(tv_request_read_next)
{
    struct tv_request *request = base;
    struct tv_request_field ranged = *field;

    ranged.offset = offsetof(struct tv_request, next);
    ranged.high = reader->limits->tree.vocab - 1;
    request->has_next = 1;
    return tv_request_read_int32(reader, value, &ranged, base);
}

TV_REQUEST_READER(tv_request_read_commit_prev)
{
    static const struct tv_request_field fields[] = {
        {"seq", 1, tv_request_read_int32, offsetof(struct tv_request, prev_seq), 1, INT31_MAX},
        {"path", 1, tv_request_read_path, 0, 0, 0},
        {"next", 0, tv_request_read_next, 0, 0, 0},
    };
    struct tv_request *request = base;
    int rc = tv_request_read_object(reader, value, fields, COUNT_OF(fields), request);

    (void)field; /* its own table */
    request->has_prev = 1;
    return rc;
}

int tv_request_check_path(struct tv_request_reader *reader, const char *pointer)
{
    const struct tv_request *request = reader->request;
    char next[48];

    (void)snprintf(next, sizeof next, "%s/next", pointer); /* fits */
    if (request->path_count > 0 && !request->has_next) {
        tv_problem_set(reader->problem, TV_MISSING_FIELD, next,
                       "%s: the token behind the path is required", next);
        return -EINVAL;
    }
    if (request->path_count == 0 && request->has_next) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, next,
                       "%s: an empty path leaves the pending token as it was", next);
        return -EINVAL;
    }
    if (request->has_prev && request->has_if) {
        tv_problem_set(reader->problem, TV_WRONG_VALUE, "/if",
                       "/if: a held round ends as commit_prev says, not as guessed");
        return -EINVAL;
    }
    return 0;
}
