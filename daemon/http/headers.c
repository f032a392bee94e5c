/*
 * headers.c - one walk over the headers of a request, before anything else looks at them.
 *
 * libmicrohttpd 0.9.75 lets pass what two parsers would read differently; here it is refused: two
 * lengths, length with chunked, names that are not tokens, control bytes in values, two Hosts.
 */
#include <errno.h>
#include <string.h>
#include <strings.h>

#include "http/conn.h"

struct walk {
    struct http_headers *headers;
    struct tv_problem *problem;
    int failed, lengths, encodings, hosts, types;
};

/* RFC 9110 section 5.6.2. */
static int is_token(const char *text, size_t bytes)
{
    static const char marks[] = "!#$%&'*+-.^_`|~";
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        int is_alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!is_alnum && (c == '\0' || strchr(marks, c) == NULL)) {
            return 0;
        }
    }
    return bytes > 0;
}

static int has_control(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if ((c < 0x20 && c != '\t') || c == 0x7f) {
            return 1;
        }
    }
    return 0;
}

static int is_named(const char *name, size_t bytes, const char *wanted)
{
    return bytes == strlen(wanted) && strncasecmp(name, wanted, bytes) == 0;
}

/* application/json, alone or with charset=utf-8. */
static int is_json_type(const char *text, size_t bytes)
{
    static const char type[] = "application/json";
    size_t at = sizeof type - 1;
    if (bytes < at || strncasecmp(text, type, at) != 0) {
        return 0;
    }
    while (at < bytes && (text[at] == ' ' || text[at] == '\t')) {
        at++;
    }
    if (at == bytes) {
        return 1;
    }
    if (text[at++] != ';') {
        return 0;
    }
    while (at < bytes && (text[at] == ' ' || text[at] == '\t')) {
        at++;
    }
    return is_named(text + at, bytes - at, "charset=utf-8") ||
           is_named(text + at, bytes - at, "charset=\"utf-8\"");
}

static int read_length(const char *text, size_t bytes, uint64_t *ret)
{
    uint64_t value = 0;
    if (bytes < 1 || bytes > 18) {
        return -EINVAL;
    }
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return -EINVAL;
        }
        value = value * 10 + (uint64_t)(text[i] - '0');
    }
    *ret = value;
    return 0;
}

/* X-Request-Id of the form [A-Za-z0-9._-]{1,64}; anything else is as if absent. */
static void take_request_id(struct http_headers *headers, const char *text, size_t bytes)
{
    if (bytes < 1 || bytes > TV_REQUEST_ID_BYTES_MAX) {
        return;
    }
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        int is_alnum = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        if (!is_alnum && c != '.' && c != '_' && c != '-') {
            return;
        }
    }
    memcpy(headers->request_id, text, bytes);
    headers->request_id[bytes] = '\0';
}

/* Idempotency-Key: 1 to 64 visible ASCII characters; which calls mind, the caller knows. */
static void take_key(struct http_headers *headers, const char *text, size_t bytes)
{
    headers->keys++;
    headers->key[0] = '\0';
    if (bytes < 1 || bytes > TV_KEY_BYTES_MAX) {
        return;
    }
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] <= 0x20 || text[i] >= 0x7f) {
            return;
        }
    }
    memcpy(headers->key, text, bytes);
    headers->key[bytes] = '\0';
}

/* Last-Event-ID: the number of a round as this server writes it. */
static void take_last_event(struct http_headers *headers, const char *text, size_t bytes)
{
    uint64_t value = 0;
    headers->last_events++;
    headers->last_event = -1;
    if (read_length(text, bytes, &value) == 0 && value <= INT32_MAX &&
        (text[0] != '0' || bytes == 1)) {
        headers->last_event = (int32_t)value;
    }
}

/* Authorization: Bearer and a secret; another scheme, or a secret that none can be, is of no use.
 */
static void take_secret(struct http_headers *headers, const char *text, size_t bytes)
{
    static const char scheme[] = "Bearer ";
    size_t at = sizeof scheme - 1;
    headers->credentials++;
    headers->secret_bytes = 0;
    if (bytes <= at || strncasecmp(text, scheme, at) != 0) {
        return;
    }
    while (at < bytes && text[at] == ' ') {
        at++;
    }
    if (bytes - at <= TV_KEY_SECRET_BYTES_MAX) {
        headers->secret = text + at;
        headers->secret_bytes = bytes - at;
    }
}

