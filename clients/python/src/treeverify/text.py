"""Token ids to text and back, for `generate`: bytes for models whose ids are bytes, else a tokenizer.json through the
tokenizers package (pip install treeverify[tokenizers]). The clients and the server know token ids alone.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from .values import Model

CONTROL_FROM = 256  # byte-level models: token ids from here on are control tokens
BYTE_VOCABS = range(256, 513)  # bytes and some control tokens
_BROKEN_MAX = 8  # tokens that may wait for the rest of a character


class Stream(Protocol):
    """Text of tokens that come one by one: characters appear when they are complete."""

    def feed(self, token: int) -> str: ...

    def end(self) -> str: ...


class Tokenizer(Protocol):
    def encode(self, text: bytes) -> list[int]: ...

    def stream(self) -> Stream: ...


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    stream = tokenizer.stream()
    return "".join(map(stream.feed, tokens)) + stream.end()


class ByteText:
    """A Stream of token ids that are bytes; control tokens are written as <257>."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token >= CONTROL_FROM:
            return self._decoder.decode(b"", final=True) + f"<{token}>"
        return self._decoder.decode(bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def stream(self) -> Stream:
        return ByteText()


class DecodedText:
    """A Stream over a function that decodes whole lists. What a token adds may depend on those before it (a space, the
    other half of a character), so the last piece is decoded with the one before."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # tokens of the piece that was given last
        self._new: list[int] = []

    def feed(self, token: int) -> str:
        self._new.append(token)
        known = self._decode(self._before)
        text = self._decode([*self._before, *self._new])
        if text.endswith("\ufffd") and len(self._new) < _BROKEN_MAX:
            return ""
        if len(text) > len(known):
            self._before, self._new = self._new, []
        return text[len(known) :]

    def end(self) -> str:
        known = self._decode(self._before)
        text = self._decode([*self._before, *self._new])
        self._before, self._new = [], []
        return text[len(known) :]


class FileTokenizer:
    """A tokenizer.json, or the folder that has one. ImportError without the tokenizers package; ValueError: no such
    file, or not one that this package reads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import tokenizers

        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            data = file.read_bytes()
            self._inner = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"{file}: {error}") from error
        self.sha256 = hashlib.sha256(data).hexdigest()

    def encode(self, text: bytes) -> list[int]:
        """Without special tokens of the tokenizer's own: the text is continued as it is."""
        return list(self._inner.encode(text.decode(), add_special_tokens=False).ids)

    def stream(self) -> Stream:
        return DecodedText(lambda tokens: str(self._inner.decode(tokens, skip_special_tokens=False)))


def tokenizer_for(model: Model, path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The one for a served model: the file at path, which must be the server's own, or bytes. ValueError: neither."""
    if path is not None:
        tokenizer = FileTokenizer(path)
        if model.tokenizer_sha256 not in (None, tokenizer.sha256):
            raise ValueError(f"{path} is not the tokenizer of {model.name}, whose SHA-256 is {model.tokenizer_sha256}")
        return tokenizer
    if model.vocab not in BYTE_VOCABS:
        raise ValueError(f"{model.name} has a vocabulary of {model.vocab}: its tokens are not bytes, and a tokenizer is needed")
    return ByteTokenizer()
