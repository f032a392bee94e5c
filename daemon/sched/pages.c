/*
 * pages.c - rounds that compute nothing: a rollback gives pages back, a fork shares them, a commit
 * settles a held round.
 *
 * Refuses to touch a session before the answer that tells of it exists.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/clock.h"
#include "sched/job.h"

int tv_sched_pages_only(const struct job *job)
{
    return job->round.kind == TV_CALL_ROLLBACK || job->round.kind == TV_CALL_FORK ||
           job->round.kind == TV_CALL_COMMIT;
}

/* The answer's arrays, and the tokens that become the session's. */
static int commit_prepare(struct job *job)
{
    const struct tv_request *request = &job->call->request;
    const struct tv_session_held *held = &job->session->held;
    struct job_blocks *blocks = &job->blocks;
    size_t count = (size_t)request->path_count, bytes = sizeof *blocks->nodes;
    struct tv_digest settled;
    blocks->nodes = malloc((count + 1) * bytes);
    blocks->accepted_tokens = malloc((count + 1) * bytes);
    blocks->new_tokens = malloc((count + 1) * bytes);
    if (blocks->nodes == NULL || blocks->accepted_tokens == NULL || blocks->new_tokens == NULL) {
        return -ENOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        blocks->nodes[i] = request->path[i];
        blocks->accepted_tokens[i] = held->tokens[request->path[i]];
        blocks->new_tokens[i] = i + 1 < count ? held->tokens[request->path[i + 1]] : request->next;
    }
    job->round.accepted_count = job->round.new_count = request->path_count;
    job->round.accepted_nodes = blocks->nodes;
    job->round.accepted_tokens = blocks->accepted_tokens;
    job->round.new_tokens = blocks->new_tokens;
    job->round.deviates = tv_session_deviates(job->session, request);
    job->rule.rule = held->rule;
    tv_session_settled(job->session, request, &settled, &job->end.token, &job->end.finish);
    tv_session_stage(job->session, 0, blocks->accepted_tokens, request->path_count, &job->digest);
    job->staged = request->path_count;
    return 0;
}

void tv_sched_held_judge(struct job *job, int64_t now_us)
{
    const struct tv_session_held *held = &job->session->held;
    const struct tv_request *request = &job->call->request;
    int settles = job->round.kind == TV_CALL_COMMIT || request->has_prev;
    if (held->seq == 0 || held->settled || (!settles && job->round.kind != TV_CALL_ROLLBACK)) {
        return;
    }
    int32_t count = settles ? request->path_count : 0;
    tv_sched_account_judge(job->account, held->count - 1, count > 0 ? count - 1 : 0, now_us);
    tv_stats_judged(job->sched->stats, held->count - 1, count > 0 ? count - 1 : 0);
}

int tv_sched_prev_settle(struct tv_sched *sched, struct job *job)
{
    const struct tv_request *request = &job->call->request;
    struct tv_session *session = job->session;
    if (!request->has_prev || session->held.settled) { /* by the same call, the first time */
        job->settled = request->has_prev;
        return 0;
    }
    int rc = tv_sched_context_settle(sched, job->context, request->path, request->path_count);
    tv_sched_lock(sched);
    if (rc == 0) {
        tv_sched_held_judge(job, tv_clock_us());
        session->verify_rounds++;
        session->verify_tokens += request->path_count;
        tv_stats_add(&sched->stats->generated_tokens, (uint64_t)request->path_count);
        tv_session_settle_held(session, request);
        tv_sched_events_settled(session, request);
        job->digest = session->digest;
        job->settled = 1;
    } else { /* its rows are gone */
        tv_session_held_finish(&session->held);
    }
    tv_sched_unlock(sched);
    return rc;
}

void tv_sched_pages_run(struct tv_sched *sched, struct job *job)
{
    const struct tv_request *request = &job->call->request;
    struct tv_session *session = job->session;
    job->queue_us = tv_clock_us() - job->call->received_us;
    if (job->round.kind == TV_CALL_ROLLBACK) {
        tv_session_at(session, request->len, &job->digest, &job->end.token, &job->end.finish);
        if (request->has_pending) {
            job->end.token = request->pending;
        }
        tv_sched_job_succeed(sched, job);
        return;
    }
    if (job->round.kind == TV_CALL_COMMIT) {
        if (commit_prepare(job) != 0) {
            tv_sched_job_fail(sched, job, TV_INTERNAL, "no memory for the answer");
            return;
        }
        tv_sched_job_succeed(sched, job);
        return;
    }
    job->end.token = session->pending;
    job->end.finish = session->finish;
    job->round.cached_len = session->len;
    int rc = tv_sched_context_fork(sched, job->parent->context, session->len, &job->context);
    if (rc != 0) {
        tv_sched_job_fail_rc(sched, job, rc);
        return;
    }
    tv_sched_job_succeed(sched, job);
}
