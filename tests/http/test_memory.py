"""R14, F01 to F06: the n-th allocation of a whole daemon fails, for every n of a start, and of a sequence of calls.

A start ends with a documented code, or serves all the same (what failed was of no consequence). A call is answered as
ever, with a 5xx problem, or by a close; afterwards the daemon lives, the same calls work, and nothing is left open.
TV_FAIL_LIBRARY is preloaded into the daemon (tests/fault/fail_nth.c).
"""

import json
import mmap
import os
import struct
import subprocess
import tempfile
import unittest

import harness
from harness import Caller, FixedDaemon, Reader, request_bytes, round_body, sized, verify_path, wait_until

LIBRARY = os.environ.get("TV_FAIL_LIBRARY", "")
OFF = -(1 << 40)
DOCUMENTED = {0, 64, 71, 78}


class Switch:
    def __init__(self, folder):
        self.path = os.path.join(folder, "fail")
        with open(self.path, "wb") as file:
            file.write(struct.pack("<qq", OFF, 0))
        self.file = open(self.path, "r+b")
        self.map = mmap.mmap(self.file.fileno(), 16)
        self.env = {"LD_PRELOAD": LIBRARY, "TV_FAIL_FILE": self.path}

    def arm(self, count):
        self.map[:16] = struct.pack("<qq", count, 0)

    def off(self):
        """How many have failed."""
        failed = struct.unpack("<q", self.map[8:16])[0]
        self.map[:16] = struct.pack("<qq", OFF, 0)
        return failed

    def close(self):
        self.map.close()
        self.file.close()


class MemoryTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.switch = Switch(folder.name)
        self.addCleanup(self.switch.close)

    def start(self, count):
        """Exit code, and whether an allocation has failed."""
        self.switch.arm(count)
        command = [harness.PROGRAM, "--model", "none", "--listen", "127.0.0.1:0", "--drain-grace-s", "0"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ, **self.switch.env)
        )
        line = process.stdout.readline()
        failed = self.switch.off()
        serves = line.startswith(b"listening ")
        if serves:
            process.terminate()
        _, log = process.communicate(timeout=60)
        self.assertIn(process.returncode, DOCUMENTED, (count, line, log))
        self.assertEqual(serves, process.returncode == 0, (count, line, log))
        return process.returncode, failed

    def test_every_allocation_of_a_start(self):
        step = max(1, 6 // sized(1, 6))
        codes, count, failed = {}, 0, 1
        while failed:
            code, failed = self.start(count)
            codes[code] = codes.get(code, 0) + 1
            count += step
        self.assertGreater(count, 50)
        self.assertIn(71, codes)
        print(f"{count} allocations of a start, every {step}: exit codes {codes}")

    def exchange(self, sock, method, target, body=None):
        """The answer, or None for a close."""
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            sock.sendall(request_bytes(method, target, data))
            return Reader(sock).answer(method, target)
        except (ConnectionError, BrokenPipeError):
            return None

    def calls(self, daemon):
        """Every kind of call, and of refusal; those that were answered as they should be."""
        good, state = 0, None
        plan = [
            ("GET", "/healthz", None, 200), ("GET", "/readyz", None, 200), ("GET", "/metrics", None, 200),
            ("POST", "/v1/sessions", {"tokens": list(range(40))}, 201), ("GET", "{}", None, 200),
            ("POST", "{}/verify", round_body, 200), ("POST", "{}/verify", b'{"seq":', 400), ("POST", "{}/decode", b"{}", 400),
            ("POST", "{}/verify", b'{"seq":9,"epoch":"0","expected_len":1,"tree":{"tokens":[1],"parents":[-1]}}', None),
            ("POST", "/v1/verify", {"tokens": [1], "tree": {"tokens": [10], "parents": [-1]}}, 200),
            ("GET", "/v1/sessions", None, 200), ("GET", "/v1/sessions/s_0123456789abcdefghijAB", None, 404),
            ("PUT", "/v1/sessions", None, 405), ("GET", "/v1/nothing", None, 404), ("GET", "{}/rounds/1", None, 200),
            ("POST", "{}/renew", {"lease_s": 60}, 200), ("DELETE", "{}", None, 204),
        ]  # fmt: skip
        sock = None
        for method, target, body, wanted in plan:
            if "{}" in target and state is None:
                continue
            sock = sock or daemon.connect()
            path = target.format(f"/v1/sessions/{state['session']}" if state else "")
            answer = self.exchange(sock, method, path, body(state) if callable(body) else body)
            if answer is None or answer.headers.get("connection", "").lower() == "close":
                sock.close()
                sock = None
            if answer is not None:
                self.assertTrue(wanted in (None, answer.status) or answer.status >= 500 or wanted == 200, (target, answer.body))
                good += wanted is None or answer.status == wanted
                if answer.status == 201:
                    state = answer.json
        if sock is not None:
            sock.close()
        return good, state

    def test_every_allocation_of_calls(self):
        with FixedDaemon("--listen-admin", "off", env=self.switch.env) as daemon:
            everything, _ = self.calls(daemon)
            self.assertEqual(everything, 17)
            step = max(1, 6 // sized(1, 6))
            count, missed, quiet = 0, 0, 0
            while quiet < 3:  # threads allocate in their own order: a few more
                self.switch.arm(count)
                good, state = self.calls(daemon)
                failed = self.switch.off()
                missed += good < everything
                quiet = 0 if failed else quiet + 1
                self.assertIsNone(daemon.process.poll(), daemon.text())
                if state is not None:  # the DELETE itself may have been refused
                    caller = Caller(daemon)
                    self.assertEqual(caller.call("DELETE", f"/v1/sessions/{state['session']}").status, 204)
                    caller.close()
                count += step
            self.assertEqual(self.calls(daemon)[0], everything)
            self.assertGreater(missed, 3)
            caller = Caller(daemon)
            for session in caller.call("GET", "/v1/sessions").json["sessions"]:  # made, and the answer could not be
                caller.call("DELETE", f"/v1/sessions/{session['session']}")
            caller.close()
            wait_until(lambda: daemon.stat()[1] == 0, 30, "no context is open")
            print(f"{count} allocations of 17 calls, every {step}: {missed} sequences had a refusal or a close")


if __name__ == "__main__":
    unittest.main(verbosity=1)
