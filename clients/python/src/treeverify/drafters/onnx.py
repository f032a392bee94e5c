"""OnnxDrafter: a causal model in an ONNX file. Needs onnxruntime (pip install treeverify[onnx])."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from .causal import CausalDrafter, Method


class OnnxDrafter(CausalDrafter):
    """A file with one int64 input [batch, seq] of token ids (another input, an attention mask [batch, seq], is filled with
    ones) and an output whose first is logits [batch, seq, V]. Runs on the CPU. The tokens must be those of the served
    model. Further arguments are CausalDrafter's. ValueError: a file of another form.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int = 1,
        window: int = 256,
        top_k: int = 6,
        method: Method = "best",
        width: int = 8,
        temperature: float = 1.0,
        profile: Sequence[float] | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in self._session.get_inputs()]
        self._masks = [name for name in names if "mask" in name]
        ids = [name for name in names if name not in self._masks]
        if len(ids) != 1 or len(self._masks) > 1:
            raise ValueError(f"{path}: inputs {names}, but one of token ids and at most one mask are understood")
        self._ids = ids[0]
        self._output = self._session.get_outputs()[0].name
        super().__init__(
            self._run, window=window, top_k=top_k, method=method, width=width, temperature=temperature, profile=profile
        )

    def _run(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.floating[Any]]:
        inputs = {self._ids: ids, **{name: np.ones_like(ids) for name in self._masks}}
        logits: npt.NDArray[np.floating[Any]] = self._session.run([self._output], inputs)[0]
        return logits
