/*
 * finish.c - how a job ends: its answer is encoded, stored with the commit under one lock, and only
 * then handed over; or everything is put back as it was and each waiting call is refused.
 */
#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "sched/hint.h"
#include "sched/job.h"

void tv_sched_job_close(struct tv_sched *sched, struct job *job)
{
    if (job->own_context && job->context != NULL) {
        tv_sched_context_close(sched, job->context);
        job->context = NULL;
    }
}

static void append(struct tv_call **list, struct tv_call *calls)
{
    while (*list != NULL) {
        list = &(*list)->next;
    }
    *list = calls;
}

void tv_sched_job_let_go(struct job *job, struct tv_call **ret_calls)
{
    job->call->next = NULL;
    append(ret_calls, job->call);
    append(ret_calls, job->twins);
    append(ret_calls, job->watchers);
    job->call = job->twins = job->watchers = NULL;
}

/* Every call of a job that did not give an answer; the job lets go of them. */
static void refuse_all(struct job *job, const struct tv_problem *problem,
                       struct tv_call **ret_calls)
{
    tv_sched_count_end(job->sched, job->round.kind, job->rule.rule, TV_STATS_FAILED);
    if (problem->code == TV_NUMERIC_FAULT) {
        tv_stats_add(&job->sched->stats->nonfinite, 1);
    }
    job->call->next = job->twins;
    for (struct tv_call *call = job->call; call != NULL; call = call->next) {
        struct tv_problem copy = *problem; /* has no state, so nothing is shared */
        tv_sched_refuse(call, &copy);
    }
    for (struct tv_call *call = job->watchers; call != NULL; call = call->next) {
        tv_sched_reply_refuse(call, TV_ROUND_NOT_FOUND, NULL, "the round failed; its seq is free");
    }
    tv_sched_job_let_go(job, ret_calls);
}

/* A job whose session nobody knows before it succeeds. */
static int creates(const struct job *job)
{
    return job->round.kind == TV_CALL_CREATE || job->round.kind == TV_CALL_FORK;
}

/* With the lock: a fork has used its parent, or could not. */
static void parent_let_go(struct tv_sched *sched, struct job *job)
{
    if (job->parent != NULL) {
        tv_session_renew(job->parent, 0, tv_clock_us());
        tv_session_idle(&sched->table, job->parent);
        job->parent = NULL;
    }
}

/* With the lock: the session is as it was before the job. Calls that this refuses, too: they
 * waited for its round. */
static void session_restore(struct tv_sched *sched, struct job *job, struct tv_call **ret_calls)
{
    struct tv_session *session = job->session;
    if (session == NULL) {
        return;
    }
    if (creates(job)) {
        session->context = job->context; /* NULL, or closed with the gone */
        job->context = NULL;
        tv_sessions_discard(&sched->table, session);
        parent_let_go(sched, job);
    } else { /* a lease counts from the end of what ran on it */
        tv_session_renew(session, 0, tv_clock_us());
        tv_sched_behind_refuse(sched, session, ret_calls);
        tv_session_idle(&sched->table, session);
    }
    job->session = NULL;
}

void tv_sched_job_drop(struct tv_sched *sched, struct job *job, enum tv_code code, const char *text,
                       struct tv_call **ret_calls)
{
    struct tv_problem problem;
    tv_problem_set(&problem, code, NULL, "%s", text);
    if (job->behind) { /* what its session does goes on */
        tv_sched_behind_remove(sched, job);
    } else {
        tv_sched_job_list_remove(&sched->queue, job);
        session_restore(sched, job, ret_calls);
    }
    sched->queue_count--;
    tv_sched_account_refund(job);
    tv_sched_key_release(sched, job);
    refuse_all(job, &problem, ret_calls);
    tv_sched_job_destroy(job);
}

