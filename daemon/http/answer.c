/*
 * answer.c - from a completed call to bytes on the socket.
 *
 * Owns which headers an answer has. Two ways out: libmicrohttpd's queue, and a raw write for
 * refusals that must reach a client while it is still sending.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/log.h"
#include "http/conn.h"

#define RAW_HEAD_BYTES 1024
#define CHALLENGE      "Bearer realm=\"treeverify\""

/* The answer is on its way, whatever becomes of it. */
static void count_answer(struct http_conn *conn, int http_status)
{
    struct tv_stats *stats = conn->http->stats;
    enum tv_code code = conn->call->reply.code;
    tv_stats_add(&stats->http_answered[conn->route.path][tv_stats_status_index(http_status)], 1);
    if (code != TV_OK) {
        tv_stats_add(&stats->problems[code], 1);
    }
    conn->is_received = 0;
}

static int add_header(struct MHD_Response *response, const char *name, const char *value)
{
    return MHD_add_response_header(response, name, value) == MHD_YES ? 0 : -ENOMEM;
}

/* draft-ietf-httpapi-ratelimit-headers: nodes have a window of a second, the rest is a stock. */
static int add_rate(struct MHD_Response *response, const struct tv_reply *reply)
{
    char text[96];
    int is_rate = strcmp(reply->rate_name, "nodes") == 0;
    (void)snprintf(text, sizeof text, "\"%s\";q=%lld%s", reply->rate_name,
                   (long long)reply->rate_quota, is_rate ? ";w=1" : "");
    int rc = add_header(response, "RateLimit-Policy", text);
    (void)snprintf(text, sizeof text, "\"%s\";r=%lld;t=%d", reply->rate_name,
                   (long long)reply->rate_left, reply->retry_after_s);
    return rc != 0 ? rc : add_header(response, "RateLimit", text);
}

static int add_headers(struct MHD_Response *response, const struct http_conn *conn)
{
    const struct tv_reply *reply = &conn->call->reply;
    char number[16];
    int rc = add_header(response, "X-Request-Id", conn->call->request_id);
    if (rc == 0 && reply->content_type != NULL && reply->http_status != 204) {
        rc = add_header(response, "Content-Type", reply->content_type);
    }
    if (rc == 0 && reply->allow != NULL) {
        rc = add_header(response, "Allow", reply->allow);
    }
    if (rc == 0 && reply->code == TV_UNAUTHENTICATED) {
        rc = add_header(response, "WWW-Authenticate", CHALLENGE);
    }
    if (rc == 0 && reply->retry_after_s > 0) {
        (void)snprintf(number, sizeof number, "%d", reply->retry_after_s); /* fits */
        rc = add_header(response, "Retry-After", number);
    }
    if (rc == 0 && reply->rate_name != NULL) {
        rc = add_rate(response, reply);
    }
    if (rc == 0 && reply->tensor_shape[0] != '\0') {
        rc = add_header(response, "X-Tensor-Shape", reply->tensor_shape);
    }
    if (rc == 0 && reply->tensor_dtype[0] != '\0') {
        rc = add_header(response, "X-Tensor-Dtype", reply->tensor_dtype);
    }
    if (rc == 0 && reply->etag[0] != '\0') {
        rc = add_header(response, "ETag", reply->etag);
        rc = rc != 0 ? rc : add_header(response, "Accept-Ranges", "bytes");
    }
    if (rc == 0 && conn->call->request.kind == TV_CALL_PAGE && reply->code == TV_OK) {
        rc = tv_http_page_headers(response);
    }
    if (rc == 0 && conn->close) {
        rc = add_header(response, "Connection", "close");
    }
    return rc;
}

static int add_content_range(struct MHD_Response *response, size_t first, size_t count,
                             size_t bytes)
{
    char text[80];
    (void)snprintf(text, sizeof text, "bytes %zu-%zu/%zu", first, first + count - 1, bytes);
    return add_header(response, "Content-Range", text);
}

/* Where the session is that a create or fork has made: proxies learn from it who has it. */
static int add_location(struct MHD_Response *response, const char *session)
{
    char text[64];
    (void)snprintf(text, sizeof text, "/v1/sessions/%s", session); /* fits */
    return add_header(response, "Location", text);
}

/* As tv_http_answer, where the answer goes on. */
static enum MHD_Result answer_stream(struct http_conn *conn)
{
    struct MHD_Response *response = tv_http_stream_response(conn);
    enum MHD_Result result = MHD_NO;
    if (response == NULL) {
        return MHD_NO;
    }
    if (add_headers(response, conn) == 0 &&
        add_header(response, "Content-Type", conn->call->reply.content_type) == 0 &&
        add_header(response, "X-Accel-Buffering", "no") ==
            0 && /* a proxy is to pass on each event */
        tv_http_conn_enter(conn, HTTP_STREAMING) == 0) {
        count_answer(conn, MHD_HTTP_OK);
        result = MHD_queue_response(conn->connection, MHD_HTTP_OK, response);
    }
    MHD_destroy_response(response);
    return result;
}

