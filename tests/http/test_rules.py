"""What the shipped daemon says about trees besides target_walk: scores, judged by logits that it returned itself."""

import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Problem, Session, floats  # noqa: E402

PROMPT = list(b"In the beginning")
ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}


def random_tree(rng, nodes, vocab):
    """(drafts, parents) below node 0: siblings differ."""
    drafts = [int(t) for t in rng.choice(vocab, nodes - 1, replace=False)]
    return drafts, [int(rng.integers(0, i + 1)) for i in range(nodes - 1)]


def log_softmax(rows):
    rows = rows.astype(np.float64)
    top = rows.max(axis=1, keepdims=True)
    return rows - top - np.log(np.exp(rows - top).sum(axis=1, keepdims=True))


class RulesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(os.environ["TREEVERIFYD"], os.environ["TV_MODEL_DIR"], "--threads", "1").__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def setUp(self):
        self.client = self.daemon.client()
        self.addCleanup(self.client.close)
        self.vocab = self.client.get("/v1/model")["vocab"]
        self.rng = np.random.default_rng(5)

    def rows(self, block):
        return np.array(floats(block), dtype=np.float32).reshape(block["shape"])

    def check_scores(self, scores, tree, rows):
        self.assertIsNone(scores[0])
        expected = log_softmax(rows)
        for node in range(1, len(tree["tokens"])):
            want = expected[tree["parents"][node], tree["tokens"][node]]
            self.assertAlmostEqual(scores[node], want, delta=2e-5 * max(1.0, abs(want)))

    def test_scores_of_a_prefix(self):
        for nodes in (1, 2, 17, 40):
            drafts, parents = random_tree(self.rng, nodes, self.vocab)
            tree = {"tokens": [PROMPT[-1], *drafts], "parents": [-1, *parents]}
            body = {"tokens": PROMPT[:-1], "tree": tree}
            scores = self.client.post("/v1/score", body)["logprobs"]
            rows = self.rows(self.client.post("/v1/verify", dict(body, want=ALL_LOGITS))["logits"])
            self.assertEqual(len(scores), nodes)
            self.check_scores(scores, tree, rows)

    def test_scores_of_a_session(self):
        session = Session(self.client, PROMPT, sampling={"temperature": 0.7, "top_k": 3, "seed": "9"})
        drafts, parents = random_tree(self.rng, 24, self.vocab)
        tree = {"tokens": [session.state["pending"], *drafts], "parents": [-1, *parents]}
        scores = self.client.post("/v1/score", {"session": session.id, "tree": tree})["logprobs"]
        before = self.client.get(f"/v1/sessions/{session.id}")
        self.assertEqual(before["committed_len"], len(PROMPT))
        self.assertEqual(before["next_seq"], session.state["next_seq"])
        answer = session.verify(drafts, parents, want=ALL_LOGITS)
        self.check_scores(scores, tree, self.rows(answer["logits"]))
        other = {"tokens": [(answer["pending"] + 1) % self.vocab], "parents": [-1]}
        with self.assertRaises(Problem) as caught:
            self.client.post("/v1/score", {"session": session.id, "tree": other})
        self.assertEqual(caught.exception.code, "pending-mismatch")
        session.close()

    def test_batch_answers_the_bits_of_single_rounds(self):
        prompts = [[*PROMPT, *range(1, 2 + i)] for i in range(5)]
        seeded = {"sampling": {"temperature": 0.8, "seed": "4"}}
        alone = [Session(self.client, prompt, **seeded) for prompt in prompts]
        together = [Session(self.client, prompt, **seeded) for prompt in prompts]
        for _ in range(3):
            drafts = [random_tree(self.rng, 3 + 4 * i, self.vocab) for i in range(len(prompts))]
            single = [session.verify(*draft, want=ALL_LOGITS) for session, draft in zip(alone, drafts)]
            items = [
                dict(session.round(*draft, want=ALL_LOGITS), session=session.id)
                for session, draft in zip(together, drafts)
            ]
            items.append({"session": "s_0123456789abcdefghijAB"})
            answer = self.client.post("/v1/verify:batch", {"items": items})["items"]
            self.assertEqual([item["status"] for item in answer], [200] * 5 + [400])
            self.assertTrue(answer[5]["problem"]["pointer"].startswith("/items/5"))
            for session, item, expected in zip(together, answer, single):
                body = item["body"]
                self.assertGreater(body["timing_us"]["batch"], 1)
                for member in ("accepted", "new_tokens", "digest", "logits"):
                    self.assertEqual(body[member], expected[member])
                session.state = body
        for session in (*alone, *together):
            session.close()


if __name__ == "__main__":
    unittest.main()
