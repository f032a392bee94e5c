#!/usr/bin/env python3
"""What rounds at real sizes get from a daemon that serves others too, through HTTP over loopback.

  outside   time outside of kernels, for trees of 1 to 128 nodes: from a request's last byte to the first of its answer,
            less the time on the device; as the server says, and as a client sees it that looks at its socket without a pause,
            beside an echo's
  sessions  rounds a second of one session and of many at once, and how long each waited
  beside    the time of small rounds alone, and while a long prompt is prefilled

usage: bench_served.py TREEVERIFYD CONFIG_FOLDER|CHECKPOINT [--backend cpu|cuda] [--only outside,sessions,beside]
                       [--context 4096] [--nodes 1,2,4,8,16,32,64,128] [--rounds 60] [--sessions 64] [--session-context 1024]
                       [--seconds 4] [--small 1,16] [--prompt 32768] [--options "MORE OPTIONS"] [--strict] [--json FILE]

A folder without weights gets random ones. All rows of prompts are computed. --strict: exit 1 when a figure that was asked
for is missed: p50 <= 200 us and p99 <= 500 us outside; 8 x the rate of one session, the longest wait <= 10 x the median;
p99 <= 3 x alone.
"""

import argparse
import base64
import contextlib
import glob
import json
import os
import random
import re
import select
import shlex
import socket
import struct
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from daemon import Daemon
from figures import numbers, share

GREEDY = {"rule": "greedy", "temperature": 0}
NUMBER = {name: re.compile(rb'"%s":(\d+)' % name.encode()) for name in
          ("pending", "next_seq", "committed_len", "queue", "gpu", "total")}


