"""Client and Session: the blocking side. Runs the flows of session.py over httpx; adds nothing to them."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from . import ahead, oneshot, session as flows
from .asks import Settings, Tokens
from .calls import Context, Effect, Flow, Pause, Reply, Retry, Send, call, drive, send
from .drafters import Drafter
from .errors import Error, ProblemError, TransportError
from .events import QUIET_S, Event, Following
from .loop import Limits, Nodes, budget_of, plan
from .tree import Tree
from .values import Dtype, Hidden, HiddenDtype, HiddenWant, Logits, Model, Round, Rows, Rule, Sampling, Want

T = TypeVar("T")


# httpx lets the second one through from asyncio: of a peer that hangs up in the handshake
LOST = (httpx.RequestError, ssl.SSLError)


class Http:
    """What both clients share: the checked address, headers, timeouts, and the retry context."""

    def __init__(
        self, url: str, retry: Retry | None, timeout_s: float, connect_s: float, headers: Mapping[str, str] | None,
        ca_file: str | None,
    ) -> None:
        try:
            parts = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{url!r}: {error}") from error
        if (
            parts.scheme not in ("http", "https") or not parts.host or (parts.port or 80) > 65535 or parts.userinfo
            or parts.path not in ("", "/") or parts.query or parts.fragment
        ):
            raise ValueError(f"{url!r}: http://HOST:PORT without a path is needed")
        if not (0 < timeout_s < math.inf and 0 < connect_s < math.inf):
            raise ValueError("timeout_s, connect_s: finite numbers above 0")
        self.url = str(parts).rstrip("/")
        self.timeout_s, self.connect_s = timeout_s, connect_s
        self.context = Context(retry or Retry())
        # proxies of the environment are for the network, not for this machine
        self.trust_env = not (parts.host in ("localhost", "::1") or parts.host.startswith("127."))
        self.verify: ssl.SSLContext | bool = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self.headers = {"Accept": "application/json, application/problem+json", **(headers or {})}

    def quiet(self) -> httpx.Timeout:
        """Of a stream, between two words."""
        return httpx.Timeout(max(self.timeout_s, QUIET_S), connect=self.connect_s, pool=None)

    def timeout(self, extra_s: float = 0.0, limit_s: float = math.inf) -> httpx.Timeout:
        return httpx.Timeout(min(self.timeout_s + extra_s, limit_s), connect=min(self.connect_s, limit_s), pool=None)

    def options(self) -> dict[str, Any]:
        return {
            "base_url": self.url, "headers": self.headers, "trust_env": self.trust_env, "follow_redirects": False,
            "verify": self.verify,
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=None),
        }

    @staticmethod
    def request(effect: Send) -> dict[str, Any]:
        headers = {} if effect.content is None else {"Content-Type": "application/json"}
        if effect.key:
            headers["Idempotency-Key"] = effect.key
        return {"method": effect.method, "url": effect.path, "content": effect.content, "headers": headers}

    @staticmethod
    def reply(answer: httpx.Response) -> Reply:
        return Reply(answer.status_code, {name.lower(): value for name, value in answer.headers.items()}, answer.content)

    def failure(self, error: httpx.RequestError | ssl.SSLError) -> TransportError:
        words, refused = str(error) or type(error).__name__, isinstance(error, httpx.ConnectError) and _refused(error)
        return TransportError(
            f"{self.url}: {words}", timed_out=isinstance(error, httpx.TimeoutException), refused=refused
        )


def _refused(error: BaseException | None) -> bool:
    """Whether nobody listened, by the first error of the system under one of httpx: of several addresses, at all."""
    several = getattr(error, "exceptions", None)
    if several:
        return all(map(_refused, several))
    if error is None or (isinstance(error, OSError) and error.errno is not None):
        return isinstance(error, ConnectionRefusedError)
    return _refused(error.__cause__ or error.__context__)


class _Sent:
    """A trace of httpcore: _no_delay, and an event once a request has been written whole."""

    def __init__(self, sent: threading.Event) -> None:
        self.sent = sent

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        _no_delay(event, info)
        if event.endswith("send_request_body.complete"):
            self.sent.set()


def _no_delay(event: str, info: dict[str, Any]) -> None:
    """Sends head and body of a request without waiting for the head's acknowledgement, which may take 40 ms. Newer
    versions of httpcore do this by themselves, and asyncio always did."""
    if event == "connection.connect_tcp.complete":
        connected = info["return_value"].get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class SessionView:
    """The state that both kinds of sessions show. Everything here is the client's own knowledge; nothing asks."""

    def __init__(self, core: flows.SessionCore) -> None:
        self._core = core

    @property
    def id(self) -> str:
        return self._core.id

    @property
    def epoch(self) -> str:
        return self._core.epoch

    @property
    def tokens(self) -> list[int]:
        """Committed tokens, prompt included."""
        return list(self._core.tokens)

    @property
    def pending(self) -> int:
        """Drawn, not yet committed: node 0 of the next tree."""
        return self._core.pending

    @property
    def sequence(self) -> list[int]:
        """Committed tokens and the pending one: what a drafter continues."""
        return [*self._core.tokens, self._core.pending]

    @property
    def new_tokens(self) -> list[int]:
        """Everything after the prompt, the pending token included."""
        return [*self._core.tokens[self._core.prompt_len :], self._core.pending]

    @property
    def hidden(self) -> Hidden | None:
        """Hidden rows of the prompt, when the session was created with hidden=."""
        return self._core.hidden

    @property
    def committed_len(self) -> int:
        return len(self._core.tokens)

    @property
    def cached_len(self) -> int:
        """How many tokens needed no pass of the model when the session was made (the last time)."""
        return self._core.cached_len

    @property
    def digest(self) -> str:
        return self._core.digest.hex()

    @property
    def finish(self) -> str | None:
        """None, "stop" or "length"."""
        return self._core.finish

    @property
    def held(self) -> Tree | None:
        """The tree of the round that is held, and waits for commit, the commit_prev of a verify, or rollback."""
        return None if self._core.held is None else self._core.held.tree

    @property
    def sampling(self) -> Sampling:
        """Effective, with the seed."""
        return self._core.settings.sampling

    @property
    def model(self) -> Model:
        return self._core.model

    @property
    def resumed(self) -> int:
        """How often the session was made anew after the server had lost it."""
        return self._core.resumed

    @property
    def limits(self) -> Limits:
        """What the next tree may have."""
        core = self._core
        room = core.model.max_len - 1 - len(core.tokens)
        return Limits(core.max_nodes, max(0, min(core.max_depth, room)))

    def _may_generate(self) -> None:
        if self.sampling.rule == "client":
            raise ValueError('under rule "client" somebody has to choose: loop over verify and commit')


