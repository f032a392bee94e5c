"""Shadow mode over HTTP: it never changes an answer, counts a comparison once, and keeps reproducers that fail again."""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import CONTRACT, Daemon, Session  # noqa: E402
from events import Stream  # noqa: E402

PLAIN, PLANTED = os.environ["TREEVERIFYD"], os.environ["TREEVERIFYD_PLANTED"]
CLI, MODEL = os.environ["TREEVERIFY"], os.environ["TV_MODEL_DIR"]
VOCAB = 256
ROUNDS = max(2, round(4 * float(os.environ.get("TV_TEST_SCALE", "1"))))
# Under TSan what only changes numbers is left out: the threads are those of the other cases.
RACES = os.environ.get("TV_SANITIZE") == "thread"
numbers = unittest.skipIf(RACES, "the threads are those of the other cases")
# What tells one run from another, whatever it answers.
VOLATILE = {"session", "epoch", "timing_us", "hint", "lease_expires_at"}


def start(program=PLAIN, *options, env=None):
    clean = {"STATE_DIRECTORY": "", "XDG_STATE_HOME": "", **(env or {})}
    return Daemon(program, MODEL, "--threads", "1", *options, env=clean)


def stable(answer):
    return {name: value for name, value in answer.items() if name not in VOLATILE}


def random_tree(source, count):
    parents = [source.randrange(max(1, i)) for i in range(1, count)]
    drafts, taken = [], set()
    for parent in parents:
        token = source.randrange(VOCAB)
        while (parent, token) in taken:
            token = source.randrange(VOCAB)
        taken.add((parent, token))
        drafts.append(token)
    return drafts, parents


def rounds_of(daemon):
    """Every answer of the same sessions and rounds, logits of all nodes included."""
    answers, client = [], daemon.client()
    samplings = (
        {"temperature": 0.0, "seed": "1"},
        {"temperature": 1.1, "top_p": 0.9, "seed": "77"},
        {"rule": "greedy", "seed": "3"},
    )
    for number, sampling in enumerate(samplings):
        source = random.Random(number)
        prompt = [source.randrange(VOCAB) for _ in range(30 + 40 * number)]
        session = Session(client, prompt, sampling=sampling)
        answers.append(stable(session.state))
        for _ in range(ROUNDS):
            drafts, parents = random_tree(source, source.randrange(1, 24))
            want = {"logits": {}, "top_k": 4}
            answers.append(stable(session.verify(drafts, parents, want=want)))
        answers.append(stable(session.decode(3)))
        body = {"tokens": prompt, "tree": {"tokens": [1, 2, 3], "parents": [-1, 0, 0]}, "sampling": sampling}
        answers.append(stable(client.post("/v1/verify", body)))
        session.close()
    client.close()
    return answers


def await_rounds(client, count):
    """Totals once so many judgements are in; the oracles run behind the answers."""
    ends_at = time.monotonic() + 300  # under a sanitizer, on a loaded machine
    while True:
        totals = client.get("/v1/parity")
        if sum(totals["rounds"].values()) >= count or time.monotonic() > ends_at:
            return totals


