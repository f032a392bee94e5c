/*
 * access.c - libmicrohttpd's callbacks: one request from its request line to its answer.
 *
 * Runs on the listeners' threads and never blocks: a call that has to wait for the worker suspends
 * its connection, and the completion resumes it. Refusals that come before the body are written at
 * once, and the connection is closed.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "http/conn.h"

#define RETRY_AFTER_S 1

/* Destroy the request's parts that do not outlive it. */
static void request_reset(struct http_conn *conn, int timed_out)
{
    tv_http_stream_end(conn, timed_out);
    if (conn->is_received) {
        tv_stats_add(&conn->http->stats->http_given_up, 1);
        conn->is_received = 0;
    }
    tv_call_destroy(conn->call);
    conn->call = NULL;
    conn->close = 0;
    conn->is_refused = 0;
    atomic_store_explicit(&conn->body_bytes, 0, memory_order_relaxed);
    if (conn->body_capacity > HTTP_BODY_KEPT_BYTES) {
        tv_http_conn_body_free(conn);
    }
    if (conn->uri_capacity > HTTP_URI_KEPT_BYTES) {
        tv_http_conn_uri_free(conn);
    }
}

/* Answer with a problem. While a body is still arriving the answer goes out past libmicrohttpd,
 * which would drop the connection, and the unread bytes would take the answer with them. */
static enum MHD_Result refuse(struct http_conn *conn, struct tv_problem *problem, int body_pending)
{
    conn->close |= body_pending;
    tv_stats_add(&conn->http->stats->http_rejected[problem->code], 1);
    tv_sched_refuse(conn->call, problem);
    if (!body_pending) {
        return tv_http_answer(conn);
    }
    tv_http_answer_raw(conn);
    return MHD_YES;
}

static size_t body_limit(const struct http_conn *conn)
{
    switch (conn->route.body) {
    case HTTP_BODY_SMALL:
        return conn->http->body_bytes;
    case HTTP_BODY_LARGE:
        return conn->http->body_bytes_large;
    case HTTP_BODY_NONE:
        break;
    }
    return 0;
}

/* The Idempotency-Key of a call that takes one. */
static int check_key(struct http_conn *conn, const struct http_headers *headers,
                     struct tv_problem *problem)
{
    enum tv_call_kind kind = conn->route.kind;
    if (headers->keys == 0 ||
        (kind != TV_CALL_CREATE && kind != TV_CALL_FORK && kind != TV_CALL_BATCH)) {
        return 0;
    }
    if (headers->keys > 1 || headers->key[0] == '\0') {
        tv_problem_set(problem, TV_BAD_REQUEST, NULL,
                       "one Idempotency-Key of 1 to %d visible ASCII characters is taken",
                       TV_KEY_BYTES_MAX);
        return -EINVAL;
    }
    memcpy(conn->call->key, headers->key, sizeof headers->key);
    return 0;
}

/* The Last-Event-ID of a stream of events. */
static int check_last_event(struct http_conn *conn, const struct http_headers *headers,
                            struct tv_problem *problem)
{
    struct tv_request *request = &conn->call->request;
    if (headers->last_events == 0 || conn->route.kind != TV_CALL_EVENTS) {
        return 0;
    }
    if (headers->last_events > 1 || headers->last_event < 0) {
        tv_problem_set(problem, TV_BAD_REQUEST, NULL,
                       "one Last-Event-ID is taken: the number of a round, or 0");
        return -EINVAL;
    }
    request->has_last_event = 1;
    request->last_event = headers->last_event;
    return 0;
}

/* Everything that can be said before the body: 0, or -EINVAL with the problem set. */
static int check_head(struct http_conn *conn, const char *method,
                      const struct http_headers *headers, struct tv_problem *problem)
{
    struct tv_request *request = &conn->call->request;
    if (conn->uri_bad) {
        tv_problem_set(problem, TV_BAD_REQUEST, NULL,
                       "the request target is longer than %d bytes or has bytes that none may have",
                       HTTP_URI_BYTES_MAX - 1);
        return -EINVAL;
    }
    if (tv_http_host_check(conn->http->config, headers, problem) != 0) {
        return -EINVAL;
    }
    int rc = tv_http_route(conn->uri, method, conn->admin, &conn->route, request, problem);
    if (rc != 0) { /* what there is, is told to those with a key alone */
        int denied = tv_http_authorize(conn, headers, 0, problem);
        return denied != 0 ? denied : rc;
    }
    conn->body_max = body_limit(conn);
    if (conn->route.body == HTTP_BODY_NONE && headers->has_body) {
        tv_problem_set(problem, TV_BAD_REQUEST, NULL, "this call takes no body");
        return -EINVAL;
    }
    if (conn->route.body != HTTP_BODY_NONE && !headers->is_json) {
        tv_problem_set(problem, TV_MEDIA_TYPE, NULL, "Content-Type must be application/json");
        return -EINVAL;
    }
    if (headers->length > conn->body_max) {
        tv_problem_set(problem, TV_BODY_TOO_LARGE, NULL, "the body may have %zu bytes",
                       conn->body_max);
        return -EINVAL;
    }
    if (tv_http_authorize(conn, headers, 1, problem) != 0 ||
        check_key(conn, headers, problem) != 0 || check_last_event(conn, headers, problem) != 0) {
        return -EINVAL;
    }
    return tv_http_query(conn->uri, &conn->http->limits, request, problem);
}

