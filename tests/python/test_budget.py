"""The size of trees: chosen by costs, the link and what drafts were worth, and read from the server's hint."""

import dataclasses
import unittest

import numpy as np
from harness import GREEDY, SCALE, STORE, DaemonTest, prompts

import treeverify as tv
from treeverify import Hint, Round, Timing, Tree
from treeverify.budget import NODES_DEFAULT, Budget
from treeverify.drafters import NgramDrafter
from treeverify.values import Model, read_round

BODY = {
    "name": "m", "model_id": "0" * 64, "epoch": "0" * 16, "vocab": 260, "max_len": 999, "backend": "cpu", "features": [],
    "tokenizer_sha256": None, "noise": 0, "verify_us": [[1, 100], [11, 1100], [101, 10100]],
    "limits": {"max_nodes": 256, "max_depth": 64},
}
MODEL = Model.read(BODY)


def chain(count, chance):
    """Drafts each right with this chance, once the one before is."""
    return Tree(range(count + 1), range(-1, count), np.arange(count + 1) * np.log(chance))


def made(tree, accepted, gpu_us=1000, rtt_s=0.001, hint=None):
    return Round(
        1, [0] * (accepted + 1), 0, 9, "", "greedy", True, None, list(range(accepted + 1)), [0] * (accepted + 1),
        nodes=len(tree), depth=tree.depth, timing=Timing(0, gpu_us, gpu_us, 1), rtt_s=rtt_s, hint=hint,
    )


class BudgetTest(unittest.TestCase):
    def test_the_best_rate(self):
        """By hand: sums of chances over costs, for every size."""
        tree = Tree([9, 1, 2, 3, 4], [-1, 0, 0, 1, 1], np.log([1, 0.6, 0.3, 0.5, 0.05]))
        for costs, kept in (
            ([[1, 100], [5, 101]], [0, 1, 2, 3, 4]),  # nodes cost nothing
            ([[1, 100], [5, 500]], [0]),
            ([[1, 100], [5, 260]], [0, 1, 3]),  # 1/100, 1.6/140, 2.1/180, 2.4/220
        ):
            budget = Budget(dataclasses.replace(MODEL, verify_us=tuple(map(tuple, costs))))
            self.assertEqual(budget.fit(tree), tree.keep(kept))

    def test_a_link_and_bad_drafts(self):
        tree = chain(60, 0.9)
        near, far, piped, bad = (Budget(MODEL, pipelined=at == 2) for at in range(4))
        for _ in range(30):
            near.learn(tree, made(tree, 9))
            far.learn(tree, made(tree, 9, rtt_s=0.101))
            piped.learn(tree, made(tree, 9, rtt_s=0.101))
            bad.learn(tree, made(tree, 0, rtt_s=0.101))
        sizes = [len(budget.fit(tree)) for budget in (near, far, piped, bad)]
        self.assertEqual(sizes[0], sizes[2])
        self.assertGreater(sizes[1], 2 * sizes[0])
        self.assertEqual(sizes[3], 1)
        self.assertEqual(len(far.fit(Tree.chain(range(30)))), 30)  # no scores: as it is

    def test_hints(self):
        budget, scored, plain = Budget(MODEL), chain(10, 0.5), Tree.chain(range(11))
        self.assertEqual(budget.drafts(), NODES_DEFAULT)
        budget.learn(plain, made(plain, 2, hint=Hint(20, ((1, 100), (20, 100)), 0)))
        self.assertEqual(budget.drafts(), 19)
        self.assertEqual(budget.fit(scored), scored)
        budget.learn(scored, made(scored, 2, hint=Hint(5, ((1, 100), (20, 4000)), 0)))
        self.assertEqual(budget.drafts(), 10)
        self.assertLess(len(budget.fit(scored)), len(scored))
        budget.learn(scored, made(scored, 2))
        self.assertEqual(budget.drafts(), 10)

    def test_hints_of_answers(self):
        answer = {
            "seq": 1, "status": "committed", "accepted": {"nodes": [0], "tokens": [1]}, "pending": 2, "new_tokens": [2],
            "committed_len": 1, "digest": "0" * 32, "next_seq": 2, "rule": "greedy", "lossless": True, "finish": None,
            "margin": {"min": None, "near_tie": False}, "stats": {"nodes": 1, "depth": 0, "accept_len_mean": 1},
            "timing_us": {"queue": 1, "gpu": 2, "total": 3, "batch": 1},
        }
        self.assertIsNone(read_round(answer).hint)
        hint = {"max_useful_nodes": 48, "verify_us": [[1, 20], [64, 90]], "queue_depth": 2}
        self.assertEqual(read_round({**answer, "hint": hint}).hint, Hint(48, ((1, 20), (64, 90)), 2))
        for wrong in (7, {"verify_us": [[1]]}, {"verify_us": 3}):
            with self.assertRaises(tv.ContractError):
                read_round({**answer, "hint": wrong})


class AutoTest(DaemonTest):
    def test_the_text_is_the_same(self):
        prompt, count = prompts(1)[0], 50 if SCALE >= 1 else 16
        plain = self.plain(prompt, count)
        for pipeline in (False, True):
            with self.client.session(prompt, sampling=GREEDY) as session:
                drafter = NgramDrafter.from_file(STORE)
                for round in session.generate(drafter, count - 1, nodes="auto", pipeline=pipeline):
                    # the sizes themselves depend on the machine
                    self.assertLessEqual(round.nodes, session.model.max_nodes)
                self.assertEqual(session.new_tokens[:count], plain)
