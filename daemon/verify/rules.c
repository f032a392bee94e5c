/*
 * rules.c - the walks of ratio_wor and typical, with stop tokens and the length limit.
 *
 * Owns the order of the decisions, the same as walk.c's: what comes next, stop, length, the child.
 */
#include "verify/rules.h"

#include <errno.h>
#include <math.h>
#include <string.h>

int tv_rules_apply(const struct tv_round_rule *rule)
{
    if (rule->rate_count > 0) {
        return 0; /* a coin decides, and no row is looked at */
    }
    int greedy = !(rule->sampling.temperature >= 1e-4f);
    if (rule->rule == TV_RULE_RATIO_WOR) {
        return !greedy;
    }
    double bar = fmin(rule->typical_epsilon, rule->typical_delta);
    return rule->rule == TV_RULE_TYPICAL && (!greedy || !(bar > 0.0));
}

static void margin_take(struct tv_walk_result *result, double margin)
{
    if (isfinite(margin) && (!result->end.has_margin || margin < (double)result->end.margin)) {
        result->end.has_margin = 1;
        result->end.margin = (float)margin;
    }
}

static int has_child(const struct tv_tree *tree, int32_t node)
{
    for (int32_t i = node + 1; i < tree->count; i++) {
        if (tree->parents[i] == node) {
            return 1;
        }
    }
    return 0;
}

/* The target draw after `node`, as a step without a child. */
static int target_step(const struct tv_rules_source *source, int32_t node, int32_t position,
                       struct tv_rules_step *ret_step)
{
    struct tv_draw drawn = {0};
    int rc = source->draw(source->context, node, position, &drawn);
    if (rc != 0) {
        return rc;
    }
    if (drawn.token < 0) {
        return -EDOM;
    }
    *ret_step = (struct tv_rules_step){.child = -1,
                                       .token = drawn.token,
                                       .margin = (double)drawn.margin,
                                       .logprob = drawn.logprob};
    return 0;
}

static int ratio_run(const struct tv_tree *tree, int32_t committed_len,
                     const struct tv_round_rule *rule, const struct tv_rules_source *source,
                     int32_t *nodes, float *logprobs, struct tv_walk_result *result)
{
    int32_t node = 0, count = 0;
    for (;;) {
        struct tv_rules_step step = {0};
        int32_t position = committed_len + count + 1;
        struct tv_rules_target target = {0};
        int rc;
        if (has_child(tree, node)) {
            rc = source->row(source->context, node, &target);
            source->step(source->context);
            if (rc == 0) {
                tv_rules_ratio(tree, node, position, rule->sampling.seed, &target, source, &step);
            }
        } else {
            rc = target_step(source, node, position, &step);
        }
        if (rc != 0) {
            return rc;
        }
        nodes[count] = node;
        logprobs[count] = step.logprob;
        count++;
        margin_take(result, step.margin);
        enum tv_finish finish = tv_walk_finish(rule, committed_len + count, step.token);
        if (step.child < 0 || finish != TV_FINISH_NONE) {
            result->accepted_count = count;
            result->end.token = step.token;
            result->end.finish = finish;
            return 0;
        }
        node = step.child;
    }
}

/* Which nodes pass with all their ancestors, and their log-probabilities. */
struct passed {
    uint8_t node[TV_ENGINE_NODES_MAX];
    float logprob[TV_ENGINE_NODES_MAX];
};

/* Children of a node against min(epsilon, delta exp(-H)). */
static void typical_children(const struct tv_tree *tree, int32_t node,
                             const struct tv_round_rule *rule, const struct tv_rules_target *target,
                             const struct tv_rules_source *source, struct tv_walk_result *result,
                             struct passed *passed)
{
    double entropy = 0.0;
    for (int32_t i = 0; i < target->count; i++) {
        entropy -= target->probs[i] > 0.0 ? target->probs[i] * log(target->probs[i]) : 0.0;
    }
    double bar = fmin(rule->typical_epsilon, rule->typical_delta * exp(-entropy));
    for (int32_t c = node + 1; c < tree->count; c++) {
        if (tree->parents[c] != node) {
            continue;
        }
        double p = 0.0;
        for (int32_t i = 0; i < target->count; i++) {
            p = target->ids[i] == tree->tokens[c] ? target->probs[i] : p;
        }
        passed->node[c] = p >= bar;
        passed->logprob[c] = (float)log(p);
        if (p > 0.0 && bar > 0.0) {
            margin_take(result, fabs(log(p) - log(bar)));
        }
        source->step(source->context);
    }
}

static int typical_mark(const struct tv_tree *tree, const struct tv_round_rule *rule,
                        const struct tv_rules_source *source, struct tv_walk_result *result,
                        struct passed *passed, int32_t *ret_deepest)
{
    int32_t deepest = 0;
    memset(passed->node, 0, sizeof passed->node);
    passed->node[0] = 1;
    for (int32_t i = 0; i < tree->count; i++) { /* parents come first */
        struct tv_rules_target target = {0};
        if (!passed->node[i]) {
            continue;
        }
        deepest = tree->depths[i] > tree->depths[deepest] ? i : deepest;
        if (has_child(tree, i)) {
            int rc = source->row(source->context, i, &target);
            source->step(source->context);
            if (rc != 0) {
                return rc;
            }
            typical_children(tree, i, rule, &target, source, result, passed);
        }
    }
    *ret_deepest = deepest;
    return 0;
}

static int typical_run(const struct tv_tree *tree, int32_t committed_len,
                       const struct tv_round_rule *rule, const struct tv_rules_source *source,
                       int32_t *nodes, float *logprobs, struct tv_walk_result *result)
{
    struct passed passed;
    struct tv_rules_step step = {0};
    int32_t deepest = 0;
    int rc = typical_mark(tree, rule, source, result, &passed, &deepest);
    if (rc != 0) {
        return rc;
    }
    for (int32_t node = deepest; node >= 0; node = tree->parents[node]) {
        nodes[tree->depths[node]] = node;
    }
    int32_t count = 1;
    for (; count <= tree->depths[deepest]; count++) { /* a stop token on the path ends it */
        int32_t next = nodes[count];
        logprobs[count - 1] = passed.logprob[next];
        enum tv_finish finish = tv_walk_finish(rule, committed_len + count, tree->tokens[next]);
        if (finish != TV_FINISH_NONE) {
            result->accepted_count = count;
            result->end.token = tree->tokens[next];
            result->end.finish = finish;
            return 0;
        }
    }
    rc = target_step(source, deepest, committed_len + count, &step);
    if (rc != 0) {
        return rc;
    }
    logprobs[count - 1] = step.logprob;
    margin_take(result, step.margin);
    result->accepted_count = count;
    result->end.token = step.token;
    result->end.finish = tv_walk_finish(rule, committed_len + count, step.token);
    return 0;
}

int tv_rules_run(const struct tv_tree *tree, int32_t committed_len,
                 const struct tv_round_rule *rule, const struct tv_rules_source *source,
                 int32_t *nodes, float *logprobs, struct tv_walk_result *ret_result)
{
    struct tv_walk_result result = {0};
    int rc = rule->rule == TV_RULE_TYPICAL
                 ? typical_run(tree, committed_len, rule, source, nodes, logprobs, &result)
                 : ratio_run(tree, committed_len, rule, source, nodes, logprobs, &result);
    if (rc == 0) {
        *ret_result = result;
    }
    return rc;
}
