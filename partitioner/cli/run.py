"""Parse and run one command; errors are printed as messages, and set the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from partitioner.cli.parser import command_parser, option_flags
from passes.ir.errors import ConfigError, PartitionError, PartitionWarning, did_you_mean

EXIT_CODES = {"worked": 0, "found against it": 1, "wrong request": 2, "defect": 3, "interrupted": 130}
"""Exit code of the process by outcome, for scripts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code.
    """
    arguments = argparse.Namespace(debug=False)
    try:
        arguments, unknown = command_parser().parse_known_args(argv)
        _check_known(arguments, unknown)
        with _plain_warnings():
            module, _, function = arguments.run.partition(":")
            code: int = getattr(importlib.import_module(f"partitioner.cli.{module}"), function)(arguments)
        sys.stdout.flush()
    except PartitionError as error:
        _print_error(arguments, str(error))
        return EXIT_CODES["wrong request"]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_CODES["interrupted"]
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. Discard what is still buffered, or Python reports an error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CODES["worked"]
    except Exception as error:  # noqa: BLE001  a defect is reported as a message, too; --debug shows the traceback
        _print_error(arguments, f"{type(error).__name__}: {error}\n  This is a defect of partitioner.\n  remedy: --debug shows where it is")
        return EXIT_CODES["defect"]
    return code


def _check_known(arguments: argparse.Namespace, unknown: Sequence[str]) -> None:
    """Raise ConfigError for the first word that the command does not take; suggest an option with a similar name."""
    if not unknown:
        return
    word = next((each for each in unknown if each.startswith("-")), unknown[0]).partition("=")[0]
    meant = did_you_mean(word, option_flags(arguments.help_text()), str)
    kind = "option" if word.startswith("-") else "argument"
    raise ConfigError(
        f"partitioner {arguments.command} has no {kind} {word}", remedy=f"{meant}partitioner {arguments.command} --help lists the options"
    )


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


def _print_error(arguments: argparse.Namespace, text: str) -> None:
    """Print an error, after its traceback if ``--debug`` is given."""
    if arguments.debug:
        traceback.print_exc()
    print(f"error: {text}", file=sys.stderr)
