"""The digest chain over committed tokens (proto/README.md, "Digest")."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

_TAG = b"treeverify-kv-v1"
_PACK = struct.Struct("<I").pack


class Digest:
    """d(0) = H(tag || model_id || salt), d(L) = H(d(L-1) || uint32le(token)); H is SHA-256 cut to 16 bytes.

    `model_id` is the 64 hex digits of GET /v1/model. A value object with one mutating verb, push().
    """

    __slots__ = ("_value",)

    def __init__(self, model_id: str, cache_salt: str = "") -> None:
        raw = bytes.fromhex(model_id)
        if len(raw) != 32:
            raise ValueError("a model_id has 64 hex digits")
        self._value = hashlib.sha256(_TAG + raw + cache_salt.encode()).digest()[:16]

    def copy(self) -> Digest:
        other = object.__new__(Digest)
        other._value = self._value
        return other

    def push(self, tokens: Iterable[int]) -> Digest:
        """Extend the chain by tokens, in order; returns itself."""
        value = self._value
        sha256 = hashlib.sha256
        for token in tokens:
            value = sha256(value + _PACK(token)).digest()[:16]
        self._value = value
        return self

    def hex(self) -> str:
        """32 lower-case hex digits, as the server writes it."""
        return self._value.hex()
