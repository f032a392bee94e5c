/*
 * worker.c - the one thread that owns the device: what it does next, and what it looks after.
 *
 * Each turn: calls whose time is over, contexts of the gone, one launch over the rounds that are
 * ready, one slice of one prefill. So neither a long prompt nor a long decode delays small rounds
 * by more than a slice.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "sched/job.h"

/* What one turn has to do, put together under the lock. */
struct turn {
    struct tv_call *calls;   /* replies set; to be handed over */
    struct tv_session *gone; /* contexts to be closed */
    struct job *judged;      /* one whose oracle has spoken, or is waited for no longer */
    struct job *abort;       /* one that the stop ends */
    struct job *pages;       /* one that computes nothing */
    struct job *slice;       /* one that prefills */
    int32_t launch;          /* rounds in sched->batch */
    int deep, draining;
};

static int expired_watchers(struct job *jobs, int64_t now_us, struct tv_call **ret_calls,
                            int64_t *wake_us)
{
    int count = 0;
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
            count++;
        }
    }
    return count;
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

/* Queued calls of one list that may not start any more. */
static void drop_late(struct tv_sched *sched, struct job *job, int64_t now_us,
                      struct tv_call **ret_calls, int64_t *wake_us)
{
    while (job != NULL) {
        struct job *next = job->next;
        if (sched->stopping) {
            tv_sched_job_drop(sched, job, TV_DRAINING, "the server is going away", ret_calls);
        } else if (now_us >= job->deadline_us) {
            tv_sched_job_drop(sched, job, TV_DEADLINE, "not started within deadline_ms", ret_calls);
        } else {
            leave_late(job, now_us, ret_calls, wake_us);
        }
        job = next;
    }
}

static void start(struct tv_sched *sched, struct job *job, enum job_stage stage)
{
    tv_sched_job_list_remove(&sched->queue, job);
    sched->queue_count--;
    job->queued = 0;
    job->stage = stage;
    tv_sched_job_list_push(&sched->running, job);
}

/* Take sliced calls off the queue while there is room for their progress. */
static void start_sliced(struct tv_sched *sched)
{
    int32_t sliced = 0;
    for (struct job *job = sched->running.first; job != NULL; job = job->next) {
        sliced += job->round.kind != TV_CALL_VERIFY && job->stage != JOB_JUDGED;
    }
    struct job *job = sched->queue.first;
    while (job != NULL && sliced < TV_SCHED_SLICED_MAX) {
        struct job *next = job->next;
        if (job->round.kind != TV_CALL_VERIFY && !tv_sched_pages_only(job)) {
            int prefills = job->own_context || job->round.kind == TV_CALL_EXTEND;
            start(sched, job, prefills ? JOB_PREFILL : JOB_ROUND);
            sliced++;
        }
        job = next;
    }
}

/* Their sessions have nothing else under way, so none of them waits for a launch or a slice. */
static struct job *start_pages(struct tv_sched *sched)
{
    struct job *job = sched->queue.first;
    while (job != NULL && !tv_sched_pages_only(job)) {
        job = job->next;
    }
    if (job != NULL) {
        start(sched, job, JOB_ROUND);
    }
    return job;
}

static int fits(const struct tv_sched *sched, const struct job *job, int32_t count, int32_t rows)
{
    return count < sched->engine->requests_max && job->nodes <= sched->engine->rows_max - rows;
}

static void pick_queued(struct tv_sched *sched, int32_t *count, int32_t *rows)
{
    struct job *job = sched->queue.first;
    while (job != NULL) {
        struct job *next = job->next;
        if (job->round.kind == TV_CALL_VERIFY) {
            if (!fits(sched, job, *count, *rows)) {
                break; /* first come, first served */
            }
            start(sched, job, JOB_ROUND);
            job->picked = 1;
            sched->batch[(*count)++] = job;
            *rows += job->nodes;
        }
        job = next;
    }
}

static void pick_running(struct tv_sched *sched, int32_t *count, int32_t *rows)
{
    for (struct job *job = sched->running.first; job != NULL; job = job->next) {
        if (job->stage == JOB_ROUND && !job->picked && fits(sched, job, *count, *rows)) {
            job->picked = 1;
            sched->batch[(*count)++] = job;
            *rows += job->nodes;
        }
    }
}

/* Rounds of both kinds share a launch; who comes first changes, so that none waits for ever. */
static int32_t pick_launch(struct tv_sched *sched)
{
    int32_t count = 0, rows = 0;
    sched->queue_first = !sched->queue_first;
    if (sched->queue_first) {
        pick_queued(sched, &count, &rows);
        pick_running(sched, &count, &rows);
    } else {
        pick_running(sched, &count, &rows);
        pick_queued(sched, &count, &rows);
    }
    for (int32_t i = 0; i < count; i++) { /* the next turn begins with others */
        tv_sched_job_list_remove(&sched->running, sched->batch[i]);
        tv_sched_job_list_push(&sched->running, sched->batch[i]);
    }
    return count;
}

static struct job *pick_slice(struct tv_sched *sched)
{
    for (struct job *job = sched->running.first; job != NULL; job = job->next) {
        if (job->stage == JOB_PREFILL) {
            tv_sched_job_list_remove(&sched->running, job);
            tv_sched_job_list_push(&sched->running, job);
            return job;
        }
    }
    return NULL;
}

