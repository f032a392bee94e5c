/*
 * test_proto_tree.c - draft trees: shape, limits at the cap and one above it, duplicate siblings
 * (B19), and random trees against a plain quadratic check.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/limits.h"
#include "proto/tree.h"

static const struct tv_tree_limits usual = {.nodes_max = 8, .depth_max = 3, .vocab = 100};

static struct tv_tree make(int32_t count, const int32_t *tokens, const int32_t *parents)
{
    struct tv_tree tree = {.count = count};
    size_t bytes = (size_t)count * sizeof(int32_t) + 1;

    tree.tokens = malloc(bytes);
    tree.parents = malloc(bytes);
    assert_true(tree.tokens != NULL && tree.parents != NULL);
    if (count > 0) {
        memcpy(tree.tokens, tokens, (size_t)count * sizeof(int32_t));
        memcpy(tree.parents, parents, (size_t)count * sizeof(int32_t));
    }
    return tree;
}

/* Check a tree and compare the refusal; node -1 and pointer NULL when none is named. */
static void expect(int32_t count, const int32_t *tokens, const int32_t *parents, enum tv_code code,
                   int32_t node, const char *pointer)
{
    struct tv_tree tree = make(count, tokens, parents);
    struct tv_problem problem = {.node = -2};
    int rc = tv_tree_check(&tree, &usual, &problem);

    if (code == TV_OK) {
        assert_int_equal(rc, 0);
    } else {
        assert_int_equal(rc, -EINVAL);
        assert_int_equal(problem.code, code);
        assert_int_equal(problem.node, node);
        assert_string_equal(problem.pointer, pointer);
        assert_false(problem.committed);
    }
    tv_tree_finish(&tree);
    tv_problem_finish(&problem);
}

#define LIST(...)                                                                                  \
    (const int32_t[])                                                                              \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

static void test_shape(void **state)
{
    (void)state;
    expect(1, LIST(5), LIST(-1), TV_OK, 0, NULL);
    expect(4, LIST(5, 1, 2, 3), LIST(-1, 0, 0, 1), TV_OK, 0, NULL);
    expect(0, LIST(0), LIST(0), TV_TREE_INVALID, -1, "/tree/tokens");
    expect(1, LIST(5), LIST(0), TV_TREE_INVALID, 0, "/tree/parents/0");
    expect(2, LIST(5, 6), LIST(-1, -1), TV_TREE_INVALID, 1, "/tree/parents/1");
    expect(2, LIST(5, 6), LIST(-1, 1), TV_TREE_INVALID, 1, "/tree/parents/1");
    expect(3, LIST(5, 6, 7), LIST(-1, 2, 0), TV_TREE_INVALID, 1, "/tree/parents/1");
    expect(2, LIST(5, 6), LIST(-1, -2), TV_TREE_INVALID, 1, "/tree/parents/1");
    expect(2, LIST(5, 6), LIST(-1, INT32_MAX), TV_TREE_INVALID, 1, "/tree/parents/1");
    expect(2, LIST(5, 6), LIST(-1, INT32_MIN), TV_TREE_INVALID, 1, "/tree/parents/1");
}

static void test_b43_vocabulary(void **state)
{
    (void)state;
    expect(2, LIST(99, 0), LIST(-1, 0), TV_OK, 0, NULL);
    expect(2, LIST(100, 0), LIST(-1, 0), TV_TREE_INVALID, 0, "/tree/tokens/0");
    expect(2, LIST(0, 100), LIST(-1, 0), TV_TREE_INVALID, 1, "/tree/tokens/1");
    expect(2, LIST(0, 101), LIST(-1, 0), TV_TREE_INVALID, 1, "/tree/tokens/1");
    expect(2, LIST(0, -1), LIST(-1, 0), TV_TREE_INVALID, 1, "/tree/tokens/1");
    expect(2, LIST(0, INT32_MAX), LIST(-1, 0), TV_TREE_INVALID, 1, "/tree/tokens/1");
}

