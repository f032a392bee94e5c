"""One stream of server-sent events on a socket, read strictly; every event is checked against the contract.

    stream = Stream(sock, contract, "/v1/sessions/s_…/events")
    stream.next()         # Event(name, id, data), None at the end of the stream; comments are counted in .comments
"""

import collections
import socket

Event = collections.namedtuple("Event", "name id data")


class Stream:
    def __init__(self, sock, contract, target, headers=(), method="GET"):
        self.sock, self.contract, self.target, self.data = sock, contract, target, b""
        self.text, self.over, self.comments, self.retry_ms = b"", False, 0, None
        check = getattr(contract, "check", contract.answer)  # on a bare socket it knows more
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Accept: text/event-stream", *headers, "", ""]
        sock.sendall("\r\n".join(lines).encode())
        head = self.until(b"\r\n\r\n").decode("ascii").split("\r\n")
        self.status = int(head[0].split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        if self.status != 200:
            body = self.exactly(int(self.headers["content-length"]))
            self.problem = check(method, target, self.status, self.headers, body)
            return
        check(method, target, 200, self.headers, b"")
        assert self.headers["transfer-encoding"] == "chunked" and self.headers["connection"] == "close", self.headers
        assert "content-length" not in self.headers, self.headers

    def more(self):
        got = self.sock.recv(65536)
        if not got:
            raise ConnectionError(f"cut in the middle: {self.data[-100:]!r}")
        self.data += got

    def until(self, mark):
        while mark not in self.data:
            self.more()
        found, _, self.data = self.data.partition(mark)
        return found

    def exactly(self, count):
        while len(self.data) < count:
            self.more()
        found, self.data = self.data[:count], self.data[count:]
        return found

    def chunk(self):
        """More of the text; at its end the connection must end too."""
        size = int(self.until(b"\r\n"), 16)
        self.text += self.exactly(size)
        assert self.exactly(2) == b"\r\n"
        if size == 0:
            self.over = True
            assert not self.data and self.sock.recv(1) == b"", "something behind the end"

    def block(self):
        """The next block of lines, or None at the end."""
        while b"\n\n" not in self.text:
            if self.over:
                assert not self.text, f"half a block at the end: {self.text!r}"
                return None
            self.chunk()
        block, _, self.text = self.text.partition(b"\n\n")
        return block.decode("ascii").split("\n")

    def next(self):
        while True:
            lines = self.block()
            if lines is None:
                return None
            if lines == [":"]:
                self.comments += 1
                continue
            fields = dict(line.split(": ", 1) for line in lines)
            assert len(fields) == len(lines) and set(fields) <= {"retry", "id", "event", "data"}, lines
            if "retry" in fields:
                assert self.retry_ms is None, "retry twice"
                self.retry_ms = int(fields["retry"])
            number = int(fields["id"]) if "id" in fields else None
            return Event(fields["event"], number, self.contract.event(self.target, fields["event"], fields["data"]))

    def find(self, name):
        """The next event of this name; others are passed over."""
        while True:
            event = self.next()
            assert event is not None, f"the stream ended before an event {name}"
            if event.name == name:
                return event

    def rest(self):
        events = []
        while (event := self.next()) is not None:
            events.append(event)
        return events

    def close(self):
        self.sock.close()

    def shut(self):
        """This side sends nothing more."""
        self.sock.shutdown(socket.SHUT_WR)
