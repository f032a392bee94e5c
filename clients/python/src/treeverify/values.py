"""Values of the wire as Python and numpy: sampling, what to ask for, and the blocks of an answer.

Owns base64 and dtypes. Arrays are read-only views of the decoded bytes or exact widenings of them; nothing is rounded.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import ContractError

Rows: TypeAlias = Literal["stop", "path", "all"] | Sequence[int]
Dtype: TypeAlias = Literal["f32", "bf16", "f16"]
HiddenDtype: TypeAlias = Literal["f32", "bf16", "f16", "fp8_e4m3"]
Rule: TypeAlias = Literal["target_walk", "greedy", "ratio_wor", "typical", "client"]
F32: TypeAlias = npt.NDArray[np.float32]
I32: TypeAlias = npt.NDArray[np.int32]


def float_array(data: bytes, dtype: str, shape: Sequence[int]) -> F32:
    """Raw little-endian values as float32 of `shape`; bf16, f16 and fp8_e4m3 are widened exactly.

    Raises ContractError when the bytes are not what the shape says or the dtype is unknown.
    """
    width = {"f32": 4, "bf16": 2, "f16": 2, "fp8_e4m3": 1}.get(dtype)
    if width is None:
        raise ContractError(f"dtype {dtype!r} is unknown")
    count = int(np.prod(shape, dtype=np.int64))
    if len(data) != count * width:
        raise ContractError(f"{len(data)} bytes for shape {tuple(shape)} of {dtype}")
    array: F32
    if dtype == "f32":
        array = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    elif dtype == "f16":
        array = np.frombuffer(data, dtype="<f2").astype(np.float32)
    elif dtype == "fp8_e4m3":
        array = _fp8_values()[np.frombuffer(data, dtype=np.uint8)]
    else:
        array = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return array.reshape(tuple(shape))


def _fp8_values() -> F32:
    """All 256: one bit of sign, four of exponent with bias 7, three of mantissa; no infinity."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


def unbase64(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ContractError("a base64 member is not a string")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ContractError(f"base64: {error}") from error


def int_array(text: Any, shape: Sequence[int]) -> I32:
    data = unbase64(text)
    if len(data) != 4 * int(np.prod(shape, dtype=np.int64)):
        raise ContractError(f"{len(data)} bytes for shape {tuple(shape)} of int32")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False).reshape(tuple(shape))


@dataclass(frozen=True)
class Sampling:
    """How the model draws. rule "target_walk", "greedy", "ratio_wor" (the tree says what its children were drawn from:
    Tree.q), "typical" (not lossless; typical is its (epsilon, delta), 0.09 and 0.3 by default) or "client" (the server
    draws nothing for a tree, every verify is held, and the caller says what to commit); temperature 0..100 (below 1e-4
    is greedy); top_k 0 is off; top_p in (0, 1]; min_p in [0, 1]; seed an unsigned 64-bit integer, None lets the server
    pick one.

    Under the first two rules the token at a position depends on prefix, parameters and seed only, never on the tree:
    the same seed gives the same text with any drafter.
    """

    rule: Rule = "target_walk"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    typical: tuple[float, float] | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rule": self.rule, "temperature": self.temperature, "top_k": self.top_k,
            "top_p": self.top_p, "min_p": self.min_p,
        }
        if self.seed is not None:
            if not 0 <= self.seed < 1 << 64:
                raise ValueError("seed: an unsigned 64-bit integer")
            body["seed"] = str(self.seed)
        if self.typical is not None:
            body["typical"] = {"epsilon": self.typical[0], "delta": self.typical[1]}
        return body

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Sampling:
        typical = body.get("typical")
        return cls(
            body["rule"], float(body["temperature"]), int(body["top_k"]), float(body["top_p"]),
            float(body["min_p"]), int(body["seed"]),
            None if typical is None else (float(typical["epsilon"]), float(typical["delta"])),
        )


