"""HfDrafter on a small model with random weights: what it keeps of the text changes nothing. Skipped where torch and
transformers are missing: Debian has neither."""

import numpy as np
import pytest

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    pytest.skip("torch and transformers are not installed", allow_module_level=True)

from harness import GREEDY, DaemonTest, prompts

from treeverify.drafters import CausalDrafter
from treeverify.drafters.hf import HfDrafter

torch.set_num_threads(1)


def model():
    torch.manual_seed(20261130)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, initializer_range=0.4,
    )
    return LlamaForCausalLM(config)


class HfTest(DaemonTest):
    def test_kept_keys_change_nothing(self):
        made, text = model(), prompts(1)[0]
        drafter = HfDrafter(made, vocab=260)
        self.assertEqual(drafter.window, 512)
        for context in (text[:40], text[:55], text[5:30], []):  # longer, another, none
            paths = [text[60:65], text[60:62], [7]]
            rows = drafter._last_rows(context, paths)
            self.assertEqual(rows.shape, (3, 260))
            for row, path in zip(rows, paths):
                np.testing.assert_allclose(row, drafter._logits(np.array([context + path]))[0, -1], atol=1e-4)

    def test_the_tree_is_that_of_a_causal_drafter(self):
        made, text = model(), prompts(1)[0]
        drafter, slow = HfDrafter(made, window=64), CausalDrafter(HfDrafter(made)._logits, window=64)
        for end in (20, 21, 24, 60):
            kept, plain = drafter.draft(text[:end], 8, 4), slow.draft(text[:end], 8, 4)
            self.assertEqual(kept, plain)
        for end in range(60, 110, 7):  # the window slides: another context, still a tree
            tree = drafter.draft(text[:end], 8, 4)
            self.assertEqual((int(tree.tokens[0]), len(tree)), (text[end - 1], 9))
            self.assertLessEqual(len(drafter._known), 63)

    def test_against_the_daemon(self):
        prompt = prompts(1)[0]
        with self.client.session(prompt, sampling=GREEDY) as session:
            for _ in session.generate(HfDrafter(model(), vocab=260), 11, nodes=4, depth=3):
                pass
            self.assertEqual(session.new_tokens[:12], self.plain(prompt, 12))
