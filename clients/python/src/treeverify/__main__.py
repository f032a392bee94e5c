"""python -m treeverify COMMAND."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__, generate


class _Parser(argparse.ArgumentParser):
    """Exit code of a usage error as the C program's."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(generate.USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(prog="python -m treeverify", description="Client of treeverifyd.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    generate.add_arguments(
        commands.add_parser(
            "generate",
            allow_abbrev=False,
            help="continue a text with drafts",
            description="Continue PROMPT with a model whose token ids are bytes. Accepted drafts are green and the model's "
            "own tokens bold on a terminal; elsewhere the own ones stand in [brackets]. Exit codes: 0, 64 usage, 66 no such "
            "file, 69 unreachable, 73 a report that cannot be written, 76 refused, 130 interrupted.",
        )
    )
    return generate.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
