"""B65: stopping, idle and under load; exit codes of starts that are refused.

TV_TEST_SCALE stops under load, at least one and at most the published 100 (TV_TEST_SCALE=100).
"""

import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import tempfile
import threading
import unittest

from harness import (
    PROGRAM, SANITIZED, Caller, FixedDaemon, Prober, Reader, Stopwatch, median, own_port, request_bytes, round_body, sized,
    verify_path, wait_until,
)
from metrics import parse
from real import RealDaemon

TREEVERIFYD = os.environ.get("TREEVERIFYD", "")
MODEL = os.environ.get("TV_MODEL_DIR", "")
REPEATS = sized(1, 100)


def port_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Worker(threading.Thread):
    """Rounds on one session until the daemon refuses or closes."""

    def __init__(self, daemon):
        super().__init__(daemon=True)
        self.caller = Caller(daemon)
        self.state = self.caller.session()
        self.rounds, self.unanswered, self.refusal, self.odd = 0, 0, None, None

    def run(self):
        try:
            while self.refusal is None:
                answer = self.caller.call("POST", verify_path(self.state), round_body(self.state))
                if answer.status == 200:
                    self.state.update(answer.json)
                    self.rounds += 1
                else:
                    self.refusal = answer.json
        except (ConnectionError, AssertionError) as error:
            if isinstance(error, AssertionError) and "closed without an answer" not in str(error):
                self.odd = error
            self.unanswered += 1
        finally:
            self.caller.close()