static void test_limits(void **state)
{
    (void)state;
    expect(8, LIST(0, 1, 2, 3, 4, 5, 6, 7), LIST(-1, 0, 0, 0, 0, 0, 0, 0), TV_OK, 0, NULL);
    expect(9, LIST(0, 1, 2, 3, 4, 5, 6, 7, 8), LIST(-1, 0, 0, 0, 0, 0, 0, 0, 0), TV_TREE_TOO_LARGE,
           -1, "/tree/tokens");
    expect(4, LIST(0, 1, 2, 3), LIST(-1, 0, 1, 2), TV_OK, 0, NULL);
    expect(5, LIST(0, 1, 2, 3, 4), LIST(-1, 0, 1, 2, 3), TV_TREE_TOO_LARGE, 4, "/tree/parents/4");
}

static void test_b19_duplicate_siblings(void **state)
{
    (void)state;
    /* Two equal children of node 0 with different grandchildren, in both orders. */
    expect(5, LIST(9, 7, 7, 1, 2), LIST(-1, 0, 0, 1, 2), TV_TREE_INVALID, 2, "/tree/tokens/2");
    expect(5, LIST(9, 7, 1, 7, 2), LIST(-1, 0, 1, 0, 3), TV_TREE_INVALID, 3, "/tree/tokens/3");
    /* Equal tokens under different parents, and a child that repeats its parent, are fine. */
    expect(5, LIST(9, 7, 8, 1, 1), LIST(-1, 0, 0, 1, 2), TV_OK, 0, NULL);
    expect(4, LIST(7, 7, 7, 7), LIST(-1, 0, 1, 2), TV_OK, 0, NULL);
}

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* First node that repeats a sibling's token, or -1. */
static int32_t first_duplicate(const struct tv_tree *tree)
{
    int32_t i, j;

    for (i = 1; i < tree->count; i++) {
        for (j = 1; j < i; j++) {
            if (tree->parents[i] == tree->parents[j] && tree->tokens[i] == tree->tokens[j]) {
                return i;
            }
        }
    }
    return -1;
}

static void test_random_trees(void **state)
{
    const struct tv_tree_limits limits = {
        .nodes_max = TV_ENGINE_NODES_MAX, .depth_max = TV_ENGINE_NODES_MAX, .vocab = 50};
    uint32_t seed = 20240229;
    int32_t tokens[TV_ENGINE_NODES_MAX], parents[TV_ENGINE_NODES_MAX];
    int round, good = 0, bad = 0;

    (void)state;
    for (round = 0; round < 2000; round++) {
        int32_t count = 1 + (int32_t)(next_random(&seed) % (round % 100 == 0 ? 1024 : 40)), i, want;
        struct tv_problem problem;
        struct tv_tree tree;
        int rc;

        for (i = 0; i < count; i++) {
            tokens[i] = (int32_t)(next_random(&seed) % 50);
            parents[i] = i == 0 ? -1 : (int32_t)(next_random(&seed) % (uint32_t)i);
        }
        tree = make(count, tokens, parents);
        want = first_duplicate(&tree);
        rc = tv_tree_check(&tree, &limits, &problem);
        if (want >= 0) {
            assert_int_equal(rc, -EINVAL);
            assert_int_equal(problem.node, want);
            bad++;
            tv_tree_finish(&tree);
            continue;
        }
        assert_int_equal(rc, 0);
        good++;
        for (i = 1; i < count; i++) {
            assert_int_equal(tree.depths[i], tree.depths[parents[i]] + 1);
            assert_int_equal(tv_tree_child(&tree, parents[i], tokens[i]), i);
            assert_true(tree.depths[i] <= tree.depth);
        }
        assert_int_equal(tree.depths[0], 0);
        assert_int_equal(tv_tree_child(&tree, 0, 51), -1);
        tv_tree_finish(&tree);
    }
    assert_true(good > 100 && bad > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shape),        cmocka_unit_test(test_b43_vocabulary),
        cmocka_unit_test(test_limits),       cmocka_unit_test(test_b19_duplicate_siblings),
        cmocka_unit_test(test_random_trees),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
