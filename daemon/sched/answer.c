/*
 * answer.c - calls on a session that need no device: state, list, delete, renew, rounds, tensor.
 *
 * Answers on the caller's thread; only GET rounds/{seq} with wait_ms may wait, on the round's job.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/digest.h"
#include "sched/job.h"

static void answer_list(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_session_state *states = NULL;
    struct tv_buf body;
    int32_t count = 0;
    tv_sched_lock(sched);
    int rc = tv_sessions_list(&sched->table, call->principal, tv_clock_us(), &states, &count);
    tv_sched_unlock(sched);
    if (rc != 0) {
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "no memory for the list");
        return;
    }
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_session_list(&body, states, count);
    free(states);
    tv_sched_reply_set(call, 200, &body);
}

static void answer_state(struct tv_session *session, struct tv_call *call)
{
    struct tv_session_state state;
    struct tv_buf body;
    int32_t tail_from = -1;
    if (call->request.kind == TV_CALL_STATE && call->request.tail > 0) {
        tail_from = session->len > call->request.tail ? session->len - call->request.tail : 0;
    }
    if (tv_session_view(session, tail_from, &state) != 0) {
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "no memory for the tail");
        return;
    }
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_session_state(&body, &state);
    free(state.tail);
    tv_sched_reply_set(call, 200, &body);
}

/* 1: the call waits for the running round; 0: answered. */
static int answer_round(struct tv_session *session, struct tv_call *call)
{
    const struct tv_request *request = &call->request;
    const struct tv_session_kept *kept = tv_session_kept_of(session, request->seq);
    struct tv_problem problem;
    if (kept != NULL) {
        tv_sched_reply_replay(call, kept->body, kept->body_bytes);
        return 0;
    }
    int behind = session->behind != NULL && request->seq == session->behind_seq;
    if (behind || (session->running_seq > 0 && request->seq == session->running_seq)) {
        if (request->wait_ms > 0 && !tv_sched_is_gone(call)) {
            struct job *running = behind ? session->behind : session->operation;
            if (tv_sched_waiters_room(running->watchers, &problem) != 0) {
                tv_sched_refuse(call, &problem);
                return 0;
            }
            call->next = running->watchers;
            running->watchers = call;
            return 1;
        }
        struct tv_buf body;
        tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
        tv_encode_running(&body, request->seq);
        tv_sched_reply_set(call, 202, &body);
        return 0;
    }
    if (request->seq >= session->next_seq || request->seq < 1) {
        tv_problem_set(&problem, TV_ROUND_NOT_FOUND, NULL, "no round has seq %d", request->seq);
    } else {
        tv_problem_set(&problem, TV_ROUND_EVICTED, NULL,
                       "the answer of seq %d is no longer kept; next is %d", request->seq,
                       session->next_seq);
        tv_session_explain(session, session->len, &problem);
    }
    tv_sched_refuse(call, &problem);
    return 0;
}

/* Where in the kept rows is node `node`? -1: it was not asked for. */
static int32_t fetch_row(const struct tv_session_fetch *fetch, int32_t node)
{
    for (int32_t i = 0; i < fetch->row_count; i++) {
        if (fetch->rows[i] == node) {
            return i;
        }
    }
    return -1;
}

/* The nodes of a row set, as a list and its length. */
static int32_t fetch_nodes(const struct tv_session_fetch *fetch, const struct tv_request *request,
                           const int32_t **ret_nodes)
{
    *ret_nodes = fetch->rows;
    if (!request->has_tensor_rows) {
        return fetch->row_count;
    }
    switch (request->tensor_rows.kind) {
    case TV_ROWS_PATH:
        *ret_nodes = fetch->path;
        return fetch->path_count;
    case TV_ROWS_STOP:
        *ret_nodes = fetch->path + fetch->path_count - 1;
        return 1;
    case TV_ROWS_LIST:
        *ret_nodes = request->tensor_rows.nodes;
        return request->tensor_rows.count;
    case TV_ROWS_ALL:
        break;
    }
    *ret_nodes = NULL; /* every node in order */
    return fetch->node_count;
}

static void tensor_etag(struct tv_reply *reply)
{
    struct tv_sha256 hash;
    uint8_t sum[32];
    tv_sha256_init(&hash);
    tv_sha256_update(&hash, reply->body.data, reply->body.bytes);
    tv_sha256_finish(&hash, sum);
    reply->etag[0] = '"';
    for (int i = 0; i < 32; i++) {
        reply->etag[1 + 2 * i] = "0123456789abcdef"[sum[i] >> 4];
        reply->etag[2 + 2 * i] = "0123456789abcdef"[sum[i] & 15];
    }
    reply->etag[65] = '"';
    reply->etag[66] = '\0';
}

/* "rows,dim", behind the number of planes where there are any. */
static void tensor_shape(const struct tv_session_fetch *fetch, int32_t count,
                         struct tv_reply *reply)
{
    char planes[16] = "";
    if (fetch->planes > 0) {
        (void)snprintf(planes, sizeof planes, "%d,", fetch->planes);
    }
    (void)snprintf(reply->tensor_shape, sizeof reply->tensor_shape, "%s%d,%d", planes, count,
                   fetch->dim);
}

