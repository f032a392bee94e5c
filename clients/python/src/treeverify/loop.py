"""The choice of one round's tree, shared by the blocking and the async loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .drafters import Drafter
from .tree import Tree, TreeError


@dataclass(frozen=True)
class Limits:
    """nodes: of a tree, node 0 included; depth: of its deepest node."""

    nodes: int
    depth: int


def plan(drafter: Drafter | None, sequence: Sequence[int], limits: Limits, nodes: int, depth: int) -> Tree | None:
    """The tree for the next round, cut to what the server and the rest of the text take; None without a drafter."""
    if drafter is None:
        return None
    pending = int(sequence[-1])
    depth = min(depth, limits.depth)
    nodes_max = min(nodes + 1, limits.nodes)
    if depth < 1 or nodes_max < 2:
        return Tree.root(pending)
    tree = drafter.draft(sequence, nodes_max - 1, depth)
    if tree.tokens[0] != pending:
        raise TreeError("pending-mismatch", f"the drafter's root is {tree.tokens[0]}, not {pending}", 0)
    return tree.cut(depth, nodes_max)