class Client:
    """A connection pool to one server.

    url: http://HOST:PORT. retry: how often and how long (Retry). timeout_s: silence within one attempt; connect_s: of
    one connection attempt. headers: sent with every request. ca_file: under https://, a PEM file
    of who is trusted instead of the system's authorities. transport: an httpx transport, for tests and proxies.

    Every call may raise ProblemError (the server refused), TransportError (no answer; retries are used up) and
    ContractError (an answer that the contract does not describe). Thread-safe; its sessions are not.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8471",
        *,
        retry: Retry | None = None,
        timeout_s: float = 30.0,
        connect_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._settings = Http(url, retry, timeout_s, connect_s, headers, ca_file)
        self._http = httpx.Client(transport=transport, timeout=self._settings.timeout(), **self._settings.options())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; sessions stay at the server until their leases end."""
        self._http.close()

    @property
    def retries(self) -> int:
        """Attempts after the first, of all calls so far."""
        return self._settings.context.retries

    def _do(self, effect: Send, sent: threading.Event | None = None) -> Reply:
        try:
            timeout = self._settings.timeout(effect.wait_s, effect.limit_s)
            trace = _no_delay if sent is None else _Sent(sent)
            return Http.reply(self._http.request(**Http.request(effect), timeout=timeout, extensions={"trace": trace}))
        except LOST as error:
            raise self._settings.failure(error) from error

    def _perform(self, effect: Effect, sent: threading.Event | None = None) -> Reply | None:
        if isinstance(effect, Pause):
            time.sleep(effect.seconds)
            return None
        return self._do(effect, sent)

    def _run(self, flow: Flow[T]) -> T:
        return drive(flow, self._perform)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Any call with a JSON answer; 204 gives {}. Repeated like the others, so the body must bear it."""
        return self._run(call(self._settings.context, method, path, body))

    def health(self) -> bool:
        """The process answers. False when it does not (no exception)."""
        try:
            return self._run(call(self._settings.context, "GET", "/healthz", patient=False)).get("status") == "ok"
        except TransportError:
            return False

    def ready(self, deep: bool = False) -> dict[str, Any]:
        """{"ready": bool, "checks": [...]}; deep repeats the server's self-test. Not retried: "not ready" is an answer."""
        reply = self._do(Send("GET", "/readyz" + ("?deep=1" if deep else "")))
        return oneshot.read_ready(reply)

    def model(self) -> Model:
        return self._run(flows.fetch_model(self._settings.context))

    def sessions(self) -> list[dict[str, Any]]:
        """States of the caller's sessions."""
        return list(self.request("GET", "/v1/sessions")["sessions"])

    def session(
        self,
        tokens: Tokens | None = None,
        *,
        prefix: SessionView | None = None,
        prefix_len: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        max_len: int | None = None,
        lease_s: int | None = None,
        cache_salt: str = "",
        hidden: HiddenWant | None = None,
    ) -> Session:
        """Create a session: prefills tokens (not empty) and draws the first pending token.

        prefix, instead of tokens: another session, whose first prefix_len (all) committed tokens are the prompt; they are
        sent only if the server has forgotten it. Session.fork also takes its pending token and sampling over.
        stop: up to 16 token ids. max_len: committed plus pending token, at most the model's. lease_s: 1..3600 (120).
        hidden: rows of the residual stream at the prompt's positions, into Session.hidden ([T, R, D]; projected [R, n]).
        """
        settings = Settings(sampling or Sampling(), tuple(stop), max_len, lease_s, cache_salt)
        parent = None if prefix is None else (prefix._core, prefix_len)
        return Session(self, self._run(flows.create(self._settings.context, tokens, parent, settings, hidden)))

    def verify(
        self,
        tokens: Tokens,
        tree: Tree,
        *,
        sampling: Sampling | None = None,
        want: Want | None = None,
        deadline_ms: int | None = None,
    ) -> Round:
        """One-shot: verify tree behind the prefix tokens (may be empty); nothing is kept. tree's node 0 is whatever
        the caller believes to be pending; it is not checked."""
        return self._run(oneshot.one_shot(self._settings.context, tokens, tree, sampling, want, deadline_ms))

    def score(
        self,
        tokens: Tokens | None,
        tree: Tree,
        *,
        session: SessionView | None = None,
        deadline_ms: int | None = None,
    ) -> oneshot.F64:
        """Log-probabilities of tree's nodes behind the prefix tokens (or a session, tokens None): [n], each node's token
        in its parent's row at temperature 1, without filters; nan for node 0. Commits nothing."""
        core = session._core if session is not None else None
        return self._run(oneshot.score(self._settings.context, tokens, tree, core, deadline_ms))

    def verify_batch(
        self, rounds: Sequence[tuple[Session, Tree]], *, rule: Rule | None = None, want: Want | None = None
    ) -> list[Round | ProblemError]:
        """One round of each session (up to 64, each once) in one call; the server runs them together. A round that it
        refused is the exception that Session.verify would raise, not raised; call verify of that session to recover."""
        cores = [(session._core, tree) for session, tree in rounds]
        return self._run(oneshot.batch(self._settings.context, cores, rule, want))

    def parity(
        self,
        tokens: Tokens | None = None,
        tree: Tree | None = None,
        *,
        session: SessionView | None = None,
        sampling: Sampling | None = None,
        strict: bool = False,
    ) -> dict[str, Any]:
        """Run a case through the fast path and the oracle; commits nothing. strict raises ParityMismatchError when
        they differ. Without arguments: the server's built-in case."""
        core = session._core if session is not None else None
        return self._run(oneshot.parity(self._settings.context, tokens, tree, core, sampling, strict))

    def events(self, session: SessionView | str, after: int | None = None) -> Iterator[Event]:
        """What the rounds of a session do, as it happens, until the session or the server ends: `for event in ...`. May
        be left at any time. session: one of this client's, or the id of another's. after: begin behind this round (0: the
        beginning) instead of with the session's state. A lost connection is opened again where it was lost."""
        following = Following(self._settings.context, session if isinstance(session, str) else session.id, after)
        while not following.over:
            options: dict[str, Any] = {"headers": following.headers(), "timeout": self._settings.quiet()}
            try:
                with self._http.stream("GET", following.path, **options) as answer:
                    if answer.status_code != 200:
                        answer.read()
                        following.check(Http.reply(answer))
                    for chunk in answer.iter_bytes():
                        yield from following.take(chunk)
                if not following.over:
                    raise Following.cut()
            except LOST as error:
                time.sleep(following.again(self._settings.failure(error)))
            except (TransportError, ProblemError) as error:
                time.sleep(following.again(error))

    def parity_totals(self) -> dict[str, Any]:
        """What shadow mode has seen since the start."""
        return self.request("GET", "/v1/parity")

    def parity_violation(self, number: int) -> bytes:
        """The reproducer of a violation: a .kdtr, or JSON for POST /v1/parity."""
        path = f"/v1/parity/violations/{int(number)}"
        return self._run(send(self._settings.context, Send("GET", path))).content


