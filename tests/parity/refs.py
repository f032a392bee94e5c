"""Logits of every bundled checkpoint against the third-party references, through the HTTP API.

For page sizes 16, 64 and 128 with unused KV rows poisoned: seq_* by chain trees in one launch, tree_* as
they are, and sessions prefilled in pieces of 1, 7, 64 and 65 tokens, whose trees must answer the same
bits as a one-shot call on the same prefix. Bounds: kernels/README.md ("What counts as equal").

usage: refs.py TREEVERIFYD MODELS_DIR [--page-sizes 16,64,128] [--names v2lite,...]
TV_TEST_SCALE below 1 takes the first page size only (sanitizer builds).
"""

import argparse
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import safetensors
from daemon import Daemon, Session, floats

CHAIN_NODES = 64
GREEDY = {"rule": "greedy"}
ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}


def one_shot(client, prefix, tokens, parents):
    """Logits [nodes, vocab] of a session-less verify."""
    tree = {"tokens": [int(t) for t in tokens], "parents": [int(p) for p in parents]}
    body = {"tokens": [int(t) for t in prefix], "tree": tree, "sampling": GREEDY, "want": ALL_LOGITS}
    answer = client.post("/v1/verify", body)
    block = answer["logits"]
    return np.array(floats(block), dtype=np.float32).reshape(block["shape"]), answer


class Report:
    def __init__(self):
        self.passed = self.failed = 0

    def check(self, ok, text):
        if ok:
            self.passed += 1
        else:
            self.failed += 1
        print(("ok    " if ok else "FAIL  ") + text, flush=True)

    def logits(self, label, got, want):
        bound = 5e-4 * max(1.0, float(want.std()) / 1.6)
        worst = float(np.abs(got - want).max())
        equal = bool((got.argmax(axis=1) == want.argmax(axis=1)).all())
        finite = bool(np.isfinite(got).all())
        text = f"{label} rows={len(want)} max_abs={worst:.2e} bound={bound:.2e} argmax_equal={equal}"
        self.check(finite and worst <= bound and equal, text)


def check_sequence(report, client, label, refs):
    tokens, want = refs["seq_tokens"], refs["seq_logits"]
    got = []
    for start in range(0, len(tokens), CHAIN_NODES):
        part = tokens[start : start + CHAIN_NODES]
        logits, _ = one_shot(client, tokens[:start], part, range(-1, len(part) - 1))
        got.append(logits)
    report.logits(f"{label} seq", np.concatenate(got), want)


def check_trees(report, client, label, refs):
    if "tree_prefix" not in refs:
        return
    prefix = refs["tree_prefix"]
    for kind in ("random", "chain", "star"):
        if f"tree_{kind}_tokens" not in refs:
            continue
        # The references may have several roots: the last prefix token becomes node 0 above them.
        tokens = [prefix[-1], *refs[f"tree_{kind}_tokens"]]
        parents = [-1, *(refs[f"tree_{kind}_parents"] + 1)]
        logits, _ = one_shot(client, prefix[:-1], tokens, parents)
        report.logits(f"{label} tree_{kind}", logits[1:], refs[f"tree_{kind}_logits"])


def check_pieces(report, client, label, refs):
    """Sessions built in pieces: greedy pending = reference argmax, logits bit-equal to one-shot."""
    tokens = [int(t) for t in refs["seq_tokens"]]
    argmax = refs["seq_logits"].argmax(axis=1)
    length = 131
    rng = np.random.default_rng(5)
    parents = [0, 0, 1, 1, 2, 3, 5, 6]
    drafts = [int(t) for t in rng.choice(len(refs["seq_logits"][0]), len(parents), replace=False)]
    for piece in (length, 1, 7, 64, 65):
        session = Session(client, tokens[:piece], sampling=GREEDY)
        right = session.state["pending"] == argmax[piece - 1]
        for start in range(piece, length, piece):
            end = min(start + piece, length)
            answer = session.extend(tokens[start:end])
            right = right and answer["pending"] == argmax[end - 1]
        report.check(right, f"{label} pieces of {piece}: pending = reference argmax throughout")
        pending = session.state["pending"]
        alone, _ = one_shot(client, tokens[:length], [pending, *drafts], [-1, *parents])
        answer = session.verify(drafts, parents, want=ALL_LOGITS)
        got = np.array(floats(answer["logits"]), dtype=np.float32).reshape(alone.shape)
        same = bool((got.view(np.uint32) == alone.view(np.uint32)).all())
        worst = float(np.abs(got - alone).max())
        report.check(same, f"{label} pieces of {piece}: tree bit-equal to one-shot ({worst:.1e})")
        session.close()


def check_greedy(report, client, label, refs):
    if "greedy_prompt" not in refs:
        return
    want = [int(t) for t in refs["greedy_tokens"]]
    session = Session(client, [int(t) for t in refs["greedy_prompt"]], sampling=GREEDY)
    session.decode(len(want) - 1)
    report.check(session.text == want, f"{label} {len(want)} greedy tokens equal the reference")
    session.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("models")
    parser.add_argument("--page-sizes", default="16,64,128")
    parser.add_argument("--names", default="v2lite,v3,moonlight,kjv-mla-8m")
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    if float(os.environ.get("TV_TEST_SCALE", "1")) < 1:
        args.page_sizes = args.page_sizes.split(",")[0]
    report = Report()
    for name in args.names.split(","):
        folder = os.path.join(args.models, name)
        refs = safetensors.load(os.path.join(folder, "refs.safetensors"))
        for page in args.page_sizes.split(","):
            label = f"{name} page {page}"
            options = ["--page-size", page, "--backend", args.backend, "--poison"]
            with Daemon(args.program, folder, *options) as daemon:
                client = daemon.client()
                check_sequence(report, client, label, refs)
                check_trees(report, client, label, refs)
                check_pieces(report, client, label, refs)
                check_greedy(report, client, label, refs)
                client.close()
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed or not report.passed else 0


if __name__ == "__main__":
    sys.exit(main())
