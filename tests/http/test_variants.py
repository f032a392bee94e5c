"""Every variant of the architecture over HTTP: a chain's logits against the other implementation's, and both oracles.

tests/unit/test_model_variants.c has all positions; here are one prefix and one launch, and /v1/parity, whose path
oracle has its own arithmetic for each variant.
"""

import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import tensors  # noqa: E402
from daemon import Daemon, floats  # noqa: E402

PROGRAM = os.environ["TREEVERIFYD"]
VARIANTS = os.path.join(os.environ["TV_GOLDEN_DIR"], "model_variants")


def chain_logits(client, tokens, first, last):
    """Rows of the positions first..last, in one launch on the prefix before them."""
    chain = tokens[first : last + 1]
    tree = {"tokens": chain, "parents": list(range(-1, len(chain) - 1))}
    want = {"logits": {"rows": "all", "dtype": "f32"}}
    answer = client.post("/v1/verify", {"tokens": tokens[:first], "tree": tree, "want": want})
    return np.array(floats(answer["logits"]), dtype=np.float32).reshape(len(chain), -1)


class VariantsTest(unittest.TestCase):
    def logits_check(self, client, refs):
        tokens = [int(token) for token in refs["tokens"]]
        positions = refs["positions"].tolist()
        last = max(position for position in positions if position < 130)
        first = max(1, last - 20)
        got = chain_logits(client, tokens, first, last)
        rows = [i for i, position in enumerate(positions) if first <= position <= last]
        self.assertGreater(len(rows), 2)
        got, want = got[[positions[i] - first for i in rows]], refs["logits"][rows]
        bound = 5e-4 * max(1.0, float(refs["logits"].std()) / 1.6)
        self.assertLessEqual(float(np.abs(got - want).max()), bound)
        self.assertTrue((got.argmax(axis=1) == want.argmax(axis=1)).all())

    def test_variants(self):
        names = sorted(entry.name for entry in os.scandir(VARIANTS) if entry.is_dir())
        self.assertGreaterEqual(len(names), 14)
        for name in names:
            folder = os.path.join(VARIANTS, name)
            with self.subTest(name), Daemon(PROGRAM, folder, "--threads", "1", "--kv-dtype", "f32") as daemon:
                client = daemon.client()
                self.logits_check(client, tensors.load(os.path.join(folder, "refs.safetensors")))
                self.assertTrue(client.post("/v1/parity", {})["ok"])
                client.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
