"""Tree builders against brute force on small sizes, where they claim to be the best."""

import itertools
import math
import unittest
import warnings

import numpy as np
from harness import SEED

from treeverify import Tree
from treeverify.builders import acceptance_profile, best_first, best_first_causal, expand, fill_shape, static_shape


def distribution(rng, rows, k, vocab=9):
    """ids, logprobs [rows, k] of the k likeliest tokens of random distributions."""
    ids, logprobs = [], []
    for _ in range(rows):
        p = rng.dirichlet(np.full(vocab, 0.4))
        order = np.argsort(-p)[:k]
        ids.append(order)
        logprobs.append(np.log(np.maximum(p[order], 1e-12)))
    return np.array(ids), np.array(logprobs)


class Causal:
    """A made-up causal model: the distribution depends on the whole path. Counts its calls."""

    def __init__(self, seed, k, vocab=6):
        self.seed, self.k, self.vocab, self.calls = seed, k, vocab, 0

    def row(self, path):
        rng = np.random.default_rng([self.seed, *path])
        return [values[0] for values in distribution(rng, 1, self.k, self.vocab)]

    def __call__(self, paths):
        self.calls += 1
        rows = [self.row(path) for path in paths]
        return np.array([ids for ids, _ in rows]), np.array([values for _, values in rows])


def mass(tree):
    return float(np.exp(tree.scores[1:]).sum())


def sizes_of_best(score_of_path, tokens_at, depth_max, nodes):
    """The largest sum of path probabilities of any tree of so many drafts: enumerates all paths, then all closed sets by
    taking the best ones (a path never beats its beginning), checked against every subset for tiny cases."""
    paths = [()]
    scored = []
    while paths:
        path = paths.pop()
        if len(path) < depth_max:
            for token in tokens_at(path):
                longer = (*path, token)
                scored.append((math.exp(score_of_path(longer)), longer))
                paths.append(longer)
    if len(scored) <= 14:
        best = 0.0
        for chosen in itertools.combinations(scored, min(nodes, len(scored))):
            kept = {path for _, path in chosen}
            if all(len(path) == 1 or path[:-1] in kept for path in kept):
                best = max(best, sum(value for value, _ in chosen))
        return best
    return sum(sorted((value for value, _ in scored), reverse=True)[:nodes])


