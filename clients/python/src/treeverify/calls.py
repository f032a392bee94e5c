"""One call with its retries, without input or output.

A *flow* is a generator that yields what it needs done (Send, Pause) and returns a result. client.py and aio.py run
the same flows, one blocking and one on asyncio, so no rule is written twice. This file owns the encoding of requests,
the reading of answers and the retry rule; it knows nothing of sessions.

drive() and drive_async() run a flow with a function that performs an effect: a Reply for a Send, None for a Pause, and
TransportError when no complete answer came.
"""

from __future__ import annotations

import email.utils
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np

from .errors import ContractError, Error, ProblemError, TransportError, problem_of

T = TypeVar("T")

# Codes whose cause a restart or a moment cures, though the server cannot promise it.
_RETRY_CODES = frozenset({"kernel-fault"})
# Answers of intermediaries that carry no problem document.
_RETRY_STATUS = frozenset({408, 429, 502, 503, 504})
_GATEWAY_STATUS = frozenset({502, 503, 504})


@dataclass(frozen=True)
class Retry:
    """How often and how long to try. Units are seconds.

    attempts: of one call, the first included. total_s: of one call with all pauses. The pause before attempt k + 1 is
    drawn from [0.5, 1] x min(cap_s, base_s x 2^(k-1)), and is never shorter than the server's Retry-After. A call
    whose pause would end after total_s fails with what it last saw.

    restart_s: a server that has answered this client before, and whose connections are refused now, is starting again. It
    is waited for so long, with the same pauses, whatever attempts says (but for 1: never again); 0: refused connections
    count like the others, as they do as long as nothing has ever answered. health() and the end of a session wait for
    nobody.
    """

    attempts: int = 8
    total_s: float = 120.0
    base_s: float = 0.05
    cap_s: float = 5.0
    restart_s: float = 30.0

    def __post_init__(self) -> None:
        # what nan is compared with is false
        if not (
            self.attempts >= 1 and self.total_s > 0 and 0 <= self.base_s < math.inf and self.base_s <= self.cap_s
            and self.restart_s >= 0
        ):
            raise ValueError("Retry: attempts >= 1, total_s > 0, 0 <= base_s <= cap_s, base_s finite, restart_s >= 0")

    def pause_s(self, failures: int, retry_after_s: float | None, uniform: Callable[[], float]) -> float:
        """The pause after `failures` failed attempts (>= 1); uniform draws from [0, 1)."""
        longest = min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 40))
        pause = longest * (0.5 + 0.5 * uniform())
        return max(pause, retry_after_s or 0.0)


