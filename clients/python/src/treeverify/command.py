"""What the commands of `python -m treeverify` share: exit codes, failures as they are told, and checked options."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import ssl
import sys
from collections.abc import Callable
from typing import Any

from .calls import Retry
from .errors import Error, ProblemError, TransportError

OK, USAGE, NO_INPUT, UNREACHABLE, NO_OUTPUT, CUT, REFUSED, INTERRUPTED = 0, 64, 66, 69, 73, 74, 76, 130
KEY_BYTES_MAX = 4096
RESTART_S_MAX = 3600


class Failure(Exception):
    """Ends the command: exit code, a short code for --json, and what to say."""

    def __init__(self, exit_code: int, code: str, text: str, committed: bool | None = None) -> None:
        super().__init__(text)
        self.exit_code, self.code, self.committed = exit_code, code, committed


def between(low: int, high: int) -> Callable[[str], int]:
    """For argparse: an integer in this range."""

    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not in {low} to {high}")
        return value

    return integer


def real(low: float, high: float = math.inf) -> Callable[[str], float]:
    """For argparse: a finite number in this range."""

    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value <= high):
            wanted = f"in {low:g} to {high:g}" if high < math.inf else f"a finite number of at least {low:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    return number


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=os.environ.get("TREEVERIFY_URL", "http://127.0.0.1:8471"))
    parser.add_argument("--key-file", metavar="FILE", help="its first line is the server's key")
    parser.add_argument("--cacert", metavar="FILE", help="under https: PEM of who is trusted, else the system's")
    parser.add_argument(
        "--restart-s", type=real(0, RESTART_S_MAX), default=Retry.restart_s, metavar="T",
        help="a server that was there and refuses connections is waited for so long (30); 0: as for other lost calls",
    )
    parser.add_argument("--live", choices=("auto", "never"), default="auto", help="a status line on a terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def reach(options: argparse.Namespace) -> dict[str, Any]:
    """What Client and AsyncClient need besides the address: the key as a header, who is trusted, how long to wait."""
    restart_s, usual = options.restart_s, Retry()
    retry = Retry(restart_s=restart_s, total_s=max(usual.total_s, restart_s + usual.restart_s))
    reached: dict[str, Any] = {"ca_file": options.cacert, "retry": retry}
    if options.cacert is not None:
        try:
            ssl.create_default_context(cafile=options.cacert)
        except OSError as error:
            raise Failure(NO_INPUT, "no-input", f"{options.cacert}: {error.strerror or 'no certificate'}") from error
    if options.key_file is not None:
        try:
            with open(options.key_file, "rb") as file:
                key = file.read(KEY_BYTES_MAX).partition(b"\n")[0].decode("ascii").strip()
        except OSError as error:
            raise Failure(NO_INPUT, "no-input", str(error)) from error
        except UnicodeDecodeError:
            key = ""
        if not key.isprintable() or not key:
            raise Failure(NO_INPUT, "no-input", f"{options.key_file}: its first line is no key")
        reached["headers"] = {"Authorization": f"Bearer {key}"}
    return reached


def standard_streams() -> None:
    """Closed ones become what reads nothing and, for stdout, takes nothing, so that no socket gets their numbers; a
    character that the terminal's encoding does not have is spelled out, as control characters are."""
    for name, mode, flags in (("stdin", "r", os.O_RDONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def guarded(body: Callable[[argparse.Namespace], int], options: Any) -> int:
    """Run a command; whatever goes wrong on purpose is told in one line (or object), and gives the exit code."""
    try:
        try:
            code = body(options)
            sys.stdout.flush()
            return code
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has no place to go
            raise Failure(CUT, "cut", f"the output cannot be written: {error.strerror}") from error
        except ProblemError as error:
            raise Failure(REFUSED, error.code, str(error), error.committed) from error
        except TransportError as error:
            raise Failure(UNREACHABLE, "unreachable", str(error)) from error
        except Error as error:
            raise Failure(REFUSED, "contract", str(error)) from error
        except ValueError as error:
            raise Failure(USAGE, "usage", str(error)) from error
    except KeyboardInterrupt:
        return INTERRUPTED
    except Failure as failure:
        if options.json:
            print(json.dumps({"error": failure.code, "detail": str(failure), "committed": failure.committed}))
        else:
            print(f"treeverify: {failure}", file=sys.stderr)
        return failure.exit_code
