/*
 * launch.c - one engine call for the rounds of several jobs and some tokens of a prompt, and what
 * becomes of each.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

void tv_sched_engine_enter(struct tv_sched *sched)
{
    tv_sched_lock(sched);
    tv_sched_count_idle(sched, tv_clock_us());
    sched->launch_start_us = tv_clock_us();
    sched->progress_us = sched->launch_start_us;
    tv_sched_unlock(sched);
}

void tv_sched_engine_leave(struct tv_sched *sched, int rc)
{
    tv_sched_lock(sched);
    sched->launch_start_us = 0;
    sched->engine_left_us = tv_clock_us();
    sched->launch_rc = rc;
    tv_sched_unlock(sched);
    tv_sched_lost_note(sched, rc);
}

static const struct tv_tree *tree_of(const struct job *job)
{
    return job->round.kind == TV_CALL_DECODE
               ? &job->step
               : tv_request_tree(&job->call->request, job->alternative);
}

static int commits(const struct job *job)
{
    return (job->round.kind == TV_CALL_VERIFY && !job->hold) || job->round.kind == TV_CALL_DECODE;
}

/* Rounds whose drafts are accepted by a coin; a comparison is about the model. */
static int by_coin(const struct tv_sched *sched, const struct job *job)
{
    return sched->config->synthetic_acceptance_count > 0 &&
           (job->round.kind == TV_CALL_VERIFY || job->round.kind == TV_CALL_ONESHOT);
}

static void round_prepare(struct tv_sched *sched, int32_t i, int64_t now_us)
{
    struct job *job = sched->batch[i];
    const struct tv_want *want = &job->call->request.want;
    int is_parity = job->round.kind == TV_CALL_PARITY;
    struct tv_shadow_round *captured = NULL;
    if (job->batch == 0) { /* its first launch */
        job->queue_us = now_us - job->call->received_us;
    }
    if (job->round.kind == TV_CALL_DECODE) {
        job->step_token = job->staged > 0 ? job->end.token : job->session->pending;
    }
    /* a score decides nothing, under rule client there is no walk to judge, nor is a coin */
    if (sched->shadow != NULL && job->round.kind != TV_CALL_SCORE && !by_coin(sched, job) &&
        job->rule.rule != TV_RULE_CLIENT) {
        captured = tv_shadow_begin(sched->shadow, is_parity      ? TV_SHADOW_ON_DEMAND
                                                  : want->shadow ? TV_SHADOW_WANTED
                                                                 : TV_SHADOW_SAMPLED);
    }
    sched->batch_shadow[i] = captured;
    sched->batch_in[i] = (struct tv_round_in){
        .context = job->context,
        .tree = tree_of(job),
        .rule = job->rule,
        .commit = commits(job),
        .hold = job->hold,
        .want_logits = want->logits,
        .lend_logits = is_parity || captured != NULL,
        .top_k = want->top_k,
        .want_hidden = want->hidden.wanted,
        .project = want->hidden.project,
        .score = job->round.kind == TV_CALL_SCORE,
        .logits_rows = &want->logits_rows,
        .topk_rows = &want->rows,
        .hidden_rows = &want->hidden.rows,
        .hook = captured != NULL ? tv_shadow_layer : NULL,
        .committed = captured != NULL && (is_parity || commits(job)) ? tv_shadow_committed : NULL,
        .hook_context = captured,
    };
    if (by_coin(sched, job)) {
        sched->batch_in[i].rule.rates = sched->config->synthetic_acceptance;
        sched->batch_in[i].rule.rate_count = sched->config->synthetic_acceptance_count;
    }
    memset(&sched->batch_out[i], 0, sizeof sched->batch_out[i]);
    sched->batch_out[i].code = TV_KERNEL_FAULT; /* unless the engine says otherwise */
}

