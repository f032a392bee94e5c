#!/usr/bin/env python3
"""What rounds cost at real sizes, through HTTP: nodes x contexts, prefill and decode rates, time outside of kernels.

The daemon runs with random weights in the shape of a configuration (tests/bench/configs) and random KV rows in place of
a prompt's, but for its last 512. A round's `gpu` is the time of its pass and draws, `outside` the server's beyond it,
from the request's last byte to the answer. The floor is what must be read at least once: the weights that a round of so
many rows touches (experts: as many as that many rows choose on average) and its KV rows, over --bandwidth. `hint` is
what the daemon itself says of a round of this size (hint.verify_us): it must be within 10 % of the measured one.
Prints one row per context and number of nodes, writes them to --json; ends early, between contexts, when --seconds are
over. Exit 1 when a hint is off, or nothing was measured.

usage: bench_daemon.py TREEVERIFYD CONFIG_FOLDER [--backend cpu|cuda] [--contexts 1024,8192,32768,131072,185000]
                       [--nodes 1,2,4,8,16,32,64,128] [--rounds 20] [--bandwidth 4.3] [--seconds 120] [--json FILE]
                       [--options "MORE OPTIONS OF THE DAEMON"]
"""

import argparse
import base64
import json
import os
import random
import shlex
import statistics
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Session
from figures import numbers, share

GREEDY = {"rule": "greedy", "temperature": 0}
HINT_OFF = 0.1


def layer_values(c, rows):
    """Weight values that `rows` rows touch: of one attention, of a dense layer, of an experts' layer."""
    heads, hidden, latent = c["num_attention_heads"], c["hidden_size"], c["kv_lora_rank"]
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    low = c.get("q_lora_rank") or 0
    attention = (hidden * low + low * query if low else hidden * query) + hidden * (latent + c["qk_rope_head_dim"])
    attention += heads * latent * (c["qk_nope_head_dim"] + c["v_head_dim"]) + hidden * heads * c["v_head_dim"]
    experts, each = c["n_routed_experts"], 3 * hidden * c["moe_intermediate_size"]
    touched = experts * (1 - (1 - c["num_experts_per_tok"] / experts) ** rows)
    routed = experts * hidden + (touched + (c.get("n_shared_experts") or 0)) * each
    return attention, 3 * hidden * c["intermediate_size"], routed


def floor_us(c, rows, context, kv_bytes, bandwidth):
    attention, dense, routed = layer_values(c, rows)
    first = c["first_k_dense_replace"]
    values = c["num_hidden_layers"] * attention + first * dense + (c["num_hidden_layers"] - first) * routed
    values += c["vocab_size"] * c["hidden_size"]
    row = c["kv_lora_rank"] + c["qk_rope_head_dim"]
    return (2 * values + c["num_hidden_layers"] * context * row * kv_bytes) / (bandwidth * 1e6)


class Filled(Session):
    """A session whose prompt is sent as base64."""

    def __init__(self, client, tokens):
        self.client = client
        text = base64.b64encode(struct.pack(f"<{len(tokens)}i", *tokens)).decode()
        self.state = client.post("/v1/sessions", {"tokens_b64": text, "sampling": GREEDY, "lease_s": 3600})
        self.id, self.epoch, self.text = self.state["session"], self.state["epoch"], [self.state["pending"]]


def rounds(session, rng, nodes, count, vocab):
    """us of the engine, outside of it and, of these, in the queue, of each round; what the daemon says of such rounds."""
    inside, outside, queue = [], [], []
    for _ in range(count + 3):
        first = rng.randrange(vocab - nodes)
        drafts = [first + i for i in range(nodes - 1)]
        parents = [rng.randrange(i + 1) if i < 60 else rng.randrange(60) for i in range(nodes - 1)]
        answer = session.verify(drafts, parents)
        timing = answer["timing_us"]
        inside.append(timing["gpu"])
        outside.append(timing["total"] - timing["gpu"])
        queue.append(timing["queue"])
    size = 1 << (nodes - 1).bit_length()
    return inside[3:], outside[3:], queue[3:], dict(answer["hint"]["verify_us"])[size]