enum MHD_Result tv_http_answer(struct http_conn *conn)
{
    struct tv_reply *reply = &conn->call->reply;
    if (reply->feed != NULL && tv_http_stream_begin(conn)) {
        return answer_stream(conn);
    }
    if (reply->body.failed != 0 || reply->http_status < 100) {
        tv_log_of(TV_LOG_ERROR, NULL, conn->call->request_id,
                  "http: no answer could be built for request %s", conn->call->request_id);
        return MHD_NO;
    }
    size_t first = 0, count = reply->body.bytes;
    int is_part = tv_http_range(conn, &first, &count);
    /* The bytes are the call's, which lives until libmicrohttpd says the request is over. */
    struct MHD_Response *response = MHD_create_response_from_buffer(
        count, count == 0 ? NULL : reply->body.data + first, MHD_RESPMEM_PERSISTENT);
    if (response == NULL) {
        return MHD_NO;
    }
    enum MHD_Result result = MHD_NO;
    if (add_headers(response, conn) == 0 &&
        (reply->session[0] == '\0' || add_location(response, reply->session) == 0) &&
        (!is_part || add_content_range(response, first, count, reply->body.bytes) == 0) &&
        tv_http_conn_enter(conn, HTTP_WRITING) == 0) {
        unsigned int status = is_part ? 206 : (unsigned int)reply->http_status;
        count_answer(conn, (int)status); /* before a byte of it can be read */
        result = MHD_queue_response(conn->connection, status, response);
    }
    MHD_destroy_response(response);
    return result;
}

void tv_http_request_id(struct tv_http *http, char *ret_id, size_t bytes)
{
    uint64_t n = atomic_fetch_add_explicit(&http->id_next, 1, memory_order_relaxed);
    (void)snprintf(ret_id, bytes, "%016llx-%llu", (unsigned long long)http->id_prefix,
                   (unsigned long long)n);
}

/* Status line, headers and body in two writes; what does not fit into the empty socket buffer at
 * once is lost, and so is the connection. */
static void write_raw(const struct http_conn *conn, const struct tv_call *call)
{
    char head[RAW_HEAD_BYTES], date[40] = "", retry[40] = "", allow[64] = "";
    const struct tv_reply *reply = &call->reply;
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) != NULL) {
        (void)strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", &utc);
    }
    if (reply->retry_after_s > 0) {
        (void)snprintf(retry, sizeof retry, "Retry-After: %d\r\n", reply->retry_after_s);
    }
    if (reply->allow != NULL) {
        (void)snprintf(allow, sizeof allow, "Allow: %s\r\n", reply->allow);
    }
    const char *reason = MHD_get_reason_phrase_for((unsigned int)reply->http_status);
    int length =
        snprintf(head, sizeof head,
                 "HTTP/1.1 %d %s\r\nDate: %s\r\nConnection: close\r\n%s%s%s"
                 "X-Request-Id: %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n",
                 reply->http_status, reason, date, retry, allow,
                 reply->code == TV_UNAUTHENTICATED ? "WWW-Authenticate: " CHALLENGE "\r\n" : "",
                 call->request_id, reply->content_type, reply->body.bytes);
    if (length <= 0 || (size_t)length >= sizeof head || reply->body.failed != 0) {
        return; /* the connection is closed without a word */
    }
    if (conn->tls != NULL) {
        tv_http_tls_write(conn, head, (size_t)length, reply->body.data, reply->body.bytes);
    } else {
        struct iovec parts[2] = {{.iov_base = head, .iov_len = (size_t)length},
                                 {.iov_base = reply->body.data, .iov_len = reply->body.bytes}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        /* a peer that is gone already needs no answer */
        (void)sendmsg(conn->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

void tv_http_answer_raw(struct http_conn *conn)
{
    if (tv_http_conn_enter(conn, HTTP_REFUSED) != 0) {
        return;
    }
    count_answer(conn, conn->call->reply.http_status);
    write_raw(conn, conn->call);
    (void)shutdown(conn->fd, SHUT_WR); /* fails only when the peer is gone */
}

void tv_http_answer_timeout(struct http_conn *conn)
{
    struct tv_problem problem;
    struct tv_call *call = tv_call_create();
    if (call == NULL) {
        return; /* the connection is cut without a word */
    }
    tv_problem_set(&problem, TV_TIMEOUT, NULL, "the request came too slowly");
    tv_stats_add(&conn->http->stats->http_rejected[TV_TIMEOUT], 1);
    tv_http_request_id(conn->http, call->request_id, sizeof call->request_id);
    tv_sched_refuse(call, &problem);
    if (conn->tls == NULL) { /* a TLS session is its listener's alone: it is cut without a word */
        write_raw(conn, call);
    }
    tv_call_destroy(call);
}