@dataclass(frozen=True)
class HiddenWant:
    """Hidden rows that a call should bring: what a drafter of the EAGLE or DFlash kind reads of the target.

    A tap L is the residual stream in front of layer L (0: the embedding; the number of layers: behind the last one,
    before the last norm); Model.taps lists those that the server has.
    dtype: on the wire; fp8_e4m3 has no scale and saturates at 448. taps: some of Model.taps, answered in this order
    (all). rows: tree nodes as in Want ("path"); for a session's prompt "all" (default) or "window:N", its last N
    positions at most. project: the registered projection of all taps instead. via "fetch" leaves the rows at the server
    for Session.fetch_hidden (sessions' rounds only).
    """

    dtype: HiddenDtype = "f32"
    taps: Sequence[int] | None = None
    rows: Rows | str | None = None
    project: bool = False
    via: Literal["inline", "fetch"] = "inline"

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"dtype": self.dtype}
        if self.taps is not None:
            body["taps"] = [int(tap) for tap in self.taps]
        if self.rows is not None:
            body["rows"] = rows_body(self.rows)
        if self.project:
            body["project"] = True
        if self.via != "inline":
            body["via"] = self.via
        return body


@dataclass(frozen=True)
class Want:
    """What a verify should bring besides tokens.

    top_k: 0..64 best ids with raw logits and the log-sum-exp of each row. rows: which rows, "stop" (where the walk
    ended), "path" (accepted nodes), "all", or node indices. logprobs: one per new token, after temperature and
    filters. logits: whole raw rows as "f32", "bf16" or "f16"; logits_rows overrides rows for them; logits_via "fetch"
    leaves them at the server for Session.fetch_logits (sessions only). hidden: rows of the residual stream, as HiddenWant
    says; its rows are `rows` by default. shadow: wait for the kernel oracle.
    """

    top_k: int = 0
    rows: Rows = "path"
    logprobs: bool = False
    logits: Dtype | None = None
    logits_rows: Rows | None = None
    logits_via: Literal["inline", "fetch"] = "inline"
    hidden: HiddenWant | None = None
    shadow: bool = False

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {}
        if self.top_k:
            body["top_k"] = self.top_k
        if self.rows != "path":
            body["rows"] = rows_body(self.rows)
        if self.logprobs:
            body["logprobs"] = True
        if self.logits is not None:
            body["logits"] = {"dtype": self.logits, "via": self.logits_via}
            if self.logits_rows is not None:
                body["logits"]["rows"] = rows_body(self.logits_rows)
        if self.hidden is not None:
            body["hidden"] = self.hidden.body()
        if self.shadow:
            body["shadow"] = True
        return body


def rows_body(rows: Rows | str) -> str | list[int]:
    return rows if isinstance(rows, str) else [int(row) for row in rows]


@dataclass(frozen=True)
class TopK:
    """Best tokens of each row. nodes [R]: the tree node of each row; ids [R, k] int32, sorted by logit; logits [R, k]
    float32, raw; lse [R] float32, log-sum-exp over the whole vocabulary."""

    nodes: I32
    ids: I32
    logits: F32
    lse: F32

    @property
    def logprobs(self) -> F32:
        """[R, k]: exact log-probabilities at temperature 1, before any filter."""
        result: F32 = self.logits - self.lse[:, None]
        return result

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> TopK:
        shape = body["shape"]
        rows = np.array(body["rows"], dtype=np.int32)
        if len(shape) != 2 or shape[0] != len(rows):
            raise ContractError("topk: shape and rows differ")
        return cls(
            rows, int_array(body["ids_b64"], shape),
            float_array(unbase64(body["logits_b64"]), "f32", shape),
            float_array(unbase64(body["lse_b64"]), "f32", shape[:1]),
        )


@dataclass(frozen=True)
class Logits:
    """Whole rows of raw logits, before temperature and filters. nodes [R]: the tree node of each row; values [R, V]
    float32, or None while they wait at the server (`href`); dtype as sent."""

    nodes: I32
    shape: tuple[int, int]
    dtype: str
    values: F32 | None
    href: str | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Logits:
        rows = np.array(body["rows"], dtype=np.int32)
        shape = (int(body["shape"][0]), int(body["shape"][1]))
        if shape[0] != len(rows):
            raise ContractError("logits: shape and rows differ")
        values = None
        if "data_b64" in body:
            values = float_array(unbase64(body["data_b64"]), body["dtype"], shape)
        return cls(rows, shape, body["dtype"], values, body.get("href"))


