/*
 * tree.c - checks of a draft token tree.
 *
 * One pass for shape, vocabulary and depth, one for duplicate siblings through a hash of (parent,
 * token). The first offending node is named; nothing is reordered or dropped.
 */
#include "proto/tree.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

/* Vocabulary, order of nodes, depths. */
static int check_nodes(struct tv_tree *tree, const struct tv_tree_limits *limits,
                       struct tv_problem *problem)
{
    int32_t i;

    tree->depth = 0;
    for (i = 0; i < tree->count; i++) {
        int32_t parent = tree->parents[i];

        if (tree->tokens[i] < 0 || tree->tokens[i] >= limits->vocab) {
            tv_problem_set_node(problem, TV_TREE_INVALID, "tokens", i,
                                "node %d: token %d is outside the vocabulary of %d", (int)i,
                                (int)tree->tokens[i], (int)limits->vocab);
            return -EINVAL;
        }
        if (i == 0) {
            if (parent != -1) {
                tv_problem_set_node(problem, TV_TREE_INVALID, "parents", 0,
                                    "node 0: its parent must be -1, not %d", (int)parent);
                return -EINVAL;
            }
            tree->depths[0] = 0;
            continue;
        }
        if (parent < 0 || parent >= i) {
            tv_problem_set_node(problem, TV_TREE_INVALID, "parents", i,
                                parent == -1 ? "node %d: a second root (parent %d)"
                                             : "node %d: parent %d is not before it",
                                (int)i, (int)parent);
            return -EINVAL;
        }
        tree->depths[i] = tree->depths[parent] + 1;
        if (tree->depths[i] > limits->depth_max) {
            tv_problem_set_node(problem, TV_TREE_TOO_LARGE, "parents", i,
                                "node %d: depth %d is over the limit of %d", (int)i,
                                (int)tree->depths[i], (int)limits->depth_max);
            return -EINVAL;
        }
        if (tree->depths[i] > tree->depth) {
            tree->depth = tree->depths[i];
        }
    }
    return 0;
}

static uint32_t hash_edge(int32_t parent, int32_t token)
{
    uint64_t mixed = ((uint64_t)(uint32_t)parent << 32 | (uint32_t)token) * 0x9e3779b97f4a7c15u;

    return (uint32_t)(mixed >> 32) ^ (uint32_t)(mixed >> 47);
}

/* Two children of one node with the same token: which of them a walk takes would be chance. */
static int check_siblings(const struct tv_tree *tree, struct tv_problem *problem)
{
    uint32_t size = 4, slot;
    uint16_t *nodes; /* node at a slot, 0 = free: node 0 is nobody's child */
    int32_t i;
    int rc = 0;

    while (size < 2u * (uint32_t)tree->count) {
        size *= 2;
    }
    nodes = calloc(size, sizeof(*nodes));
    if (nodes == NULL) {
        return -ENOMEM;
    }
    for (i = 1; i < tree->count && rc == 0; i++) {
        slot = hash_edge(tree->parents[i], tree->tokens[i]) & (size - 1);
        while (nodes[slot] != 0 && (tree->parents[nodes[slot]] != tree->parents[i] ||
                                    tree->tokens[nodes[slot]] != tree->tokens[i])) {
            slot = (slot + 1) & (size - 1);
        }
        if (nodes[slot] != 0) {
            tv_problem_set_node(problem, TV_TREE_INVALID, "tokens", i,
                                "node %d: token %d is already child %d of node %d", (int)i,
                                (int)tree->tokens[i], (int)nodes[slot], (int)tree->parents[i]);
            rc = -EINVAL;
        }
        nodes[slot] = (uint16_t)i;
    }
    free(nodes);
    return rc;
}

int tv_tree_check(struct tv_tree *tree, const struct tv_tree_limits *limits,
                  struct tv_problem *problem)
{
    int rc;

    assert(limits->nodes_max <= UINT16_MAX); /* node indices fit the sibling table */
    if (tree->count < 1) {
        tv_problem_set(problem, TV_TREE_INVALID, "/tree/tokens",
                       "a tree has at least node 0, the pending token");
        return -EINVAL;
    }
    if (tree->count > limits->nodes_max) {
        tv_problem_set(problem, TV_TREE_TOO_LARGE, "/tree/tokens",
                       "%d nodes are over the limit of %d", (int)tree->count,
                       (int)limits->nodes_max);
        return -EINVAL;
    }
    free(tree->depths);
    tree->depths = malloc((size_t)tree->count * sizeof(*tree->depths));
    if (tree->depths == NULL) {
        return -ENOMEM;
    }
    rc = check_nodes(tree, limits, problem);
    return rc < 0 ? rc : check_siblings(tree, problem);
}

int32_t tv_tree_child(const struct tv_tree *tree, int32_t node, int32_t token)
{
    int32_t i;

    for (i = node + 1; i < tree->count; i++) {
        if (tree->parents[i] == node && tree->tokens[i] == token) {
            return i;
        }
    }
    return -1;
}

void tv_tree_finish(struct tv_tree *tree)
{
    if (tree == NULL) {
        return;
    }
    free(tree->tokens);
    free(tree->parents);
    free(tree->depths);
    free(tree->draft.ids);
    free(tree->draft.probs);
    *tree = (struct tv_tree){0};
}
