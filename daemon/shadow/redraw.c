/*
 * redraw.c - the acceptance walk again: draws by draw.c, the walk by code of its own.
 *
 * Owns nothing. Refuses to decide what is not in the logits it is given.
 */
#include <errno.h>
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

/* 1: the rule looks at whole rows. With one token in every target both such rules are the walk. */
static int looks_at_rows(const struct tv_round_rule *rule)
{
    int one = rule->sampling.temperature < 1e-4f;
    if (rule->rule == TV_RULE_TYPICAL) {
        return !one || rule->typical_epsilon == 0.0 || rule->typical_delta == 0.0;
    }
    return rule->rule == TV_RULE_RATIO_WOR && !one;
}

static int has_children(const struct tv_tree *tree, int32_t node)
{
    int found = 0;
    for (int32_t i = node + 1; i < tree->count; i++) {
        found |= tree->parents[i] == node;
    }
    return found;
}

/* What follows a node, and the child that has it. */
static int choose(int32_t vocab, const struct tv_parity_case *parity_case, const float *logits,
                  int32_t node, int32_t position, struct tv_shadow_choice *choice)
{
    const struct tv_round_rule *rule = &parity_case->rule;
    const struct tv_tree *tree = parity_case->tree;
    struct tv_sampling sampling = sampling_of(rule);
    struct tv_shadow_draw draw = {0};
    if (rule->rule == TV_RULE_RATIO_WOR && looks_at_rows(rule) && has_children(tree, node)) {
        return tv_shadow_ratio(logits, vocab, &sampling, tree, node, position, choice);
    }
    int rc = tv_shadow_draw(logits, vocab, &sampling, position, &draw);
    choice->token = draw.token;
    choice->margin = draw.margin;
    choice->child = rc == 0 ? child_with(tree, node, draw.token) : -1;
    return rc;
}

/* A margin of scores is that of logits over the temperature. */
static int is_tie(const struct tv_parity_case *parity_case, double margin)
{
    float temperature = sampling_of(&parity_case->rule).temperature;
    double scale = temperature >= 1e-4f ? (double)temperature : 1.0;
    return margin * scale < parity_case->noise;
}

/* The whole path at once: the deepest node that passes, then as far as no stop token ends it. */
static int typical_redraw(int32_t vocab, const struct tv_parity_case *parity_case,
                          tv_shadow_row *row, void *row_context,
                          struct tv_shadow_redraw *ret_redraw)
{
    const struct tv_tree *tree = parity_case->tree;
    int32_t path[TV_ENGINE_NODES_MAX], deepest = 0, count = 1, token = -1;
    uint8_t passes[TV_ENGINE_NODES_MAX];
    double margin = INFINITY;
    struct tv_shadow_draw draw = {.margin = INFINITY};
    int rc = tv_shadow_typical(vocab, parity_case, row, row_context, passes, &margin);
    for (int32_t i = 1; rc == 0 && i < tree->count; i++) {
        deepest = passes[i] && tree->depths[i] > tree->depths[deepest] ? i : deepest;
    }
    for (int32_t i = deepest; rc == 0 && i >= 0; i = tree->parents[i]) {
        path[tree->depths[i]] = i;
    }
    while (rc == 0 && token < 0 && count <= tree->depths[deepest]) {
        int32_t next = tree->tokens[path[count]];
        if (is_stop(&parity_case->rule, next) ||
            parity_case->prefix_len + count + 1 >= parity_case->rule.max_len) {
            token = next;
        } else {
            count++;
        }
    }
    if (rc == 0 && token < 0) {
        const float *logits = row(row_context, deepest);
        const struct tv_sampling sampling = sampling_of(&parity_case->rule);
        rc = logits != NULL
                 ? tv_shadow_draw(logits, vocab, &sampling, parity_case->prefix_len + count, &draw)
                 : -ENODATA;
        token = draw.token;
    }
    if (rc != 0) {
        return rc;
    }
    int equal = count == parity_case->accepted_count;
    for (int32_t i = 0; equal && i < count; i++) {
        equal = parity_case->accepted_nodes[i] == path[i];
    }
    *ret_redraw =
        (struct tv_shadow_redraw){.accepted_equal = equal,
                                  .pending_equal = equal && token == parity_case->pending,
                                  .near_tie = is_tie(parity_case, fmin(margin, draw.margin))};
    return 0;
}

int tv_shadow_redraw(int32_t vocab, const struct tv_parity_case *parity_case, tv_shadow_row *row,
                     void *row_context, struct tv_shadow_redraw *ret_redraw)
{
    const struct tv_round_rule *rule = &parity_case->rule;
    int rc = 0;
    struct tv_shadow_redraw result = {.accepted_equal = 1, .pending_equal = 1};
    int32_t node = 0, count = 0;
    if (rule->rule == TV_RULE_TYPICAL && looks_at_rows(rule)) {
        return typical_redraw(vocab, parity_case, row, row_context, ret_redraw);
    }
    while (rc == 0) {
        int32_t fast_node =
            count < parity_case->accepted_count ? parity_case->accepted_nodes[count] : -1;
        const float *logits = row(row_context, node);
        struct tv_shadow_choice choice = {0};
        if (fast_node != node || logits == NULL) {
            result.accepted_equal = 0; /* parted here; the row before decided it */
            result.pending_equal = 0;
            break;
        }
        rc = choose(vocab, parity_case, logits, node, parity_case->prefix_len + count + 1, &choice);
        if (rc != 0) {
            break;
        }
        count++;
        result.near_tie = is_tie(parity_case, choice.margin);
        int ends =
            is_stop(rule, choice.token) || parity_case->prefix_len + count + 1 >= rule->max_len;
        int32_t child = ends ? -1 : choice.child;
        if (child < 0) {
            result.accepted_equal = count == parity_case->accepted_count;
            result.pending_equal = result.accepted_equal && choice.token == parity_case->pending;
            break;
        }
        node = child;
    }
    if (rc == 0) {
        *ret_redraw = result;
    }
    return rc;
}
