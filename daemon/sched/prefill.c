/*
 * prefill.c - known tokens into a context, a slice at a time, so that small rounds get between, or
 * a few at a time in their launches.
 */
#include <errno.h>

#include "base/clock.h"
#include "sched/job.h"

/* First slice: when it started, and where it goes. */
static int begin(struct tv_sched *sched, struct job *job)
{
    job->queue_us = tv_clock_us() - job->call->received_us;
    job->batch = 1;
    if (!job->own_context) {
        return 0;
    }
    if (job->round.kind == TV_CALL_ONESHOT) {
        tv_digest_start(&job->digest, sched->table.params.model_id, "", 0);
    }
    int rc = sched->engine->ops->context_open(sched->engine, &job->context);
    return rc != 0 ? rc : tv_sched_prefix_adopt(sched, job);
}

/* Create and extend end here; the others go on with their tree. */
static void end(struct tv_sched *sched, struct job *job, const struct tv_drawn *drawn)
{
    if (job->round.kind == TV_CALL_ONESHOT || job->round.kind == TV_CALL_SCORE ||
        job->round.kind == TV_CALL_PARITY) {
        job->stage = JOB_ROUND;
        return;
    }
    job->end = *drawn;
    job->has_margin = drawn->has_margin;
    job->margin_min = drawn->margin;
    if (job->round.kind == TV_CALL_EXTEND) {
        job->round.new_count = 1;
        job->round.new_tokens = &job->end.token;
    }
    tv_sched_job_succeed(sched, job);
}

static void digest_advance(struct job *job, const int32_t *tokens, int32_t count)
{
    if (job->session != NULL) {
        tv_session_stage(job->session, job->staged, tokens, count, &job->digest);
        job->staged += count;
    } else if (job->round.kind == TV_CALL_ONESHOT) {
        for (int32_t i = 0; i < count; i++) {
            tv_digest_push(&job->digest, tokens[i]);
        }
    }
}

/* The next `count` tokens, with the hidden rows that the call wants of them. */
static int slice_run(struct tv_sched *sched, struct job *job, int32_t count,
                     const struct tv_round_rule *rule, struct tv_drawn *ret_drawn)
{
    struct tv_engine *engine = sched->engine;
    const int32_t *tokens = job->tokens + job->token_done;
    struct tv_slice_hidden hidden = {
        .rows = tv_sched_hidden_wanted(job, job->token_done, count),
        .project = job->call->request.want.hidden.project,
    };
    if (hidden.rows == 0) {
        return engine->ops->prefill(engine, job->context, tokens, count, rule, ret_drawn,
                                    &job->shortage);
    }
    int rc = engine->ops->prefill_hidden(engine, job->context, tokens, count, rule, ret_drawn,
                                         &job->shortage, &hidden);
    return rc != 0 ? rc : tv_sched_hidden_slice(job, job->token_done, count, &hidden);
}

/* Pages that the rest of a prompt takes, beside those it has. */
static int64_t pages_left(const struct tv_sched *sched, const struct job *job)
{
    int64_t page = sched->table.params.page_size;
    int64_t at = job->token_done + (job->own_context ? 0 : job->session->len);
    int64_t end = at + job->token_count - job->token_done;
    return (end + page - 1) / page - (at + page - 1) / page;
}

/* Before the first slice: room for the whole prompt beside what the prompts under way will take, or
 * -ENOSPC with nothing computed. Two that fit alone do not stop each other half way. */
static int room_find(struct tv_sched *sched, struct job *job)
{
    int64_t promised = 0, own = pages_left(sched, job);
    for (const struct job *one = sched->running.first; one != NULL; one = one->next) {
        int under_way = one != job && one->stage == JOB_PREFILL && one->admitted;
        promised += under_way ? pages_left(sched, one) : 0;
    }
    struct tv_cache_shortage all = {0};
    int rc = tv_engine_room(sched->engine, own + promised, &all);
    while (rc == -ENOSPC && tv_sched_idle_give(sched, &all)) {
        rc = tv_engine_room(sched->engine, own + promised, &all);
    }
    if (rc == -ENOSPC) {
        job->shortage.pages_needed = own;
        job->shortage.pages_free = all.pages_free > promised ? all.pages_free - promised : 0;
    }
    job->admitted = rc == 0;
    return rc;
}

/* A round took what was meant for the prompt. */
static int idle_give(struct tv_sched *sched, const struct job *job)
{
    struct tv_cache_shortage all = job->shortage;
    int64_t left = pages_left(sched, job);
    all.pages_needed = left > all.pages_needed ? left : all.pages_needed;
    return tv_sched_idle_give(sched, &all);
}

