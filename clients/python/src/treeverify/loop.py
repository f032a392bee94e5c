"""The choice of one round's tree, shared by the blocking and the async loop, and by the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from .budget import Budget
from .drafters import Drafter
from .tree import Tree, TreeError
from .values import Model

Nodes: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True)
class Limits:
    """nodes: of a tree, node 0 included; depth: of its deepest node."""

    nodes: int
    depth: int


def budget_of(nodes: Nodes, model: Model, pipelined: bool = False) -> Budget | None:
    """None: a fixed number of nodes."""
    if nodes != "auto" and not isinstance(nodes, (int, np.integer)):
        raise ValueError('nodes: a number, or "auto"')
    return Budget(model, pipelined=pipelined) if nodes == "auto" else None


def plan(
    drafter: Drafter | None, sequence: Sequence[int], limits: Limits, nodes: Nodes, depth: int, budget: Budget | None = None
) -> Tree | None:
    """The tree for the next round, cut to what the server and the rest of the text take; None without a drafter. budget
    is there when nodes is "auto"."""
    if drafter is None:
        return None
    pending = int(sequence[-1])
    depth = min(depth, limits.depth)
    wanted = budget.drafts() if budget is not None else nodes
    assert not isinstance(wanted, str)
    nodes_max = min(int(wanted) + 1, limits.nodes)
    if depth < 1 or nodes_max < 2:
        return Tree.root(pending)
    tree = drafter.draft(sequence, nodes_max - 1, depth)
    if not isinstance(tree, Tree):
        raise TypeError(f"the drafter gave {type(tree).__name__}, not a Tree; one without drafts is Tree.root(tokens[-1])")
    if tree.tokens[0] != pending:
        raise TreeError("pending-mismatch", f"the drafter's root is {tree.tokens[0]}, not {pending}", 0)
    tree = tree.cut(depth, nodes_max)
    return tree if budget is None else budget.fit(tree)
