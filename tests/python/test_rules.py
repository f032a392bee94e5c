"""Rules, scores and batches through the Python client, against the real daemon."""

import unittest

import numpy as np
from harness import DaemonTest, prompts

import rules
import treeverify as tv
from treeverify import Sampling, Tree, Want

ALL = Want(logits="f32", logits_rows="all")
SEED = 1234567890123456789


class RulesTest(DaemonTest):
    def drawn_tree(self, rng, pending, vocab, sparse):
        """A star whose children were drawn from a flat distribution over a few tokens."""
        q = np.zeros((5, vocab), dtype=np.float32)
        support = rng.choice(vocab, 40, replace=False)
        q[0, support] = rng.dirichlet(np.ones(40))
        drafts = rules.sample_without_replacement(rng, q[0], 4)
        given = q
        if sparse:
            ids = np.full((5, 40), -1, dtype=np.int32)
            probs = np.zeros((5, 40), dtype=np.float32)
            ids[0], probs[0] = support, q[0, support]
            given = (ids, probs)
        return Tree([pending, *drafts], [-1, 0, 0, 0, 0], q=given), q

    def test_ratio_wor(self):
        rng = np.random.default_rng(3)
        vocab = self.client.model().vocab
        with self.client.session(prompts(1)[0], sampling=Sampling(rule="ratio_wor", seed=SEED)) as session:
            for number in range(6):
                tree, q = self.drawn_tree(rng, session.pending, vocab, sparse=number % 2 == 0)
                length = session.committed_len
                round = session.verify(tree, want=ALL)
                expected = rules.ratio_wor(
                    (tree.tokens.tolist(), tree.parents.tolist()), q, round.logits.values, length, SEED, temperature=1.0
                )
                self.assertEqual((round.accepted_nodes, round.pending), expected)
                self.assertTrue(round.lossless and round.rule == "ratio_wor")
            plain = Tree.chain([session.pending, 1])
            with self.assertRaises(tv.ProblemError) as caught:
                session.verify(plain)
            self.assertEqual(caught.exception.status, 422)
            self.assertEqual(session.verify(plain, rule="target_walk").rule, "target_walk")

    def test_ratio_wor_with_a_drafter(self):
        """What the drafts were drawn from goes with them, whatever becomes of the tree on its way."""
        rng, vocab = np.random.default_rng(4), self.client.model().vocab

        class Drawing:
            drawn_tree = self.drawn_tree

            def draft(self, tokens, nodes, depth):
                return self.drawn_tree(rng, tokens[-1], vocab, sparse=len(tokens) % 2 == 0)[0]

        for options in ({}, {"nodes": 2}, {"nodes": "auto"}, {"pipeline": True}, {"pipeline": True, "guesses": 4}):
            with self.client.session(prompts(1)[0], sampling=Sampling(rule="ratio_wor", seed=SEED)) as session:
                rounds = list(session.generate(Drawing(), 12, **options))
                self.assertTrue(all(round.lossless and round.rule == "ratio_wor" for round in rounds))
                self.assertLessEqual(max(round.nodes for round in rounds), 3 if options.get("nodes") == 2 else 5)
                self.assertEqual(len(session.new_tokens) - 1, sum(len(round.new_tokens) for round in rounds))

    def test_typical(self):
        sampling = Sampling(rule="typical", seed=SEED, typical=(0.2, 0.5))
        with self.client.session(prompts(1)[0], sampling=sampling) as session:
            self.assertEqual(session.sampling.typical, (0.2, 0.5))
            tree = Tree([session.pending, 32, 101, 116, 32], [-1, 0, 0, 1, 2])
            length = session.committed_len
            round = session.verify(tree, want=ALL)
            shape = (tree.tokens.tolist(), tree.parents.tolist())
            expected = rules.typical(shape, round.logits.values, length, SEED, 0.2, 0.5, temperature=1.0)
            self.assertEqual((round.accepted_nodes, round.pending), expected)
            self.assertFalse(round.lossless)

    def test_score(self):
        prompt = prompts(1)[0]
        tree = Tree([prompt[-1], 32, 101, 116], [-1, 0, 0, 1])
        scores = self.client.score(prompt[:-1], tree)
        rows = self.client.verify(prompt[:-1], tree, want=ALL).logits.values.astype(np.float64)
        self.assertTrue(np.isnan(scores[0]))
        for node in range(1, len(tree)):
            row = rows[tree.parents[node]]
            self.assertAlmostEqual(scores[node], row[tree.tokens[node]] - np.log(np.exp(row).sum()), places=3)
        with self.client.session(prompt) as session:
            tree = Tree.chain([session.pending, 32])
            self.assertEqual(len(self.client.score(None, tree, session=session)), 2)
            self.assertEqual(session.verify(tree).seq, 1)
        with self.assertRaises(ValueError):
            self.client.score(None, tree)

    def test_batch(self):
        texts = prompts(3)
        greedy = Sampling(rule="greedy")
        alone = [self.client.session(text, sampling=greedy) for text in texts]
        together = [self.client.session(text, sampling=greedy) for text in texts]
        for _ in range(3):
            trees = [Tree.chain([session.pending, 32, 116]) for session in alone]
            want = [session.verify(tree).new_tokens for session, tree in zip(alone, trees)]
            got = self.client.verify_batch(list(zip(together, trees)))
            self.assertEqual([round.new_tokens for round in got], want)
        self.raw.call("DELETE", f"/v1/sessions/{together[1].id}")
        trees = [Tree.chain([session.pending, 32]) for session in together]
        got = self.client.verify_batch(list(zip(together, trees)))
        self.assertIsInstance(got[1], tv.ProblemError)
        self.assertEqual(got[1].status, 404)
        self.assertTrue(got[0].new_tokens and got[2].new_tokens)
        with self.assertRaises(RuntimeError):
            self.client.verify_batch([(together[0], trees[0])] * 2)
        for session in (*alone, *together):
            session.close()


class TreeTest(unittest.TestCase):
    def test_rows_of_another_tree(self):
        with self.assertRaises(tv.TreeError):
            Tree([1, 2], [-1, 0], q=np.ones((3, 4), dtype=np.float32))
