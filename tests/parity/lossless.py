"""Losslessness on real text, through the HTTP API.

Greedy: speculative text equals one-token decoding for many prompts. Seeded at temperature 0.8: the same
tokens for chain, star, random trees and no drafts, and after a restart; and the sampler of
tests/support/draw.py, written from the contract, draws the same tokens from the returned logits.
A difference is allowed only where the answer itself reports a near tie; each is listed and counted.

usage: lossless.py TREEVERIFYD MODEL_DIR TEXT [--prompts 200] [--tokens 256]
TV_TEST_SCALE below 1 shortens the prompts list (sanitizer builds).
"""

import argparse
import os
import random
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import draw
from daemon import Daemon, Session, floats

PROMPT_BYTES = 96
SEED = "1234567890123456789"


def prompts_of(path, count):
    with open(path, "rb") as file:
        text = file.read()
    step = (len(text) - PROMPT_BYTES) // count
    return [list(text[i * step : i * step + PROMPT_BYTES]) for i in range(count)]


class Drafter:
    """Trees that contain the expected continuation with some errors and siblings: they exercise
    acceptance, rejection and branches whatever the model says."""

    def __init__(self, shape, expected, vocab, seed):
        self.shape, self.expected, self.vocab = shape, expected, vocab
        self.random = random.Random(seed)

    def tree(self, done):
        """(drafts, parents) after `done` tokens of the text, the last of them pending."""
        ahead = self.expected[done : done + 12]
        if self.shape == "none":
            return [], []
        if self.shape == "star":
            right = ahead[:1]
            others = [t for t in self.random.sample(range(self.vocab), 8) if t not in right]
            drafts = others[:6] + right
            self.random.shuffle(drafts)
            return drafts, [0] * len(drafts)
        drafts, parents, tip = [], [], 0
        for token in ahead:
            if self.shape == "random":
                for wrong in self.random.sample(range(self.vocab), self.random.randint(0, 3)):
                    if wrong != token:
                        drafts.append(wrong)
                        parents.append(tip)
            if self.random.random() < 0.08:
                token = (token + 1) % self.vocab
            if any(p == tip and d == token for d, p in zip(drafts, parents)):
                break
            drafts.append(token)
            parents.append(tip)
            tip = len(drafts)
        return drafts, parents


def speculate(session, drafter, count):
    """Verify rounds until `count` tokens; returns text and the set of indices at near ties."""
    ties, rounds = set(), 0
    while len(session.text) < count:
        before = len(session.text)
        drafts, parents = drafter.tree(before)
        answer = session.verify(drafts, parents)
        if answer["margin"]["near_tie"]:
            ties.update(range(before, len(session.text)))
        rounds += 1
    return session.text[:count], ties, rounds


def first_difference(a, b):
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None


class Tally:
    def __init__(self):
        self.passed = self.failed = self.near_ties = self.positions = self.rounds = 0

    def compare(self, label, want, got, ties):
        self.positions += len(want)
        at = first_difference(want, got)
        if at is None:
            self.passed += 1
        elif at in ties:
            self.passed += 1
            self.near_ties += 1
            print(f"near tie: {label} at token {at}: {want[at]} / {got[at]}", flush=True)
        else:
            self.failed += 1
            print(f"FAIL  {label} at token {at}: {want[at]} / {got[at]}", flush=True)


def greedy(tally, client, prompts, count, vocab):
    for number, prompt in enumerate(prompts):
        plain = Session(client, prompt, sampling={"rule": "greedy"})
        plain.decode(count - 1)
        plain.close()
        shape = ("chain", "random", "star")[number % 3]
        session = Session(client, prompt, sampling={"rule": "greedy"})
        drafter = Drafter(shape, plain.text, vocab, number)
        text, ties, rounds = speculate(session, drafter, count)
        session.close()
        tally.rounds += rounds
        tally.compare(f"greedy prompt {number} {shape}", plain.text[:count], text, ties)


def seeded_text(client, prompt, shape, expected, count, vocab):
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": SEED}
    session = Session(client, prompt, sampling=sampling)
    result = speculate(session, Drafter(shape, expected, vocab, 3), count)
    session.close()
    return result


def seeded(tally, client, prompts, count, vocab):
    plain = []
    for number, prompt in enumerate(prompts):
        text, _, _ = seeded_text(client, prompt, "none", [], count, vocab)
        plain.append(text)
        for shape in ("chain", "star", "random"):
            got, ties, _ = seeded_text(client, prompt, shape, text, count, vocab)
            tally.compare(f"seeded prompt {number} {shape}", text, got, ties)
    return plain


def second_sampler(tally, client, prompt, count, noise):
    """tests/support/draw.py from the returned logits, over several filter settings."""
    settings = [
        {"temperature": 0.8},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0},
    ]
    want = {"logits": {"rows": "all", "dtype": "f32"}}
    for setting in settings:
        session = Session(client, prompt, sampling=dict(setting, seed=SEED))
        ours, theirs, ties = [], [], set()
        while len(ours) < count:
            position = session.state["committed_len"] + 1
            answer = session.verify([], [], want=want)
            logits = np.array(floats(answer["logits"]), dtype=np.float32)
            token, margin = draw.draw(logits, position, int(SEED), **setting)
            if margin < noise:
                ties.add(len(ours))
            ours.append(token)
            theirs.append(answer["pending"])
        session.close()
        tally.compare(f"second sampler {setting}", ours, theirs, ties)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seeded-prompts", type=int, default=10)
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    scale = min(1.0, float(os.environ.get("TV_TEST_SCALE", "1")))
    tally = Tally()
    prompts = prompts_of(args.text, max(2, int(args.prompts * scale**2)))
    options = ["--backend", args.backend]
    with Daemon(args.program, args.model, *options) as daemon:
        client = daemon.client()
        model = client.get("/v1/model")
        vocab = model["vocab"]
        greedy(tally, client, prompts, args.tokens, vocab)
        some = prompts[: max(1, int(args.seeded_prompts * scale))]
        before = seeded(tally, client, some, args.tokens, vocab)
        second_sampler(tally, client, prompts[0], args.tokens, model["noise"])
        client.close()
    with Daemon(args.program, args.model, *options) as daemon:
        client = daemon.client()
        for number, prompt in enumerate(some):
            text, ties, _ = seeded_text(client, prompt, "random", before[number], args.tokens, vocab)
            tally.compare(f"seeded prompt {number} after a restart", before[number], text, ties)
        client.close()
    share = tally.near_ties / max(1, tally.positions)
    print(f"{tally.positions} positions, {tally.near_ties} near ties ({share:.3%})")
    print(f"{tally.rounds} greedy rounds")
    few = share <= 0.001
    if not few:
        print("FAIL  more than 0.1 % near ties")
    failed = tally.failed + (0 if few else 1)
    print(f"{tally.passed} passed, {failed} failed")
    return 1 if failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main())
