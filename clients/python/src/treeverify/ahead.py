"""Speculate-ahead for the blocking client: while a round is under way, the next one is drafted from a guess of its end
and sent with that guess, so that the server can launch it without waiting for the network.

Two connections, each with its thread; the session's state is touched by the caller's thread alone. A wrong guess costs
what a synchronous round costs. Whatever goes wrong with a round of the pipeline, the session's own rules of recovery
take over with the same round, which the server answers exactly once.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .calls import call
from .digest import Digest
from .drafters import Drafter
from .errors import ContractError, Error, ProblemError
from .loop import Limits, plan
from .session import Ask, SessionCore
from .tree import Tree
from .values import Round

if TYPE_CHECKING:
    from .client import Client

FEATURE = "if"
EARLY_TRIES = 50  # of a conditional round that overtook the one it is about
EARLY_PAUSE_S = 0.001


class Guesser(Protocol):
    """A drafter may also say where its tree will end."""

    def guess(self, tokens: Sequence[int], tree: Tree) -> tuple[int, int] | None:
        """(last accepted node, token pending behind it) of this tree behind tokens; None: no idea."""
        ...


def likely_end(drafter: Drafter, tokens: Sequence[int], tree: Tree) -> tuple[int, int] | None:
    """The drafter's own guess, or its best path to the end and what it drafts behind that."""
    own = getattr(drafter, "guess", None)
    if own is not None:
        answer: tuple[int, int] | None = own(tokens, tree)
        return answer
    leaf = 0
    while children := tree.children(leaf):
        leaf = children[0] if tree.scores is None else children[int(np.argmax(tree.scores[children]))]
    behind = drafter.draft([*tokens, *path_tokens(tree, leaf)], 1, 1)
    drafts = behind.children(0)
    return (leaf, int(behind.tokens[drafts[0]])) if drafts else None


def path_tokens(tree: Tree, leaf: int) -> list[int]:
    """Tokens below node 0, down to the leaf."""
    path: list[int] = []
    while leaf > 0:
        path.append(int(tree.tokens[leaf]))
        leaf = int(tree.parents[leaf])
    return path[::-1]


@dataclasses.dataclass
class Flight:
    """One round under way. sequence: what its tree stands behind, the pending token last. left: new tokens wanted."""

    tree: Tree
    seq: int
    sequence: list[int]
    digest: Digest
    left: int
    guess: tuple[int, int] | None  # of how the round before ends
    answer: Future[tuple[dict[str, Any], float]]
    sent: threading.Event

    @property
    def ask(self) -> Ask:
        return Ask("verify", {"tree": self.tree.body()}, tree=self.tree)


