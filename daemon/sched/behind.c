/*
 * behind.c - rounds that run only when the one before ends as guessed (speculate-ahead).
 *
 * Such a round was checked and waits beside the queue while its session's round is under way. The
 * end of that one decides under the same lock that commits it: the guess held, and the round joins
 * the queue where its arrival puts it; it did not, and the round's answer is that it was skipped;
 * or there was no end, and it is refused.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

void tv_sched_behind_add(struct tv_session *session, struct job *job)
{
    const struct tv_request *request = &job->call->request;
    job->rule.rule = request->has_rule ? request->rule : session->sampling.rule;
    job->session = session; /* lives at least until its round under way has ended */
    job->behind = 1;
    tv_session_wait(session, request->seq, request->body_hash, job);
}

void tv_sched_behind_remove(struct tv_sched *sched, struct job *job)
{
    tv_sched_job_list_remove(&sched->behind, job);
    tv_session_wait(job->session, 0, NULL, NULL);
    job->behind = 0;
    job->session = NULL;
}

int tv_sched_skip(struct tv_session *session, const struct tv_request *request, int32_t lease_s,
                  struct tv_buf *ret_body)
{
    const struct tv_session_kept *before = tv_session_kept_of(session, request->if_seq);
    struct tv_session_kept kept = {.seq = request->seq, .leaf = -1};
    struct tv_skipped skipped = {.seq = request->seq,
                                 .pending = session->pending,
                                 .committed_len = session->len,
                                 .next_seq = request->seq + 1,
                                 .finish = session->finish,
                                 .outcome = before->body,
                                 .outcome_bytes = before->body_bytes,
                                 .lease_expires_unix_ms = tv_session_lease_end(session, lease_s)};
    memcpy(skipped.digest, session->digest.bytes, sizeof skipped.digest);
    if (before->outcome_bytes > 0) { /* skipped too: of the last round that ran, so none nests */
        skipped.outcome += before->outcome_at;
        skipped.outcome_bytes = before->outcome_bytes;
    }
    tv_buf_init(ret_body, TV_SCHED_REPLY_BYTES + skipped.outcome_bytes);
    tv_encode_skipped(ret_body, &skipped, &kept.outcome_at);
    kept.outcome_bytes = skipped.outcome_bytes;
    kept.body = ret_body->failed == 0 ? malloc(ret_body->bytes) : NULL;
    if (kept.body == NULL) {
        int rc = ret_body->failed != 0 ? ret_body->failed : -ENOMEM;
        tv_buf_finish(ret_body);
        return rc;
    }
    memcpy(kept.body, ret_body->data, ret_body->bytes);
    kept.body_bytes = ret_body->bytes;
    memcpy(kept.body_hash, request->body_hash, sizeof kept.body_hash);
    tv_session_keep(session, &kept);
    tv_session_renew(session, lease_s, tv_clock_us());
    return 0;
}

/* Every call of a round that will not run; the session's own word on it when code is TV_OK. */
static void refuse(struct tv_session *session, struct job *job, enum tv_code code, const char *text,
                   struct tv_call **ret_calls)
{
    tv_sched_account_refund(job);
    tv_sched_count_end(job->sched, job->round.kind, job->rule.rule, TV_STATS_FAILED);
    job->call->next = job->twins;
    for (struct tv_call *call = job->call; call != NULL; call = call->next) {
        struct tv_problem problem = {0};
        if (code == TV_OK) {
            (void)tv_session_judge(session, &call->request, &problem); /* refuses, as it just did */
        } else {
            tv_problem_set(&problem, code, NULL, "%s", text);
            tv_session_explain(session, session->len, &problem);
        }
        tv_sched_refuse(call, &problem);
    }
    for (struct tv_call *call = job->watchers; call != NULL; call = call->next) {
        tv_sched_reply_refuse(call, TV_ROUND_NOT_FOUND, NULL, "the round failed; its seq is free");
    }
    tv_sched_job_let_go(job, ret_calls);
    tv_sched_job_destroy(job);
}

void tv_sched_behind_refuse(struct tv_sched *sched, struct tv_session *session,
                            struct tv_call **ret_calls)
{
    struct job *job = session->behind;
    if (job == NULL) {
        return;
    }
    tv_sched_behind_remove(sched, job);
    sched->queue_count--;
    if (sched->lost) {
        refuse(session, job, tv_sched_end_code(sched), tv_sched_end_text(sched), ret_calls);
        return;
    }
    refuse(session, job, TV_SEQ_GAP, "the round before has failed; its seq is next", ret_calls);
}

/* It was skipped: every call gets that answer, but for those that are too many for one so large. */
static void skip_reply(struct tv_sched *sched, struct job *job, struct tv_buf *body)
{
    static const char large[] = "the answers before are too large together";
    struct tv_call *first = job->call, *call = first;
    size_t together = 0; /* of those that have joined */
    for (call->next = job->twins; call != NULL; call = call->next) {
        /* it is kept: sent again, the call gets it */
        if (!tv_sched_batch_room(sched, call) || !tv_sched_copy_room(sched, together)) {
            tv_sched_reply_refuse(call, TV_OVERLOADED, NULL, large);
            continue;
        }
        if (call->together != NULL) {
            *call->together += body->bytes;
        }
        if (call != first) {
            together += body->bytes;
            tv_sched_reply_replay(call, body->data, body->bytes);
        } else {
            tv_sched_reply_stored(call, 200, body->data, body->bytes);
        }
    }
    for (call = job->watchers; call != NULL; call = call->next) {
        if (tv_sched_copy_room(sched, together)) {
            together += body->bytes;
            tv_sched_reply_replay(call, body->data, body->bytes);
        } else {
            tv_sched_reply_refuse(call, TV_OVERLOADED, NULL, large);
        }
    }
    tv_buf_finish(body);
}

static void settle_skip(struct tv_sched *sched, struct tv_session *session, struct job *job,
                        struct tv_call **ret_calls)
{
    struct tv_buf body;
    tv_sched_account_refund(job);
    if (tv_sched_skip(session, &job->call->request, tv_sched_job_lease(job), &body) != 0) {
        refuse(session, job, TV_INTERNAL, "no memory for the answer", ret_calls);
        return;
    }
    tv_sched_count_skip(sched, job->rule.rule);
    skip_reply(sched, job, &body);
    tv_sched_job_let_go(job, ret_calls);
    tv_sched_job_destroy(job);
}

void tv_sched_behind_settle(struct tv_sched *sched, struct tv_session *session,
                            struct tv_call **ret_calls)
{
    struct job *job = session->behind;
    struct tv_problem problem = {0};
    if (job == NULL) {
        return;
    }
    tv_sched_behind_remove(sched, job);
    enum tv_session_verdict verdict = tv_session_judge(session, &job->call->request, &problem);
    if (verdict == TV_SESSION_RUN && tv_sched_round_begin(job, session, &problem) == 0) {
        tv_sched_job_list_insert(&sched->queue, job); /* the worker is the one who calls */
        return;
    }
    sched->queue_count--;
    job->session = NULL;
    if (verdict == TV_SESSION_SKIP) {
        settle_skip(sched, session, job, ret_calls);
    } else {
        refuse(session, job, verdict == TV_SESSION_RUN ? TV_INTERNAL : TV_OK,
               "no memory for the round", ret_calls);
    }
    tv_problem_finish(&problem);
}