/* First callback of a request: headers are complete, the body is not read. */
static enum MHD_Result begin(struct http_conn *conn, const char *method, const char *version)
{
    struct http_headers headers;
    struct tv_problem problem;
    conn->call = tv_call_create();
    if (conn->call == NULL) {
        return MHD_NO;
    }
    conn->is_get = strcmp(method, "GET") == 0;
    conn->route.path = TV_STATS_ROUTES - 1;
    conn->is_received = 1;
    tv_stats_add(&conn->http->stats->http_received, 1);
    int rc = tv_http_headers_walk(conn->connection, version, &headers, &problem);
    conn->close = rc != 0; /* after such a request no byte can be trusted to start another */
    if (headers.request_id[0] != '\0') {
        memcpy(conn->call->request_id, headers.request_id, sizeof headers.request_id);
    } else {
        tv_http_request_id(conn->http, conn->call->request_id, sizeof conn->call->request_id);
    }
    tv_log_of(TV_LOG_DEBUG, NULL, conn->call->request_id, "http: request %s: %s %s",
              conn->call->request_id, method, conn->uri_bad ? "?" : conn->uri);
    if (rc == 0) {
        rc = check_head(conn, method, &headers, &problem);
    }
    if (rc == -ENOMEM) {
        return MHD_NO;
    }
    if (rc != 0) {
        conn->close |= problem.code == TV_MEDIA_TYPE || problem.code == TV_BODY_TOO_LARGE;
        if (conn->close || headers.has_body) {
            return refuse(conn, &problem, headers.has_body);
        }
        /* an answer in this first callback would cost the connection: libmicrohttpd closes it */
        tv_stats_add(&conn->http->stats->http_rejected[problem.code], 1);
        tv_sched_refuse(conn->call, &problem);
        conn->is_refused = 1;
    }
    return tv_http_conn_enter(conn, HTTP_BODY) == 0 ? MHD_YES : MHD_NO;
}

static enum MHD_Result take_body(struct http_conn *conn, const char *data, size_t bytes)
{
    struct tv_problem problem;
    int rc = tv_http_conn_append(conn, data, bytes);
    if (rc == 0) {
        return MHD_YES;
    }
    if (rc == -EMSGSIZE) {
        tv_problem_set(&problem, TV_BODY_TOO_LARGE, NULL, "the body may have %zu bytes",
                       conn->body_max);
    } else {
        tv_problem_set(&problem, TV_OVERLOADED, NULL, "no memory for one more body");
        problem.retry_after_s = RETRY_AFTER_S;
    }
    return refuse(conn, &problem, 1);
}

/* Completion, from any thread. After the resume the connection belongs to its listener again. */
static void call_done(struct tv_call *call)
{
    struct http_conn *conn = call->owner;
    /* acq_rel: the reply is written before, and read after, the exchange. */
    if (atomic_exchange_explicit(&conn->call_state, HTTP_CALL_DONE, memory_order_acq_rel) ==
        HTTP_CALL_PARKED) {
        MHD_resume_connection(conn->connection);
    }
}

/* Hand the call down unless the daemon is closing: 0 and 1 as tv_sched_submit; the refusal of a
 * closing daemon is a completed call too. */
static int submit(struct http_conn *conn)
{
    struct tv_http *http = conn->http;
    int rc = 0;
    if (conn->call->request.kind == TV_CALL_PAGE) {
        tv_http_page(conn->call);
        return 0;
    }
    if (conn->call->request.kind == TV_CALL_METRICS) {
        tv_http_gauges_set(http);
    }
    (void)atomic_fetch_add(&http->submitting, 1);
    if (atomic_load(&http->closed)) {
        struct tv_problem problem;
        tv_problem_set(&problem, TV_DRAINING, NULL, "the daemon is stopping");
        problem.retry_after_s = RETRY_AFTER_S;
        conn->close = 1;
        tv_sched_refuse(conn->call, &problem);
    } else {
        rc = tv_sched_submit(http->sched, conn->call);
    }
    (void)atomic_fetch_sub(&http->submitting, 1);
    return rc;
}

