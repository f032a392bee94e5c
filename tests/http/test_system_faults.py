"""F10, F11, F36: no descriptors, no threads, and a wall clock that jumps, under a whole daemon; and a disk that hangs.

TV_FAIL_HOST_LIBRARY is preloaded into the daemon for all but the first (tests/fault/fail_host.c).
"""

import email.utils
import mmap
import os
import re
import resource
import struct
import subprocess
import tempfile
import threading
import time
import unittest

import harness
from harness import Caller, FixedDaemon, round_body, verify_path, wait_until
from real import MODEL, RealDaemon

LIBRARY = os.environ["TV_FAIL_HOST_LIBRARY"]
DESCRIPTORS, WATCH_S, HOUR_S, LEASE_S = 64, 1, 3600, 1
EXIT_FAULT = 70


def live(probe):
    """Sessions, in whatever state."""
    return sum(map(int, re.findall(rb"^treeverify_sessions\{.*\} (\d+)$", probe.call("GET", "/metrics").body, re.M)))


class Host:
    def __init__(self, folder):
        self.path = os.path.join(folder, "host")
        with open(self.path, "wb") as file:
            file.write(struct.pack("<qqqqq", 0, -1, -1, 0, 0))
        self.file = open(self.path, "r+b")
        self.map = mmap.mmap(self.file.fileno(), 40)
        self.env = {"LD_PRELOAD": LIBRARY, "TV_FAIL_HOST": self.path}

    def set(self, shift_s=0, threads=-1, writes=-1, read_ms=0, unwatch_ms=0):
        self.map[:40] = struct.pack("<qqqqq", shift_s, threads, writes, read_ms, unwatch_ms)

    def close(self):
        self.map.close()
        self.file.close()


class SystemFaultsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.host = Host(folder.name)
        self.addCleanup(self.host.close)

    def caller(self, daemon, **how):
        caller = Caller(daemon, **how)
        self.addCleanup(caller.close)
        return caller

    def moved(self, caller, state):
        answer = caller.call("POST", verify_path(state), round_body(state))
        self.assertEqual(answer.status, 200, answer.body)
        return dict(state, **answer.json)

    def used_up(self, daemon):
        """Connections that nobody uses, until no descriptor is left."""
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        crowd = [daemon.connect() for _ in range(2 * DESCRIPTORS)]
        for sock in crowd:
            self.addCleanup(sock.close)
        wait_until(lambda: daemon.fds() == DESCRIPTORS, 10, "all descriptors in use")
        return crowd

    def assert_rests(self, daemon, meanwhile):
        spent, start = daemon.cpu_s(), time.monotonic()
        while time.monotonic() - start < WATCH_S:
            meanwhile()
            time.sleep(0.1)
        share = (daemon.cpu_s() - spent) / (time.monotonic() - start)
        print(f"{share:.3f} of a processor without descriptors")
        self.assertLess(share, 0.1)

    def test_f10_descriptors_are_used_up(self):
        """Who is there is served, who comes waits, the processor rests; and all is well when some leave."""
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            caller, probe = self.caller(daemon), self.caller(daemon, admin=True)
            state = caller.session()
            self.assertEqual(probe.call("GET", "/healthz").status, 200)
            crowd = self.used_up(daemon)

            def served():
                nonlocal state
                state = self.moved(caller, state)
                self.assertEqual(probe.call("GET", "/healthz").status, 200)

            self.assert_rests(daemon, served)
            for sock in crowd:
                sock.close()
            late = self.caller(daemon)
            self.assertEqual(late.call("GET", "/healthz").status, 200)
            self.moved(caller, state)
            wait_until(lambda: daemon.fds() < DESCRIPTORS // 2, 10, "descriptors back")
            self.assertEqual(daemon.stop(), 0)

    def test_f10_a_listener_without_connections(self):
        """A thread that has none has nothing to wait for but descriptors: it rests too, and serves when there are some."""
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            caller = self.caller(daemon)
            state = caller.session()
            crowd = self.used_up(daemon)
            crowd.append(daemon.connect(admin=True))
            self.addCleanup(crowd[-1].close)

            def served():
                nonlocal state
                state = self.moved(caller, state)

            self.assert_rests(daemon, served)
            for sock in crowd:
                sock.close()
            self.assertEqual(self.caller(daemon, admin=True).call("GET", "/healthz").status, 200)
            self.assertEqual(daemon.stop(), 0)
            self.assertIn("are used up; new ones wait", daemon.text())

    def test_f11_threads_cannot_be_made(self):
        """Each thread of a start in turn: exit 71 before anybody is told that it listens."""
        command = [harness.PROGRAM, "--model", "none", "--listen", "127.0.0.1:0", "--drain-grace-s", "0"]
        for count in range(100):
            self.host.set(threads=count)
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env=dict(os.environ, **self.host.env)
            )
            serves = process.stdout.readline().startswith("listening ")
            if serves:
                process.terminate()
            _, log = process.communicate(timeout=60)
            if serves:
                self.assertEqual(process.returncode, 0, log)
                break
            self.assertEqual(process.returncode, 71, (count, log))
        print(f"{count} threads of a start")
        self.assertGreater(count, 2)

    def test_stop_beside_calls(self):
        """Whoever stops the listeners is late, whoever serves them is not: an end like any other, each call answered or closed."""
        self.host.set(unwatch_ms=100)
        with FixedDaemon("--drain-grace-s", "0", env=self.host.env) as daemon:
            callers = [self.caller(daemon, admin=turn % 3 == 0) for turn in range(6)]
            ended = [False] * len(callers)

            def calls(turn):
                try:
                    while True:
                        callers[turn].call("GET", "/healthz")
                except (OSError, AssertionError) as error:
                    ended[turn] = isinstance(error, OSError) or "closed without an answer" in str(error)

            threads = [threading.Thread(target=calls, args=(turn,)) for turn in range(len(callers))]
            for thread in threads:
                thread.start()
            self.assertEqual(daemon.stop(), 0, daemon.text())
            for thread in threads:
                thread.join()
            self.assertEqual(ended, [True] * len(callers))

    def test_f36_the_wall_clock_jumps(self):
        """By hours, both ways: sessions live, a lease ends when it would have, and the jump is seen in Date."""
        with FixedDaemon("--drain-grace-s", "0", env=self.host.env) as daemon:
            caller, probe = self.caller(daemon), self.caller(daemon, admin=True)
            state = caller.session(lease_s=30)
            for shift_s in (HOUR_S, -HOUR_S):
                self.host.set(shift_s=shift_s)
                answer = caller.call("GET", "/healthz")
                told = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
                self.assertAlmostEqual(told - time.time(), shift_s, delta=10)
                start = time.monotonic()
                caller.session(lease_s=LEASE_S)
                self.host.set(shift_s=-shift_s)
                wait_until(lambda: live(probe) == 1, 20, "the lease ends")
                self.assertGreaterEqual(time.monotonic() - start, LEASE_S)
                state = self.moved(caller, state)
            self.assertEqual(daemon.stop(), 0)

    def kept(self, folder, count):
        """Options of a daemon whose stop has kept so many sessions in the folder, and these."""
        options = ("--state-dir", folder, "--page-size", "16", "--pages", "60", "--snapshot-bytes", str(1 << 30))
        options += ("--drain-grace-s", "0")
        with RealDaemon(*options) as daemon:
            caller = Caller(daemon)
            states = [caller.session(tokens=[i, *range(70)], lease_s=600) for i in range(count)]
            caller.close()
        self.assertEqual(os.listdir(folder), ["sessions.snapshot"])
        return options, states

    def come_back(self, options, states):
        with RealDaemon(*options) as daemon:
            self.assertIn(f"{len(states)} sessions of the last process are restored, 0 are not", daemon.text())
            caller = self.caller(daemon)
            for state in states:
                epoch = caller.call("GET", f"/v1/sessions/{state['session']}").json["epoch"]
                self.moved(caller, dict(state, epoch=epoch))

    def begun(self, options):
        """A start under the host's faults, which may not come to its end."""
        command = [os.environ["TREEVERIFYD"], "--model", MODEL, "--threads", "1", "--listen", "127.0.0.1:0", *options]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ, **self.host.env)
        )
        self.addCleanup(process.kill)
        return process

    def test_a_stop_in_the_middle_of_a_restore(self):
        """What was kept is there for the next start, whatever of it was read."""
        with tempfile.TemporaryDirectory() as folder:
            options, states = self.kept(folder, 3)
            self.host.set(read_ms=300)  # of some 40 reads
            process = self.begun(options)
            wait_until(lambda: os.listdir(folder) == ["sessions.snapshot.reading"], 60, "the restore begins")
            time.sleep(1)
            start = time.monotonic()
            process.terminate()
            _, log = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, log)
            self.assertLess(time.monotonic() - start, 5)
            self.assertEqual(os.listdir(folder), ["sessions.snapshot"], log)
            self.host.set()
            self.come_back(options, states)

    def test_a_start_that_fails_behind_its_restore(self):
        """Each thread of a start in turn is not made: what was kept is there as long as nobody has served it."""
        with tempfile.TemporaryDirectory() as folder:
            options, states = self.kept(folder, 2)
            for count in range(100):
                self.host.set(threads=count)
                process = self.begun(options)
                serves = process.stdout.readline().startswith("listening ")
                if serves:
                    process.terminate()
                _, log = process.communicate(timeout=60)
                self.assertEqual(process.returncode, 0 if serves else 71, (count, log))
                self.assertEqual(os.listdir(folder), ["sessions.snapshot"], (count, log))
                if serves:
                    break
            self.assertGreater(count, 2)
            self.host.set()
            self.come_back(options, states)

    def test_a_disk_that_hangs_keeps_what_was_written(self):
        """In the middle of the second session of a stop: its limit ends the process, and the first session comes back."""
        with tempfile.TemporaryDirectory() as folder:
            options = ("--state-dir", folder, "--page-size", "16", "--pages", "60", "--snapshot-bytes", str(1 << 30))
            options += ("--drain-grace-s", "0", "--drain-max-s", "3")
            daemon = RealDaemon(*options)
            daemon.env.update(self.host.env)
            daemon.__enter__()
            self.addCleanup(daemon.log.close)
            caller = Caller(daemon)
            second, first = (caller.session(tokens=[i, *range(70)], lease_s=600) for i in (7, 8))
            caller.close()
            # the header; of a session, its head, its body, and each of five pages with its sum
            self.host.set(writes=1 + 12 + 5)
            self.assertEqual(daemon.stop(), EXIT_FAULT)
            self.assertIn("the stop took too long", daemon.text())
            self.assertEqual(os.listdir(folder), ["sessions.snapshot.new"])
            with RealDaemon(*options) as daemon:
                self.assertIn("1 sessions of the last process are restored, 0 are not", daemon.text())
                self.assertIn("ended while it wrote its sessions", daemon.text())
                self.assertEqual(os.listdir(folder), [])
                caller = self.caller(daemon)
                listed = caller.call("GET", "/v1/sessions").json["sessions"]
                self.assertEqual([one["session"] for one in listed], [first["session"]])
                self.assertNotEqual(second["session"], first["session"])
                first["epoch"] = caller.call("GET", f"/v1/sessions/{first['session']}").json["epoch"]
                self.moved(caller, first)


if __name__ == "__main__":
    unittest.main()
