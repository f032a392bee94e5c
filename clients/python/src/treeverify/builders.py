"""Trees from a drafter's distributions. numpy only; nothing here knows a server or a model.

Log-probabilities are natural logarithms, at most 0. "Ranked" means descending, as from a top-k. A `step` is the
drafter's one-token forward: it takes m token paths, each beginning with the root token, and returns ids [m, k] and
logprobs [m, k], ranked; an id of -1 is no token.

    best_first            per-position distributions (block diffusion): DDTree
    best_first_causal     a causal drafter, the best tree of n nodes
    expand                a causal drafter, EAGLE-2: layers of limited width, then the best n
    static_shape          the best fixed shape for an acceptance profile: Sequoia
    fill_shape            tokens of a causal drafter for a fixed shape
    acceptance_profile    such a profile from rounds
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .tree import Tree

Ids: TypeAlias = npt.NDArray[np.integer[Any]]
LogProbs: TypeAlias = npt.NDArray[np.floating[Any]]
Step: TypeAlias = Callable[[list[list[int]]], tuple[Ids, LogProbs]]


def _ranked(ids: Ids, logprobs: LogProbs) -> tuple[list[list[int]], list[list[float]]]:
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise ValueError(f"ids {ids.shape} and logprobs {logprobs.shape}: one [m, k] each")
    if np.isnan(logprobs).any() or (logprobs > 1e-6).any() or (logprobs[:, 1:] > logprobs[:, :-1] + 1e-6).any():
        raise ValueError("logprobs: at most 0, descending in each row")
    return ids.tolist(), np.minimum(logprobs, 0.0).tolist()


def best_first(root: int, ids: Ids, logprobs: LogProbs, nodes: int) -> Tree:
    """The `nodes` likeliest beginnings under independent per-position distributions, as one tree.

    ids, logprobs [D, k]: row d is the distribution of the token at depth d + 1, whatever stands before it; the tree
    has at most `nodes` drafts besides the root, depth at most D, scores = path log-probability. Among all trees of so
    many drafts it has the largest sum of path probabilities, which is the expected number of accepted drafts if the
    distributions were the model's. O(nodes log nodes). ValueError: shapes, order, a token twice in a row.

    The construction of DDTree: Ringel and Romano, "Accelerating Speculative Decoding with Block Diffusion Draft
    Trees", arXiv:2604.12989.
    """
    token_rows, score_rows = _ranked(ids, logprobs)
    for row in token_rows:
        used = [token for token in row if token >= 0]
        if len(set(used)) != len(used):
            raise ValueError("ids: a token twice in one row")
    tokens, parents, scores = [root], [-1], [0.0]
    heap: list[tuple[float, int, int, int, float]] = []  # -score, order, parent, rank, parent's score
    depths = [0]
    order = 0

    def push(parent: int, rank: int, base: float) -> None:
        nonlocal order
        row = depths[parent]
        known = row < len(token_rows) and rank < len(token_rows[row])
        if known and token_rows[row][rank] >= 0 and score_rows[row][rank] > -np.inf:
            heapq.heappush(heap, (-(base + score_rows[row][rank]), order, parent, rank, base))
            order += 1

    push(0, 0, 0.0)
    while heap and len(tokens) <= nodes:
        negative, _, parent, rank, base = heapq.heappop(heap)
        node = len(tokens)
        tokens.append(token_rows[depths[parent]][rank])
        parents.append(parent)
        scores.append(-negative)
        depths.append(depths[parent] + 1)
        push(parent, rank + 1, base)  # the next sibling is no likelier than this one,
        push(node, 0, -negative)  # and so is the best child
    return Tree(tokens, parents, scores)


class _Growing:
    """A tree being grown by calls of step: every scored node, and which of them were expanded."""

    def __init__(self, root: int, step: Step) -> None:
        self.step = step
        self.tokens, self.parents, self.scores, self.depths = [root], [-1], [0.0], [0]
        self.paths = [[root]]
        self.expanded: set[int] = set()

    def expand(self, nodes: Sequence[int], top_k: int) -> list[int]:
        """Score the children of nodes in one step; returns the children."""
        if not nodes:
            return []
        ids, logprobs = self.step([self.paths[node] for node in nodes])
        if len(ids) != len(nodes):
            raise ValueError(f"step gave {len(ids)} rows for {len(nodes)} paths")
        token_rows, score_rows = _ranked(np.asarray(ids)[:, :top_k], np.asarray(logprobs)[:, :top_k])
        born = []
        for node, row, values in zip(nodes, token_rows, score_rows):
            self.expanded.add(node)
            for token, value in zip(row, values):
                if token >= 0 and value > -np.inf:
                    born.append(len(self.tokens))
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.scores.append(self.scores[node] + value)
                    self.depths.append(self.depths[node] + 1)
                    self.paths.append([*self.paths[node], token])
        return born

    def best(self, count: int) -> list[int]:
        """The best nodes besides the root. A child never scores above its parent, and with equal scores the
        shallower and older come first, so they and the root are a tree."""
        order = sorted(range(1, len(self.tokens)), key=lambda node: (-self.scores[node], self.depths[node], node))
        return order[:count]

    def tree(self, count: int) -> Tree:
        return Tree(self.tokens, self.parents, self.scores).keep(self.best(count))


def best_first_causal(root: int, step: Step, nodes: int, *, top_k: int = 6, depth_max: int = 64) -> Tree:
    """The tree of `nodes` drafts with the largest sum of path probabilities, when a node has at most its top_k likeliest
    children and depth is at most depth_max. scores = path log-probability.

    Exact: every node that is kept was expanded, or could have no child among the kept. One step call expands all
    nodes among the present best at once, so the number of calls is about the depth of the result, not its size.
    """
    growing = _Growing(root, step)
    ready = [0] if nodes > 0 and depth_max > 0 else []
    while ready:
        growing.expand(ready, top_k)
        best = growing.best(nodes)
        # below this a child cannot enter, whatever its own chance
        floor = growing.scores[best[-1]] if len(best) == nodes else -np.inf
        ready = [
            node for node in best
            if node not in growing.expanded and growing.depths[node] < depth_max and growing.scores[node] > floor
        ]
    return growing.tree(nodes)


def expand(root: int, step: Step, nodes: int, *, depth: int = 6, width: int = 8, top_k: int = 8) -> Tree:
    """EAGLE-2's dynamic tree: `depth` step calls; each expands the `width` nodes of the newest layer with the largest
    path probability by their top_k likeliest children; then the `nodes` best of all scored nodes are kept.

    scores = path log-probability. Cheaper than best_first_causal (a fixed number of calls) and no better.
    Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv:2406.16858.
    """
    growing = _Growing(root, step)
    layer = [0]
    for _ in range(depth):
        layer = sorted(growing.expand(layer, top_k), key=lambda node: (-growing.scores[node], node))[:width]
    return growing.tree(nodes)


def static_shape(profile: Sequence[float], nodes: int, *, depth_max: int | None = None) -> tuple[list[int], float]:
    """The best fixed shape for an acceptance profile: (parents, expected tokens of a round).

    profile [b]: the chance that the child of rank j is the accepted one, whatever the node; its sum is at most 1. The
    shape has `nodes` nodes, node 0 included, at most b children a node, depth at most depth_max, and a child of rank j
    only beside all better ranks; children stand in order of rank. Expected tokens = sum over nodes of the product of
    the profile along the path (node 0 counts 1: the model's own token). The dynamic programme is over (depth, rank of
    the first child, nodes); O(depth b nodes^2), vectorised over the last. ValueError: profile or nodes out of range.

    Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding", arXiv:2402.12374, section 3.1.
    """
    chances = np.asarray(profile, dtype=np.float64)
    if chances.ndim != 1 or len(chances) == 0 or not (chances >= 0).all() or chances.sum() > 1 + 1e-9:
        raise ValueError("profile: chances of disjoint events, in order of rank")
    if nodes < 1 or (depth_max is not None and depth_max < 0):
        raise ValueError("nodes >= 1, depth_max >= 0")
    limit = nodes - 1 if depth_max is None else min(depth_max, nodes - 1)
    subtree = np.ones(nodes + 1)  # best value of a subtree of up to n nodes, by n
    subtree[0] = 0.0
    choices: list[npt.NDArray[np.int64]] = []  # per depth: [b, nodes] nodes that the child of rank j gets
    for _ in range(limit):
        forest = np.zeros(nodes)  # ranks j..b-1 with up to m nodes
        choice = np.zeros((len(chances), nodes), dtype=np.int64)
        for rank in range(len(chances) - 1, -1, -1):
            # without a node for this rank there is none for the later ones either
            value = chances[rank] * subtree[:nodes]
            better = np.zeros(nodes)
            for room in range(1, nodes):
                sums = value[1 : room + 1] + forest[room - 1 :: -1][:room]
                at = int(np.argmax(sums))
                if sums[at] > 0.0:
                    better[room], choice[rank, room] = sums[at], at + 1
            forest = better
        grown = np.zeros(nodes + 1)
        grown[1:] = 1.0 + forest
        choices.append(choice)
        if np.allclose(grown, subtree, rtol=0.0, atol=1e-15):
            break
        subtree = grown
    parents = [-1]
    # breadth first, so that the order of nodes says nothing of how the programme went
    queue = [(0, nodes, len(choices))]
    for node, size, depth in queue:
        room = size - 1
        for rank in range(len(chances)):
            taken = int(choices[depth - 1][rank, room]) if depth > 0 and room > 0 else 0
            if taken == 0:
                break
            parents.append(node)
            queue.append((len(parents) - 1, taken, depth - 1))
            room -= taken
    return parents, float(subtree[nodes])


def fill_shape(root: int, step: Step, parents: Sequence[int]) -> Tree:
    """Tokens for a fixed shape: the child of rank j of a node (in node order) gets the j-th likeliest token. One step
    call a layer. Where a step gives fewer tokens than a node has children, those children and what is below are left
    out. scores = path log-probability."""
    below: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node > 0:
            below[parent].append(node)
    growing = _Growing(root, step)
    layer = [(0, 0)]  # node of the shape, node of the growing tree
    chosen = []
    while True:
        inner = [(shape, grown) for shape, grown in layer if below[shape]]
        if not inner:
            break
        born = growing.expand([grown for _, grown in inner], max(len(below[shape]) for shape, _ in inner))
        by_parent: dict[int, list[int]] = {}
        for node in born:
            by_parent.setdefault(growing.parents[node], []).append(node)
        layer = [
            pair for shape, grown in inner for pair in zip(below[shape], by_parent.get(grown, []))
        ]
        chosen += [grown for _, grown in layer]
    return Tree(growing.tokens, growing.parents, growing.scores).keep(chosen)


def acceptance_profile(rounds: Iterable[tuple[Tree, Sequence[int]]], ranks: int) -> npt.NDArray[np.float64]:
    """Chances for static_shape from what happened: [ranks] float64.

    rounds: pairs of a tree whose children stand in order of rank, and its accepted nodes (Round.accepted_nodes). Entry
    j = how often the walk went to the child of rank j, over how often it stood at a node with more than j children.
    Entries that nothing was seen for are 0; the sum is scaled down to 1 when it is larger.
    """
    went, stood = np.zeros(ranks), np.zeros(ranks)
    for tree, path in rounds:
        for at, node in enumerate(path):
            children = tree.children(node)[:ranks]
            stood[: len(children)] += 1
            if at + 1 < len(path) and path[at + 1] in children:
                went[children.index(path[at + 1])] += 1
    profile: npt.NDArray[np.float64] = np.divide(went, stood, out=np.zeros(ranks), where=stood > 0)
    return profile / max(1.0, float(profile.sum()))
