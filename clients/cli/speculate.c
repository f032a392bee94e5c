/*
 * speculate.c - rounds of drafted trees: the likeliest path of the tree under way is the guess of
 * how it ends, and what the drafter would draft behind it is sent while the round runs.
 */
#include <string.h>

#include "clients/cli/speculate.h"

/* Depth that neither the context, the server nor the tokens still wanted would cut, `behind` tokens
 * from here. */
static int32_t depth_limit(const struct tv_speculation *spec, int64_t left, int32_t behind)
{
    const struct tv_client_state *now = tv_client_session_state(spec->session);
    int64_t depth = TV_DRAFTER_DEPTH_MAX;
    int64_t room[] = {now->max_depth, (int64_t)now->max_len - 1 - now->committed_len - behind,
                      left - 1 - behind};
    for (size_t i = 0; i < sizeof(room) / sizeof(room[0]); i++) {
        if (room[i] < depth) {
            depth = room[i];
        }
    }
    return depth < 0 ? 0 : (int32_t)depth;
}

static int draft_tree(struct tv_speculation *spec, int32_t nodes, int32_t depth,
                      struct tv_sent *ret_sent)
{
    struct tv_draft draft;
    int error = tv_drafter_draft(spec->drafter, nodes, depth, &draft);
    if (error == 0) {
        memcpy(ret_sent->tokens, draft.tokens, (size_t)draft.count * sizeof(*draft.tokens));
        memcpy(ret_sent->parents, draft.parents, (size_t)draft.count * sizeof(*draft.parents));
        ret_sent->count = draft.count;
    }
    return error;
}

/* The likeliest path of the tree under way: the first child of each node. Its tokens below node 0
 * into ret_tokens; returns how many, and where it ends. */
static int32_t likely_path(const struct tv_sent *sent, int32_t *ret_tokens, int32_t *ret_leaf)
{
    int32_t count = 0;
    *ret_leaf = 0;
    for (int32_t node = 1; node < sent->count; node++) {
        if (sent->parents[node] == *ret_leaf) {
            ret_tokens[count++] = sent->tokens[node];
            *ret_leaf = node;
        }
    }
    return count;
}

static int is_stop(const struct tv_speculation *spec, int32_t token)
{
    for (int32_t i = 0; i < spec->stop_count; i++) {
        if (spec->stop_ids[i] == token) {
            return 1;
        }
    }
    return 0;
}

/* Behind the tree under way: what the drafter thinks comes next there, if it thinks anything. */
static int send_guess(struct tv_speculation *spec, int32_t nodes, int64_t left,
                      struct tv_client_problem *ret_problem)
{
    int32_t path[TV_DRAFTER_DEPTH_MAX + 1], leaf;
    struct tv_draft behind;
    int32_t count = likely_path(&spec->sent, path, &leaf);
    size_t supposed = (size_t)count;
    int error = tv_drafter_append(spec->drafter, path, supposed);
    if (error != 0) {
        return error;
    }
    error = tv_drafter_draft(spec->drafter, 2, 1, &behind);
    if (error == 0 && behind.count == 2 && !is_stop(spec, behind.tokens[1]) &&
        depth_limit(spec, left, count + 1) > 0) {
        const int32_t pending = behind.tokens[1];
        error = tv_drafter_append(spec->drafter, &pending, 1);
        if (error == 0) {
            supposed++;
            error = draft_tree(spec, nodes, depth_limit(spec, left, count + 1), &spec->next);
        }
        const struct tv_client_guess guess = {.leaf = leaf,
                                              .pending = pending,
                                              .tokens = spec->next.tokens,
                                              .parents = spec->next.parents,
                                              .count = spec->next.count};
        if (error == 0) {
            error = tv_client_send_if(spec->session, &guess, 1, ret_problem);
        }
    }
    (void)tv_drafter_forget(spec->drafter, supposed); /* they were appended */
    return error;
}

int tv_speculate(struct tv_speculation *spec, int32_t nodes, int64_t left,
                 struct tv_client_round *ret_round, struct tv_client_problem *ret_problem)
{
    const struct tv_client_state *now = tv_client_session_state(spec->session);
    struct tv_sent *sent = &spec->sent;
    int error = 0;
    nodes = nodes < now->max_nodes ? nodes : now->max_nodes;
    if (now->under_way == 0) {
        error = draft_tree(spec, nodes, depth_limit(spec, left, 0), sent);
        if (error == 0 && !spec->ahead) {
            error = tv_client_verify(spec->session, sent->tokens, sent->parents, sent->count,
                                     ret_round, ret_problem);
        } else if (error == 0) {
            error = tv_client_send(spec->session, sent->tokens, sent->parents, sent->count,
                                   ret_problem);
        }
    }
    if (error == 0 && spec->ahead) {
        error = send_guess(spec, nodes, left, ret_problem);
        if (error == 0) {
            error = tv_client_receive(spec->session, ret_round, ret_problem);
        }
    }
    if (error == 0) {
        spec->ran = *sent;
        if (spec->ahead && ret_round->guess >= 0) {
            *sent = spec->next;
        }
    }
    return error;
}
