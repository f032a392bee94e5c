/*
 * tree_draft.c - is a draft a distribution that the tree's children can have been drawn from?
 *
 * Looks at rows of nodes with children alone, and empties the others; nothing is normalised here.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "proto/tree.h"

#define SUM_TOLERANCE 1e-3

static int refuse(struct tv_problem *problem, const struct tv_tree *tree, int32_t node,
                  const char *what)
{
    tv_problem_set(problem, TV_WRONG_VALUE,
                   tree->draft.ids != NULL ? "/tree/q_topk" : "/tree/q_dense", "node %d: %s",
                   (int)node, what);
    problem->node = node;
    return -EINVAL;
}

/* Ids in range and none twice; unused entries have no mass. seen [vocab] holds row numbers + 1. */
static int check_ids(const struct tv_tree *tree, int32_t row, int32_t vocab, int32_t *seen,
                     struct tv_problem *problem)
{
    size_t start = (size_t)row * (size_t)tree->draft.width;
    int32_t j;

    for (j = 0; j < tree->draft.width; j++) {
        int32_t id = tree->draft.ids[start + (size_t)j];

        if (id == -1) {
            if (tree->draft.probs[start + (size_t)j] != 0.0f) {
                return refuse(problem, tree, row, "an unused entry (id -1) has a probability");
            }
            continue;
        }
        if (id < 0 || id >= vocab) {
            return refuse(problem, tree, row, "an id is outside the vocabulary");
        }
        if (seen[id] == row + 1) {
            return refuse(problem, tree, row, "an id is there twice");
        }
        seen[id] = row + 1;
    }
    return 0;
}

static int check_probs(const struct tv_tree *tree, int32_t row, struct tv_problem *problem)
{
    const float *probs = tree->draft.probs + (size_t)row * (size_t)tree->draft.width;
    double sum = 0.0;
    int32_t j;

    for (j = 0; j < tree->draft.width; j++) {
        if (!(probs[j] >= 0.0f && probs[j] <= 2.0f)) { /* the sum says the rest; NaN goes here */
            return refuse(problem, tree, row, "a probability is negative, too large or not finite");
        }
        sum += (double)probs[j];
    }
    if (!(fabs(sum - 1.0) <= SUM_TOLERANCE)) {
        return refuse(problem, tree, row, "the probabilities' sum is not within 0.001 of 1");
    }
    return 0;
}

double tv_tree_draft_prob(const struct tv_tree *tree, int32_t node, int32_t token)
{
    size_t start = (size_t)node * (size_t)tree->draft.width;
    int32_t j;

    if (tree->draft.ids == NULL) {
        return (double)tree->draft.probs[start + (size_t)token];
    }
    for (j = 0; j < tree->draft.width; j++) {
        if (tree->draft.ids[start + (size_t)j] == token) {
            return (double)tree->draft.probs[start + (size_t)j];
        }
    }
    return 0.0;
}

/* A leaf's row says nothing, and does so in one way. */
static void clear_row(struct tv_tree *tree, int32_t row)
{
    size_t start = (size_t)row * (size_t)tree->draft.width;
    int32_t j;

    for (j = 0; j < tree->draft.width; j++) {
        tree->draft.probs[start + (size_t)j] = 0.0f;
        if (tree->draft.ids != NULL) {
            tree->draft.ids[start + (size_t)j] = -1;
        }
    }
}

static int check_rows(struct tv_tree *tree, int32_t vocab, uint8_t *inner, int32_t *seen,
                      struct tv_problem *problem)
{
    int32_t i;
    int rc = 0;

    for (i = 1; i < tree->count; i++) {
        inner[tree->parents[i]] = 1;
    }
    for (i = 0; i < tree->count && rc == 0; i++) {
        if (!inner[i]) {
            clear_row(tree, i);
        } else {
            rc = tree->draft.ids != NULL ? check_ids(tree, i, vocab, seen, problem) : 0;
            rc = rc == 0 ? check_probs(tree, i, problem) : rc;
        }
    }
    for (i = 1; i < tree->count && rc == 0; i++) {
        if (!(tv_tree_draft_prob(tree, tree->parents[i], tree->tokens[i]) > 0.0)) {
            rc = refuse(problem, tree, i, "its token has no probability in its parent's row");
        }
    }
    return rc;
}

int tv_tree_check_draft(struct tv_tree *tree, int32_t vocab, struct tv_problem *problem)
{
    uint8_t *inner = calloc((size_t)tree->count, sizeof(*inner));
    int32_t *seen = calloc((size_t)vocab, sizeof(*seen));
    int rc = -ENOMEM;

    if (inner != NULL && seen != NULL) {
        rc = check_rows(tree, vocab, inner, seen, problem);
    }
    free(inner);
    free(seen);
    return rc;
}
