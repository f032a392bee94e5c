#!/usr/bin/env python3
"""Rounds that share, move and hold cache rows, on any backend: what must be the same bits is the same bits.

A fork writes into a page that it shares with its parent (copied on write), a rollback takes rows back, a held
round is committed late, by itself or inside the next one: each time the next round's logits must be those of a
session that came to the same text without it. With every round judged (--shadow all) no oracle may object, all
pages must come back, and a device may not have been asked for memory since its start.

usage: rounds.py TREEVERIFYD MODEL [--backend cpu|cuda] [--kv-dtype f32|bf16] [--page-size N]
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon, Session, checkpoint_arguments

ALL_LOGITS = {"logits": {"rows": "all", "dtype": "f32"}}
GREEDY = {"rule": "greedy", "temperature": 0}
PARENTS = [0, 1, 0, 3, 0]  # a chain, another, and a leaf


class Child(Session):
    """A fork of a session at its full length."""

    def __init__(self, parent):
        self.client = parent.client
        self.state = self.client.post(f"/v1/sessions/{parent.id}/fork", {"epoch": parent.epoch})
        self.id, self.epoch, self.text = self.state["session"], self.state["epoch"], list(parent.text)


def drafts(session, vocab):
    """Two branches that are surely wrong somewhere, so that rows are moved at the commit."""
    pending = session.state["pending"]
    return [(pending + step) % vocab for step in (1, 2, 3, 4, 5)]


def guided(session, vocab):
    """A tree whose second branch the model accepts: what it would say itself, asked of a fork."""
    child = Child(session)
    child.decode(2)
    own = child.text[-2:]
    child.close()
    others = [token % vocab for token in range(own[0] + 1, own[0] + 3)]
    return [others[0], others[1], own[0], own[1], (own[0] + 7) % vocab]


def bits(session, vocab, **fields):
    answer = session.verify(drafts(session, vocab), PARENTS, want=ALL_LOGITS, **fields)
    return answer["logits"]["data_b64"], answer["accepted"], answer["pending"]


def rollback(session, length, pending):
    body = dict(session._base(), len=length, pending=pending)
    session.state = session.client.post(f"/v1/sessions/{session.id}/rollback", body)


class Scenario:
    def __init__(self, client, vocab):
        self.client, self.vocab, self.failed, self.passed = client, vocab, 0, 0

    def same(self, what, one, other):
        ok = one == other
        self.passed, self.failed = self.passed + ok, self.failed + (not ok)
        print(("ok    " if ok else "FAIL  ") + what, flush=True)

    def prompt(self, length):
        return [(13 * i + length) % self.vocab for i in range(length)]

    def forks(self, length):
        """The child's rows are the parent's; both go on, each in pages of its own."""
        parent = Session(self.client, self.prompt(length), sampling=GREEDY)
        parent.verify(guided(parent, self.vocab), PARENTS)
        child, grandchild = Child(parent), None
        self.same(f"fork of {length}: first round", bits(parent, self.vocab), bits(child, self.vocab))
        grandchild = Child(child)
        self.same(f"fork of {length}: second round", bits(parent, self.vocab), bits(child, self.vocab))
        self.same(f"fork of {length}: a fork's fork", bits(grandchild, self.vocab)[1:], self.last(parent))
        for session in (parent, child, grandchild):
            session.close()

    @staticmethod
    def last(session):
        return session.state["accepted"], session.state["pending"]

    def rollbacks(self, length):
        session = Session(self.client, self.prompt(length), sampling=GREEDY)
        at, pending = session.state["committed_len"], session.state["pending"]
        first = bits(session, self.vocab)
        session.decode(5)
        rollback(session, at, pending)
        self.same(f"rollback to {length}", bits(session, self.vocab), first)
        session.close()

    def held(self, length):
        """Committed at once, by commit, and inside the next round."""
        at_once = Session(self.client, self.prompt(length), sampling=GREEDY)
        late, inside = Child(at_once), Child(at_once)
        tree = guided(at_once, self.vocab)
        at_once.verify(tree, PARENTS)
        settled = []
        for session in (late, inside):
            answer = session.verify(tree, PARENTS, commit="hold")
            self.same(f"held behind {length}: proposal", answer["accepted"], at_once.state["accepted"])
            settled.append({"path": answer["accepted"]["nodes"], "next": answer["pending"]})
        path = f"/v1/sessions/{late.id}/commit"
        held_seq = late.state["seq"]
        late.state = self.client.post(path, {"epoch": late.epoch, "seq": late.state["next_seq"], **settled[0]})
        want = bits(at_once, self.vocab)
        self.same(f"held behind {length}: commit", bits(late, self.vocab), want)
        inside.state = dict(inside.state, committed_len=late_len(inside, settled[1]), pending=settled[1]["next"])
        got = bits(inside, self.vocab, commit_prev={"seq": held_seq, **settled[1]})
        self.same(f"held behind {length}: commit_prev", got, want)
        for session in (at_once, late, inside):
            session.close()


def late_len(session, settled):
    return session.state["committed_len"] + len(settled["path"])


def main():
    args, options = checkpoint_arguments(argparse.ArgumentParser(), page_size="16")
    with Daemon(args.program, args.model, *options, "--shadow", "all", "--prefix-cache", "off") as daemon:
        client = daemon.client()
        model = client.get("/v1/model")
        scenario = Scenario(client, model["vocab"])
        for length in (1, 15, 16, 17, 100):
            scenario.forks(length)
            scenario.rollbacks(length)
            scenario.held(length)
        after = client.get("/v1/model")
        parity = client.get("/v1/parity")
        scenario.same("no violation", parity["rounds"]["violation"], 0)
        scenario.same("rounds were judged", parity["rounds"]["exact"] + parity["rounds"]["near_tie"] > 0, True)
        wanted = None if args.backend == "cpu" else 0
        scenario.same("device allocations since the start", after["device_allocations"], wanted)
        client.close()
    print(f"{scenario.passed} passed, {scenario.failed} failed")
    return 1 if scenario.failed or not scenario.passed else 0


if __name__ == "__main__":
    sys.exit(main())
