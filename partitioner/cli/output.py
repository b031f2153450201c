"""Print the results of commands, and write them as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from cost_models.text_files import write_text
from partitioner.cli.options import STANDARD_OUTPUT


def write_json(arguments: argparse.Namespace, what: str, value: Any) -> None:
    """Write a result where ``--json`` says: to a file, to standard output, or not at all.

    Args:
        what: name of the result, for the line that says where it was written.
        value: text that is JSON already, or an object to be converted to it.
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
    """Print text for a person, unless ``--json`` writes to standard output."""
    if arguments.json != STANDARD_OUTPUT:
        print(text)
