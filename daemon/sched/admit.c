/*
 * admit.c - calls for the worker: every check that needs state, then a place in the queue.
 *
 * Runs on the caller's thread under the lock. Refuses in the order of the contract; a refusal has
 * changed nothing.
 */
#include <assert.h>
#include <errno.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"
#include "sched/job.h"

#define CLOSED_RETRY_S 10 /* a server that is being emptied is not back before */

/* A top_p above 0 stays above 0, so that what the decoder took is not refused later. */
static float share_narrow(double share)
{
    float narrow = (float)share;
    return narrow > 0.0f ? narrow : FLT_MIN;
}

/* Below 1e-4 is greedy, said here where the number is still exact: the nearest float may be 1e-4.
 */
static float temperature_narrow(double temperature)
{
    return temperature < 1e-4 ? 0.0f : (float)temperature;
}

/* The rule of a session's rounds, or of one verify that names another. */
static void rule_settle(struct tv_round_rule *rule, const struct tv_sampling_state *sampling,
                        int32_t max_len)
{
    *rule = (struct tv_round_rule){
        .rule = sampling->rule,
        .sampling = {.temperature = temperature_narrow(sampling->temperature),
                     .top_p = share_narrow(sampling->top_p),
                     .min_p = (float)sampling->min_p,
                     .top_k = sampling->top_k,
                     .seed = sampling->seed},
        .typical_epsilon = sampling->typical_epsilon,
        .typical_delta = sampling->typical_delta,
        .max_len = max_len,
    };
}

static void rule_of_session(struct job *job)
{
    const struct tv_session *session = job->session;
    const struct tv_request *request = &job->call->request;
    rule_settle(&job->rule, &session->sampling, session->max_len);
    memcpy(job->rule.stop_ids, session->stop_ids, sizeof job->rule.stop_ids);
    job->rule.stop_count = session->stop_count;
    if (request->kind == TV_CALL_VERIFY && request->has_rule) {
        job->rule.rule = request->rule;
    }
    if (request->kind == TV_CALL_VERIFY) {
        job->hold = request->hold || job->rule.rule == TV_RULE_CLIENT;
    } else if (job->rule.rule == TV_RULE_CLIENT) { /* without a tree there is nothing to choose */
        job->rule.rule = TV_RULE_TARGET_WALK;
    }
    job->round.sampling = session->sampling;
}

/* Sampling of a call without a session; the seed is drawn when nobody gave one. */
static int rule_of_call(struct tv_sched *sched, struct job *job)
{
    const struct tv_request *request = &job->call->request;
    struct tv_sampling_state *sampling = &job->round.sampling;
    int rc = 0;
    *sampling = (struct tv_sampling_state){.temperature = 1.0, .top_p = 1.0};
    if (request->has_sampling) {
        sampling->rule = request->sampling.rule;
        sampling->temperature = request->sampling.temperature;
        sampling->top_p = request->sampling.top_p;
        sampling->min_p = request->sampling.min_p;
        sampling->top_k = request->sampling.top_k;
        sampling->seed = request->sampling.seed;
    }
    sampling->has_typical = request->sampling.has_typical || sampling->rule == TV_RULE_TYPICAL;
    sampling->typical_epsilon = request->sampling.typical_epsilon;
    sampling->typical_delta = request->sampling.typical_delta;
    if (!request->has_sampling || !request->sampling.has_seed) {
        rc = tv_random_bytes(&sampling->seed, sizeof sampling->seed);
    }
    int32_t max_len = sched->engine->max_len;
    if (request->max_len > 0 && request->max_len < max_len) {
        max_len = request->max_len;
    }
    rule_settle(&job->rule, sampling, max_len);
    memcpy(job->rule.stop_ids, request->stop_ids, sizeof job->rule.stop_ids);
    job->rule.stop_count = request->stop_count;
    return rc;
}

int tv_sched_session_of(struct tv_sched *sched, const struct tv_call *call,
                        struct tv_session **ret_session, struct tv_problem *problem)
{
    const struct tv_request *request = &call->request;
    if (tv_sched_epoch_judge(sched, call, problem) != 0) {
        return -EINVAL;
    }
    enum tv_code code = tv_sessions_find(&sched->table, request->session, call->principal,
                                         tv_clock_us(), ret_session);
    if (code == TV_SESSION_EXPIRED) {
        tv_problem_set(problem, code, NULL,
                       "the session's lease is over, or it was idle and its pages were needed");
        tv_sched_ring(sched); /* if it ended here, its pages go back now */
    } else if (code != TV_OK) {
        tv_problem_set(problem, code, NULL, "no such session");
    }
    return code == TV_OK ? 0 : -EINVAL;
}

