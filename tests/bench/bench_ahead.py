#!/usr/bin/env python3
"""Speculate-ahead over a link with a round trip: tokens a second against one round at a time, and against the model.

usage: bench_ahead.py <treeverifyd-fixed> [--rounds N] [--verify-ms V] [--right P] [--round-trips MS,MS,..] [--strict]

The daemon with the engine of fixed answers, each launch V ms (30); the Python client with a synthetic drafter, which
drafts four right tokens a round and guesses the end of its tree right with probability P (0.85); a proxy that delays
both directions (tests/support/delay_proxy.py). Prints the table of RESULTS.md. --strict: exit 1 when the rate at 20 ms
is below 90 % of the co-located synchronous one, or a rate is more than 10 % off the model. Measures this machine: run
it alone.
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "clients" / "python" / "src")]

from delay_proxy import DelayProxy  # noqa: E402

import treeverify as tv  # noqa: E402

VOCAB, DRAFTS, PROMPT, WARM = 512, 4, 16, 3
PER_ROUND = DRAFTS + 1


def token_at(position):
    """What the fixed engine draws (tests/support/fixed_engine.h)."""
    return (7 * position + 3) % VOCAB


class Synthetic:
    def __init__(self, right, seed):
        self.right, self.random, self.guesses = right, random.Random(seed), []

    def draft(self, tokens, nodes, depth):
        count = min(nodes, depth, DRAFTS)
        return tv.Tree.chain([tokens[-1], *(token_at(len(tokens) + i) for i in range(count))])

    def guess(self, tokens, tree):
        held = self.random.random() < self.right
        self.guesses.append(held)
        token = token_at(len(tokens) + len(tree) - 1)
        return len(tree) - 1, token if held else (token + 1) % VOCAB


def run(url, rounds, right, pipeline):
    """(seconds a round, the guesses that were made), behind a few rounds that open the connections."""
    drafter = Synthetic(right, 20261130)
    with tv.Client(url, timeout_s=60) as client:
        with client.session([token_at(i) for i in range(PROMPT)]) as session:
            text = session.generate(
                drafter, PER_ROUND * (rounds + WARM), nodes=DRAFTS, depth=DRAFTS, pipeline=pipeline
            )
            for _ in range(WARM):
                next(text)
            started = time.monotonic()
            count = sum(len(round.new_tokens) for round in text)
            seconds = time.monotonic() - started
            assert session.new_tokens == [token_at(PROMPT + i) for i in range(len(session.new_tokens))]
    assert count == PER_ROUND * rounds, count
    return seconds / rounds, drafter.guesses


def model(guesses, rounds, verify_s, trip_s, own_s):
    """Seconds a round when nothing but the link, the launches and own_s of client and server from an answer to the next
    launch take time. A round is sent when the answer of the last but one is there, or, behind a wrong guess, of the
    last."""
    ready = [0.0, 0.0]  # when this round and the next one reach the server
    free = end = 0.0
    for number in range(rounds):
        end = max(ready[0], free) + verify_s
        free = end
        answered = end + trip_s / 2
        if guesses[number]:
            ready = [ready[1], answered + trip_s / 2 + own_s]
        else:  # the skipped one must have been answered too
            answered = max(answered, ready[1] + trip_s / 2)
            ready = [answered + trip_s / 2 + own_s] * 2
    return end / rounds


def ping_ms(url):
    """A round trip as the client sees it, what client and daemon take included: median of a few."""
    with tv.Client(url) as client:
        times = []
        for _ in range(31):
            started = time.monotonic()
            client.health()
            times.append(time.monotonic() - started)
    return sorted(times)[len(times) // 2] * 1e3


def start(program, verify_ms):
    daemon = subprocess.Popen(
        [program, "--model", "fixed", "--listen", "127.0.0.1:0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )
    words = daemon.stdout.readline().split()
    daemon.stdin.write(f"slow {int(verify_ms * 1000)}\nstat\n")
    daemon.stdin.flush()
    daemon.stdout.readline()
    return daemon, words[1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--verify-ms", type=float, default=30.0)
    parser.add_argument("--right", type=float, default=0.85)
    parser.add_argument("--round-trips", default="1,5,10,20,40,80")
    parser.add_argument("--strict", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TREEVERIFY_POISON", "on")
    rounds, missed = options.rounds, []
    daemon, url = start(options.program, options.verify_ms)
    try:
        base_s, _ = run(url, rounds, options.right, False)
        verify_s, _ = run(url, rounds, 1.0, True)  # back to back: the launch as this machine does it
        own_s, direct_ms = max(0.0, base_s - verify_s), ping_ms(url)
        print(f"verify {options.verify_ms:g} ms, guess right {options.right:.0%}, {PER_ROUND} tokens a round, "
              f"{rounds} rounds; co-located synchronous: {base_s * 1e3:.2f} ms a round, {PER_ROUND / base_s:.1f} "
              f"tokens/s; back to back {verify_s * 1e3:.2f} ms a round")
        print("| round trip | measured | synchronous | conditional | of co-located | model | of the model |")
        print("|--:|--:|--:|--:|--:|--:|--:|")
        host, port = url.removeprefix("http://").rsplit(":", 1)
        with DelayProxy(host, int(port)) as link:
            for trip_ms in map(float, options.round_trips.split(",")):
                link.round_trip(trip_ms / 1e3)
                seen_ms = ping_ms(link.url) - direct_ms
                plain_s, _ = run(link.url, rounds, options.right, False)
                ahead_s, guesses = run(link.url, rounds, options.right, True)
                right = guesses[WARM:] + [True] * rounds  # the last rounds have no guess behind them
                expected_s = model(right, rounds, verify_s, seen_ms / 1e3, own_s)
                share, off = base_s / ahead_s, expected_s / ahead_s
                print(f"| {trip_ms:g} ms | {seen_ms:.1f} ms | {PER_ROUND / plain_s:.1f} tokens/s | "
                      f"{PER_ROUND / ahead_s:.1f} tokens/s | {share:.1%} | {PER_ROUND / expected_s:.1f} tokens/s | "
                      f"{off:.1%} |", flush=True)
                if (trip_ms == 20 and share < 0.9) or not 0.9 <= off <= 1.1:
                    missed.append(trip_ms)
    finally:
        daemon.stdin.close()
        daemon.terminate()
        daemon.wait()
    sys.exit(1 if missed and options.strict else 0)


if __name__ == "__main__":
    main()
