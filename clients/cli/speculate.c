/*
 * speculate.c - rounds of drafted trees: the likeliest leaves of the tree under way are the guesses
 * of how it ends, and what the drafter would draft behind them is sent while the round runs.
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
        if (spec->budget !=
            NULL) { /* nodes stand in the order of their chance: the best are first */
            draft.count = tv_budget_fit(spec->budget, draft.chances, draft.count);
        }
        memcpy(ret_sent->tokens, draft.tokens, (size_t)draft.count * sizeof(*draft.tokens));
        memcpy(ret_sent->parents, draft.parents, (size_t)draft.count * sizeof(*draft.parents));
        ret_sent->count = draft.count;
        ret_sent->promised = 0.0;
        for (int32_t i = 1; i < draft.count; i++) {
            ret_sent->promised += draft.chances[i];
        }
    }
    return error;
}

/* The tokens from below node 0 down to a leaf into ret_tokens; returns how many. */
static int32_t path_to(const struct tv_sent *sent, int32_t leaf, int32_t *ret_tokens)
{
    int32_t count = 0, at;
    for (int32_t node = leaf; node > 0; node = sent->parents[node]) {
        count++;
    }
    at = count;
    for (int32_t node = leaf; node > 0; node = sent->parents[node]) {
        ret_tokens[--at] = sent->tokens[node];
    }
    return count;
}

/* The end of the likeliest path: the first child of each node. */
static int32_t likeliest(const struct tv_sent *sent)
{
    int32_t leaf = 0;
    for (int32_t node = 1; node < sent->count; node++) {
        leaf = sent->parents[node] == leaf ? node : leaf;
    }
    return leaf;
}

static int is_leaf(const struct tv_sent *sent, int32_t node)
{
    for (int32_t i = node + 1; i < sent->count; i++) {
        if (sent->parents[i] == node) {
            return 0;
        }
    }
    return 1;
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

/* Behind this leaf: what the drafter thinks comes next there, if it thinks anything, and its tree
 * behind that. 1: *ret_guess; 0: no guess; or an error. */
static int guess_behind(struct tv_speculation *spec, int32_t leaf, int32_t nodes, int64_t left,
                        struct tv_sent *ret_tree, struct tv_client_guess *ret_guess)
{
    int32_t path[TV_DRAFTER_DEPTH_MAX + 1];
    struct tv_draft behind;
    int32_t count = path_to(&spec->sent, leaf, path);
    size_t supposed = (size_t)count;
    int result = tv_drafter_append(spec->drafter, path, supposed);
    if (result != 0) {
        return result;
    }
    result = tv_drafter_draft(spec->drafter, 2, 1, &behind);
    if (result == 0 && behind.count == 2 && !is_stop(spec, behind.tokens[1]) &&
        depth_limit(spec, left, count + 1) > 0) {
        const int32_t pending = behind.tokens[1];
        result = tv_drafter_append(spec->drafter, &pending, 1);
        if (result == 0) {
            supposed++;
            result = draft_tree(spec, nodes, depth_limit(spec, left, count + 1), ret_tree);
        }
        *ret_guess = (struct tv_client_guess){.leaf = leaf,
                                              .pending = pending,
                                              .tokens = ret_tree->tokens,
                                              .parents = ret_tree->parents,
                                              .count = ret_tree->count};
        result = result == 0 ? 1 : result;
    }
    (void)tv_drafter_forget(spec->drafter, supposed); /* they were appended */
    return result;
}

/* The likeliest path's end first, then the other leaves: nodes stand in the order of their chance.
 */
static int send_guesses(struct tv_speculation *spec, int32_t nodes, int64_t left,
                        struct tv_client_problem *ret_problem)
{
    struct tv_client_guess guesses[TV_CLIENT_GUESSES_MAX];
    int32_t best = likeliest(&spec->sent), count = 0;
    for (int32_t i = 0; i <= spec->sent.count && count < spec->ahead; i++) {
        int32_t leaf = i == 0 ? best : i - 1;
        if (i > 0 && (leaf == best || !is_leaf(&spec->sent, leaf))) {
            continue;
        }
        int found = guess_behind(spec, leaf, nodes, left, &spec->next[count], &guesses[count]);
        if (found < 0) {
            return found;
        }
        count += found;
    }
    spec->sent_ahead += count > 0;
    return count > 0 ? tv_client_send_if(spec->session, guesses, count, ret_problem) : 0;
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
        if (error == 0 && spec->ahead == 0) {
            error = tv_client_verify(spec->session, sent->tokens, sent->parents, sent->count,
                                     ret_round, ret_problem);
        } else if (error == 0) {
            error = tv_client_send(spec->session, sent->tokens, sent->parents, sent->count,
                                   ret_problem);
        }
    }
    if (error == 0 && spec->ahead > 0) {
        error = send_guesses(spec, nodes, left, ret_problem);
        if (error == 0) {
            error = tv_client_receive(spec->session, ret_round, ret_problem);
        }
    }
    if (error == 0) {
        spec->ran = *sent;
        if (spec->budget != NULL) {
            tv_budget_learn(spec->budget, sent->promised, spec->ahead == 0, ret_round);
        }
        if (spec->ahead > 0 && ret_round->guess >= 0) {
            *sent = spec->next[ret_round->guess];
            spec->right++;
        }
    }
    return error;
}
