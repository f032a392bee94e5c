"""F42: a log that nobody reads holds up nobody; what is lost of it is counted, and said when it is read again."""

import fcntl
import os
import re
import subprocess
import unittest

from harness import Caller, FixedDaemon, round_body, sized, verify_path
from metrics import parse

LINE = re.compile(r"<[0-7]>[\x20-\x7e]+")
LOST = re.compile(r"<4>warning: (\d+) lines of the log were lost: nobody took them")


class PipedDaemon(FixedDaemon):
    """Its stderr is a small pipe, whose other end reads only when asked to."""

    def __enter__(self):
        self.reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 16384)
        os.set_blocking(self.reader, False)
        command = [self.program, "--model", self.model, "--listen", "127.0.0.1:0", *self.options]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=writer, text=True, env=self.env)
        os.close(writer)
        words = self.process.stdout.readline().split()
        assert len(words) == 4, words
        self.host = "127.0.0.1"
        self.port, self.admin_port = (int(word.rsplit(":", 1)[1]) for word in (words[1], words[3]))
        return self

    def __exit__(self, kind, value, trace):
        code = self.stop()
        if self.reader is not None:
            os.close(self.reader)
        if kind is None and code != 0:
            raise RuntimeError(f"daemon ended with {code}")

    def read(self):
        """What is in the pipe now."""
        data = b""
        while True:
            try:
                got = os.read(self.reader, 65536)
            except BlockingIOError:
                return data.decode("ascii")
            if not got:
                return data.decode("ascii")
            data += got

    def deaf(self):
        os.close(self.reader)
        self.reader = None


class LogTest(unittest.TestCase):
    def lost(self, caller):
        text = caller.call("GET", "/metrics").body.decode()
        return parse(text)["treeverify_log_lines_lost_total"].total()

    def test_f42_nobody_reads(self):
        with PipedDaemon("--log-level", "debug") as daemon:
            caller = Caller(daemon)
            state = caller.session()
            for _ in range(sized(600, 6000, 400)):  # each leaves a line, and the pipe takes some 150
                answer = caller.call("POST", verify_path(state), round_body(state))
                self.assertEqual(answer.status, 200)
                state.update(answer.json)
            lost = self.lost(caller)
            self.assertGreater(lost, 50)
            first = daemon.read().split("\n")
            self.assertEqual(first[-1], "")  # no line is cut
            for line in first[:-1]:
                self.assertRegex(line, LINE)
            self.assertFalse(any(LOST.match(line) for line in first))
            self.assertEqual(caller.call("GET", "/healthz").status, 200)
            text = daemon.read()
            said = LOST.search(text)
            self.assertIsNotNone(said, text)
            self.assertGreaterEqual(int(said.group(1)), lost)
            before = self.lost(caller)
            self.assertEqual(before, int(said.group(1)))  # all of them are known, and no more were lost
            caller.close()

    def test_f42_nobody_is_there(self):
        """The other end has gone: the service goes on, and stops in order."""
        with PipedDaemon("--log-level", "debug") as daemon:
            caller = Caller(daemon)
            state = caller.session()
            daemon.deaf()
            for _ in range(20):
                answer = caller.call("POST", verify_path(state), round_body(state))
                self.assertEqual(answer.status, 200)
                state.update(answer.json)
            self.assertGreaterEqual(self.lost(caller), 20)
            caller.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
