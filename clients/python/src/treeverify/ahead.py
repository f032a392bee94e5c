"""Speculate-ahead: while a round is under way, the next one is drafted from guesses of its end and sent with them, so
that the server can launch it without waiting for the network.

Pipeline has the rules, as generators without input or output like session.py's; Threads and Tasks run it for the
blocking and the async client. Two rounds are under way at most, each on a connection of its own; the session's state is
touched by the caller alone. A wrong guess costs what a round without one costs. Whatever goes wrong with a round of the
pipeline, the session's own rules of recovery take over with the same round, which the server answers exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

from .asks import Ask
from .calls import Flow, Pause, call, drive, drive_async
from .digest import Digest
from .drafters import Drafter
from .errors import ContractError, Error, ProblemError
from .loop import Limits, Nodes, budget_of, plan
from .session import SessionCore
from .tree import Tree
from .values import Round

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .client import Client

T = TypeVar("T")
End: TypeAlias = tuple[int, int]  # of a round: the last accepted node, and the token pending behind it

FEATURE, FEATURE_MANY = "if", "alternatives"
GUESSES_MAX = 32
EARLY_TRIES = 50  # of a conditional round that overtook the one it is about
EARLY_PAUSE_S = 0.001


class Guesser(Protocol):
    """A drafter may also say where its tree will end: one guess, or several, the likeliest first."""

    def guess(self, tokens: Sequence[int], tree: Tree) -> End | list[End] | None:
        """(last accepted node, token pending behind it) of this tree behind tokens; None: no idea."""
        ...


def likely_ends(drafter: Drafter, tokens: Sequence[int], tree: Tree, count: int = 1) -> list[End]:
    """Up to count: the drafter's own guesses; else its best paths to their ends, and what it drafts behind those."""
    own = getattr(drafter, "guess", None)
    if own is not None:
        answer: End | list[End] | None = own(tokens, tree)
        return [] if answer is None else answer[:count] if isinstance(answer, list) else [answer]
    ends: list[End] = []
    for leaf in _leaves(tree)[:count]:
        behind = drafter.draft([*tokens, *path_tokens(tree, leaf)], 1, 1)
        ends += [(leaf, int(behind.tokens[child])) for child in behind.children(0)[:1]]
    if 0 < len(ends) < count:  # the best path once more, with other tokens behind it
        leaf, first = ends[0]
        behind = drafter.draft([*tokens, *path_tokens(tree, leaf)], count - len(ends) + 1, 1)
        others = [int(behind.tokens[child]) for child in behind.children(0)]
        ends += [(leaf, token) for token in others if token != first][: count - len(ends)]
    return ends


def _leaves(tree: Tree) -> list[int]:
    """The end of the best path first, then by score."""
    best = 0
    while children := tree.children(best):
        best = children[0] if tree.scores is None else children[int(np.argmax(tree.scores[children]))]
    others = [leaf for leaf in tree.leaves() if leaf != best]
    if tree.scores is not None:
        scores = tree.scores
        others.sort(key=lambda leaf: -float(scores[leaf]))
    return [best, *others]


def path_tokens(tree: Tree, leaf: int) -> list[int]:
    """Tokens below node 0, down to the leaf."""
    return tree.path_tokens(leaf)[1:]


@dataclasses.dataclass
class Case:
    """What a round is if its guess is right. sequence: what its tree stands behind, the pending token last; digest: of
    all but that one; left: new tokens wanted."""

    tree: Tree
    sequence: list[int]
    digest: Digest
    left: int
    guess: End | None  # of how the round before ends

    @property
    def ask(self) -> Ask:
        return Ask("verify", {"tree": self.tree.body()}, tree=self.tree)


@dataclasses.dataclass(eq=False)
class Flight:
    """One round under way: a case, or several of which one will be right. handle, sent, failed are the driver's."""

    seq: int
    cases: list[Case]
    before: Flight | None
    body: dict[str, Any]
    handle: Any = None
    sent: Any = None
    failed: bool = False

    def post(self, core: SessionCore) -> Flow[tuple[dict[str, Any], float]]:
        """The exchange: the answer and how long it took. Runs beside the pipeline and touches no state of the session."""
        started = time.monotonic()
        path = f"{core.path}/verify"
        for left in range(EARLY_TRIES, -1, -1):
            try:
                answer = yield from call(core.context, "POST", path, self.body)
                return answer, time.monotonic() - started
            except ProblemError as problem:
                alone = self.before is None or self.before.failed
                if problem.code != "seq-gap" or alone or left == 0:
                    raise
            yield Pause(EARLY_PAUSE_S)
        raise AssertionError("the last try returns or raises")