/* An oracle is waited for until the call's deadline, or until the server is about to stop: what the
 * round accepted must not hang on a backlog of judgements. A comparison is its oracles' word and
 * has no deadline; it is waited for as long as work is. */
static int wait_is_over(const struct tv_sched *sched, const struct job *job, int64_t now_us,
                        int64_t *wake_us)
{
    if (job->judged) {
        return 1;
    }
    if (job->round.kind == TV_CALL_PARITY) {
        return sched->refusing && !job->withdrawn;
    }
    *wake_us = job->deadline_us < *wake_us ? job->deadline_us : *wake_us;
    return sched->draining || now_us >= job->deadline_us;
}

static struct job *pick_judged(struct tv_sched *sched, int64_t now_us, int64_t *wake_us)
{
    struct job *job = sched->running.first;
    while (job != NULL &&
           !(job->stage == JOB_JUDGED && wait_is_over(sched, job, now_us, wake_us))) {
        job = job->next;
    }
    return job;
}

/* What runs when the server stops is ended between two steps; what an oracle has is pick_judged's.
 */
static struct job *pick_abort(struct tv_sched *sched)
{
    struct job *job = sched->stopping ? sched->running.first : NULL;
    while (job != NULL && job->stage == JOB_JUDGED) {
        job = job->next;
    }
    return job;
}

/* With the lock. 1: there is something to do; 0: *ret_wake_us says when to look again. */
static int plan(struct tv_sched *sched, struct turn *turn, int64_t *ret_wake_us)
{
    int64_t now_us = tv_clock_us();
    memset(turn, 0, sizeof *turn);
    if (now_us >= sched->sweep_us) {
        int64_t lease_us = tv_sessions_sweep(&sched->table, now_us);
        sched->sweep_us = now_us + TV_SCHED_SWEEP_US;
        sched->sweep_us = lease_us < sched->sweep_us ? lease_us : sched->sweep_us;
    }
    *ret_wake_us = sched->sweep_us;
    /* first what waits behind a round: it is late by itself, not for that one */
    drop_late(sched, sched->behind.first, now_us, &turn->calls, ret_wake_us);
    drop_late(sched, sched->queue.first, now_us, &turn->calls, ret_wake_us);
    (void)expired_watchers(sched->behind.first, now_us, &turn->calls, ret_wake_us);
    (void)expired_watchers(sched->queue.first, now_us, &turn->calls, ret_wake_us);
    (void)expired_watchers(sched->running.first, now_us, &turn->calls, ret_wake_us);
    turn->gone = tv_sessions_take_gone(&sched->table);
    turn->deep = sched->deep != NULL;
    turn->judged = pick_judged(sched, now_us, ret_wake_us);
    turn->draining = sched->draining;
    turn->abort = pick_abort(sched);
    if (!sched->stopping) {
        start_sliced(sched);
        turn->launch = pick_launch(sched);
        turn->slice = pick_slice(sched);
        turn->pages = start_pages(sched); /* after the launch was picked: it is in none */
    }
    return turn->calls != NULL || turn->gone != NULL || turn->deep || turn->judged != NULL ||
           turn->abort != NULL || turn->pages != NULL || turn->launch > 0 || turn->slice != NULL;
}

static void bury(struct tv_sched *sched, struct tv_session *gone)
{
    while (gone != NULL) {
        struct tv_session *session = gone;
        gone = session->next;
        sched->engine->ops->context_close(sched->engine, session->context);
        session->context = NULL;
        tv_session_destroy(session);
    }
}

static void act(struct tv_sched *sched, const struct turn *turn)
{
    tv_sched_calls_done(sched, turn->calls);
    bury(sched, turn->gone);
    if (turn->deep) {
        tv_sched_self_test_run(sched);
    }
    if (turn->judged != NULL && turn->judged->round.kind == TV_CALL_PARITY) {
        tv_sched_parity_conclude(sched, turn->judged);
    } else if (turn->judged != NULL) {
        tv_sched_judged_settle(sched, turn->judged, turn->draining);
    }
    if (turn->abort != NULL) {
        tv_sched_job_fail(sched, turn->abort, TV_DRAINING, "the server is going away");
    }
    if (turn->pages != NULL) {
        tv_sched_pages_run(sched, turn->pages);
    }
    if (turn->launch > 0) {
        tv_sched_launch_run(sched, turn->launch);
    }
    if (turn->slice != NULL) {
        tv_sched_prefill_slice(sched, turn->slice);
    }
}

void *tv_sched_worker_main(void *context)
{
    struct tv_sched *sched = context;
    struct turn turn;
    int64_t wake_us = 0;
    tv_sched_lock(sched);
    for (;;) {
        if (plan(sched, &turn, &wake_us)) {
            tv_sched_unlock(sched);
            act(sched, &turn);
            tv_sched_lock(sched);
        } else if (sched->stopping && sched->running.first == NULL) {
            break;
        } else {
            struct timespec until = {.tv_sec = wake_us / 1000000,
                                     .tv_nsec = wake_us % 1000000 * 1000};
            /* whatever it says, the next plan looks at everything again */
            (void)pthread_cond_timedwait(&sched->wake, &sched->table.lock, &until);
        }
    }
    sched->worker_alive = 0;
    tv_sched_unlock(sched);
    return NULL;
}
