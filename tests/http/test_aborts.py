"""B47, B48: clients that leave at any moment leave nothing behind.

10,000 aborts; under a sanitizer 500 times TV_TEST_SCALE. The seed is printed.
"""

import json
import os
import random
import re
import socket
import struct
import time
import unittest

from harness import (
    SANITIZED, Caller, FixedDaemon, Prober, Reader, Stopwatch, request_bytes, round_body, sized, verify_path, wait_until,
)
from test_metrics import come_to_rest

# a sanitizer holds back what is freed, so that memory is judged by few
COUNT = sized(500 if SANITIZED else 10000, 10000, 20)
SEED = int(os.environ.get("TV_TEST_SEED", "20240817"))
BODY = json.dumps({"tokens": [1, 2, 3], "tree": {"tokens": [24, 31], "parents": [-1, 0]}}).encode()
BIG = json.dumps(
    {
        "tokens": [1],
        "tree": {"tokens": [10] + list(range(100, 227)), "parents": [-1] + [0] * 127},
        "want": {"logits": {"rows": "all"}},
    }
).encode()
DROP_S, PROBE_S = 0.2, 0.05
RETURN_S = 5
GROWTH_KIB = 16384  # two answers of each size that are on their way, and the allocator's slack


def waiting(caller):
    """Calls in the queue, as /readyz tells."""
    answer = caller.call("GET", "/readyz")
    detail = next(check["detail"] for check in answer.json["checks"] if check["name"] == "worker")
    return int(re.search(r"(\d+) calls? waits?", detail).group(1))


def leave(sock, how):
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif how == "half":
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer was faster
    sock.close()