/* Work that belongs to no open session; a fork becomes a session too. A comparison is none: an
 * admin may want to see one before the server is taken back. */
static int is_new(const struct job *job)
{
    const struct tv_request *request = &job->call->request;
    switch (request->kind) {
    case TV_CALL_CREATE:
    case TV_CALL_FORK:
    case TV_CALL_ONESHOT:
        return 1;
    case TV_CALL_SCORE:
        return request->session[0] == '\0';
    default:
        return 0;
    }
}

/* Is there room for one more call? */
static int admission(struct tv_sched *sched, struct job *job, struct tv_problem *problem)
{
    int64_t now_us = tv_clock_us();
    job->account = tv_sched_account_of(sched, job->call->principal, now_us);
    if (job->account == NULL) {
        tv_problem_set(problem, TV_OVERLOADED, NULL, "no memory for an account");
    } else if (sched->refusing || sched->lost) {
        tv_problem_set(problem, tv_sched_end_code(sched), NULL, "%s", tv_sched_end_text(sched));
    } else if (sched->closed && is_new(job)) {
        tv_problem_set(problem, TV_DRAINING, NULL,
                       "the server is being emptied: open sessions go on, others go elsewhere");
        problem->retry_after_s = CLOSED_RETRY_S;
    } else if (sched->queue_count >= sched->config->queue_max) {
        tv_problem_set(problem, TV_OVERLOADED, NULL, "%d calls are waiting", sched->queue_count);
        problem->retry_after_s = 1;
    } else {
        return tv_sched_account_admit(sched, job, now_us, problem);
    }
    return -EINVAL;
}

/* For what takes no seq: 1 and *problem while something else is under way. */
static int refuse_busy(const struct tv_session *session, struct tv_problem *problem)
{
    if (!session->busy) {
        return 0;
    }
    tv_problem_set(problem, TV_SESSION_BUSY, NULL,
                   "another operation of this session is under way");
    tv_session_explain(session, session->len, problem);
    return 1;
}

static int sessions_full(struct tv_sched *sched, struct tv_problem *problem)
{
    if (sched->table.count < sched->config->max_sessions) {
        return 0;
    }
    tv_problem_set(problem, TV_RATE_LIMITED, NULL, "%d sessions are open", sched->table.count);
    problem->retry_after_s = 1;
    return 1;
}

static int fault(struct tv_problem *problem, const char *text)
{
    tv_problem_set(problem, TV_INTERNAL, NULL, "%s", text);
    return -EINVAL;
}

static int check_create(struct tv_sched *sched, struct job *job, struct tv_problem *problem)
{
    const struct tv_request *request = &job->call->request;
    int32_t max_len = sched->engine->max_len;
    if (request->max_len > 0 && request->max_len < max_len) {
        max_len = request->max_len;
    }
    if (request->has_expected_digest &&
        memcmp(request->expected_digest, job->digest.bytes, sizeof job->digest.bytes) != 0) {
        tv_problem_set(problem, TV_DIGEST_MISMATCH, "/expected_digest",
                       "the tokens have another digest");
        return -EINVAL;
    }
    if (request->token_count >= max_len) {
        tv_problem_set(
            problem, TV_CONTEXT_FULL, request->prefix_len > 0 ? "/prefix/len" : "/tokens",
            "%d tokens and the next, but the limit is %d", request->token_count, max_len);
        return -EINVAL;
    }
    if (sessions_full(sched, problem) || admission(sched, job, problem) != 0) {
        return -EINVAL;
    }
    if (tv_sessions_build(&sched->table, request, job->call->principal, &job->session) != 0) {
        return fault(problem, "no memory for a session");
    }
    rule_of_session(job);
    tv_session_occupy(job->session, 0, NULL, job);
    job->tokens = request->tokens;
    job->token_count = request->token_count;
    job->digest = job->session->digest;
    job->own_context = 1; /* until the session has it */
    return 0;
}

