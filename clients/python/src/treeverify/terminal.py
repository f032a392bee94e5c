"""What generate shows: text with accepted and own tokens told apart, and a live line. Owns escape sequences; foreign
control characters never reach the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TextIO

from .text import Stream

_OWN, _ACCEPTED, _PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[0m"


def visible(text: str) -> str:
    """Control characters but line break and tab spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


class Writer:
    """Writes tokens to `out`: accepted drafts green and the model's own bold with color, else the own in [brackets]."""

    def __init__(self, out: TextIO, color: bool, text: Stream) -> None:
        self._out, self._color, self._text = out, color, text

    def prompt(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._out.write(visible(self._text.feed(token)))
        self._out.flush()

    def token(self, token: int, own: bool) -> None:
        text = visible(self._text.feed(token))
        if not text:
            return
        if self._color:
            self._out.write(f"{_OWN if own else _ACCEPTED}{text}{_PLAIN}")
        else:
            self._out.write(f"[{text}]" if own else text)

    def flush(self) -> None:
        self._out.flush()

    def end(self) -> None:
        self._out.write(visible(self._text.end()) + "\n")
        self._out.flush()


def bar(done: int, total: int, width: int = 24) -> str:
    """A progress bar of ASCII, with its numbers."""
    full = width * done // max(1, total)
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total}"


class LiveLine:
    """A status line in the last row of a terminal, outside the rows that scroll. A context manager; the terminal is as
    before when it is left, also by an exception. Does nothing when there are fewer than four rows."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        size = os.get_terminal_size(out.fileno())
        self._rows, self._columns = size.lines, size.columns
        self._on = self._rows >= 4

    def __enter__(self) -> LiveLine:
        if self._on:
            # make room below, keep the last row out of scrolling, and stand above it
            self._out.write(f"\n\x1b[1A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
            self._out.flush()
        return self

    def show(self, status: str) -> None:
        if self._on:
            self._out.write(f"\x1b7\x1b[{self._rows};1H\x1b[2K{status[: self._columns - 1]}\x1b8")
            self._out.flush()

    def __exit__(self, *_: object) -> None:
        if self._on:
            self._out.write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._out.flush()
