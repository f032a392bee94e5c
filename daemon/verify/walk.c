/*
 * walk.c - the acceptance rule of greedy and target_walk, with stop tokens and the length limit.
 *
 * Owns the order of the decisions: draw, stop, length, child. Refuses to know where logits are.
 */
#include "verify/walk.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define NO_TOKEN (-1) /* whose coin no child of ratio_wor has */

enum tv_finish tv_walk_finish(const struct tv_round_rule *rule, int32_t committed_len,
                              int32_t token)
{
    for (int32_t i = 0; i < rule->stop_count; i++) {
        if (rule->stop_ids[i] == token) {
            return TV_FINISH_STOP;
        }
    }
    return (int64_t)committed_len + 1 >= rule->max_len ? TV_FINISH_LENGTH : TV_FINISH_NONE;
}

struct tv_sampling tv_walk_sampling(const struct tv_round_rule *rule)
{
    struct tv_sampling sampling = rule->sampling;
    if (rule->rule == TV_RULE_GREEDY) {
        sampling.temperature = 0.0f;
        sampling.top_p = 1.0f;
        sampling.min_p = 0.0f;
        sampling.top_k = 0;
    }
    return sampling;
}

/* Which child the drawn token names; under rates, the first one or none, and then it is the token.
 */
static int32_t child_of(const struct tv_tree *tree, int32_t node, int32_t position,
                        const struct tv_round_rule *rule, int32_t *token)
{
    if (rule->rate_count == 0) {
        return tv_tree_child(tree, node, *token);
    }
    for (int32_t child = node + 1; child < tree->count; child++) {
        if (tree->parents[child] != node) {
            continue;
        }
        int32_t depth = tree->depths[child];
        double rate = rule->rates[(depth < rule->rate_count ? depth : rule->rate_count) - 1];
        if (tv_kernels_coin(rule->sampling.seed, position, NO_TOKEN) >= rate) {
            return -1;
        }
        *token = tree->tokens[child];
        return child;
    }
    return -1;
}

int tv_walk_run(const struct tv_tree *tree, int32_t committed_len, const struct tv_round_rule *rule,
                tv_walk_draw *draw, void *draw_context, int32_t *nodes, float *logprobs,
                struct tv_walk_result *ret_result)
{
    float margin = INFINITY;
    int32_t node = 0;
    int32_t count = 0;
    if (rule->rule == TV_RULE_CLIENT) { /* nothing is drawn; node 0 is what there is of a path */
        nodes[0] = 0;
        logprobs[0] = 0.0f;
        *ret_result = (struct tv_walk_result){.accepted_count = 1, .end = {.token = -1}};
        return 0;
    }
    for (;;) {
        struct tv_draw drawn = {0};
        int rc = draw(draw_context, node, committed_len + count + 1, &drawn);
        if (rc != 0) {
            return rc;
        }
        if (drawn.token < 0) {
            return -EDOM;
        }
        nodes[count] = node;
        logprobs[count] = drawn.logprob;
        count++;
        if (rule->rate_count == 0) { /* a coin has no margin */
            margin = drawn.margin < margin ? drawn.margin : margin;
        }
        int32_t child = child_of(tree, node, committed_len + count, rule, &drawn.token);
        /* stop and length before the child: a stop token never reaches the KV rows */
        enum tv_finish finish = tv_walk_finish(rule, committed_len + count, drawn.token);
        if (child < 0 || finish != TV_FINISH_NONE) {
            ret_result->accepted_count = count;
            ret_result->end.token = drawn.token;
            ret_result->end.finish = finish;
            ret_result->end.has_margin = isfinite(margin) ? 1 : 0;
            ret_result->end.margin = isfinite(margin) ? margin : 0.0f;
            return 0;
        }
        node = child;
    }
}
