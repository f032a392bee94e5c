"""Random trees behind random texts, each judged by the path oracle and the kernel oracle of its daemon (R09).

Every bundled checkpoint with f32 and with bf16 rows is two daemons, all at once: an oracle has one thread. A tree is a
chain, a star, a random tree or a deep one of 1 to 48 nodes behind 1 to 160 tokens, in which a few tokens come again and
again.

usage: trees.py TREEVERIFYD MODELS_DIR [--backend cpu|cuda] [--count N] [--seed N]
"""

import argparse
import math
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon

MODELS = {"v3": 1, "v2lite": 1, "moonlight": 1, "kjv-mla-8m": 40}  # the oracle's time for a tree, in v3's
NODES, PREFIX = 48, 160
RULES = (
    {"rule": "greedy"},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
)


def parents_of(rng, count):
    shape = rng.randrange(4)
    if shape == 0:
        return list(range(-1, count - 1))
    if shape == 1:
        return [-1] + [0] * (count - 1)
    return [-1] + [rng.randrange(0 if shape == 2 else max(0, i - 6), i) for i in range(1, count)]


def case(rng, vocab):
    count, some = rng.randint(1, NODES), [rng.randrange(vocab) for _ in range(6)]
    parents, tokens, taken = parents_of(rng, count), [], set()
    for parent in parents:
        token = rng.choice(some) if rng.random() < 0.3 else rng.randrange(vocab)
        while (parent, token) in taken:
            token = rng.randrange(vocab)
        taken.add((parent, token))
        tokens.append(token)
    sampling = dict(rng.choice(RULES))
    if "rule" not in sampling:
        sampling["seed"] = str(rng.getrandbits(64))
    prefix = [rng.randrange(vocab) for _ in range(rng.randint(1, PREFIX))]
    return {"tokens": prefix, "tree": {"tokens": tokens, "parents": parents}, "sampling": sampling}


def judge(args, model, kv_dtype, part, count):
    """(judged, nodes, near ties, failures) of one daemon."""
    rng = random.Random(f"{args.seed} {model} {kv_dtype} {part}")
    nodes = ties = 0
    failures = []
    options = ["--backend", args.backend, "--kv-dtype", kv_dtype, "--page-size", str(rng.choice((16, 32, 64, 128)))]
    with Daemon(args.program, os.path.join(args.models, model), *options) as daemon:
        client = daemon.client()
        vocab = client.get("/v1/model")["vocab"]
        for i in range(count):
            body = case(rng, vocab)
            report = client.post("/v1/parity", body)
            nodes += len(body["tree"]["tokens"])
            ties += report["path"]["near_ties"]
            if not report["ok"]:
                failures.append(f"{model} {kv_dtype} {options[-1]} case {i}: {report}")
        client.close()
    return count, nodes, ties, failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("models")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--count", type=int, default=80, help="trees in all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    each = args.count / sum(4 / cost for cost in MODELS.values())
    rigs = [
        (model, kv_dtype, part, math.ceil(each / cost))
        for model, cost in MODELS.items() for kv_dtype in ("f32", "bf16") for part in range(2)
    ]
    with ThreadPoolExecutor(len(rigs)) as pool:
        results = list(pool.map(lambda rig: judge(args, *rig), rigs))
    failures = [line for result in results for line in result[3]]
    for line in failures:
        print(f"FAIL  {line[:400]}")
    judged, nodes, ties = (sum(result[i] for result in results) for i in range(3))
    print(f"seed {args.seed}: {judged} trees of {nodes} nodes judged, {ties} near ties, {len(failures)} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
