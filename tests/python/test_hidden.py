"""Hidden rows in the Python client: arrays of every call that brings some, and what is no tensor of the round."""

import os
import tempfile

import numpy as np
import tensors
from harness import GREEDY, DaemonTest, prompts

import treeverify as tv
from treeverify import HiddenWant, Tree, Want


class HiddenTest(DaemonTest):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        path = os.path.join(cls.folder.name, "drafter.safetensors")
        # the projection takes the first value of the first tap and the last one of the second
        matrix = np.zeros((2, 2 * 256), "<f4")
        matrix[0, 0] = matrix[1, -1] = 1
        tensors.save(path, {"fc.weight": matrix})
        cls.options = ("--taps", "4,1", "--taps-projection", path)
        super().setUpClass()

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.cleanup()

    def test_model(self):
        self.assertEqual(self.client.model().taps, (4, 1))

    def test_rounds(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as session:
            self.assertIsNone(session.hidden)
            tree = Tree.from_paths(session.pending, [list(b"the"), list(b"and"), list(b" of")])
            whole = self.client.verify(prompt, tree, sampling=GREEDY, want=Want(hidden=HiddenWant(), rows="all")).hidden
            self.assertEqual((whole.taps, whole.shape, whole.dtype), ((4, 1), (2, len(tree), 256), "f32"))
            round = session.verify(tree, want=Want(hidden=HiddenWant(taps=[1], rows=[3, 0], dtype="bf16")))
            self.assertEqual((round.hidden.taps, round.hidden.nodes.tolist()), ((1,), [3, 0]))
            np.testing.assert_allclose(round.hidden.values, whole.values[1:, [3, 0]], rtol=2.0**-8)
            self.assertFalse((round.hidden.values.view(np.uint32) & 0xFFFF).any())
            self.assertIsNone(session.verify(Tree.root(session.pending)).hidden)

    def test_projection(self):
        prompt = prompts(1)[0]
        tree = Tree.root(65)
        both = [
            self.client.verify(prompt, tree, want=Want(hidden=HiddenWant(project=project))).hidden
            for project in (False, True)
        ]
        self.assertEqual((both[1].projected, both[1].shape), (True, (1, 2)))
        np.testing.assert_array_equal(both[1].values[0], [both[0].values[0, 0, 0], both[0].values[1, 0, -1]])

    def test_fetch(self):
        with self.client.session(prompts(1)[0], sampling=GREEDY) as session:
            tree = Tree.from_paths(session.pending, [list(b"the"), list(b"and")])
            inline = self.client.verify(session.tokens, tree, want=Want(hidden=HiddenWant(rows="all"))).hidden
            round = session.verify(tree, want=Want(hidden=HiddenWant(rows="all", via="fetch")))
            self.assertIsNone(round.hidden.values)
            whole = session.fetch_hidden(round)
            np.testing.assert_array_equal(whole.values, inline.values)
            for rows, nodes in (([2, 0], [2, 0]), ("stop", round.accepted_nodes[-1:]), ("path", round.accepted_nodes)):
                part = session.fetch_hidden(round, rows=rows)
                self.assertEqual(part.nodes.tolist(), nodes)
                np.testing.assert_array_equal(part.values, whole.values[:, nodes])
            coarse = session.fetch_hidden(round, dtype="fp8_e4m3")
            self.assertEqual(coarse.dtype, "fp8_e4m3")
            np.testing.assert_allclose(coarse.values, np.clip(whole.values, -448, 448), rtol=2.0**-4, atol=2.0**-10)
            round = session.verify(Tree.root(session.pending), want=Want(hidden=HiddenWant(project=True, via="fetch")))
            self.assertEqual(session.fetch_hidden(round).shape, (1, 2))
            with self.assertRaises(ValueError):
                session.fetch_logits(round)
            session.decode(1)
            with self.assertRaises(tv.GoneError):
                session.fetch_hidden(round)

    def test_prompt(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, hidden=HiddenWant()) as session:
            whole = session.hidden
            self.assertEqual(whole.shape, (2, len(prompt), 256))
            self.assertEqual(whole.nodes.tolist(), list(range(len(prompt))))
            with self.client.session(prefix=session, hidden=HiddenWant(rows="window:5", taps=[1])) as other:
                self.assertEqual(other.hidden.nodes.tolist(), list(range(len(prompt) - 5, len(prompt))))
                np.testing.assert_array_equal(other.hidden.values, whole.values[1:, -5:])

    def test_refusals(self):
        for hidden in (HiddenWant(taps=[2]), HiddenWant(taps=[1, 1]), HiddenWant(via="fetch")):
            with self.assertRaises(tv.ProblemError) as caught:
                self.client.verify([1], Tree.root(65), want=Want(hidden=hidden))
            self.assertEqual(caught.exception.code, "wrong-value")

    def test_blocks_that_contradict_themselves(self):
        block = {"taps": [4, 1], "rows": [0], "shape": [2, 1, 3], "dtype": "fp8_e4m3", "data_b64": "AQIDBAUG"}
        self.assertEqual(tv.Hidden.read(block).values.shape, (2, 1, 3))
        for change in ({"taps": [4]}, {"rows": [0, 1]}, {"shape": [1, 3]}, {"data_b64": "AQID"}, {"project": True}):
            with self.assertRaises(tv.ContractError):
                tv.Hidden.read({**block, **change})
