/*
 * pick.c - whose step is next: start-time fair queueing between principals, oldest first within
 * one.
 *
 * Every row that the device computes for a principal, drafted, decoded or prefilled, counts as
 * service; who has had least comes first. A prompt's rows count when it is known which are computed
 * (prefill.c, launch.c): known pages are none, nor is what a launch did not take along. A principal
 * that was away comes back level with the others: it saves nothing up. Refuses nothing; a round
 * that does not fit this launch is first in the next.
 */
#include <limits.h>

#include "sched/job.h"

/* Sliced calls in all, when everybody brings one. */
#define STARTED_MAX (8 * TV_SCHED_SLICED_MAX)
/* For so long after a launch the next one is expected. */
#define ABOUT_US 1000000

/* From here on it runs to its end. */
static void begin(struct tv_sched *sched, struct job *job)
{
    tv_sched_job_list_remove(&sched->queue, job);
    sched->queue_count--;
    job->queued = 0;
    if (job->stage == JOB_QUEUED) {
        job->stage = JOB_ROUND;
    }
    tv_sched_job_list_push(&sched->running, job);
}

static int is_sliced(const struct job *job)
{
    return job->round.kind != TV_CALL_VERIFY && !tv_sched_pages_only(job);
}

/* Sliced calls that have a place and still need turns: of the account, or of all (NULL). */
static int32_t sliced_count(const struct tv_sched *sched, const struct tv_account *account)
{
    const struct job *lists[2] = {sched->queue.first, sched->running.first};
    int32_t count = 0;
    for (int i = 0; i < 2; i++) {
        for (const struct job *job = lists[i]; job != NULL; job = job->next) {
            count += is_sliced(job) && job->stage != JOB_QUEUED && job->stage != JOB_JUDGED &&
                     (account == NULL || job->account == account);
        }
    }
    return count;
}

/* The oldest sliced call of the principal that has fewest under way. */
static struct job *next_sliced(const struct tv_sched *sched, int32_t *ret_own)
{
    struct job *best = NULL;
    for (struct job *job = sched->queue.first; job != NULL; job = job->next) {
        if (is_sliced(job) && job->stage == JOB_QUEUED) {
            int32_t own = sliced_count(sched, job->account);
            if (best == NULL || own < *ret_own) {
                best = job;
                *ret_own = own;
            }
            if (own == 0) {
                break;
            }
        }
    }
    return best;
}

void tv_sched_pick_start(struct tv_sched *sched)
{
    int32_t total = sliced_count(sched, NULL);
    int32_t own = 0;
    struct job *job = next_sliced(sched, &own);
    while (job != NULL && (total < TV_SCHED_SLICED_MAX || (own == 0 && total < STARTED_MAX))) {
        int prefills = job->own_context || job->round.kind == TV_CALL_EXTEND;
        job->stage = prefills ? JOB_PREFILL : JOB_ROUND;
        job->turn = sched->turns++;
        total++;
        job = next_sliced(sched, &own);
    }
}

struct job *tv_sched_pick_pages(struct tv_sched *sched)
{
    struct job *job = sched->queue.first;
    /* a fork makes a context, which an engine does not do in the middle of a slice */
    while (job != NULL && (!tv_sched_pages_only(job) ||
                           (sched->sliced != NULL && job->round.kind == TV_CALL_FORK))) {
        job = job->next;
    }
    if (job != NULL) {
        begin(sched, job);
    }
    return job;
}

static int is_ready(const struct job *job)
{
    return !job->picked && (job->stage == JOB_ROUND ||
                            (job->stage == JOB_QUEUED && job->round.kind == TV_CALL_VERIFY));
}

/* Since when each has been ready: from the start its call came, later from the last launch on. */
static int32_t mark_ready(struct job *first, int64_t now_us)
{
    int32_t count = 0;
    for (struct job *job = first; job != NULL; job = job->next) {
        if (is_ready(job)) {
            count++;
            if (job->ready_us == 0) {
                job->ready_us = job->stage == JOB_QUEUED ? job->call->received_us : now_us;
            }
        }
    }
    return count;
}

/* Bring who was away level with the others. */
static void accounts_level(struct tv_sched *sched)
{
    int64_t floor = INT64_MAX;
    const struct job *lists[2] = {sched->queue.first, sched->running.first};
    for (int i = 0; i < 2; i++) {
        for (const struct job *job = lists[i]; job != NULL; job = job->next) {
            struct tv_account *account = job->account;
            if (is_ready(job) || job->stage == JOB_PREFILL) {
                if (account->served < sched->served_floor) {
                    account->served = sched->served_floor;
                }
                floor = account->served < floor ? account->served : floor;
            }
        }
    }
    if (floor != INT64_MAX) {
        sched->served_floor = floor;
    }
}

/* Small rounds do not wait for a tree that takes most of a launch: it goes alone. */
static int fits(const struct tv_sched *sched, const struct job *job, int32_t count, int32_t rows)
{
    return count == 0 ||
           (job->nodes <= sched->launch_rows / 2 && job->nodes <= sched->launch_rows - rows);
}

