/*
 * job.c - a job and its calls: what it is made of, who waits for its answer, and who of them is the
 * first.
 *
 * Decides nothing about whether a call may run; that is admit.c. Refuses to keep anything of a call
 * that has left, and more waiters for one answer than TV_WAITERS_MAX.
 */
#include <errno.h>
#include <stdlib.h>

#include "sched/job.h"

int64_t tv_sched_deadline(const struct tv_call *call)
{
    const struct tv_request *request = &call->request;
    if (request->deadline_ms > 0 && request->kind != TV_CALL_CREATE &&
        request->kind != TV_CALL_FORK &&
        request->kind != TV_CALL_PARITY) { /* those have no such field */
        return call->received_us + (int64_t)request->deadline_ms * 1000;
    }
    return INT64_MAX;
}

struct job *tv_sched_job_create(struct tv_sched *sched, struct tv_call *call)
{
    const struct tv_request *request = &call->request;
    struct job *job = calloc(1, sizeof *job);
    if (job == NULL) {
        return NULL;
    }
    job->sched = sched;
    job->call = call;
    job->stage = JOB_QUEUED;
    job->deadline_us = tv_sched_deadline(call);
    job->alternative = -1;
    job->round.kind = request->kind;
    job->round.seq = request->seq;
    job->round.limits = sched->limits_info;
    job->step = (struct tv_tree){.count = 1,
                                 .tokens = &job->step_token,
                                 .parents = &job->step_parent,
                                 .depths = &job->step_depth};
    job->step_parent = -1;
    return job;
}

void tv_sched_job_destroy(struct job *job)
{
    if (job == NULL) {
        return;
    }
    if (job->owns_tokens) {
        free(job->tokens);
    }
    if (job->parity != NULL) {
        free(job->parity->prefix);
        free(job->parity->logits);
        free(job->parity);
    }
    tv_sched_blocks_finish(&job->blocks);
    free(job->borders);
    free(job->event);
    free(job);
}

void tv_sched_job_waiters(struct job *job)
{
    if (!job->queued) {
        return; /* who joins a round that has started does not prolong its wait for an oracle */
    }
    job->deadline_us = tv_sched_deadline(job->call);
    for (const struct tv_call *call = job->twins; call != NULL; call = call->next) {
        int64_t deadline_us = tv_sched_deadline(call);
        job->deadline_us = deadline_us > job->deadline_us ? deadline_us : job->deadline_us;
    }
}

void tv_sched_job_pass_on(struct job *job)
{
    struct tv_call *leaving = job->call, *staying = job->twins;
    /* What the job points at goes with it. The bodies are equal, but not always these: a prompt
     * that is a session's tokens was copied for the first call alone, or at another time. */
    int32_t *tokens = leaving->request.tokens, count = leaving->request.token_count;
    leaving->request.tokens = staying->request.tokens;
    leaving->request.token_count = staying->request.token_count;
    staying->request.tokens = tokens;
    staying->request.token_count = count;
    job->call = staying;
    job->twins = staying->next;
    staying->next = NULL;
    tv_sched_job_waiters(job);
}

int tv_sched_waiters_room(const struct tv_call *waiters, struct tv_problem *problem)
{
    int32_t count = 0;
    for (; waiters != NULL; waiters = waiters->next) {
        count++;
    }
    if (count < TV_WAITERS_MAX) {
        return 0;
    }
    tv_problem_set(problem, TV_OVERLOADED, NULL, "%d calls wait for this answer already", count);
    problem->retry_after_s = 1;
    return -EINVAL;
}

int tv_sched_job_join(struct tv_sched *sched, struct job *running, struct tv_call *call,
                      struct tv_problem *problem)
{
    if (tv_sched_waiters_room(running->twins, problem) != 0) {
        return -EINVAL;
    }
    struct tv_call **link = &running->twins; /* in the order they came */
    while (*link != NULL) {
        link = &(*link)->next;
    }
    call->next = NULL;
    *link = call;
    tv_sched_job_waiters(running);
    tv_sched_ring(sched); /* its own deadline may be the next */
    return 0;
}
