"""The interface between a drafter and the loop that asks it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..tree import Tree


class Drafter(Protocol):
    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        """A tree that continues tokens.

        tokens: the whole sequence, prompt included; its last token is the pending one and must be the tree's node 0.
        nodes >= 1: drafts wanted at most, node 0 not counted. depth >= 1: of the deepest node. A larger tree is cut by
        the caller; Tree.root(tokens[-1]) says "no idea". Usually tokens begins with those of the last call, but after
        an extend or another session it need not.
        """
        ...
