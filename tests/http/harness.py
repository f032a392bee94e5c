"""Raw sockets to a treeverifyd with fixed answers; every answer is checked against the contract.

The program's path comes from TREEVERIFYD_FIXED, the size of the loops from TV_TEST_SCALE.
"""

import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "support"))
from daemon import Daemon, own_port  # noqa: E402,F401
from openapi import Contract, Mismatch  # noqa: E402


class SocketContract(Contract):
    """Answers as they came from a socket: these have every header, the request's id included."""

    def check(self, method, target, status, headers, body):
        request_id = headers.get("x-request-id", "")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", request_id):
            raise Mismatch(f"{method} {target[:100]}: {status}: X-Request-Id is {request_id!r}")
        return self.answer(method, target, status, headers, body)


CONTRACT = SocketContract(os.path.join(HERE, "..", "..", "proto", "openapi.yaml"))
PROGRAM = os.environ.get("TREEVERIFYD_FIXED", "")
SCALE = float(os.environ.get("TV_TEST_SCALE", "1"))
SANITIZED = os.environ.get("TV_SANITIZE", "none") != "none"  # the tools' own time is not judged


class FixedDaemon(Daemon):
    """stdin controls the engine: hold(), release(), stat()."""

    def __init__(self, *options, env=None):
        super().__init__(PROGRAM, "fixed", *options, env=env)

    def __enter__(self):
        self.log = tempfile.TemporaryFile(mode="w+")
        command = [self.program, "--model", self.model, "--listen", "127.0.0.1:0", *self.options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=self.env,
        )
        words = self.process.stdout.readline().split()
        if len(words) != 4 or words[0] != "listening" or words[2] != "admin":
            self.process.wait(timeout=60)
            raise RuntimeError(f"no start: {words} exit {self.process.returncode}\n{self.text()}")
        self.host = "127.0.0.1"
        self.port = int(words[1].rsplit(":", 1)[1])
        self.admin_port = None if words[3] == "off" else int(words[3].rsplit(":", 1)[1])
        return self

    def order(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hold(self):
        self.order("hold")
        self.stat()  # orders are taken one after the other: the engine is held now

    def release(self):
        self.order("release")

    def stat(self):
        """(verify launches so far, contexts that are open)"""
        self.order("stat")
        words = self.process.stdout.readline().split()
        return int(words[1]), int(words[3])

    def stop(self, *how):
        if self.process.poll() is None:
            self.process.stdin.close()
        return super().stop(*how)

    def fds(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def cpu_s(self):
        with open(f"/proc/{self.process.pid}/stat") as stat:
            words = stat.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def resident_kib(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return int(re.search(r"VmRSS:\s+(\d+) kB", status.read()).group(1))

    def connect(self, admin=False, timeout=60):
        port = self.admin_port if admin else self.port
        sock = socket.create_connection((self.host, port), timeout=timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def code(self):
        return self.json.get("code")


class Reader:
    """Answers of one socket, one after the other."""

    def __init__(self, sock):
        self.sock, self.data = sock, b""

    def _more(self):
        got = self.sock.recv(65536)
        self.data += got
        return len(got) > 0

    def answer(self, method="GET", target=None, skip_continue=True):
        """The next answer, checked against the contract when its target is given, or None when the peer
        closed instead."""
        while b"\r\n\r\n" not in self.data:
            if not self._more():
                if self.data:
                    raise AssertionError(f"half an answer: {self.data[:200]!r}")
                return None
        head, _, rest = self.data.partition(b"\r\n\r\n")
        lines = head.decode("ascii").split("\r\n")
        status = int(lines[0].split(" ")[1])
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if name.lower() in headers:
                raise AssertionError(f"header {name} twice")
            headers[name.lower()] = value.strip()
        if status == 100 and skip_continue:
            self.data = rest
            return self.answer(method, target)
        length = 0 if method == "HEAD" or status in (100, 204) else int(headers["content-length"])
        while len(rest) < length:
            if not self._more():
                raise AssertionError(f"{len(rest)} of {length} bytes came")
            head, _, rest = self.data.partition(b"\r\n\r\n")
        self.data = rest[length:]
        if target is not None and status != 100:
            CONTRACT.check(method, target, status, headers, rest[:length])
        return Answer(status, headers, rest[:length])

    def closed(self, timeout=5):
        """True when the peer has closed and nothing more came."""
        self.sock.settimeout(timeout)
        try:
            return self.data == b"" and not self._more()
        except ConnectionResetError:
            return True
        except (socket.timeout, TimeoutError):
            return False


def request_bytes(method, target, body=None, headers=(), host=True):
    lines = [f"{method} {target} HTTP/1.1"]
    if host:
        lines.append("Host: localhost")
    lines += headers
    if body is not None:
        if not any(line.lower().startswith("content-type") for line in headers):
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    return head + (body or b"")


class Caller:
    """One keep-alive connection whose answers are all checked. A test may leave it alone for longer than the
    daemon keeps an idle one: what the other side has closed is replaced before a request goes out."""

    def __init__(self, daemon, admin=False):
        self.daemon, self.admin, self.sock = daemon, admin, None

    def dropped(self):
        """The daemon has closed the idle connection."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        try:
            return bool(poll.poll(0)) and self.sock.recv(1, socket.MSG_PEEK) == b""
        except ConnectionResetError:
            return True

    def call(self, method, target, body=None, headers=(), check=True):
        """body: bytes, or anything JSON can hold. check=False: for /v1/model of an engine that has no
        checkpoint to describe; test_model.py checks a real one's."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body, separators=(",", ":")).encode()
        if self.sock is not None and self.dropped():
            self.close()
        if self.sock is None:
            self.sock = self.daemon.connect(self.admin)
            self.reader = Reader(self.sock)
        self.sock.sendall(request_bytes(method, target, body, headers))
        answer = self.reader.answer(method, target if check else None)
        assert answer is not None, f"{method} {target}: closed without an answer"
        if answer.headers.get("connection", "").lower() == "close":
            assert self.reader.closed(), f"{method} {target}: says close and stays open"
            self.close()
        return answer

    def close(self):
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def session(self, **fields):
        answer = self.call("POST", "/v1/sessions", dict(fields, tokens=fields.get("tokens", [1, 2, 3])))
        assert answer.status == 201, answer.body
        return answer.json


def round_body(state, drafts=(), parents=(), **fields):
    """The next verify of a session whose last answer was `state`."""
    return dict(
        {
            "seq": state["next_seq"],
            "epoch": state["epoch"],
            "expected_len": state["committed_len"],
            "tree": {"tokens": [state["pending"], *drafts], "parents": [-1, *parents]},
        },
        **fields,
    )


def verify_path(state):
    return f"/v1/sessions/{state['session']}/verify"


class Prober:
    """GET /healthz on one listener every few milliseconds while something else happens; or another target until its
    answer is not 200: then, at .end_s of time.monotonic(), the process ends (probe.py)."""

    def __init__(self, daemon, admin=True, every_s=0.005, until=None):
        port = daemon.admin_port if admin else daemon.port
        self.command = [sys.executable, os.path.join(HERE, "probe.py"), str(port), str(every_s)]
        self.command += [] if until is None else [until]
        self.times, self.failures, self.end_s = [], 0, None

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline() != "ready\n":
            raise AssertionError(f"no healthy client: {self.command}")
        return self

    def __exit__(self, kind, value, trace):
        output, _ = self.process.communicate(timeout=60)
        if kind is None:
            got = json.loads(output)
            self.times, self.failures, self.end_s = got["times"], got["failures"], got["end_s"]

    def p99(self):
        ordered = sorted(self.times)
        return ordered[len(ordered) * 99 // 100]


class Rounds:
    """Healthy clients in rounds (tests/bench/bench_http) for `seconds`; the outcome of every such run."""

    def __init__(self, daemon, connections=4, seconds=2):
        self.command = [os.environ["BENCH_HTTP"], str(daemon.port), str(connections), str(seconds), "64"]
        self.daemon, self.seconds = daemon, seconds
        self.rates, self.p99_us, self.cpu_us = [], [], []  # cpu_us: the daemon's, whatever it did, for each round

    def start(self):
        self.cpu_s = self.daemon.cpu_s()
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        return self

    def ended(self):
        return self.process.poll() is not None

    def take(self):
        output, _ = self.process.communicate(timeout=60)
        got = re.search(r" (\d+) rounds/s, .* p99 ([0-9.]+) us", output)
        if self.process.returncode != 0 or got is None:
            raise AssertionError(f"a healthy client failed: {output!r}")
        self.rates.append(int(got.group(1)))
        self.p99_us.append(float(got.group(2)))
        spent_us = (self.daemon.cpu_s() - self.cpu_s) * 1e6
        self.cpu_us.append(spent_us / max(1, self.rates[-1] * self.seconds))


class Stopwatch:
    """How long a process took for something, whatever else the machine had to do.

    A bound that the daemon promises is one on its own time: what its thread that fared worst, and the one here that
    looks on, were ready to run and had no processor for is not in it (the kernel counts that for each; where it does
    not tell, nothing is taken off). On a machine that does nothing else that is the time of a clock.
    """

    def __init__(self, process):
        self.process, self.before = process, {}
        self.waits = self.before  # the first look is what is taken off
        self.look()
        self.waits, self.start = dict(self.before), time.monotonic()

    def look(self):
        """Threads that have ended keep what they had at the last look."""
        tasks = [(os.getpid(), threading.get_native_id())]
        try:
            tasks += [(self.process.pid, int(task)) for task in os.listdir(f"/proc/{self.process.pid}/task")]
        except OSError:
            pass  # it is over
        for pid, task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file:
                    self.waits[pid, task] = int(file.read().split()[1]) / 1e9
            except OSError:
                pass  # it has ended, or the kernel does not count

    def waited(self):
        """Seconds that are not its own, until now."""
        self.look()
        spent = {key: wait - self.before.get(key, 0.0) for key, wait in self.waits.items()}
        return sum(max((spent[key] for key in spent if key[0] == pid), default=0.0) for pid in (self.process.pid, os.getpid()))

    def seconds(self):
        wall = time.monotonic() - self.start
        return max(0.0, wall - self.waited())

    def until_end(self):
        """Seconds until the process has ended; its exit code is still to be taken."""

        def ended():
            self.look()
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

        wait_until(ended, 60, "the process ends")
        return self.seconds()


def median(values):
    return sorted(values)[len(values) // 2]


def sized(default, full, least=1):
    """The size of a loop. TV_TEST_SCALE=100 runs each in full, as published in tests/bench/RESULTS.md."""
    return max(least, min(full, round(default * SCALE)))


def wait_until(condition, limit_s, what):
    """Poll a condition of another process; its own limit is the test's bound."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s} s: {what}")
        select.select([], [], [], 0.005)
