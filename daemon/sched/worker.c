/*
 * worker.c - the one thread that owns the device: what it does next, and what it looks after.
 *
 * Each turn: calls whose time is over, contexts of the gone, one launch over the rounds that are
 * ready, with a few tokens of a waiting prompt where that is cheap, one slice of one prefill while
 * no rounds are. An engine that can be interrupted in a slice lets rounds, rollbacks and commits
 * that come meanwhile go between its parts. So neither a long prompt nor a long decode delays small
 * rounds by more than a slice, or a part of one.
 */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/wait.h"
#include "sched/job.h"

/* What one turn has to do, put together under the lock. */
struct turn {
    struct tv_call *calls;   /* replies set; to be handed over */
    struct tv_session *gone; /* contexts to be closed */
    struct job *judged;      /* one whose oracle has spoken, or is waited for no longer */
    struct job *abort;       /* one that the stop ends */
    struct job *pages;       /* one that computes nothing */
    int deep, draining;
};

/* An oracle is waited for until the call's deadline, or until the server is about to end: what the
 * round accepted must not hang on a backlog of judgements. A comparison is its oracles' word and
 * has no deadline; it is waited for as long as work is. */
static int wait_is_over(const struct tv_sched *sched, const struct job *job, int64_t now_us,
                        int64_t *wake_us)
{
    if (job->judged) {
        return 1;
    }
    if (job->round.kind == TV_CALL_PARITY) {
        return (sched->refusing || sched->lost) && !job->withdrawn;
    }
    *wake_us = job->deadline_us < *wake_us ? job->deadline_us : *wake_us;
    return sched->draining || sched->lost || now_us >= job->deadline_us;
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

/* What runs when everything ends is ended between two steps; what an oracle has is pick_judged's.
 */
static struct job *pick_abort(struct tv_sched *sched)
{
    struct job *job = sched->stopping || sched->lost ? sched->running.first : NULL;
    while (job != NULL && job->stage == JOB_JUDGED) {
        job = job->next;
    }
    return job;
}

/* Housekeeping, with the lock. 1: there is something to do; *ret_wake_us: when there will be. */
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
    tv_sched_late_drop(sched, sched->behind.first, now_us, &turn->calls, ret_wake_us);
    tv_sched_late_drop(sched, sched->queue.first, now_us, &turn->calls, ret_wake_us);
    tv_sched_late_watchers(sched->behind.first, now_us, &turn->calls, ret_wake_us);
    tv_sched_late_watchers(sched->queue.first, now_us, &turn->calls, ret_wake_us);
    tv_sched_late_watchers(sched->running.first, now_us, &turn->calls, ret_wake_us);
    turn->gone = tv_sessions_take_gone(&sched->table);
    turn->deep = sched->deep != NULL;
    turn->judged = pick_judged(sched, now_us, ret_wake_us);
    turn->draining = sched->draining || sched->lost;
    turn->abort = pick_abort(sched);
    turn->pages = sched->stopping || sched->lost ? NULL : tv_sched_pick_pages(sched);
    return turn->calls != NULL || turn->gone != NULL || turn->deep || turn->judged != NULL ||
           turn->abort != NULL || turn->pages != NULL;
}

void tv_sched_bury(struct tv_sched *sched, struct tv_session *gone)
{
    while (gone != NULL) {
        struct tv_session *session = gone;
        gone = session->next;
        tv_sched_lock(sched);
        tv_sched_account_unsettled(sched, session, tv_clock_us());
        tv_sched_unlock(sched);
        tv_sched_context_close(sched, session->context);
        session->context = NULL;
        tv_session_destroy(session);
    }
}

static void act(struct tv_sched *sched, const struct turn *turn)
{
    tv_sched_calls_done(sched, turn->calls);
    tv_sched_bury(sched, turn->gone);
    if (turn->deep) {
        tv_sched_self_test_run(sched);
    }
    if (turn->judged != NULL && turn->judged->round.kind == TV_CALL_PARITY) {
        tv_sched_parity_conclude(sched, turn->judged);
    } else if (turn->judged != NULL) {
        tv_sched_judged_settle(sched, turn->judged, turn->draining);
    }
    if (turn->abort != NULL) {
        tv_sched_job_fail(sched, turn->abort, tv_sched_end_code(sched), "%s",
                          tv_sched_end_text(sched));
    }
    if (turn->pages != NULL) {
        tv_sched_pages_run(sched, turn->pages);
    }
}

