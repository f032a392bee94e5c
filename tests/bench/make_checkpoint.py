#!/usr/bin/env python3
"""Write a checkpoint with random weights in the shape of a published configuration, for measuring
real sizes without a download. Its text means nothing.

usage: make_checkpoint.py CONFIG FOLDER [--layers N] [--seed N]

Weights are slices of one block of normal numbers at random places, scaled by the width of their input: as
good as new numbers for timing, and written as fast as a disk takes them. --layers keeps the first N.
"""

import argparse
import json
import os

import numpy as np

BLOCK = 1 << 26  # values


def shapes(config):
    """Yields (name, shape) of every tensor of the DeepSeek-V3 family."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value, q_lora = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        if q_lora:
            yield f"{at}.self_attn.q_a_proj.weight", (q_lora, hidden)
            yield f"{at}.self_attn.q_a_layernorm.weight", (q_lora,)
            yield f"{at}.self_attn.q_b_proj.weight", (heads * (nope + rope), q_lora)
        else:
            yield f"{at}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
        yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
        yield f"{at}.self_attn.kv_a_layernorm.weight", (latent,)
        yield f"{at}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
        yield f"{at}.self_attn.o_proj.weight", (hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", config["intermediate_size"], hidden)
            continue
        experts, inter = config["n_routed_experts"], config["moe_intermediate_size"]
        yield f"{at}.mlp.gate.weight", (experts, hidden)
        if config["topk_method"] == "noaux_tc":
            yield f"{at}.mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from mlp(f"{at}.mlp.experts.{expert}", inter, hidden)
        if config["n_shared_experts"]:
            yield from mlp(f"{at}.mlp.shared_experts", inter * config["n_shared_experts"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def mlp(at, inter, hidden):
    yield f"{at}.gate_proj.weight", (inter, hidden)
    yield f"{at}.up_proj.weight", (inter, hidden)
    yield f"{at}.down_proj.weight", (hidden, inter)


def bf16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with open(args.config, encoding="utf-8") as file:
        config = json.load(file)
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    random = np.random.default_rng(args.seed)
    normal = random.standard_normal(BLOCK, dtype=np.float32)
    scaled = {}  # per width: the block as bf16
    header, end = {}, 0
    for name, shape in shapes(config):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(args.folder, exist_ok=True)
    with open(os.path.join(args.folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
    with open(os.path.join(args.folder, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shapes(config):
            if len(shape) == 1:
                file.write(bf16(1.0 + 0.1 * random.standard_normal(shape[0])).tobytes())
                continue
            if shape[1] not in scaled:
                scaled[shape[1]] = bf16(normal * shape[1] ** -0.5)
            left = int(np.prod(shape))
            while left > 0:
                start = int(random.integers(0, BLOCK // 2))
                count = min(left, BLOCK - start)
                file.write(scaled[shape[1]][start : start + count].tobytes())
                left -= count


if __name__ == "__main__":
    main()