/* The child is made at once, so that it is counted; its rows come with the worker. */
static int check_fork(struct tv_sched *sched, struct job *job, struct tv_problem *problem)
{
    const struct tv_request *request = &job->call->request;
    struct tv_session *parent = NULL;
    if (tv_sched_session_of(sched, job->call, &parent, problem) != 0) {
        return -EINVAL;
    }
    if (refuse_busy(parent, problem) || tv_session_refuse_held(parent, problem)) {
        return -EINVAL;
    }
    if (request->len > parent->len) {
        tv_problem_set(problem, TV_WRONG_VALUE, "/len", "len %d, but the committed length is %d",
                       request->len, parent->len);
        return -EINVAL;
    }
    if (sessions_full(sched, problem) || admission(sched, job, problem) != 0) {
        return -EINVAL;
    }
    if (tv_sessions_fork(&sched->table, parent, request->len > 0 ? request->len : parent->len,
                         request, &job->session) != 0) {
        return fault(problem, "no memory for a session");
    }
    rule_of_session(job);
    tv_session_occupy(job->session, 0, NULL, job);
    tv_session_occupy(parent, 0, NULL, job);
    job->parent = parent;
    job->digest = job->session->digest;
    job->own_context = 1; /* until the session has it */
    return 0;
}

/* Tokens that the round may commit at most. */
static int32_t commit_max(const struct tv_request *request, int32_t alternative)
{
    switch (request->kind) {
    case TV_CALL_VERIFY:
        return tv_request_tree(request, alternative)->depth + 1 + request->path_count;
    case TV_CALL_COMMIT:
        return request->path_count;
    case TV_CALL_DECODE:
        return request->max_tokens;
    case TV_CALL_ROLLBACK:
        return 0;
    default:
        return request->token_count + 1;
    }
}

static int extend_tokens(struct job *job)
{
    const struct tv_request *request = &job->call->request;
    job->token_count = request->token_count;
    job->tokens = request->tokens;
    if (request->keep_pending) {
        size_t count = (size_t)request->token_count;
        job->tokens = malloc((count + 1) * sizeof *job->tokens);
        if (job->tokens == NULL) {
            return -ENOMEM;
        }
        job->owns_tokens = 1;
        job->tokens[0] = job->session->pending;
        if (count > 0) {
            memcpy(job->tokens + 1, request->tokens, count * sizeof *job->tokens);
        }
        job->token_count++;
    }
    return 0;
}

/* A rule that says what the session's own says is a default: a retry may leave it out, or add it.
 */
static void rule_resolve(struct tv_request *request, const struct tv_session *session)
{
    if (request->kind == TV_CALL_VERIFY && request->has_rule &&
        request->rule == session->sampling.rule) {
        request->has_rule = 0;
        request->rule = TV_RULE_TARGET_WALK; /* as in a body without it */
        memcpy(request->body_hash, request->ruleless_hash, sizeof request->body_hash);
    }
}

int tv_sched_round_begin(struct job *job, struct tv_session *session, struct tv_problem *problem)
{
    const struct tv_request *request = &job->call->request;
    int32_t alternative = tv_session_guess(session, request);
    job->session = session;
    job->context = session->context;
    job->digest = session->digest;
    rule_of_session(job);
    if (tv_session_reserve(session, commit_max(request, alternative)) != 0 ||
        (request->kind == TV_CALL_EXTEND && extend_tokens(job) != 0)) {
        return fault(problem, "no memory for the round");
    }
    job->alternative = alternative;
    job->round.has_alternative = request->alternative_count > 0;
    job->round.alternative = alternative;
    if (request->kind == TV_CALL_VERIFY) {
        job->nodes = tv_request_tree(request, alternative)->count;
    }
    tv_session_ack(session, request->ack);
    tv_sched_count_guess(job->sched, request, alternative);
    tv_session_occupy(session, request->seq, request->body_hash, job);
    return 0;
}

/* The round before has ended, and otherwise. 1: answered; -EINVAL with *problem. */
static int skip(struct tv_sched *sched, struct tv_session *session, struct tv_call *call,
                struct tv_problem *problem)
{
    struct tv_buf body;
    if (tv_sched_skip(session, &call->request, call->request.lease_s, &body) != 0) {
        return fault(problem, "no memory for the answer");
    }
    tv_sched_count_skip(sched,
                        call->request.has_rule ? call->request.rule : session->sampling.rule);
    tv_sched_reply_set(call, 200, &body);
    return 1;
}

/* The draft's distributions and `commit` against the rule that the session gives the round. */
static int check_rule(const struct tv_session *session, const struct tv_request *request,
                      struct tv_problem *problem)
{
    if (request->has_rule || request->kind == TV_CALL_SCORE) {
        return 0; /* the decoder has judged it */
    }
    return tv_request_check_rule(request, session->sampling.rule, problem);
}