static void refuse(struct walk *walk, enum tv_code code, const char *detail)
{
    if (!walk->failed) {
        tv_problem_set(walk->problem, code, NULL, "%s", detail);
        walk->failed = 1;
    }
}

static enum MHD_Result visit(void *context, enum MHD_ValueKind kind, const char *name,
                             size_t name_bytes, const char *value, size_t value_bytes)
{
    struct walk *walk = context;
    struct http_headers *headers = walk->headers;
    (void)kind; /* headers alone are asked for */
    if (value == NULL) {
        value = "";
        value_bytes = 0;
    }
    if (!is_token(name, name_bytes)) {
        refuse(walk, TV_BAD_REQUEST, "a header name has bytes that no name may have");
    } else if (has_control(value, value_bytes)) {
        refuse(walk, TV_BAD_REQUEST, "a header value has control bytes");
    } else if (is_named(name, name_bytes, "Content-Length")) {
        walk->lengths++;
        headers->has_length = 1;
        if (read_length(value, value_bytes, &headers->length) != 0) {
            refuse(walk, TV_BAD_REQUEST, "Content-Length is not a number");
        }
    } else if (is_named(name, name_bytes, "Transfer-Encoding")) {
        walk->encodings++;
        headers->is_chunked = 1;
        if (!is_named(value, value_bytes, "chunked")) {
            refuse(walk, TV_BAD_REQUEST, "the only Transfer-Encoding taken is chunked");
        }
    } else if (is_named(name, name_bytes, "Host")) {
        walk->hosts++;
        headers->host = value;
        headers->host_bytes = value_bytes;
    } else if (is_named(name, name_bytes, "Content-Type")) {
        walk->types++;
        headers->is_json = is_json_type(value, value_bytes);
    } else if (is_named(name, name_bytes, "Content-Encoding")) {
        if (!is_named(value, value_bytes, "identity")) {
            refuse(walk, TV_MEDIA_TYPE, "bodies are taken without Content-Encoding");
        }
    } else if (is_named(name, name_bytes, "Expect")) {
        headers->wants_continue = 1;
    } else if (is_named(name, name_bytes, "Authorization")) {
        take_secret(headers, value, value_bytes);
    } else if (is_named(name, name_bytes, "Idempotency-Key")) {
        take_key(headers, value, value_bytes);
    } else if (is_named(name, name_bytes, "Last-Event-ID")) {
        take_last_event(headers, value, value_bytes);
    } else if (is_named(name, name_bytes, "X-Request-Id")) {
        take_request_id(headers, value, value_bytes);
    }
    return MHD_YES;
}

int tv_http_headers_walk(struct MHD_Connection *connection, const char *version,
                         struct http_headers *ret_headers, struct tv_problem *problem)
{
    struct walk walk = {.headers = ret_headers, .problem = problem};
    int is_old = strcmp(version, "HTTP/1.1") != 0;
    memset(ret_headers, 0, sizeof *ret_headers);
    (void)MHD_get_connection_values_n(connection, MHD_HEADER_KIND, visit, &walk);
    if (walk.lengths > 1) {
        refuse(&walk, TV_BAD_REQUEST, "there is more than one Content-Length");
    }
    if (walk.encodings > 1) {
        refuse(&walk, TV_BAD_REQUEST, "there is more than one Transfer-Encoding");
    }
    if (walk.lengths > 0 && walk.encodings > 0) {
        refuse(&walk, TV_BAD_REQUEST, "Content-Length and Transfer-Encoding exclude each other");
    }
    if (walk.encodings > 0 && is_old) {
        refuse(&walk, TV_BAD_REQUEST, "Transfer-Encoding needs HTTP/1.1");
    }
    if (walk.hosts > 1 || (walk.hosts == 0 && !is_old)) {
        refuse(&walk, TV_BAD_REQUEST, "exactly one Host is needed");
    }
    if (ret_headers->credentials > 1) {
        refuse(&walk, TV_BAD_REQUEST, "there is more than one Authorization");
    }
    if (walk.types > 1) {
        refuse(&walk, TV_BAD_REQUEST, "there is more than one Content-Type");
    }
    ret_headers->has_body = ret_headers->is_chunked || ret_headers->length > 0;
    return walk.failed ? -EINVAL : 0;
}