class AbortTest(unittest.TestCase):
    def abort_once(self, daemon, rng):
        data = request_bytes("POST", "/v1/verify", rng.choice((BODY, BIG)))
        moment = rng.choice(("head", "body", "sent", "partly read", "answered"))
        sock = daemon.connect()
        border = data.index(b"\r\n\r\n") + 4
        if moment == "head":
            sock.sendall(data[: rng.randrange(border)])
        elif moment == "body":
            sock.sendall(data[: rng.randrange(border, len(data))])
        else:
            sock.sendall(data)
        if moment == "partly read":
            sock.recv(rng.randrange(1, 2000))
        elif moment == "answered":
            Reader(sock).answer("POST", "/v1/verify")
        leave(sock, rng.choice(("reset", "close", "half")))

    def test_b47_aborts_at_random_moments(self):
        print(f"seed {SEED}, {COUNT} aborts")
        rng = random.Random(SEED)
        with FixedDaemon() as daemon:
            probe = Caller(daemon, admin=True)
            self.assertEqual(waiting(probe), 0)
            fds = daemon.fds()
            self.abort_many(daemon, rng, COUNT // 10)
            self.nothing_left(daemon, probe, fds)
            resident = daemon.resident_kib()  # buffers have their size now
            with Prober(daemon, admin=False) as healthy:
                start = time.monotonic()
                self.abort_many(daemon, rng, COUNT - COUNT // 10)
                seconds = time.monotonic() - start
                returned_s = self.nothing_left(daemon, probe, fds + 1)  # and the prober's
            growth = daemon.resident_kib() - resident
            print(
                f"{seconds:.1f} s; descriptors back after {returned_s * 1e3:.0f} ms; resident {resident} KiB, "
                f"growth {growth} KiB; healthz p99 {healthy.p99() * 1e3:.1f} ms, {healthy.failures} failures"
            )
            self.assertEqual(healthy.failures, 0)
            self.assertLess(growth, GROWTH_KIB)
            probe.close()
            caller = Caller(daemon)
            self.assertEqual(caller.call("POST", "/v1/verify", BODY).status, 200)
            caller.close()
            come_to_rest(daemon)  # every page, call and gauge

    def abort_many(self, daemon, rng, count):
        for i in range(count):
            if i % 100 == 50:
                daemon.hold()
            elif i % 100 == 60:
                daemon.release()
            if i % 100 in range(50, 60):
                self.abort_held(daemon, rng)
            else:
                self.abort_once(daemon, rng)
        daemon.release()

    def nothing_left(self, daemon, probe, fds):
        """Far below the limits on headers, body and idling (10 to 30 s): descriptors that only those give
        back are ends of connections that nobody has read."""
        start = time.monotonic()
        wait_until(lambda: daemon.fds() <= fds, RETURN_S, "descriptors are given back")
        returned_s = time.monotonic() - start
        wait_until(lambda: waiting(probe) == 0, 60, "the queue is empty")
        wait_until(lambda: daemon.stat()[1] == 0, 60, "no context is open")
        return returned_s

    def abort_held(self, daemon, rng):
        """The call cannot be answered now: it is left queued or running."""
        sock = daemon.connect()
        sock.sendall(request_bytes("POST", "/v1/verify", BODY))
        leave(sock, rng.choice(("reset", "close", "half")))

    def test_b47_end_that_comes_with_the_last_bytes(self):
        """One edge of epoll for both: libmicrohttpd alone reads the bytes and never the end.

        In the middle of a head, in the middle of a body, and behind a whole request, whose answer still comes."""
        whole = request_bytes("GET", "/healthz")
        part = request_bytes("POST", "/v1/verify", BODY)
        with FixedDaemon() as daemon:
            probe = Caller(daemon, admin=True)
            self.assertEqual(waiting(probe), 0)
            fds = daemon.fds()
            socks = []
            for _ in range(20):
                for data in (part[:9], part[:40], part[:-10], whole, whole + whole, whole + part[:40]):
                    sock = daemon.connect(timeout=5)
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    socks.append((sock, data.count(whole)))
            wait_until(lambda: daemon.fds() <= fds, RETURN_S, "descriptors are given back")
            for sock, answers in socks:
                reader = Reader(sock)
                for _ in range(answers):
                    self.assertEqual(reader.answer("GET", "/healthz").status, 200)
                self.assertTrue(reader.closed())
                sock.close()
            probe.close()

    def held_pair(self, daemon):
        """Two sessions; the first one's round is inside the engine, the second one's is queued."""
        callers = [Caller(daemon), Caller(daemon)]
        states = [caller.session() for caller in callers]
        probe = Caller(daemon, admin=True)
        launches = daemon.stat()[0]
        daemon.hold()
        bodies = [json.dumps(round_body(state)).encode() for state in states]
        callers[0].sock.sendall(request_bytes("POST", verify_path(states[0]), bodies[0]))
        wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the first round is launched")
        callers[1].sock.sendall(request_bytes("POST", verify_path(states[1]), bodies[1]))
        wait_until(lambda: waiting(probe) == 1, 60, "the second round is queued")
        return callers, states, bodies, probe

    def judge(self, seconds, limit_s, what):
        print(f"{what} in {seconds * 1e3:.1f} ms of {limit_s * 1e3:.0f}")
        if not SANITIZED:
            self.assertLess(seconds, limit_s, what)

    def test_b48_queued_round_of_a_client_that_left_is_dropped(self):
        for how in ("close", "reset", "half"):
            with self.subTest(how), FixedDaemon() as daemon:
                callers, states, bodies, probe = self.held_pair(daemon)
                watch = Stopwatch(daemon.process)
                leave(callers[1].sock, how)
                wait_until(lambda: waiting(probe) == 0, 60, "the queued round is dropped")
                self.judge(watch.seconds(), DROP_S, f"{how}: dropped")
                daemon.release()
                self.assertEqual(callers[0].reader.answer("POST", verify_path(states[0])).status, 200)
                again = Caller(daemon)
                state = again.call("GET", f"/v1/sessions/{states[1]['session']}").json
                self.assertEqual((state["committed_len"], state["next_seq"]), (3, 1))
                answer = again.call("POST", verify_path(states[1]), bodies[1])
                self.assertEqual((answer.status, answer.json["replayed"]), (200, False))
                for caller in (callers[0], again, probe):
                    caller.close()

    def test_b48_running_round_of_a_client_that_left_is_stored(self):
        for how in ("close", "reset", "half"):
            with self.subTest(how), FixedDaemon() as daemon:
                callers, states, bodies, probe = self.held_pair(daemon)
                leave(callers[0].sock, how)
                self.assertEqual(waiting(probe), 1)
                daemon.release()
                self.assertEqual(callers[1].reader.answer("POST", verify_path(states[1])).status, 200)
                again = Caller(daemon)
                answer = again.call("POST", verify_path(states[0]), bodies[0])
                self.assertEqual((answer.status, answer.json["replayed"]), (200, True))
                self.assertEqual(answer.json["committed_len"], 4)
                for caller in (callers[1], again, probe):
                    caller.close()

    def test_probes_answer_while_the_engine_is_held(self):
        with FixedDaemon() as daemon:
            callers, _, _, probe = self.held_pair(daemon)
            times = []
            for _ in range(50):
                watch = Stopwatch(daemon.process)
                self.assertEqual(probe.call("GET", "/healthz").status, 200)
                self.assertEqual(probe.call("GET", "/readyz").status, 200)
                times.append(watch.seconds())
            self.judge(max(times), PROBE_S, "two probes")
            daemon.release()
            for caller in (*callers, probe):
                caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