class ShadowTest(unittest.TestCase):
    maxDiff = 2000

    def test_answers_are_the_same_with_and_without(self):
        for dtype in ("f32",) if RACES else ("f32", "bf16"):
            with start(PLAIN, "--kv-dtype", dtype) as daemon:
                without = rounds_of(daemon)
            with start(PLAIN, "--kv-dtype", dtype, "--shadow", "all", "--shadow-path-p", "0.3") as daemon:
                judged = rounds_of(daemon)
                client = daemon.client()
                totals = await_rounds(client, ROUNDS)
                client.close()
            self.assertEqual(len(without), len(judged))
            for plain, shadowed in zip(without, judged):
                self.assertEqual(plain, shadowed)
            self.assertEqual(totals["rounds"]["violation"], 0, totals)
            self.assertGreater(totals["rounds"]["exact"] + totals["rounds"]["near_tie"], 0)

    def test_a_comparison_counts_once(self):
        for options in ((), ("--shadow-path-p", "1")):
            with start(PLAIN, *options) as daemon:
                client = daemon.client()
                for number in range(1, 4):
                    self.assertTrue(client.post("/v1/parity", {})["ok"])
                    rounds = client.get("/v1/parity")["rounds"]
                    self.assertEqual((sum(rounds.values()), rounds["skipped"]), (number, 0), rounds)
                client.close()

    @numbers
    def test_an_undecided_router_is_no_violation(self):
        """Two experts of row 120 of this text are 5e-6 apart, so prefill and oracle may each choose another: what
        follows from either is right, and a router that is wrong elsewhere is still found (http_start)."""
        source = random.Random(1)
        tokens = [source.randrange(307) for _ in range(135 * 201)][-201:]
        command = [PLAIN, os.path.join(os.path.dirname(MODEL), "v3"), "--threads", "1", "--prefix-cache", "off"]
        with Daemon(*command) as daemon:
            client = daemon.client()
            for cut in (201, 140, 110):  # the row well before the tree, and in it
                chain = [*tokens[cut : cut + 60], 5]
                tree = {"tokens": chain, "parents": list(range(-1, len(chain) - 1))}
                report = client.post("/v1/parity", {"tokens": tokens[:cut], "tree": tree})
                self.assertTrue(report["ok"] and report["kv_equal"], report)
            client.close()

    def violation(self, daemon, client, switch):
        """One round with the fault switched on; the entry that the path oracle's violation leaves."""
        session = Session(
            client, list(range(20)), sampling={"temperature": 0.7, "seed": "5"}, stop={"token_ids": [250, 251], "max_len": 90}
        )
        with open(switch, "w", encoding="ascii"):
            pass
        session.verify([3, 4, 5], [0, 0, 1])
        totals = await_rounds(client, 1)  # the path's word: nobody asked the kernel's
        self.assertEqual(totals["rounds"]["violation"], 1, totals)
        self.assertEqual([entry["kind"] for entry in totals["violations"]], ["path"])
        return totals["violations"][0]

    def run_cli(self, daemon, path):
        command = [CLI, "parity", "--url", f"http://{daemon.host}:{daemon.port}", "--run", path]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def test_a_path_reproducer_fails_again(self):
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            env = {"TV_PLANT": "late", "TV_PLANT_FILE": switch, "XDG_STATE_HOME": folder}
            with start(PLANTED, "--shadow-path-p", "1", env=env) as daemon:
                client = daemon.client()
                bystander = Session(client, [1, 2, 3])
                sock = socket.create_connection((daemon.host, daemon.port), timeout=300)
                stream = Stream(sock, CONTRACT, f"/v1/sessions/{bystander.id}/events")
                entry = self.violation(daemon, client, switch)
                told = {name: entry[name] for name in ("n", "at", "kind")}
                self.assertEqual(stream.find("parity"), ("parity", None, told))  # whoever listens is told
                bystander.close()
                self.assertEqual([event.name for event in stream.rest()], ["end"])
                stream.close()
                self.assertTrue(entry["reproducer"])
                body = client.get(f"/v1/parity/violations/{entry['n']}")
                self.assertEqual(body["stop"], {"token_ids": [250, 251], "max_len": 90})
                self.assertEqual(body["sampling"]["seed"], "5")
                kept = os.path.join(folder, "treeverify", "violation-00000001.json")
                with open(kept, encoding="ascii") as file:
                    self.assertEqual(json.load(file), body)
                again = self.run_cli(daemon, kept)
                self.assertEqual(again.returncode, 1, again)
                self.assertIn("DISAGREE", again.stdout)
                client.close()
            with start() as daemon:
                self.assertEqual(self.run_cli(daemon, kept).returncode, 0)

    def test_a_round_behind_nothing_is_judged(self):
        """A one-shot call without a prompt: both oracles judge it, and a violation leaves a body that fails again."""
        tree = {"tokens": [3, 4, 5], "parents": [-1, 0, 0]}
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            env = {"TV_PLANT": "late", "TV_PLANT_FILE": switch, "XDG_STATE_HOME": folder}
            with start(PLANTED, "--shadow", "all", "--shadow-path-p", "1", env=env) as daemon:
                client = daemon.client()
                client.post("/v1/verify", {"tokens": [], "tree": tree})
                totals = await_rounds(client, 2)
                self.assertEqual((totals["rounds"]["exact"], totals["rounds"]["skipped"]), (2, 0), totals)
                with open(switch, "w", encoding="ascii"):
                    pass
                client.post("/v1/verify", {"tokens": [], "tree": tree})
                totals = await_rounds(client, 4)
                self.assertEqual((totals["rounds"]["violation"], totals["rounds"]["skipped"]), (1, 0), totals)
                (entry,) = totals["violations"]
                self.assertEqual((entry["kind"], entry["reproducer"]), ("path", True))
                body = client.get(f"/v1/parity/violations/{entry['n']}")
                self.assertEqual((body["tokens"], body["tree"]), ([], tree))
                self.assertFalse(client.post("/v1/parity", body)["ok"])
                client.close()

    @numbers
    def test_a_move_that_fails_is_found(self):
        """The commit of a round whose second accepted node does not lie second; its reproducer fails again."""
        greedy = {"rule": "greedy", "seed": "3"}
        with tempfile.TemporaryDirectory() as folder:
            env = {"TV_PLANT": "commit", "XDG_STATE_HOME": folder}
            with start(PLANTED, "--shadow", "all", "--shadow-path-p", "1", env=env) as daemon:
                client = daemon.client()
                session = Session(client, [3, 4, 5], sampling=greedy)
                drawn = Session(client, [3, 4, 5, session.state["pending"]], sampling=greedy).state["pending"]
                answer = session.verify([(drawn + 1) % VOCAB, drawn], [0, 0])
                self.assertEqual((answer["new_tokens"][0], len(answer["new_tokens"])), (drawn, 2))
                totals = await_rounds(client, 2)  # no prompt is judged
                self.assertEqual(totals["rounds"]["violation"], 2, totals)
                self.assertEqual({entry["kind"] for entry in totals["violations"]}, {"path"})
                kept = os.path.join(folder, "treeverify", "violation-00000001.json")
                again = self.run_cli(daemon, kept)
                self.assertEqual(again.returncode, 1, again)
                client.close()
            with start() as daemon:
                self.assertEqual(self.run_cli(daemon, kept).returncode, 0)

    @numbers
    def test_no_folder_is_said(self):
        with tempfile.TemporaryDirectory() as folder:
            switch = os.path.join(folder, "on")
            env = {"TV_PLANT": "late", "TV_PLANT_FILE": switch, "STATE_DIRECTORY": os.path.join(folder, "gone")}
            with start(PLANTED, "--shadow-path-p", "1", env=env) as daemon:
                client = daemon.client()
                entry = self.violation(daemon, client, switch)
                self.assertFalse(entry["reproducer"])
                status, _, _ = client.raw("GET", f"/v1/parity/violations/{entry['n']}")
                self.assertEqual(status, 404)
                client.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
