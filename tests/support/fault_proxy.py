"""A proxy on loopback that loses, repeats, reorders and cuts what passes through it; seeded.

It keeps the first answer to every request of a session's last two rounds and judges each later answer to
the same bytes: it must be the stored one, byte for byte, but for `"replayed":true`. It never alters a byte
that it passes on. Runs as a process of its own; close() returns the counts and raises what it found wrong.
"""

import multiprocessing
import random
import socket
import struct
import threading

# what may happen to a request, and how often in 1,000
FAULTS = {
    "drop": 20,  # the answer is read and lost, the client's connection is closed
    "cut": 20,  # half of the answer, then a reset
    "reset": 20,  # half of the body reaches the daemon, then a reset to both
    "lost": 10,  # closed before it is passed on; it arrives behind the next request of its session
    "twice": 20,  # two connections at once
    "again": 10,  # answered, and it arrives once more behind the next request of its session
    "swap": 20,  # held back until a request of another client has passed, or 5 ms
}
RESET = struct.pack("ii", 1, 0)
NEVER, FIRST, STORED = b'"replayed":', b'"replayed":false}', b'"replayed":true}'


def ended(body, old, new):
    """The body with another end: what a skipped round has in its outcome stays as it is."""
    return body.removesuffix(old) + new if body.endswith(old) else body


class Stream:
    """Messages of one socket, whole: head and body."""

    def __init__(self, sock):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.data = sock, b""

    def message(self):
        """(bytes, where the body starts), or None when the peer has closed."""
        data = self.data
        while True:
            end = data.find(b"\r\n\r\n")
            if end >= 0:
                break
            more = self.sock.recv(65536)
            if not more:
                return None
            data += more
        at = data.lower().find(b"content-length:", 0, end)
        length = int(data[at + 15 : data.index(b"\r\n", at)]) if at >= 0 else 0
        while len(data) < end + 4 + length:
            more = self.sock.recv(65536)
            if not more:
                return None
            data += more
        self.data = data[end + 4 + length :]
        return data[: end + 4 + length], end + 4

    def reset(self):
        """Close with a reset instead of an end."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()


class Link:
    """One client's connection and those to the daemon that serve it."""

    def __init__(self, server, sock, random_):
        self.server, self.random = server, random_
        self.client = Stream(sock)
        self.upstreams = [None, None]

    def upstream(self, which):
        if self.upstreams[which] is None:
            self.upstreams[which] = Stream(socket.create_connection(self.server.upstream, timeout=60))
        return self.upstreams[which]

    def ask(self, request, which=0):
        """Pass a request on; its answer is judged."""
        stream = self.upstream(which)
        stream.sock.sendall(request[0])
        return self.judged(request, stream)

    def judged(self, request, stream):
        answer = stream.message()
        if answer is None:
            raise ConnectionError("the daemon closed")
        self.server.judge(request, answer)
        return answer

    def serve(self):
        try:
            while True:
                request = self.client.message()
                if request is None or not self.handle(request):
                    break
        except ConnectionError:
            pass  # a peer has gone; the client asks again on a new connection
        finally:
            self.client.sock.close()
            for stream in self.upstreams:
                if stream is not None:
                    stream.sock.close()

    def handle(self, request):
        """False: this connection has ended."""
        server, fault = self.server, self.server.fault(self.random)
        path = request[0][: request[0].index(b" HTTP/")]
        if fault == "lost":
            server.late(path, request)
            return False
        if fault == "reset":
            stream, body = self.upstream(0), request[1]
            stream.sock.sendall(request[0][: body + (len(request[0]) - body) // 2])
            stream.reset()
            self.upstreams[0] = None
            self.client.reset()
            return False
        if fault == "swap":
            server.wait_for_another()
        strays = server.strays.pop(path, ())
        if fault == "twice":
            self.upstream(0).sock.sendall(request[0])
            self.upstream(1).sock.sendall(request[0])
            order = [0, 1] if self.random.random() < 0.5 else [1, 0]
            answer = [self.judged(request, self.upstream(which)) for which in order][0]
        else:
            answer = self.ask(request)
        server.passed()
        for stray in strays:
            self.ask(stray, 1)
        if fault == "again":
            server.late(path, request)
        if fault == "drop":
            return False
        if fault == "cut":
            self.client.sock.sendall(answer[0][: len(answer[0]) // 2])
            self.client.reset()
            return False
        self.client.sock.sendall(answer[0])
        return True


class Server:
    def __init__(self, upstream, seed):
        self.upstream, self.seed = upstream, seed
        self.counts = dict.fromkeys(["requests", "plain", "stored", "attached", *FAULTS], 0)
        self.wrong, self.strays, self.answers = [], {}, {}
        self.lock, self.another = threading.Lock(), threading.Condition()

    def fault(self, random_):
        pick = random_.randrange(1000)
        with self.lock:
            self.counts["requests"] += 1
            for name, share in FAULTS.items():
                if pick < share:
                    self.counts[name] += 1
                    return name
                pick -= share
            self.counts["plain"] += 1
        return "plain"

    def late(self, path, request):
        with self.lock:
            self.strays[path] = (*self.strays.get(path, ()), request)

    def passed(self):
        with self.another:
            self.another.notify_all()

    def wait_for_another(self):
        with self.another:
            self.another.wait(0.005)

    def judge(self, request, answer):
        """The first answer to these bytes is kept; later ones must be it."""
        head, body = answer[0], answer[0][answer[1] :]
        if not head.startswith(b"HTTP/1.1 200 ") or NEVER not in body:
            return
        key, sent = request[0][: request[0].index(b" HTTP/")], request[0][request[1] :]
        with self.lock:
            kept = self.answers.setdefault(key, {})
            if sent not in kept:
                kept[sent] = body
                if len(kept) > 2:
                    del kept[next(iter(kept))]
                return
            first = kept[sent]
            if first.endswith(STORED):
                self.counts["attached"] += 1  # the later of two at once was answered first
                same = ended(first, STORED, FIRST) == ended(body, STORED, FIRST)
            else:
                self.counts["stored"] += 1
                same = body.endswith(STORED) and ended(first, FIRST, STORED) == body
            if not same:
                self.wrong.append(f"{sent!r}: first {kept[sent]!r}, then {answer[0][answer[1]:]!r}")

    def run(self, listener):
        number = 0
        while True:
            sock, _ = listener.accept()
            link = Link(self, sock, random.Random(self.seed * 1000003 + number))
            number += 1
            threading.Thread(target=link.serve, daemon=True).start()


def serve(listener, upstream, seed, pipe):
    server = Server(upstream, seed)
    threading.Thread(target=server.run, args=(listener,), daemon=True).start()
    pipe.recv()  # close() was called
    pipe.send((server.counts, server.wrong))


class FaultProxy:
    def __init__(self, host, port, seed):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.pipe, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=serve, args=(listener, (host, port), seed, theirs), daemon=True)
        self.process.start()
        listener.close()

    def close(self):
        """What was done, by name."""
        self.pipe.send("end")
        counts, wrong = self.pipe.recv()
        self.process.join(timeout=20)
        assert not wrong, f"{len(wrong)} answers were not the stored one: {wrong[0][:1500]}"
        return counts