class Pipeline:
    def __init__(self, client: Client, core: SessionCore, drafter: Drafter, nodes: int, depth: int) -> None:
        self.client, self.core, self.drafter = client, core, drafter
        self.nodes, self.depth = nodes, depth
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="treeverify-ahead")
        self.first: Flight | None = None  # under way at the session's present state
        self.second: Flight | None = None  # waits for the first

    # --- sending -------------------------------------------------------------------------------------------------

    def _tree(self, sequence: list[int], left: int) -> Tree:
        room = self.core.model.max_len - len(sequence)
        limits = Limits(self.core.max_nodes, max(0, min(self.core.max_depth, room)))
        tree = plan(self.drafter, sequence, limits, self.nodes, min(self.depth, left - 1))
        assert tree is not None
        tree.check(self.core.model.vocab, self.core.max_nodes, self.core.max_depth)
        return tree

    def _post(self, body: dict[str, Any], sent: threading.Event, before: Flight | None) -> tuple[dict[str, Any], float]:
        """On a thread of the pool: the answer and how long it took."""
        started = time.monotonic()
        path = f"{self.core.path}/verify"
        for left in range(EARLY_TRIES, -1, -1):
            try:
                answer = self.client._run(call(self.core.context, "POST", path, body), sent)
                return answer, time.monotonic() - started
            except ProblemError as problem:
                failed = before is None or (before.answer.done() and before.answer.exception() is not None)
                if problem.code != "seq-gap" or failed or left == 0:
                    raise
            time.sleep(EARLY_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def _send(self, flight: Flight, before: Flight | None) -> Flight:
        body: dict[str, Any] = {
            "seq": flight.seq, "epoch": self.core.epoch, "expected_len": len(flight.sequence) - 1,
            "expected_digest": flight.digest.hex(), **flight.ask.fields,
        }
        if before is not None and flight.guess is not None:
            leaf, pending = flight.guess
            body["if"] = {"seq": before.seq, "leaf": leaf, "pending": pending}
            before.sent.wait(self.client._settings.timeout_s)  # on another connection: it might arrive first
        flight.answer = self.pool.submit(self._post, body, flight.sent, before)
        return flight

    def start(self, left: int) -> None:
        """A round at the session's state, and one behind it."""
        core = self.core
        sequence = [*core.tokens, core.pending]
        flight = Flight(self._tree(sequence, left), core.next_seq, sequence, core.digest.copy(), left, None, Future(),
                        threading.Event())
        self.first = self._send(flight, None)
        self.second = self._behind(self.first)

    def _behind(self, before: Flight) -> Flight | None:
        """The round after `before`, if there is a guess and the text goes on behind it."""
        guess = likely_end(self.drafter, before.sequence, before.tree)
        if guess is None:
            return None
        leaf, pending = guess
        path = path_tokens(before.tree, leaf)
        left = before.left - len(path) - 1
        sequence = [*before.sequence, *path, pending]
        settings = self.core.settings
        longest = settings.max_len or self.core.model.max_len
        if left < 1 or pending in settings.stop or len(sequence) >= longest:
            return None
        digest = before.digest.copy().push([before.sequence[-1], *path])
        flight = Flight(self._tree(sequence, left), before.seq + 1, sequence, digest, left, guess, Future(),
                        threading.Event())
        return self._send(flight, before)

    # --- answers -------------------------------------------------------------------------------------------------

    def _outcome(self, flight: Flight) -> dict[str, Any] | None:
        """An answer that was lost, as the skipped round behind it has it."""
        if self.second is None:
            return None
        try:
            answer, _ = self.second.answer.result()
        except Error:
            return None
        outcome = answer.get("outcome")
        return outcome if isinstance(outcome, dict) and outcome.get("seq") == flight.seq else None

    def _take(self, flight: Flight) -> Round:
        """The first round's end, into the session."""
        core = self.core
        retries = core.context.retries
        try:
            answer, took_s = flight.answer.result()
            return dataclasses.replace(core._take(flight.ask, answer), rtt_s=took_s)
        except ContractError:
            raise
        except Error:
            outcome = self._outcome(flight)  # and the other round has ended: nothing is under way
            if outcome is not None:
                return dataclasses.replace(core._take(flight.ask, outcome), retries=core.context.retries - retries)
            return self.client._run(core._round(flight.ask))

    def _skip(self, flight: Flight) -> None:
        """A round whose guess was wrong used its number up, unless it never got there."""
        try:
            answer, _ = flight.answer.result()
        except Error:
            return
        if answer.get("status") != "skipped" or answer.get("committed_len") != len(self.core.tokens):
            raise ContractError(f"round {flight.seq} ran, but its guess had not held")
        self.core.next_seq = flight.seq + 1

    def step(self) -> Round:
        """Await the first round; the next ones are under way on return."""
        first, self.first = self.first, None
        assert first is not None
        round = self._take(first)
        second, self.second = self.second, None
        left = first.left - len(round.new_tokens)
        held = second is not None and round.accepted_nodes and second.guess == (round.accepted_nodes[-1], round.pending)
        if round.recovered is not None:
            held = False  # the session's state has been read anew, whatever became of the second
        elif second is not None and not (held and round.finish is None):
            self._skip(second)
        if self.core.finish is not None or left < 1:
            return round
        if held and second is not None:
            self.first, self.second = second, self._behind(second)
        else:
            self.start(left)
        return round

    def close(self) -> None:
        """What is still under way becomes part of the session."""
        try:
            while self.first is not None:
                flight, self.first = self.first, None
                round = self._take(flight)
                second, self.second = self.second, None
                if second is None or round.recovered is not None:
                    continue
                if round.accepted_nodes and second.guess == (round.accepted_nodes[-1], round.pending):
                    self.first = second if self.core.finish is None else None
                else:
                    self._skip(second)
        finally:
            self.pool.shutdown()


def generate(
    client: Client, core: SessionCore, drafter: Drafter, max_tokens: int, nodes: int, depth: int
) -> Iterator[Round]:
    if core.closed or core.busy:
        raise RuntimeError("the session is closed" if core.closed else "another call of this session is under way")
    if max_tokens < 1 or core.finish is not None:
        return
    core.busy = True
    pipeline = Pipeline(client, core, drafter, nodes, depth)
    try:
        pipeline.start(max_tokens)
        while pipeline.first is not None:
            yield pipeline.step()
    finally:
        try:
            pipeline.close()
        finally:
            core.busy = False
