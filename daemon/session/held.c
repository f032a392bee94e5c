/*
 * held.c - a round that waits for its client's decision: what may run meanwhile, and whether a path
 * is one that the held tree has.
 *
 * Refuses paths that do not follow parents, go through a stop token, or leave no room for the token
 * behind them.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "session/internal.h"
#include "session/session.h"

int tv_session_held_make(int32_t seq, enum tv_rule rule, const struct tv_tree *tree,
                         const int32_t *proposed, int32_t proposed_count, int32_t pending,
                         struct tv_session_held *ret_held)
{
    size_t count = (size_t)tree->count, bytes = sizeof *tree->tokens;
    int32_t *block = malloc((2 * count + (size_t)proposed_count) * bytes);
    if (block == NULL) {
        return -ENOMEM;
    }
    *ret_held = (struct tv_session_held){.seq = seq,
                                         .rule = rule,
                                         .count = tree->count,
                                         .tokens = block,
                                         .parents = block + count,
                                         .proposed = block + 2 * count,
                                         .proposed_count = proposed_count,
                                         .pending = pending};
    memcpy(ret_held->tokens, tree->tokens, count * bytes);
    memcpy(ret_held->parents, tree->parents, count * bytes);
    memcpy(ret_held->proposed, proposed, (size_t)proposed_count * bytes);
    return 0;
}

void tv_session_held_finish(struct tv_session_held *held)
{
    free(held->tokens);
    memset(held, 0, sizeof *held);
}

int32_t tv_session_rows(const struct tv_session *session)
{
    int waits = session->held.seq > 0 && !session->held.settled;
    return session->len + (waits ? session->held.count : 0);
}

int tv_session_refuse_held(const struct tv_session *session, struct tv_problem *problem)
{
    if (session->held.seq == 0 || session->held.settled) {
        return 0;
    }
    tv_problem_set(problem, TV_ROUND_HELD, NULL, "round %d is held: commit it, or roll back",
                   session->held.seq);
    tv_session_explain(session, session->len, problem);
    return 1;
}

static int is_stop(const struct tv_session *session, int32_t token)
{
    for (int32_t i = 0; i < session->stop_count; i++) {
        if (session->stop_ids[i] == token) {
            return 1;
        }
    }
    return 0;
}

/* Is it a path of the held tree that the session has room for? 0 or -EINVAL. */
static int check_path(const struct tv_session *session, const struct tv_request *request,
                      struct tv_problem *problem)
{
    const struct tv_session_held *held = &session->held;
    char pointer[48];
    for (int32_t i = 0; i < request->path_count; i++) {
        int32_t node = request->path[i];
        (void)snprintf(pointer, sizeof pointer, "%s/path/%d",
                       request->has_prev ? "/commit_prev" : "", i); /* fits */
        if (node >= held->count || (i > 0 && held->parents[node] != request->path[i - 1])) {
            tv_problem_set(problem, TV_WRONG_VALUE, pointer,
                           node >= held->count ? "node %d is not in the held tree"
                                               : "node %d is no child of the one before",
                           node);
            return -EINVAL;
        }
        if (i > 0 && is_stop(session, held->tokens[node])) {
            tv_problem_set(problem, TV_WRONG_VALUE, pointer,
                           "node %d is a stop token: the path ends before it", node);
            return -EINVAL;
        }
    }
    if (request->path_count > 0 && session->len + request->path_count + 1 > session->max_len) {
        tv_problem_set(problem, TV_CONTEXT_FULL, NULL,
                       "%d committed tokens and the next, but the limit is %d",
                       session->len + request->path_count, session->max_len);
        return -EINVAL;
    }
    return 0;
}

/* Has a round that then failed settled just this? */
static int settled_before(const struct tv_session *session, const struct tv_request *request)
{
    const struct tv_session_held *held = &session->held;
    if (!held->settled || request->prev_seq != held->seq ||
        request->path_count != session->len - held->len_before ||
        (request->has_next && request->next != session->pending)) {
        return 0;
    }
    for (int32_t i = 0; i < request->path_count; i++) {
        int32_t node = request->path[i];
        if (node >= held->count || (i > 0 && held->parents[node] != request->path[i - 1]) ||
            held->tokens[node] != session->tokens[held->len_before + i]) {
            return 0;
        }
    }
    return 1;
}

int tv_session_settles(const struct tv_session *session, const struct tv_request *request)
{
    return session->held.seq > 0 && !session->held.settled &&
           (request->has_prev || request->kind == TV_CALL_COMMIT);
}

int tv_session_judge_held(const struct tv_session *session, const struct tv_request *request,
                          struct tv_problem *problem)
{
    const struct tv_session_held *held = &session->held;
    int settles = request->has_prev || request->kind == TV_CALL_COMMIT;
    if (!settles) {
        return request->kind != TV_CALL_ROLLBACK && tv_session_refuse_held(session, problem)
                   ? -EINVAL
                   : 0;
    }
    if (request->has_prev && settled_before(session, request)) {
        return 0;
    }
    if (held->seq == 0 || held->settled || (request->has_prev && request->prev_seq != held->seq)) {
        tv_problem_set(problem, TV_ROUND_NOT_FOUND, request->has_prev ? "/commit_prev/seq" : NULL,
                       request->has_prev ? "round %d is not held" : "no round is held",
                       request->prev_seq);
        tv_session_explain(session, session->len, problem);
        return -EINVAL;
    }
    return check_path(session, request, problem);
}

void tv_session_settled(const struct tv_session *session, const struct tv_request *request,
                        struct tv_digest *ret_digest, int32_t *ret_pending,
                        enum tv_finish *ret_finish)
{
    int32_t len = session->len + request->path_count;
    *ret_digest = session->digest;
    *ret_pending = session->pending;
    *ret_finish = session->finish;
    if (request->path_count == 0) {
        return;
    }
    for (int32_t i = 0; i < request->path_count; i++) {
        tv_digest_push(ret_digest, session->held.tokens[request->path[i]]);
    }
    *ret_pending = request->next;
    *ret_finish = is_stop(session, request->next)                 ? TV_FINISH_STOP
                  : (int64_t)len + 1 >= (int64_t)session->max_len ? TV_FINISH_LENGTH
                                                                  : TV_FINISH_NONE;
}

int tv_session_deviates(const struct tv_session *session, const struct tv_request *request)
{
    const struct tv_session_held *held = &session->held;
    if (request->path_count == 0) {
        return 0; /* nothing of it stays, and nothing else comes instead */
    }
    return request->path_count != held->proposed_count || request->next != held->pending ||
           memcmp(request->path, held->proposed,
                  (size_t)held->proposed_count * sizeof *held->proposed) != 0;
}

void tv_session_settle_held(struct tv_session *session, const struct tv_request *request)
{
    struct tv_digest digest = session->digest, settled;
    enum tv_finish finish;
    int32_t pending;
    tv_session_settled(session, request, &settled, &pending, &finish);
    for (int32_t i = 0; i < request->path_count; i++) {
        tv_session_stage(session, i, &session->held.tokens[request->path[i]], 1, &digest);
    }
    assert(memcmp(&digest, &settled, sizeof digest) == 0);
    session->held.len_before = session->len;
    session->held.settled = 1;
    tv_session_commit(session, request->path_count, &settled, pending, finish);
}
