/*
 * hint.h - how many nodes a session's next tree should have, from what was measured of it and of
 * this machine; private to sched/.
 *
 * The suggestion is the n that maximises expected tokens per second,
 *
 *     R(n) = E(n) / (C(n) + apart)
 *
 * C(n)  what a launch of n nodes costs: the measured curve, between its points a straight line,
 *       before the first as that one, behind the last on the line of the last two; never falling.
 * apart median time from the end of one launch of this session's verifies to the start of the next:
 *       link, drafter, queue. A far drafter does better with larger trees.
 * E(n)  = 1 + P(1) + .. + P(l) + (l' - l) P(l + 1), the tokens of a round, where l' = (n - 1) / w
 *       levels of drafts (l whole ones), w the mean number of drafts in a level of this session's
 *       trees, and P(d) = a(1) .. a(d), with a(d) the share of walks at depth d - 1 with a draft to
 *       try that accepted one, shrunk to the mean of all depths m by K = 4 walks:
 *       a(d) = (taken(d) + K m) / (tried(d) + K), m = (taken + K / 2) / (tried + K).
 *
 * Without a round yet, m is a half and w is 1. n is at most twice the largest size whose cost is
 * known, so that what is not known is tried in steps; with no cost at all it is
 * TV_SCHED_HINT_FIRST. Of all sizes within 0.1 % of the largest rate, the smallest is taken.
 */
#ifndef TV_SCHED_HINT_H
#define TV_SCHED_HINT_H

#include <stdint.h>

#include "session/session.h"

#define TV_SCHED_HINT_FIRST 16

/* points: {nodes, microseconds}, ascending. At least 1, at most nodes_max. Pure. */
int32_t tv_sched_hint_nodes(const struct tv_session_drafts *drafts, const int64_t (*points)[2],
                            int32_t point_count, int32_t nodes_max, int32_t depth_max);

#endif
