/*
 * drafts.c - what a session's drafts were good for: acceptance by depth, the shape of its trees,
 * and the time between its rounds.
 *
 * Counts only; what follows from them is sched/'s. Old counts fade, because texts change.
 */
#include "session/session.h"

#define TRIED_MAX  64   /* then both counts of a depth are halved */
#define LEVELS_MAX 1024 /* the same for the shape */

static void count(struct tv_session_drafts *drafts, int32_t depth, int taken)
{
    if (depth >= TV_SESSION_DEPTHS_MAX) {
        return;
    }
    if (drafts->tried[depth] >= TRIED_MAX) {
        drafts->tried[depth] /= 2;
        drafts->taken[depth] /= 2;
    }
    drafts->tried[depth]++;
    drafts->taken[depth] += taken;
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

void tv_session_drafts_take(struct tv_session_drafts *drafts, const struct tv_tree *tree,
                            const int32_t *path, int32_t path_count, enum tv_finish finish)
{
    for (int32_t d = 0; d + 1 < path_count; d++) {
        count(drafts, d, 1);
    }
    /* a round that a stop token or the length ends says nothing about the draft behind it */
    if (finish == TV_FINISH_NONE && has_child(tree, path[path_count - 1])) {
        count(drafts, path_count - 1, 0);
    }
    if (tree->depth > 0) {
        if (drafts->levels >= LEVELS_MAX) {
            drafts->nodes /= 2;
            drafts->levels /= 2;
        }
        drafts->nodes += tree->count - 1;
        drafts->levels += tree->depth;
    }
}

void tv_session_drafts_ran(struct tv_session_drafts *drafts, int64_t start_us, int64_t end_us)
{
    if (drafts->ended_us > 0) {
        int64_t apart_us = start_us - drafts->ended_us;
        drafts->apart_us[drafts->apart_next] = apart_us > 0 ? apart_us : 0;
        drafts->apart_next = (drafts->apart_next + 1) % TV_SESSION_APART_MAX;
        drafts->apart_count += drafts->apart_count < TV_SESSION_APART_MAX ? 1 : 0;
    }
    drafts->ended_us = end_us;
}