def prefill_rate(session, rng, count, vocab):
    """One slice behind what is there already."""
    answer = session.extend([rng.randrange(vocab) for _ in range(count)])
    return count / answer["timing_us"]["gpu"] * 1e6


def context_run(client, args, config, context, vocab, kv_bytes, report):
    rng = random.Random(context)
    slice_rows = min(args.slice, context // 2)
    session = Filled(client, [rng.randrange(vocab) for _ in range(context - slice_rows)])
    rate = prefill_rate(session, rng, slice_rows, vocab)
    print(f"context {context}: prefill of {slice_rows} behind it {rate:.0f} tokens/s", flush=True)
    row = {"context": context, "prefill_tokens_s": rate, "verify": {}}
    for nodes in args.nodes:
        inside, outside, queue, hint = rounds(session, rng, nodes, args.rounds, vocab)
        us, floor = statistics.median(inside), floor_us(config, nodes, context, kv_bytes, args.bandwidth)
        off = abs(hint - us) / us
        cell = {"gpu_us": us, "floor_us": floor, "hint_us": hint,
                "outside_p50_us": statistics.median(outside), "outside_p99_us": share(outside, 0.99),
                "queue_p50_us": statistics.median(queue)}
        row["verify"][nodes] = cell
        print(f"  {nodes:4} nodes: {us:9.0f} us, {us / floor:5.2f} x the floor of {floor:.0f} us; outside p50 "
              f"{cell['outside_p50_us']:.0f} p99 {cell['outside_p99_us']:.0f} us (queue {cell['queue_p50_us']:.0f}); "
              f"hint {hint} us{', OFF' if off > HINT_OFF else ''}", flush=True)
    began = time.perf_counter()
    session.decode(32)
    row["decode_tokens_s"] = 32 / (time.perf_counter() - began)
    print(f"  decode {row['decode_tokens_s']:.1f} tokens/s", flush=True)
    session.close()
    report.append(row)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("config")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--contexts", type=numbers, default=[1024, 8192, 32768, 131072, 185000])
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that a copy reaches, read and written")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--slice", type=int, default=512, help="rows whose prefill is measured")
    parser.add_argument("--options", type=shlex.split, default=[], help="more of the daemon's")
    parser.add_argument("--json")
    args = parser.parse_args()
    with open(os.path.join(args.config, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    deadline = time.monotonic() + args.seconds
    longest = max(args.contexts) + 4096
    options = ["--backend", args.backend, "--synthetic-weights", "1", "--synthetic-kv", "on", "--max-len", str(longest),
               "--prefix-cache", "off", *args.options]
    report = []
    began = time.monotonic()
    with Daemon(args.program, args.config, *options, env={"TREEVERIFY_POISON": "off"}) as daemon:
        print(f"start {time.monotonic() - began:.1f} s")
        client = daemon.client()
        model = client.get("/v1/model")
        print(f"{model['name']} on {model['device']}, {model['kv_dtype']} rows, {model['pages']['total']} pages")
        for context in args.contexts:
            if time.monotonic() > deadline:
                print(f"context {context}: no time left")
                continue
            context_run(client, args, config, context, model["vocab"], 2 if model["kv_dtype"] == "bf16" else 4, report)
        after = client.get("/v1/model")
        print(f"measured by the daemon: {after['verify_us']}; device allocations {after['device_allocations']}")
        client.close()
        print("\n".join(line for line in daemon.text().splitlines() if "device" in line))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"model": model["name"], "device": model["device"], "rows": report}, file, indent=1)
    wrong = [(row["context"], nodes) for row in report for nodes, cell in row["verify"].items()
             if abs(cell["hint_us"] - cell["gpu_us"]) > HINT_OFF * cell["gpu_us"]]
    if wrong:
        print(f"hint.verify_us is more than 10 % off at (context, nodes): {wrong}")
    return 0 if report and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
