"""undecided.py tells a router that could not decide from a fault, on streams of tests/support/mla.py itself."""

import os
import sys
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import mla  # noqa: E402
import undecided  # noqa: E402

SOURCE = os.path.join(os.path.dirname(os.environ["TV_MODEL_DIR"]), "v3")
TOKENS = [(37 * i + 11) % 307 for i in range(24)]
LAYER = 1  # the first with experts
BIAS = f"model.layers.{LAYER}.mlp.gate.e_score_correction_bias"


def border(model, expert, row):
    """How much more the expert's score must be for the row to have other experts; None: 1 is not enough."""
    name = f"model.layers.{LAYER}."
    x = model.streams(TOKENS)[LAYER]
    x = x + model.attention(model.norm(x, name + "input_layernorm"), LAYER, np.arange(len(x)), np.tri(len(x), dtype=bool))
    logits = model.linear(model.norm(x, name + "post_attention_layernorm"), name + "mlp.gate")[row]

    def experts(nudge):
        return set(model.choice(logits, LAYER, nudge * np.eye(len(logits))[expert])[0].tolist())

    low, high = 0.0, 1.0
    if experts(low) == experts(high):
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if experts(middle) == experts(0.0) else (low, middle)
    return high


class UndecidedRoutersTest(unittest.TestCase):
    def setUp(self):
        self.model = mla.Model(SOURCE)
        self.row = len(TOKENS) - 1
        count = len(self.model.weights[BIAS])
        found = [(border(self.model, expert, self.row), expert) for expert in range(count)]
        nudge, expert = min((n, e) for n, e in found if n is not None)
        bias = self.model.weights[BIAS].astype(np.float64)
        self.sides = []
        for step in (1e-5, -1e-5):
            self.model.weights[BIAS] = bias + (nudge + step) * np.eye(count)[expert]
            self.sides.append(self.model.streams(TOKENS))

    def explain(self, first, second):
        return undecided.explain(self.model, first, second, len(TOKENS))

    def test_the_other_choice_is_an_explanation(self):
        why = self.explain(*self.sides)
        self.assertIsNotNone(why)
        self.assertIn((self.row, LAYER), [(row, at) for row, at, _, _ in why])
        for _, _, mine, other in why:
            self.assertNotEqual(mine, other)

    def test_streams_that_part_nowhere_are_none(self):
        self.assertIsNone(self.explain(self.sides[0], self.sides[0]))

    def test_a_wrong_row_is_none(self):
        for at in (LAYER, LAYER + 1):  # behind a dense layer, and beside the other choice
            wrong = self.sides[1].copy()
            wrong[at:, self.row] *= 1.03
            self.assertIsNone(self.explain(self.sides[0], wrong))

    def test_experts_that_were_far_off_are_none(self):
        self.model.weights[BIAS] = self.model.weights[BIAS] + 10 * undecided.STEP * (
            np.arange(len(self.model.weights[BIAS])) % 2
        )
        self.assertIsNone(self.explain(self.sides[0], self.model.streams(TOKENS)))


if __name__ == "__main__":
    unittest.main()
