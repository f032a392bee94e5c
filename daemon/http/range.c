/*
 * range.c - one byte range of an answer that has an ETag (RFC 9110 section 14).
 *
 * Refuses nothing: a Range of another form, of several parts, without a byte in the answer, or
 * behind an If-Range that names another content is ignored, as the RFC allows, and the whole
 * answer is sent.
 */
#include <stdint.h>
#include <string.h>
#include <strings.h>

#include "http/conn.h"

/* Digits of text as a number that saturates; *ret_end: what follows them. */
static size_t read_number(const char *text, const char **ret_end)
{
    size_t value = 0;
    for (; *text >= '0' && *text <= '9'; text++) {
        value = value > SIZE_MAX / 10 - 1 ? SIZE_MAX / 10 : value * 10 + (size_t)(*text - '0');
    }
    *ret_end = text;
    return value;
}

int tv_http_range_parse(const char *text, size_t bytes, size_t *ret_first, size_t *ret_count)
{
    static const char unit[] = "bytes=";
    if (strncasecmp(text, unit, sizeof unit - 1) != 0) {
        return 0;
    }
    const char *first_text = text + sizeof unit - 1, *dash, *end;
    size_t first = read_number(first_text, &dash);
    if (*dash != '-') {
        return 0;
    }
    size_t last = read_number(dash + 1, &end);
    int has_first = dash > first_text, has_last = end > dash + 1;
    if (*end != '\0' || (!has_first && !has_last)) {
        return 0;
    }
    if (!has_first) {                            /* the last so many */
        first = last < bytes ? bytes - last : 0; /* of none: behind the end */
        last = SIZE_MAX;
    } else if (!has_last) {
        last = SIZE_MAX;
    }
    if (first >= bytes || last < first) {
        return 0;
    }
    *ret_first = first;
    *ret_count = (last < bytes - 1 ? last : bytes - 1) - first + 1;
    return 1;
}

int tv_http_range(const struct http_conn *conn, size_t *ret_first, size_t *ret_count)
{
    const struct tv_reply *reply = &conn->call->reply;
    if (!conn->is_get || reply->etag[0] == '\0' || reply->http_status != 200) {
        return 0;
    }
    const char *range =
        MHD_lookup_connection_value(conn->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_RANGE);
    const char *same =
        MHD_lookup_connection_value(conn->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_IF_RANGE);
    return range != NULL && (same == NULL || strcmp(same, reply->etag) == 0) &&
           tv_http_range_parse(range, reply->body.bytes, ret_first, ret_count);
}