class Session(SessionView):
    """One session, one round at a time, from one thread. Closed by close() or leaving a with block.

    The rounds return Round and raise ProblemError, TransportError, ContractError; besides: DesyncError and MovedError
    when the session was changed elsewhere in a way that the text handed out does not survive; TreeError before
    anything is sent. After a TransportError the session may be used on: if the lost round was done, the next call
    finds its tokens and returns them (Round.recovered is "resync").
    """

    def __init__(self, client: Client, core: flows.SessionCore) -> None:
        super().__init__(core)
        self._client = client

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(Error):
            self._client._run(self._core.close(leaving=True))

    def verify(
        self,
        tree: Tree,
        *,
        rule: Rule | None = None,
        want: Want | None = None,
        hold: bool = False,
        commit_prev: tuple[Sequence[int], int | None] | None = None,
        deadline_ms: int | None = None,
        lease_s: int | None = None,
    ) -> Round:
        """Verify tree (node 0 is `pending`), commit the accepted path, draw the next pending token.

        rule: for this round only. hold (always under rule "client"): commit nothing; the round is a proposal (Round.held),
        and the caller says what becomes of it by commit, or by commit_prev (path, next) of the next verify, which settles
        it and runs tree, whose node 0 is next, in one call; if that one then fails, ProblemError.committed tells whether
        the held round was settled. deadline_ms: give up if not started by then (504, retried). lease_s: renew as well.
        """
        options = {"deadline_ms": deadline_ms, "lease_s": lease_s}
        return self._client._run(self._core.verify(tree, rule, want, hold, commit_prev, **options))

    def commit(self, path: Sequence[int], next: int | None = None, *, lease_s: int | None = None) -> Round:
        """Settle the held round: path is nodes of its tree from node 0 on, next the token that is pending behind them.
        [] without next discards the round. RuntimeError: nothing is held; TreeError: not a path."""
        return self._client._run(self._core.commit(path, next, lease_s=lease_s))

    def rollback(self, length: int, pending: int | None = None, *, lease_s: int | None = None) -> Round:
        """Back to the first length (1 to committed_len) committed tokens. The token that stood there is pending again, or
        `pending` is. A held round is dropped, a finished session reopened."""
        return self._client._run(self._core.rollback(length, pending, lease_s=lease_s))

    def fork(self, length: int | None = None, *, seed: int | None = None, lease_s: int | None = None) -> Session:
        """A session of its own behind the first `length` (all) committed tokens: no pass of the model, pages are shared.
        Its pending token is the one that stands there; with another seed what follows differs."""
        return Session(self._client, self._client._run(self._core.fork(length, seed, lease_s)))

    def decode(self, max_tokens: int, *, deadline_ms: int | None = None, lease_s: int | None = None) -> Round:
        """The server decodes up to max_tokens (1..1024) tokens alone."""
        return self._client._run(self._core.decode(max_tokens, deadline_ms=deadline_ms, lease_s=lease_s))

    def extend(
        self,
        tokens: Tokens,
        *,
        keep_pending: bool = False,
        deadline_ms: int | None = None,
        lease_s: int | None = None,
    ) -> Round:
        """Append known tokens. keep_pending puts the pending token before them, else it is dropped. Reopens a finished
        session."""
        flow = self._core.extend(tokens, keep_pending, deadline_ms=deadline_ms, lease_s=lease_s)
        return self._client._run(flow)

    def generate(
        self,
        drafter: Drafter | None,
        max_tokens: int,
        *,
        nodes: Nodes = 32,
        depth: int = 16,
        pipeline: bool = False,
        guesses: int = 1,
    ) -> Generator[Round, None, None]:
        """Rounds until max_tokens new tokens (this call's) are there or the session is finished. nodes: drafts of a
        tree, node 0 not counted, or "auto": as many as pay, by the server's costs, the link and how often the drafter is
        right (budget.py); depth: of a tree. drafter None: the server decodes alone, 16 tokens a round.

        pipeline: while a round is under way, draft the next one from a guess of its end and send it ahead (ahead.py;
        the drafter may have a method guess). For links whose round trip is not small beside a round; the text is the
        same. guesses: how many ends are guessed, each with a tree of its own, of which the right one runs. Rounds under
        way when the iterator is closed become part of the session. Without effect when there is no drafter or the server
        does not serve it. An exception of the drafter is raised behind the rounds that were under way: the server has done
        them, so they are handed out first. ValueError: the session's rule is "client"."""
        self._may_generate()
        if pipeline and drafter is not None and ahead.FEATURE in self.model.features:
            yield from ahead.generate(self._client, self._core, drafter, max_tokens, nodes, depth, guesses)
            return
        done, budget = 0, budget_of(nodes, self.model)
        while done < max_tokens and self.finish is None:
            tree = plan(drafter, self.sequence, self.limits, nodes, min(depth, max_tokens - done - 1), budget)
            round = self.verify(tree) if tree is not None else self.decode(min(16, max_tokens - done))
            done += len(round.new_tokens)
            if budget is not None and tree is not None:
                budget.learn(tree, round)
            yield round

    def fetch_logits(self, round: Round, *, rows: Rows | None = None, dtype: Dtype | None = None) -> Logits:
        """Logits of the last round that asked for them with logits_via="fetch"; rows: a part of them. 410
        round-evicted (GoneError) once a later round was done."""
        return self._client._run(self._core.fetch_logits(round, rows, dtype))

    def fetch_hidden(self, round: Round, *, rows: Rows | None = None, dtype: HiddenDtype | None = None) -> Hidden:
        """Hidden rows of the last round that asked for them with via="fetch"; rows: a part of them. values [T, R, D], or
        [R, n] projected. 410 round-evicted (GoneError) once a later round was done."""
        return self._client._run(self._core.fetch_hidden(round, rows, dtype))

    def stored_round(self, seq: int, wait_ms: int = 0) -> Round | None:
        """The stored answer of a round; None while it is running."""
        return self._client._run(self._core.stored_round(seq, wait_ms))

    def state(self, tail: int | None = None) -> dict[str, Any]:
        """The server's view, with the last `tail` (up to 4096) committed tokens."""
        return self._client._run(self._core.state(tail))

    def renew(self, lease_s: int) -> dict[str, Any]:
        return self._client._run(self._core.renew(lease_s))

    def close(self) -> None:
        """Delete the session at the server. Twice is fine."""
        self._client._run(self._core.close())