class Line:
    """One connection with one session, no library between: a client whose own time hardly counts."""

    def __init__(self, daemon, vocab, context, seed):
        self.rng, self.vocab = random.Random(seed), vocab
        self.socket = socket.create_connection((daemon.host, daemon.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.data = b""
        tokens = [self.rng.randrange(vocab) for _ in range(context)]
        text = base64.b64encode(struct.pack(f"<{context}i", *tokens)).decode()
        self.send("/v1/sessions", {"tokens_b64": text, "sampling": GREEDY, "lease_s": 3600})
        state = json.loads(self.wait())
        self.id, self.epoch = state["session"], state["epoch"]
        self.follow(json.dumps(state, separators=(",", ":")).encode())

    def send(self, path, body):
        text = json.dumps(body, separators=(",", ":")).encode()
        data = (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(text)}\r\n\r\n").encode() + text
        self.data, self.first = b"", None
        while data:
            try:
                data = data[self.socket.send(data):]
            except BlockingIOError:
                select.select([], [self.socket], [])
        self.sent = time.perf_counter()

    def take(self):
        """The body of the answer, or None as long as it is not there."""
        try:
            piece = self.socket.recv(1 << 18)
        except BlockingIOError:
            return None
        self.first = self.first or time.perf_counter()
        self.data += piece
        if not piece:
            raise RuntimeError(f"the connection was closed: {self.data[:300]!r}")
        head, found, body = self.data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head) if found else None
        if length is None or len(body) < int(length[1]):
            return None
        if not head.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(self.data[:600])
        return body

    def wait(self, spin=False):
        while True:
            if not spin:
                select.select([self.socket], [], [])
            body = self.take()
            if body is not None:
                return body

    def follow(self, body):
        self.state = {name: int(pattern.search(body)[1]) for name, pattern in NUMBER.items() if pattern.search(body)}
        return self.state

    def verify(self, nodes):
        state, first = self.state, self.rng.randrange(max(1, self.vocab - nodes))
        tree = {"tokens": [state["pending"], *((first + i) % self.vocab for i in range(nodes - 1))],
                "parents": [-1, *(self.rng.randrange(min(i + 1, 60)) for i in range(nodes - 1))]}
        self.send(f"/v1/sessions/{self.id}/verify", {"seq": state["next_seq"], "epoch": self.epoch,
                                                     "expected_len": state["committed_len"], "tree": tree})

    def close(self):
        self.socket.close()


def echo(rounds):
    """us of each exchange with a process that does nothing but answer: what loopback and waking cost on this machine."""
    took, body = [], bytes(700)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        child = os.fork()
        if child == 0:
            peer = listener.accept()[0]
            poll = select.epoll()
            poll.register(peer, select.EPOLLIN)
            while poll.poll() and peer.recv(4096):
                peer.sendall(body)
            os._exit(0)
        with socket.create_connection(listener.getsockname()) as near:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            near.setblocking(False)
            for _ in range(rounds):
                time.sleep(0.005)
                near.send(body)
                sent, answer = time.perf_counter(), None
                while answer is None:
                    with contextlib.suppress(BlockingIOError):
                        answer = near.recv(4096)
                took.append(1e6 * (time.perf_counter() - sent))
    os.waitpid(child, 0)
    return took


def outside(daemon, vocab, args, report):
    took = echo(args.rounds)
    print(f"  an echo over loopback here: p50 {share(took, 0.5):.0f} p99 {share(took, 0.99):.0f} us", flush=True)
    line, missed = Line(daemon, vocab, args.context, 1), False
    for nodes in args.nodes:
        server, client, queue = [], [], []
        for number in range(args.rounds + 3):
            time.sleep(0.001)
            line.verify(nodes)
            state = line.follow(line.wait(spin=True))
            if number >= 3:
                server.append(state["total"] - state["gpu"])
                queue.append(state["queue"])
                client.append(1e6 * (line.first - line.sent) - state["gpu"])
        row = {"nodes": nodes, "server_p50": share(server, 0.5), "server_p99": share(server, 0.99),
               "queue_p50": share(queue, 0.5), "client_p50": share(client, 0.5), "client_p99": share(client, 0.99)}
        missed |= row["server_p50"] > 200 or row["server_p99"] > 500
        report.append(row)
        print(f"  {nodes:4} nodes at {args.context}: outside, server p50 {row['server_p50']} p99 {row['server_p99']} us "
              f"(queue p50 {row['queue_p50']}); last byte sent to first byte read p50 {row['client_p50']:.0f} "
              f"p99 {row['client_p99']:.0f} us", flush=True)
    line.close()
    return missed


def play(lines, nodes, seconds):
    """(rounds a second, seconds that each waited) of rounds back to back on all lines."""
    poll, waits = select.epoll(), []
    by_fd = {line.socket.fileno(): line for line in lines}
    for line in lines:
        poll.register(line.socket.fileno(), select.EPOLLIN)
        line.verify(nodes)
    began, left = time.perf_counter(), len(lines)
    while left > 0:
        for fd, _ in poll.poll():
            line = by_fd[fd]
            body = line.take()
            if body is None:
                continue
            now = time.perf_counter()
            waits.append(now - line.sent)
            line.follow(body)
            if now - began < seconds:
                line.verify(nodes)
            else:
                left -= 1
    return len(waits) / (time.perf_counter() - began), waits


def sessions(daemon, vocab, args, report):
    nodes = args.session_nodes
    lines = [Line(daemon, vocab, args.session_context, 100 + i) for i in range(args.sessions)]
    for line in lines:
        line.verify(nodes)
    for line in lines:
        line.follow(line.wait())
    rows = {}
    for count in sorted({1, min(8, args.sessions), args.sessions}):
        rate, waits = play(lines[:count], nodes, args.seconds)
        rows[count] = rate
        row = {"sessions": count, "nodes": nodes, "rounds_s": rate, "times": rate / rows[1],
               "wait_p50_ms": 1e3 * share(waits, 0.5), "wait_max_ms": 1e3 * max(waits)}
        report.append(row)
        print(f"  {count:4} sessions of {nodes} nodes at {args.session_context}: {rate:.1f} rounds/s, "
              f"{row['times']:.2f} x one; waited p50 {row['wait_p50_ms']:.2f}, at most {row['wait_max_ms']:.2f} ms "
              f"({row['wait_max_ms'] / row['wait_p50_ms']:.1f} x)", flush=True)
    for line in lines:
        line.close()
    return row["times"] < 8 or row["wait_max_ms"] > 10 * row["wait_p50_ms"]


def small_rounds(line, nodes, count, ended=None):
    """ms of each round with pauses of up to 4 ms, until there are so many, or the event."""
    took = []
    while not ended.is_set() if ended else len(took) < count:
        time.sleep(line.rng.random() * 0.004)
        line.verify(nodes)
        line.follow(line.wait())
        took.append(1e3 * (time.perf_counter() - line.sent))
    return took


def beside(daemon, vocab, args, report):
    missed = False
    for nodes in args.small:
        line = Line(daemon, vocab, args.context, 7)
        small_rounds(line, nodes, 5)
        alone, ended, took = small_rounds(line, nodes, 150), threading.Event(), []

        def prefill():
            began = time.perf_counter()
            Line(daemon, vocab, args.prompt, 8 + nodes).close()
            took.append(time.perf_counter() - began)
            ended.set()

        thread = threading.Thread(target=prefill)
        thread.start()
        time.sleep(0.02)
        with_it = small_rounds(line, nodes, 0, ended)
        thread.join()
        line.close()
        row = {"nodes": nodes, "alone_p50_ms": share(alone, 0.5), "alone_p99_ms": share(alone, 0.99),
               "beside_p50_ms": share(with_it, 0.5), "beside_p99_ms": share(with_it, 0.99), "beside_max_ms": max(with_it),
               "rounds": len(with_it), "prefill_tokens_s": args.prompt / took[0]}
        times = row["beside_p99_ms"] / row["alone_p99_ms"]
        missed |= times > 3
        report.append(row)
        print(f"  {nodes:4} nodes at {args.context}: alone p50 {row['alone_p50_ms']:.2f} p99 {row['alone_p99_ms']:.2f} ms; "
              f"beside a prompt of {args.prompt} p50 {row['beside_p50_ms']:.2f} p99 {row['beside_p99_ms']:.2f} "
              f"max {row['beside_max_ms']:.2f} ms ({len(with_it)} rounds): {times:.2f} x; the prompt "
              f"{row['prefill_tokens_s']:.0f} tokens/s", flush=True)
    return missed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("config")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--only", type=lambda text: text.split(","), default=["outside", "sessions", "beside"])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--nodes", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--session-context", type=int, default=1024)
    parser.add_argument("--session-nodes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--small", type=numbers, default=[1, 16])
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--options", type=shlex.split, default=[])
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    options = ["--backend", args.backend, "--prefix-cache", "off", *args.options]
    if not glob.glob(os.path.join(args.config, "*.safetensors")):
        longest = max(args.context, args.prompt, args.session_context) + 4096
        options += ["--synthetic-weights", "1", "--max-len", str(longest)]
    report, missed = {}, []
    with tempfile.TemporaryDirectory() as state:
        with Daemon(args.program, args.config, *options, "--state-dir", state, env={"TREEVERIFY_POISON": "off"}) as daemon:
            client = daemon.client()
            model = client.get("/v1/model")
            client.close()
            print(f"{model['name']} on {model['device']}, {model['kv_dtype']} rows, load {os.getloadavg()[0]:.1f}", flush=True)
            for name, part in (("outside", outside), ("sessions", sessions), ("beside", beside)):
                if name in args.only:
                    print(f"{name}:")
                    if part(daemon, model["vocab"], args, report.setdefault(name, [])):
                        missed.append(name)
    print(f"missed: {', '.join(missed) or 'none'}; load {os.getloadavg()[0]:.1f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 1 if missed and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
