"""How large the next tree should be: what another node is likely to bring against what it costs.

Costs are what the server measures (Round.hint, else Model.verify_us) and the rest of a round trip, which one round has
once; chances are the drafter's own (Tree.scores), corrected by how often they came true. Owns these few numbers of one
run of generate; knows neither drafters nor servers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .tree import Tree
from .values import Model, Round

NODES_DEFAULT = 64  # as long as nobody says how many may pay
_MEMORY = 0.9  # of a round, for the next one's estimates


class Budget:
    """drafts(): how many to ask a drafter for; fit(): of those, the ones worth it; learn(): what became of them.

    Without scores in the trees their size is the server's max_useful_nodes, or NODES_DEFAULT; with them that is a hint,
    and up to twice as many are looked at. pipelined: the link's time is
    spent beside other rounds, and does not argue for larger trees.
    """

    def __init__(self, model: Model, *, pipelined: bool = False) -> None:
        self._costs: Sequence[tuple[int, int]] = model.verify_us
        self._hint: int | None = None
        self._scored = True
        self._pipelined = pipelined
        self._rest_us: float | None = None  # of a round trip, besides the pass of the model
        self._said, self._came = 1.0, 1.0  # drafts that scores promised, and that were accepted

    def drafts(self) -> int:
        if self._hint is None:
            return NODES_DEFAULT
        return max(1, 2 * self._hint if self._scored else self._hint - 1)  # node 0 is no draft

    def chances(self, tree: Tree) -> npt.NDArray[np.float64]:
        """[n]: of each node to be accepted, node 0 first; a child never above its parent."""
        assert tree.scores is not None
        worth = min(1.5, self._came / self._said)
        chances: npt.NDArray[np.float64] = np.minimum(np.exp(np.minimum(tree.scores, 0.0)) * worth, 1.0)
        chances[0] = 1.0
        for node in range(1, len(tree)):
            chances[node] = min(chances[node], chances[tree.parents[node]])
        return chances

    def fit(self, tree: Tree) -> Tree:
        """The best nodes of tree, as many as give the most tokens a second."""
        if tree.scores is None or tree.q is not None or len(tree) == 1 or not self._costs:
            return tree
        chances = self.chances(tree)
        order = [0, *(1 + np.argsort(-chances[1:], kind="stable")).tolist()]
        tokens = np.cumsum(chances[order])
        rate = tokens / self._round_us(np.arange(1, len(tree) + 1))
        return tree.keep(order[: int(np.argmax(rate)) + 1])

    def _round_us(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Microseconds of a round: measured costs with straight lines between and behind them."""
        counts, costs = (np.array(column, dtype=np.float64) for column in zip(*sorted(self._costs)))
        passes = np.interp(nodes, counts, costs)
        if len(counts) > 1 and counts[-1] > counts[-2]:
            slope = max(0.0, (costs[-1] - costs[-2]) / (counts[-1] - counts[-2]))
            passes = passes + slope * np.maximum(0.0, nodes - counts[-1])
        round_us: npt.NDArray[np.float64] = np.maximum(passes, 1.0) + (self._rest_us or 0.0)
        return round_us

    def learn(self, tree: Tree, round: Round) -> None:
        """tree as it was sent, and its round."""
        if round.hint is not None:
            self._costs = round.hint.verify_us or self._costs
            self._hint = round.hint.max_useful_nodes or self._hint
        self._scored = tree.scores is not None
        if round.recovered is not None or not round.accepted_nodes:
            return
        if tree.scores is not None:
            promised = float(np.exp(np.minimum(tree.scores[1:], 0.0)).sum())
            self._said = _MEMORY * self._said + promised
            self._came = _MEMORY * self._came + len(round.accepted_nodes) - 1
        if round.timing is not None and not self._pipelined and not round.retries:
            rest = max(0.0, round.rtt_s * 1e6 - round.timing.gpu_us)
            self._rest_us = rest if self._rest_us is None else _MEMORY * self._rest_us + (1 - _MEMORY) * rest
