"""Tree: the rules of proto/tree.c, merging, cutting, drawing."""

import random
import unittest

import numpy as np
from harness import SEED

from treeverify import Tree, TreeError


def random_tree(source, nodes, vocab=12, root=None):
    tokens, parents, used = [source.randrange(vocab) if root is None else root], [-1], set()
    while len(tokens) < nodes:
        edge = (source.randrange(len(tokens)), source.randrange(vocab))
        if edge not in used:
            used.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return Tree(tokens, parents)


def paths_of(tree):
    return {tuple(tree.path_tokens(node)) for node in range(len(tree))}


class TreeTest(unittest.TestCase):
    def setUp(self):
        print(f"seed {SEED}")
        self.random = random.Random(SEED)

    def refused(self, code, node, *arguments, **check):
        with self.assertRaises(TreeError) as caught:
            tree = Tree(*arguments)
            tree.check(**check)
        self.assertEqual((caught.exception.code, caught.exception.node), (code, node), caught.exception)

    def test_what_is_not_a_tree(self):
        self.refused("tree-invalid", None, [], [])
        self.refused("tree-invalid", None, [1, 2], [-1])
        self.refused("tree-invalid", None, [1.5], [-1])
        self.refused("tree-invalid", None, [[1]], [[-1]])
        self.refused("tree-invalid", None, [2**31], [-1])
        self.refused("tree-invalid", 0, [1], [0])
        self.refused("tree-invalid", 1, [1, 2], [-1, -1])
        self.refused("tree-invalid", 1, [1, 2, 3], [-1, 2, 0])
        self.refused("tree-invalid", 1, [1, 2], [-1, 1])
        self.refused("tree-invalid", 1, [1, -1], [-1, 0])
        self.refused("tree-invalid", 3, [1, 2, 3, 2], [-1, 0, 0, 0])
        self.refused("tree-invalid", 2, [1, 2, 9], [-1, 0, 1], vocab=9)

    def test_limits_at_and_above(self):
        Tree.chain([1] * 65).check(vocab=2, nodes_max=65)
        self.refused("tree-too-large", 65, [1] * 66, range(-1, 65), vocab=2, nodes_max=66)
        star = Tree(range(256), [-1] + [0] * 255)
        star.check(vocab=256)
        self.refused("tree-too-large", None, range(257), [-1] + [0] * 256, vocab=257)
        self.refused("tree-invalid", 255, star.tokens, star.parents, vocab=255)

    def test_the_same_token_elsewhere_is_fine(self):
        tree = Tree([7, 7, 7, 8, 7], [-1, 0, 1, 0, 3])
        self.assertEqual(tree.path_tokens(4), [7, 8, 7])

    def test_geometry(self):
        for _ in range(50):
            tree = random_tree(self.random, self.random.randint(1, 40))
            for node in range(len(tree)):
                path = tree.path(node)
                self.assertEqual(len(path) - 1, tree.depths[node])
                self.assertEqual(path[0], 0)
                for above, below in zip(path, path[1:]):
                    self.assertEqual(tree.parents[below], above)
                    self.assertIn(below, tree.children(above))
                    self.assertEqual(tree.child(above, int(tree.tokens[below])), below)
                self.assertEqual(tree.walk(tree.path_tokens(node)[1:]), path)
                self.assertIsNone(tree.child(node, 99))
            self.assertEqual(tree.depth, max(len(tree.path(node)) - 1 for node in range(len(tree))))
            self.assertEqual(tree.leaves(), [n for n in range(len(tree)) if n not in tree.parents])
            self.assertEqual(Tree(**tree.body()), tree)
            self.assertEqual(hash(Tree(**tree.body())), hash(tree))

    def test_arrays_are_read_only(self):
        tree = Tree.chain([1, 2])
        for array in (tree.tokens, tree.parents):
            with self.assertRaises(ValueError):
                array[0] = 5
        self.assertEqual(tree.tokens.dtype, np.int32)

    def test_from_paths(self):
        tree = Tree.from_paths(1, [[2, 3], [2, 4], [], [5], [2, 3, 6]])
        self.assertEqual(tree.body(), {"tokens": [1, 2, 3, 4, 5, 6], "parents": [-1, 0, 1, 1, 0, 2]})

    def test_merge_has_every_path_once(self):
        for _ in range(50):
            trees = [random_tree(self.random, self.random.randint(1, 20), root=3) for _ in range(4)]
            merged = Tree.merge(trees)
            wanted = set().union(*map(paths_of, trees))
            self.assertEqual(paths_of(merged), wanted)
            self.assertEqual(len(merged), len(wanted))
            self.assertEqual(Tree.merge([merged, merged]), merged)

    def test_merge_with_a_budget(self):
        a = Tree([1, 2, 3], [-1, 0, 1], [0.0, -0.5, -0.9])
        b = Tree([1, 4, 5, 2], [-1, 0, 1, 0], [0.0, -0.7, -3.0, -0.4])
        merged = Tree.merge([a, b], 4)
        self.assertEqual(paths_of(merged), {(1,), (1, 2), (1, 4), (1, 2, 3)})
        self.assertEqual(merged.scores[merged.child(0, 2)], -0.4)
        unscored = Tree.merge([Tree.chain([1, 2, 3]), Tree.chain([1, 4, 5])], 3)
        self.assertEqual(paths_of(unscored), {(1,), (1, 2), (1, 4)})
        with self.assertRaises(TreeError):
            Tree.merge([a, Tree.root(9)])
        with self.assertRaises(TreeError):
            Tree.merge([])

    def test_cut_keeps_a_tree(self):
        for _ in range(50):
            tree = random_tree(self.random, 30)
            scores = [self.random.uniform(-5, 0) for _ in range(30)]  # children may score above parents
            for nodes_max, depth_max in ((1, 9), (7, 2), (30, 0), (12, 3)):
                cut = Tree(tree.tokens, tree.parents, scores).cut(depth_max, nodes_max)
                self.assertLessEqual(len(cut), nodes_max)
                self.assertLessEqual(cut.depth, depth_max)
                self.assertLessEqual(paths_of(cut), paths_of(tree))
        with self.assertRaises(TreeError):
            Tree.chain([1, 2, 3]).keep([2])

    def test_cut_keeps_what_drafts_were_drawn_from(self):
        for sparse in (False, True):
            q = np.arange(20, dtype=np.float32).reshape(5, 4)
            given = (q.astype(np.int32), q) if sparse else q
            tree = Tree([1, 2, 3, 2, 0], [-1, 0, 0, 1, 0], [0.0, -9.0, -1.0, -9.5, -0.1], q=given)
            self.assertIs(tree.cut(2, 5), tree)
            for cut, nodes in ((tree.cut(1, 5), [0, 1, 2, 4]), (tree.cut(2, 3), [0, 1, 2]), (tree.cut(0), [0])):
                self.assertEqual(cut.tokens.tolist(), tree.tokens[nodes].tolist())  # as drawn, not by score
                for part in cut.q if sparse else (cut.q,):
                    np.testing.assert_array_equal(part, q[nodes])
            with self.assertRaises(TreeError):
                tree.keep([2])  # node 1 was drawn first

    def test_drawing(self):
        tree = Tree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 3])
        self.assertEqual(tree.draw(marked=[0, 2]), "1 *\n|-- 2\n|   `-- 4\n|       `-- 5\n`-- 3 *")
        self.assertEqual(Tree.root(65).draw(chr), "A")
