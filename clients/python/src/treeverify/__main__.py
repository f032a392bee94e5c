"""python -m treeverify COMMAND."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__, bench, generate
from .command import USAGE, standard_streams

_EXIT_CODES = (
    "Exit codes: 0, 64 usage, 66 no such file, 69 unreachable, 73 a report that cannot be written, 74 other output, "
    "76 refused, 130 interrupted."
)


class _Parser(argparse.ArgumentParser):
    """Exit code of a usage error as the C program's."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    standard_streams()
    parser = _Parser(prog="python -m treeverify", description="Client of treeverifyd.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    generate.add_arguments(
        commands.add_parser(
            "generate",
            allow_abbrev=False,
            help="continue a text with drafts",
            description="Continue PROMPT. Accepted drafts are green and the model's own tokens bold on a terminal; elsewhere "
            f"the own ones stand in [brackets]. {_EXIT_CODES}",
        )
    )
    bench.add_arguments(
        commands.add_parser(
            "bench",
            allow_abbrev=False,
            help="many synthetic drafters at a distance",
            description="Drive drafters with drafts of a known quality, and print what their rounds took. "
            f"{_EXIT_CODES}",
        )
    )
    options = parser.parse_args(arguments)
    return bench.run(options) if options.command == "bench" else generate.run(options)


if __name__ == "__main__":
    sys.exit(main())
