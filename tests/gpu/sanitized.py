#!/usr/bin/env python3
"""An end-to-end run of the daemon under compute-sanitizer: a start with its self-test, a text by the command-line
client, a one-shot call with every kind of want, an orderly stop. Fails when a call fails or the tool found anything.

usage: sanitized.py TREEVERIFYD TREEVERIFY MODEL [--backend cpu|cuda] [--kv-dtype f32|bf16] [--tool TOOL...]
Without --tool the daemon runs by itself. The tool is the daemon's parent; the stop goes to the daemon.
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys

WANT = {"top_k": 5, "rows": "all", "logprobs": True, "logits": {"rows": "all", "dtype": "f32"}}
TREE = {"tokens": [101, 32, 110, 116, 104], "parents": [-1, 0, 0, 2, 3]}


def descendants(pid):
    """The process and all below it, children first."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as children:
        below = [found for child in children.read().split() for found in descendants(int(child))]
    return [*below, pid]


def daemon_pid(root, name):
    for pid in descendants(root):
        with open(f"/proc/{pid}/comm", encoding="ascii") as comm:
            if comm.read().strip() == name[:15]:
                return pid
    return root


def one_shot(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for rule in ("greedy", "target_walk", "typical"):
        body = {"tokens": list(b"In the beginning"), "tree": TREE, "want": WANT}
        body["sampling"] = {"rule": rule, "temperature": 0 if rule == "greedy" else 0.8, "seed": "9"}
        connection.request("POST", "/v1/verify", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{rule}: {answer.status} {text[:300]!r}")
    connection.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("daemon")
    parser.add_argument("client")
    parser.add_argument("model")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--kv-dtype", default="f32")
    parser.add_argument("--tool", nargs=argparse.REMAINDER, default=[])
    args = parser.parse_args()
    command = [*args.tool, args.daemon, "--model", args.model, "--listen", "127.0.0.1:0", "--backend", args.backend,
               "--kv-dtype", args.kv_dtype, "--pages", "64", "--max-len", "512", "--max-nodes", "64"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    port = None
    for line in process.stdout:  # the tool writes to the same place
        print(line, end="", flush=True)
        if line.startswith("listening "):
            port = int(line.split()[1].rsplit(":", 1)[1])
            break
    if port is None:
        print(f"no start: exit {process.wait()}")
        return 1
    url = f"http://127.0.0.1:{port}"
    options = ["--url", url, "--max-tokens", "24", "--color", "never"]
    ran = subprocess.run([args.client, "generate", *options, "In the beginning"], check=False)
    one_shot(port)
    os.kill(daemon_pid(process.pid, "treeverifyd"), signal.SIGTERM)
    for line in process.stdout:
        print(line, end="", flush=True)
    code = process.wait()
    print(f"client {ran.returncode}, daemon {code}")
    return 1 if ran.returncode or code else 0


if __name__ == "__main__":
    sys.exit(main())
