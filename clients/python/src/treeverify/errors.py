"""Exceptions of the package. Everything that can go wrong on purpose derives from Error.

Owns the reading of problem+json (RFC 9457). Decides nothing: what to do about a problem is session.py's and
calls.py's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Error(Exception):
    """Base of all errors of this package, except TreeError and plain misuse (ValueError, TypeError)."""


class TransportError(Error):
    """No complete answer arrived, and the retries did not help.

    `committed` is None: whether the call changed state is unknown. Repeating the call on the same session is
    safe: a round has a number, and the server answers it once.
    """

    committed: bool | None = None
    retryable = True

    def __init__(self, message: str, *, timed_out: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.refused = refused  # nobody listens there now: nothing was sent


class ContractError(Error):
    """An answer that is not what the contract says: no JSON, a missing member, a digest that is not the chain over
    the tokens, an accepted path that is not in the tree. The client's state is left as it was before the call."""


class DesyncError(Error):
    """The server's session has tokens that this client cannot follow: another history, or more missed tokens than
    the server tells (4,096). The session object is unusable; create a new one from the tokens you trust."""


class MovedError(Error):
    """The session was not where the caller thought, and the call was not sent on.

    The session object has adopted the server's state (or a new session was made from the client's tokens), so its
    `tokens` and `pending` are right again. Raised where the client cannot guess what the caller wants: the text
    already handed out is no longer a beginning of the server's text, or an extend met foreign rounds.
    `problem` is what the server said.
    """

    def __init__(self, message: str, problem: ProblemError) -> None:
        super().__init__(message)
        self.problem = problem


class ProblemError(Error):
    """The server refused: one problem document.

    Attributes: `status` (HTTP), `code` ("tree-invalid"), `title`, `detail`, `pointer` (JSON Pointer into the request
    or None), `node` (offending tree node or None), `retryable` (the same request may succeed later), `committed`
    (did the call change state), `session_state` (decoded object or None), `retry_after_s` (float or None),
    `request_id`, `body` (the whole document). Subclasses sort codes by what a caller can do.
    """

    def __init__(self, status: int, body: Mapping[str, Any], retry_after_s: float | None = None) -> None:
        self.status = status
        self.body = dict(body)
        self.code: str = str(body.get("code", ""))
        self.title: str = str(body.get("title", ""))
        self.detail: str = str(body.get("detail", ""))
        self.pointer: str | None = body.get("pointer")
        self.node: int | None = body.get("node")
        self.retryable: bool = bool(body.get("retryable", False))
        self.committed: bool | None = body.get("committed")
        self.session_state: Mapping[str, Any] | None = body.get("session_state")
        self.request_id: str | None = body.get("instance")
        self.retry_after_s = retry_after_s
        where = f" at {self.pointer}" if self.pointer else ""
        super().__init__(f"{status} {self.code}{where}: {self.detail or self.title}")


class BadRequestError(ProblemError):
    """400, 405, 413, 415, 422: the request is wrong and stays wrong."""


class TreeRefusedError(BadRequestError):
    """422 tree-invalid, tree-too-large: `node` says where."""


class ContextFullError(BadRequestError):
    """422 context-full: the model's positions are used up."""


class AccessError(ProblemError):
    """401, 403."""


class NotFoundError(ProblemError):
    """404: no such route, round or session."""


class GoneError(ProblemError):
    """410 session-expired, round-evicted: it was there."""


class ConflictError(ProblemError):
    """409: client and server see different things. Sessions resolve most of these by themselves."""


class FinishedError(ConflictError):
    """409 session-finished: a stop token or the length limit was reached; extend reopens."""


class ParityMismatchError(ConflictError):
    """409 parity-mismatch: the comparison is in `body`."""


class UnavailableError(ProblemError):
    """408, 429, 503, 504: not now. Raised after the retries; nothing was committed."""


class ServerFaultError(ProblemError):
    """500 kernel-fault, internal, numeric-fault: nothing was committed."""


_BY_CODE: dict[str, type[ProblemError]] = {
    "tree-invalid": TreeRefusedError,
    "tree-too-large": TreeRefusedError,
    "context-full": ContextFullError,
    "session-finished": FinishedError,
    "parity-mismatch": ParityMismatchError,
}

_BY_STATUS: dict[int, type[ProblemError]] = {
    401: AccessError,
    403: AccessError,
    404: NotFoundError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    429: UnavailableError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


def problem_of(status: int, body: Mapping[str, Any], retry_after_s: float | None = None) -> ProblemError:
    """The exception for a problem document; codes of later versions fall back to their status."""
    kind = _BY_CODE.get(str(body.get("code")))
    if kind is None:
        kind = _BY_STATUS.get(status, ServerFaultError if status >= 500 else BadRequestError)
    return kind(status, body, retry_after_s)
