/*
 * budget.h - how many nodes of a drafted tree are worth sending: expected tokens of a round against
 * what a round of so many nodes takes.
 *
 * Costs are what the server measures (cost_nodes, cost_us of a round) and the rest of a round trip,
 * which a round has once; chances are the drafter's own, corrected by how often they came true.
 * Owns these few numbers of one run; knows neither drafters nor servers.
 */
#ifndef TV_CLI_BUDGET_H
#define TV_CLI_BUDGET_H

#include <stdint.h>

#include "clients/c/treeverify-client.h"

/* Zero is the beginning: nothing is known, and every node is worth it. */
struct tv_budget {
    int32_t cost_nodes[TV_CLIENT_COSTS_MAX]; /* [cost_count], ascending */
    int64_t cost_us[TV_CLIENT_COSTS_MAX];
    int32_t cost_count;
    double said, came; /* drafts that chances promised, and that were accepted, of late */
    double rest_us;    /* of a round trip, besides the pass of the model, of late */
    int32_t rounds;    /* that rest_us is of; 0: it is not known */
};

/* The number of nodes that gives the most tokens a second, of a tree's first ones (1 to count).
 * chances [count]: of each node to be accepted, never rising; that of node 0 is not looked at.
 * Without costs it is count. */
int32_t tv_budget_fit(const struct tv_budget *budget, const double *chances, int32_t count);

/* promised: the sum of the chances of the drafts that were sent. waited: nothing else of this run
 * was under way, so that the round trip says what a round takes beside the model's pass. */
void tv_budget_learn(struct tv_budget *budget, double promised, int waited,
                     const struct tv_client_round *round);

#endif
