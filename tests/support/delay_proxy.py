"""A link with a round trip: a proxy on loopback that passes bytes on after a fixed time, half of it each way.

Bytes of one connection stay in order and nothing is lost; a connection is made at once, as a kept one would be. Runs as
a process of its own, so that its threads do not take turns with the client's. delay may be changed while it runs.
"""

import multiprocessing
import queue
import socket
import threading
import time


def read_on(source, line):
    """Put what arrives into the line, with the time when it is due at the other end."""
    delay = line.delay
    try:
        while True:
            data = source.recv(65536)
            line.put((time.monotonic() + delay.value, data))
            if not data:
                return
    except OSError:
        line.put((0, b""))


def write_on(line, target):
    try:
        while True:
            due, data = line.get()
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
    except OSError:
        return  # a peer has gone; its other direction ends by itself


def serve(listener, upstream, delay):
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(upstream)
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = Line(delay)
            threading.Thread(target=read_on, args=(one, line), daemon=True).start()
            threading.Thread(target=write_on, args=(line, other), daemon=True).start()


class Line(queue.Queue):
    """What is on its way in one direction."""

    def __init__(self, delay):
        super().__init__()
        self.delay = delay


class DelayProxy:
    """url; round_trip(seconds) sets the link's. A context manager."""

    def __init__(self, host, port, round_trip_s=0.0):
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % listener.getsockname()[1]
        context = multiprocessing.get_context("fork")
        self.delay = context.Value("d", round_trip_s / 2)
        self.process = context.Process(target=serve, args=(listener, (host, port), self.delay), daemon=True)
        self.process.start()
        listener.close()

    def round_trip(self, seconds):
        self.delay.value = seconds / 2

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.join()
