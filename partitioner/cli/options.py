"""Options that all commands share."""

from __future__ import annotations

import argparse
from typing import Any

Commands = Any
"""The private type of the result of ``argparse.ArgumentParser.add_subparsers``."""

CODES = "exit code: 0 it worked, 2 the request was wrong or cannot be met"
"""Exit codes of most commands, for their help."""

FORMATS = ("text", "dot", "svg", "html")
"""Output formats of ``inspect``."""

STANDARD_OUTPUT = "-"
"""The file name that stands for it."""


def add_command(commands: Commands, name: str, run: str, text: str, example: str, codes: str = CODES) -> argparse.ArgumentParser:
    """Add a command to a parser.

    Args:
        run: ``"module:function"`` of this package: takes the parsed arguments, runs the command, and returns the exit code.
        text: one line of help, for the list of commands.
        example: arguments of the example in the help, which the tests run.
        codes: help on the exit codes.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: partitioner {name} {example}\n{codes}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    command.set_defaults(run=run, help_text=command.format_help)
    command.add_argument("--debug", action="store_true", help="show where in the code an error came from")
    return command


def numbers(text: str) -> tuple[int, ...]:
    """Read numbers that commas separate: ``1,8,64``."""
    return tuple(int(each) for each in text.split(","))


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    """Add the option ``--json`` to a command; ``what`` names its result in the help."""
    text = f"write {what} as JSON to a file; without FILE, to\nstandard output, and nothing else there"
    command.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=text)