/* The same round is under way, or waits behind one that is. As check_round. */
static int attach(struct tv_sched *sched, struct job *job, struct tv_call *call, int *ret_attached,
                  struct tv_problem *problem)
{
    if (tv_sched_job_join(sched, job, call, problem) != 0) {
        return -EINVAL;
    }
    tv_stats_add(&sched->stats->replays[TV_STATS_ATTACHED], 1);
    *ret_attached = 1;
    return 1;
}

/* verify, extend, decode, rollback. 0: the job may be queued; 1: the call is answered or attached,
 * *ret_kept says which; -EINVAL with *problem. */
static int check_round(struct tv_sched *sched, struct job *job, int *ret_attached,
                       struct tv_problem *problem)
{
    struct tv_call *call = job->call;
    const struct tv_request *request = &call->request;
    const struct tv_session_kept *kept = NULL;
    struct tv_session *session = NULL;
    if (tv_sched_session_of(sched, call, &session, problem) != 0) {
        return -EINVAL;
    }
    rule_resolve(&call->request, session);
    switch (tv_session_judge(session, request, problem)) {
    case TV_SESSION_REPLAY:
        kept = tv_session_kept_of(session, request->seq);
        tv_stats_add(&sched->stats->replays[TV_STATS_STORED], 1);
        tv_sched_reply_replay(call, kept->body, kept->body_bytes);
        tv_session_renew(session, request->lease_s, tv_clock_us());
        return 1;
    case TV_SESSION_ATTACH:
        return attach(sched, session->operation, call, ret_attached, problem);
    case TV_SESSION_JOIN:
        return attach(sched, session->behind, call, ret_attached, problem);
    case TV_SESSION_SKIP:
        return skip(sched, session, call, problem);
    case TV_SESSION_REFUSED:
        return -EINVAL;
    case TV_SESSION_BEHIND:
        if (check_rule(session, request, problem) != 0 || admission(sched, job, problem) != 0) {
            return -EINVAL;
        }
        tv_sched_behind_add(session, job);
        return 0;
    case TV_SESSION_RUN:
        break;
    }
    return check_rule(session, request, problem) != 0 || admission(sched, job, problem) != 0
               ? -EINVAL
               : tv_sched_round_begin(job, session, problem);
}

/* one-shot, score and parity: a prefix of their own; the last two also on a session. */
static int check_detached(struct tv_sched *sched, struct job *job, struct tv_problem *problem)
{
    struct tv_request *request = &job->call->request;
    if (request->kind == TV_CALL_PARITY && sched->engine->rounding.rows > 0) {
        tv_problem_set(problem, TV_WRONG_VALUE, NULL,
                       "the path oracle's products are exact, those of this server are not "
                       "(products = bf16)");
        return -EINVAL;
    }
    if (request->kind == TV_CALL_PARITY && !request->has_tree) {
        int rc = tv_sched_parity_self_case(sched, request, problem);
        if (rc != 0) {
            return rc == -ENOMEM ? fault(problem, "no memory for the self-test case") : rc;
        }
    }
    if (request->session[0] != '\0') {
        struct tv_session *session = NULL;
        if (tv_sched_session_of(sched, job->call, &session, problem) != 0) {
            return -EINVAL;
        }
        if (refuse_busy(session, problem)) {
            return -EINVAL;
        }
        if (tv_session_judge_tree(session, &request->tree, problem) != 0 ||
            check_rule(session, request, problem) != 0 || admission(sched, job, problem) != 0) {
            return -EINVAL;
        }
        job->session = session;
        job->context = session->context;
        rule_of_session(job);
        tv_session_occupy(session, 0, NULL, job);
        return 0;
    }
    if (admission(sched, job, problem) != 0) {
        return -EINVAL;
    }
    if (rule_of_call(sched, job) != 0) {
        return fault(problem, "no random seed");
    }
    job->own_context = 1;
    job->tokens = request->tokens;
    job->token_count = request->token_count;
    return 0;
}

/* A call that begins with a prompt of its own. */
static int has_prompt(const struct tv_request *request)
{
    return request->token_count > 0 && request->session[0] == '\0';
}

/* Every check that needs state; as check_round. */
static int check(struct tv_sched *sched, struct job *job, int *ret_attached,
                 struct tv_problem *problem)
{
    switch (job->call->request.kind) {
    case TV_CALL_CREATE:
        return check_create(sched, job, problem);
    case TV_CALL_FORK:
        return check_fork(sched, job, problem);
    case TV_CALL_ONESHOT:
    case TV_CALL_SCORE:
    case TV_CALL_PARITY:
        return check_detached(sched, job, problem);
    default:
        return check_round(sched, job, ret_attached, problem);
    }
}