class BuilderTest(unittest.TestCase):
    def setUp(self):
        print(f"seed {SEED}")
        self.rng = np.random.default_rng(SEED)

    def test_best_first_is_the_best(self):
        for rows, k, nodes in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 5, 9)):
            ids, logprobs = distribution(self.rng, rows, k)
            tree = best_first(100, ids, logprobs, nodes)
            level = [dict(zip(map(int, row), values)) for row, values in zip(ids, logprobs)]

            def score(path):
                return sum(level[depth][token] for depth, token in enumerate(path))

            best = sizes_of_best(score, lambda path: level[len(path)], rows, nodes)
            self.assertAlmostEqual(mass(tree), best, places=12)
            self.assertLessEqual(len(tree), nodes + 1)
            for node in range(1, len(tree)):
                self.assertAlmostEqual(tree.scores[node], score(tree.path_tokens(node)[1:]), places=12)
            self.assertEqual(sorted(tree.scores, reverse=True), list(tree.scores))

    def test_best_first_large(self):
        ids, logprobs = distribution(self.rng, 16, 8, vocab=40)
        tree = best_first(0, ids, logprobs, 255)
        self.assertEqual(len(tree), 256)
        tree.check(vocab=40)
        smaller = best_first(0, ids, logprobs, 60)
        self.assertEqual(smaller, tree.keep(range(61)))

    def test_best_first_refuses(self):
        good = np.log([[0.5, 0.3]])
        for ids, logprobs in (
            ([[1, 1]], good),
            ([[1, 2, 3]], good),
            ([[1, 2]], good[:, ::-1]),
            ([[1, 2]], [[np.nan, -1.0]]),
            ([[1, 2]], [[0.5, 0.1]]),
        ):
            with self.assertRaises(ValueError):
                best_first(0, np.array(ids), np.array(logprobs), 4)
        tree = best_first(0, np.array([[4, -1], [5, 6]]), np.log([[0.5, 0.3], [0.9, 0.05]]), 9)
        self.assertEqual(len(tree), 4)

    def test_rows_that_are_padded(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tree = best_first(0, np.array([[4, -1, -1]]), np.array([[-0.1, -np.inf, -np.inf]]), 9)
        self.assertEqual(tree.tokens.tolist(), [0, 4])

    def test_best_first_causal_is_the_best(self):
        for seed, k, nodes in itertools.product(range(4), (1, 2, 3), (1, 3, 8)):
            model = Causal(seed, k)
            tree = best_first_causal(5, model, nodes, top_k=k, depth_max=4)

            def score(path):
                total = 0.0
                for at, token in enumerate(path):
                    ids, values = model.row([5, *path[:at]])
                    total += values[list(ids).index(token)]
                return total

            best = sizes_of_best(score, lambda path: model.row([5, *path])[0], 4, nodes)
            self.assertAlmostEqual(mass(tree), best, places=12)
            self.assertLessEqual(tree.depth, 4)

    def test_best_first_causal_asks_in_batches(self):
        model = Causal(1, 3)
        tree = best_first_causal(5, model, 40, top_k=3, depth_max=20)
        self.assertEqual(len(tree), 41)
        self.assertLessEqual(model.calls, tree.depth + 2)
        self.assertEqual(len(best_first_causal(5, model, 0)), 1)

    def test_expand_is_a_tree_of_the_same_scores(self):
        for seed in range(6):
            model = Causal(seed, 4)
            tree = expand(5, model, 12, depth=4, width=3, top_k=3)
            self.assertEqual(model.calls, 4)
            best = best_first_causal(5, Causal(seed, 4), 12, top_k=3, depth_max=4)
            self.assertLessEqual(mass(tree), mass(best) + 1e-12)
            wide = expand(5, Causal(seed, 4), 12, depth=4, width=10**6, top_k=3)
            self.assertAlmostEqual(mass(wide), mass(best), places=12)
            for node in range(1, len(tree)):
                self.assertLessEqual(tree.scores[node], tree.scores[tree.parents[node]])

    def shapes(self, nodes, branches, depth_max):
        """Every shape of at most `nodes` nodes as nested tuples of children."""
        def of(size, depth):
            if size == 1:
                yield ()
            elif depth > 0:
                yield from forests(size - 1, depth, branches)

        def forests(size, depth, branches_left):
            if size == 0:
                yield ()
            elif branches_left:
                for first in range(1, size + 1):
                    for head in of(first, depth - 1):
                        for tail in forests(size - first, depth, branches_left - 1):
                            yield (head, *tail)

        for size in range(1, nodes + 1):
            yield from of(size, depth_max)

    @staticmethod
    def value(shape, profile):
        return 1.0 + sum(p * BuilderTest.value(child, profile) for p, child in zip(profile, shape))

    def test_static_shape_is_the_best(self):
        profiles = [[0.8], [0.6, 0.2], [0.2, 0.6], [0.4, 0.0, 0.5], [0.5, 0.3, 0.1], [0.0, 0.0]]
        for profile, nodes, depth in itertools.product(profiles, (1, 2, 4, 7), (0, 1, 2, 6)):
            parents, expected = static_shape(profile, nodes, depth_max=depth)
            best = max(self.value(shape, profile) for shape in self.shapes(nodes, len(profile), depth))
            self.assertAlmostEqual(expected, best, places=12, msg=f"{profile} {nodes} {depth}")
            children = [[c for c in range(len(parents)) if parents[c] == n] for n in range(len(parents))]

            def worth(node):
                return 1.0 + sum(p * worth(child) for p, child in zip(profile, children[node]))

            self.assertAlmostEqual(worth(0), expected, places=12)
            self.assertLessEqual(len(parents), nodes)
            self.assertLessEqual(Tree(range(len(parents)), parents).depth, depth)

    def test_static_shape_large_and_refused(self):
        profile = [0.7, 0.12, 0.05, 0.02]
        parents, expected = static_shape(profile, 128)
        self.assertEqual(len(parents), 128)
        # with ranks in descending order the best shape is the best-first tree of the ranks
        greedy = best_first(9, np.tile(np.arange(4), (127, 1)), np.tile(np.log(profile), (127, 1)), 127)
        self.assertAlmostEqual(expected, 1.0 + mass(greedy), places=9)
        for bad in ([], [-0.1], [0.7, 0.5], [[0.5]], [0.5, math.nan]):
            with self.assertRaises(ValueError):
                static_shape(bad, 4)
        with self.assertRaises(ValueError):
            static_shape([0.5], 0)

    def test_fill_shape(self):
        parents, _ = static_shape([0.5, 0.3, 0.1], 12)
        model = Causal(3, 4)
        tree = fill_shape(5, model, parents)
        self.assertEqual(len(tree), len(parents))
        self.assertEqual(sorted(tree.depths), sorted(Tree(range(len(parents)), parents).depths))
        for node in range(len(tree)):
            children = tree.children(node)
            ids, values = model.row(tree.path_tokens(node))
            self.assertEqual(tree.tokens[children].tolist(), list(ids[: len(children)]))
        self.assertEqual(len(fill_shape(5, Causal(3, 1), parents)), 1 + Tree(range(len(parents)), parents).depth)

    def test_acceptance_profile_finds_the_chances(self):
        truth = np.array([0.6, 0.25, 0.05])
        tree = Tree(range(13), [-1] + [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3)
        rounds = []
        for _ in range(4000):
            path = [0]
            while tree.children(path[-1]):
                rank = self.rng.choice(4, p=[*truth, 1 - truth.sum()])
                if rank == 3:
                    break
                path.append(tree.children(path[-1])[rank])
            rounds.append((tree, path))
        np.testing.assert_allclose(acceptance_profile(rounds, 3), truth, atol=0.03)
        self.assertEqual(acceptance_profile([], 2).tolist(), [0.0, 0.0])