/* One launch, when rounds are ready or worth no more waiting; who is late is refused right before
 * it. With the lock, which it lets go meanwhile. 1: something was done. */
static int launch_ready(struct tv_sched *sched, int64_t *wake_us)
{
    struct tv_call *late = NULL;
    int32_t count = 0;
    if (!sched->stopping && !sched->lost) {
        int64_t now_us = tv_clock_us();
        tv_sched_late_drop(sched, sched->behind.first, now_us, &late, wake_us);
        tv_sched_late_drop(sched, sched->queue.first, now_us, &late, wake_us);
        tv_sched_pick_start(sched);
        count = tv_sched_pick_launch(sched, now_us, wake_us);
    }
    if (count > 0 || late != NULL) {
        tv_sched_unlock(sched);
        tv_sched_calls_done(sched, late);
        if (count > 0) {
            tv_sched_launch_run(sched, count);
        }
        tv_sched_lock(sched);
    }
    return count > 0 || late != NULL;
}

static int slice_due(struct tv_sched *sched, int64_t *wake_us)
{
    int32_t rows = 0;
    int ends = sched->stopping || sched->lost;
    struct job *job = ends ? NULL : tv_sched_pick_slice(sched, tv_clock_us(), &rows, wake_us);
    if (job != NULL) {
        sched->sliced = job;
        sched->rode = 0;
        tv_sched_unlock(sched);
        tv_sched_prefill_slice(sched, job, rows);
        tv_sched_lock(sched);
        sched->sliced = NULL;
    }
    return job != NULL;
}

/* A call that computes nothing. With the lock, which it lets go meanwhile. 1: something was done.
 */
static int pages_ready(struct tv_sched *sched)
{
    struct job *job = sched->stopping || sched->lost ? NULL : tv_sched_pick_pages(sched);
    if (job != NULL) {
        tv_sched_unlock(sched);
        tv_sched_pages_run(sched, job);
        tv_sched_lock(sched);
    }
    return job != NULL;
}

void tv_sched_between(void *context)
{
    struct tv_sched *sched = context;
    int64_t start_us = tv_clock_us(), wake_us = INT64_MAX;
    tv_sched_lock(sched);
    int done = launch_ready(sched, &wake_us);
    done |= pages_ready(sched); /* one: the slice goes on, however many there are */
    if (done) {
        sched->between_us += tv_clock_us() - start_us;
        sched->launch_start_us = tv_clock_us(); /* the slice goes on inside the engine */
        sched->progress_us = sched->launch_start_us;
    }
    tv_sched_unlock(sched);
}

/* The answer of a round soon brings the next one, and a thread that sleeps is awake only 30 to 200
 * us after it was called: beside a device, which is waited for awake too, and where processors are
 * to spare, the worker first looks on for a moment. With the lock, which it lets go meanwhile. 1:
 * it was rung for. */
static int linger(struct tv_sched *sched, int64_t wake_us)
{
    int64_t until_us = sched->engine_left_us + sched->linger_us;
    unsigned rings = atomic_load_explicit(&sched->rings, memory_order_relaxed);
    until_us = wake_us < until_us ? wake_us : until_us;
    if (sched->linger_us == 0 || sched->engine_left_us == 0 || tv_clock_us() >= until_us) {
        return 0;
    }
    tv_sched_unlock(sched);
    while (atomic_load_explicit(&sched->rings, memory_order_relaxed) == rings &&
           tv_clock_us() < until_us) {
        /* what there is to do is looked at under the lock */
    }
    tv_sched_lock(sched);
    return atomic_load_explicit(&sched->rings, memory_order_relaxed) != rings;
}

void *tv_sched_worker_main(void *context)
{
    struct tv_sched *sched = context;
    struct turn turn;
    int64_t wake_us = 0;
    tv_sched_lock(sched);
    for (;;) {
        int busy = plan(sched, &turn, &wake_us);
        if (busy) {
            tv_sched_unlock(sched);
            act(sched, &turn);
            tv_sched_lock(sched);
        }
        busy |= launch_ready(sched, &wake_us);
        busy |= slice_due(sched, &wake_us);
        if (busy) {
            continue;
        }
        if (sched->stopping && sched->running.first == NULL) {
            break;
        }
        if (linger(sched, wake_us)) {
            continue;
        }
        /* the next plan looks at everything again */
        tv_wait_until(&sched->wake, &sched->table.lock, wake_us);
    }
    sched->worker_alive = 0;
    tv_sched_unlock(sched);
    return NULL;
}
