/*
 * budget.c - the size of tree with the best rate, from measured costs and corrected chances.
 */
#include "clients/cli/budget.h"

#define MEMORY    0.9 /* of a round, for the next one's estimates */
#define WORTH_MAX 1.5

static double least(double a, double b)
{
    return a < b ? a : b;
}

/* Straight lines between the measured sizes, the last of them also behind the last one; never
 * falling. */
static double pass_us(const struct tv_budget *budget, int32_t nodes)
{
    double low_n = (double)budget->cost_nodes[0], low_us = (double)budget->cost_us[0];
    if (nodes <= budget->cost_nodes[0] || budget->cost_count == 1) {
        return low_us;
    }
    double slope = 0.0;
    for (int32_t i = 1; i < budget->cost_count; i++) {
        double high_n = (double)budget->cost_nodes[i];
        double high_us = (double)budget->cost_us[i] > low_us ? (double)budget->cost_us[i] : low_us;
        slope = (high_us - low_us) / (high_n - low_n);
        if ((double)nodes <= high_n || i == budget->cost_count - 1) {
            break;
        }
        low_n = high_n;
        low_us = high_us;
    }
    return low_us + slope * ((double)nodes - low_n);
}

int32_t tv_budget_fit(const struct tv_budget *budget, const double *chances, int32_t count)
{
    if (budget->cost_count == 0) {
        return count;
    }
    double worth = least(WORTH_MAX, (1.0 + budget->came) / (1.0 + budget->said));
    double tokens = 1.0, best = 0.0; /* the model's own token comes with any tree */
    int32_t nodes = 1;
    for (int32_t n = 1; n <= count; n++) {
        if (n > 1) {
            tokens += least(1.0, worth * chances[n - 1]);
        }
        /* one microsecond more: a clock may say that a launch took none */
        double rate = tokens / (pass_us(budget, n) + budget->rest_us + 1.0);
        if (rate > best) {
            best = rate;
            nodes = n;
        }
    }
    return nodes;
}

void tv_budget_learn(struct tv_budget *budget, double promised, int waited,
                     const struct tv_client_round *round)
{
    if (round->cost_count > 0) {
        budget->cost_count = round->cost_count;
        for (int32_t i = 0; i < round->cost_count; i++) {
            budget->cost_nodes[i] = round->cost_nodes[i];
            budget->cost_us[i] = round->cost_us[i];
        }
    }
    if (round->recovered != TV_CLIENT_NOT_RECOVERED || round->node_count < 1) {
        return; /* not of the tree that was sent */
    }
    budget->said = MEMORY * budget->said + promised;
    budget->came = MEMORY * budget->came + (double)(round->node_count - 1);
    if (waited && round->attempts == 1 && round->gpu_us > 0) {
        double rest = round->rtt_us > round->gpu_us ? (double)(round->rtt_us - round->gpu_us) : 0.0;
        budget->rest_us =
            budget->rounds == 0 ? rest : MEMORY * budget->rest_us + (1.0 - MEMORY) * rest;
        budget->rounds++;
    }
}
