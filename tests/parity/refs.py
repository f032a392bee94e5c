"""Logits of every bundled checkpoint against the third-party references, through the HTTP API.

For page sizes 16, 64 and 128 with unused KV rows poisoned: seq_* by chain trees in one launch, tree_* as
they are, and both behind sessions prefilled in one piece and in pieces of 1, 7, 64 and 65 tokens, which must
also answer the bits of a one-shot call on the same prefix. No prefix is kept (--prefix-cache off), so every
piece is computed. Bounds: kernels/README.md ("What counts as equal").

With --kv-dtype bf16 the logits are those of rounded rows: they are held to the bounds in BF16, measured
once per checkpoint (on an H200 and on a processor), and the bits must still be the same in every cut.

With --products bf16 (--backend cuda --kv-dtype bf16) activations are rounded too: the bounds are those in PRODUCTS.
Rows whose best token is not the reference's are listed by the gap of the reference's two best: the near ties.

usage: refs.py TREEVERIFYD MODELS_DIR [--page-sizes 16,64,128] [--names v2lite,...] [--backend cpu|cuda]
               [--kv-dtype f32|bf16] [--products exact|bf16]
TV_TEST_SCALE below 1 takes the first page size only (sanitizer builds).
"""

import argparse
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import draw
import tensors
from daemon import Daemon, Session, checkpoint_arguments, floats

CHAIN_NODES = 64
PIECES = (None, 1, 7, 64, 65)  # tokens of a prefill; None: the whole prompt
GREEDY = {"rule": "greedy"}
ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}

# With bf16 rows, per checkpoint, over all rows together: least share of equal top-1, largest mean KL
# divergence, largest difference of a logit, least share of equal pending tokens. The larger ones are
# rows whose experts changed: a choice between two near gate values falls the other way.
BF16 = {
    "v2lite": (0.955, 9.5e-4, 0.8, 0.96),
    "v3": (0.935, 1.7e-2, 3.7, 0.97),
    "moonlight": (0.98, 4.5e-3, 3.7, 0.96),
    "kjv-mla-8m": (0.998, 6.5e-6, 0.36, 1.0),
}

# The same where activations are rounded to bf16 as well (measured on an H200).
PRODUCTS = {
    "v2lite": (0.935, 1.5e-3, 0.9, 0.92),
    "v3": (0.88, 4.0e-2, 5.3, 0.93),
    "moonlight": (0.97, 6.5e-3, 2.8, 0.955),
    "kjv-mla-8m": (0.998, 9.0e-5, 2.2, 0.98),
}


def one_shot(client, prefix, tokens, parents):
    """Logits [nodes, vocab] of a session-less verify."""
    tree = {"tokens": [int(t) for t in tokens], "parents": [int(p) for p in parents]}
    body = {"tokens": [int(t) for t in prefix], "tree": tree, "sampling": GREEDY, "want": ALL_LOGITS}
    answer = client.post("/v1/verify", body)
    block = answer["logits"]
    return np.array(floats(block), dtype=np.float32).reshape(block["shape"]), answer


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


class Report:
    def __init__(self, bf16=None):
        """bf16: this checkpoint's bounds when its KV rows are rounded."""
        self.passed = self.failed = 0
        self.bf16 = bf16
        self.rounded, self.pending = [], []

    def check(self, ok, text):
        if ok:
            self.passed += 1
        else:
            self.failed += 1
        print(("ok    " if ok else "FAIL  ") + text, flush=True)

    def judge_rounded(self, label):
        """All rows of one daemon with bf16 rows, and all pending tokens, against this checkpoint's bounds."""
        got, want = (np.concatenate(part) for part in zip(*self.rounded))
        top1, divergence, largest, share = self.bf16
        expected = log_softmax(want)
        agreement = float((got.argmax(axis=1) == want.argmax(axis=1)).mean())
        kl = float((np.exp(expected) * (expected - log_softmax(got))).sum(axis=1).mean())
        worst = float(np.abs(got - want).max())
        ok = agreement >= top1 and kl <= divergence and worst <= largest
        self.check(ok, f"{label} rows={len(want)} top1={agreement:.4f} kl={kl:.2e} max_abs={worst:.3f}")
        equal = float(np.mean(self.pending))
        self.check(equal >= share, f"{label} pending tokens: {equal:.4f} of {len(self.pending)} equal")
        apart = want[got.argmax(axis=1) != want.argmax(axis=1)]
        best = np.sort(apart, axis=1)[:, -2:]
        gaps = sorted(float(gap) for gap in best[:, 1] - best[:, 0])
        print(f"      {label} near ties: {len(gaps)} rows, gaps {' '.join(f'{gap:.2g}' for gap in gaps[-12:])}")
        self.rounded, self.pending = [], []

    def tokens(self, label, equal):
        """equal: per token, whether it is the reference's."""
        if self.bf16 is not None:
            self.pending += equal
        else:
            self.check(all(equal), label)

    def logits(self, label, got, want):
        if self.bf16 is not None:
            self.rounded.append((got, want))
            return
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


def in_pieces(client, tokens, piece, sampling):
    """A session on tokens, built `piece` tokens at a time; yields it after each."""
    session = Session(client, tokens[:piece], sampling=sampling)
    yield session, piece
    for start in range(piece, len(tokens), piece):
        end = min(start + piece, len(tokens))
        session.extend(tokens[start:end])
        yield session, end


