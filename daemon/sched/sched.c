/*
 * sched.c - the scheduler's outside: start and stop, submit, drain, and filling replies.
 *
 * Decides nothing about a session; that is session/. Never calls done while it holds the lock.
 */
#include "sched/sched.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/wait.h"
#include "sched/job.h"

#define LINGER_US         2000 /* a client on the same network is back by then */
#define LINGER_PROCESSORS 4    /* with fewer the client lacks the one that looks on */

struct tv_call *tv_call_create(void)
{
    struct tv_call *call = calloc(1, sizeof *call);
    if (call != NULL) {
        atomic_init(&call->cancelled, 0);
    }
    return call;
}

void tv_call_destroy(struct tv_call *call)
{
    if (call != NULL) {
        tv_request_finish(&call->request);
        tv_buf_finish(&call->reply.body);
        tv_sched_events_leave(&call->reply);
        tv_sched_batch_destroy(call->batch);
        free(call);
    }
}

/* Neither can fail: an ordinary mutex that outlives every thread. */
void tv_sched_lock(struct tv_sched *sched)
{
    (void)pthread_mutex_lock(&sched->table.lock);
}

void tv_sched_unlock(struct tv_sched *sched)
{
    (void)pthread_mutex_unlock(&sched->table.lock);
}

void tv_sched_ring(struct tv_sched *sched)
{
    (void)atomic_fetch_add_explicit(&sched->rings, 1, memory_order_relaxed);
    (void)pthread_cond_signal(&sched->wake); /* cannot fail */
}

void tv_sched_job_list_init(struct job_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

void tv_sched_job_list_push(struct job_list *list, struct job *job)
{
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
}

void tv_sched_job_list_remove(struct job_list *list, struct job *job)
{
    struct job **link = &list->first;
    while (*link != job) {
        link = &(*link)->next;
    }
    *link = job->next;
    if (job->next == NULL) {
        list->last = link;
    }
    job->next = NULL;
}

void tv_sched_job_list_insert(struct job_list *list, struct job *job)
{
    struct job **link = &list->first;
    while (*link != NULL && (*link)->call->received_us <= job->call->received_us) {
        link = &(*link)->next;
    }
    job->next = *link;
    *link = job;
    if (job->next == NULL) {
        list->last = &job->next;
    }
}

void tv_sched_reply_set(struct tv_call *call, int http_status, struct tv_buf *body)
{
    if (body->failed != 0) {
        tv_buf_finish(body);
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "the answer could not be written");
        return;
    }
    tv_buf_finish(&call->reply.body);
    call->reply.http_status = http_status;
    call->reply.content_type = "application/json";
    call->reply.body = *body;
    memset(body, 0, sizeof *body);
}

/* Hand over a copy of what was answered before. A problem would deny what was done: without memory
 * there is no answer, and the retry gets one. */
static void reply_copy(struct tv_call *call, int http_status, struct tv_buf *copy)
{
    if (copy->failed != 0) {
        tv_buf_finish(copy);
        tv_buf_finish(&call->reply.body);
        call->reply.http_status = 500;
        call->reply.body.failed = -ENOMEM;
        return;
    }
    tv_sched_reply_set(call, http_status, copy);
}

void tv_sched_reply_stored(struct tv_call *call, int http_status, const char *body, size_t bytes)
{
    struct tv_buf copy;
    tv_buf_init(&copy, bytes + 1);
    tv_buf_append(&copy, body, bytes);
    reply_copy(call, http_status, &copy);
}

void tv_sched_reply_replay(struct tv_call *call, const char *body, size_t bytes)
{
    struct tv_buf copy;
    tv_buf_init(&copy, bytes + 1);
    tv_buf_append(&copy, body, bytes);
    if (copy.failed == 0) {
        copy.failed = tv_encode_mark_replayed(&copy);
    }
    reply_copy(call, 200, &copy);
}

void tv_sched_reply_made(struct tv_call *call, const char *session)
{
    if (call->reply.http_status == 201) {
        (void)snprintf(call->reply.session, sizeof call->reply.session, "%s", session);
    }
}

void tv_sched_reply_refuse(struct tv_call *call, enum tv_code code, const char *pointer,
                           const char *text)
{
    struct tv_problem problem;
    tv_problem_set(&problem, code, pointer, "%s", text);
    tv_sched_refuse(call, &problem);
}