@dataclasses.dataclass(frozen=True)
class Start:
    """Send a flight, and go on at once (when the one before it has been written)."""

    flight: Flight


@dataclasses.dataclass(frozen=True)
class Answer:
    """Wait for a flight: its answer and seconds, or its Error."""

    flight: Flight


Steps: TypeAlias = Generator[Any, Any, T]  # Start, Answer, and what session.py's flows yield


class Pipeline:
    def __init__(self, core: SessionCore, drafter: Drafter, nodes: Nodes, depth: int, guesses: int) -> None:
        if not 1 <= guesses <= GUESSES_MAX:
            raise ValueError(f"guesses: 1 to {GUESSES_MAX}")
        self.core, self.drafter = core, drafter
        self.nodes, self.depth = nodes, depth
        self.budget = budget_of(nodes, core.model, pipelined=True)
        self.guesses = guesses if FEATURE_MANY in core.model.features else 1
        self.first: Flight | None = None  # under way at the session's present state; its only case is right
        self.second: Flight | None = None  # waits for the first
        self.failure: Exception | None = None  # of the drafter; raised when what is under way has been handed out

    # --- sending -------------------------------------------------------------------------------------------------

    def _case(self, sequence: list[int], digest: Digest, left: int, guess: End | None) -> Case:
        room = self.core.model.max_len - len(sequence)
        limits = Limits(self.core.max_nodes, max(0, min(self.core.max_depth, room)))
        tree = plan(self.drafter, sequence, limits, self.nodes, min(self.depth, left - 1), self.budget)
        assert tree is not None
        tree.check(self.core.model.vocab, self.core.max_nodes, self.core.max_depth)
        return Case(tree, sequence, digest, left, guess)

    def _flight(self, seq: int, cases: list[Case], before: Flight | None) -> Flight:
        body: dict[str, Any] = {"seq": seq, "epoch": self.core.epoch}
        only = cases[0]
        if len(cases) == 1:
            body.update(expected_len=len(only.sequence) - 1, expected_digest=only.digest.hex(), **only.ask.fields)
        if before is not None:
            body["if"] = {"seq": before.seq}
            ends = [dict(zip(("leaf", "pending"), case.guess or ())) for case in cases]
            if len(cases) == 1:
                body["if"].update(ends[0])
            else:
                body["alternatives"] = [{**end, "tree": case.tree.body()} for end, case in zip(ends, cases)]
        return Flight(seq, cases, before, body)

    def begin(self, left: int) -> Steps[None]:
        try:
            yield from self.start(left)
        except Exception as error:
            if self.first is None:
                raise
            self.failure = error

    def start(self, left: int) -> Steps[None]:
        """A round at the session's state, and one behind it."""
        core = self.core
        case = self._case([*core.tokens, core.pending], core.digest.copy(), left, None)
        self.first = self._flight(core.next_seq, [case], None)
        yield Start(self.first)
        yield from self._follow(self.first)

    def _follow(self, before: Flight) -> Steps[None]:
        """Send the round after `before`, if there is a guess and the text goes on behind it."""
        case = before.cases[0]
        settings = self.core.settings
        longest = settings.max_len or self.core.model.max_len
        cases = []
        for leaf, pending in dict.fromkeys(likely_ends(self.drafter, case.sequence, case.tree, self.guesses)):
            if not 0 <= leaf < len(case.tree):
                raise ValueError(f"guess: node {leaf} is not in the tree of {len(case.tree)}")
            path = path_tokens(case.tree, leaf)
            left = case.left - len(path) - 1
            sequence = [*case.sequence, *path, pending]
            if left >= 1 and pending not in settings.stop and len(sequence) < longest:
                digest = case.digest.copy().push([case.sequence[-1], *path])
                cases.append(self._case(sequence, digest, left, (leaf, pending)))
        if cases:
            self.second = self._flight(before.seq + 1, cases, before)
            yield Start(self.second)

    # --- answers -------------------------------------------------------------------------------------------------

    def _outcome(self, flight: Flight) -> Steps[dict[str, Any] | None]:
        """An answer that was lost, as the skipped round behind it has it."""
        if self.second is None:
            return None
        try:
            answer, _ = yield Answer(self.second)
        except Error:
            return None
        outcome = answer.get("outcome")
        return outcome if isinstance(outcome, dict) and outcome.get("seq") == flight.seq else None

    def _take(self, flight: Flight) -> Steps[Round]:
        """The first round's end, into the session."""
        core, ask = self.core, flight.cases[0].ask
        retries = core.context.retries
        try:
            answer, took_s = yield Answer(flight)
            return dataclasses.replace(core._take(ask, answer), rtt_s=took_s)
        except ContractError:
            raise
        except Error:
            outcome = yield from self._outcome(flight)  # and the other round has ended: nothing is under way
            if outcome is not None:
                # of another tree where a call that was cancelled had used the number: then the session's rules find out
                with contextlib.suppress(ContractError):
                    return dataclasses.replace(core._take(ask, outcome), retries=core.context.retries - retries)
            round: Round = yield from core._round(ask)
            return round

    def _skip(self, flight: Flight) -> Steps[None]:
        """A round whose guesses were wrong used its number up, unless it never got there."""
        try:
            answer, _ = yield Answer(flight)
        except Error:
            return
        if answer.get("status") != "skipped" or answer.get("committed_len") != len(self.core.tokens):
            raise ContractError(f"round {flight.seq} ran, but no guess of it had held")
        self.core.next_seq = flight.seq + 1

    def _end(self) -> Steps[tuple[Flight, Round]]:
        first, self.first = self.first, None
        assert first is not None
        return first, (yield from self._take(first))

    def _behind(self, first: Flight, round: Round) -> Steps[None]:
        """The second round becomes the first when a guess of it held, and is over otherwise."""
        first.before = None  # and so on to the first of all
        if self.budget is not None:
            self.budget.learn(first.cases[0].tree, round)
        second, self.second = self.second, None
        if second is None or round.recovered is not None:
            return  # recovered: the state has been read anew, whatever became of the second
        end = (round.accepted_nodes[-1], round.pending) if round.accepted_nodes else None
        right = [case for case in second.cases if case.guess == end]
        if right and round.finish is None:
            second.cases = right
            self.first = second
        else:
            yield from self._skip(second)

    def step(self) -> Steps[Round]:
        """Await the first round; the next ones are under way on return. The round is committed and has to reach the caller:
        what goes wrong behind it, above all in the drafter, is kept as `failure`, and nothing more is sent."""
        first, round = yield from self._end()
        left = first.cases[0].left - len(round.new_tokens)
        try:
            yield from self._behind(first, round)
            if self.failure is not None:
                return round
            if self.first is not None:
                yield from self._follow(self.first)
            elif self.core.finish is None and left >= 1:
                yield from self.start(left)
        except Exception as error:
            self.failure = self.failure or error
        return round

    def close(self) -> Steps[None]:
        """What is still under way becomes part of the session."""
        while self.first is not None:
            first, round = yield from self._end()
            yield from self._behind(first, round)


