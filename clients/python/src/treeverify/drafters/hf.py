"""HfDrafter: a causal model of the transformers library. Needs torch and transformers (pip install treeverify[hf])."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from .causal import CausalDrafter, Method


class HfDrafter(CausalDrafter):
    """model: a loaded causal language model, or the name or folder of one. Its tokens must be those of the served model.

    device, dtype: where and in what it runs ("cuda", torch.bfloat16); as loaded by default. window: tokens of context at
    most, by default what the model was made for, up to 2,048. vocab: the served model's vocabulary, for a model whose
    own is padded to more. The other arguments are CausalDrafter's. The keys and values of the text so far are kept, so
    that a draft costs the new tokens and the tree alone; one drafter serves one session at a time.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        *,
        device: str | None = None,
        dtype: Any = None,
        window: int | None = None,
        vocab: int | None = None,
        top_k: int = 6,
        method: Method = "best",
        width: int = 8,
        temperature: float = 1.0,
        profile: Sequence[float] | None = None,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            model = transformers.AutoModelForCausalLM.from_pretrained(os.fspath(model))
        self._model = model.eval()
        if device is not None or dtype is not None:
            self._model = self._model.to(device=device, dtype=dtype)
        if window is None:
            window = min(2048, int(getattr(model.config, "max_position_embeddings", 2048)))
        named = inspect.signature(type(self._model).forward).parameters  # later versions have another name
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        self._vocab = vocab
        self._known: list[int] = []  # tokens whose keys and values are in _past
        self._past: Any = transformers.DynamicCache()
        super().__init__(
            self._logits, window=window, top_k=top_k, method=method, width=width, temperature=temperature, profile=profile
        )

    def _logits(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.floating[Any]]:
        """[m, s, V] without anything kept: what the rows below are cut from."""
        with torch.inference_mode():
            rows = self._model(input_ids=self._tensor(ids), use_cache=False).logits
            logits: npt.NDArray[np.float32] = rows.float().cpu().numpy()[..., : self._vocab]
        return logits

    def _tensor(self, ids: npt.NDArray[np.int64]) -> Any:
        return torch.from_numpy(ids).to(self._model.device)

    def _context(self, tokens: Sequence[int]) -> list[int]:
        """Once the window is full its beginning moves by a quarter of it, so that what is kept mostly stays of use."""
        jump = max(1, self.window // 4)
        start = max(0, -(-(len(tokens) - self.window) // jump) * jump)
        return [int(token) for token in tokens[start:-1]]

    def _follow(self, context: list[int]) -> None:
        """Have the keys and values of context in _past: only what is new is computed."""
        if not self._known or context[: len(self._known)] != self._known:
            self._known, self._past = [], transformers.DynamicCache()
        new = context[len(self._known) :]
        if new:
            self._known, past = [], self._past  # until the pass is done
            self._pass(np.array([new], dtype=np.int64), past)
            self._known = list(context)

    def _pass(self, ids: npt.NDArray[np.int64], past: Any) -> Any:
        """Logits behind past, which grows by ids."""
        return self._model(input_ids=self._tensor(ids), use_cache=True, **{self._cache_name: past}).logits

    def _last_rows(self, context: list[int], paths: list[list[int]]) -> npt.NDArray[np.float64]:
        batch, ends = self._padded(paths)
        with torch.inference_mode():
            self._follow(context)
            past = copy.deepcopy(self._past)
            if context:
                past.batch_repeat_interleave(len(paths))
            rows = self._pass(batch, past)
            last = rows[torch.arange(len(paths), device=rows.device), torch.from_numpy(ends).to(rows.device)]
            logits: npt.NDArray[np.float64] = last.float().cpu().numpy()[:, : self._vocab].astype(np.float64)
        return logits
