"""What the service manager hears from start to stop (B62), on a socket of the test's own; and the unit itself.

TV_SYSTEMD says whether this build tells it anything: without libsystemd all of it is skipped.
"""

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import unittest

from harness import Caller, FixedDaemon, round_body, verify_path, wait_until
from real import RealDaemon

UNITS = os.environ["TV_UNITS"]
WATCHDOG_S = 60  # of the test itself


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.heard = []
        return self

    def __exit__(self, kind, value, trace):
        self.socket.close()
        self.folder.cleanup()

    def env(self, **more):
        return dict({"NOTIFY_SOCKET": self.path}, **more)

    def hear(self, seconds):
        """Everything that has come, after waiting so long for the first of it."""
        messages = []
        while select.select([self.socket], [], [], 0 if messages else seconds)[0]:
            messages.append(self.socket.recv(4096).decode("ascii"))
        self.heard += messages
        return messages

    def lines(self):
        return [line for message in self.heard for line in message.split("\n")]

    def await_line(self, line):
        def there():
            self.hear(0.05)
            return line in self.lines()

        wait_until(there, WATCHDOG_S, line)


@unittest.skipUnless(os.environ["TV_SYSTEMD"] == "1", "this build has no libsystemd")
class NotifyTest(unittest.TestCase):
    def test_b62_from_start_to_stop(self):
        """READY once, behind the listeners and the self-test; no watchdog unasked; STOPPING at the signal."""
        with Manager() as manager:
            daemon = RealDaemon()
            daemon.env.update(manager.env())
            with daemon:
                manager.await_line("READY=1")
                self.assertIn(f"STATUS=serving on http://127.0.0.1:{daemon.port}", manager.lines())
                self.assertEqual(Caller(daemon, admin=True).call("GET", "/readyz").status, 200)
                daemon.process.send_signal(signal.SIGTERM)
                self.assertEqual(daemon.process.wait(timeout=WATCHDOG_S), 0)
            manager.hear(0)
            lines = [line for line in manager.lines() if not line.startswith(("STATUS=", "EXTEND_TIMEOUT_USEC="))]
            self.assertEqual(lines, ["READY=1", "STOPPING=1"])

    def test_b62_watchdog_follows_the_engine(self):
        """Fed while the engine moves, not while it stands still, and again when it goes on."""
        with Manager() as manager:
            daemon = FixedDaemon("--launch-max-s", "1", env=manager.env(WATCHDOG_USEC="400000"))
            with daemon:
                manager.await_line("READY=1")
                wait_until(lambda: manager.hear(0.05) and manager.lines().count("WATCHDOG=1") >= 5, WATCHDOG_S, "fed")
                caller = Caller(daemon)
                state = caller.session()
                daemon.hold()
                path, body = verify_path(state), round_body(state)
                thread = threading.Thread(target=lambda: caller.call("POST", path, body))
                thread.start()
                manager.await_line("STATUS=the engine makes no progress")
                manager.hear(0)
                probe = Caller(daemon, admin=True)
                self.assertEqual(probe.call("GET", "/readyz").status, 503)
                probe.close()
                self.assertEqual(manager.hear(1.5), [])  # not fed for more than three times its limit
                daemon.release()
                thread.join()
                caller.close()
                manager.await_line("STATUS=serving")
                fed = manager.lines().count("WATCHDOG=1")
                wait_until(lambda: manager.hear(0.05) and manager.lines().count("WATCHDOG=1") > fed, WATCHDOG_S, "again")
            self.assertEqual(manager.lines().count("READY=1"), 1)

    def test_watchdog_of_another_process(self):
        with Manager() as manager:
            with FixedDaemon(env=manager.env(WATCHDOG_USEC="100000", WATCHDOG_PID="1")):
                manager.await_line("READY=1")
                self.assertEqual(manager.hear(0.5), [])

    def test_f44_socket_that_is_gone(self):
        """One warning, and the service goes on."""
        with FixedDaemon(env={"NOTIFY_SOCKET": "/nonexistent/notify", "WATCHDOG_USEC": "100000"}) as daemon:
            caller = Caller(daemon)
            state = caller.session()
            self.assertEqual(caller.call("POST", verify_path(state), round_body(state)).status, 200)
            wait_until(lambda: "cannot be told" in daemon.text(), WATCHDOG_S, "the warning")
            select.select([], [], [], 0.3)
            self.assertEqual(daemon.text().count("cannot be told"), 1)
            caller.close()


class UnitTest(unittest.TestCase):
    """systemd's own word on the unit, where its tools are."""

    UNIT = os.path.join(UNITS, "treeverifyd.service")

    def setUp(self):
        if shutil.which("systemd-analyze") is None:
            self.skipTest("systemd-analyze is not installed")

    def test_r18_score(self):
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=yes", "--threshold=15", "--no-pager", self.UNIT],
            capture_output=True,
            text=True,
        )
        score = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
        if score is None:
            self.skipTest(f"systemd-analyze cannot judge a file here: {done.stderr[:200]}")
        self.assertEqual(done.returncode, 0, done.stdout[-200:])
        self.assertLessEqual(float(score.group(1)), 1.5)
        print(f"exposure level {score.group(1)}")

    def test_verify(self):
        """Clean, with the program that is not installed here replaced by one that is."""
        with open(self.UNIT) as unit, tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "treeverifyd.service")
            with open(path, "w") as copy:
                copy.write(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read(), flags=re.M))
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
        own = [line for line in done.stderr.split("\n") if "treeverifyd" in line]
        self.assertEqual((done.returncode, own), (0, []), done.stderr)

    def test_what_the_daemon_relies_on(self):
        """The exit codes that no restart mends, and times within which the daemon keeps."""
        with open(self.UNIT) as file:
            unit = dict(re.findall(r"^(\w+)=(.*)$", file.read(), re.M))
        self.assertEqual(unit["RestartPreventExitStatus"].split(), ["64", "65", "75", "78"])
        program = os.environ["TREEVERIFYD"]
        text = subprocess.run([program, "--print-config"], capture_output=True, text=True, check=True).stdout
        drain_s = int(re.search(r"^drain_max_s = (\d+)$", text, re.M).group(1))
        self.assertLess(drain_s, int(unit["TimeoutStopSec"]))
        self.assertEqual((unit["Type"], unit["NotifyAccess"]), ("notify", "main"))


if __name__ == "__main__":
    unittest.main(verbosity=1)
