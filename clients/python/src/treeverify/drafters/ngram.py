"""NgramDrafter: guesses from text already seen (prompt lookup) and from a store (retrieval), as a branching tree.

Owns two suffix indexes. Knows nothing of models; never guesses what it did not see.

The idea is that of prompt lookup decoding (Saxena, 2023) and REST (He et al., arXiv:2311.08252), with all continuations
in one tree, chosen by estimated probability as in SuffixDecoding (Oliaro et al., arXiv:2411.04975).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..tree import Tree

I64: TypeAlias = npt.NDArray[np.int64]

SUFFIX_LENS = (12, 8, 6, 4, 3)
# What one match of each length is worth: a long suffix is rarely wrong (clients/README.md has the measurement).
SUFFIX_WEIGHTS = (64.0, 16.0, 5.0, 1.0, 0.25)
ESCAPE = 3.0  # weight of "none of these" at every node, so that deep guesses on thin evidence come last
DEPTH_MAX = 16
MATCHES_MAX = 256  # of each suffix length, the newest

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class _Store:
    """A fixed text: positions sorted by the hash of the suffix that ends there, for each suffix length."""

    def __init__(self, tokens: I64) -> None:
        self.tokens = np.concatenate((tokens, np.full(DEPTH_MAX, -1, dtype=np.int64)))
        self.count = len(tokens)
        self.hashes: list[npt.NDArray[np.uint64]] = []
        self.ends: list[I64] = []
        for length in SUFFIX_LENS:
            hashed = _hashes(tokens, length)
            order = np.argsort(hashed, kind="stable")
            self.hashes.append(hashed[order])
            self.ends.append(order + length)  # the position behind the suffix

    def find(self, level: int, suffix: I64) -> I64:
        """Positions behind the newest matches of suffix."""
        key = _hashes(suffix, len(suffix))[0]
        first = int(np.searchsorted(self.hashes[level], key, side="left"))
        last = int(np.searchsorted(self.hashes[level], key, side="right"))
        ends = self.ends[level][max(first, last - MATCHES_MAX) : last]
        same = np.ones(len(ends), dtype=bool)
        for back in range(1, len(suffix) + 1):
            same &= self.tokens[ends - back] == suffix[-back]
        found: I64 = ends[same]
        return found


class _Context:
    """The text so far: for each suffix length a table from suffix to the positions behind it, kept up as it grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.tables: list[dict[tuple[int, ...], list[int]]] = [{} for _ in SUFFIX_LENS]

    def follow(self, tokens: Sequence[int]) -> None:
        """Become `tokens`; cheap when it begins with what is here."""
        known = len(self.tokens)
        if len(tokens) < known or list(tokens[:known]) != self.tokens:
            self.__init__()  # type: ignore[misc]
            known = 0
        self.tokens.extend(int(token) for token in tokens[known:])
        for end in range(known + 1, len(self.tokens) + 1):
            for length, table in zip(SUFFIX_LENS, self.tables):
                if end >= length:
                    table.setdefault(tuple(self.tokens[end - length : end]), []).append(end)

    def find(self, level: int) -> list[int]:
        suffix = tuple(self.tokens[-SUFFIX_LENS[level] :])
        ends = self.tables[level].get(suffix, [])
        return ends[:-1][-MATCHES_MAX:]  # the last one is the end of the text itself


def _hashes(tokens: I64, length: int) -> npt.NDArray[np.uint64]:
    """[len(tokens) - length + 1]: a hash of each window."""
    if len(tokens) < length:
        return np.zeros(0, dtype=np.uint64)
    values = tokens.astype(np.uint64)
    hashed = np.zeros(len(tokens) - length + 1, dtype=np.uint64)
    for at in range(length):
        hashed = (hashed ^ values[at : at + len(hashed)]) * _MULTIPLIER
        hashed ^= hashed >> np.uint64(29)
    return hashed


