/*
 * account.c - the limits of one principal: waiting calls, sessions, pages, nodes a second, and the
 * share of its drafts that the model rejects.
 *
 * Refuses before anything has changed. Every limit but the share of the queue is off by default.
 */
#include "sched/account.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sched/job.h"

struct tv_account *tv_sched_account_of(struct tv_sched *sched, const char *principal,
                                       int64_t now_us)
{
    struct tv_account *account = sched->accounts;
    while (account != NULL && strcmp(account->principal, principal) != 0) {
        account = account->next;
    }
    if (account == NULL) {
        account = calloc(1, sizeof *account);
        if (account == NULL) {
            return NULL;
        }
        memcpy(account->principal, principal, strlen(principal) + 1);
        account->nodes_left = INFINITY; /* cut to the burst when it is first looked at */
        account->nodes_us = account->drafted_us = now_us;
        account->next = sched->accounts;
        sched->accounts = account;
    }
    account->seen_us = now_us;
    return account;
}

void tv_sched_accounts_free(struct tv_sched *sched)
{
    while (sched->accounts != NULL) {
        struct tv_account *account = sched->accounts;
        sched->accounts = account->next;
        free(account);
    }
}

static int refuse(struct tv_problem *problem, const char *name, int64_t quota, int64_t left,
                  int64_t wait_s)
{
    problem->rate_name = name;
    problem->rate_quota = quota;
    problem->rate_left = left > 0 ? left : 0;
    problem->retry_after_s = (int32_t)(wait_s < 1 ? 1 : wait_s > 3600 ? 3600 : wait_s);
    return -EINVAL;
}

/* One principal's calls fill half the queue at most beyond its equal share, so that others find
 * room whenever they come. Alone it may have all of it. */
static int check_queue(const struct tv_sched *sched, const struct tv_account *account,
                       int64_t now_us, struct tv_problem *problem)
{
    int32_t active = 0, waiting = 0;
    for (const struct tv_account *other = sched->accounts; other != NULL; other = other->next) {
        active += now_us - other->seen_us <= TV_SCHED_ACTIVE_US;
    }
    int32_t share = sched->config->queue_max / (active > 0 ? active : 1);
    if (active <= 1 || sched->queue_count < sched->config->queue_max / 2) {
        return 0;
    }
    const struct job *lists[2] = {sched->queue.first, sched->behind.first};
    for (int i = 0; i < 2; i++) {
        for (const struct job *job = lists[i]; job != NULL; job = job->next) {
            waiting += job->account == account;
        }
    }
    if (waiting < (share > 0 ? share : 1)) {
        return 0;
    }
    tv_problem_set(problem, TV_RATE_LIMITED, NULL,
                   "%d calls of this key are waiting, and others share the queue", waiting);
    return refuse(problem, "waiting", share, 0, 1);
}

static int64_t pages_of(const struct tv_sched *sched, int64_t rows)
{
    return (rows + sched->config->page_size - 1) / sched->config->page_size;
}

/* Nodes of the largest tree that the call may have run. */
static int32_t nodes_of(const struct tv_request *request)
{
    int32_t nodes = request->has_tree ? request->tree.count : 0;
    for (int32_t i = 0; i < request->alternative_count; i++) { /* one of them runs at most */
        int32_t count = tv_request_tree(request, i)->count;
        nodes = count > nodes ? count : nodes;
    }
    return nodes;
}

/* Rows that the job may add to what its principal holds: a tree's nodes lie in pages until the walk
 * is over. */
static int64_t rows_of(const struct job *job)
{
    const struct tv_request *request = &job->call->request;
    return request->kind == TV_CALL_DECODE ? request->max_tokens
                                           : (int64_t)request->token_count + nodes_of(request);
}

static int creates(const struct job *job)
{
    return job->round.kind == TV_CALL_CREATE || job->round.kind == TV_CALL_FORK;
}

/* Sessions of the principal and what they hold, those under way included. */
static void holdings(const struct tv_sched *sched, const struct tv_account *account,
                     int64_t *ret_sessions, int64_t *ret_pages)
{
    const struct tv_sessions *table = &sched->table;
    const struct job *lists[3] = {sched->queue.first, sched->behind.first, sched->running.first};
    *ret_sessions = *ret_pages = 0;
    for (size_t i = 0; i < table->bucket_count; i++) {
        for (const struct tv_session *session = table->buckets[i]; session != NULL;
             session = session->next) {
            if (strcmp(session->principal, account->principal) == 0) {
                *ret_sessions += 1;
                *ret_pages += pages_of(sched, tv_session_rows(session));
            }
        }
    }
    for (int i = 0; i < 3; i++) {
        for (const struct job *job = lists[i]; job != NULL; job = job->next) {
            if (job->account == account) {
                *ret_sessions += creates(job);
                *ret_pages += pages_of(sched, rows_of(job));
            }
        }
    }
}

