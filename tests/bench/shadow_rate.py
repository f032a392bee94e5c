#!/usr/bin/env python3
"""What shadow mode costs the rate of rounds that come one right behind the other, at real sizes.

One daemon a mode, all of the same synthetic weights and at once; blocks of rounds go to them in turn, so that what
drifts drifts for all. Answers are read and not checked: what the client does would hide what the oracle costs.
Printed: ms a round of each mode (median over blocks), its cost against `off`, and what was judged.

usage: shadow_rate.py TREEVERIFYD CONFIG_FOLDER [--backend cpu|cuda] [--context 4096] [--nodes 16] [--rounds 100]
                      [--blocks 6] [--modes off,sample:0.01,sample:0.1] [--pages 2048] [--json FILE]
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from bench_daemon import Filled
from daemon import Daemon


class Side:
    """One daemon, its session, and ms a round of each block."""

    def __init__(self, args, mode, folder):
        self.mode, self.blocks, self.rng = mode, [], random.Random(1)
        options = ["--backend", args.backend, "--synthetic-weights", "1", "--synthetic-kv", "on", "--max-len",
                   str(args.context + 8192), "--prefix-cache", "off", "--pages", str(args.pages), "--state-dir", folder]
        self.daemon = Daemon(args.program, args.config, *options, "--shadow", mode, env={"TREEVERIFY_POISON": "off"})
        self.daemon.__enter__()
        self.client = self.daemon.client()
        self.vocab = self.client.get("/v1/model")["vocab"]
        self.session = Filled(self.client, [self.rng.randrange(self.vocab) for _ in range(args.context)])

    def round(self, nodes):
        state, first = self.session.state, self.rng.randrange(self.vocab - nodes)
        tree = {"tokens": [state["pending"], *range(first, first + nodes - 1)],
                "parents": [-1, *(self.rng.randrange(i + 1) for i in range(nodes - 1))]}
        body = {"seq": state["next_seq"], "epoch": self.session.epoch, "expected_len": state["committed_len"], "tree": tree}
        connection = self.client.connection
        if self.client.dropped():
            connection.close()
        connection.request("POST", f"/v1/sessions/{self.session.id}/verify", json.dumps(body),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        self.session.state = json.loads(answer.read())
        assert answer.status == 200, self.session.state

    def play(self, nodes, rounds):
        began = time.perf_counter()
        for _ in range(rounds):
            self.round(nodes)
        self.blocks.append(1e3 * (time.perf_counter() - began) / rounds)
        print(f"  {self.mode} {self.blocks[-1]:.3f} ms", flush=True)

    def judged(self):
        """Totals once no judgement is under way: the next daemon shares the device."""
        while True:
            lag = [line for line in self.client.raw("GET", "/metrics")[2].decode().splitlines()
                   if line.startswith("treeverify_parity_lag_seconds")]
            if float(lag[0].split()[1]) == 0:
                return self.client.get("/v1/parity")
            time.sleep(0.01)

    def close(self):
        self.client.close()
        self.daemon.__exit__(None, None, None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("config")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["off", "sample:0.01", "sample:0.1"])
    parser.add_argument("--json")
    args = parser.parse_args()
    report = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        sides = []
        for mode in args.modes:
            sides.append(Side(args, mode, folder))
            ends.callback(sides[-1].close)
        for side in sides:
            side.play(args.nodes, 5)
            side.blocks.clear()
        for block in range(args.blocks):
            for side in sides if block % 2 == 0 else sides[::-1]:
                side.play(args.nodes, args.rounds)
                side.judged()
        plain = statistics.median(sides[0].blocks)
        for side in sides:
            ms, parity = statistics.median(side.blocks), side.judged()
            report[side.mode] = {"ms": ms, "cost": ms / plain - 1, "blocks": side.blocks, "parity": parity}
            print(f"{side.mode:12} {ms:8.3f} ms a round of {args.nodes} nodes at {args.context}: {ms / plain - 1:+.2%}; "
                  f"{parity['rounds']}, worst {parity['kernel']}", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