/* Give back the KV of rounds that are not to be committed after all. */
static void context_restore(struct tv_sched *sched, struct job *job)
{
    const struct tv_engine_ops *ops = sched->engine->ops;
    struct tv_session *session = job->session;
    if (session == NULL || job->own_context || sched->lost) { /* nothing can be put back then */
        return;
    }
    if (job->hold) { /* its rows, if it came to have any; giving back cannot fail */
        (void)tv_sched_context_settle(sched, job->context, NULL, 0);
    }
    if (ops->context_len(job->context) == session->len) {
        return;
    }
    int rc = tv_sched_context_truncate(sched, job->context, session->len);
    tv_sched_lost_note(sched, rc);
    if (rc != 0) {
        tv_log_of(TV_LOG_ERROR, session->id, job->call == NULL ? NULL : job->call->request_id,
                  "session %s: KV could not be put back to %d: %s; it is closed", session->id,
                  session->len, strerror(-rc));
        tv_sched_lock(sched);
        if (!session->gone) {
            tv_sessions_remove(&sched->table, session, TV_SESSION_CLOSED);
        }
        tv_sched_unlock(sched);
    }
}

void tv_sched_job_fail(struct tv_sched *sched, struct job *job, enum tv_code code,
                       const char *format, ...)
{
    struct tv_problem problem;
    struct tv_call *calls = NULL;
    char text[200];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args); /* cut text is still text */
    va_end(args);
    tv_problem_set(&problem, code, NULL, "%s", text);
    problem.committed = job->settled;
    if (code == TV_KV_FULL) {
        problem.pages_needed = job->shortage.pages_needed;
        problem.pages_free = job->shortage.pages_free;
    }
    context_restore(sched, job);
    if (!creates(job)) {
        tv_sched_job_close(sched, job);
    }
    tv_sched_lock(sched);
    tv_sched_job_list_remove(&sched->running, job);
    session_restore(sched, job, &calls);
    tv_sched_key_release(sched, job);
    refuse_all(job, &problem, &calls);
    tv_sched_unlock(sched);
    tv_sched_job_destroy(job);
    tv_sched_calls_done(sched, calls);
}

void tv_sched_job_fail_rc(struct tv_sched *sched, struct job *job, int rc)
{
    tv_sched_lost_note(sched, rc);
    switch (rc) {
    case -ENOSPC:
        tv_sched_job_fail(sched, job, TV_KV_FULL, "%lld pages needed, %lld free",
                          (long long)job->shortage.pages_needed,
                          (long long)job->shortage.pages_free);
        break;
    case -EDOM:
        tv_sched_job_fail(sched, job, TV_NUMERIC_FAULT, "a logit that decides is not finite");
        break;
    case -EIO:
    case -ENOTRECOVERABLE:
        tv_sched_job_fail(sched, job, TV_KERNEL_FAULT,
                          rc == -EIO ? "the device failed" : "the device is lost");
        break;
    default:
        tv_sched_job_fail(sched, job, TV_INTERNAL, "the engine refused: %s", strerror(-rc));
        break;
    }
}

int tv_sched_copy_room(const struct tv_sched *sched, size_t together)
{
    return together <= TV_SCHED_REPLY_BYTES + 2 * sched->limits.inline_bytes;
}

/* A copy for one who has only joined; *together: bytes of those before. */
static void reply_joined(struct job *job, struct tv_call *call, int stored, int http_status,
                         const struct tv_buf *body, size_t *together)
{
    if (!tv_sched_copy_room(job->sched, *together)) { /* sent again, the call gets what is kept */
        struct tv_problem problem;
        tv_problem_set(&problem, TV_OVERLOADED, NULL,
                       "done, but too many wait for an answer so large: ask again");
        problem.committed = !job->hold;
        tv_sched_refuse(call, &problem);
        return;
    }
    *together += body->bytes;
    if (stored) {
        tv_sched_reply_stored(call, http_status, body->data, body->bytes);
    } else {
        tv_sched_reply_replay(call, body->data, body->bytes);
    }
}

