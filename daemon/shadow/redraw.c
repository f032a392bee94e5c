/*
 * redraw.c - the acceptance walk again: draws by draw.c, the walk by code of its own.
 *
 * Owns nothing. Refuses to decide what is not in the logits it is given.
 */
#include <math.h>

#include "shadow/round.h"

static int is_stop(const struct tv_round_rule *rule, int32_t token)
{
    int found = 0;
    for (int32_t i = 0; i < rule->stop_count; i++) {
        found |= rule->stop_ids[i] == token;
    }
    return found;
}

static int32_t child_with(const struct tv_tree *tree, int32_t node, int32_t token)
{
    for (int32_t i = tree->count - 1; i > node; i--) {
        if (tree->parents[i] == node && tree->tokens[i] == token) {
            return i;
        }
    }
    return -1;
}

static struct tv_sampling sampling_of(const struct tv_round_rule *rule)
{
    if (rule->rule == TV_RULE_GREEDY) {
        return (struct tv_sampling){
            .temperature = 0.0f, .top_p = 1.0f, .seed = rule->sampling.seed};
    }
    return rule->sampling;
}

int tv_shadow_redraw(int32_t vocab, const struct tv_parity_case *parity_case, tv_shadow_row *row,
                     void *row_context, struct tv_shadow_redraw *ret_redraw)
{
    const struct tv_round_rule *rule = &parity_case->rule;
    struct tv_sampling sampling = sampling_of(rule);
    struct tv_shadow_draw draw = {0};
    int rc = 0;
    struct tv_shadow_redraw result = {.accepted_equal = 1, .pending_equal = 1};
    int32_t node = 0, count = 0;
    while (rc == 0) {
        int32_t fast_node =
            count < parity_case->accepted_count ? parity_case->accepted_nodes[count] : -1;
        const float *logits = row(row_context, node);
        if (fast_node != node || logits == NULL) {
            result.accepted_equal = 0; /* parted here; the row before decided it */
            result.pending_equal = 0;
            break;
        }
        rc = tv_shadow_draw(logits, vocab, &sampling, parity_case->prefix_len + count + 1, &draw);
        if (rc != 0) {
            break;
        }
        count++;
        double scale = sampling.temperature >= 1e-4f ? (double)sampling.temperature : 1.0;
        result.near_tie = draw.margin * scale < parity_case->noise;
        int ends =
            is_stop(rule, draw.token) || parity_case->prefix_len + count + 1 >= rule->max_len;
        int32_t child = ends ? -1 : child_with(parity_case->tree, node, draw.token);
        if (child < 0) {
            result.accepted_equal = count == parity_case->accepted_count;
            result.pending_equal = result.accepted_equal && draw.token == parity_case->pending;
            break;
        }
        node = child;
    }
    if (rc == 0) {
        *ret_redraw = result;
    }
    return rc;
}