static enum MHD_Result run_call(struct http_conn *conn)
{
    conn->call->done = call_done;
    conn->call->owner = conn;
    conn->call->received_us = tv_clock_us();
    atomic_store_explicit(&conn->call_state, HTTP_CALL_RUNNING, memory_order_relaxed);
    if (tv_http_conn_enter(conn, HTTP_WAITING) != 0) {
        return MHD_NO;
    }
    if (submit(conn) == 0 ||
        atomic_load_explicit(&conn->call_state, memory_order_acquire) == HTTP_CALL_DONE) {
        return tv_http_answer(conn);
    }
    MHD_suspend_connection(conn->connection);
    if (atomic_exchange_explicit(&conn->call_state, HTTP_CALL_PARKED, memory_order_acq_rel) ==
        HTTP_CALL_DONE) {
        atomic_store_explicit(&conn->call_state, HTTP_CALL_DONE, memory_order_relaxed);
        MHD_resume_connection(conn->connection);
    }
    return MHD_YES;
}

/* The body is complete: decode it and hand the call down. */
static enum MHD_Result finish_body(struct http_conn *conn)
{
    struct tv_call *call = conn->call;
    struct tv_problem problem;
    if (conn->route.body != HTTP_BODY_NONE) {
        char session[sizeof call->request.session];
        size_t bytes = atomic_load_explicit(&conn->body_bytes, memory_order_relaxed);
        int64_t start_us = tv_clock_us();
        memcpy(session, call->request.session, sizeof session);
        tv_request_finish(&call->request);
        int rc = tv_request_decode(conn->route.kind, bytes == 0 ? "" : conn->body, bytes,
                                   &conn->http->limits, &call->request, &problem);
        if (rc == 0 && session[0] != '\0') {
            memcpy(call->request.session, session, sizeof session);
        }
        if (rc == 0) {
            rc = tv_http_query(conn->uri, &conn->http->limits, &call->request, &problem);
        }
        if (rc == 0 && conn->route.kind == TV_CALL_VERIFY) {
            tv_stats_observe(&conn->http->stats->stages[TV_STATS_PARSE], &tv_stats_seconds,
                             (double)(tv_clock_us() - start_us) * 1e-6);
        }
        if (rc == -ENOMEM) {
            tv_problem_set(&problem, TV_OVERLOADED, NULL, "no memory for this request");
            problem.retry_after_s = RETRY_AFTER_S;
        }
        if (rc != 0) {
            /* Text that is no JSON may be framing that two parsers read differently: nothing behind
             * it is taken for a request. */
            conn->close |= problem.code == TV_BAD_JSON;
            return refuse(conn, &problem, 0);
        }
    }
    return run_call(conn);
}

void *tv_http_uri(void *context, const char *uri, struct MHD_Connection *connection)
{
    (void)context; /* the connection knows its listener */
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct http_conn *conn = info == NULL ? NULL : info->socket_context;
    if (conn == NULL || tv_http_conn_uri(conn, uri) != 0) {
        return NULL; /* tv_http_access closes the connection */
    }
    /* the clock's cut is seen by the read that follows */
    (void)tv_http_conn_enter(conn, HTTP_HEADERS);
    return conn;
}

enum MHD_Result tv_http_access(void *context, struct MHD_Connection *connection, const char *url,
                               const char *method, const char *version, const char *upload,
                               size_t *upload_bytes, void **request)
{
    (void)context; /* the connection knows its listener */
    (void)connection;
    (void)url; /* tv_http_uri keeps the undecoded target */
    struct http_conn *conn = *request;
    if (conn == NULL) {
        return MHD_NO;
    }
    switch (conn->phase) {
    case HTTP_IDLE:
    case HTTP_HEADERS:
        return begin(conn, method, version);
    case HTTP_BODY:
        if (*upload_bytes > 0) {
            size_t bytes = *upload_bytes;
            *upload_bytes = 0;
            return take_body(conn, upload, bytes);
        }
        return conn->is_refused ? tv_http_answer(conn) : finish_body(conn);
    case HTTP_REFUSED:
        if (*upload_bytes > 0) {
            *upload_bytes = 0;
            return MHD_YES;
        }
        return MHD_NO;
    case HTTP_WAITING:
        return tv_http_answer(conn);
    case HTTP_WRITING:
    case HTTP_STREAMING:
        break;
    }
    return MHD_NO;
}

void tv_http_completed(void *context, struct MHD_Connection *connection, void **request,
                       enum MHD_RequestTerminationCode code)
{
    (void)context; /* the connection knows its listener */
    (void)connection;
    struct http_conn *conn = *request;
    if (conn != NULL) {
        /* the phase first: from then on the watch thread does not look at the call */
        (void)tv_http_conn_enter(conn, HTTP_IDLE);
        request_reset(conn, code == MHD_REQUEST_TERMINATED_TIMEOUT_REACHED);
        *request = NULL;
    }
}

void tv_http_connection(void *context, struct MHD_Connection *connection, void **socket_context,
                        enum MHD_ConnectionNotificationCode code)
{
    struct http_listener *listener = context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        (void)atomic_fetch_add(&listener->begun, 1);
        *socket_context =
            tv_http_conn_create(listener->http, connection, listener == &listener->http->admin);
        return;
    }
    tv_http_conn_destroy(*socket_context);
    *socket_context = NULL;
    (void)atomic_fetch_add(&listener->ended, 1);
}
