/*
 * walk.h - the acceptance rule: which nodes of a tree are accepted and which token ends the round.
 *
 * Pure: it draws through a callback, and knows neither device, cache nor model. A draw is asked for
 * once per accepted node, in path order.
 */
#ifndef TV_VERIFY_WALK_H
#define TV_VERIFY_WALK_H

#include <stdint.h>

#include "verify/verify.h"

/* Draw the next token after `node`, for the absolute position `position`, into *ret_draw. 0 or
 * negative errno; a non-finite row is told by ret_draw->token = -1, not by an error. */
typedef int tv_walk_draw(void *context, int32_t node, int32_t position, struct tv_draw *ret_draw);

struct tv_walk_result {
    int32_t accepted_count;
    struct tv_drawn end;
};

/* Walk from node 0 of a sequence with committed_len tokens. nodes and logprobs: room for depth + 1
 * entries each, the caller's. 0; -EDOM: a row on the path is not finite; the callback's error. */
int tv_walk_run(const struct tv_tree *tree, int32_t committed_len, const struct tv_round_rule *rule,
                tv_walk_draw *draw, void *draw_context, int32_t *nodes, float *logprobs,
                struct tv_walk_result *ret_result);

/* Does `token`, drawn when committed_len tokens are committed, end the sequence? Stop wins. */
enum tv_finish tv_walk_finish(const struct tv_round_rule *rule, int32_t committed_len,
                              int32_t token);

/* The draw's parameters of a rule: greedy ignores temperature and filters. */
struct tv_sampling tv_walk_sampling(const struct tv_round_rule *rule);

#endif