@dataclass(frozen=True)
class Hidden:
    """Hidden rows. values float32: [T, R, D], T taps of R rows of D values each; projected [R, n]; None while they wait
    at the server (`href`). taps [T]: the layers. nodes [R]: the tree node of each row, of a prompt its positions. dtype as
    sent: bf16, f16 and fp8_e4m3 are widened exactly."""

    taps: tuple[int, ...]
    nodes: I32
    shape: tuple[int, ...]
    dtype: str
    values: F32 | None
    projected: bool = False
    href: str | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Hidden:
        taps = tuple(int(tap) for tap in body["taps"])
        nodes = np.array(body["rows"], dtype=np.int32)
        shape = tuple(int(size) for size in body["shape"])
        projected = bool(body.get("project", False))
        if len(shape) != (2 if projected else 3) or shape[-2] != len(nodes) or (not projected and shape[0] != len(taps)):
            raise ContractError("hidden: shape, taps and rows differ")
        values = None
        if "data_b64" in body:
            values = float_array(unbase64(body["data_b64"]), body["dtype"], shape)
        return cls(taps, nodes, shape, body["dtype"], values, projected, body.get("href"))


@dataclass(frozen=True)
class Timing:
    """Microseconds on the server: waiting, on the device, in all; and rounds in the same launch."""

    queue_us: int
    gpu_us: int
    total_us: int
    batch: int


@dataclass(frozen=True)
class Hint:
    """What a server tells of the cost of trees: the number of nodes (node 0 counted) beyond which another one does not
    pay, or None; microseconds of a verify by nodes, as measured; rounds that wait."""

    max_useful_nodes: int | None
    verify_us: tuple[tuple[int, int], ...]
    queue_depth: int

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Hint:
        most = body.get("max_useful_nodes")
        costs = tuple((int(nodes), int(us)) for nodes, us in body.get("verify_us") or ())
        return cls(None if most is None else int(most), costs, int(body.get("queue_depth", 0)))


@dataclass(frozen=True)
class Round:
    """What one verify, decode, extend, commit, rollback or one-shot gave.

    new_tokens: what to append to the text; the last one is the model's own and is pending now. accepted_nodes /
    accepted_tokens: the path through the tree, node 0 first (empty for decode and extend). topk, logits, hidden: arrays,
    when asked for. logprobs [len(new_tokens)] float64, -inf where a filter removed the token. margin_min: smallest gap of the
    two best scores, None when only one token survived. rtt_s: wall time of the call, retries and pauses included.
    nodes, depth: of the tree that was sent, node 0 counted in nodes.
    retries: attempts after the first. replayed: the server had already done this round. recovered: None, or "resync"
    (the answer was put together from tokens that the server had committed before) or "resumed" (the session was made
    anew from the client's tokens): then accepted_nodes may be empty and what was wanted may be missing.
    seq is 0 for one-shot calls and for "resync".
    held: nothing is committed yet; accepted_nodes, new_tokens and pending are what the rule proposes. Under rule "client"
    it proposes nothing: both lists are empty, and pending is node 0's token still. hint: costs, from servers that tell.
    A rollback has no new tokens, and nothing but seq, pending, committed_len, digest and finish says anything.
    """

    seq: int
    new_tokens: list[int]
    pending: int
    committed_len: int
    digest: str
    rule: str
    lossless: bool
    finish: Literal["stop", "length"] | None
    accepted_nodes: list[int]
    accepted_tokens: list[int]
    margin_min: float | None = None
    near_tie: bool = False
    topk: TopK | None = None
    logprobs: npt.NDArray[np.float64] | None = None
    logits: Logits | None = None
    hidden: Hidden | None = None
    shadow: Mapping[str, Any] | None = None
    sampling: Sampling | None = None
    nodes: int = 0
    depth: int = 0
    accept_len_mean: float = 0.0
    timing: Timing | None = None
    replayed: bool = False
    recovered: Literal["resync", "resumed"] | None = None
    rtt_s: float = 0.0
    retries: int = 0
    held: bool = False
    hint: Hint | None = None

    @property
    def accept_len(self) -> int:
        """New tokens of this round, the model's own included."""
        return len(self.new_tokens)