void tv_sched_job_reply(struct job *job, int http_status, struct tv_buf *body)
{
    size_t together = 0;
    for (struct tv_call *call = job->twins; call != NULL; call = call->next) {
        /* no member of a create's or fork's says whose call it was */
        reply_joined(job, call, creates(job), http_status, body, &together);
        tv_sched_reply_made(call, job->round.session);
    }
    for (struct tv_call *call = job->watchers; call != NULL; call = call->next) {
        reply_joined(job, call, 0, http_status, body, &together);
    }
    tv_sched_reply_set(job->call, http_status, body);
    tv_sched_reply_made(job->call, job->round.session);
}

/* And the calls that the end of its round has settled, after its own. */
static void release(struct tv_sched *sched, struct job *job, struct tv_call *settled)
{
    struct tv_call *calls = NULL;
    tv_sched_job_let_go(job, &calls);
    append(&calls, settled);
    tv_sched_job_destroy(job);
    tv_sched_calls_done(sched, calls);
}

void tv_sched_job_answer(struct tv_sched *sched, struct job *job, int http_status,
                         const char *content_type, struct tv_buf *body)
{
    tv_sched_job_close(sched, job);
    struct tv_call *settled = NULL;
    tv_sched_lock(sched);
    tv_sched_job_list_remove(&sched->running, job);
    session_restore(sched, job, &settled);
    tv_sched_unlock(sched);
    tv_sched_reply_set(job->call, http_status, body);
    if (job->call->reply.http_status == http_status) {
        job->call->reply.content_type = content_type;
    }
    release(sched, job, settled);
}

/* The smallest margin as a difference of logits: scores are logits over the temperature. */
static double gap_of(const struct job *job)
{
    double temperature = (double)job->rule.sampling.temperature;
    int draws = job->rule.rule != TV_RULE_GREEDY && temperature >= 1e-4;
    return (double)job->margin_min * (draws ? temperature : 1.0);
}

int32_t tv_sched_job_lease(const struct job *job)
{
    int32_t lease_s = job->call->request.lease_s;
    for (const struct tv_call *call = job->twins; call != NULL; call = call->next) {
        lease_s = call->request.lease_s > lease_s ? call->request.lease_s : lease_s;
    }
    return lease_s;
}

/* Does the end of this job say how many tokens a verified tree has brought? A held one's commit
 * does, not its proposal. */
static int ends_tree(const struct job *job)
{
    return (job->round.kind == TV_CALL_VERIFY && !job->hold) || job->round.kind == TV_CALL_COMMIT;
}

/* With the lock: what this verify adds to what is known of its session, and what follows. */
static void hint_make(const struct tv_sched *sched, struct job *job)
{
    struct tv_hint *hint = &job->blocks.hint;
    int64_t(*curve)[2] = job->blocks.hint_curve;
    job->drafts = job->session->drafts;
    tv_session_drafts_ran(&job->drafts, job->launch_start_us, job->launch_end_us);
    if (!job->hold) {
        tv_session_drafts_take(&job->drafts, tv_request_tree(&job->call->request, job->alternative),
                               job->round.accepted_nodes, job->round.accepted_count,
                               job->end.finish);
    }
    hint->verify_us_count = tv_sched_curve_read(sched->curve, curve);
    hint->verify_us = (const int64_t(*)[2])curve;
    hint->queue_depth = sched->queue_count;
    hint->max_useful_nodes =
        tv_sched_hint_nodes(&job->drafts, hint->verify_us, hint->verify_us_count,
                            sched->limits.tree.nodes_max, sched->limits.tree.depth_max);
    hint->verify_us_count = job->round.accepted_count > TV_SCHED_HINT_ACCEPTED
                                ? 0
                                : tv_sched_curve_thin(curve, hint->verify_us_count, job->nodes,
                                                      sched->limits.tree.nodes_max);
    job->round.hint = hint;
}

