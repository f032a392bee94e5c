/*
 * parity.c - POST /v1/parity: one fast round against both oracles, committing nothing.
 *
 * The worker runs the round and copies it; the path oracle runs on a thread of its own, because it
 * takes as long as it takes and must not delay a round that did not ask.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "sched/job.h"

/* The built-in case: a prefix over a page border of 16, and a binary tree of draft tokens. */
#define SELF_PREFIX 40
#define SELF_NODES  15

/* The deepest whole binary tree of at most SELF_NODES that every limit admits, behind a prefix of
 * one token where there is room for one; of one word, where siblings would be equal, a chain. */
static void self_sizes(const struct tv_sched *sched, int32_t *ret_depth, int32_t *ret_prefix)
{
    const struct tv_tree_limits *limits = &sched->limits.tree;
    int32_t depth = 0, max_len = sched->engine->max_len;
    while (depth < limits->depth_max && (4 << depth) - 1 <= SELF_NODES &&
           (4 << depth) - 1 <= limits->nodes_max && depth + 3 <= max_len) {
        depth++;
    }
    int32_t room = max_len - 1 - depth;
    *ret_depth = depth;
    *ret_prefix = room < SELF_PREFIX ? room : SELF_PREFIX;
}

int tv_sched_parity_self_case(struct tv_sched *sched, struct tv_request *request,
                              struct tv_problem *problem)
{
    int32_t vocab = sched->engine->vocab, depth = 0, prefix = 0;
    struct tv_tree *tree = &request->tree;
    self_sizes(sched, &depth, &prefix);
    request->tokens = malloc(SELF_PREFIX * sizeof *request->tokens);
    tree->tokens = malloc(SELF_NODES * sizeof *tree->tokens);
    tree->parents = malloc(SELF_NODES * sizeof *tree->parents);
    if (request->tokens == NULL || tree->tokens == NULL || tree->parents == NULL) {
        return -ENOMEM; /* the request's owner frees what is there */
    }
    request->token_count = prefix;
    for (int32_t i = 0; i < prefix; i++) {
        request->tokens[i] = (7 * i + 3) % vocab;
    }
    tree->count = vocab > 1 ? (2 << depth) - 1 : depth + 1;
    for (int32_t i = 0; i < tree->count; i++) {
        tree->tokens[i] = i % vocab; /* siblings differ by one, so they are never equal */
        tree->parents[i] = vocab > 1 && i > 0 ? (i - 1) / 2 : i - 1;
    }
    request->has_tree = 1;
    return tv_tree_check(tree, &sched->limits.tree, problem);
}

static void *copy(const void *data, size_t bytes)
{
    void *kept = malloc(bytes > 0 ? bytes : 1);
    if (kept != NULL && bytes > 0) {
        memcpy(kept, data, bytes);
    }
    return kept;
}

/* Everything the oracles need, in memory of the job's own. */
static int parity_copy(struct tv_sched *sched, struct job *job, const struct tv_round_out *out)
{
    const struct tv_tree *tree = &job->call->request.tree;
    const struct tv_session *session = job->session;
    const int32_t *prefix = session != NULL ? session->tokens : job->tokens;
    int32_t prefix_len = session != NULL ? session->len : job->token_count;
    struct job_parity *parity = calloc(1, sizeof *parity);
    job->parity = parity;
    if (parity == NULL || tv_sched_blocks_take(job, tree, out, sched->engine->vocab) != 0) {
        return -ENOMEM;
    }
    parity->prefix = copy(prefix, (size_t)prefix_len * sizeof *prefix);
    parity->logits =
        copy(out->logits, (size_t)tree->count * (size_t)sched->engine->vocab * sizeof *out->logits);
    parity->compared = (struct tv_parity_case){
        .prefix = parity->prefix,
        .prefix_len = prefix_len,
        .tree = tree,
        .rule = job->rule,
        .logits = parity->logits,
        .accepted_nodes = job->blocks.nodes,
        .accepted_count = out->accepted_count,
        .pending = out->end.token,
        .noise = tv_engine_near_tie(sched->engine),
        .cancelled = {&sched->parity_stop, &job->call->cancelled},
    };
    return parity->prefix == NULL || parity->logits == NULL ? -ENOMEM : 0;
}

/* The server stops, or nobody waits for the answer any more. */
static int cancelled(const struct tv_sched *sched, const struct job *job)
{
    return atomic_load_explicit(&sched->parity_stop, memory_order_relaxed) != 0 ||
           atomic_load_explicit(&job->call->cancelled, memory_order_relaxed) != 0;
}

/* Both oracles; after the second one's word the worker concludes, so the job is not touched then.
 */
static void compare(struct tv_sched *sched, struct job *job)
{
    struct job_parity *parity = job->parity;
    parity->path_rc = tv_shadow_path_compare(sched->shadow, &parity->compared, &parity->report);
    (void)pthread_mutex_lock(&sched->handover); /* an ordinary mutex */
    if (cancelled(sched, job)) {
        const struct tv_shadow_block none = {0};
        parity->path_rc = -ECANCELED;
        tv_shadow_abandon(sched->shadow, parity->captured);
        tv_sched_job_judged(job, &none);
    } else {
        tv_shadow_submit(sched->shadow, parity->captured, tv_sched_job_judged, job);
    }
    (void)pthread_mutex_unlock(&sched->handover);
}