def read_round(answer: Mapping[str, Any], **more: Any) -> Round:
    """A round from any answer that ran a model. Unknown members are ignored, missing ones are a ContractError."""
    try:
        logprobs = None
        if "logprobs" in answer:
            logprobs = np.array([-np.inf if x is None else x for x in answer["logprobs"]], dtype=np.float64)
            if len(logprobs) != len(answer["new_tokens"]):
                raise ContractError("logprobs: not one per new token")
        timing = answer["timing_us"]
        return _round(
            answer,
            margin_min=answer["margin"]["min"],
            near_tie=bool(answer["margin"]["near_tie"]),
            topk=TopK.read(answer["topk"]) if "topk" in answer else None,
            logprobs=logprobs,
            logits=Logits.read(answer["logits"]) if "logits" in answer else None,
            hidden=Hidden.read(answer["hidden"]) if "hidden" in answer else None,
            shadow=answer.get("shadow"),
            sampling=Sampling.read(answer["sampling"]) if "sampling" in answer else None,
            nodes=int(answer["stats"]["nodes"]),
            depth=int(answer["stats"]["depth"]),
            accept_len_mean=float(answer["stats"]["accept_len_mean"]),
            timing=Timing(timing["queue"], timing["gpu"], timing["total"], timing["batch"]),
            hint=Hint.read(answer["hint"]) if answer.get("hint") is not None else None,
            **more,
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ContractError(f"a round without what the contract says: {error!r}") from error


def read_commit(answer: Mapping[str, Any]) -> Round:
    """The answer of a commit: nothing was computed."""
    try:
        return _round(answer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ContractError(f"a commit without what the contract says: {error!r}") from error


def read_rollback(answer: Mapping[str, Any], rule: str) -> Round:
    """The answer of a rollback, as a round without new tokens."""
    try:
        return _round({**answer, "rule": rule, "lossless": True, "new_tokens": []})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ContractError(f"a rollback without what the contract says: {error!r}") from error


def _round(answer: Mapping[str, Any], **more: Any) -> Round:
    held = answer.get("status") == "held"
    nothing = held and answer["accepted"] is None  # rule client
    accepted = {"nodes": [], "tokens": []} if nothing else answer.get("accepted", {"nodes": [], "tokens": []})
    return Round(
        seq=int(answer.get("seq", 0)),
        new_tokens=[] if nothing else list(answer["new_tokens"]),
        pending=-1 if nothing else int(answer["pending"]),
        committed_len=int(answer["committed_len"]),
        digest=str(answer["digest"]),
        rule=str(answer["rule"]),
        lossless=bool(answer["lossless"]),
        finish=answer.get("finish"),
        accepted_nodes=list(accepted["nodes"]),
        accepted_tokens=list(accepted["tokens"]),
        replayed=bool(answer.get("replayed", False)),
        held=held,
        **more,
    )


@dataclass(frozen=True)
class Model:
    """GET /v1/model. `body` is the whole document; the attributes are what clients use."""

    name: str
    model_id: str
    epoch: str
    vocab: int
    max_len: int
    max_nodes: int
    max_depth: int
    backend: str
    features: tuple[str, ...]
    tokenizer_sha256: str | None
    noise: float
    verify_us: tuple[tuple[int, int], ...]
    taps: tuple[int, ...]
    body: Mapping[str, Any]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Model:
        try:
            limits = body["limits"]
            return cls(
                body["name"], body["model_id"], body["epoch"], body["vocab"], body["max_len"], limits["max_nodes"],
                limits["max_depth"], body["backend"], tuple(body["features"]), body["tokenizer_sha256"],
                float(body["noise"]), tuple((int(n), int(us)) for n, us in body["verify_us"]),
                tuple(int(tap) for tap in body.get("taps", ())), dict(body),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ContractError(f"/v1/model: {error!r}") from error