/* The oracle thread has its word; the worker goes on from there. */
void tv_sched_job_judged(void *context, const struct tv_shadow_block *block)
{
    struct job *job = context;
    struct tv_sched *sched = job->sched;
    tv_sched_lock(sched);
    job->blocks.shadow = *block;
    job->judged = 1;
    tv_sched_ring(sched);
    tv_sched_unlock(sched);
}

void tv_sched_judged_settle(struct tv_sched *sched, struct job *job, int draining)
{
    tv_sched_lock(sched);
    int judged = job->judged;
    tv_sched_unlock(sched);
    if (!judged && tv_shadow_forget(sched->shadow, job)) {
        job->blocks.shadow =
            (struct tv_shadow_block){.skipped = draining ? "draining" : "deadline"};
    }
    tv_sched_job_succeed(sched, job);
}

/* Hand a live round to the oracles. 1: the job waits for the word. */
static int shadow_submit(struct tv_sched *sched, struct job *job, const struct tv_round_out *out,
                         struct tv_shadow_round *captured)
{
    static const int32_t nothing[1]; /* a one-shot without a prompt has none to point at */
    const struct tv_session *session = job->session;
    const int32_t *prompt = job->tokens != NULL ? job->tokens : nothing;
    if (captured != NULL) {
        struct tv_parity_case fast = {
            .prefix = session != NULL ? session->tokens : prompt,
            .prefix_len = session != NULL ? session->len + job->staged : job->token_count,
            .tree = tree_of(job),
            .rule = job->rule,
            .logits = out->logits,
            .accepted_nodes = out->nodes,
            .accepted_count = out->accepted_count,
            .pending = out->end.token,
            .noise = tv_engine_near_tie(sched->engine),
            .round = captured,
        };
        tv_shadow_attach(sched->shadow, captured, &fast);
    }
    if (!job->call->request.want.shadow) {
        if (captured != NULL) {
            tv_shadow_submit(sched->shadow, captured, NULL, NULL);
        }
        return 0;
    }
    job->round.shadow = &job->blocks.shadow;
    if (captured == NULL) { /* the answer says that it did not run */
        job->blocks.shadow = (struct tv_shadow_block){.skipped = "engine"};
        return 0;
    }
    job->stage = JOB_JUDGED;
    tv_shadow_submit(sched->shadow, captured, tv_sched_job_judged, job);
    return 1;
}

static void abandon(struct tv_sched *sched, struct tv_shadow_round *captured)
{
    if (captured != NULL) {
        tv_shadow_abandon(sched->shadow, captured);
    }
}

static void margin_take(struct job *job, const struct tv_drawn *end)
{
    if (end->has_margin && (!job->has_margin || end->margin < job->margin_min)) {
        job->has_margin = 1;
        job->margin_min = end->margin;
    }
    job->end = *end;
}

/* verify and one-shot: the round is the answer. */
static void tree_settle(struct tv_sched *sched, struct job *job, const struct tv_round_out *out,
                        struct tv_shadow_round *captured)
{
    const struct tv_tree *tree = tree_of(job);
    int rc = tv_sched_blocks_take(job, tree, out, sched->engine->vocab);
    if (rc != 0) {
        abandon(sched, captured);
        tv_sched_job_fail_rc(sched, job, rc);
        return;
    }
    job->round.stat_nodes = tree->count;
    job->round.stat_depth = tree->depth;
    margin_take(job, &out->end);
    int waits = shadow_submit(sched, job, out, captured); /* its prefix: before the commit */
    job->round.held = job->hold;
    if (job->session != NULL && !job->hold) {
        tv_session_stage(job->session, 0, job->blocks.accepted_tokens, out->accepted_count,
                         &job->digest);
        job->staged = out->accepted_count;
    }
    if (!waits) {
        tv_sched_job_succeed(sched, job);
    }
}