static struct job *next_round(const struct tv_sched *sched, int32_t count, int32_t rows)
{
    struct job *best = NULL;
    struct job *lists[2] = {sched->queue.first, sched->running.first};
    for (int i = 0; i < 2; i++) {
        for (struct job *job = lists[i]; job != NULL; job = job->next) {
            if (!is_ready(job) || !fits(sched, job, count, rows)) {
                continue;
            }
            if (best == NULL || job->account->served < best->account->served ||
                (job->account->served == best->account->served && job->ready_us < best->ready_us)) {
                best = job;
            }
        }
    }
    return best;
}

/* Under load, rounds that answer the last launches are on their way: until when it pays to wait for
 * them, beside those that are ready. 0: not at all. Idle means that no launch ended just now. */
static int64_t expected_until(const struct tv_sched *sched, int32_t ready, int64_t now_us)
{
    int32_t expected = sched->rounds_last[0] + sched->rounds_last[1];
    int64_t window_us = sched->launch_took_us / 4;
    if (window_us > sched->config->batch_window_us) {
        window_us = sched->config->batch_window_us;
    }
    if (expected > sched->engine->requests_max) {
        expected = sched->engine->requests_max;
    }
    int64_t until_us = sched->launched_us + window_us;
    return sched->launched_us == 0 || sched->rounds_last[0] + sched->rounds_last[1] < 3 ||
                   ready >= expected || now_us >= until_us || sched->sliced != NULL
               ? 0
               : until_us;
}

/* Whose principal had less, and within one whose turn is longer ago. */
static int is_before(const struct job *job, const struct job *other)
{
    return job->account->served < other->account->served ||
           (job->account->served == other->account->served && job->turn < other->turn);
}

/* The prompt whose turn it is. */
static struct job *next_prompt(const struct tv_sched *sched)
{
    struct job *best = NULL, *lists[2] = {sched->queue.first, sched->running.first};
    for (int i = 0; i < 2; i++) {
        for (struct job *job = lists[i]; job != NULL; job = job->next) {
            if (job->stage == JOB_PREFILL && (best == NULL || is_before(job, best))) {
                best = job;
            }
        }
    }
    return best;
}

/* 1 when it pays to wait; not while a prompt could have a slice of its own meanwhile. */
static int wait_for_more(const struct tv_sched *sched, int32_t ready, int64_t now_us,
                         int64_t *wake_us)
{
    int64_t until_us = ready > 0 ? expected_until(sched, ready, now_us) : 0;
    if (until_us == 0 || (next_prompt(sched) != NULL && !sched->rode)) {
        return 0;
    }
    *wake_us = until_us < *wake_us ? until_us : *wake_us;
    return 1;
}

/* Some of a waiting prompt's tokens go along. */
static void pick_rider(struct tv_sched *sched, int32_t nodes)
{
    struct job *job = next_prompt(sched);
    sched->rider = NULL;
    sched->rider_rows = job != NULL ? tv_sched_share_rows(sched, job, nodes) : 0;
    if (sched->rider_rows > 0) {
        if (job->queued) {
            begin(sched, job);
        }
        job->turn = sched->turns++;
        sched->rider = job;
    }
}

int32_t tv_sched_pick_launch(struct tv_sched *sched, int64_t now_us, int64_t *wake_us)
{
    int32_t count = 0, rows = 0;
    int32_t ready = mark_ready(sched->queue.first, now_us);
    ready += mark_ready(sched->running.first, now_us);
    accounts_level(sched);
    if (wait_for_more(sched, ready, now_us, wake_us)) {
        return 0;
    }
    while (count < sched->engine->requests_max) {
        struct job *job = next_round(sched, count, rows);
        if (job == NULL) {
            break;
        }
        if (job->queued) {
            begin(sched, job);
        }
        job->picked = 1;
        job->ready_us = 0;
        job->account->served += job->nodes;
        sched->batch[count++] = job;
        rows += job->nodes;
        if (job->nodes > sched->launch_rows / 2) {
            break; /* alone */
        }
    }
    if (count > 0) {
        pick_rider(sched, rows);
    }
    return count;
}

/* The last launch took tokens along, and the next one will: it is ready, or about to be. */
static int goes_along(struct tv_sched *sched, const struct job *job, int64_t now_us,
                      int64_t *wake_us)
{
    if (!sched->rode || !tv_sched_share_may(sched, job)) {
        return 0;
    }
    int32_t ready = mark_ready(sched->queue.first, now_us);
    ready += mark_ready(sched->running.first, now_us);
    if (ready > 0) {
        return 1;
    }
    int64_t until_us = expected_until(sched, ready, now_us);
    if (until_us == 0) {
        return 0;
    }
    *wake_us = until_us < *wake_us ? until_us : *wake_us;
    return 1;
}

struct job *tv_sched_pick_slice(struct tv_sched *sched, int64_t now_us, int32_t *ret_rows,
                                int64_t *wake_us)
{
    int about = sched->launched_us != 0 && now_us - sched->launched_us < ABOUT_US;
    accounts_level(sched);
    struct job *best = next_prompt(sched);
    if (best == NULL || goes_along(sched, best, now_us, wake_us)) {
        return NULL;
    }
    if (best->queued) {
        begin(sched, best);
    }
    best->turn = sched->turns++;
    int32_t rows = best->token_count - best->token_done;
    int32_t rows_max = sched->engine->prefill_rows;
    if (about && sched->launch_rows < rows_max) {
        rows_max = sched->launch_rows;
    }
    *ret_rows = rows < rows_max ? rows : rows_max;
    return best;
}
