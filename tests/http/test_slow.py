"""B49: clients that send or read too slowly are cut in time, while probes stay fast.

20 of each kind times TV_TEST_SCALE (25 makes the 500 of the published figure).
"""

import json
import select
import socket
import time
import unittest

from harness import CONTRACT, SCALE, Caller, FixedDaemon, Prober, Reader, request_bytes, round_body, verify_path

COUNT = max(2, int(20 * SCALE))
HEADERS_S, BODY_S, WRITE_S = 10.0, 30.0, 30.0
SLACK_S = 1.0
BIG = {
    "tokens": [1],
    "tree": {"tokens": [10] + list(range(100, 355)), "parents": [-1] + [0] * 255},
    "want": {"logits": {"rows": "all"}},
}


class Slow:
    """One slow client: feeds `data` a byte at a time and notes when it was cut."""

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

    def feed(self):
        try:
            if self.data:
                self.sock.send(self.data[: self.step])
                self.data = self.data[self.step :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.ended()

    def listen(self):
        try:
            got = self.sock.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            got = b""
        self.answer += got
        if not got:
            self.ended()

    def ended(self):
        if self.cut_s is None:
            self.cut_s = time.monotonic() - self.start

    def cut_unread(self):
        """For a client that never reads: has the peer given up? Its own queue is never touched."""
        poll = select.poll()
        poll.register(self.sock, select.POLLERR | select.POLLHUP | getattr(select, "POLLRDHUP", 0x2000))
        if poll.poll(0):
            self.ended()


class SlowTest(unittest.TestCase):
    def make(self, daemon):
        head = b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Slow: "
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
        with FixedDaemon() as daemon:
            worker = Caller(daemon)
            state = worker.session()
            clients = self.make(daemon)
            rounds, next_feed = 0, 0.0
            start = time.monotonic()
            with Prober(daemon) as admin, Prober(daemon, admin=False) as work:
                while any(client.cut_s is None for client in clients):
                    now = time.monotonic()
                    self.assertLess(now - start, BODY_S + 5, self.left(clients))
                    for client in clients:
                        if client.cut_s is not None:
                            continue
                        if now >= next_feed or client.kind == "reader":
                            client.feed()
                        if client.kind == "reader":
                            client.cut_unread()
                        else:
                            client.listen()
                    if now >= next_feed:
                        next_feed = now + 1.0
                    answer = worker.call("POST", verify_path(state), round_body(state))
                    self.assertEqual(answer.status, 200)
                    state.update(answer.json)
                    rounds += 1
                    select.select([], [], [], 0.005)
            self.report(clients, rounds, time.monotonic() - start, admin, work)
            self.check(clients)
            self.assertEqual(admin.failures + work.failures, 0)
            self.assertLess(admin.p99(), 0.05)
            worker.close()
            for client in clients:
                client.sock.close()

    def left(self, clients):
        return [client.kind for client in clients if client.cut_s is None]

    def report(self, clients, rounds, seconds, admin, work):
        for kind in ("headers", "body", "reader", "steady"):
            times = [client.cut_s for client in clients if client.kind == kind]
            if times:
                print(f"{kind}: {len(times)} cut after {min(times):.1f} to {max(times):.1f} s")
        print(
            f"probe p99 {admin.p99() * 1e3:.1f} ms (admin), {work.p99() * 1e3:.1f} ms (work); "
            f"{rounds} rounds in {seconds:.1f} s"
        )

    def check(self, clients):
        limits = {"headers": HEADERS_S, "body": BODY_S, "steady": BODY_S, "reader": WRITE_S}
        for client in clients:
            self.assertLess(client.cut_s, limits[client.kind] + SLACK_S, client.kind)
            if client.kind in ("headers", "body", "steady"):
                self.assertTrue(client.answer.startswith(b"HTTP/1.1 408 "), client.answer[:200])
                self.assertIn(b'"code":"timeout"', client.answer)

    def test_timeout_answer_keeps_the_contract(self):
        with FixedDaemon() as daemon, daemon.connect(timeout=20) as sock:
            sock.sendall(request_bytes("POST", "/v1/verify", headers=["Content-Length: 9", "Content-Type: application/json"]))
            reader = Reader(sock)
            answer = reader.answer("POST")
            CONTRACT.check("POST", "/v1/verify", answer.status, answer.headers, answer.body)
            self.assertEqual((answer.status, answer.code), (408, "timeout"))
            self.assertTrue(reader.closed())


if __name__ == "__main__":
    unittest.main(verbosity=1)