/* With the lock: the checks, then the queue. 0: queued; 1: answered, or attached when *ret_attached
 * says so; -EINVAL with *problem. */
static int admit(struct tv_sched *sched, struct job *job, int *ret_attached,
                 struct tv_problem *problem)
{
    const struct tv_request *request = &job->call->request;
    if (tv_sched_is_gone(job->call)) { /* since it came */
        tv_sched_refuse_gone(job->call);
        return 1;
    }
    int rc = tv_sched_key_judge(sched, job->call, ret_attached, problem);
    if (rc == 0) {
        rc = check(sched, job, ret_attached, problem);
    }
    if (rc == 0) {
        if (request->kind != TV_CALL_VERIFY) {
            job->nodes = request->has_tree ? request->tree.count : 1;
        }
        job->key = tv_sched_key_claim(sched, job->call, job); /* what is refused takes no place */
        job->queued = 1;
        tv_sched_job_list_push(job->behind ? &sched->behind : &sched->queue, job);
        sched->queue_count++;
        tv_sched_ring(sched);
    }
    if (rc < 0) {
        tv_sched_account_refund(job);
    }
    sched->in_flight += rc == 0 || *ret_attached;
    return rc;
}

/* The prompt of a create that is a session's tokens; a repeat needs none, and that session may be
 * gone. As admit. */
static int prompt_take(struct tv_sched *sched, struct tv_call *call, int *ret_attached,
                       struct tv_problem *problem)
{
    if (call->request.prefix_len == 0) {
        return 0;
    }
    tv_sched_lock(sched);
    if (tv_sched_is_gone(call)) { /* it must not be attached: nobody looks for it again */
        tv_sched_unlock(sched);
        tv_sched_refuse_gone(call);
        return 1;
    }
    int rc = tv_sched_key_judge(sched, call, ret_attached, problem);
    if (rc == 0) {
        rc = tv_sched_prefix_source(sched, &call->request, call->principal, problem);
    }
    sched->in_flight += *ret_attached;
    tv_sched_unlock(sched);
    return rc;
}

int tv_sched_admit(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_problem problem = {0};
    int attached = 0;
    struct job *job = tv_sched_job_create(sched, call);
    if (job == NULL) {
        tv_sched_reply_refuse(call, TV_INTERNAL, NULL, "no memory for the call");
        return 0;
    }
    int rc = prompt_take(sched, call, &attached, &problem);
    if (rc == 0 && has_prompt(&call->request) && tv_sched_prefix_hash(sched, job) != 0) {
        rc = fault(&problem, "no memory for the prompt's digests");
    }
    if (rc == 0) {
        tv_sched_lock(sched);
        rc = admit(sched, job, &attached, &problem);
        tv_sched_unlock(sched);
    }
    if (rc != 0) {
        tv_sched_job_destroy(job);
    }
    if (rc < 0) {
        tv_sched_refuse(call, &problem);
    }
    return rc == 0 || attached;
}

/* One item of several; as tv_sched_submit. */
static int admit_item(struct tv_sched *sched, struct tv_call *call)
{
    struct tv_problem problem = {0};
    int attached = 0, rc = -EINVAL;
    struct job *job = tv_sched_job_create(sched, call);
    if (job != NULL) {
        rc = admit(sched, job, &attached, &problem);
    } else {
        (void)fault(&problem, "no memory for the call"); /* always -EINVAL */
    }
    if (rc != 0) {
        tv_sched_job_destroy(job);
    }
    if (rc < 0) {
        tv_sched_refuse(call, &problem);
    }
    return rc == 0 || attached;
}

void tv_sched_admit_all(struct tv_sched *sched, struct tv_call **calls, int32_t count, int *queued)
{
    for (int32_t i = 0; i < count; i++) {
        struct tv_call *call = calls[i];
        if (!tv_sched_batch_room(sched, call)) { /* before it is looked at: its seq stays free */
            tv_sched_reply_refuse(call, TV_OVERLOADED, NULL,
                                  "the kept answers of the items before are too large together");
            queued[i] = 0;
            continue;
        }
        queued[i] = admit_item(sched, call);
        if (!queued[i]) {
            *call->together += call->reply.body.bytes;
        }
    }
}