static void fetch_serve(const struct tv_session_fetch *fetch, struct tv_call *call)
{
    const struct tv_request *request = &call->request;
    enum tv_tensor_dtype dtype = request->has_tensor_dtype ? request->tensor_dtype : fetch->dtype;
    const int32_t *nodes = NULL;
    int32_t count = fetch_nodes(fetch, request, &nodes);
    int32_t planes = fetch->planes > 0 ? fetch->planes : 1;
    size_t dim = (size_t)fetch->dim;
    struct tv_buf body;
    if (!request->tensor_hidden && dtype == TV_TENSOR_FP8_E4M3) {
        tv_sched_reply_refuse(call, TV_BAD_REQUEST, NULL,
                              "query parameter dtype: logits are f32, bf16 or f16");
        return;
    }
    tv_buf_init(&body, (size_t)planes * (size_t)count * dim * sizeof(float) + 1);
    for (int32_t i = 0; i < planes * count; i++) {
        int32_t at = i % count;
        int32_t row = fetch_row(fetch, nodes != NULL ? nodes[at] : at);
        if (row < 0) {
            tv_buf_finish(&body);
            tv_sched_reply_refuse(call, TV_WRONG_VALUE, NULL,
                                  "rows: a node whose rows were not asked for");
            return;
        }
        size_t from = (size_t)(i / count) * (size_t)fetch->row_count + (size_t)row;
        tv_encode_tensor(&body, fetch->data + from * dim, fetch->dim, dtype);
    }
    tv_sched_reply_set(call, 200, &body);
    if (call->reply.http_status == 200) {
        struct tv_reply *reply = &call->reply;
        reply->content_type = "application/octet-stream";
        tensor_shape(fetch, count, reply);
        (void)snprintf(reply->tensor_dtype, sizeof reply->tensor_dtype, "%s",
                       tv_tensor_dtype_name(dtype));
        tensor_etag(reply);
    }
}

/* The kept rows of that round, referenced, or NULL with the call refused. */
static struct tv_session_fetch *fetch_find(const struct tv_session *session, struct tv_call *call)
{
    int32_t seq = call->request.seq;
    const struct tv_session_kept *kept = tv_session_kept_of(session, seq);
    struct tv_problem problem;
    struct tv_session_fetch *fetch = NULL;
    if (kept != NULL) {
        fetch = call->request.tensor_hidden ? kept->hidden : kept->fetch;
    }
    if (fetch != NULL) {
        return tv_session_fetch_ref(fetch);
    }
    if (seq >= 1 && seq < session->next_seq) {
        tv_problem_set(&problem, TV_ROUND_EVICTED, NULL, "no tensor of seq %d is kept", seq);
        tv_session_explain(session, session->len, &problem);
    } else {
        tv_problem_set(&problem, TV_ROUND_NOT_FOUND, NULL, "no round has seq %d", seq);
    }
    tv_sched_refuse(call, &problem);
    return NULL;
}

/* With the lock: an existing session's answer. Returns as tv_sched_submit; *ret_fetch: what is to
 * be served once the lock is given back. */
static int answer_found(struct tv_sched *sched, struct tv_session *session, struct tv_call *call,
                        struct tv_session_fetch **ret_fetch)
{
    enum tv_call_kind kind = call->request.kind;
    int waits = 0, served = 1;
    if (kind == TV_CALL_EVENTS) {
        served = tv_sched_events_open(session, call) == 0;
    } else if (kind == TV_CALL_ROUND) {
        waits = answer_round(session, call);
        served = waits || call->reply.http_status < 400;
    } else if (kind == TV_CALL_TENSOR) {
        *ret_fetch = fetch_find(session, call);
        served = *ret_fetch != NULL;
    }
    if (served) { /* a refusal keeps no session alive */
        tv_session_renew(session, kind == TV_CALL_RENEW ? call->request.lease_s : 0, tv_clock_us());
    }
    if (kind == TV_CALL_STATE || kind == TV_CALL_RENEW) {
        answer_state(session, call); /* after the renewal, which it shows */
    }
    sched->in_flight += waits;
    if (waits) { /* the worker shall know of the new wait's end */
        tv_sched_ring(sched);
    }
    return waits;
}

/* Idempotent; unknown and foreign ids are no different. A round under way finishes first. */
static void answer_delete(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_session *session = NULL;
    struct tv_call *calls = NULL;
    struct tv_buf body;
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_sched_lock(sched);
    enum tv_code code = tv_sessions_find(&sched->table, call->request.session, call->principal,
                                         tv_clock_us(), &session);
    if (code == TV_OK) {
        struct job *job = session->operation;
        tv_sessions_remove(&sched->table, session, TV_SESSION_DELETED);
        if (session->behind != NULL) {
            tv_sched_job_drop(sched, session->behind, TV_SESSION_NOT_FOUND,
                              "the session was deleted", &calls);
        }
        if (session->busy && job->queued) {
            tv_sched_job_drop(sched, job, TV_SESSION_NOT_FOUND, "the session was deleted", &calls);
        }
        tv_sched_ring(sched); /* to close its context */
    }
    tv_sched_unlock(sched);
    tv_sched_calls_done(sched, calls);
    tv_sched_reply_set(call, 204, &body);
}

int tv_sched_answer_session(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_session_fetch *fetch = NULL;
    struct tv_session *session = NULL;
    struct tv_problem problem = {0};
    int waits = 0;
    if (call->request.kind == TV_CALL_LIST) {
        answer_list(sched, call);
        return 0;
    }
    if (call->request.kind == TV_CALL_DELETE) {
        answer_delete(sched, call);
        return 0;
    }
    tv_sched_lock(sched);
    int rc = tv_sched_session_of(sched, call, &session, &problem);
    if (rc == 0) {
        waits = answer_found(sched, session, call, &fetch);
    }
    tv_sched_unlock(sched);
    if (rc != 0) {
        tv_sched_refuse(call, &problem);
    }
    if (fetch != NULL) {
        fetch_serve(fetch, call);
        tv_session_fetch_unref(fetch);
    }
    return waits;
}