/* What is known of the round only now. */
static void round_complete(struct tv_sched *sched, struct job *job)
{
    const struct tv_session *session = job->session;
    struct tv_round *round = &job->round;
    tv_sched_lock(sched);
    int32_t lease_s = tv_sched_job_lease(job); /* who joins after this adds to it */
    if (round->kind == TV_CALL_VERIFY) {
        hint_make(sched, job);
    }
    tv_sched_unlock(sched);
    memcpy(round->epoch, sched->table.epoch, sizeof round->epoch);
    memcpy(round->digest, job->digest.bytes, sizeof round->digest);
    round->pending = job->end.token;
    round->finish = job->end.finish;
    round->has_margin = job->has_margin;
    round->margin_min = job->margin_min;
    round->near_tie = job->has_margin && gap_of(job) < tv_engine_near_tie(sched->engine);
    round->rule = job->rule.rule;
    round->synthetic = sched->synthetic;
    round->next_seq = round->seq + 1;        /* a create has seq 0 */
    round->committed_len = job->token_count; /* one-shot: the prefix */
    round->accept_len_mean = (double)round->new_count;
    if (session != NULL) {
        int64_t rounds = session->verify_rounds, tokens = session->verify_tokens;
        if (ends_tree(job)) {
            rounds++;
            tokens += round->new_count;
        }
        memcpy(round->session, session->id, sizeof round->session);
        round->committed_len =
            round->kind == TV_CALL_ROLLBACK ? job->call->request.len : session->len + job->staged;
        round->accept_len_mean = rounds > 0 ? (double)tokens / (double)rounds : 0.0;
        round->lease_expires_unix_ms = tv_session_lease_end(session, lease_s);
    }
    round->queue_us = job->queue_us;
    round->gpu_us = job->gpu_us;
    round->batch = job->batch;
    round->total_us = tv_clock_us() - job->call->received_us;
}

/* With the lock: commit the round and keep its answer; then what waited for its end. */
static void session_advance(struct tv_sched *sched, struct job *job, struct tv_session_kept *kept,
                            struct tv_session_held *held, struct tv_call **ret_settled)
{
    struct tv_session *session = job->session;
    int64_t now_us = tv_clock_us();
    tv_sched_held_judge(job, now_us);
    tv_sched_count_round(job);
    tv_sched_trees_note(&sched->recent, job);
    if (job->round.kind == TV_CALL_ROLLBACK) {
        tv_session_rollback(session, job->round.committed_len, &job->digest, job->end.token,
                            job->end.finish);
    } else if (!job->hold) {
        tv_session_commit(session, job->staged, &job->digest, job->end.token, job->end.finish);
    }
    if (creates(job)) {
        int32_t lease_s = tv_sched_job_lease(job);
        session->lease_s = lease_s > 0 ? lease_s : session->lease_s;
        session->context = job->context;
        job->context = NULL;
        tv_sched_key_settle(sched, job, kept);
        tv_session_idle(&sched->table, session);
        tv_sessions_publish(&sched->table, session, now_us);
        parent_let_go(sched, job);
        job->session = NULL;
        return;
    }
    if (job->round.kind == TV_CALL_VERIFY) {
        session->drafts = job->drafts;
    }
    if (ends_tree(job)) {
        session->verify_rounds++;
        session->verify_tokens += job->round.new_count;
    }
    tv_session_keep(session, kept);
    if (!job->hold) {
        tv_session_tell(session, job->round.seq, job->event, job->event_bytes);
        job->event = NULL;
    }
    tv_sessions_fetch_bound(&sched->table, session, sched->limits.fetch_bytes);
    session->held = *held;
    memset(held, 0, sizeof *held);
    tv_session_renew(session, tv_sched_job_lease(job), now_us);
    tv_session_idle(&sched->table, session);
    tv_sched_behind_settle(sched, session, ret_settled);
    job->session = NULL;
}

