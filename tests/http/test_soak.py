"""R21: mixed load for TV_SOAK_SECONDS (8): sessions that come and go, rounds, forks, rollbacks, clients that break off.

Between the first quarter and the last the daemon may not grow: resident memory (1 %, and 1 MiB of noise in a short
run), descriptors, threads; at the end nothing is open, and the laws of the metrics hold (test_metrics.py). Longer:
TV_SOAK_SECONDS=86400 python3 tests/http/test_soak.py.
"""

import os
import random
import threading
import time
import unittest

from harness import SANITIZED, Caller, FixedDaemon, median, request_bytes, round_body, verify_path, wait_until
from metrics import growing, parse
from test_metrics import laws, scrape

SECONDS = float(os.environ.get("TV_SOAK_SECONDS", "8"))
NOISE_KIB = 1024
LEAST = 6  # sessions of each, in whatever time


class Drafter(threading.Thread):
    """Sessions of a few rounds each, until it is told to end."""

    def __init__(self, daemon, seed, end):
        super().__init__(daemon=True)
        self.service, self.random, self.end = daemon, random.Random(seed), end
        self.sessions = self.rounds = self.broken = 0
        self.error = None

    def run(self):
        try:
            while time.monotonic() < self.end or self.sessions < LEAST:
                self.session()
        except (AssertionError, OSError) as error:
            self.error = error

    def session(self):
        caller = Caller(self.service)
        state = caller.session(tokens=[self.random.randrange(300) for _ in range(self.random.randrange(1, 200))], lease_s=60)
        path = f"/v1/sessions/{state['session']}"
        self.sessions += 1
        for _ in range(self.random.randrange(1, 12)):
            drafts = [self.random.randrange(300) for _ in range(self.random.randrange(0, 16))]
            drafts = list(dict.fromkeys(drafts))
            body = round_body(state, drafts, [0] * len(drafts))
            if self.random.randrange(20) == 0:  # half a request, and gone; the round was never heard of
                with self.service.connect() as sock:
                    sock.sendall(request_bytes("POST", verify_path(state), b'{"seq"')[: self.random.randrange(10, 150)])
                self.broken += 1
            answer = caller.call("POST", verify_path(state), body)
            assert answer.status == 200, answer.body
            state.update(answer.json)
            self.rounds += 1
            if self.random.randrange(8) == 0 and state["committed_len"] > 2:
                back = {"seq": state["next_seq"], "epoch": state["epoch"], "expected_len": state["committed_len"]}
                answer = caller.call("POST", f"{path}/rollback", dict(back, len=state["committed_len"] - 1))
                assert answer.status == 200, answer.body
                state.update(answer.json)
            if self.random.randrange(8) == 0:
                answer = caller.call("POST", f"{path}/fork", {"epoch": state["epoch"]})
                assert answer.status == 201, answer.body
                assert caller.call("DELETE", f"/v1/sessions/{answer.json['session']}").status == 204
        assert caller.call("DELETE", path).status == 204
        caller.close()


class SoakTest(unittest.TestCase):
    def test_nothing_grows(self):
        with FixedDaemon("--max-sessions", "64") as daemon:
            end = time.monotonic() + SECONDS
            workers = [Drafter(daemon, seed, end) for seed in range(4)]
            for worker in workers:
                worker.start()
            sizes, last = [], parse(scrape(daemon))
            while time.monotonic() < end:
                threading.Event().wait(SECONDS / 40)
                sizes.append((daemon.resident_kib(), self.threads(daemon)))
                now = parse(scrape(daemon))
                self.assertEqual(growing(last, now), [])
                last = now
            for worker in workers:
                worker.join(timeout=120)
                self.assertFalse(worker.is_alive())
                self.assertIsNone(worker.error)
            sessions, rounds, broken = (sum(getattr(worker, name) for worker in workers) for name in ("sessions", "rounds", "broken"))
            self.assertGreater(min(sessions, rounds), 20)
            self.assertGreater(broken, 0)
            quarter = max(1, len(sizes) // 4)
            early, late = median([kib for kib, _ in sizes[quarter : 2 * quarter]]), median([kib for kib, _ in sizes[-quarter:]])
            self.assertEqual(len({count for _, count in sizes}), 1, "threads come or go")
            if not SANITIZED:  # their own memory grows
                self.assertLess(late - early, early * 0.01 + NOISE_KIB)
            wait_until(lambda: daemon.stat()[1] == 0, 30, "no context is open")
            idle = daemon.fds()
            with FixedDaemon("--max-sessions", "64") as fresh:
                wait_until(lambda: daemon.fds() <= fresh.fds(), 60, "no descriptor is left")
            laws(parse(scrape(daemon)))
            print(f"{SECONDS:.0f} s: {sessions} sessions, {rounds} rounds, {broken} broken off; {early} to {late} KiB, {idle} descriptors")

    def threads(self, daemon):
        return len(os.listdir(f"/proc/{daemon.process.pid}/task"))


if __name__ == "__main__":
    unittest.main(verbosity=1)
