#!/usr/bin/env python3
"""Write small random MLA checkpoints with the transformers library's own logits.

Each folder exercises one thing that the bundled checkpoints do not. Needs torch and transformers
(versions in README.md); the tests read only what this wrote. Usage: generate.py DIRECTORY
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

BASE = dict(
    vocab_size=67, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=4096,
    first_k_dense_replace=1, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1,
    attn_implementation="eager",
)
V3 = dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
          norm_topk_prob=True, routed_scaling_factor=1.5, q_lora_rank=None)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=32.0, beta_fast=32, beta_slow=1,
            original_max_position_embeddings=128)
PLAIN = dict(rope_type="default", rope_theta=10000.0)
# As few bytes as the fixed sizes of the latent allow.
SMALL = dict(hidden_size=8, intermediate_size=24, moe_intermediate_size=16, qk_nope_head_dim=4,
             v_head_dim=4, rope_parameters=PLAIN)
LONG = [0, 1, 2, 127, 128, 129, 1000, 2500, 3999, 4000]

# name: (version, config, positions, dtype, scale of the embedding)
VARIANTS = {
    "v2-group-limited": (2, dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=3,
                                 topk_method="group_limited_greedy", n_group=4, topk_group=2,
                                 routed_scaling_factor=16.0, q_lora_rank=24,
                                 rope_parameters=PLAIN), range(48), torch.bfloat16, 1.0),
    "v2-mscale-differs": (2, dict(n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
                                  topk_method="greedy", n_group=1, topk_group=1,
                                  routed_scaling_factor=1.0, q_lora_rank=None,
                                  rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.707)),
                          LONG, torch.bfloat16, 1.0),
    "v3-mscale-absent": (3, dict(V3, rope_parameters=YARN), LONG, torch.bfloat16, 1.0),
    "v3-mscale-all-zero": (3, dict(V3, rope_parameters=dict(YARN, mscale=0.707,
                                                            mscale_all_dim=0.0)),
                           LONG, torch.bfloat16, 1.0),
    "v3-eps-small-hidden": (3, dict(V3, q_lora_rank=24, rms_norm_eps=1e-5, rope_parameters=PLAIN),
                            range(48), torch.bfloat16, 1e-3),
    "v3-rope-halves": (3, dict(V3, rope_interleave=False, q_lora_rank=24, rope_parameters=PLAIN),
                       range(48), torch.bfloat16, 1.0),
    "v3-nope48-v64-tied": (3, dict(V3, qk_nope_head_dim=48, v_head_dim=64,
                                   tie_word_embeddings=True, rope_parameters=PLAIN),
                           range(48), torch.float16, 1.0),
    "v3-norm-off-five-heads": (3, dict({**V3, **SMALL}, norm_topk_prob=False,
                                       routed_scaling_factor=2.5, num_attention_heads=5,
                                       num_key_value_heads=5),
                               range(0, 48, 2), torch.bfloat16, 1.0),
    "v3-all-dense-one-head": (3, dict({**V3, **SMALL}, first_k_dense_replace=2,
                                      num_attention_heads=1, num_key_value_heads=1),
                              range(0, 48, 2), torch.bfloat16, 1.0),
    "v2-all-moe-no-shared": (2, dict(SMALL, first_k_dense_replace=0, n_routed_experts=4,
                                     n_shared_experts=0, num_experts_per_tok=2,
                                     topk_method="greedy", routed_scaling_factor=4.0,
                                     q_lora_rank=None),
                             range(0, 48, 2), torch.bfloat16, 1.0),
}


def build(version, fields, dtype, embed_scale, seed):
    torch.manual_seed(seed)
    config_class = DeepseekV2Config if version == 2 else DeepseekV3Config
    model_class = DeepseekV2ForCausalLM if version == 2 else DeepseekV3ForCausalLM
    model = model_class(config_class(**{**BASE, **fields})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_(1.0 + 0.1 * torch.randn_like(tensor))
            else:
                tensor.copy_(torch.randn_like(tensor) * max(tensor.shape[-1], 1) ** -0.5)
            if "embed_tokens" in name:
                tensor.copy_(torch.randn_like(tensor) * embed_scale)
        for name, tensor in model.named_buffers():
            if "e_score_correction_bias" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.3 - 1.0)
    return model.to(dtype)


def main():
    out = sys.argv[1]
    for seed, (name, (version, fields, positions, dtype, scale)) in enumerate(VARIANTS.items()):
        folder = os.path.join(out, name)
        model = build(version, fields, dtype, scale, seed)
        model.save_pretrained(folder)
        # Logits come from what was stored, in float32 arithmetic on the rounded weights.
        model = type(model).from_pretrained(folder, dtype=torch.float32,
                                            attn_implementation="eager").eval()
        positions = list(positions)
        generator = torch.Generator().manual_seed(100 + seed)
        tokens = torch.randint(0, BASE["vocab_size"], (1, positions[-1] + 1), generator=generator)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, positions].contiguous()
        save_file({"tokens": tokens[0].contiguous(),
                   "positions": torch.tensor(positions, dtype=torch.int32),
                   "logits": logits.float()}, os.path.join(folder, "refs.safetensors"))
        os.remove(os.path.join(folder, "generation_config.json"))
        with open(os.path.join(folder, "config.json")) as f:
            print(name, json.load(f)["transformers_version"], float(logits.std()))


if __name__ == "__main__":
    main()
