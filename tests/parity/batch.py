"""Rounds that share a launch answer the bits of the same rounds alone, through the HTTP API.

Two sets of the same sessions, with prompts of different lengths, play the same trees: one set one round
after the other, the other set all at once, in requests of their own and then in one body, so that the daemon
launches together what waits together.

usage: batch.py TREEVERIFYD MODEL [--backend cpu|cuda] [--kv-dtype f32|bf16] [--each N]
                [--launch N]
  --each N: sessions for every size of tree (default 1); --launch N: rounds that the largest launch must have (default 2)
"""

import argparse
import os
import sys
import threading

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Session, checkpoint_arguments, floats

SIZES = (2, 3, 4, 6, 9, 17, 30, 64)  # nodes of each tree; several small ones fit one launch
ROUNDS = 6
ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}


def tree(rng, nodes, vocab):
    """Drafts and parents below node 0."""
    drafts = rng.choice(vocab, nodes - 1, replace=False)
    return [int(t) for t in drafts], [int(rng.integers(0, i)) for i in range(1, nodes)]


def read(answer):
    """Bits of the logits, new tokens, rounds in its launch."""
    logits = np.array(floats(answer["logits"]), dtype=np.float32)
    return logits.view(np.uint32), answer["new_tokens"], answer["timing_us"]["batch"]


def play(session, draft, into, at):
    into[at] = read(session.verify(*draft, want=ALL_LOGITS))


def play_together(sessions, drafts):
    results = [None] * len(sessions)
    threads = [
        threading.Thread(target=play, args=(session, drafts[i], results, i)) for i, session in enumerate(sessions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def play_as_one(sessions, drafts):
    items = [dict(s.round(*draft, want=ALL_LOGITS), session=s.id) for s, draft in zip(sessions, drafts)]
    bodies = [item["body"] for item in sessions[0].client.post("/v1/verify:batch", {"items": items})["items"]]
    for session, body in zip(sessions, bodies):
        session.state = body
    return [read(body) for body in bodies]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--launch", type=int, default=2)
    args, options = checkpoint_arguments(parser)
    sizes = SIZES * args.each
    rng = np.random.default_rng(11)
    failed = shared = most = 0
    with Daemon(args.program, args.model, *options, "--poison") as daemon:
        clients = [daemon.client() for _ in sizes]
        vocab = clients[0].get("/v1/model")["vocab"]
        prompts = [[int(t) for t in rng.integers(0, vocab, 20 + 11 * i)] for i in range(len(sizes))]
        greedy = {"sampling": {"rule": "greedy"}}
        alone, company = ([Session(c, p, **greedy) for c, p in zip(clients, prompts)] for _ in range(2))
        for number in range(ROUNDS):
            drafts = [tree(rng, nodes, vocab) for nodes in sizes]
            expected = [None] * len(sizes)
            for i, session in enumerate(alone):
                play(session, drafts[i], expected, i)
            played = (play_as_one if number % 2 else play_together)(company, drafts)
            for (want, tokens, _), (got, new_tokens, batch) in zip(expected, played):
                same = tokens == new_tokens and bool((want == got).all())
                failed += not same
                shared += batch > 1
                most = max(most, batch)
                if not same:
                    print(f"FAIL a tree of {len(want) // vocab} nodes in a launch of {batch}")
        for client in clients:
            client.close()
    print(f"{ROUNDS * len(sizes)} rounds, {shared} of them in shared launches of up to {most}, {failed} differ")
    return 1 if failed or most < args.launch else 0


if __name__ == "__main__":
    sys.exit(main())