static void decode_settle(struct tv_sched *sched, struct job *job, const struct tv_round_out *out,
                          struct tv_shadow_round *captured)
{
    struct job_blocks *blocks = &job->blocks;
    int32_t max_tokens = job->call->request.max_tokens;
    if (blocks->new_tokens == NULL) {
        blocks->new_tokens = malloc((size_t)max_tokens * sizeof *blocks->new_tokens);
    }
    if (blocks->new_tokens == NULL) {
        abandon(sched, captured);
        tv_sched_job_fail_rc(sched, job, -ENOMEM);
        return;
    }
    (void)shadow_submit(sched, job, out, captured); /* decode has no want: nothing to wait for */
    tv_session_stage(job->session, job->staged, &job->step_token, 1, &job->digest);
    job->staged++;
    margin_take(job, &out->end);
    blocks->new_tokens[job->round.new_count++] = out->end.token;
    job->round.new_tokens = blocks->new_tokens;
    job->round.stat_nodes++;
    if (job->end.finish != TV_FINISH_NONE || job->round.new_count == max_tokens) {
        tv_sched_job_succeed(sched, job);
    }
}

static void score_settle(struct tv_sched *sched, struct job *job, const struct tv_round_out *out)
{
    struct tv_buf body;
    tv_sched_prefix_publish(sched, job);
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    tv_encode_scores(&body, out->scores, tree_of(job)->count, sched->synthetic);
    tv_sched_job_answer(sched, job, 200, "application/json", &body);
}

static void round_settle(struct tv_sched *sched, int32_t i, int32_t count)
{
    struct job *job = sched->batch[i];
    struct tv_round_out *out = &sched->batch_out[i];
    struct tv_shadow_round *captured = sched->batch_shadow[i];
    job->picked = 0;
    job->gpu_us += out->device_us;
    job->batch = job->batch > count ? job->batch : count;
    if (out->code == TV_OK && out->accepted_count < 1) {
        out->code = TV_KERNEL_FAULT; /* the call failed before this round was answered */
    }
    if (out->code == TV_KV_FULL && tv_sched_idle_give(sched, &out->shortage)) {
        abandon(sched, captured); /* it has changed nothing: it goes with the next launch */
    } else if (out->code != TV_OK) {
        abandon(sched, captured);
        job->shortage = out->shortage;
        tv_sched_job_fail(sched, job, out->code, "%s",
                          out->detail[0] != '\0' ? out->detail : "the launch failed");
    } else if (job->round.kind == TV_CALL_PARITY) {
        tv_sched_parity_take(sched, job, out, captured);
    } else if (job->round.kind == TV_CALL_SCORE) {
        score_settle(sched, job, out);
    } else if (job->round.kind == TV_CALL_DECODE) {
        decode_settle(sched, job, out, captured);
    } else {
        tree_settle(sched, job, out, captured);
    }
}

/* Was every round in the pass? One that is refused before it, for pages say, took none of its time.
 */
static int all_ran(const struct tv_sched *sched, int32_t count)
{
    int32_t ran = 0;
    while (ran < count && (sched->batch_out[ran].code == TV_OK ||
                           sched->batch_out[ran].code == TV_NUMERIC_FAULT)) {
        ran++;
    }
    return ran == count;
}

/* What the launch teaches: its cost, who drafted in vain, and that rounds are about. took_us below
 * 0: it failed. rider: NULL, or what was to go along. */
