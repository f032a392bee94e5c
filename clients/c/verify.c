/*
 * verify.c - the rounds as callers ask for them: arguments judged, then run with their recovery.
 *
 * Owns what is refused before anything is sent (-EINVAL): trees, paths of held rounds, lengths.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "clients/c/internal.h"

/* Run, for callers that may not want the round. */
static int run(struct tv_client_session *session, struct tv_client_ask *ask,
               struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_round round;
    int error = tv_client_check_idle(session, ret_problem);
    if (error != 0) {
        return error;
    }
    error = tv_client_round_run(session, ask, &round, ret_problem);
    if (error == 0 && ret_round != NULL) {
        *ret_round = round;
    } else if (error == 0) {
        tv_client_round_finish(&round);
    }
    return tv_client_end(error, ret_problem);
}

int tv_client_check_tree(const int32_t *tokens, const int32_t *parents, int32_t count,
                         int32_t pending, struct tv_client_problem *ret_problem)
{
    if (tokens == NULL || parents == NULL || count < 1 || count > TV_CLIENT_NODES_MAX) {
        tv_client_problem_set(ret_problem, "a tree has 1 to %d nodes", TV_CLIENT_NODES_MAX);
        return -EINVAL;
    }
    if (tokens[0] != pending) {
        tv_client_problem_set(ret_problem,
                              "node 0 is token %" PRId32 ", but %" PRId32 " is pending", tokens[0],
                              pending);
        ret_problem->node = 0;
        return -EINVAL;
    }
    for (int32_t i = 0; i < count; i++) {
        if (i == 0 ? parents[i] != -1 : parents[i] < 0 || parents[i] >= i) {
            tv_client_problem_set(ret_problem, "node %" PRId32 ": parent %" PRId32 "%s", i,
                                  parents[i], i == 0 ? ", not -1" : " is not before it");
            ret_problem->node = i;
            return -EINVAL;
        }
    }
    return 0;
}

/* The caller's path through the held tree, with its tokens. 0; -EINVAL with its words. */
static int settle(const struct tv_client_session *session, const struct tv_client_settle *wanted,
                  struct tv_client_settling *ret_settling, struct tv_client_problem *ret_problem)
{
    if (session->state.held_seq == 0) {
        tv_client_problem_set(ret_problem, "no round of this session is held");
        return -EINVAL;
    }
    if (wanted->path_count < 0 || wanted->path_count > session->held_count ||
        (wanted->path_count > 0 && wanted->path == NULL) ||
        (wanted->next < 0) != (wanted->path_count == 0)) {
        tv_client_problem_set(ret_problem, "a path goes with the token that is pending behind it");
        return -EINVAL;
    }
    for (int32_t i = 0; i < wanted->path_count; i++) {
        int32_t node = wanted->path[i];
        int32_t above = i > 0 ? wanted->path[i - 1] : -1;
        if (node < 0 || node >= session->held_count || session->held_parents[node] != above) {
            tv_client_problem_set(ret_problem, "path: node %" PRId32 " does not follow %" PRId32,
                                  node, above);
            ret_problem->node = node;
            return -EINVAL;
        }
        ret_settling->path[i] = node;
        ret_settling->tokens[i] = session->held_tokens[node];
    }
    ret_settling->seq = session->state.held_seq;
    ret_settling->path_count = wanted->path_count;
    ret_settling->next = wanted->path_count > 0 ? wanted->next : -1;
    return 0;
}

int tv_client_verify(struct tv_client_session *session, const int32_t *tokens,
                     const int32_t *parents, int32_t count, struct tv_client_round *ret_round,
                     struct tv_client_problem *ret_problem)
{
    return tv_client_verify_with(session, tokens, parents, count, NULL, ret_round, ret_problem);
}

static int is_rule(const char *rule)
{
    return rule == NULL || strcmp(rule, "greedy") == 0 || strcmp(rule, "target_walk") == 0 ||
           strcmp(rule, "typical") == 0 || strcmp(rule, "client") == 0;
}

int tv_client_verify_with(struct tv_client_session *session, const int32_t *tokens,
                          const int32_t *parents, int32_t count,
                          const struct tv_client_verify_options *options,
                          struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    static const struct tv_client_verify_options nothing = {0};
    const struct tv_client_verify_options *more = options != NULL ? options : &nothing;
    struct tv_client_ask ask = {.kind = TV_CLIENT_VERIFY,
                                .tokens = tokens,
                                .parents = parents,
                                .count = count,
                                .rule = more->rule,
                                .logits = more->logits,
                                .deadline_ms = more->deadline_ms,
                                .lease_s = more->lease_s};
    int32_t pending = session->state.pending;
    if (!is_rule(more->rule) || (int)more->logits < TV_CLIENT_ROWS_NONE ||
        more->logits > TV_CLIENT_ROWS_ALL || more->deadline_ms < 0 || more->lease_s < 0) {
        tv_client_problem_set(ret_problem, "rule, rows or a limit out of range");
        return -EINVAL;
    }
    const char *rule = more->rule != NULL ? more->rule : session->rule;
    ask.holds = more->hold || strcmp(rule, "client") == 0;
    if (more->commit_prev != NULL) {
        int error = settle(session, more->commit_prev, &ask.settling, ret_problem);
        if (error != 0) {
            return error;
        }
        pending = ask.settling.path_count > 0 ? ask.settling.next : pending;
    }
    int error = tv_client_check_tree(tokens, parents, count, pending, ret_problem);
    return error == 0 ? run(session, &ask, ret_round, ret_problem) : error;
}

int tv_client_commit(struct tv_client_session *session, const struct tv_client_settle *settle_as,
                     struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_ask ask = {.kind = TV_CLIENT_COMMIT};
    int error = settle(session, settle_as, &ask.settling, ret_problem);
    return error == 0 ? run(session, &ask, ret_round, ret_problem) : error;
}

int tv_client_decode(struct tv_client_session *session, int32_t tokens_max,
                     struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_ask ask = {.kind = TV_CLIENT_DECODE, .tokens_max = tokens_max};
    if (tokens_max < 1 || tokens_max > TV_CLIENT_DECODE_TOKENS_MAX) {
        tv_client_problem_set(ret_problem, "decode takes 1 to %d tokens",
                              TV_CLIENT_DECODE_TOKENS_MAX);
        return -EINVAL;
    }
    return run(session, &ask, ret_round, ret_problem);
}

int tv_client_extend(struct tv_client_session *session, const int32_t *tokens, int32_t count,
                     int keep_pending, struct tv_client_round *ret_round,
                     struct tv_client_problem *ret_problem)
{
    struct tv_client_ask ask = {.kind = TV_CLIENT_EXTEND,
                                .tokens = tokens,
                                .count = count,
                                .keep_pending = keep_pending != 0};
    if (tokens == NULL || count < 1) {
        tv_client_problem_set(ret_problem, "extend takes 1 token or more");
        return -EINVAL;
    }
    return run(session, &ask, ret_round, ret_problem);
}

int tv_client_rollback(struct tv_client_session *session, int32_t len, int32_t pending,
                       struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    struct tv_client_ask ask = {
        .kind = TV_CLIENT_ROLLBACK, .len = len, .pending = pending < 0 ? -1 : pending};
    if (len < 1 || len > session->state.committed_len) {
        tv_client_problem_set(ret_problem, "rollback: a length from 1 to %" PRId32,
                              session->state.committed_len);
        return -EINVAL;
    }
    return run(session, &ask, ret_round, ret_problem);
}
