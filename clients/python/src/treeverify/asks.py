"""What a session can be asked: one round as its caller wants it, and what an answer of it must be like.

Knows bodies and the arithmetic of texts (which tokens are committed behind an answer). Sends nothing and remembers
nothing; session.py does both.
"""

from __future__ import annotations

import base64
import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import ContractError
from .tree import Tree, TreeError
from .values import Round, Sampling, read_commit, read_rollback, read_round

_B64_FROM = 64  # tokens; shorter lists stay readable

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Kind: TypeAlias = Literal["verify", "decode", "extend", "rollback", "commit"]


def token_list(tokens: Tokens) -> list[int]:
    """A text as its caller has it, lists and arrays of any integers, as a list. ValueError: not token ids."""
    wanted = "tokens: integers from 0 to 2^31 - 1, in a list or an array of one dimension"
    try:
        ids = [operator.index(token) for token in tokens]
    except TypeError as error:
        raise ValueError(wanted) from error
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError(wanted)
    return ids


def tokens_body(tokens: Tokens) -> dict[str, Any]:
    """Member `tokens` or, for long lists, `tokens_b64`."""
    ids = token_list(tokens)
    if len(ids) < _B64_FROM:
        return {"tokens": ids}
    return {"tokens_b64": base64.b64encode(np.array(ids, dtype="<i4").tobytes()).decode()}


def given(options: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in options.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a session was created with; needed again to resume it."""

    sampling: Sampling
    stop: tuple[int, ...] = ()
    max_len: int | None = None
    lease_s: int | None = None
    cache_salt: str = ""

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"sampling": self.sampling.body()}
        if self.stop or self.max_len is not None:
            body["stop"] = {}
            if self.stop:
                body["stop"]["token_ids"] = list(self.stop)
            if self.max_len is not None:
                body["stop"]["max_len"] = self.max_len
        if self.lease_s is not None:
            body["lease_s"] = self.lease_s
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body


@dataclasses.dataclass(frozen=True)
class Held:
    """A held round that waits for its caller's word."""

    seq: int
    tree: Tree


@dataclasses.dataclass(frozen=True)
class Settle:
    """How a held round is settled: the path of its tree (none: discarded) and the token pending behind it."""

    seq: int
    path: list[int]
    tokens: list[int]  # of the path
    next: int | None

    @classmethod
    def of(cls, held: Held, path: Sequence[int], next_token: int | None) -> Settle:
        """TreeError for what is no path of the tree from node 0; ValueError for a next without path or the reverse."""
        nodes = [int(node) for node in path]
        if (next_token is None) != (not nodes):
            raise ValueError("commit: a path goes with the token that is pending behind it, and [] without one")
        for at, node in enumerate(nodes):
            above = nodes[at - 1] if at > 0 else -1
            if not 0 <= node < len(held.tree) or int(held.tree.parents[node]) != above:
                raise TreeError("wrong-value", f"path: node {node} does not follow {above}", node)
        tokens = [int(held.tree.tokens[node]) for node in nodes]
        return cls(held.seq, nodes, tokens, None if next_token is None else int(next_token))

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"seq": self.seq, "path": self.path}
        if self.next is not None:
            body["next"] = self.next
        return body


@dataclasses.dataclass
class Ask:
    """One round as the caller wants it; encoded anew only when the session has moved."""

    kind: Kind
    fields: dict[str, Any]
    tree: Tree | None = None  # of a verify
    holds: bool = False  # a verify that is to be held
    tokens: list[int] = dataclasses.field(default_factory=list)  # of an extend
    keep_pending: bool = False
    length: int = 0  # of a rollback
    pending: int | None = None
    settle: Settle | None = None  # a commit's, or a verify's commit_prev

    def read(self, answer: Mapping[str, Any], rule: str) -> Round:
        if self.kind == "commit":
            return read_commit(answer)
        return read_rollback(answer, rule) if self.kind == "rollback" else read_round(answer)

    def before(self, tokens: Sequence[int], pending: int) -> tuple[list[int], int]:
        """Tokens that a commit_prev adds, and what is pending behind them, when the round itself begins."""
        if self.kind != "verify" or self.settle is None or self.settle.next is None:
            return [], pending
        return self.settle.tokens, self.settle.next

    def kept(self, length: int) -> int:
        """How many of the committed tokens the round leaves."""
        return self.length if self.kind == "rollback" else length

    def added(self, pending: int, round: Round) -> list[int]:
        """The tokens that this answer adds to those kept; ContractError when it contradicts itself or the ask."""
        if self.kind == "rollback" or (round.held and not round.accepted_nodes):
            return []
        if self.kind == "commit":
            assert self.settle is not None
            said = (round.accepted_nodes, round.accepted_tokens, round.new_tokens)
            end = [] if self.settle.next is None else [self.settle.next]
            if said != (self.settle.path, self.settle.tokens, [*self.settle.tokens[1:], *end]):
                raise ContractError(f"committed {round.accepted_nodes}, not {self.settle.path}")
            return self.settle.tokens
        if not round.new_tokens or round.new_tokens[-1] != round.pending:
            raise ContractError("new_tokens does not end with the pending token")
        if self.kind == "decode":
            return [pending, *round.new_tokens[:-1]]
        if self.kind == "extend":
            return ([pending] if self.keep_pending else []) + self.tokens
        assert self.tree is not None
        nodes = round.accepted_nodes
        if self.tree.walk(round.accepted_tokens[1:]) != nodes or round.accepted_tokens[:1] != [pending]:
            raise ContractError(f"accepted {nodes} is not a path of the tree with these tokens")
        if round.accepted_tokens[1:] != round.new_tokens[:-1]:
            raise ContractError("new_tokens is not the accepted path and the pending token")
        return [] if round.held else round.accepted_tokens

    def pending_behind(self, tokens: Sequence[int], pending: int, round: Round) -> int:
        """What is pending behind the answer; ContractError when it says another."""
        if round.held:
            return pending
        wanted = round.pending
        if self.kind == "rollback":
            stood = tokens[self.length] if self.length < len(tokens) else pending
            wanted = stood if self.pending is None else self.pending
        elif self.kind == "commit" and self.settle is not None:
            wanted = pending if self.settle.next is None else self.settle.next
        if wanted != round.pending:
            raise ContractError(f"pending {round.pending}, not {wanted}")
        return wanted
