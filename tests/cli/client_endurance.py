"""10^5 rounds of both clients through proxies that lose, cut, repeat and reorder: no token lost, none twice, without code
in the caller.

usage: client_endurance.py DRIVE TREEVERIFYD-FIXED MODEL_DIR TEXT

The engine has fixed answers, so that the rounds cost what the protocol costs. Three quarters of the rounds are the C
library's (drive.c), a quarter the Python client's, where httpx is installed (else all are the C library's). TV_TEST_SCALE
below 1 takes a few hundred.
"""

import importlib.util
import os
import subprocess
import sys
import threading
import time
import unittest

from leash import GREEDY, SCALE, SEEDED, LeashTest, joined

from fault_proxy import FAULTS, FaultProxy

ROUNDS = int(100_000 * SCALE) if SCALE >= 1 else max(200, int(1000 * SCALE))
SEED = int(os.environ.get("TV_TEST_SEED", "20261130"))
HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(HERE, "..", "..", "clients", "python", "src")
PYTHON = importlib.util.find_spec("httpx") is not None and importlib.util.find_spec("numpy") is not None
DRIVES, LENGTH, STEP = 3, 740, 5


class Endurance(LeashTest):
    def cases(self, count):
        """(prompt, sampling, the text behind it): what the server decodes alone."""
        chosen = [(prompt, (GREEDY, SEEDED)[at % 2]) for at, prompt in enumerate(self.prompts(count))]
        return [(prompt, sampling, self.plain(prompt, LENGTH + STEP, sampling)) for prompt, sampling in chosen]

    def c_rounds(self, url, cases, wanted):
        with self.drive(url) as drive:
            done = tokens = at = 0
            while done < wanted:
                prompt, sampling, text = cases[at % len(cases)]
                at += 1
                self.assertEqual(drive.create(prompt, sampling)["pending"], text[0])
                said = drive.say("along", STEP, min(LENGTH - STEP, 4 * (wanted - done)), joined(text))
                self.assertEqual(said["new"], text[1 : 1 + len(said["new"])])
                self.assertEqual([*said["text"], said["pending"]], [*prompt, text[0], *said["new"]])
                done, tokens = done + said["guess"], tokens + len(said["new"])
                drive.say("delete")
        return done, tokens

    def python_rounds(self, url, cases, wanted):
        """In a process of its own, so that it does not wait for this one's threads."""
        command = [sys.executable, os.path.join(HERE, "python_rounds.py"), url]
        words = "\n".join(map(str, (cases, wanted, LENGTH)))
        env = dict(os.environ, PYTHONPATH=PACKAGE)
        got = subprocess.run(command, input=words, capture_output=True, text=True, env=env, timeout=900)
        self.assertEqual(got.returncode, 0, got.stderr)
        return tuple(map(int, got.stdout.split()))

    def test_a_hundred_thousand_rounds(self):
        started = time.monotonic()
        ours, theirs = (ROUNDS * 3 // 4, ROUNDS // 4) if PYTHON else (ROUNDS, 0)
        cases = self.cases(2 * DRIVES)
        proxies = [FaultProxy(self.daemon.host, self.daemon.port, SEED + number) for number in range(2)]
        urls = [f"http://127.0.0.1:{proxy.port}" for proxy in proxies]
        counted, failed = [], []

        def run(rounds, *arguments):
            try:
                counted.append(rounds(*arguments))
            except BaseException as error:  # told by the test's own thread
                failed.append(error)

        work = [(self.c_rounds, urls[n % 2], cases[n::DRIVES], -(-ours // DRIVES)) for n in range(DRIVES)]
        if PYTHON:
            work.append((self.python_rounds, urls[1], cases[:2], theirs))
        threads = [threading.Thread(target=run, args=one) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        faults = [proxy.close() for proxy in proxies]
        self.assertEqual(failed, [])
        total = {name: sum(one[name] for one in faults) for name in faults[0]}
        rounds, tokens = sum(done for done, _ in counted), sum(got for _, got in counted)
        print(f"{rounds} rounds, {tokens} tokens in {time.monotonic() - started:.1f} s: {counted}, faults {total}")
        self.assertGreaterEqual(rounds, ROUNDS)
        self.assertGreater(sum(total[name] for name in FAULTS), rounds // 20)


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main(verbosity=2)
