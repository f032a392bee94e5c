"""A start on weights whose router cannot decide: for rows of the self-test's text, two experts' scores are brought to
the same value by the correction bias, so that every order of summation may choose another. Such a model is right
whichever it chooses, and the daemon serves it; a router that is wrong is refused all the same."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import mla  # noqa: E402
import tensors  # noqa: E402
from daemon import Daemon  # noqa: E402

EXIT_FAULT = 70
SOURCE = os.path.join(os.path.dirname(os.environ["TV_MODEL_DIR"]), "v3")
TEXT = [(37 * i + 11) % 307 for i in range(24)]  # daemon/verify/self_test.c
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def router_input(model, stream, at):
    """What the gate of a layer reads, [rows, hidden]."""
    name, positions = f"model.layers.{at}.", np.arange(len(TEXT))
    visible = np.tri(len(TEXT), dtype=bool)
    x = stream + model.attention(model.norm(stream, name + "input_layernorm"), at, positions, visible)
    return model.norm(x, name + "post_attention_layernorm")


def bring_together(model, at, row):
    """The bias of the best expert that a row does not have becomes what makes it equal to the last one that it has."""
    logits = model.linear(router_input(model, model.streams(TEXT)[at], at), f"model.layers.{at}.mlp.gate")[row]
    bias = model.weights[BIAS.format(at)] = model.weights[BIAS.format(at)].copy()
    ranked = 1.0 / (1.0 + np.exp(-logits)) + bias
    chosen, _ = model.choice(logits, at)
    groups = {int(expert) // (len(ranked) // model.config["n_group"]) for expert in chosen}
    kept = [e for e in range(len(ranked)) if e // (len(ranked) // model.config["n_group"]) in groups]
    left = max((e for e in kept if e not in chosen), key=lambda e: ranked[e])
    bias[left] += ranked[chosen[-1]] - ranked[left]


def write(folder, rows):
    """A copy of the model in one f32 file, undecided for one row of each expert layer."""
    model = mla.Model(SOURCE)
    for at, row in rows.items():
        bring_together(model, at, row)
    shutil.copy(os.path.join(SOURCE, "config.json"), folder)
    arrays = {name: np.ascontiguousarray(values, "<f4") for name, values in model.weights.items()}
    tensors.save(os.path.join(folder, "model.safetensors"), arrays)


class UndecidedTest(unittest.TestCase):
    def test_either_choice_is_the_model(self):
        for row in range(2, 23, 3):
            with self.subTest(row=row), tempfile.TemporaryDirectory() as folder:
                write(folder, {1: row, 2: row + 1})
                with Daemon(os.environ["TREEVERIFYD"], folder, "--threads", "1") as daemon:
                    client = daemon.client()
                    report = client.post("/v1/parity", {})
                    self.assertTrue(report["ok"], report)
                    noise = client.get("/v1/model")["noise"]
                    self.assertLess(noise, 1e-4, "two choices are no noise")
                    client.close()

    def test_a_wrong_router_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            write(folder, {1: 5, 2: 6})
            command = [os.environ["TREEVERIFYD_PLANTED"], "--model", folder, "--listen", "127.0.0.1:0", "--threads", "1"]
            ended = subprocess.run(
                command, env=dict(os.environ, TV_PLANT="router"), capture_output=True, text=True, timeout=300, check=False
            )
            self.assertEqual(ended.returncode, EXIT_FAULT, ended.stderr)
            self.assertIn("self-test: logits against the path oracle", ended.stderr)


if __name__ == "__main__":
    unittest.main()