/* A copy of the answer for retries; before the commit, so that it cannot fail after it. */
static int kept_make(struct job *job, const struct tv_buf *body, struct tv_session_kept *ret_kept)
{
    memset(ret_kept, 0, sizeof *ret_kept);
    if (job->round.seq == 0 && job->key == NULL) {
        return 0;
    }
    ret_kept->body = malloc(body->bytes);
    if (ret_kept->body == NULL) {
        return -ENOMEM;
    }
    memcpy(ret_kept->body, body->data, body->bytes);
    ret_kept->body_bytes = body->bytes;
    ret_kept->seq = job->round.seq;
    ret_kept->leaf = -1; /* a held round ends where its client says: no guess about it holds */
    if (job->round.kind == TV_CALL_VERIFY && !job->hold) {
        ret_kept->leaf = job->round.accepted_nodes[job->round.accepted_count - 1];
    }
    memcpy(ret_kept->body_hash, job->call->request.body_hash, sizeof ret_kept->body_hash);
    ret_kept->fetch = job->blocks.fetch;
    job->blocks.fetch = NULL;
    ret_kept->hidden = job->blocks.hidden_fetch;
    job->blocks.hidden_fetch = NULL;
    return 0;
}

/* What the client may choose from, when the round is held. */
static int held_make(const struct job *job, struct tv_session_held *ret_held)
{
    if (!job->hold) {
        return 0;
    }
    int none = job->rule.rule == TV_RULE_CLIENT;
    return tv_session_held_make(
        job->round.seq, job->rule.rule, tv_request_tree(&job->call->request, job->alternative),
        job->round.accepted_nodes, none ? 0 : job->round.accepted_count, job->end.token, ret_held);
}

/* What rollback and commit do to the context. 0 or the engine's word. */
static int rows_move(struct tv_sched *sched, struct job *job)
{
    const struct tv_request *request = &job->call->request;
    if (job->round.kind == TV_CALL_ROLLBACK) {
        return tv_sched_context_truncate(sched, job->context, job->round.committed_len);
    }
    if (job->round.kind != TV_CALL_COMMIT) {
        return 0;
    }
    int rc = tv_sched_context_settle(sched, job->context, request->path, request->path_count);
    if (rc != 0) { /* the held rows are gone */
        tv_sched_lock(sched);
        tv_session_held_finish(&job->session->held);
        tv_sched_unlock(sched);
    }
    return rc;
}

void tv_sched_job_succeed(struct tv_sched *sched, struct job *job)
{
    int http_status = creates(job) ? 201 : 200;
    struct tv_session_kept kept = {0};
    struct tv_session_held held = {0};
    struct tv_buf body;
    round_complete(sched, job);
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES + 2 * sched->limits.inline_bytes);
    int64_t start_us = tv_clock_us();
    tv_encode_round(&body, &job->round, 0);
    job->encode_us = tv_clock_us() - start_us;
    if (body.failed != 0 || held_make(job, &held) != 0 || tv_sched_events_round(job) != 0 ||
        kept_make(job, &body, &kept) != 0) {
        enum tv_code code = body.failed == -EDOM ? TV_NUMERIC_FAULT : TV_INTERNAL;
        tv_session_held_finish(&held);
        tv_buf_finish(&body);
        tv_sched_job_fail(sched, job, code, "the answer could not be written");
        return;
    }
    int rc = rows_move(sched, job); /* with the answer at hand: it cannot fail after */
    if (rc != 0) {
        tv_session_kept_finish(&kept);
        tv_buf_finish(&body);
        tv_sched_job_fail_rc(sched, job, rc);
        return;
    }
    tv_sched_prefix_publish(sched, job);
    if (job->session == NULL) {
        tv_sched_job_close(sched, job);
    }
    struct tv_call *settled = NULL;
    tv_sched_lock(sched);
    tv_sched_job_list_remove(&sched->running, job);
    if (job->session != NULL) {
        session_advance(sched, job, &kept, &held, &settled);
    }
    tv_sched_unlock(sched);
    tv_sched_job_reply(job, http_status, &body); /* nobody can join it any more */
    release(sched, job, settled);
}