def _begin(
    core: SessionCore, drafter: Drafter, max_tokens: int, nodes: Nodes, depth: int, guesses: int
) -> Pipeline | None:
    if core.closed or core.busy:
        raise RuntimeError("the session is closed" if core.closed else "another call of this session is under way")
    pipeline = Pipeline(core, drafter, nodes, depth, guesses)
    return pipeline if max_tokens >= 1 and core.finish is None else None


# --- the blocking driver -------------------------------------------------------------------------------------------


class Threads:
    """Performs the pipeline's effects, each flight on a thread of its own, which the program's end does not wait for."""

    def __init__(self, client: Client, core: SessionCore) -> None:
        self.client, self.core = client, core
        self.under_way: set[Future[tuple[dict[str, Any], float]]] = set()
        self.given_up = False

    def _send(self, effect: Any, flight: Flight) -> Any:
        if self.given_up:
            raise Error("given up")
        return self.client._perform(effect, flight.sent)

    def _post(self, flight: Flight) -> None:
        try:
            result = drive(flight.post(self.core), lambda effect: self._send(effect, flight))
        except BaseException as error:
            flight.failed = True
            flight.sent.set()  # who waits for it is not kept by a request that failed
            flight.handle.set_exception(error)
        else:
            flight.sent.set()
            flight.handle.set_result(result)

    def perform(self, effect: Any) -> Any:
        if isinstance(effect, Start):
            flight = effect.flight
            flight.sent = threading.Event()
            if flight.before is not None:
                flight.before.sent.wait(self.client._settings.timeout_s)  # on another connection: it might arrive first
            flight.handle = Future()
            self.under_way.add(flight.handle)
            flight.handle.add_done_callback(self.under_way.discard)
            threading.Thread(target=self._post, args=(flight,), name="treeverify-ahead", daemon=True).start()
            return None
        if isinstance(effect, Answer):
            future: Future[tuple[dict[str, Any], float]] = effect.flight.handle
            return future.result()
        return self.client._perform(effect)

    def end(self) -> None:
        """Wait for what is under way, unless it was given up."""
        if not self.given_up:
            wait(list(self.under_way))


