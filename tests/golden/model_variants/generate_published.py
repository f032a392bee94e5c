#!/usr/bin/env python3
"""Write small random MLA checkpoints with the logits of the code that DeepSeek publishes.

For the fields that the transformers library's classes do not read. Needs torch, transformers 4.38.2,
einops and a checkout of the DeepSeek-VL2 repository, whose language model is "compatible with both
DeepSeekV2 and DeepSeekV3" (versions in README.md). Usage: generate_published.py DIRECTORY CHECKOUT
"""
import importlib
import json
import os
import sys
import types

import torch
from safetensors.torch import save_file

BASE = dict(
    vocab_size=67, hidden_size=8, intermediate_size=24, moe_intermediate_size=16,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512,
    q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=4, v_head_dim=4,
    max_position_embeddings=4096, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    topk_method="greedy", first_k_dense_replace=1, bos_token_id=0, eos_token_id=1,
    attn_implementation="eager",
)
SIGMOID = dict(scoring_func="sigmoid", topk_method="noaux_tc", n_group=2, topk_group=1,
               norm_topk_prob=True, routed_scaling_factor=1.5)
ONE_HEAD = dict(num_attention_heads=1, num_key_value_heads=1)
THREE_HEADS = dict(num_attention_heads=3, num_key_value_heads=3)

# name: (version written to config.json, config)
VARIANTS = {
    "v2-freq-two-top-one": (2, dict(ONE_HEAD, num_hidden_layers=4, moe_layer_freq=2,
                                    num_experts_per_tok=1, routed_scaling_factor=3.0)),
    "v2-norm-on-three-heads": (2, dict(THREE_HEADS, norm_topk_prob=True, num_experts_per_tok=3)),
    "v2-no-experts": (2, dict(ONE_HEAD, n_routed_experts=None)),
    "v3-freq-two-no-shared": (3, dict(SIGMOID, num_hidden_layers=3, moe_layer_freq=2,
                                      first_k_dense_replace=0, n_shared_experts=None)),
}
POSITIONS = list(range(0, 48, 2))


def published(checkout):
    """The two modules, without the package's own imports of the vision model."""
    package = types.ModuleType("published")
    package.__path__ = [os.path.join(checkout, "deepseek_vl2", "models")]
    sys.modules["published"] = package
    return importlib.import_module("published.modeling_deepseek")


def build(code, fields, seed):
    torch.manual_seed(seed)
    model = code.DeepseekV2ForCausalLM(code.DeepseekV2Config(**{**BASE, **fields})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(1.0 + 0.1 * torch.randn_like(tensor))
            elif "e_score_correction_bias" in name:
                # Above 0: this code bars groups with 0, the transformers library with -inf.
                tensor.copy_(torch.rand_like(tensor) * 0.6 + 0.2)
            elif "embed_tokens" in name:
                tensor.copy_(torch.randn_like(tensor))
            else:
                tensor.copy_(torch.randn_like(tensor) * tensor.shape[-1] ** -0.5)
    return model.to(torch.bfloat16)


def config_finish(folder, version):
    """The published V3 checkpoints differ from this code's own file by the names only."""
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        config = json.load(f)
    config["architectures"] = [f"DeepseekV{version}ForCausalLM"]
    config["model_type"] = f"deepseek_v{version}"
    with open(path, "w") as f:
        json.dump({key: config[key] for key in sorted(config)}, f, indent=2)
        f.write("\n")


def main():
    out, checkout = sys.argv[1:]
    code = published(checkout)
    for seed, (name, (version, fields)) in enumerate(VARIANTS.items()):
        folder = os.path.join(out, name)
        build(code, fields, 200 + seed).save_pretrained(folder)
        # Logits come from what was stored, in float32 arithmetic on the rounded weights.
        model = code.DeepseekV2ForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(300 + seed)
        tokens = torch.randint(0, BASE["vocab_size"], (1, POSITIONS[-1] + 1), generator=generator)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, POSITIONS].contiguous()
        save_file({"tokens": tokens[0].contiguous(),
                   "positions": torch.tensor(POSITIONS, dtype=torch.int32),
                   "logits": logits.float()}, os.path.join(folder, "refs.safetensors"))
        os.remove(os.path.join(folder, "generation_config.json"))
        config_finish(folder, version)
        print(name, float(logits.std()))


if __name__ == "__main__":
    main()
