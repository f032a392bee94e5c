/*
 * drafter.h - n-gram tree drafter: guesses the next tokens from text already seen.
 *
 * Owns an index over a store (text given once) and the session's own context. Looks up the longest
 * suffixes of the context, merges what followed them into one tree without duplicate siblings and
 * keeps the likeliest nodes. Knows nothing of models or servers; never guesses beyond what it saw.
 * Not thread-safe.
 */
#ifndef TV_CLI_DRAFTER_H
#define TV_CLI_DRAFTER_H

#include <stddef.h>
#include <stdint.h>

struct tv_drafter;

/* Longest continuation of one match, so the deepest node of a tree (node 0 has depth 0). */
#define TV_DRAFTER_DEPTH_MAX 16

/* The arrays are the drafter's and hold until its next call. Node 0 is the pending token. */
struct tv_draft {
    const int32_t *tokens;
    const int32_t *parents; /* parents[0] = -1, parents[i] < i */
    const double *chances;  /* estimated, of each node's whole path: 1 for node 0, never rising */
    int32_t count;          /* >= 1 */
};

/* store [store_count] is copied; NULL with 0 for none. 0; -ENOMEM;
 * -EINVAL on a negative token; -E2BIG: more than 2^30 tokens. */
int tv_drafter_create(const int32_t *store, size_t store_count, struct tv_drafter **ret_drafter);
void tv_drafter_destroy(struct tv_drafter *drafter);

/* Append tokens to the context: the prompt, then every round's new tokens. 0; -ENOMEM; -EINVAL on
 * a negative token; -E2BIG. On failure the context is as before. */
int tv_drafter_append(struct tv_drafter *drafter, const int32_t *tokens, size_t count);

/* Forget the last count tokens appended: what was only supposed. -EINVAL: there are not so many. */
int tv_drafter_forget(struct tv_drafter *drafter, size_t count);

/* A tree of at most nodes_max nodes (node 0 included, >= 1) and depth_max (0 to
 * TV_DRAFTER_DEPTH_MAX) under the context's last token. 0; -ENOMEM; -EINVAL: empty context or
 * limits out of range. */
int tv_drafter_draft(struct tv_drafter *drafter, int32_t nodes_max, int32_t depth_max,
                     struct tv_draft *ret_draft);

#endif