class StopTest(unittest.TestCase):
    def judge(self, seconds, limit_s, what):
        print(f"{what} in {seconds:.3f} s of {limit_s}")
        if not SANITIZED:
            self.assertLess(seconds, limit_s, what)

    def ended(self, daemon, code, limit_s, how=signal.SIGTERM):
        """The signal, and the end with this exit code in time."""
        watch = Stopwatch(daemon.process)
        daemon.process.send_signal(how)
        seconds = watch.until_end()
        self.assertEqual(daemon.stop(), code, daemon.text())
        self.judge(seconds, limit_s, f"exit code {code}")
        daemon.log.close()

    def test_b65_stop_under_load(self):
        seconds = []
        for _ in range(REPEATS):
            seconds.append(self.stop_under_load())
        print(f"{REPEATS} stops in {min(seconds):.2f} to {max(seconds):.2f} s, median {median(seconds):.2f} s")

    def stop_under_load(self):
        """32 clients in rounds; every round that was committed reached its client. Seconds from signal to end."""
        daemon = FixedDaemon("--drain-grace-s", "1").__enter__()
        workers = [Worker(daemon) for _ in range(32)]
        for worker in workers:
            worker.start()
        wait_until(lambda: all(worker.rounds > 0 for worker in workers), 60, "all are in rounds")
        with Prober(daemon, until="/readyz") as probe:  # a process of its own: 32 threads take turns in this one
            watch = Stopwatch(daemon.process)
            daemon.process.send_signal(signal.SIGTERM)
            probe.process.wait(timeout=60)
            waited = watch.waited()
        self.judge(max(0.0, probe.end_s - watch.start - waited), 0.3, "not ready")
        self.assertEqual(probe.failures, 0)
        for worker in workers:
            worker.join(timeout=60)
            self.assertFalse(worker.is_alive())
            self.assertIsNone(worker.odd)
            if worker.refusal is not None:
                self.assertEqual(worker.refusal["code"], "draining")
                self.assertFalse(worker.refusal["committed"])
        seconds = watch.until_end()
        last = daemon.process.stdout.readline()
        self.assertEqual(daemon.stop(), 0, daemon.text())
        self.judge(seconds, 5, "stopped")
        answered = sum(worker.rounds for worker in workers)
        self.assertEqual(last, f"end commits {answered}\n")
        print(
            f"{answered} rounds, {sum(worker.unanswered for worker in workers)} requests closed unanswered and uncommitted, "
            f"stopped in {seconds:.2f} s"
        )
        daemon.log.close()
        return seconds

    def test_b65_running_round_is_answered(self):
        """SIGTERM while the engine works for a session: the answer arrives, then the daemon ends."""
        with FixedDaemon("--drain-grace-s", "0") as daemon:
            caller = Caller(daemon)
            state = caller.session()
            daemon.hold()
            body = json.dumps(round_body(state)).encode()
            launches = daemon.stat()[0]
            caller.sock.sendall(request_bytes("POST", verify_path(state), body))
            wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the round is launched")
            daemon.process.send_signal(signal.SIGTERM)
            probe = Caller(daemon, admin=True)
            wait_until(lambda: probe.call("GET", "/readyz").status == 503, 60, "readiness fails")
            other = Caller(daemon)
            wait_until(lambda: other.call("POST", "/v1/sessions", {"tokens": [1]}).code == "draining", 60, "new work is refused")
            daemon.release()
            answer = caller.reader.answer("POST", verify_path(state))
            self.assertEqual((answer.status, answer.json["committed_len"]), (200, 4))
            for one in (caller, probe, other):
                one.close()
            self.assertEqual(daemon.process.wait(timeout=60), 0)

    def test_b65_second_signal_refuses_what_waits(self):
        with FixedDaemon() as daemon:
            callers = [Caller(daemon), Caller(daemon)]
            states = [caller.session() for caller in callers]
            probe = Caller(daemon, admin=True)
            daemon.hold()
            launches = daemon.stat()[0]
            for caller, state in zip(callers, states):
                body = json.dumps(round_body(state)).encode()
                caller.sock.sendall(request_bytes("POST", verify_path(state), body))
                wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the first round is launched")
            wait_until(lambda: "; 1 calls" in probe.call("GET", "/readyz").body.decode(), 60, "the second waits")
            daemon.process.send_signal(signal.SIGTERM)
            wait_until(lambda: probe.call("GET", "/readyz").status == 503, 60, "readiness fails")
            daemon.process.send_signal(signal.SIGTERM)
            refused = callers[1].reader.answer("POST", verify_path(states[1]))  # while the first still runs
            self.assertEqual((refused.status, refused.code), (503, "draining"))
            self.assertFalse(refused.json["committed"])
            daemon.release()
            self.assertIn("second signal", daemon.text())
            self.assertEqual(callers[0].reader.answer("POST", verify_path(states[0])).status, 200)
            self.assertEqual(daemon.process.wait(timeout=60), 0)
            for caller in (*callers, probe):
                caller.close()

    def test_b65_engine_that_never_ends(self):
        daemon = FixedDaemon("--drain-max-s", "2", "--drain-grace-s", "0").__enter__()
        caller = Caller(daemon)
        state = caller.session()
        daemon.hold()
        launches = daemon.stat()[0]
        caller.sock.sendall(request_bytes("POST", verify_path(state), json.dumps(round_body(state)).encode()))
        wait_until(lambda: daemon.stat()[0] == launches + 1, 60, "the round is launched")
        self.ended(daemon, 70, 4)
        caller.close()

    def test_idle_stop_is_at_once(self):
        for how in (signal.SIGTERM, signal.SIGINT):
            self.ended(FixedDaemon().__enter__(), 0, 1, how)

    def test_idle_connections_do_not_hold_the_stop(self):
        daemon = FixedDaemon().__enter__()
        callers = [Caller(daemon) for _ in range(10)]
        for caller in callers:
            caller.call("GET", "/healthz")
        self.ended(daemon, 0, 2.5)
        for caller in callers:
            caller.close()

    def test_open_requests_do_not_hold_the_stop_for_ever(self):
        """A client in the middle of its headers is cut when the grace is over."""
        daemon = FixedDaemon("--drain-grace-s", "1").__enter__()
        sock = daemon.connect()
        sock.sendall(b"POST /v1/ver")
        self.ended(daemon, 0, 4)
        sock.close()

    def test_stop_while_a_body_arrives(self):
        """An upload that ends within the grace is answered; one that does not is cut, and holds nothing."""
        body = json.dumps({"tokens": [1, 2], "tree": {"tokens": [17], "parents": [-1]}}).encode()
        data = request_bytes("POST", "/v1/verify", body)
        daemon = FixedDaemon("--drain-grace-s", "3").__enter__()
        quick, never = daemon.connect(), daemon.connect()
        for sock in (quick, never):
            sock.sendall(data[:-10])
        probe = Caller(daemon, admin=True)

        def running():
            return parse(probe.call("GET", "/metrics").body.decode())["treeverify_http_running"].total()

        # a stop waits for what has come: each is on a listener's thread of its own, or on the same
        wait_until(lambda: running() == 3, 60, "both uploads and this call are seen")
        watch = Stopwatch(daemon.process)
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: probe.call("GET", "/readyz").status == 503, 2, "readiness fails")
        quick.sendall(data[-10:])
        self.assertEqual(Reader(quick).answer("POST", "/v1/verify").status, 200)
        self.judge(watch.until_end(), 8, "stopped")
        self.assertEqual(daemon.stop(), 0)
        self.assertIsNone(Reader(never).answer("POST", "/v1/verify"))
        for sock in (quick, never, probe):
            sock.close()
        daemon.log.close()

    def test_same_port_at_once_again(self):
        port = own_port()
        with FixedDaemon("--listen", f"127.0.0.1:{port}", "--listen-admin", "off") as first:
            self.assertEqual(first.port, port)
            Caller(first).call("GET", "/healthz")
        for _ in range(3):
            with FixedDaemon("--listen", f"127.0.0.1:{port}", "--listen-admin", "off") as again:
                self.assertEqual(again.port, port)
                self.assertIsNone(again.admin_port)
                Caller(again).call("GET", "/healthz")

    def exit_code(self, *arguments, program=PROGRAM, env=None):
        ended = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            env=dict(os.environ, **(env or {})),
        )
        return ended.returncode, ended.stderr, ended.stdout

    def test_exit_codes_of_refused_starts(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            code, text, _ = self.exit_code("--model", "m", "--listen", f"127.0.0.1:{port}")
            self.assertEqual(code, 78, text)
            self.assertIn(f"port {port}", text)
            admin = ("--listen", "127.0.0.1:0", "--listen-admin", f"127.0.0.1:{port}")
            self.assertEqual(self.exit_code("--model", "m", *admin)[0], 78)
        self.assertEqual(self.exit_code("--model", "m", "--listen", "0.0.0.0:0")[0], 78)
        code, text, _ = self.exit_code("--model", "m", "--listen", "127.0.0.1:0", "--api-key-file", "keys")
        self.assertEqual(code, 78)
        self.assertIn("No such file", text)
        self.assertEqual(self.exit_code("--model", "m", env={"TREEVERIFY_THREADS": "x"})[0], 78)
        self.assertEqual(self.exit_code("--model", "m", "--config", "/nonexistent")[0], 78)
        self.assertEqual(self.exit_code()[0], 64)
        self.assertEqual(self.exit_code("--model", "m", "--nope")[0], 64)

    def test_printing_options(self):
        code, _, text = self.exit_code("--help")
        self.assertEqual(code, 0)
        self.assertIn("--drain-grace-s", text)
        self.assertEqual(self.exit_code("--version")[0], 0)
        code, _, text = self.exit_code("--print-config", "--threads", "3", env={"TREEVERIFY_PAGES": "9"})
        self.assertEqual(code, 0)
        self.assertIn("# command line\nthreads = 3\n", text)
        self.assertIn("# environment\npages = 9\n", text)
        self.assertEqual(self.exit_code("--model", "m", "--check-config")[0], 0)

    @unittest.skipUnless(TREEVERIFYD and MODEL, "needs TREEVERIFYD and TV_MODEL_DIR")
    def test_b65_signal_while_loading(self):
        """Ends within 2 s wherever the start is; -15 is the time before the handlers are set."""
        rng = random.Random(7)
        for _ in range(10):
            process = subprocess.Popen(
                [TREEVERIFYD, "--model", MODEL, "--listen", "127.0.0.1:0"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            threading.Event().wait(rng.random() * 0.2)
            watch = Stopwatch(process)
            process.send_signal(signal.SIGTERM)
            seconds = watch.until_end()
            self.assertIn(process.wait(), (0, -signal.SIGTERM))
            self.judge(seconds, 2, "a start stopped")

    @unittest.skipUnless(TREEVERIFYD and MODEL, "needs TREEVERIFYD and TV_MODEL_DIR")
    def test_exit_codes_of_the_real_daemon(self):
        port = ("--listen", "127.0.0.1:0")  # the usual one may be somebody's
        with tempfile.TemporaryDirectory() as empty:
            code, text, _ = self.exit_code("--model", empty, *port, program=TREEVERIFYD)
            self.assertEqual(code, 65, text)
            self.assertIn("config.json", text)
        code, text, _ = self.exit_code("--model", MODEL, "--pages", "1", "--listen", "0.0.0.0:1", program=TREEVERIFYD)
        self.assertEqual(code, 78, text)
        for pages in (1, 3, 6):
            few = ("--page-size", "16", "--pages", str(pages))
            code, text, _ = self.exit_code("--model", MODEL, *port, *few, program=TREEVERIFYD)
            self.assertEqual(code, 78, text)
            self.assertIn("pages", text)
            self.assertIn("7 pages", text)
        with socket.socket() as taken:  # said before the model is looked at
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            busy = f"127.0.0.1:{taken.getsockname()[1]}"
            for option in (("--listen", busy), (*port, "--listen-admin", busy)):
                code, text, _ = self.exit_code("--model", "/nonexistent", *option, program=TREEVERIFYD)
                self.assertEqual(code, 78, text)
                self.assertIn("cannot listen", text)
        code, text, _ = self.exit_code("--model", MODEL, *port, "--max-len", "1000000", program=TREEVERIFYD)
        self.assertEqual(code, 78, text)
        self.assertIn("max_len", text)

    @unittest.skipUnless(TREEVERIFYD and MODEL, "needs TREEVERIFYD and TV_MODEL_DIR")
    def test_the_smallest_pool_serves_a_session(self):
        with RealDaemon("--page-size", "16", "--pages", "7") as daemon:
            caller = Caller(daemon)
            state = caller.session(tokens=list(range(40)))
            self.assertEqual(state["committed_len"], 40)
            caller.close()

    def test_state_dirs_that_are_none(self):
        for path in ("/dev/full", "/nonexistent/x", os.path.abspath(__file__)):
            code, text, _ = self.exit_code("--model", "m", "--listen", "127.0.0.1:0", "--state-dir", path)
            self.assertEqual(code, 78, text)
            self.assertIn("state_dir", text)

    def test_state_dirs_fall_through(self):
        """Folders of the environment that cannot be used are passed over."""
        with tempfile.TemporaryDirectory() as home:
            env = {"STATE_DIRECTORY": "/dev/full", "XDG_STATE_HOME": home, "TREEVERIFY_MODEL": "m"}
            command = [PROGRAM, "--listen", "127.0.0.1:0", "--listen-admin", "off"]
            with open(os.path.join(home, "log"), "w+") as log:
                process = subprocess.Popen(command, env=dict(os.environ, **env), stdout=log, stderr=log)
                try:
                    wait_until(lambda: "listening" in pathlib.Path(log.name).read_text(), 60, "the daemon serves")
                finally:
                    process.terminate()
                    process.wait(timeout=60)
                self.assertIn(f"go to {home}/treeverify", pathlib.Path(log.name).read_text())

    def test_closed_streams(self):
        """Descriptors 0 to 2 that are closed at the start do not become sockets that the log is written to."""
        port = own_port()
        command = [PROGRAM, "--model", "m", "--listen", f"127.0.0.1:{port}", "--listen-admin", "off"]
        process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
        try:
            wait_until(lambda: port_open(port), 60, "the port is open")
            for fd in range(3):
                self.assertEqual(os.readlink(f"/proc/{process.pid}/fd/{fd}"), "/dev/null")
        finally:
            process.terminate()
            process.wait(timeout=60)


if __name__ == "__main__":
    unittest.main(verbosity=1)
