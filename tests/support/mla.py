"""A causal forward pass of the bundled checkpoints in numpy, float64: what the residual stream is in front of each layer.

Written from the models' definition, for reading: one head at a time, nothing cached, no absorbed form. It shares no
code with the daemon; whoever uses it first holds its logits to those of the transformers library (refs.safetensors).
Refuses what the bundles do not have.
"""

import glob
import json
import math
import os

import numpy as np
import tensors


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1.0 + np.exp(-x))


def mscale_of(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1.0


class Model:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            self.config = json.load(file)
        self.weights = {}
        for path in glob.glob(os.path.join(folder, "model*.safetensors")):
            self.weights.update(tensors.load(path))
        self.layers = self.config["num_hidden_layers"]
        scaling = self.config["rope_scaling"]
        if scaling is not None and scaling["mscale"] != scaling["mscale_all_dim"]:
            raise ValueError("cos and sin have a factor of their own")

    def weight(self, name):
        return self.weights[name + ".weight"].astype(np.float64)

    def linear(self, x, name):
        return x @ self.weight(name).T

    def norm(self, x, name, eps=None):
        return rms(x, self.weight(name), self.config["rms_norm_eps"] if eps is None else eps)

    def frequencies(self):
        config, scaling = self.config, self.config["rope_scaling"]
        dim, base = config["qk_rope_head_dim"], config["rope_theta"]
        plain = base ** (-np.arange(0, dim, 2) / dim)
        if scaling is None:
            return plain

        def correction(rotations):
            length = scaling["original_max_position_embeddings"]
            return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(correction(scaling["beta_fast"])), 0)
        high = min(math.ceil(correction(scaling["beta_slow"])), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return plain / scaling["factor"] * ramp + plain * (1 - ramp)

    def rope(self, x, positions):
        """Pairs of neighbours are rotated; x [..., dim] with positions along its first axis."""
        angle = positions[:, None] * self.frequencies()
        angle = angle.reshape(len(positions), *(1,) * (x.ndim - 2), -1)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = [even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)]
        return np.stack(turned, axis=-1).reshape(x.shape)

    def attention(self, x, at, positions, visible):
        config, name = self.config, f"model.layers.{at}.self_attn."
        heads, nope, rope_dim = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        if config["q_lora_rank"]:
            q = self.linear(self.norm(self.linear(x, name + "q_a_proj"), name + "q_a_layernorm", 1e-6), name + "q_b_proj")
        else:
            q = self.linear(x, name + "q_proj")
        q = q.reshape(len(x), heads, nope + rope_dim)
        latent = self.linear(x, name + "kv_a_proj_with_mqa")
        latent, key_rope = np.split(latent, [config["kv_lora_rank"]], axis=1)
        up = self.linear(self.norm(latent, name + "kv_a_layernorm", 1e-6), name + "kv_b_proj")
        key, value = np.split(up.reshape(len(x), heads, -1), [nope], axis=2)
        q_rope, key_rope = self.rope(q[..., nope:], positions), self.rope(key_rope, positions)
        scale = (nope + rope_dim) ** -0.5
        if config["rope_scaling"] is not None:
            scale *= mscale_of(config["rope_scaling"]["factor"], config["rope_scaling"]["mscale_all_dim"]) ** 2
        out = []
        for head in range(heads):
            scores = (q[:, head, :nope] @ key[:, head].T + q_rope[:, head] @ key_rope.T) * scale
            scores = np.where(visible, scores, -np.inf)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out.append(scores / scores.sum(axis=1, keepdims=True) @ value[:, head])
        return self.linear(np.concatenate(out, axis=1), name + "o_proj")

    def mlp(self, x, name):
        return self.linear(silu(self.linear(x, name + "gate_proj")) * self.linear(x, name + "up_proj"), name + "down_proj")

    def choice(self, logits, at, nudge=0.0):
        """The experts of one row and their weights. nudge [experts] is added to what they are ranked by."""
        config, top = self.config, self.config["num_experts_per_tok"]
        if config["model_type"] == "deepseek_v2":
            scores = np.exp(logits - logits.max())
            scores = scores / scores.sum()
            ranked = scores + nudge
        else:
            scores = 1.0 / (1.0 + np.exp(-logits))
            ranked = scores + self.weights[f"model.layers.{at}.mlp.gate.e_score_correction_bias"] + nudge
            groups = ranked.reshape(config["n_group"], -1)
            best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
            kept = np.argsort(-best, kind="stable")[: config["topk_group"]]
            ranked = np.where(np.isin(np.arange(len(groups)), kept)[:, None], groups, -np.inf).reshape(-1)
        chosen = np.argsort(-ranked, kind="stable")[:top]
        weights = scores[chosen]
        if config["norm_topk_prob"]:
            weights = weights / (weights.sum() + 1e-20)
        return chosen, weights * config["routed_scaling_factor"]

    def feed_forward(self, x, at):
        name = f"model.layers.{at}.mlp."
        if at < self.config["first_k_dense_replace"]:
            return self.mlp(x, name)
        out = self.mlp(x, name + "shared_experts.")
        for row, logits in enumerate(self.linear(x, name + "gate")):
            for expert, weight in zip(*self.choice(logits, at)):
                out[row] += weight * self.mlp(x[row : row + 1], f"{name}experts.{expert}.")[0]
        return out

    def streams(self, tokens, positions=None, visible=None):
        """[layers + 1, rows, hidden]: the residual stream in front of each layer, and behind the last one. By default
        a causal sequence; else each row's position and which rows it sees."""
        count = len(tokens)
        positions = np.arange(count) if positions is None else np.asarray(positions)
        visible = np.tri(count, dtype=bool) if visible is None else visible
        x = self.weight("model.embed_tokens")[np.asarray(tokens)]
        streams = [x]
        for at in range(self.layers):
            name = f"model.layers.{at}."
            x = x + self.attention(self.norm(x, name + "input_layernorm"), at, positions, visible)
            x = x + self.feed_forward(self.norm(x, name + "post_attention_layernorm"), at)
            streams.append(x)
        return np.stack(streams)

    def logits(self, last):
        return self.linear(self.norm(last, "model.norm"), "lm_head")
