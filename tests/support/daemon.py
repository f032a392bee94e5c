"""Start a treeverifyd on loopback, talk to it, stop it. Used by every black-box suite.

Every answer is checked against proto/openapi.yaml. A Daemon is a context manager; its output goes to a
file that is shown when the process dies. No test sleeps: the start is read from the `listening` line. Every
daemon that a test starts has its pool poisoned, like the C fixtures', unless TREEVERIFY_POISON says otherwise, and
keeps no sessions for the next one (which might be another test's) unless the test asks for it.
"""

import base64
import http.client
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import tempfile

from openapi import Contract

CONTRACT = Contract(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "proto", "openapi.yaml")
)

os.environ.setdefault("TREEVERIFY_POISON", "on")
os.environ["TREEVERIFY_SNAPSHOT_BYTES"] = "0"


def own_port():
    """A port of loopback that no other process is given by chance: it is below those that the kernel hands out. The
    admin listener that goes with it has to be off, or elsewhere: the next port may be taken."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first = int(file.read().split()[0])
    for _ in range(1000):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", random.randrange(max(1024, first // 2), max(1025, first))))
                return sock.getsockname()[1]
            except OSError:
                continue
    raise RuntimeError(f"no port below {first} is free")


def checkpoint_arguments(parser, model="model", kv_dtypes=None, page_size=None):
    """Parse the command line of a test of a checkpoint: `parser` holds the test's own options, the ones that such tests
    share are added here (--page-size only with a default). Returns the arguments, and the shared ones as the daemon's
    options."""
    parser.add_argument("program")
    parser.add_argument(model)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--kv-dtype", default="f32", choices=kv_dtypes)
    if page_size is not None:
        parser.add_argument("--page-size", default=page_size)
    args = parser.parse_args()
    options = ["--backend", args.backend, "--kv-dtype", args.kv_dtype]
    if page_size is not None:
        options += ["--page-size", args.page_size]
    return args, options


class Problem(Exception):
    """A problem+json answer: .status, .body (decoded)."""

    def __init__(self, status, body):
        super().__init__(f"{status} {body.get('code')}: {body.get('detail')}")
        self.status = status
        self.body = body
        self.code = body.get("code")


class Daemon:
    def __init__(self, program, model, *options, env=None):
        self.program, self.model, self.options = program, model, options
        self.env = dict(os.environ, **(env or {}))
        self.process = None

    def __enter__(self):
        self.log = tempfile.TemporaryFile(mode="w+")
        command = [self.program, "--model", self.model, "--listen", "127.0.0.1:0", *self.options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=self.env
        )
        line = self.process.stdout.readline()
        words = line.split()
        if len(words) < 2 or words[0] != "listening":
            self.process.wait(timeout=60)
            raise RuntimeError(f"no start: {line!r} exit {self.process.returncode}\n{self.text()}")
        self.host, port = words[1].removeprefix("http://").rsplit(":", 1)
        self.port = int(port)
        return self

    def text(self):
        """The log so far. The daemon writes through the same open file, so its position stays where it is."""
        return os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0).decode(errors="replace")

    def stop(self, how=signal.SIGTERM):
        """Send `how`, wait for the end; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code

    def __exit__(self, kind, value, trace):
        code = self.stop()
        if kind is not None or code != 0:
            print(self.text())
        self.log.close()
        if kind is None and code != 0:
            raise RuntimeError(f"daemon ended with {code}")

    def client(self):
        return Client(self.host, self.port)


class Client:
    """One keep-alive connection. call() returns the decoded body of a 2xx, raises Problem else.

    A test may leave it alone for longer than the daemon keeps an idle connection (under TSan some do), so
    one that the other side has closed is replaced before a request goes out.
    """

    def __init__(self, host, port, timeout=120):
        self.connection = http.client.HTTPConnection(host, port, timeout=timeout)

    def dropped(self):
        """An idle connection that can be read has been closed: no answer is outstanding."""
        if self.connection.sock is None:
            return False
        poll = select.poll()
        poll.register(self.connection.sock, select.POLLIN)
        return bool(poll.poll(0))

    def raw(self, method, path, body=None, headers=None):
        data = None if body is None else json.dumps(body, separators=(",", ":"))
        sent = dict(headers or {})
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        if self.dropped():
            self.connection.close()
        self.connection.request(method, path, body=data, headers=sent)
        answer = self.connection.getresponse()
        headers, content = dict(answer.getheaders()), answer.read()
        CONTRACT.answer(method, path, answer.status, headers, content)
        return answer.status, headers, content

    def call(self, method, path, body=None):
        status, _, data = self.raw(method, path, body)
        if status == 204:
            return None
        decoded = json.loads(data)
        if status >= 400:
            raise Problem(status, decoded)
        return decoded

    def get(self, path):
        return self.call("GET", path)

    def post(self, path, body):
        return self.call("POST", path, body)

    def close(self):
        self.connection.close()


class Session:
    """The client's side of one session: it follows seq, length and pending by itself."""

    def __init__(self, client, tokens, **fields):
        self.client = client
        self.state = client.post("/v1/sessions", dict(tokens=list(tokens), **fields))
        self.id = self.state["session"]
        self.epoch = self.state["epoch"]
        self.text = [self.state["pending"]]
        self.prompt_len = len(tokens)

    def _follow(self, answer):
        self.state = answer
        return answer

    def _base(self):
        return {
            "seq": self.state["next_seq"],
            "epoch": self.epoch,
            "expected_len": self.state["committed_len"],
        }

    def round(self, drafts, parents, **fields):
        """The body of the next round. drafts/parents without node 0: parents count node 0 as 0."""
        tree = {"tokens": [self.state["pending"], *drafts], "parents": [-1, *parents]}
        return dict(self._base(), tree=tree, **fields)

    def verify(self, drafts, parents, **fields):
        """The round of these drafts. Adds new tokens to .text."""
        self.sent = (f"/v1/sessions/{self.id}/verify", self.round(drafts, parents, **fields))
        answer = self.client.post(*self.sent)
        self.text += answer["new_tokens"]
        return self._follow(answer)

    def verify_again(self):
        """The last verify once more, as after a lost answer: the kept one comes back and nothing moves."""
        answer = self.client.post(*self.sent)
        if answer != dict(self.state, replayed=True):
            raise AssertionError(f"a replay differs: {answer}, not {self.state}")

    def decode(self, count):
        path = f"/v1/sessions/{self.id}/decode"
        answer = self.client.post(path, dict(self._base(), max_tokens=count))
        self.text += answer["new_tokens"]
        return self._follow(answer)

    def extend(self, tokens, keep_pending=False):
        path = f"/v1/sessions/{self.id}/extend"
        body = dict(self._base(), tokens=list(tokens), keep_pending=keep_pending)
        return self._follow(self.client.post(path, body))

    def rollback(self, length, **fields):
        path = f"/v1/sessions/{self.id}/rollback"
        return self._follow(self.client.post(path, dict(self._base(), len=length, **fields)))

    def close(self):
        self.client.call("DELETE", f"/v1/sessions/{self.id}")


def floats(block, name="data_b64"):
    """The rows of a base64 f32 block as a flat tuple."""
    data = base64.b64decode(block[name], validate=True)
    return struct.unpack(f"<{len(data) // 4}f", data)