/* Before its first tokens. 0, or the job has failed. */
static int admit(struct tv_sched *sched, struct job *job)
{
    int rc = job->admitted ? 0 : begin(sched, job);
    if (rc == 0 && !job->admitted) {
        rc = room_find(sched, job);
    }
    if (rc != 0) {
        tv_sched_job_fail_rc(sched, job, rc);
    }
    return rc;
}

/* Does the call want the token that follows its prompt? */
static int draws(const struct job *job)
{
    return job->round.kind == TV_CALL_CREATE || job->round.kind == TV_CALL_EXTEND;
}

/* The next `count` tokens are in the context. */
static void advance(struct tv_sched *sched, struct job *job, int32_t count)
{
    digest_advance(job, job->tokens + job->token_done, count);
    tv_stats_add(&sched->stats->prefill_tokens, (uint64_t)count);
    job->token_done += count;
}

/* So many rows more, or fewer, are its principal's. */
static void charge(struct tv_sched *sched, const struct job *job, int32_t rows)
{
    tv_sched_lock(sched);
    job->account->served += rows;
    tv_sched_unlock(sched);
}

void tv_sched_prefill_slice(struct tv_sched *sched, struct job *job, int32_t rows_max)
{
    struct tv_drawn drawn = {0};
    if (admit(sched, job) != 0) {
        return;
    }
    int32_t count = job->token_count - job->token_done;
    if (count > rows_max) {
        count = rows_max;
    }
    if (count > 0) {
        int last = job->token_done + count == job->token_count;
        charge(sched, job, count); /* before it: rounds between its parts are picked by that */
        int64_t start_us = tv_clock_us() - sched->between_us;
        tv_sched_engine_enter(sched);
        const struct tv_round_rule *rule = draws(job) && last ? &job->rule : NULL;
        int rc = slice_run(sched, job, count, rule, &drawn);
        while (rc == -ENOSPC && idle_give(sched, job)) {
            rc = slice_run(sched, job, count, rule, &drawn);
        }
        tv_sched_engine_leave(sched, rc == -EIO || rc == -ENOTRECOVERABLE ? rc : 0);
        tv_sched_count_engine(sched, rc == -ENOSPC || rc == -EDOM ? 0 : rc);
        int64_t took_us = tv_clock_us() - sched->between_us - start_us;
        job->gpu_us += took_us;
        if (rc != 0) {
            charge(sched, job, rc == -ENOSPC ? -count : 0); /* without pages nothing is computed */
            tv_sched_job_fail_rc(sched, job, rc);
            return;
        }
        if (count <= sched->launch_rows) { /* longer ones are of an idle server: nobody asks */
            tv_sched_curve_add(sched->share.slices, count, took_us);
        }
        advance(sched, job, count);
    }
    if (job->token_done == job->token_count) {
        end(sched, job, &drawn);
    }
}

int tv_sched_prefill_ride(struct tv_sched *sched, struct job *job, int32_t rows_max,
                          struct tv_rider *ret_rider)
{
    if (admit(sched, job) != 0 || !tv_sched_share_may(sched, job)) {
        return 0; /* what is known was adopted just now, and the rest may be too deep */
    }
    int32_t left = job->token_count - job->token_done;
    int32_t count = left < rows_max ? left : rows_max;
    *ret_rider = (struct tv_rider){
        .context = job->context,
        .tokens = job->tokens + job->token_done,
        .count = count,
        .rule = draws(job) && count == left ? &job->rule : NULL,
        .hidden = {.rows = count > 0 ? tv_sched_hidden_wanted(job, job->token_done, count) : 0,
                   .project = job->call->request.want.hidden.project},
    };
    return count > 0;
}

int tv_sched_prefill_ran(const struct tv_rider *rider)
{
    return rider->rc != -EAGAIN && rider->rc != -ENOSPC;
}

void tv_sched_prefill_rode(struct tv_sched *sched, struct job *job, const struct tv_rider *rider)
{
    int rc = rider->rc;
    if (!tv_sched_prefill_ran(rider)) {
        return; /* it is as it was: its next slice finds pages, or is refused */
    }
    job->gpu_us += rider->device_us;
    if (rc == 0 && rider->hidden.rows > 0) {
        rc = tv_sched_hidden_slice(job, job->token_done, rider->count, &rider->hidden);
    }
    if (rc != 0) {
        tv_sched_job_fail_rc(sched, job, rc);
        return;
    }
    advance(sched, job, rider->count);
    if (job->token_done == job->token_count) {
        end(sched, job, &rider->drawn);
    }
}
