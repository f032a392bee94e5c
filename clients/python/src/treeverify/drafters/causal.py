"""CausalDrafter: any causal language model as a drafter. Owns the padding of rows, the softmax and the choice of the
tree; a subclass or a function gives the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..builders import best_first_causal, expand, fill_shape, static_shape
from ..tree import Tree

Forward = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.floating[Any]]]
Method: TypeAlias = Literal["best", "layers", "shape"]


class CausalDrafter:
    """Trees by path log-probability of a model.

    forward: token ids [m, s] int64 to logits [m, s, V]; causal, so that what stands behind a position does not change
    its row. window: tokens of context that the model sees at most (the drafts included). top_k: children a node may
    have. method: "best" (builders.best_first_causal), "layers" (builders.expand, EAGLE-2: depth forwards, `width`
    nodes each) or "shape" (Sequoia: the best fixed shape for `profile`, an acceptance profile of at most top_k ranks as
    builders.acceptance_profile makes it, filled by rank). temperature: of the softmax; 1 is the model's own.
    For a greedy target a smaller one gives deeper trees and more accepted drafts (0.6 in clients/README.md's measurement).
    """

    def __init__(
        self,
        forward: Forward,
        *,
        window: int = 256,
        top_k: int = 6,
        method: Method = "best",
        width: int = 8,
        temperature: float = 1.0,
        profile: Sequence[float] | None = None,
    ) -> None:
        if window < 2 or top_k < 1 or width < 1 or temperature <= 0:
            raise ValueError("window >= 2, top_k >= 1, width >= 1, temperature > 0")
        if (method == "shape") != (profile is not None):
            raise ValueError('a profile goes with method "shape"')
        self._profile = [] if profile is None else [float(chance) for chance in profile[:top_k]]
        self._shapes: dict[tuple[int, int], list[int]] = {}
        self._forward = forward
        self.window, self.top_k, self.method, self.width = window, top_k, method, width
        self.temperature = temperature

    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        context = self._context(tokens)
        root = int(tokens[-1])

        def step(paths: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
            return self._top(self._last_rows(context, paths))

        depth = min(depth, self.window - 1)
        if self.method == "shape":
            return fill_shape(root, step, self._shape(nodes, depth))
        if self.method == "best":
            return best_first_causal(root, step, nodes, top_k=self.top_k, depth_max=depth)
        return expand(root, step, nodes, depth=depth, width=self.width, top_k=self.top_k)

    def _context(self, tokens: Sequence[int]) -> list[int]:
        """What the model sees before the pending token."""
        return [int(token) for token in tokens[-self.window : -1]]

    def _shape(self, nodes: int, depth: int) -> list[int]:
        """Parents of the best shape with so many drafts; computed once."""
        if (nodes, depth) not in self._shapes:
            self._shapes[nodes, depth], _ = static_shape(self._profile, nodes + 1, depth_max=depth)
        return self._shapes[nodes, depth]

    @staticmethod
    def _padded(rows: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows as one array, padded on the right, and the place of each one's last token."""
        batch = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for at, row in enumerate(rows):
            batch[at, : len(row)] = row
        return batch, np.array([len(row) - 1 for row in rows])

    def _last_rows(self, context: list[int], paths: list[list[int]]) -> npt.NDArray[np.float64]:
        """[m, V] logits behind context + each path. Rows are cut on the left to the window."""
        rows = [(context + path)[-self.window :] for path in paths]
        batch, ends = self._padded(rows)
        logits = self._forward(batch)
        if logits.ndim != 3 or logits.shape[:2] != batch.shape:
            raise ValueError(f"forward gave {logits.shape} for ids {batch.shape}")
        last: npt.NDArray[np.float64] = logits[np.arange(len(rows)), ends].astype(np.float64)
        return last

    def _top(self, logits: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        scaled = logits / self.temperature
        scaled -= scaled.max(axis=1, keepdims=True)
        logprobs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        count = min(self.top_k, logits.shape[1])
        ids = np.argpartition(-logprobs, count - 1, axis=1)[:, :count]
        values = np.take_along_axis(logprobs, ids, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
