#!/usr/bin/env python3
"""Text with drafts against one token at a time: the command-line client's n-gram drafter on the bundled byte model.

usage: bench_drafted.py TREEVERIFYD TREEVERIFY MODEL TEXT STORE [--backend cpu|cuda] [--also cpu] [--tokens 160] [--prompts 6]
                        [--nodes 5,9,17,33,auto] [--threads N] [--repeats 3] [--round-trip MS,MS] [--options "MORE OPTIONS"]
                        [--ahead GUESSES] [--json FILE]

One token at a time is both: rounds of one token, as a client asks for them, and decode inside the server, with neither
client nor link between tokens. Prompts are 200 bytes of TEXT each (tests/golden/kjv_tail.txt); the drafter knows STORE
(clients/cli/data/kjv-store.txt) and its own context. --round-trip also measures over a link with such round trips. --ahead:
each way also with the next tree sent ahead, behind so many guesses of how a round ends. --also: another backend writes the
same texts; they must be equal but for near ties, which are listed: positions where its two best tokens are within what the
daemon calls a near tie. Wall time as the client measures it, from its first request to its last answer, best of the
repeats, in turn. Exit 1 when texts differ otherwise.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, floats
from delay_proxy import DelayProxy

PROMPT = 200
GREEDY = {"rule": "greedy", "temperature": 0}
SHIPPED = {"TREEVERIFY_POISON": "off"}
DECODE, ONE = "decode on the server", "rounds of one token"


def generate(args, url, prompt, *options):
    command = [args.client, "generate", "--url", url, "--json", "--max-tokens", str(args.tokens), *options, "-"]
    ran = subprocess.run(command, input=prompt, capture_output=True, timeout=300, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"{command}: {ran.returncode} {ran.stderr[-400:]!r}")
    return json.loads(ran.stdout)


def margin(client, tokens):
    """Between the two best logits behind these tokens, and the two."""
    body = {"tokens": tokens[:-1], "tree": {"tokens": tokens[-1:], "parents": [-1]}, "sampling": GREEDY,
            "want": {"logits": {"rows": "all", "dtype": "f32"}}}
    row = floats(client.post("/v1/verify", body)["logits"])
    best = sorted(range(len(row)), key=row.__getitem__)[:-3:-1]
    return row[best[0]] - row[best[1]], best


def compare(prompt, texts, client, noise):
    """1 when the texts part where it is no near tie."""
    one, other = texts
    place = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
    if place is None:
        return 0
    gap, best = margin(client, list(prompt) + other[:place])
    print(f"  texts part at token {place}: {one[place]} and {other[place]}; margin {gap:.2e} between {best}, near tie below "
          f"{noise:.2e}")
    return int(gap > noise)


def measure(args, url, prompts, ways):
    """Seconds and tokens of each way, best of the repeats, added over prompts; texts of each way."""
    seconds, rounds, texts, outside = {}, {}, {}, {}
    for name, options in ways.items():
        generate(args, url, prompts[0], *options)
        seconds[name], rounds[name], texts[name], outside[name] = 0.0, 0, [], 0.0
    for prompt in prompts:
        best = {}
        for _ in range(args.repeats):
            for name, options in ways.items():
                answer = generate(args, url, prompt, *options)
                if name not in best or answer["seconds"] < best[name]["seconds"]:
                    best[name] = answer
        for name, answer in best.items():
            seconds[name] += answer["seconds"]
            rounds[name] += answer["rounds"]
            outside[name] += answer["seconds"] - 1e-6 * answer["server_us"]
            texts[name].append(answer["tokens"])
    return seconds, rounds, texts, {name: 1e3 * outside[name] / max(1, rounds[name]) for name in ways}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("daemon")
    parser.add_argument("client")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("store")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--also")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--nodes", type=lambda text: text.split(","), default=["5", "9", "17", "33", "auto"])
    parser.add_argument("--threads")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--round-trip", type=lambda text: [float(ms) for ms in text.split(",")], default=[])
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--options", type=shlex.split, default=[])
    parser.add_argument("--json")
    args = parser.parse_args()
    with open(args.text, "rb") as file:
        text = file.read()
    step = (len(text) - PROMPT) // args.prompts
    prompts = [text[i * step:i * step + PROMPT] for i in range(args.prompts)]
    options = ["--backend", args.backend, *args.options] + (["--threads", args.threads] if args.threads else [])
    report, failed = [], 0
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        options += ["--state-dir", folder]
        daemon = ends.enter_context(Daemon(args.daemon, args.model, *options, env=SHIPPED))
        ways = {DECODE: ["--no-drafts"], ONE: ["--nodes", "1"]}
        for nodes in args.nodes:
            ways[f"drafts, {nodes} nodes"] = ["--nodes", nodes, "--store", args.store]
            if args.ahead:
                ways[f"{nodes} nodes, ahead"] = [*ways[f"drafts, {nodes} nodes"], "--ahead", "--guesses", str(args.ahead)]
        url = f"http://{daemon.host}:{daemon.port}"
        for trip in [0.0, *args.round_trip]:
            with DelayProxy(daemon.host, daemon.port, trip / 1e3) if trip else contextlib.nullcontext() as link:
                seconds, rounds, texts, outside = measure(args, link.url if trip else url, prompts, ways)
            for name in ways:
                count = sum(map(len, texts[name]))
                row = {"round_trip_ms": trip, "way": name, "seconds": seconds[name], "tokens_s": count / seconds[name],
                       "times_decode": seconds[DECODE] / seconds[name], "times_one": seconds[ONE] / seconds[name],
                       "tokens_a_round": count / max(1, rounds[name]), "client_ms_a_round": outside[name]}
                report.append(row)
                print(f"  {args.backend}, {trip:g} ms: {name:24} {row['tokens_s']:8.1f} tokens/s, {row['times_one']:.2f} x "
                      f"{ONE}, {row['times_decode']:.2f} x {DECODE}; {row['tokens_a_round']:.2f} a round, "
                      f"{outside[name]:.2f} ms of it not the server's", flush=True)
        if args.also:
            other = ends.enter_context(Daemon(args.daemon, args.model, "--backend", args.also, env=SHIPPED))
            client, own, parted = other.client(), daemon.client(), 0
            noise = 2 * max(end.get("/v1/model")["noise"] for end in (client, own))  # as tests/parity judges texts
            own.close()
            drafted = list(ways)[-1]
            for number, prompt in enumerate(prompts):
                there = generate(args, f"http://{other.host}:{other.port}", prompt, *ways[drafted])["tokens"]
                parted += texts[drafted][number] != there
                failed += compare(prompt, (texts[drafted][number], there), client, noise)
            print(f"  {args.backend} and {args.also}: {len(prompts)} texts of {args.tokens} tokens, {parted} part at a near "
                  f"tie, {failed} elsewhere")
            client.close()
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
