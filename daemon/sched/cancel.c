/*
 * cancel.c - clients that have gone: their queued calls are dropped, what runs goes on.
 *
 * Finds a call wherever it waits, in one hold of the lock, so that it is either seen here or sees
 * at its admission that it was cancelled. Refuses to drop what somebody else still waits for.
 */
#include "sched/job.h"

static const char gone_text[] = "the client has gone";

/* Take the call out of a job that it is only attached to. */
static int unlink_attached(struct job *jobs, struct tv_call *call)
{
    for (struct job *job = jobs; job != NULL; job = job->next) {
        if (tv_sched_call_unlink(&job->twins, call)) {
            tv_sched_job_waiters(job);
            return 1;
        }
        if (tv_sched_call_unlink(&job->watchers, call)) {
            return 1;
        }
    }
    return 0;
}

static struct job *job_of(struct job *jobs, const struct tv_call *call)
{
    while (jobs != NULL && jobs->call != call) {
        jobs = jobs->next;
    }
    return jobs;
}

/* It waits no longer; what it waited for goes on. */
static void leave(struct tv_call *call, struct tv_call **ret_calls)
{
    tv_sched_refuse_gone(call);
    call->next = *ret_calls;
    *ret_calls = call;
}

void tv_sched_refuse_gone(struct tv_call *call)
{
    tv_sched_reply_refuse(call, TV_DEADLINE, NULL, gone_text);
}

int tv_sched_is_gone(const struct tv_call *call)
{
    return atomic_load_explicit(&call->cancelled, memory_order_relaxed) != 0;
}

void tv_sched_call_cancel(struct tv_sched *sched, struct tv_call *call, struct tv_call **ret_calls)
{
    /* relaxed: who must know reads it under the lock; for the others it is a hint */
    atomic_store_explicit(&call->cancelled, 1, memory_order_relaxed);
    if (unlink_attached(sched->queue.first, call) || unlink_attached(sched->behind.first, call) ||
        unlink_attached(sched->running.first, call) || tv_sched_call_unlink(&sched->deep, call)) {
        leave(call, ret_calls);
        return;
    }
    if (tv_sched_batch_leave(sched, call, ret_calls)) {
        leave(call, ret_calls);
        return;
    }
    struct job *job = job_of(sched->queue.first, call);
    job = job != NULL ? job : job_of(sched->behind.first, call);
    if (job != NULL && job->twins != NULL) { /* somebody else still wants this round */
        tv_sched_job_pass_on(job);
        leave(call, ret_calls);
    } else if (job != NULL) {
        tv_sched_job_drop(sched, job, TV_DEADLINE, gone_text, ret_calls);
    }
}

void tv_sched_cancel(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_call *calls = NULL;
    struct tv_batch *held = NULL;
    tv_sched_lock(sched);
    if (call->batch != NULL) { /* its items are admitted under the same lock */
        held = tv_sched_batch_cancel(call->batch, &calls);
    } else {
        tv_sched_call_cancel(sched, call, &calls);
    }
    tv_sched_unlock(sched);
    tv_sched_calls_done(sched, calls);
    tv_sched_batch_let_go(held);
}