@dataclass(frozen=True)
class Send:
    """Do one HTTP exchange; content None means no body. wait_s is added to the driver's own timeout. key, when not
    empty, is sent as Idempotency-Key, the same with every attempt. limit_s: at most the driver's timeout. patient False: a
    server that restarts is not waited for."""

    method: str
    path: str
    content: bytes | None = None
    wait_s: float = 0.0
    key: str = ""
    limit_s: float = math.inf
    patient: bool = True


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Reply:
    """A complete answer. Names of headers are lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes


Effect: TypeAlias = Send | Pause
Flow: TypeAlias = Generator[Effect, Reply | None, T]


def drive(flow: Generator[Any, Any, T], perform: Callable[[Any], Any]) -> T:
    """Run a flow to its end. What perform returns goes into it, and so does an Error that perform raises."""
    try:
        effect = next(flow)
        while True:
            try:
                result = perform(effect)
            except Error as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        flow.close()


async def drive_async(flow: Generator[Any, Any, T], perform: Callable[[Any], Awaitable[Any]]) -> T:
    """drive() with an awaited perform."""
    try:
        effect = next(flow)
        while True:
            try:
                result = await perform(effect)
            except Error as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        flow.close()


@dataclass
class Failures:
    """Of one call so far."""

    started: float
    counted: int = 0  # against Retry.attempts
    refused: int = 0  # while the server restarts
    refused_from: float = 0.0  # the first of those


@dataclass
class Context:
    """What flows need from their surroundings: the retry rule, a clock and a source of jitter."""

    retry: Retry = field(default_factory=Retry)
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[], float] = random.random
    retries: int = 0  # attempts after the first, of all calls so far
    answered: bool = False  # somebody was there, whatever was said

    def failures(self) -> Failures:
        return Failures(self.clock())

    def run_again(
        self, error: TransportError | ProblemError, failures: Failures, patient: bool = True
    ) -> float | None:
        """Seconds to pause before the next attempt, or None when there is none."""
        now, longest = self.clock(), math.inf
        restarts = patient and self.answered and self.retry.restart_s > 0 and self.retry.attempts > 1
        after = error.retry_after_s if isinstance(error, ProblemError) else None
        if restarts and is_away(error):
            if failures.refused == 0:
                failures.refused_from = now
            failures.refused += 1
            longest = failures.refused_from + self.retry.restart_s - now
            if longest <= 0:
                return None
            pause = self.retry.pause_s(failures.refused, after, self.uniform)
        else:
            failures.counted += 1
            if failures.counted >= self.retry.attempts:
                return None
            pause = self.retry.pause_s(failures.counted, after, self.uniform)
        pause = min(pause, longest)  # the last attempt is made when the time is over
        return None if now - failures.started + pause > self.retry.total_s else pause


def encode(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON, numbers of numpy included. NaN and infinities are refused (ValueError): the contract has none."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False, default=_number).encode()


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Retry-After as seconds: a number, or an HTTP date; None when absent or not understood."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (OverflowError, TypeError, ValueError):
        return None
    return max(0.0, when.timestamp() - time.time())


def decode(reply: Reply) -> dict[str, Any]:
    """The JSON object of a 2xx answer; raises the problem of any other one."""
    try:
        body = json.loads(reply.content) if reply.content else {}
    except (ValueError, RecursionError) as error:
        body = error
    if reply.status >= 400:
        document = body if isinstance(body, dict) else {"title": "no problem document"}
        if not document.get("code"):
            document = dict(document, code="", retryable=reply.status in _RETRY_STATUS)
        raise problem_of(reply.status, document, retry_after_s(reply.headers))
    if reply.status >= 300:
        raise ContractError(f"answer with status {reply.status}: nobody is followed elsewhere")
    if not isinstance(body, dict):
        raise ContractError(f"answer with status {reply.status} is not a JSON object")
    return body


def is_away(error: TransportError | ProblemError) -> bool:
    """Nobody listens, or an intermediary says so: the server's own refusals have a problem document with a code."""
    if isinstance(error, TransportError):
        return error.refused
    return not error.code and error.status in _GATEWAY_STATUS


def worth_another(error: TransportError | ProblemError) -> bool:
    return isinstance(error, TransportError) or error.retryable or error.code in _RETRY_CODES


def send(context: Context, request: Send) -> Flow[Reply]:
    """The exchange, repeated unchanged while that helps. Raises ProblemError or TransportError."""
    failures = context.failures()
    while True:
        try:
            reply = yield request
            assert reply is not None
            if reply.status >= 400:
                decode(reply)
            context.answered = True
            return reply
        except (TransportError, ProblemError) as error:
            context.answered |= isinstance(error, ProblemError) and not is_away(error)
            pause = context.run_again(error, failures, request.patient) if worth_another(error) else None
            if pause is None:
                raise
        context.retries += 1
        yield Pause(pause)


def call(
    context: Context,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    wait_s: float = 0.0,
    key: str = "",
    patient: bool = True,
) -> Flow[dict[str, Any]]:
    """A call with a JSON answer; 204 gives {}."""
    content = None if body is None else encode(body)
    reply = yield from send(context, Send(method, path, content, wait_s, key, patient=patient))
    return decode(reply)