void tv_sched_refuse(struct tv_call *call, struct tv_problem *problem)
{
    struct tv_reply *reply = &call->reply;
    tv_buf_finish(&reply->body);
    tv_sched_events_leave(reply);
    memset(reply, 0, sizeof *reply);
    tv_buf_init(&reply->body, TV_SCHED_REPLY_BYTES);
    tv_encode_problem(&reply->body, problem, call->request_id, NULL);
    if (reply->body.failed != 0 && problem->state != NULL) { /* the code alone takes less room */
        tv_problem_finish(problem);
        tv_buf_finish(&reply->body);
        tv_buf_init(&reply->body, TV_SCHED_REPLY_BYTES);
        tv_encode_problem(&reply->body, problem, call->request_id, NULL);
    }
    reply->http_status = tv_code_info(problem->code)->http_status;
    reply->code = problem->code;
    reply->content_type = "application/problem+json";
    reply->allow = problem->allow;
    reply->retry_after_s = problem->retry_after_s;
    reply->rate_name = problem->rate_name;
    reply->rate_quota = problem->rate_quota;
    reply->rate_left = problem->rate_left;
    if (reply->retry_after_s == 0 && (reply->http_status == 429 || reply->http_status == 503)) {
        reply->retry_after_s = 1;
    }
    tv_problem_finish(problem);
}

void tv_sched_calls_done(struct tv_sched *sched, struct tv_call *calls)
{
    while (calls != NULL) {
        struct tv_call *call = calls;
        calls = call->next;
        call->next = NULL;
        tv_sched_lock(sched);
        sched->in_flight--;
        tv_sched_unlock(sched);
        call->done(call); /* may free the call */
    }
}

int tv_sched_submit(struct tv_sched *sched, struct tv_call *call)
{
    switch (call->request.kind) {
    case TV_CALL_LIST:
    case TV_CALL_STATE:
    case TV_CALL_DELETE:
    case TV_CALL_RENEW:
    case TV_CALL_ROUND:
    case TV_CALL_TENSOR:
    case TV_CALL_EVENTS:
        return tv_sched_answer_session(sched, call);
    case TV_CALL_PARITY_TOTALS:
    case TV_CALL_PARITY_VIOLATION:
    case TV_CALL_MODEL:
    case TV_CALL_METRICS:
    case TV_CALL_HEALTH:
    case TV_CALL_READY:
    case TV_CALL_STATUS:
    case TV_CALL_DRAIN:
    case TV_CALL_UNDRAIN:
        return tv_sched_answer_info(sched, call);
    case TV_CALL_PAGE: /* the listeners have it */
        tv_sched_reply_refuse(call, TV_NOT_FOUND, NULL, "no such page");
        return 0;
    case TV_CALL_BATCH:
        return tv_sched_batch_submit(sched, call);
    case TV_CALL_CREATE:
    case TV_CALL_VERIFY:
    case TV_CALL_EXTEND:
    case TV_CALL_DECODE:
    case TV_CALL_COMMIT:
    case TV_CALL_ROLLBACK:
    case TV_CALL_FORK:
    case TV_CALL_ONESHOT:
    case TV_CALL_SCORE:
    case TV_CALL_PARITY:
        break;
    }
    return tv_sched_admit(sched, call);
}

int tv_sched_call_unlink(struct tv_call **list, const struct tv_call *call)
{
    for (struct tv_call **link = list; *link != NULL; link = &(*link)->next) {
        if (*link == call) {
            *link = call->next;
            return 1;
        }
    }
    return 0;
}

void tv_sched_drain(struct tv_sched *sched, int draining, int refuse)
{
    tv_sched_lock(sched);
    sched->draining = draining;
    sched->refusing = draining && refuse;
    int ends = sched->refusing || sched->lost; /* a device stays lost */
    atomic_store_explicit(&sched->parity_stop, ends, memory_order_relaxed);
    tv_sched_ring(sched); /* it may wait for an oracle */
    tv_sched_unlock(sched);
}

void tv_sched_http_library_set(struct tv_sched *sched, const char *text)
{
    sched->http_library = text;
}

int32_t tv_sched_in_flight(struct tv_sched *sched)
{
    tv_sched_lock(sched);
    int32_t count = sched->in_flight;
    tv_sched_unlock(sched);
    return count;
}

const struct tv_request_limits *tv_sched_limits(const struct tv_sched *sched)
{
    return &sched->limits;
}