static void launch_note(struct tv_sched *sched, int32_t count, int32_t rows,
                        const struct tv_rider *rider, int64_t took_us, int64_t end_us)
{
    int measured = took_us >= 0 && all_ran(sched, count);
    int ran = rider != NULL && tv_sched_prefill_ran(rider), rode = ran && rider->rc == 0;
    tv_sched_lock(sched);
    if (ran) {
        sched->rider->account->served += rider->count;
    }
    if (measured && rode) {
        tv_sched_share_note(sched, sched->rider, rider->count, rows, took_us);
    } else if (measured && !ran) { /* else it took the time of tokens that failed, too */
        tv_sched_curve_add(sched->curve, rows, took_us);
    }
    sched->launch_took_us = measured ? took_us : sched->launch_took_us;
    sched->rode = rode;
    for (int32_t i = 0; i < count; i++) {
        struct job *job = sched->batch[i];
        const struct tv_round_out *out = &sched->batch_out[i];
        job->launch_start_us = end_us - (took_us > 0 ? took_us : 0);
        job->launch_end_us = end_us;
        int drafts = job->round.kind == TV_CALL_VERIFY || job->round.kind == TV_CALL_ONESHOT;
        if (out->code == TV_OK && drafts && !job->hold && out->accepted_count > 0) {
            tv_sched_account_judge(job->account, sched->batch_in[i].tree->count - 1,
                                   out->accepted_count - 1, end_us);
        }
    }
    sched->launched_us = end_us;
    sched->rounds_last[1] = sched->rounds_last[0];
    sched->rounds_last[0] = count;
    tv_sched_unlock(sched);
}

/* Settle the held rounds that those of the launch begin with; how many are left in it. */
static int32_t settle_prevs(struct tv_sched *sched, int32_t count)
{
    int32_t left = 0;
    for (int32_t i = 0; i < count; i++) {
        struct job *job = sched->batch[i];
        int rc = job->round.kind == TV_CALL_VERIFY ? tv_sched_prev_settle(sched, job) : 0;
        if (rc == 0) {
            sched->batch[left++] = job;
        } else {
            tv_sched_job_fail_rc(sched, job, rc);
        }
    }
    return left;
}

/* The engine call. rider: NULL, or it goes along. */
static int launch(struct tv_sched *sched, int32_t count, struct tv_rider *rider)
{
    struct tv_engine *engine = sched->engine;
    int rc = rider != NULL ? engine->ops->verify_shared(engine, sched->batch_in, count,
                                                        sched->batch_out, rider)
                           : engine->ops->verify(engine, sched->batch_in, count, sched->batch_out);
    for (int32_t i = 0; i < count && rc == 0; i++) {
        rc = sched->batch_out[i].code == TV_KERNEL_FAULT ? -EIO : 0;
    }
    if (rc == 0 && rider != NULL && (rider->rc == -EIO || rider->rc == -ENOTRECOVERABLE)) {
        rc = rider->rc;
    }
    return rc;
}

void tv_sched_launch_run(struct tv_sched *sched, int32_t count)
{
    struct tv_rider rider;
    struct job *prompt = sched->rider;
    int32_t rows = 0;
    count = settle_prevs(sched, count);
    if (count == 0) {
        return;
    }
    if (prompt != NULL && !tv_sched_prefill_ride(sched, prompt, sched->rider_rows, &rider)) {
        prompt = NULL;
    }
    int64_t start_us = tv_clock_us();
    for (int32_t i = 0; i < count; i++) {
        round_prepare(sched, i, start_us);
        rows += sched->batch_in[i].tree->count;
    }
    tv_sched_engine_enter(sched);
    start_us = tv_clock_us();
    const struct tv_rider *along = prompt != NULL ? &rider : NULL;
    int rc = launch(sched, count, prompt != NULL ? &rider : NULL);
    int64_t took_us = tv_clock_us() - start_us;
    tv_sched_engine_leave(sched, rc);
    tv_sched_count_engine(sched, rc);
    tv_sched_count_launch(sched, rows, along != NULL && along->rc == 0 ? along->count : 0);
    for (int32_t i = 0; i < count; i++) {
        sched->batch[i]->sample_us += took_us - sched->batch_out[i].device_us;
    }
    launch_note(sched, count, rows, along, rc == 0 ? took_us : -1, start_us + took_us);
    for (int32_t i = 0; i < count; i++) {
        round_settle(sched, i, count);
    }
    if (prompt != NULL) {
        tv_sched_prefill_rode(sched, prompt, &rider);
    }
}
