/*
 * late.c - calls whose time is over: queued ones that may not start any more, and waits for a
 * round.
 *
 * Owns what is answered by the clock alone. The worker asks before each launch, so that nothing
 * late starts; whoever looks on from outside does while a launch lasts, so that nobody waits for
 * its end. Both do so under the lock, and a call is answered by whoever takes it off its list.
 * Refuses to touch what has started: that ends as a round does.
 */
#include "base/clock.h"
#include "sched/job.h"

void tv_sched_late_watchers(struct job *jobs, int64_t now_us, struct tv_call **ret_calls,
                            int64_t *wake_us)
{
    for (struct job *job = jobs; job != NULL; job = job->next) {
        struct tv_call **link = &job->watchers;
        while (*link != NULL) {
            struct tv_call *call = *link;
            int64_t until_us = call->received_us + (int64_t)call->request.wait_ms * 1000;
            if (until_us > now_us) {
                *wake_us = until_us < *wake_us ? until_us : *wake_us;
                link = &call->next;
                continue;
            }
            struct tv_buf body;
            *link = call->next;
            tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
            tv_encode_running(&body, call->request.seq);
            tv_sched_reply_set(call, 202, &body);
            call->next = *ret_calls;
            *ret_calls = call;
        }
    }
}

/* Of a queued round that somebody still waits for, those whose own time is over; the round stays.
 */
static void leave_late(struct job *job, int64_t now_us, struct tv_call **ret_calls,
                       int64_t *wake_us)
{
    struct tv_call **link = &job->twins;
    while (job->twins != NULL) {
        int first = tv_sched_deadline(job->call) <= now_us;
        struct tv_call *call = first ? job->call : *link;
        if (call == NULL) {
            break;
        }
        int64_t deadline_us = tv_sched_deadline(call);
        if (deadline_us > now_us) {
            *wake_us = deadline_us < *wake_us ? deadline_us : *wake_us;
            link = &call->next;
            continue;
        }
        if (first) {
            tv_sched_job_pass_on(job);
            link = &job->twins;
        } else {
            *link = call->next;
        }
        tv_sched_reply_refuse(call, TV_DEADLINE, NULL,
                              "not started within deadline_ms; another call waits on for it");
        call->next = *ret_calls;
        *ret_calls = call;
    }
    int64_t deadline_us = tv_sched_deadline(job->call);
    *wake_us = deadline_us < *wake_us ? deadline_us : *wake_us;
}

void tv_sched_late_drop(struct tv_sched *sched, struct job *jobs, int64_t now_us,
                        struct tv_call **ret_calls, int64_t *wake_us)
{
    struct job *job = jobs;
    while (job != NULL) {
        struct job *next = job->next;
        if (sched->stopping || sched->lost) {
            tv_sched_job_drop(sched, job, tv_sched_end_code(sched), tv_sched_end_text(sched),
                              ret_calls);
        } else if (now_us >= job->deadline_us) {
            tv_sched_job_drop(sched, job, TV_DEADLINE, "not started within deadline_ms", ret_calls);
        } else {
            leave_late(job, now_us, ret_calls, wake_us);
        }
        job = next;
    }
}

void tv_sched_look(struct tv_sched *sched)
{
    struct tv_call *calls = NULL;
    int64_t now_us = tv_clock_us(), wake_us = INT64_MAX; /* who looks has a clock of his own */
    tv_sched_lock(sched);
    (void)tv_sched_stalled_us(sched, now_us); /* what it notes is what is wanted */
    tv_sched_late_drop(sched, sched->behind.first, now_us, &calls, &wake_us);
    tv_sched_late_drop(sched, sched->queue.first, now_us, &calls, &wake_us);
    tv_sched_late_watchers(sched->behind.first, now_us, &calls, &wake_us);
    tv_sched_late_watchers(sched->queue.first, now_us, &calls, &wake_us);
    tv_sched_late_watchers(sched->running.first, now_us, &calls, &wake_us);
    tv_sched_unlock(sched);
    tv_sched_calls_done(sched, calls);
}
