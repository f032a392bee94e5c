/*
 * rules.h - the acceptance rules that look at a row's whole distribution: ratio_wor and typical.
 *
 * Private to verify/. Pure, like walk.h: rows and draws come through callbacks.
 */
#ifndef TV_VERIFY_RULES_H
#define TV_VERIFY_RULES_H

#include "verify/walk.h"

/* One row's filtered target: the survivors and their probabilities. */
struct tv_rules_target {
    int32_t count;
    const int32_t *ids;
    const double *probs;
};
/* The target after `node`, valid until the next call. 0; -EDOM: not finite; negative errno. */
typedef int tv_rules_row(void *context, int32_t node, struct tv_rules_target *ret_target);

struct tv_rules_source {
    void *context;      /* of all three calls */
    tv_walk_draw *draw; /* the target draw, for nodes where no coin decides */
    tv_rules_row *row;
    /* Called whenever work of the order of a row is done: a long vocabulary takes its time, and who
     * waits for the round shall see that it goes on. */
    void (*step)(void *context);
    /* [vocab] each, the caller's, all zero between runs: the target, what is left of it, the draft.
     */
    double *target, *left, *draft;
};

/* 1: this round is walked by tv_rules_run; 0: by tv_walk_run, because it draws once per node. A
 * target of one token makes ratio_wor, and typical unless its threshold is 0, the greedy walk. */
int tv_rules_apply(const struct tv_round_rule *rule);

/* As tv_walk_run. */
int tv_rules_run(const struct tv_tree *tree, int32_t committed_len,
                 const struct tv_round_rule *rule, const struct tv_rules_source *source,
                 int32_t *nodes, float *logprobs, struct tv_walk_result *ret_result);

/* ratio.c: what follows a node with children. A child >= 0 was accepted and carries the token. The
 * margin is the smallest relative change of a probability of the target that turns a decision. */
struct tv_rules_step {
    int32_t child, token;
    double margin;
    float logprob; /* of the token under the filtered target */
};
void tv_rules_ratio(const struct tv_tree *tree, int32_t node, int32_t position, uint64_t seed,
                    const struct tv_rules_target *target, const struct tv_rules_source *source,
                    struct tv_rules_step *ret_step);

#endif