/* Unset: short where progress within a call is counted; a whole call may take its time. */
static int64_t launch_us_max(const struct tv_config *config, const struct tv_engine *engine)
{
    uint64_t steps;
    int64_t limit_s = config->launch_max_s;
    if (limit_s == 0) {
        int counted = engine->ops->progress != NULL && engine->ops->progress(engine, &steps);
        limit_s = counted ? TV_SCHED_STALL_S : TV_SCHED_CALL_S;
    }
    return limit_s * 1000000;
}

static void limits_settle(struct tv_sched *sched)
{
    const struct tv_config *config = sched->config;
    int32_t nodes_max = config->max_nodes;
    if (nodes_max > sched->engine->nodes_max) {
        nodes_max = sched->engine->nodes_max;
    }
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    sched->limits = (struct tv_request_limits){
        .tree = {.nodes_max = nodes_max,
                 .depth_max = config->max_depth,
                 .vocab = sched->engine->vocab},
        .max_len = sched->engine->max_len,
        .inline_bytes = (size_t)config->inline_bytes,
        .fetch_bytes = (size_t)config->fetch_bytes,
        .hidden_dim = facts.hidden_dim,
        .tap_count = facts.tap_count,
        .project_dim = facts.project_dim,
        .no_logprobs = config->synthetic_acceptance_count > 0,
    };
    for (int32_t i = 0; i < facts.tap_count; i++) {
        sched->limits.taps[i] = facts.taps[i];
    }
    sched->limits_info = (struct tv_limits_info){
        .max_nodes = nodes_max,
        .max_depth = config->max_depth,
        .max_pipeline = TV_PIPELINE_MAX,
        .replay_window = TV_REPLAY_ROUNDS_MAX,
        .body_bytes = config->body_bytes,
        .inline_bytes = config->inline_bytes,
        .fetch_bytes = config->fetch_bytes,
    };
}

void tv_sched_reload(struct tv_sched *sched, struct tv_config *config,
                     const struct tv_config *fresh)
{
    assert(config == sched->config);
    tv_sched_lock(sched);
    tv_config_take(config, fresh);
    sched->table.params.sessions_max = config->max_sessions;
    atomic_store_explicit(&sched->max_sessions, config->max_sessions, memory_order_relaxed);
    tv_sched_unlock(sched);
}

static int conds_make(struct tv_sched *sched)
{
    int rc = tv_wait_init(&sched->wake);
    if (rc == 0) {
        rc = tv_wait_init(&sched->compare);
        if (rc != 0) {
            (void)pthread_cond_destroy(&sched->wake);
        }
    }
    sched->conds_made = rc == 0;
    return rc;
}

/* Not where the worker would take the processor that the next call's thread needs. */
static int64_t linger_for(const struct tv_config *config, int apart)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    int spare = apart || (config->threads > 0 && config->threads <= processors / 2);
    return processors >= LINGER_PROCESSORS && spare ? LINGER_US : 0;
}

static int threads_start(struct tv_sched *sched)
{
    sched->worker_alive = 1;
    int rc = pthread_create(&sched->worker, NULL, tv_sched_worker_main, sched);
    if (rc != 0) {
        return -rc;
    }
    sched->worker_started = 1;
    rc = pthread_create(&sched->comparer, NULL, tv_sched_comparer_main, sched);
    sched->comparer_started = rc == 0;
    return -rc;
}

