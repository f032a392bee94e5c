"""What the commands of `python -m treeverify` share: exit codes, failures as they are told, and checked options."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from .errors import Error, ProblemError, TransportError

OK, USAGE, NO_INPUT, UNREACHABLE, NO_OUTPUT, REFUSED, INTERRUPTED = 0, 64, 66, 69, 73, 76, 130


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


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=os.environ.get("TREEVERIFY_URL", "http://127.0.0.1:8471"))
    parser.add_argument("--live", choices=("auto", "never"), default="auto", help="a status line on a terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def guarded(body: Callable[[argparse.Namespace], int], options: Any) -> int:
    """Run a command; whatever goes wrong on purpose is told in one line (or object), and gives the exit code."""
    try:
        try:
            return body(options)
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
