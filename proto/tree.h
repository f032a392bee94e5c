/*
 * tree.h - a draft token tree as a value.
 *
 * Node 0 is the pending token; parents come before children. Owns the arrays; refuses everything
 * that is not such a tree, and repairs nothing.
 */
#ifndef TV_PROTO_TREE_H
#define TV_PROTO_TREE_H

#include <stdint.h>

#include "proto/status.h"

/* What each node's children were drawn from, without replacement and in node order. */
struct tv_draft {
    int32_t width; /* entries of a row; 0: none was given */
    int32_t *ids;  /* [count, width], -1 = unused; NULL: entry t is token t; owned */
    float *probs;  /* [count, width], owned; rows of leaves say nothing */
};

struct tv_tree {
    int32_t count;    /* nodes, node 0 included */
    int32_t *tokens;  /* [count], owned */
    int32_t *parents; /* [count], owned; parents[0] = -1, 0 <= parents[i] < i */
    int32_t *depths;  /* [count], owned; filled by tv_tree_check; depths[0] = 0 */
    int32_t depth;    /* the largest depth */
    struct tv_draft draft;
};

struct tv_tree_limits {
    int32_t nodes_max, depth_max, vocab;
};

/* Check shape, limits, vocabulary and duplicate siblings; fill depths. 0, or -EINVAL with the
 * problem set (tree-invalid, tree-too-large; node and pointer named), or -ENOMEM. */
int tv_tree_check(struct tv_tree *tree, const struct tv_tree_limits *limits,
                  struct tv_problem *problem);
/* A checked tree's draft: ids distinct and in the vocabulary, every row of a node with children
 * sums to 1 within 0.001, children have a probability in it. Rows of leaves are emptied: they say
 * nothing. 0, -EINVAL with the problem set, -ENOMEM. */
int tv_tree_check_draft(struct tv_tree *tree, int32_t vocab, struct tv_problem *problem);
/* The draft's entry for a token in a node's row, 0 when there is none. */
double tv_tree_draft_prob(const struct tv_tree *tree, int32_t node, int32_t token);
/* The child of `node` that carries `token`, or -1. */
int32_t tv_tree_child(const struct tv_tree *tree, int32_t node, int32_t token);
void tv_tree_finish(struct tv_tree *tree);

#endif
