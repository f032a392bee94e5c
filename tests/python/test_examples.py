"""clients/python/examples as people run them."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

from harness import MODEL, PACKAGE_ENV, ROOT, SCALE, STORE, Daemon, DaemonTest, url_of

import treeverify as tv

PLANTED = os.environ.get("TREEVERIFYD_PLANTED") or os.path.join(ROOT, "build", "tests", "support", "treeverifyd-planted")
EXAMPLES = os.path.join(ROOT, "clients", "python", "examples")
COUNT = 30 if SCALE >= 1 else 8


class ExamplesTest(DaemonTest):
    def run_example(self, name, *arguments, url=None, stdin="", code=0):
        command = [sys.executable, os.path.join(EXAMPLES, name), "--url", url or url_of(self.daemon), *arguments]
        got = subprocess.run(command, input=stdin, capture_output=True, env=PACKAGE_ENV, text=True, timeout=600)
        self.assertEqual(got.returncode, code, f"{command}: {got.stdout} {got.stderr}")
        return got.stdout

    def test_chat(self):
        """Answers are what the model says behind the whole conversation; later turns know what earlier ones computed."""
        turns = [f"And the LORD spake unto Moses, saying, {word} thou this unto the children of Israel;"
                 for word in ("Speak", "Say")]
        lines = self.run_example("chat.py", "--tokens", str(COUNT), stdin="\n".join(turns) + "\n").split("\n")
        history, known = [], []
        for turn, answer, counts in zip(turns, lines[0::2], lines[1::2]):
            history += list(turn.encode()) + [10]
            said = self.plain(history, COUNT)
            said = said[: said.index(10)] if 10 in said else said
            self.assertEqual(answer, bytes(said).decode())
            words = counts.split()
            self.assertEqual(int(words[0].lstrip("(")), len(history))
            known.append(int(words[4]))
            history += [*said, 10]
        self.assertEqual((known[0] % 64, known[1] % 64), (0, 0))
        self.assertGreaterEqual(known[1], 64)

    def test_far(self):
        count = 2 * COUNT
        said = self.run_example("far.py", "--store", STORE, "--tokens", str(count))
        self.assertIn(bytes(self.plain(list(b"Ge1:1 In the beginning God"), count)).decode(), said)
        self.assertRegex(said, r"one round at a time: \d+ tokens/s; sent ahead: \d+ tokens/s")

    @unittest.skipUnless(os.path.exists(PLANTED), "no daemon with a fault")
    def test_replay(self):
        """A violation's reproducer disagrees where the fault is, and agrees where it is not."""
        with tempfile.TemporaryDirectory() as folder:
            switch, kept = os.path.join(folder, "on"), os.path.join(folder, "violation.json")
            env = {"TV_PLANT": "late", "TV_PLANT_FILE": switch, "STATE_DIRECTORY": "", "XDG_STATE_HOME": folder}
            with Daemon(PLANTED, MODEL, "--threads", "1", "--shadow-path-p", "1", env=env) as daemon:
                with tv.Client(url_of(daemon), timeout_s=240) as client:
                    with client.session(list(range(20)), sampling=tv.Sampling(temperature=0.7, seed=5)) as session:
                        with open(switch, "w", encoding="ascii"):
                            pass
                        session.verify(tv.Tree([session.pending, 3, 4, 5], [-1, 0, 0, 1]))
                    while not (listed := client.parity_totals())["violations"]:
                        self.assertEqual(sum(listed["rounds"].values()), 0, listed)
                    with open(kept, "wb") as file:
                        file.write(client.parity_violation(listed["violations"][0]["n"]))
                self.assertIn("DISAGREE", self.run_example("replay.py", kept, url=url_of(daemon), code=1))
            said = self.run_example("replay.py", kept)
        self.assertTrue(json.loads(said[: said.rindex("}") + 1])["ok"])
        self.assertTrue(said.endswith("agree\n"))
