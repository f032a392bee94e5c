/*
 * hint.c - the size of tree that gives the most tokens per second; the formula is in hint.h.
 */
#include "sched/hint.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"

#define PRIOR_WALKS 4.0 /* K */
#define GOOD_ENOUGH 0.999

static int compare(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static double apart_us(const struct tv_session_drafts *drafts)
{
    int64_t sorted[TV_SESSION_APART_MAX];
    if (drafts->apart_count == 0) {
        return 0.0;
    }
    memcpy(sorted, drafts->apart_us, sizeof sorted);
    qsort(sorted, (size_t)drafts->apart_count, sizeof sorted[0], compare);
    return (double)sorted[drafts->apart_count / 2];
}

/* accept[d] = a(d + 1); the last one holds for all deeper levels. */
static void acceptance(const struct tv_session_drafts *drafts,
                       double accept[TV_SESSION_DEPTHS_MAX + 1])
{
    double tried = PRIOR_WALKS, taken = PRIOR_WALKS / 2.0;
    for (int32_t d = 0; d < TV_SESSION_DEPTHS_MAX; d++) {
        tried += (double)drafts->tried[d];
        taken += (double)drafts->taken[d];
    }
    double mean = taken / tried;
    for (int32_t d = 0; d < TV_SESSION_DEPTHS_MAX; d++) {
        accept[d] = ((double)drafts->taken[d] + PRIOR_WALKS * mean) /
                    ((double)drafts->tried[d] + PRIOR_WALKS);
    }
    accept[TV_SESSION_DEPTHS_MAX] = mean;
}

/* E of l whole levels, and P(l + 1). */
struct expected {
    const double *accept; /* [TV_SESSION_DEPTHS_MAX + 1] */
    int32_t level;
    double tokens, next;
};

/* E of so many levels, which never get fewer. */
static double tokens_of(struct expected *expected, double levels)
{
    while ((double)(expected->level + 1) <= levels) {
        expected->level++;
        expected->tokens += expected->next;
        expected->next *=
            expected->accept[expected->level < TV_SESSION_DEPTHS_MAX ? expected->level
                                                                     : TV_SESSION_DEPTHS_MAX];
    }
    return expected->tokens + expected->next * (levels - (double)expected->level);
}

/* C(n): a larger launch never counts as cheaper than a smaller one. */
static double cost_us(const int64_t (*points)[2], int32_t count, int32_t nodes)
{
    double before_n = 0.0, before_us = 0.0, at_n = (double)points[0][0];
    double at_us = (double)points[0][1], n = (double)nodes;
    if (n <= at_n || count == 1) {
        return at_us;
    }
    for (int32_t i = 1; i < count && (i == 1 || n > at_n); i++) {
        before_n = at_n;
        before_us = at_us;
        at_n = (double)points[i][0];
        at_us = fmax((double)points[i][1], before_us);
    }
    return before_us + (at_us - before_us) * (n - before_n) / (at_n - before_n);
}

int32_t tv_sched_hint_nodes(const struct tv_session_drafts *drafts, const int64_t (*points)[2],
                            int32_t point_count, int32_t nodes_max, int32_t depth_max)
{
    double accept[TV_SESSION_DEPTHS_MAX + 1], rates[TV_ENGINE_NODES_MAX], best = 0.0;
    if (point_count == 0) {
        return nodes_max < TV_SCHED_HINT_FIRST ? nodes_max : TV_SCHED_HINT_FIRST;
    }
    int64_t known = 2 * points[point_count - 1][0];
    int32_t count = known < nodes_max ? (int32_t)known : nodes_max;
    double width = drafts->levels > 0 ? (double)drafts->nodes / (double)drafts->levels : 1.0;
    double apart = apart_us(drafts);
    acceptance(drafts, accept);
    struct expected expected = {.accept = accept, .tokens = 1.0, .next = accept[0]};
    count = count < TV_ENGINE_NODES_MAX ? count : TV_ENGINE_NODES_MAX;
    for (int32_t i = 0; i < count; i++) {
        double levels = fmin((double)i / width, (double)depth_max);
        /* one microsecond more: a clock may say that a launch took none */
        double us = cost_us(points, point_count, i + 1) + apart + 1.0;
        rates[i] = tokens_of(&expected, levels) / us;
        best = fmax(best, rates[i]);
    }
    int32_t nodes = 1;
    while (nodes < count && rates[nodes - 1] < GOOD_ENOUGH * best) {
        nodes++;
    }
    return nodes;
}