class NgramDrafter:
    """Looks up the last 12, 8, 6, 4 and 3 tokens in the text so far and in `store`, takes up to 16 tokens behind each
    match, and keeps the nodes with the largest estimated probability. Tree.scores is its logarithm.

    store: tokens of a text, or None for the own context alone. Indexing 600,000 tokens takes about half a second and
    60 MB. One drafter serves one session at a time; another sequence is indexed anew.
    """

    def __init__(self, store: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None) -> None:
        tokens = np.asarray([] if store is None else store, dtype=np.int64)
        if tokens.ndim != 1 or (tokens < 0).any():
            raise ValueError("store: token ids")
        self._store = _Store(tokens) if len(tokens) else None
        self._context = _Context()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> NgramDrafter:
        """A store for models whose token ids are bytes: the file's bytes."""
        return cls(np.frombuffer(Path(path).read_bytes(), dtype=np.uint8))

    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        self._context.follow(tokens)
        depth = min(depth, DEPTH_MAX)
        rows, weights = self._continuations(depth)
        return _choose(int(tokens[-1]), rows, weights, nodes)

    def _continuations(self, depth: int) -> tuple[I64, npt.NDArray[np.float64]]:
        """[m, depth] tokens behind each match, -1 where the text ends, and what each match is worth."""
        context = np.array(self._context.tokens[-SUFFIX_LENS[0] :], dtype=np.int64)
        rows, weights = [], []
        for level, (length, weight) in enumerate(zip(SUFFIX_LENS, SUFFIX_WEIGHTS)):
            if len(context) < length:
                continue
            if self._store is not None:
                ends = self._store.find(level, context[-length:])
                rows.append(self._store.tokens[ends[:, None] + np.arange(depth)])
                weights += [weight] * len(ends)
            own = self._context.find(level)
            if own:
                text = self._context.tokens
                cut = [(text[end : end + depth] + [-1] * depth)[:depth] for end in own]
                rows.append(np.array(cut, dtype=np.int64))
                weights += [weight] * len(own)
        if not weights:
            return np.zeros((0, depth), dtype=np.int64), np.zeros(0)
        return np.concatenate(rows), np.array(weights)


def _choose(root: int, rows: I64, weights: npt.NDArray[np.float64], nodes: int) -> Tree:
    """Merge the rows into a trie, layer by layer, and keep its best nodes. A node's estimated probability is its
    parent's times its weight over the siblings' weight and ESCAPE, so a child is always below its parent."""
    tokens, parents, chances = [np.array([root])], [np.array([-1])], [np.array([1.0])]
    total = 1
    at = np.zeros(len(rows), dtype=np.int64)  # trie node that each row stands at
    for column in range(rows.shape[1]):
        alive = rows[:, column] >= 0
        rows, weights, at = rows[alive], weights[alive], at[alive]
        if not len(rows):
            break
        width = int(rows[:, column].max()) + 1
        keys, inverse = np.unique(at * width + rows[:, column], return_inverse=True)
        weight = np.bincount(inverse, weights)
        parent = keys // width
        first = int(parent.min())
        below = np.bincount(parent - first, weight)
        chance = np.concatenate(chances)[parent] * weight / (below[parent - first] + ESCAPE)
        tokens.append(keys % width)
        parents.append(parent)
        chances.append(chance)
        at = total + inverse
        total += len(keys)
    all_tokens, all_parents = np.concatenate(tokens), np.concatenate(parents)
    all_chances = np.concatenate(chances)
    best = np.argsort(-all_chances[1:], kind="stable")[:nodes] + 1
    whole = np.zeros(len(best) + 1, dtype=np.int64)
    whole[1:] = np.sort(best)
    place = np.zeros(total, dtype=np.int64)
    place[whole] = np.arange(len(whole))
    new_parents = np.concatenate(([-1], place[all_parents[whole[1:]]]))
    return Tree(all_tokens[whole], new_parents, np.log(all_chances[whole]))