int tv_sched_create(const struct tv_config *config, struct tv_engine *engine,
                    struct tv_shadow *shadow, struct tv_stats *stats, struct tv_sched **ret_sched)
{
    struct tv_sched *sched = calloc(1, sizeof *sched);
    if (sched == NULL) {
        return -ENOMEM;
    }
    size_t batch = (size_t)engine->requests_max;
    sched->config = config;
    sched->engine = engine;
    sched->shadow = shadow;
    sched->stats = stats;
    sched->snapshot_dir = -1;
    sched->launch_us_max = launch_us_max(config, engine);
    sched->launch_rows = engine->rows_max;
    if (config->launch_rows > 0 && config->launch_rows < engine->rows_max) {
        sched->launch_rows = config->launch_rows;
    }
    tv_sched_share_init(&sched->share);
    atomic_init(&sched->parity_stop, 0);
    atomic_init(&sched->rings, 0);
    atomic_init(&sched->max_sessions, config->max_sessions);
    (void)pthread_mutex_init(&sched->handover, NULL); /* default attributes cannot fail */
    tv_sched_job_list_init(&sched->queue);
    tv_sched_job_list_init(&sched->behind);
    tv_sched_job_list_init(&sched->running);
    limits_settle(sched);
    tv_sched_metrics_init(sched);
    struct tv_sessions_params params = {.sessions_max = config->max_sessions,
                                        .page_size = config->page_size,
                                        .model_max_len = engine->max_len};
    struct tv_engine_facts facts;
    tv_engine_facts(engine, &facts);
    sched->synthetic = facts.synthetic;
    if (config->synthetic_acceptance_count > 0) {
        sched->synthetic |= TV_SYNTHETIC_ACCEPTANCE;
    }
    memcpy(params.model_id, facts.model_id, sizeof params.model_id);
    sched->linger_us = linger_for(config, facts.weights_apart);
    int rc = tv_sessions_init(&sched->table, &params);
    if (rc == 0) {
        rc = tv_sched_trees_init(&sched->recent, sched->limits.tree.nodes_max);
    }
    if (rc == 0) {
        rc = conds_make(sched);
    }
    sched->batch = calloc(batch, sizeof(struct job *));
    sched->batch_in = calloc(batch, sizeof *sched->batch_in);
    sched->batch_out = calloc(batch, sizeof *sched->batch_out);
    sched->batch_shadow = calloc(batch, sizeof(struct tv_shadow_round *));
    if (rc == 0 && (sched->batch == NULL || sched->batch_in == NULL || sched->batch_out == NULL ||
                    sched->batch_shadow == NULL)) {
        rc = -ENOMEM;
    }
    if (rc == 0) {
        engine->between = tv_sched_between;
        engine->between_context = sched;
        rc = threads_start(sched);
    }
    if (rc != 0) {
        tv_sched_destroy(sched);
        return rc;
    }
    *ret_sched = sched;
    return 0;
}

static void contexts_close(struct tv_sched *sched)
{
    struct tv_sessions *table = &sched->table;
    for (size_t i = 0; table->buckets != NULL && i < table->bucket_count; i++) {
        for (struct tv_session *session = table->buckets[i]; session != NULL;
             session = session->next) {
            sched->engine->ops->context_close(sched->engine, session->context);
            session->context = NULL;
        }
    }
}

void tv_sched_end(struct tv_sched *sched)
{
    if (sched->worker_started) {
        struct tv_call *calls = NULL;
        tv_sched_lock(sched);
        sched->draining = sched->refusing = sched->stopping = 1;
        atomic_store_explicit(&sched->parity_stop, 1, memory_order_relaxed);
        struct job *job; /* what waits behind a round first: it is not refused for that one */
        while ((job = sched->behind.first != NULL ? sched->behind.first : sched->queue.first) !=
               NULL) { /* the worker may be in a long launch */
            tv_sched_job_drop(sched, job, tv_sched_end_code(sched), tv_sched_end_text(sched),
                              &calls);
        }
        tv_sched_ring(sched);
        tv_sched_unlock(sched);
        tv_sched_calls_done(sched, calls);
        (void)pthread_join(sched->worker, NULL); /* ours and joinable */
        sched->worker_started = 0;
    }
    if (sched->comparer_started) { /* after the worker: it waits for what it handed over */
        tv_sched_lock(sched);
        sched->compare_stopping = 1;
        (void)pthread_cond_signal(&sched->compare);
        tv_sched_unlock(sched);
        (void)pthread_join(sched->comparer, NULL);
        sched->comparer_started = 0;
    }
    sched->engine->between = NULL;
}

void tv_sched_destroy(struct tv_sched *sched)
{
    if (sched == NULL) {
        return;
    }
    tv_sched_end(sched);
    tv_sched_snapshot_finish(sched);
    contexts_close(sched); /* the worker is gone: nobody else calls the engine */
    tv_sessions_finish(&sched->table);
    tv_sched_accounts_free(sched);
    tv_sched_trees_finish(&sched->recent);
    if (sched->conds_made) {
        (void)pthread_cond_destroy(&sched->wake);
        (void)pthread_cond_destroy(&sched->compare);
    }
    (void)pthread_mutex_destroy(&sched->handover);
    free(sched->batch);
    free(sched->batch_in);
    free(sched->batch_out);
    free(sched->batch_shadow);
    free(sched);
}
