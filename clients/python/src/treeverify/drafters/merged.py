"""MergedDrafter: the proposals of several drafters as one tree."""

from __future__ import annotations

from collections.abc import Sequence

from ..tree import Tree
from .protocol import Drafter


class MergedDrafter:
    """Each drafter is asked for `nodes` drafts; what several propose is there once, and of the rest the best by score stay
    (Tree.merge). Scores are logarithms of chances in every drafter of this package, so that they compare; a drafter
    without scores takes turns with the others instead, breadth first.
    """

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            raise ValueError("at least one drafter")
        self.drafters = drafters

    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        trees = [drafter.draft(tokens, nodes, depth) for drafter in self.drafters]
        return Tree.merge([tree.cut(depth, nodes + 1) for tree in trees], nodes + 1)
