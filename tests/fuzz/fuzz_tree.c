/*
 * fuzz_tree.c - arrays to the tree check, against a plain model.
 *
 * Two bytes a node: token and parent, both as small signed numbers. The model follows the contract
 * literally (quadratic), and must agree on acceptance, code, node, depths and children.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "proto/tree.h"

#define NODES_MAX 64
#define DEPTH_MAX 6
#define VOCAB     100

struct verdict {
    enum tv_code code;
    int32_t node;
};

static struct verdict model(int32_t count, const int32_t *tokens, const int32_t *parents,
                            int32_t *depths)
{
    int32_t i, j;

    if (count < 1) {
        return (struct verdict){TV_TREE_INVALID, -1};
    }
    if (count > NODES_MAX) {
        return (struct verdict){TV_TREE_TOO_LARGE, -1};
    }
    for (i = 0; i < count; i++) {
        int root_ok = i == 0 && parents[i] == -1;
        int child_ok = i > 0 && parents[i] >= 0 && parents[i] < i;
        if (tokens[i] < 0 || tokens[i] >= VOCAB || (!root_ok && !child_ok)) {
            return (struct verdict){TV_TREE_INVALID, i};
        }
        depths[i] = i == 0 ? 0 : depths[parents[i]] + 1;
        if (depths[i] > DEPTH_MAX) {
            return (struct verdict){TV_TREE_TOO_LARGE, i};
        }
    }
    for (i = 1; i < count; i++) {
        for (j = 1; j < i; j++) {
            if (parents[i] == parents[j] && tokens[i] == tokens[j]) {
                return (struct verdict){TV_TREE_INVALID, i};
            }
        }
    }
    return (struct verdict){TV_OK, -1};
}

/* Depths and the children of every node as the model has them. */
static void check_accepted(const struct tv_tree *tree, const int32_t *depths)
{
    int32_t i, j, token, deepest = 0;

    for (i = 0; i < tree->count; i++) {
        REQUIRE(tree->depths[i] == depths[i]);
        deepest = depths[i] > deepest ? depths[i] : deepest;
        for (token = 0; token < VOCAB; token++) {
            int32_t want = -1;
            for (j = 1; j < tree->count; j++) {
                want = tree->parents[j] == i && tree->tokens[j] == token ? j : want;
            }
            REQUIRE(tv_tree_child(tree, i, token) == want);
        }
    }
    REQUIRE(tree->depth == deepest);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct tv_tree_limits limits = {NODES_MAX, DEPTH_MAX, VOCAB};
    int32_t count = (int32_t)(bytes / 2 < NODES_MAX + 2 ? bytes / 2 : NODES_MAX + 2), i;
    int32_t depths[NODES_MAX + 2];
    struct tv_problem problem = {0};
    struct tv_tree tree = {.count = count};
    struct verdict want;
    int rc;

    tree.tokens = malloc((size_t)count * sizeof(int32_t) + 1);
    tree.parents = malloc((size_t)count * sizeof(int32_t) + 1);
    if (tree.tokens == NULL || tree.parents == NULL) {
        tv_tree_finish(&tree);
        return 0;
    }
    for (i = 0; i < count; i++) {
        tree.tokens[i] = (int8_t)data[2 * i];
        tree.parents[i] = (int8_t)data[2 * i + 1];
    }
    want = model(count, tree.tokens, tree.parents, depths);
    rc = tv_tree_check(&tree, &limits, &problem);
    REQUIRE((rc == 0) == (want.code == TV_OK));
    if (rc == 0) {
        check_accepted(&tree, depths);
    } else {
        REQUIRE(problem.code == want.code && problem.node == want.node);
    }
    tv_tree_finish(&tree);
    tv_problem_finish(&problem);
    return 0;
}
