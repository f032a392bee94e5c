"""AsyncClient and AsyncSession: the same flows as client.py's on asyncio. Docstrings are there where a method is not
the awaited twin of the blocking one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from . import ahead, oneshot, session as flows
from .asks import Settings, Tokens
from .calls import Effect, Flow, Pause, Reply, Retry, Send, call, drive_async, send
from .client import LOST, Http, SessionView
from .drafters import Drafter
from .errors import Error, ProblemError, TransportError
from .events import Event, Following
from .loop import Nodes, budget_of, plan
from .tree import Tree
from .values import Dtype, Hidden, HiddenDtype, HiddenWant, Logits, Model, Round, Rows, Rule, Sampling, Want

T = TypeVar("T")


class AsyncClient:
    """A connection pool to one server for one event loop; drives any number of sessions. Arguments and errors are
    Client's. Cancelling a call is safe: the next call of that session finds out what became of the round."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8471",
        *,
        retry: Retry | None = None,
        timeout_s: float = 30.0,
        connect_s: float = 5.0,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = Http(url, retry, timeout_s, connect_s, headers, ca_file)
        self._http = httpx.AsyncClient(
            transport=transport, timeout=self._settings.timeout(), **self._settings.options()
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def retries(self) -> int:
        return self._settings.context.retries

    async def _do(self, effect: Send, sent: asyncio.Event | None = None) -> Reply:
        async def written(event: str, info: dict[str, Any]) -> None:
            if sent is not None and event.endswith("send_request_body.complete"):
                sent.set()

        try:
            timeout = self._settings.timeout(effect.wait_s, effect.limit_s)
            extensions = {} if sent is None else {"trace": written}
            request = self._http.request(**Http.request(effect), timeout=timeout, extensions=extensions)
            return Http.reply(await request)
        except LOST as error:
            raise self._settings.failure(error) from error

    async def _perform(self, effect: Effect, sent: asyncio.Event | None = None) -> Reply | None:
        if isinstance(effect, Pause):
            await asyncio.sleep(effect.seconds)
            return None
        return await self._do(effect, sent)

    async def _run(self, flow: Flow[T]) -> T:
        return await drive_async(flow, self._perform)

    async def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self._run(call(self._settings.context, method, path, body))

    async def health(self) -> bool:
        try:
            answer = await self._run(call(self._settings.context, "GET", "/healthz", patient=False))
            return answer.get("status") == "ok"
        except TransportError:
            return False

    async def ready(self, deep: bool = False) -> dict[str, Any]:
        return oneshot.read_ready(await self._do(Send("GET", "/readyz" + ("?deep=1" if deep else ""))))

    async def model(self) -> Model:
        return await self._run(flows.fetch_model(self._settings.context))

    async def sessions(self) -> list[dict[str, Any]]:
        return list((await self.request("GET", "/v1/sessions"))["sessions"])

    async def session(
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
    ) -> AsyncSession:
        """`async with await client.session(prompt) as session: ...`"""
        settings = Settings(sampling or Sampling(), tuple(stop), max_len, lease_s, cache_salt)
        parent = None if prefix is None else (prefix._core, prefix_len)
        return AsyncSession(self, await self._run(flows.create(self._settings.context, tokens, parent, settings, hidden)))

    async def verify(
        self,
        tokens: Tokens,
        tree: Tree,
        *,
        sampling: Sampling | None = None,
        want: Want | None = None,
        deadline_ms: int | None = None,
    ) -> Round:
        return await self._run(oneshot.one_shot(self._settings.context, tokens, tree, sampling, want, deadline_ms))

    async def score(
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
        return await self._run(oneshot.score(self._settings.context, tokens, tree, core, deadline_ms))

    async def verify_batch(
        self, rounds: Sequence[tuple[AsyncSession, Tree]], *, rule: Rule | None = None, want: Want | None = None
    ) -> list[Round | ProblemError]:
        """One round of each session (up to 64, each once) in one call; the server runs them together. A round that it
        refused is the exception that Session.verify would raise, not raised; call verify of that session to recover."""
        cores = [(session._core, tree) for session, tree in rounds]
        return await self._run(oneshot.batch(self._settings.context, cores, rule, want))

    async def parity(
        self,
        tokens: Tokens | None = None,
        tree: Tree | None = None,
        *,
        session: SessionView | None = None,
        sampling: Sampling | None = None,
        strict: bool = False,
    ) -> dict[str, Any]:
        core = session._core if session is not None else None
        return await self._run(oneshot.parity(self._settings.context, tokens, tree, core, sampling, strict))

    async def events(self, session: SessionView | str, after: int | None = None) -> AsyncGenerator[Event, None]:
        """Client.events for `async for`; an iterator that is left early should be closed (contextlib.aclosing)."""
        following = Following(self._settings.context, session if isinstance(session, str) else session.id, after)
        while not following.over:
            options: dict[str, Any] = {"headers": following.headers(), "timeout": self._settings.quiet()}
            try:
                async with self._http.stream("GET", following.path, **options) as answer:
                    if answer.status_code != 200:
                        await answer.aread()
                        following.check(Http.reply(answer))
                    async for chunk in answer.aiter_bytes():
                        for event in following.take(chunk):
                            yield event
                if not following.over:
                    raise Following.cut()
            except LOST as error:
                await asyncio.sleep(following.again(self._settings.failure(error)))
            except (TransportError, ProblemError) as error:
                await asyncio.sleep(following.again(error))

    async def parity_totals(self) -> dict[str, Any]:
        return await self.request("GET", "/v1/parity")

    async def parity_violation(self, number: int) -> bytes:
        path = f"/v1/parity/violations/{int(number)}"
        return (await self._run(send(self._settings.context, Send("GET", path)))).content


class AsyncSession(SessionView):
    """Session for one task at a time (a second concurrent call raises RuntimeError)."""

    def __init__(self, client: AsyncClient, core: flows.SessionCore) -> None:
        super().__init__(core)
        self._client = client

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.close()
            return
        with contextlib.suppress(Error):
            await self._client._run(self._core.close(leaving=True))

    async def verify(
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
        options = {"deadline_ms": deadline_ms, "lease_s": lease_s}
        return await self._client._run(self._core.verify(tree, rule, want, hold, commit_prev, **options))

    async def commit(self, path: Sequence[int], next: int | None = None, *, lease_s: int | None = None) -> Round:
        return await self._client._run(self._core.commit(path, next, lease_s=lease_s))

    async def rollback(self, length: int, pending: int | None = None, *, lease_s: int | None = None) -> Round:
        return await self._client._run(self._core.rollback(length, pending, lease_s=lease_s))

    async def fork(
        self, length: int | None = None, *, seed: int | None = None, lease_s: int | None = None
    ) -> AsyncSession:
        return AsyncSession(self._client, await self._client._run(self._core.fork(length, seed, lease_s)))

    async def decode(self, max_tokens: int, *, deadline_ms: int | None = None, lease_s: int | None = None) -> Round:
        return await self._client._run(self._core.decode(max_tokens, deadline_ms=deadline_ms, lease_s=lease_s))

    async def extend(
        self,
        tokens: Tokens,
        *,
        keep_pending: bool = False,
        deadline_ms: int | None = None,
        lease_s: int | None = None,
    ) -> Round:
        flow = self._core.extend(tokens, keep_pending, deadline_ms=deadline_ms, lease_s=lease_s)
        return await self._client._run(flow)

    async def generate(
        self,
        drafter: Drafter | None,
        max_tokens: int,
        *,
        nodes: Nodes = 32,
        depth: int = 16,
        pipeline: bool = False,
        guesses: int = 1,
    ) -> AsyncGenerator[Round, None]:
        """Session.generate for `async for`. The drafter runs on the event loop's thread: other sessions wait for it.
        An iterator that is left early should be closed (contextlib.aclosing), so that what a pipeline has under way
        becomes part of the session at once."""
        self._may_generate()
        if pipeline and drafter is not None and ahead.FEATURE in self.model.features:
            rounds = ahead.generate_async(self._client, self._core, drafter, max_tokens, nodes, depth, guesses)
            async with contextlib.aclosing(rounds):
                async for round in rounds:
                    yield round
            return
        done, budget = 0, budget_of(nodes, self.model)
        while done < max_tokens and self.finish is None:
            tree = plan(drafter, self.sequence, self.limits, nodes, min(depth, max_tokens - done - 1), budget)
            round = await (self.verify(tree) if tree is not None else self.decode(min(16, max_tokens - done)))
            done += len(round.new_tokens)
            if budget is not None and tree is not None:
                budget.learn(tree, round)
            yield round

    async def fetch_logits(self, round: Round, *, rows: Rows | None = None, dtype: Dtype | None = None) -> Logits:
        return await self._client._run(self._core.fetch_logits(round, rows, dtype))

    async def fetch_hidden(self, round: Round, *, rows: Rows | None = None, dtype: HiddenDtype | None = None) -> Hidden:
        return await self._client._run(self._core.fetch_hidden(round, rows, dtype))

    async def stored_round(self, seq: int, wait_ms: int = 0) -> Round | None:
        return await self._client._run(self._core.stored_round(seq, wait_ms))

    async def state(self, tail: int | None = None) -> dict[str, Any]:
        return await self._client._run(self._core.state(tail))

    async def renew(self, lease_s: int) -> dict[str, Any]:
        return await self._client._run(self._core.renew(lease_s))

    async def close(self) -> None:
        await self._client._run(self._core.close())
