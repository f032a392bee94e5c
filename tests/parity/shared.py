"""A prompt that is prefilled in launches of rounds answers the bits of the same prompt alone, and so do the rounds,
through the HTTP API.

Drafters play rounds without a pause while prompts of many lengths come; the metrics say that launches took their
tokens along. Then the same sessions play the same trees with nobody beside them.

usage: shared.py TREEVERIFYD MODEL [--backend cpu|cuda] [--kv-dtype f32|bf16] [--page-size N] [--seconds N]
                 [--launches N] [--taps L1,L2,..] [--shadow all]
With taps, every other prompt and drafter asks for hidden rows. With shadow, the kernel oracle judges rounds meanwhile.
Which launches take tokens along is decided by measured times; TV_TEST_SCALE below 1 (sanitizers, whose times are their
own) asks for none.
"""

import argparse
import os
import sys
import threading
import time

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Session, checkpoint_arguments, floats
from metrics import parse

SIZES = (1, 3, 8, 17)  # nodes of each drafter's trees
PROMPTS = (1, 7, 40, 3, 64, 12, 65, 5, 130, 20, 200, 2, 300)  # tokens; short ones go along most
ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}
HIDDEN = {"hidden": {"rows": "all"}}
GREEDY = {"sampling": {"rule": "greedy"}}
SCALED = float(os.environ.get("TV_TEST_SCALE", "1")) < 1


def tree(rng, nodes, vocab):
    """Drafts and parents below node 0."""
    drafts = rng.choice(vocab, nodes - 1, replace=False)
    return [int(t) for t in drafts], [int(rng.integers(0, i)) for i in range(1, nodes)]


def play(session, rng, nodes, vocab, hidden):
    answer = session.verify(*tree(rng, nodes, vocab), want={**ALL_LOGITS, **hidden})
    logits = np.array(floats(answer["logits"]), dtype=np.float32)
    return logits.view(np.uint32), answer["new_tokens"], str(answer.get("hidden"))


class Drafter:
    """Rounds of one session, the same ones whenever they are played."""

    def __init__(self, daemon, number, vocab, taps):
        self.client, self.number, self.vocab = daemon.client(), number, vocab
        self.hidden = HIDDEN if taps and number % 2 else {}
        self.answers = []

    def run(self, go_on):
        rng = np.random.default_rng(100 + self.number)
        prompt = [int(t) for t in rng.integers(0, self.vocab, 20 + 11 * self.number)]
        session = Session(self.client, prompt, **GREEDY)
        while go_on(len(self.answers)):
            if session.state["committed_len"] > 1500:
                session.rollback(len(prompt))
            self.answers.append(play(session, rng, SIZES[self.number], self.vocab, self.hidden))
        session.close()


def prompt_run(client, number, vocab, taps):
    """A create, and a round that shows its rows."""
    hidden = HIDDEN if taps and number % 2 else {}
    rng = np.random.default_rng(1000 + number)
    prompt = [int(t) for t in rng.integers(0, vocab, PROMPTS[number % len(PROMPTS)])]
    session = Session(client, prompt, **GREEDY, **({"want": hidden} if hidden else {}))
    made = session.state
    answer = list(session.text), made["digest"], str(made.get("hidden")), *play(session, rng, 12, vocab, {})
    session.close()
    return answer


def scrape(client):
    status, _, text = client.raw("GET", "/metrics")
    assert status == 200, text
    return parse(text.decode("ascii"))


def shared_launches(client):
    families = scrape(client)
    return tuple(int(families[f"treeverify_shared_{what}_total"].total()) for what in ("launches", "tokens"))


def same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="to wait for such launches at most")
    parser.add_argument("--launches", type=int, default=3, help="that take tokens of a prompt along, at least")
    parser.add_argument("--taps", default="")
    parser.add_argument("--shadow", default="off")
    args, options = checkpoint_arguments(parser, page_size="64")
    options += ["--poison", "--shadow", args.shadow, *(["--taps", args.taps] if args.taps else [])]
    options += ["--prefix-cache", "off"]  # else the second prompt would be the first one's rows
    with Daemon(args.program, args.model, *options) as daemon:
        client = daemon.client()
        vocab = client.get("/v1/model")["vocab"]
        stop, company = threading.Event(), [Drafter(daemon, n, vocab, args.taps) for n in range(len(SIZES))]
        threads = [threading.Thread(target=d.run, args=(lambda _: not stop.is_set(),)) for d in company]
        for thread in threads:
            thread.start()
        prompts, end = [], time.monotonic() + args.seconds
        while len(prompts) < len(PROMPTS) or (shared_launches(client)[0] < args.launches and time.monotonic() < end):
            prompts.append(prompt_run(client, len(prompts), vocab, args.taps))
        stop.set()
        for thread in threads:
            thread.join()
        launches, tokens = shared_launches(client)
        failed = 0
        for drafter in company:
            alone = Drafter(daemon, drafter.number, vocab, args.taps)
            alone.run(lambda done, rounds=len(drafter.answers): done < rounds)
            failed += sum(not same(a, b) for a, b in zip(drafter.answers, alone.answers, strict=True))
        for number, beside in enumerate(prompts):
            if not same(beside, prompt_run(client, number, vocab, args.taps)):
                failed += 1
                print(f"FAIL a prompt of {PROMPTS[number % len(PROMPTS)]} tokens beside rounds")
        judged = scrape(client)["treeverify_parity_rounds_total"].by("result")
        failed += judged["violation"] > 0 or (args.shadow != "off") != (judged["exact"] + judged["near_tie"] > 0)
        if shared_launches(client) != (launches, tokens):
            failed += 1
            print("FAIL a launch was shared while nobody else called")
    rounds = sum(len(d.answers) for d in company)
    print(f"{rounds} rounds, {len(prompts)} prompts, {tokens} of their tokens in {launches} launches of rounds, "
          f"{failed} differ; judged: {judged}")
    return 1 if failed or (launches < args.launches and not SCALED) else 0


if __name__ == "__main__":
    sys.exit(main())
