/*
 * keys.c - calls with an Idempotency-Key: a repeat gets the first one's answer, or waits for it.
 *
 * Refuses a key that came with another body. A call that was refused leaves its key free, and every
 * other key known.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

/* The stored answer, byte for byte; what it made, or the sessions of its rounds, have their whole
 * lease again. */
static void repeat(struct tv_sched *sched, struct tv_call *call, const struct tv_session_key *entry)
{
    int64_t now_us = tv_clock_us();
    struct tv_session *session = NULL;
    tv_sched_reply_stored(call, call->request.kind == TV_CALL_BATCH ? 200 : 201, entry->body,
                          entry->body_bytes);
    tv_sched_reply_made(call, entry->made);
    if (tv_sessions_find(&sched->table, entry->made, call->principal, now_us, &session) == TV_OK) {
        tv_session_renew(session, 0, now_us);
    }
    tv_sched_batch_renew(sched, call, 0);
}

int tv_sched_key_judge(struct tv_sched *sched, struct tv_call *call, int *ret_attached,
                       struct tv_problem *problem)
{
    if (call->key[0] == '\0') {
        return 0;
    }
    if (tv_sched_epoch_judge(sched, call, problem) != 0) {
        return -EINVAL; /* the answer may be there since before a restart, which is told first */
    }
    struct tv_session_key *entry =
        tv_session_key_find(&sched->table, call->principal, call->key, tv_clock_us());
    if (entry == NULL && tv_session_key_room(&sched->table)) {
        return 0;
    }
    if (entry == NULL) {
        tv_problem_set(problem, TV_OVERLOADED, NULL, "too many calls with a key wait");
        problem->retry_after_s = 1;
        return -EINVAL;
    }
    if (!tv_session_key_same(entry, &call->request)) {
        tv_problem_set(problem, TV_SEQ_REUSED, NULL,
                       "the Idempotency-Key was used with another body");
        return -EINVAL;
    }
    if (entry->operation == NULL) {
        repeat(sched, call, entry);
        return 1;
    }
    int rc = call->request.kind == TV_CALL_BATCH
                 ? tv_sched_batch_join(entry->operation, call, problem)
                 : tv_sched_job_join(sched, entry->operation, call, problem);
    *ret_attached = rc == 0;
    return rc == 0 ? 1 : rc;
}

struct tv_session_key *tv_sched_key_claim(struct tv_sched *sched, const struct tv_call *call,
                                          void *operation)
{
    struct tv_session_key *entry = NULL;
    if (call->key[0] != '\0') {
        entry = tv_session_key_begin(&sched->table, call->principal, call->key, &call->request,
                                     operation);
        assert(entry != NULL); /* there was room */
    }
    return entry;
}

void tv_sched_key_release(struct tv_sched *sched, struct job *job)
{
    if (job->key != NULL) {
        tv_session_key_end(&sched->table, job->key, "", NULL, 0, 0);
        job->key = NULL;
    }
}

void tv_sched_key_settle(struct tv_sched *sched, struct job *job, struct tv_session_kept *kept)
{
    if (job->key != NULL) {
        tv_session_key_end(&sched->table, job->key, job->round.session, kept->body,
                           kept->body_bytes, tv_clock_us());
        job->key = NULL;
        memset(kept, 0, sizeof *kept); /* the table has it now */
    }
}
