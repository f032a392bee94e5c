"""Tree: a draft token tree as an immutable value, with the rules and default limits of proto/tree.c.

Node 0 is the pending token; a parent stands before its children; two children of one node never have the same token.
Knows nothing of drafters (builders.py) or servers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

NODES_DEFAULT = 256
DEPTH_DEFAULT = 64
_TOKEN_MAX = 2**31 - 1
Draft: TypeAlias = npt.NDArray[np.floating[Any]] | tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.floating[Any]]]


class TreeError(ValueError):
    """Not a draft tree. `code` is the server's code for it, `node` the first offending node or None."""

    def __init__(self, code: str, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.node = node


class Tree:
    """tokens [n] and parents [n], int32, read-only; parents[0] is -1.

    The constructor checks shape, order and siblings (TreeError, code "tree-invalid"); check() adds limits and the
    vocabulary. `scores` [n] float64 or None: what a builder thought of each node (log-probability of its path);
    it is not sent. `q` for rule ratio_wor: row i is the distribution that node i's children were drawn from, without
    replacement and in node order; [n, vocab] float32, or a pair ids [n, k] int32 (-1: unused) and probabilities [n, k].
    Rows of leaves are ignored; the server checks the others.
    """

    __slots__ = ("tokens", "parents", "scores", "q", "__dict__")

    def __init__(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        parents: Sequence[int] | npt.NDArray[np.integer[Any]],
        scores: Sequence[float] | npt.NDArray[np.floating[Any]] | None = None,
        q: Draft | None = None,
    ) -> None:
        self.tokens = _int32(tokens, "tokens")
        self.parents = _int32(parents, "parents")
        _check_shape(self.tokens, self.parents)
        self.scores: npt.NDArray[np.float64] | None = None
        if scores is not None:
            self.scores = np.array(scores, dtype=np.float64)
            self.scores.flags.writeable = False
            if self.scores.shape != self.tokens.shape:
                raise TreeError("tree-invalid", "scores: not one per node")
        self.q = q
        if q is not None and any(part.ndim != 2 or len(part) != len(self) for part in _parts(q)):
            raise TreeError("tree-invalid", "q: not one row per node")

    @classmethod
    def root(cls, token: int) -> Tree:
        """The tree of one node: plain decoding."""
        return cls([token], [-1])

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """tokens[0] is the pending token, each next one the child of the one before."""
        return cls(tokens, range(-1, len(tokens) - 1))

    @classmethod
    def from_paths(cls, root: int, paths: Iterable[Sequence[int]]) -> Tree:
        """Paths below the root (without it), shared beginnings merged; nodes in order of first appearance."""
        index: dict[tuple[int, int], int] = {}
        tokens, parents = [root], [-1]
        for path in paths:
            here = 0
            for token in path:
                at = index.get((here, token))
                if at is None:
                    at = index[here, token] = len(tokens)
                    tokens.append(token)
                    parents.append(here)
                here = at
        return cls(tokens, parents)

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return np.array_equal(self.tokens, other.tokens) and np.array_equal(self.parents, other.parents)

    def __hash__(self) -> int:
        return hash((self.tokens.tobytes(), self.parents.tobytes()))

    def __repr__(self) -> str:
        return f"Tree({self.tokens.tolist()}, {self.parents.tolist()})"

    @cached_property
    def depths(self) -> npt.NDArray[np.int32]:
        """[n]: edges from the root; depths[0] is 0."""
        depths = np.zeros(len(self), dtype=np.int32)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def depth(self) -> int:
        return int(self.depths.max())

    @cached_property
    def _children(self) -> list[list[int]]:
        lists: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                lists[parent].append(node)
        return lists

    def children(self, node: int) -> list[int]:
        """In node order."""
        return list(self._children[node])

    def child(self, node: int, token: int) -> int | None:
        """The child of node that carries token."""
        for candidate in self._children[node]:
            if self.tokens[candidate] == token:
                return candidate
        return None

    def leaves(self) -> list[int]:
        return [node for node, below in enumerate(self._children) if not below]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to node, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(int(self.parents[nodes[-1]]))
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root to node, both included."""
        return [int(self.tokens[at]) for at in self.path(node)]

    def walk(self, tokens: Iterable[int]) -> list[int]:
        """Nodes that a text after the root's token would visit, node 0 first; ends where no child fits."""
        nodes = [0]
        for token in tokens:
            below = self.child(nodes[-1], token)
            if below is None:
                break
            nodes.append(below)
        return nodes

    def check(self, vocab: int, nodes_max: int = NODES_DEFAULT, depth_max: int = DEPTH_DEFAULT) -> None:
        """Raise the TreeError that the server would answer with: node count, vocabulary, depth."""
        if len(self) > nodes_max:
            raise TreeError("tree-too-large", f"{len(self)} nodes are over the limit of {nodes_max}")
        for node in range(len(self)):
            if self.tokens[node] >= vocab:
                text = f"node {node}: token {self.tokens[node]} is outside the vocabulary of {vocab}"
                raise TreeError("tree-invalid", text, node)
            if self.depths[node] > depth_max:
                text = f"node {node}: depth {self.depths[node]} is over the limit of {depth_max}"
                raise TreeError("tree-too-large", text, node)

    def keep(self, nodes: Iterable[int]) -> Tree:
        """The tree of these nodes (0 included by itself); every parent of a kept node must be kept, and with q every
        child that was drawn before it."""
        chosen = sorted({0, *nodes})
        place = {node: at for at, node in enumerate(chosen)}
        try:
            parents = [-1] + [place[int(self.parents[node])] for node in chosen[1:]]
        except KeyError as error:
            raise TreeError("tree-invalid", f"the parent {error} of a kept node is not kept") from None
        scores = None if self.scores is None else self.scores[chosen]
        return Tree(self.tokens[chosen], parents, scores, self._kept_q(chosen))

    def _kept_q(self, chosen: list[int]) -> Draft | None:
        if self.q is None:
            return None
        kept = set(chosen)
        for below in self._children:
            stays = [node in kept for node in below]
            if any(later and not earlier for earlier, later in zip(stays, stays[1:])):
                raise TreeError("tree-invalid", "a draft of q cannot be kept without those that were drawn before it")
        return (self.q[0][chosen], self.q[1][chosen]) if isinstance(self.q, tuple) else self.q[chosen]

    def cut(self, depth_max: int, nodes_max: int = NODES_DEFAULT) -> Tree:
        """Without nodes below depth_max, and of the rest the nodes_max best by score. By node order without scores, and
        with q, where a choice by token would not be what was drawn."""
        fits = [node for node in range(len(self)) if self.depths[node] <= depth_max]
        if len(fits) == len(self) <= nodes_max:
            return self
        if len(fits) > nodes_max and self.scores is not None and self.q is None:
            # a child never counts more than its parent, so what is kept is a tree
            bound = self.scores.copy()
            bound[0] = np.inf
            for node in range(1, len(self)):
                bound[node] = min(bound[node], bound[self.parents[node]])
            fits.sort(key=lambda node: (-bound[node], node))
        return self.keep(fits[: max(1, nodes_max)])

    @staticmethod
    def merge(trees: Sequence[Tree], nodes_max: int | None = None) -> Tree:
        """One tree with every path of every tree once. All roots carry the same token (else TreeError).

        When every tree has scores, a node's score is the largest it had, and nodes are chosen by it when there are
        more than nodes_max; otherwise nodes are taken breadth first, the trees in turn, so that each proposal keeps
        its beginning.
        """
        if not trees:
            raise TreeError("tree-invalid", "no trees to merge")
        root = int(trees[0].tokens[0])
        index: dict[tuple[int, int], int] = {}
        tokens, parents, scores = [root], [-1], [0.0]
        scored = all(tree.scores is not None for tree in trees)
        place = [{0: 0} for _ in trees]
        order = sorted(
            (int(tree.depths[node]), node, at) for at, tree in enumerate(trees) for node in range(len(tree))
        )
        for _, node, at in order:
            tree = trees[at]
            score = float(tree.scores[node]) if scored and tree.scores is not None else 0.0
            if node == 0:
                if tree.tokens[0] != root:
                    raise TreeError("tree-invalid", f"roots differ: {root} and {tree.tokens[0]}", 0)
                scores[0] = max(scores[0], score)
                continue
            edge = (place[at][int(tree.parents[node])], int(tree.tokens[node]))
            known = index.get(edge)
            if known is None:
                known = index[edge] = len(tokens)
                tokens.append(edge[1])
                parents.append(edge[0])
                scores.append(score)
            scores[known] = max(scores[known], score)
            place[at][node] = known
        merged = Tree(tokens, parents, scores if scored else None)
        if nodes_max is not None and len(merged) > nodes_max:
            return merged.cut(merged.depth, nodes_max)
        return merged

    def draw(self, text: Callable[[int], str] = str, marked: Iterable[int] = ()) -> str:
        """The tree as lines of ASCII, one node a line; `text` names a token, nodes in `marked` end in " *"."""
        chosen = set(marked)
        lines: list[str] = []
        stack: list[tuple[int, str, str]] = [(0, "", "")]
        while stack:
            node, lead, below = stack.pop()
            lines.append(lead + text(int(self.tokens[node])) + (" *" if node in chosen else ""))
            children = self._children[node]
            for at in range(len(children) - 1, -1, -1):
                last = at == len(children) - 1
                stack.append((children[at], below + ("`-- " if last else "|-- "), below + ("    " if last else "|   ")))
        return "\n".join(lines)

    def body(self) -> dict[str, Any]:
        """The member `tree` of a request."""
        body: dict[str, Any] = {"tokens": self.tokens.tolist(), "parents": self.parents.tolist()}
        if isinstance(self.q, tuple):
            ids, probs = self.q
            body["q_topk"] = {"shape": list(ids.shape), "ids_b64": _b64(ids, "<i4"), "probs_b64": _b64(probs, "<f4")}
        elif self.q is not None:
            body["q_dense"] = {"shape": list(self.q.shape), "dtype": "f32", "data_b64": _b64(self.q, "<f4")}
        return body


def _parts(q: Draft) -> tuple[npt.NDArray[Any], ...]:
    return q if isinstance(q, tuple) else (q,)


def _b64(array: npt.NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode("ascii")


def _int32(values: Sequence[int] | npt.NDArray[np.integer[Any]], name: str) -> npt.NDArray[np.int32]:
    array = np.array(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TreeError("tree-invalid", f"{name}: a list of integers is needed")
    if array.size and (array.min() < -1 or array.max() > _TOKEN_MAX):
        raise TreeError("tree-invalid", f"{name}: values are -1 or 0 to 2^31 - 1")
    result = array.astype(np.int32)
    result.flags.writeable = False
    return result


def _check_shape(tokens: npt.NDArray[np.int32], parents: npt.NDArray[np.int32]) -> None:
    if len(tokens) == 0:
        raise TreeError("tree-invalid", "a tree has at least node 0, the pending token")
    if len(tokens) != len(parents):
        raise TreeError("tree-invalid", f"{len(tokens)} tokens, but {len(parents)} parents")
    seen: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist())):
        if token < 0:
            raise TreeError("tree-invalid", f"node {node}: token {token} is negative", node)
        if node == 0:
            if parent != -1:
                raise TreeError("tree-invalid", f"node 0: its parent must be -1, not {parent}", 0)
            continue
        if not 0 <= parent < node:
            what = "a second root (parent -1)" if parent == -1 else f"parent {parent} is not before it"
            raise TreeError("tree-invalid", f"node {node}: {what}", node)
        twin = seen.setdefault((parent, token), node)
        if twin != node:
            text = f"node {node}: token {token} is already child {twin} of node {parent}"
            raise TreeError("tree-invalid", text, node)
