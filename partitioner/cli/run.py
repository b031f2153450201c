"""Read the words of a command, run it, and end with a code; errors in words, not as tracebacks."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from partitioner.cli.completion import add_completion
from partitioner.cli.partition_commands import add_partition_commands
from partitioner.cli.sweep_commands import add_sweep_commands
from passes.ir.errors import PartitionError, PartitionWarning

__all__ = ["EXIT_CODES", "command_parser", "main"]

EXIT_CODES = {"worked": 0, "found against it": 1, "wrong request": 2, "defect": 3, "interrupted": 130}
"""What a process ends with, for scripts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; None takes the process's.

    Returns:
        The exit code.
    """
    arguments = command_parser().parse_args(argv)
    try:
        with _plain_warnings():
            code: int = arguments.run(arguments)
        sys.stdout.flush()
    except PartitionError as error:
        _complain(arguments, str(error))
        return EXIT_CODES["wrong request"]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    except BrokenPipeError:
        # The reader, such as head, has seen enough. What is still to be flushed goes nowhere, so that Python does not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CODES["worked"]
    except Exception as error:  # noqa: BLE001  a defect, too, is told in words; --debug shows the traceback
        _complain(arguments, f"{type(error).__name__}: {error}\n  This is a defect of partitioner.\n  remedy: --debug shows where it is")
        return EXIT_CODES["defect"]
    return code


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print each PartitionWarning as one message, without the line of code that emitted it."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def print_plain(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
        ) -> None:
            if issubclass(category, PartitionWarning):
                print(f"warning: {message}", file=sys.stderr)
            else:
                show(message, category, filename, lineno, file, line)

        warnings.simplefilter("always", PartitionWarning)
        warnings.showwarning = print_plain
        yield


def _complain(arguments: argparse.Namespace, text: str) -> None:
    if arguments.debug:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr)


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="partitioner",
        description="Partition a PyTorch model over devices, and see what comes out.",
        epilog="partitioner COMMAND --help shows the options of a command, and an example.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_partition_commands(commands)
    add_sweep_commands(commands)
    add_completion(commands, command_parser)
    return parser
