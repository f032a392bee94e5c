"""ratio_wor and typical on a real checkpoint: tests/support/rules.py, written from the contract, accepts the
same nodes and draws the same pending token from the returned logits, round after round.

Trees are chains, stars and random ones; drafts are drawn without replacement from distributions that are the
target's, near it, flat, or of the least likely tokens. A difference is allowed only where the answer's own
margin, times the temperature, is below the noise of two paths, which the daemon measured for this checkpoint
at its start; each is listed and counted.

usage: draft_rules.py TREEVERIFYD MODEL_DIR TEXT [--rounds 40]
"""

import argparse
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import rules
from daemon import Daemon, Session, floats

SEED = 1234567890123456789
ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 12},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.0},
]
SHAPES = {"chain": [1] * 6, "star": [8], "random": [3, 2, 2]}  # children of a node at each depth


def rows_of(answer):
    return np.array(floats(answer["logits"]), dtype=np.float32).reshape(answer["logits"]["shape"])


def draft(rng, p, kind):
    """A distribution for the children of a node whose filtered target is p; f32, so that both sides have it."""
    flat = rng.dirichlet(np.ones(len(p)))
    if kind == "target":
        q = p
    elif kind == "near":
        q = 0.7 * p + 0.3 * flat
    elif kind == "flat":
        q = flat
    else:
        q = np.zeros(len(p))
        q[np.argsort(p)[:9]] = rng.dirichlet(np.ones(9))
    return (q / q.sum()).astype(np.float32)


class Growth:
    """A tree grown level by level with the target's own rows in sight, as a good drafter has them nearly."""

    def __init__(self, client, rng, prefix, pending, shape, setting):
        self.tokens, self.parents = [pending], [-1]
        level, vocab = [0], None
        self.q = []
        for width in [*SHAPES[shape], 0]:
            rows = self.rows(client, prefix)
            vocab = rows.shape[1]
            while len(self.q) < len(self.tokens):
                self.q.append(np.zeros(vocab, dtype=np.float32))
            grown = []
            for node in level if width else []:
                count = width if shape != "random" else int(rng.integers(0, width + 1))
                kind = rng.choice(["target", "near", "near", "flat", "adverse"])
                q = draft(rng, rules.target(rows[node], **setting), kind)
                drawn = rules.sample_without_replacement(rng, q, count)
                if drawn:
                    self.q[node] = q
                for token in drawn:
                    grown.append(len(self.tokens))
                    self.tokens.append(token)
                    self.parents.append(node)
            level = grown

    def rows(self, client, prefix):
        tree = {"tokens": self.tokens, "parents": self.parents}
        return rows_of(client.post("/v1/verify", {"tokens": prefix, "tree": tree, "want": ALL_LOGITS}))


class Tally:
    def __init__(self, noise):
        self.noise = noise
        self.rounds = self.accepted = self.near_ties = self.failed = 0

    def is_near_tie(self, margin, temperature):
        """The smallest change of scores that turns a decision, as one of logits; greedy's scores are logits."""
        scale = temperature if temperature >= 1e-4 else 1.0
        return margin is not None and margin * scale < 2 * self.noise

    def judge(self, label, answer, expected, temperature):
        got = (answer["accepted"]["nodes"], answer["pending"])
        self.rounds += 1
        self.accepted += len(got[0]) - 1
        if got == expected:
            return
        near = self.is_near_tie(answer["margin"]["min"], temperature)
        self.near_ties += near
        self.failed += not near
        print(f"{'near tie' if near else 'FAIL'}  {label}: {got}, expected {expected}, {answer['margin']}", flush=True)


def play(tally, client, rng, prompt, setting, shape, rounds):
    sampling = dict(setting, seed=str(SEED), rule="ratio_wor", typical={"epsilon": 0.2, "delta": 0.5})
    session = Session(client, prompt, sampling=sampling)
    committed = list(prompt)
    for number in range(rounds):
        pending, length = session.state["pending"], len(committed)
        grown = Growth(client, rng, committed, pending, shape, setting)
        tree = (grown.tokens, grown.parents)
        drafts, parents = grown.tokens[1:], grown.parents[1:]
        label = f"{shape} {setting} round {number}"
        if number % 3 == 2:
            answer = session_verify(session, drafts, parents, rule="typical")
            expected = rules.typical(tree, rows_of(answer), length, SEED, 0.2, 0.5, **setting)
            assert (answer["rule"], answer["lossless"]) == ("typical", False)
        else:
            field = {"q_topk": rules.topk_field(grown.q)} if number % 2 else {"q_dense": rules.dense_field(grown.q)}
            answer = session_verify(session, drafts, parents, draft=field if drafts else {})
            expected = rules.ratio_wor(tree, grown.q, rows_of(answer), length, SEED, **setting)
            assert (answer["rule"], answer["lossless"]) == ("ratio_wor", True)
        tally.judge(label, answer, expected, setting["temperature"])
        committed += answer["accepted"]["tokens"]
    session.close()


def session_verify(session, drafts, parents, draft=None, **fields):
    """As Session.verify, with a draft's distributions in the tree."""
    tree = {"tokens": [session.state["pending"], *drafts], "parents": [-1, *parents], **(draft or {})}
    body = {
        "seq": session.state["next_seq"], "epoch": session.epoch, "expected_len": session.state["committed_len"],
        "tree": tree, "want": ALL_LOGITS, **fields,
    }
    session.state = session.client.post(f"/v1/sessions/{session.id}/verify", body)
    return session.state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    rounds = max(3, int(args.rounds * min(1.0, float(os.environ.get("TV_TEST_SCALE", "1")))))
    rng = np.random.default_rng(20)
    with open(args.text, "rb") as file:
        text = file.read()
    with Daemon(args.program, args.model, "--backend", args.backend, "--shadow", "all") as daemon:
        client = daemon.client()
        tally = Tally(client.get("/v1/model")["noise"])
        for number, setting in enumerate(SETTINGS):
            for shape in SHAPES:
                prompt = list(text[1000 * number : 1000 * number + 40])
                play(tally, client, rng, prompt, setting, shape, rounds)
        parity = client.get("/v1/parity")
        totals = parity["rounds"]
        client.close()
    print(f"{tally.rounds} rounds, {tally.accepted} drafts accepted, {tally.near_ties} near ties (noise {tally.noise:.1e}); shadow {totals}")
    print(f"shadow's worst {parity['kernel']}, violations {[violation['kind'] for violation in parity['violations']]}")
    few = tally.near_ties <= tally.rounds * 0.01
    # drafts of both fates were met; how many of a short run (TV_TEST_SCALE) are accepted varies
    seen = tally.rounds // 4 < tally.accepted and totals["exact"] > 0 and totals["violation"] == 0
    print(f"{tally.failed} failed")
    return 0 if tally.failed == 0 and few and seen else 1


if __name__ == "__main__":
    sys.exit(main())
