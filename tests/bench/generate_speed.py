"""`treeverify generate` in wall time: with drafts, and with rounds sent ahead, against decoding one token at a time.

    /usr/bin/python3 tests/bench/generate_speed.py TREEVERIFY TREEVERIFYD [--rtt-ms 0,20] [--repeats 5] [--tokens 200]
        [--prompts 3] [-- OPTION OF THE DAEMON...]

Greedy, on tests/models/kjv-mla-8m; prompts of 200 bytes from tests/golden/kjv_tail.txt, the store is the client's. The ways
take turns, so that what else the machine does meets all of them; a rate is the median over repeats of all prompts' tokens
by their seconds, a ratio the median of the ratios of one turn. The link is a proxy that delays (tests/support/delay_proxy.py).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "support"))

from daemon import Daemon  # noqa: E402
from delay_proxy import DelayProxy  # noqa: E402

MODEL = os.path.join(ROOT, "tests", "models", "kjv-mla-8m")
STORE = os.path.join(ROOT, "clients", "cli", "data", "kjv-store.txt")
WAYS = {
    "one token at a time": ("--no-drafts",),
    "33 nodes": ("--store", STORE),
    "33 nodes, ahead": ("--store", STORE, "--ahead"),
    "auto nodes": ("--store", STORE, "--nodes", "auto"),
    "auto nodes, ahead": ("--store", STORE, "--nodes", "auto", "--ahead"),
}


def prompts(count, length=200):
    with open(os.path.join(ROOT, "tests", "golden", "kjv_tail.txt"), "rb") as file:
        text = file.read()
    step = (len(text) - length - 20000) // count
    return [text[20000 + i * step : 20000 + i * step + length] for i in range(count)]


def run(client, url, way, prompt, tokens):
    """What the client says of one text: its tokens and seconds."""
    command = [client, "generate", "--json", "--url", url, "--max-tokens", str(tokens), *way, "-"]
    return json.loads(subprocess.run(command, input=prompt, capture_output=True, check=True, timeout=600).stdout)


def measure(client, url, options):
    """Rates [repeat] by way; every way's text is the same."""
    rates = {name: [] for name in WAYS}
    for _ in range(options.repeats):
        texts = {}
        for name, way in WAYS.items():
            runs = [run(client, url, way, prompt, options.tokens) for prompt in prompts(options.prompts)]
            rates[name].append(sum(len(one["tokens"]) for one in runs) / sum(one["seconds"] for one in runs))
            texts[name] = [one["tokens"] for one in runs]
        assert all(text == texts["33 nodes"] for text in texts.values()), "the ways gave different texts"
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("treeverify")
    parser.add_argument("treeverifyd")
    parser.add_argument("--rtt-ms", default="0,20")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("daemon", nargs="*", help="behind --")
    options = parser.parse_args()
    print("| round trip | way | tokens/s | against one token at a time |\n|--:|---|--:|--:|")
    with Daemon(options.treeverifyd, MODEL, *options.daemon) as daemon:
        for rtt_ms in map(float, options.rtt_ms.split(",")):
            with contextlib.ExitStack() as stack:
                url = f"http://{daemon.host}:{daemon.port}"
                if rtt_ms > 0:
                    url = stack.enter_context(DelayProxy(daemon.host, daemon.port, rtt_ms / 1e3)).url
                rates = measure(options.treeverify, url, options)
            plain = rates["one token at a time"]
            for name, found in rates.items():
                ratio = statistics.median(mine / alone for mine, alone in zip(found, plain))
                print(f"| {rtt_ms:g} ms | {name} | {statistics.median(found):.0f} | {ratio:.2f} × |", flush=True)


if __name__ == "__main__":
    main()