def generate(
    client: Client, core: SessionCore, drafter: Drafter, max_tokens: int, nodes: Nodes, depth: int, guesses: int
) -> Iterator[Round]:
    pipeline = _begin(core, drafter, max_tokens, nodes, depth, guesses)
    if pipeline is None:
        return
    core.busy = True
    driver = Threads(client, core)
    before = core.mark()
    try:
        drive(pipeline.begin(max_tokens), driver.perform)
        while pipeline.first is not None:
            before = core.mark()
            yield drive(pipeline.step(), driver.perform)
        if pipeline.failure is not None:
            raise pipeline.failure
    except KeyboardInterrupt:
        # not kept by a server that may be gone; the session's next call finds out what nobody is given now
        driver.given_up = True
        pipeline.first = None
        core.back_to(before)
        raise
    finally:
        try:
            drive(pipeline.close(), driver.perform)
        finally:
            driver.end()
            core.busy = False


# --- the async driver ----------------------------------------------------------------------------------------------


class Tasks:
    """Performs the pipeline's effects, each flight as a task."""

    def __init__(self, client: AsyncClient, core: SessionCore) -> None:
        self.client, self.core = client, core
        self.tasks: set[asyncio.Task[tuple[dict[str, Any], float]]] = set()

    async def _post(self, flight: Flight) -> tuple[dict[str, Any], float]:
        try:
            return await drive_async(flight.post(self.core), lambda effect: self.client._perform(effect, flight.sent))
        except BaseException:
            flight.failed = True
            raise
        finally:
            flight.sent.set()

    async def perform(self, effect: Any) -> Any:
        if isinstance(effect, Start):
            flight = effect.flight
            flight.sent = asyncio.Event()
            if flight.before is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(flight.before.sent.wait(), self.client._settings.timeout_s)
            task = asyncio.create_task(self._post(flight))
            flight.handle = task
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            return None
        if isinstance(effect, Answer):
            return await asyncio.shield(effect.flight.handle)  # cancelled with the call, by give_up
        return await self.client._perform(effect)

    async def give_up(self) -> None:
        """End what is under way without waiting for the server, as a cancelled call does."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate_async(
    client: AsyncClient, core: SessionCore, drafter: Drafter, max_tokens: int, nodes: Nodes, depth: int, guesses: int
) -> AsyncGenerator[Round, None]:
    pipeline = _begin(core, drafter, max_tokens, nodes, depth, guesses)
    if pipeline is None:
        return
    core.busy = True
    driver = Tasks(client, core)
    before = core.mark()
    try:
        await drive_async(pipeline.begin(max_tokens), driver.perform)
        while pipeline.first is not None:
            before = core.mark()
            yield await drive_async(pipeline.step(), driver.perform)
        if pipeline.failure is not None:
            raise pipeline.failure
    except asyncio.CancelledError:
        # a round may be in the session already that nobody is given now: the session's next call finds out
        pipeline.first = None
        core.back_to(before)
        raise
    finally:
        try:
            await drive_async(pipeline.close(), driver.perform)
        finally:
            await driver.give_up()
            core.busy = False
