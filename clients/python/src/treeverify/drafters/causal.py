"""CausalDrafter: any causal language model as a drafter. Owns the padding of rows, the softmax and the choice of the
tree; a subclass or a function gives the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..builders import best_first_causal, expand
from ..tree import Tree

Forward = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.floating[Any]]]


class CausalDrafter:
    """Trees by path log-probability of a model.

    forward: token ids [m, s] int64 to logits [m, s, V]; causal, so that what stands behind a position does not change
    its row. window: tokens of context that the model sees at most (the drafts included). top_k: children a node may
    have. method: "best" (builders.best_first_causal) or "layers" (builders.expand, EAGLE-2: depth forwards, `width`
    nodes each). temperature: of the softmax; 1 is the model's own.
    For a greedy target a smaller one gives deeper trees and more accepted drafts (0.6 in clients/README.md's measurement).
    """

    def __init__(
        self,
        forward: Forward,
        *,
        window: int = 256,
        top_k: int = 6,
        method: Literal["best", "layers"] = "best",
        width: int = 8,
        temperature: float = 1.0,
    ) -> None:
        if window < 2 or top_k < 1 or width < 1 or temperature <= 0:
            raise ValueError("window >= 2, top_k >= 1, width >= 1, temperature > 0")
        self._forward = forward
        self.window, self.top_k, self.method, self.width = window, top_k, method, width
        self.temperature = temperature

    def draft(self, tokens: Sequence[int], nodes: int, depth: int) -> Tree:
        context = [int(token) for token in tokens[-self.window : -1]]
        root = int(tokens[-1])

        def step(paths: list[list[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
            return self._top(self._last_rows(context, paths))

        depth = min(depth, self.window - 1)
        if self.method == "best":
            return best_first_causal(root, step, nodes, top_k=self.top_k, depth_max=depth)
        return expand(root, step, nodes, depth=depth, width=self.width, top_k=self.top_k)

    def _last_rows(self, context: list[int], paths: list[list[int]]) -> npt.NDArray[np.float64]:
        """[m, V] logits behind context + each path. Rows are cut on the left to the window and padded on the right."""
        rows = [(context + path)[-self.window :] for path in paths]
        longest = max(map(len, rows))
        batch = np.zeros((len(rows), longest), dtype=np.int64)
        for at, row in enumerate(rows):
            batch[at, : len(row)] = row
        logits = self._forward(batch)
        if logits.ndim != 3 or logits.shape[:2] != batch.shape:
            raise ValueError(f"forward gave {logits.shape} for ids {batch.shape}")
        ends = np.array([len(row) - 1 for row in rows])
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