def check_pending(report, client, label, refs):
    """Greedy pending tokens of sessions built in pieces are the references' argmax."""
    tokens = [int(t) for t in refs["seq_tokens"][:131]]
    argmax = refs["seq_logits"].argmax(axis=1)
    for piece in PIECES:
        right = []
        for session, end in in_pieces(client, tokens, piece or len(tokens), GREEDY):
            right.append(session.state["pending"] == argmax[end - 1])
        report.tokens(f"{label} pieces of {piece or 'all'}: pending = reference argmax throughout", right)
        session.close()


def seed_that_draws(token, position, vocab):
    """A seed whose noise alone draws the token there: a session's pending token is the model's choice,
    and at temperature 100 the noise is what chooses."""
    flat = np.zeros(vocab, dtype=np.float32)
    for seed in range(100000):
        drawn, margin = draw.draw(flat, position, seed, 100.0)
        if drawn == token and margin > 0.5:
            return str(seed)
    raise AssertionError(f"no seed draws {token} at {position}")


def reference_rounds(refs):
    """(name, prefix, tokens, parents, rows of the launch that have references, their logits) of each tree, all
    behind one prefix, and of a chain of the sequence behind another."""
    tokens = [int(t) for t in refs["seq_tokens"][: 131 + CHAIN_NODES]]
    part = tokens[131:]
    chain = list(range(-1, len(part) - 1))
    rounds = [("seq", tokens[:131], part, chain, slice(None), refs["seq_logits"][131:][: len(part)])]
    prefix = [int(t) for t in refs.get("tree_prefix", [])]
    for kind in ("random", "chain", "star"):
        if f"tree_{kind}_tokens" in refs:
            tokens = [prefix[-1], *(int(t) for t in refs[f"tree_{kind}_tokens"])]
            parents = [-1, *(int(p) + 1 for p in refs[f"tree_{kind}_parents"])]
            want = refs[f"tree_{kind}_logits"]
            rounds.append((f"tree_{kind}", prefix[:-1], tokens, parents, slice(1, None), want))
    return rounds


def check_pieces(report, client, label, refs):
    """Sequence and trees behind sessions prefilled in pieces: the references' logits, and the bits of a one-shot call."""
    rounds = reference_rounds(refs)
    if report.bf16 is not None:  # the rows over which its bounds were measured
        rounds = [one for one in rounds if one[0] == "tree_random"] or rounds[:1]
    alone = {name: one_shot(client, prefix, tokens, parents)[0] for name, prefix, tokens, parents, _, _ in rounds}
    for behind in dict.fromkeys(tuple(prefix) for _, prefix, *_ in rounds):
        own = [one for one in rounds if tuple(one[1]) == behind]
        first, vocab = own[0][2][0], own[0][5].shape[1]
        sampling = {"temperature": 100.0, "seed": seed_that_draws(first, len(behind), vocab)}
        for piece in PIECES:
            for session, _ in in_pieces(client, list(behind), piece or len(behind), sampling):
                pass
            assert session.state["pending"] == first
            for name, _, tokens, parents, rows, want in own:
                answer = session.verify(tokens[1:], parents[1:], want=ALL_LOGITS)
                got = np.array(floats(answer["logits"]), dtype=np.float32).reshape(alone[name].shape)
                here = f"{label} {name} behind pieces of {piece or 'all'}"
                report.logits(here, got[rows], want)
                same = bool((got.view(np.uint32) == alone[name].view(np.uint32)).all())
                report.check(same, f"{here}: bit-equal to one-shot")
                session.rollback(len(behind), pending=first)
            session.close()


def check_greedy(report, client, label, refs):
    if "greedy_prompt" not in refs:
        return
    want = [int(t) for t in refs["greedy_tokens"]]
    session = Session(client, [int(t) for t in refs["greedy_prompt"]], sampling=GREEDY)
    session.decode(len(want) - 1)
    equal = [a == b for a, b in zip(session.text, want)]
    if report.bf16 is not None and not all(equal):
        first = equal.index(False)  # what follows is another text
        print(f"      {label} greedy tokens part after {first} of {len(want)}")
        equal = equal[: first + 1]
    report.tokens(f"{label} {len(want)} greedy tokens equal the reference", equal)
    session.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--page-sizes", default="16,64,128")
    parser.add_argument("--names", default="v2lite,v3,moonlight,kjv-mla-8m")
    parser.add_argument("--products", default="exact", choices=["exact", "bf16"])
    args, options = checkpoint_arguments(parser, model="models", kv_dtypes=["f32", "bf16"])
    if args.products == "bf16" and args.kv_dtype != "bf16":
        parser.error("--products bf16 is measured with --kv-dtype bf16")
    options += ["--products", args.products, "--poison", "--prefix-cache", "off"]
    if float(os.environ.get("TV_TEST_SCALE", "1")) < 1:
        args.page_sizes = args.page_sizes.split(",")[0]
    report = Report()
    for name in args.names.split(","):
        folder = os.path.join(args.models, name)
        bounds = BF16 if args.products == "exact" else PRODUCTS
        report.bf16 = bounds.get(name, (2, 0, 0, 2)) if args.kv_dtype == "bf16" else None
        refs = tensors.load(os.path.join(folder, "refs.safetensors"))
        for page in args.page_sizes.split(","):
            label = f"{name} page {page}"
            with Daemon(args.program, folder, *options, "--page-size", page) as daemon:
                client = daemon.client()
                check_sequence(report, client, label, refs)
                check_trees(report, client, label, refs)
                check_pending(report, client, label, refs)
                check_pieces(report, client, label, refs)
                check_greedy(report, client, label, refs)
                if report.bf16 is not None:
                    report.judge_rounded(label)
                client.close()
    print(f"{report.passed} passed, {report.failed} failed")
    return 1 if report.failed or not report.passed else 0


if __name__ == "__main__":
    sys.exit(main())
