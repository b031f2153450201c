"""Name the place in the model of an operation that fails while a program runs."""

from __future__ import annotations

from typing import NoReturn

from partitioner.runtime.executor import Executable
from passes.graph.provenance import place_of
from passes.ir.errors import ConfigError

__all__ = ["raise_with_place"]

_OUT_OF_MEMORY = "allocate memory"
"""A part of the text of PyTorch's error for memory of the host, by which frameworks recognize it."""


def raise_with_place(executable: Executable, error: Exception) -> NoReturn:
    """Raise ConfigError with place and rank from the error of an operation of the model; raise any other error unchanged.

    Unchanged are errors of a user's hook, and subclasses of RuntimeError, by which callers recognize exhausted memory and broken devices.
    """
    node = None
    if type(error) in (RuntimeError, IndexError) and _OUT_OF_MEMORY not in str(error):
        node = executable.failed_node(error)
    if node is None:
        raise error
    raise ConfigError(
        f"rank {executable.program.rank} cannot compute {node.name}: {error}",
        place=place_of(node),
        remedy="check the values of the inputs, such as indices beyond the table of an embedding; to compare, call the model with them",
    ) from error
