#!/usr/bin/env python3
"""What shadow mode costs the rate of rounds that come one right behind the other.

usage: shadow_rate.py TREEVERIFYD CONFIG_FOLDER|CHECKPOINT [--backend cpu|cuda] [--context 4096] [--nodes 16] [--rounds 600]
                      [--sample 0.02] [--window 40] [--options "MORE OPTIONS"] [--strict] [--json FILE]

Two daemons of one kind differ by more than the effect, so the figure is of one process: which of its rounds are captured
is a function of their number that is known here too. What a captured round costs is the time of it and of the --window
rounds behind it (its judgement is over by then; that is looked at) beyond as many undisturbed ones; a hundredth of that,
over the time of an undisturbed round, is the cost of --shadow sample:0.01. Also printed: the captured round itself, the
longest round, how long a judgement took, what was judged and found. --strict: exit 1 when it is more than 2 %, a round was
skipped or judged wrong.
"""

import argparse
import glob
import json
import os
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from bench_served import Line
from daemon import Daemon
from figures import share
from shadow_cost import is_sampled


def lag(client):
    """Seconds since the oldest round that waits or is judged came."""
    lines = client.raw("GET", "/metrics")[2].decode().splitlines()
    return float(next(line for line in lines if line.startswith("treeverify_parity_lag_seconds")).split()[1])


def play(line, nodes, count):
    took = []
    for _ in range(count):
        began = time.perf_counter()
        line.verify(nodes)
        line.follow(line.wait())
        took.append(1e3 * (time.perf_counter() - began))
    return took


def judge_ms(client, line, nodes, rounds, sample):
    """How long a judgement takes with nothing beside it: rounds until one is captured, then none."""
    while not is_sampled(rounds, sample):
        play(line, nodes, 1)
        rounds += 1
    began = time.perf_counter()
    play(line, nodes, 1)
    while lag(client) > 0:
        pass
    return 1e3 * (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("config")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--sample", type=float, default=0.02)
    parser.add_argument("--window", type=int, default=40)
    parser.add_argument("--options", default="")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    options = ["--backend", args.backend, "--prefix-cache", "off", "--shadow", f"sample:{args.sample}", *args.options.split()]
    if not glob.glob(os.path.join(args.config, "*.safetensors")):
        options += ["--synthetic-weights", "1", "--synthetic-kv", "on", "--max-len", str(args.context + args.rounds + 4096)]
    with tempfile.TemporaryDirectory() as folder:
        with Daemon(args.program, args.config, *options, "--state-dir", folder, env={"TREEVERIFY_POISON": "off"}) as daemon:
            client = daemon.client()
            vocab = client.get("/v1/model")["vocab"]
            line = Line(daemon, vocab, args.context, 1)
            took = play(line, args.nodes, args.rounds)
            ended = lag(client)
            alone_ms = judge_ms(client, line, args.nodes, args.rounds, args.sample)
            parity = client.get("/v1/parity")
            client.close()
            line.close()
    captured = [i for i in range(10, args.rounds) if is_sampled(i, args.sample)]
    near = {i + k for i in captured for k in range(args.window + 1)} | set(range(10))
    plain = [ms for i, ms in enumerate(took) if i not in near]
    whole = [i for i in captured if i + args.window < args.rounds]
    if not plain or not whole:
        raise SystemExit("too few rounds for this sample and window")
    base = statistics.mean(plain)
    beyond = sum(took[i] - base for i in near if i >= 10 and i < args.rounds) / len(captured)
    report = {"plain_ms": base, "plain_rounds": len(plain), "captured": len(captured),
              "captured_ms": statistics.mean(took[i] for i in captured), "beyond_ms": beyond,
              "cost_at_1_percent": 0.01 * beyond / base, "longest_ms": max(took[10:]), "p99_ms": share(took[10:], 0.99),
              "judge_alone_ms": alone_ms, "lag_at_end_s": ended, "parity": parity}
    print(f"{args.nodes} nodes at {args.context}: {base:.3f} ms a round undisturbed ({len(plain)} rounds, p99 "
          f"{share(plain, 0.99):.3f}); captured {report['captured_ms']:.3f}; with the {args.window} behind it {beyond:+.2f} ms "
          f"beyond; longest {report['longest_ms']:.2f} ms; a judgement with nothing beside it {alone_ms:.0f} ms")
    print(f"at 1 % sampling: {report['cost_at_1_percent']:+.2%} ({len(captured)} captured of {args.rounds}); "
          f"{parity['rounds']}, worst {parity['kernel']}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    wrong = parity["rounds"]["violation"] + parity["rounds"]["skipped"]
    return 1 if args.strict and (wrong or report["cost_at_1_percent"] > 0.02) else 0


if __name__ == "__main__":
    sys.exit(main())
