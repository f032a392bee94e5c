"""Following a session: server-sent events, read as they come and gone on with where a connection was lost.

Owns the reading of the stream and the memory of how far it was read. Does no input or output: client.py and aio.py
run it. What the events mean is in proto/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .calls import Context, Reply, decode, worth_another
from .errors import ContractError, ProblemError, TransportError

QUIET_S = 30.0  # a server that is there says something every 10 s


@dataclass(frozen=True)
class Event:
    """name: state, commit, rollback, missed, lease, parity, draining, end. id: the round's number, where it has one.
    data: the members that the contract lists for it."""

    name: str
    id: int | None
    data: Mapping[str, Any]


class Parser:
    """Bytes of a text/event-stream to events; comments and fields without use here are passed over."""

    def __init__(self) -> None:
        self._text = b""

    def take(self, chunk: bytes) -> list[Event]:
        self._text += chunk
        *blocks, self._text = self._text.split(b"\n\n")
        return [event for event in map(self._event, blocks) if event is not None]

    @staticmethod
    def _event(block: bytes) -> Event | None:
        fields: dict[str, str] = {}
        for line in block.decode("utf-8", "replace").split("\n"):
            name, _, value = line.partition(":")
            if name:
                fields[name] = value.removeprefix(" ")
        if "data" not in fields:
            return None
        try:
            data = json.loads(fields["data"])
            number = int(fields["id"]) if "id" in fields else None
        except ValueError as error:
            raise ContractError(f"an event that is not JSON: {block[:100]!r}") from error
        if not isinstance(data, dict):
            raise ContractError(f"an event without an object: {block[:100]!r}")
        return Event(fields.get("event", "message"), number, data)


class Following:
    """One session, followed over as many connections as it takes."""

    def __init__(self, context: Context, session: str, after: int | None) -> None:
        self.path = f"/v1/sessions/{session}/events"
        self.over = False
        self._context, self._last = context, after
        self._parser, self._failures = Parser(), context.failures()

    def headers(self) -> dict[str, str]:
        """Of the next connection, which begins anew."""
        self._parser = Parser()
        headers = {"Accept": "text/event-stream, application/problem+json"}
        if self._last is not None:
            headers["Last-Event-ID"] = str(self._last)
        return headers

    def check(self, reply: Reply) -> None:
        """Another status than 200, with its whole body: raises its problem."""
        self._context.answered = True
        decode(reply)
        raise ContractError(f"{self.path}: status {reply.status} is no stream")

    def take(self, chunk: bytes) -> list[Event]:
        events = self._parser.take(chunk)
        for event in events:
            self._failures, self._context.answered = self._context.failures(), True
            if event.id is not None:
                self._last = event.id
            self.over |= event.name == "end"
        return events

    def again(self, error: TransportError | ProblemError) -> float:
        """The connection is lost, or there was none: seconds to pause before the next one. Raises when it is no use."""
        pause = None
        if worth_another(error):
            pause = self._context.run_again(error, self._failures)
        if pause is None:
            raise error
        self._context.retries += 1
        return pause

    @staticmethod
    def cut() -> TransportError:
        return TransportError("the stream of events was cut")