static int check_holdings(const struct tv_sched *sched, const struct job *job,
                          struct tv_problem *problem)
{
    const struct tv_config *config = sched->config;
    int64_t sessions = 0, pages = 0;
    if (config->principal_pages == 0 && (config->principal_sessions == 0 || !creates(job))) {
        return 0;
    }
    holdings(sched, job->account, &sessions, &pages);
    if (creates(job) && config->principal_sessions > 0 && sessions >= config->principal_sessions) {
        tv_problem_set(problem, TV_RATE_LIMITED, NULL, "%lld sessions of this key are open",
                       (long long)sessions);
        return refuse(problem, "sessions", config->principal_sessions, 0, 1);
    }
    int64_t more = pages_of(sched, rows_of(job));
    if (config->principal_pages > 0 && pages + more > config->principal_pages) {
        tv_problem_set(problem, TV_RATE_LIMITED, NULL,
                       "%lld pages needed, this key holds %lld of its %lld", (long long)more,
                       (long long)pages, (long long)config->principal_pages);
        return refuse(problem, "pages", config->principal_pages, config->principal_pages - pages,
                      1);
    }
    return 0;
}

/* Nodes a second: the bucket holds a second's worth, or the largest tree. A call needs what it
 * costs or a full bucket, and is charged in full: a long prompt leaves a debt. */
static int check_rate(struct tv_sched *sched, struct job *job, int64_t now_us,
                      struct tv_problem *problem)
{
    struct tv_account *account = job->account;
    int64_t rate = sched->config->principal_nodes_s;
    if (rate == 0) {
        return 0;
    }
    int64_t burst = rate > sched->limits.tree.nodes_max ? rate : sched->limits.tree.nodes_max;
    int64_t cost = rows_of(job);
    double needed = (double)(cost < burst ? cost : burst);
    account->nodes_left += (double)(now_us - account->nodes_us) * 1e-6 * (double)rate;
    account->nodes_left = fmin(account->nodes_left, (double)burst);
    account->nodes_us = now_us;
    if (account->nodes_left < needed) {
        double wait_s = ceil((needed - account->nodes_left) / (double)rate);
        tv_problem_set(problem, TV_RATE_LIMITED, NULL, "%lld nodes a second for this key",
                       (long long)rate);
        return refuse(problem, "nodes", rate, (int64_t)account->nodes_left,
                      (int64_t)fmin(wait_s, 3600.0));
    }
    job->charged = cost;
    account->nodes_left -= (double)cost;
    return 0;
}

static void forget(struct tv_account *account, int64_t now_us)
{
    double factor = exp2(-(double)(now_us - account->drafted_us) / TV_SCHED_REJECT_HALF_US);
    account->drafted *= factor;
    account->rejected *= factor;
    account->drafted_us = now_us;
}

/* A drafter that is nearly always wrong makes the model work for nothing. It is slowed down to the
 * nodes that are forgotten meanwhile; a tree of node 0 alone has no drafts and goes on. */
static int check_budget(struct tv_sched *sched, struct job *job, int64_t now_us,
                        struct tv_problem *problem)
{
    struct tv_account *account = job->account;
    double limit = sched->config->principal_rejected;
    int drafts = job->round.kind == TV_CALL_VERIFY || job->round.kind == TV_CALL_ONESHOT;
    if (limit <= 0.0 || !drafts || nodes_of(&job->call->request) <= 1) {
        return 0;
    }
    forget(account, now_us);
    if (account->drafted < TV_SCHED_REJECT_NODES || account->rejected <= limit * account->drafted) {
        return 0;
    }
    double halvings = log2(account->drafted / TV_SCHED_REJECT_NODES);
    tv_problem_set(problem, TV_WORK_BUDGET, NULL,
                   "%.1f %% of this key's draft nodes were rejected, %.1f %% may be",
                   100.0 * account->rejected / account->drafted, 100.0 * limit);
    problem->retry_after_s = 1 + (int32_t)(halvings * TV_SCHED_REJECT_HALF_US * 1e-6);
    return -EINVAL;
}

int tv_sched_account_admit(struct tv_sched *sched, struct job *job, int64_t now_us,
                           struct tv_problem *problem)
{
    int rc = check_queue(sched, job->account, now_us, problem);
    if (rc == 0) {
        rc = check_holdings(sched, job, problem);
    }
    if (rc == 0) {
        rc = check_budget(sched, job, now_us, problem);
    }
    return rc == 0 ? check_rate(sched, job, now_us, problem) : rc;
}

void tv_sched_account_refund(struct job *job)
{
    if (job->account != NULL) {
        job->account->nodes_left += (double)job->charged; /* cut to the burst when looked at */
        job->charged = 0;
    }
}

void tv_sched_account_judge(struct tv_account *account, int32_t drafted, int32_t accepted,
                            int64_t now_us)
{
    forget(account, now_us);
    account->drafted += drafted;
    account->rejected += drafted - accepted;
}

void tv_sched_account_unsettled(struct tv_sched *sched, const struct tv_session *session,
                                int64_t now_us)
{
    if (session->held.seq == 0 || session->held.settled) {
        return;
    }
    for (struct tv_account *account = sched->accounts; account != NULL; account = account->next) {
        if (strcmp(account->principal, session->principal) == 0) {
            tv_sched_account_judge(account, session->held.count - 1, 0, now_us);
        }
    }
}
