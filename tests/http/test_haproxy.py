"""Two daemons behind a real HAProxy with the configuration that is shipped: sessions stay where they are, one daemon
drains, ends and comes back, and what the library hides from a daemon (B50) reaches none behind the proxy.

HAProxy is `haproxy` of the path; without it the test is skipped (exit 77).
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

from harness import Caller, FixedDaemon, Reader, own_port, request_bytes, round_body, verify_path, wait_until
from test_headers import CASES, HIDDEN

PROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
CONFIG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy", "haproxy", "haproxy.cfg")
NAME = "verify.example"
OPTIONS = ("--hosts", NAME, "--max-sessions", "64", "--drain-grace-s", "10", "--drain-max-s", "20", "--log-level", "debug")


class Front:
    """What a Caller talks to."""

    def __init__(self, port):
        self.port = port

    def connect(self, admin=False, timeout=60):
        return socket.create_connection(("127.0.0.1", self.port), timeout=timeout)


class ProxyTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "haproxy.cfg")
        self.port = own_port()
        self.daemons = [FixedDaemon(*OPTIONS).__enter__() for _ in range(2)]
        self.addCleanup(self.stop)
        self.configure(folder.name)
        checked = subprocess.run([PROXY, "-c", "-f", self.path], capture_output=True, text=True)
        self.assertEqual((checked.returncode, "WARNING" in checked.stderr), (0, False), checked.stderr)
        self.proxy = subprocess.Popen([PROXY, "-db", "-f", self.path])
        self.addCleanup(self.end)
        self.front = Front(self.port)
        wait_until(self.serves, 60, "the proxy serves")

    def end(self):
        self.proxy.terminate()
        self.proxy.wait(timeout=20)

    def stop(self):
        for daemon in self.daemons:
            daemon.stop()
            daemon.log.close()
            daemon.process.stdout.close()

    def configure(self, folder):
        """The file as it is shipped, with this test's addresses."""
        with open(CONFIG) as file:
            text = file.read()
        a, b = self.daemons
        for old, new in (
            ("bind 127.0.0.1:8470", f"bind 127.0.0.1:{self.port}"),
            ("127.0.0.1:8471 check port 8472", f"127.0.0.1:{a.port} check port {a.admin_port}"),
            ("127.0.0.1:8481 check port 8482", f"127.0.0.1:{b.port} check port {b.admin_port}"),
            ("/run/haproxy/treeverify.sock", os.path.join(folder, "sock")),
        ):
            self.assertEqual(text.count(old), 1, old)
            text = text.replace(old, new)
        with open(self.path, "w") as file:
            file.write(text)

    def status(self, server):
        """What the proxy knows of it."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(os.path.join(os.path.dirname(self.path), "sock"))
            sock.sendall(b"show stat\n")
            text = sock.makefile().read()
        names = text.splitlines()[0].split(",")
        for line in text.splitlines()[1:]:
            row = dict(zip(names, line.split(",")))
            if row.get("svname") == server:
                return row["status"]
        return ""

    def serves(self):
        try:
            with self.front.connect() as sock:
                sock.sendall(request_bytes("GET", "/v1/sessions", headers=(f"Host: {NAME}",), host=False))
                answer = Reader(sock).answer()
                return answer is not None and answer.status == 200
        except OSError:
            return False

    def call(self, method, target, body=None, headers=()):
        """On a connection of its own, as the clients of many drafters are."""
        caller = Caller(self.front)
        try:
            return caller.call(method, target, body, headers)
        finally:
            caller.close()

    def create(self, **fields):
        """As a client does: again when the answer says later."""
        for _ in range(100):
            answer = self.call("POST", "/v1/sessions", dict({"tokens": [1, 2, 3]}, **fields))
            if answer.status != 503:
                break
            time.sleep(0.1)
        self.assertEqual(answer.status, 201, answer.body)
        return answer.json

    def held(self, daemon):
        caller = Caller(daemon)
        try:
            return {state["session"] for state in caller.call("GET", "/v1/sessions").json["sessions"]}
        finally:
            caller.close()

    def rounds(self, states, count=2):
        for _ in range(count):
            for state in states:
                answer = self.call("POST", verify_path(state), round_body(state))
                self.assertEqual(answer.status, 200, answer.body)
                state.update(answer.json)

    def test_sessions_stay_and_daemons_drain(self):
        a, b = self.daemons
        states = [self.create() for _ in range(10)]
        at_a, at_b = self.held(a), self.held(b)
        self.assertEqual(at_a | at_b, {state["session"] for state in states})
        self.assertTrue(at_a and at_b, "both daemons have sessions")
        self.rounds(states)
        large = self.create(tokens=[1] * 30000)  # more than the proxy keeps of a body
        self.rounds([large])
        fork = self.call("POST", f"/v1/sessions/{states[0]['session']}/fork", {"epoch": states[0]["epoch"]})
        self.assertEqual(fork.status, 201, fork.body)
        self.rounds([dict(states[0], **fork.json)])
        for state in states[:4]:  # the session is in the body
            score = self.call("POST", "/v1/score", {"session": state["session"], "tree": {"tokens": [state["pending"]], "parents": [-1]}})
            self.assertEqual(score.status, 200, score.body)
        once = [self.call("POST", "/v1/sessions", {"tokens": [5]}, ["Idempotency-Key: again"]).body for _ in range(4)]
        self.assertEqual(len(set(once)), 1)
        self.drain(a, b, states)

    def drain(self, a, b, states):
        staying = [state for state in states if state["session"] in self.held(b)]
        leaving = [state for state in states if state["session"] not in self.held(b)]
        busy = Caller(a)
        a.hold()  # a round that runs, so that the drain lasts
        with busy.daemon.connect() as sock:
            last = leaving[0]
            sock.sendall(request_bytes("POST", verify_path(last), json.dumps(round_body(last)).encode()))
            a.process.send_signal(signal.SIGTERM)
            wait_until(lambda: self.status("a").startswith("DOWN"), 60, "the proxy knows that a daemon drains")
            before = self.held(b)
            made = {self.create()["session"] for _ in range(8)}
            self.assertEqual(made, self.held(b) - before, "new sessions go where they can stay")
            state = self.call("GET", f"/v1/sessions/{leaving[1]['session']}")
            self.assertEqual(state.status, 200, "who drains still has its sessions")
            self.rounds(staying)
            a.release()
            self.assertEqual(Reader(sock).answer("POST", verify_path(last)).status, 200)
        a.process.wait(timeout=30)
        self.rounds(staying)
        gone = self.call("POST", verify_path(leaving[1]), round_body(leaving[1]))
        self.assertIn((gone.status, gone.code), ((404, "session-not-found"), (409, "epoch-changed")))

    def test_b50_what_the_library_hides_is_stopped(self):
        second = b"GET /v1/sessions HTTP/1.1\r\nHost: verify.example\r\nX-Request-Id: behind-%d\r\n\r\n"
        hidden = [(name, data) for name, data, expected in CASES if expected == HIDDEN]
        self.assertGreaterEqual(len(hidden), 4)
        for number, (name, data) in enumerate(hidden):
            with self.front.connect(timeout=10) as sock:
                sock.sendall(data.replace(b"Host: localhost", b"Host: verify.example") + second % number)
                sock.shutdown(socket.SHUT_WR)
                got = b""
                while more := sock.recv(65536):
                    got += more
            statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", got)]
            print(f"{statuses}: {name}")
            seen = sum(len(re.findall(rf"\bbehind-{number}\b", daemon.text())) > 0 for daemon in self.daemons)
            with self.subTest(name):
                # refused, and nothing behind it is a request; or taken, and so is what comes after it, by both alike
                self.assertTrue(statuses and (statuses[0] == 400 or statuses[-1] == 200), got)
                self.assertEqual(seen, 0 if statuses[0] == 400 else len(statuses) - 1, got)


if __name__ == "__main__":
    if PROXY is None:
        print("haproxy is not installed")
        sys.exit(77)
    unittest.main(verbosity=1)
