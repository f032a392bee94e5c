"""B49: clients that send or read too slowly are cut in time, while probes stay fast and rounds go on.

20 of each kind times TV_TEST_SCALE, at most the published 500 (TV_TEST_SCALE=100).
"""

import json
import select
import socket
import time
import unittest

from harness import SANITIZED, SCALE, FixedDaemon, Prober, Reader, Rounds, median, request_bytes, sized, wait_until
from test_metrics import come_to_rest

COUNT = sized(20, 500, 2)
HEADERS_S, BODY_S, WRITE_S = 10.0, 30.0, 30.0
SLACK_S = 1.0
HANG_S = 120.0  # of the test itself
BESIDE = 4  # healthy connections
PROBES = 2
BIG = {
    "tokens": [1],
    "tree": {"tokens": [10] + list(range(100, 355)), "parents": [-1] + [0] * 255},
    "want": {"logits": {"rows": "all"}},
}


class Slow:
    """One slow client: feeds `data` a byte at a time and notes when it was cut: when it was last seen not to be, so that
    a test that is not let run to look takes no daemon for late."""

    def __init__(self, daemon, kind, first, data, step=1):
        self.kind, self.data, self.step = kind, data, step
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.start = time.monotonic()
        self.sock.connect((daemon.host, daemon.port))
        if first:
            self.sock.sendall(first)
        self.sock.setblocking(False)
        self.cut_s, self.answer = None, b""

    def feed(self, seen):
        try:
            if self.data:
                self.sock.send(self.data[: self.step])
                self.data = self.data[self.step :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended(seen)

    def listen(self, seen):
        try:
            got = self.sock.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            got = b""
        self.answer += got
        if not got:
            self.ended(seen)

    def ended(self, seen):
        if self.cut_s is None:
            self.cut_s = max(0.0, seen - self.start)

    def first(self):
        """The start of the answer, which stays unread: not a byte of room is given to the peer."""
        return self.sock.recv(15, socket.MSG_PEEK)


def unread(daemon):
    """Connections of the daemon's port for which the kernel still holds bytes that the peer does not take."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    local = f"0100007F:{daemon.port:04X}"
    return sum(row[1] == local and int(row[4].split(":")[0], 16) > 0 for row in rows)


class SlowTest(unittest.TestCase):
    def make(self, daemon):
        head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
        body = request_bytes("POST", "/v1/verify", b" " * 100000)
        at = body.index(b"\r\n\r\n") + 4
        big = json.dumps(BIG).encode()
        clients = []
        for _ in range(COUNT):
            clients.append(Slow(daemon, "headers", b"", head + b"a" * 1000))
            clients.append(Slow(daemon, "body", body[:at], body[at:]))
            # answers of 700 KB each, more than all buffers between the two ends can hold
            clients.append(Slow(daemon, "reader", b"", request_bytes("POST", "/v1/verify", big) * 12, 65536))
        if SCALE > 1:
            for _ in range(4):  # fast enough for the rate, too slow for the total
                clients.append(Slow(daemon, "steady", body[:at], body[at:], 2000))
        return clients

    def test_b49_slow_clients(self):
        with FixedDaemon("--queue-max", "2048") as daemon:  # 500 calls for large answers come at once
            fds, resident = daemon.fds(), daemon.resident_kib()
            alone, beside = Rounds(daemon, BESIDE), Rounds(daemon, BESIDE)
            with Prober(daemon) as admin, Prober(daemon, admin=False) as work:
                for _ in range(3):
                    alone.start().take()
                clients = self.make(daemon)
                start = time.monotonic()
                largest = self.serve(daemon, clients, beside, fds)
                seconds = time.monotonic() - start
            self.report(clients, seconds, alone, beside, admin, work)
            self.check(clients)
            self.assertEqual(admin.failures + work.failures, 0)
            if not SANITIZED:
                self.assertLess(admin.p99(), 0.05)
            if SCALE >= 100:  # a machine that runs nothing else: what CI's neighbours take is no finding
                self.assertGreaterEqual(median(beside.rates), 0.9 * median(alone.rates))
            self.assertEqual({client.first() for client in clients if client.kind == "reader"}, {b"HTTP/1.1 200 OK"})
            if SCALE > 1:
                wait_until(lambda: unread(daemon) == 0, WRITE_S + SLACK_S, "the kernel gives up what is unread")
            for client in clients:
                client.sock.close()
            wait_until(lambda: daemon.fds() <= fds, 60, "descriptors are given back")
            come_to_rest(daemon)
            print(f"resident {resident} KiB, at most {largest} KiB, {daemon.resident_kib()} KiB at the end")

    def serve(self, daemon, clients, beside, fds):
        """Feed every client once a second until all are cut, with rounds beside them; the largest resident size.

        Whoever never reads cannot see a close that comes behind what it has not read: those are cut when the
        daemon has their descriptors back."""
        start = next_feed = seen = time.monotonic()
        largest = 0
        poll = select.poll()
        readers = [client for client in clients if client.kind == "reader"]
        by_fd = {client.sock.fileno(): client for client in clients if client.kind != "reader"}
        for client in by_fd.values():
            poll.register(client.sock, select.POLLIN)
        beside.start()
        fed = 0
        while by_fd or readers[0].cut_s is None:
            now = time.monotonic()
            self.assertLess(now - start, HANG_S, [client.kind for client in by_fd.values()])
            for client in readers[fed : fed + 20]:
                client.feed(seen)
            fed += 20
            if now >= next_feed:
                next_feed += 1.0
                for client in by_fd.values():
                    client.feed(seen)
                largest = max(largest, daemon.resident_kib())
            for fd, _ in poll.poll(20):
                by_fd[fd].listen(seen)
            for fd in [fd for fd, client in by_fd.items() if client.cut_s is not None]:
                poll.unregister(fd)
                del by_fd[fd]
            if daemon.fds() <= fds + PROBES + BESIDE + len(by_fd):
                for client in readers:
                    client.ended(seen)
            seen = now  # all that is left was there then
            if beside.ended():
                beside.take()
                beside.start()
        beside.process.communicate(timeout=60)  # it ran half alone
        return largest

    def report(self, clients, seconds, alone, beside, admin, work):
        for kind in ("headers", "body", "reader", "steady"):
            times = [client.cut_s for client in clients if client.kind == kind]
            if times:
                print(f"{kind}: {len(times)} cut after {min(times):.1f} to {max(times):.1f} s")
        print(f"{seconds:.1f} s; probe p99 {admin.p99() * 1e3:.1f} ms (admin), {work.p99() * 1e3:.1f} ms (work)")
        for name, rounds in (("alone", alone), ("beside", beside)):
            print(
                f"rounds {name}: median {median(rounds.rates)}/s, p99 {median(rounds.p99_us):.0f} us, "
                f"{median(rounds.cpu_us):.1f} us of the daemon's time each; {rounds.rates}"
            )

    def check(self, clients):
        limits = {"headers": HEADERS_S, "body": BODY_S, "steady": BODY_S, "reader": WRITE_S}
        for client in clients:
            if not SANITIZED:
                self.assertLess(client.cut_s, limits[client.kind] + SLACK_S, client.kind)
            if client.kind in ("headers", "body", "steady"):
                self.assertTrue(client.answer.startswith(b"HTTP/1.1 408 "), client.answer[:200])
                self.assertIn(b'"code":"timeout"', client.answer)

    def test_timeout_answer_keeps_the_contract(self):
        with FixedDaemon() as daemon, daemon.connect(timeout=20) as sock:
            sock.sendall(request_bytes("POST", "/v1/verify", headers=["Content-Length: 9", "Content-Type: application/json"]))
            reader = Reader(sock)
            answer = reader.answer("POST", "/v1/verify")
            self.assertEqual((answer.status, answer.code), (408, "timeout"))
            self.assertTrue(reader.closed())


if __name__ == "__main__":
    unittest.main(verbosity=1)