void tv_sched_parity_take(struct tv_sched *sched, struct job *job, const struct tv_round_out *out,
                          struct tv_shadow_round *captured)
{
    /* Weights in a device's own memory are the worker's to copy. */
    struct tv_engine_facts facts;
    tv_engine_facts(sched->engine, &facts);
    int on_worker = facts.weights_apart;
    if (sched->shadow == NULL || captured == NULL) {
        tv_sched_job_fail(sched, job, TV_INTERNAL, "there is no oracle for this engine");
        return;
    }
    if (parity_copy(sched, job, out) != 0) {
        tv_shadow_abandon(sched->shadow, captured);
        tv_sched_job_fail_rc(sched, job, -ENOMEM);
        return;
    }
    /* Not attached: the path oracle draws the walk again, so that the kernel oracle's tokens_equal
     * tells whether the kernel was within its bounds. */
    job->parity->captured = captured;
    job->parity->compared.round = captured;
    tv_sched_job_close(sched, job); /* its pages are pinned as long as the oracle needs them */
    tv_sched_lock(sched);
    if (job->session != NULL) { /* free for its next round, but alive until the oracles' word */
        (void)snprintf(job->parity->session, sizeof job->parity->session, "%s", job->session->id);
        tv_session_hold(job->session);
        tv_session_idle(&sched->table, job->session);
        job->session = NULL;
        job->context = NULL;
    }
    job->stage = JOB_JUDGED;
    if (on_worker) {
        tv_sched_unlock(sched);
        compare(sched, job);
        return;
    }
    struct job **link = &sched->compare_queue;
    while (*link != NULL) {
        link = &(*link)->parity->next;
    }
    *link = job;
    (void)pthread_cond_signal(&sched->compare);
    tv_sched_unlock(sched);
}

void *tv_sched_comparer_main(void *context)
{
    struct tv_sched *sched = context;
    tv_sched_lock(sched);
    while (!sched->compare_stopping || sched->compare_queue != NULL) {
        struct job *job = sched->compare_queue;
        if (job == NULL) {
            (void)pthread_cond_wait(&sched->compare, &sched->table.lock);
            continue;
        }
        sched->compare_queue = job->parity->next;
        tv_sched_unlock(sched);
        compare(sched, job);
        tv_sched_lock(sched);
    }
    tv_sched_unlock(sched);
    return NULL;
}

/* 1: no oracle has the job any more. 0: one has and gives up soon; its word is still to come. */
static int withdraw(struct tv_sched *sched, struct job *job)
{
    (void)pthread_mutex_lock(&sched->handover); /* an ordinary mutex */
    int found = tv_shadow_forget(sched->shadow, job);
    (void)pthread_mutex_unlock(&sched->handover);
    job->withdrawn = 1;
    return found;
}

/* The session, when it is still there, has its whole lease from now on. */
static void lease_let_go(struct tv_sched *sched, const struct job *job)
{
    struct tv_session *session = NULL;
    tv_sched_lock(sched);
    int64_t now_us = tv_clock_us();
    if (job->parity->session[0] != '\0' &&
        tv_sessions_find(&sched->table, job->parity->session, job->call->principal, now_us,
                         &session) == TV_OK) {
        tv_session_let_go(session, now_us);
    }
    tv_sched_unlock(sched);
}

void tv_sched_parity_conclude(struct tv_sched *sched, struct job *job)
{
    struct tv_parity_report *report = &job->parity->report;
    struct tv_buf body;
    tv_sched_lock(sched);
    int judged = job->judged;
    tv_sched_unlock(sched);
    if (!judged && !withdraw(sched, job)) {
        return;
    }
    lease_let_go(sched, job);
    if (!judged || job->parity->path_rc == -ECANCELED) {
        tv_sched_job_fail(sched, job, tv_sched_end_code(sched), "%s", tv_sched_end_text(sched));
        return;
    }
    if (!job->blocks.shadow.ran) {
        tv_sched_job_fail(sched, job, TV_OVERLOADED,
                          "the kernel oracle has no room for this round");
        return;
    }
    if (job->parity->path_rc != 0) {
        tv_sched_job_fail(sched, job, TV_INTERNAL, "the path oracle could not run: %s",
                          strerror(-job->parity->path_rc));
        return;
    }
    report->kernel = job->blocks.shadow.kernel;
    report->ok = report->ok && job->blocks.shadow.tokens_equal;
    report->took_ms = (tv_clock_us() - job->call->received_us) / 1000;
    if (report->ok) { /* nobody shall find rows that are doubted */
        tv_sched_prefix_publish(sched, job);
    }
    tv_buf_init(&body, TV_SCHED_REPLY_BYTES);
    if (report->ok || !job->call->request.strict) {
        tv_encode_parity_report(&body, report);
        tv_sched_job_answer(sched, job, 200, "application/json", &body);
        return;
    }
    struct tv_problem problem;
    tv_problem_set(&problem, TV_PARITY_MISMATCH, NULL, "fast path and oracle differ");
    tv_encode_problem(&body, &problem, job->call->request_id, report);
    job->call->reply.code = problem.code; /* the answer is no refusal of sched's, but a problem */
    tv_sched_job_answer(sched, job, tv_code_info(problem.code)->http_status,
                        "application/problem+json", &body);
}
