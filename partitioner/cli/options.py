"""What commands have in common: how they are described, and what they write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from cost_models.text_files import write_text

__all__ = ["CODES", "Commands", "add_command", "add_json", "say", "write_json"]

Commands = Any
"""What ``argparse.ArgumentParser.add_subparsers`` gives."""

CODES = "exit code: 0 it worked, 2 the request was wrong or cannot be met"
"""What most commands end with."""

STANDARD_OUTPUT = "-"


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str, codes: str = CODES
) -> argparse.ArgumentParser:
    """A command.

    Args:
        run: does it; returns the exit code.
        text: what it does, for the list of commands.
        example: words behind its name, which the tests run.
        codes: what it ends with.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example: partitioner {name} {example}\n{codes}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument("--debug", action="store_true", help="show where in the code an error came from")
    return command


def add_json(command: argparse.ArgumentParser, what: str) -> None:
    """The option that gives a result to machines."""
    text = f"write {what} as JSON to a file; without FILE, to\nstandard output, and nothing else there"
    command.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=text)


def write_json(arguments: argparse.Namespace, what: str, value: Any) -> None:
    """Do what ``--json`` asks for.

    Args:
        what: it is, for the line that says where it went.
        value: text that is JSON, or what becomes it.
    """
    if arguments.json is None:
        return
    text = value if isinstance(value, str) else json.dumps(value, indent=2)
    if arguments.json == STANDARD_OUTPUT:
        print(text)
        return
    write_text(arguments.json, text + "\n", f"the {what}")
    sys.stdout.flush()
    print(f"\n{what} written to {arguments.json}")


def say(arguments: argparse.Namespace, text: str) -> None:
    """Print for a person: not where a machine reads."""
    if arguments.json != STANDARD_OUTPUT:
        print(text)
