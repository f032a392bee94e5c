/*
 * pages.c - rounds that compute nothing: a rollback gives pages back, a fork shares them.
 *
 * Refuses to touch a session before the answer that tells of it exists.
 */
#include "base/clock.h"
#include "sched/job.h"

int tv_sched_pages_only(const struct job *job)
{
    return job->round.kind == TV_CALL_ROLLBACK || job->round.kind == TV_CALL_FORK;
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
    job->end.token = session->pending;
    job->end.finish = session->finish;
    job->round.cached_len = session->len;
    int rc =
        sched->engine->ops->fork(sched->engine, job->parent->context, session->len, &job->context);
    if (rc != 0) {
        tv_sched_job_fail_rc(sched, job, rc);
        return;
    }
    tv_sched_job_succeed(sched, job);
}
