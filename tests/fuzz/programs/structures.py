"""Arguments and results of ``forward``: tensors in tuples, lists, dicts and dataclasses, as names in a text and as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


class Record(dict[str, "Structure"]):
    """The fields of a ``Result``, the dataclass that programs return."""


Structure = str | None | tuple["Structure", ...] | list["Structure"] | dict[str, "Structure"]
"""Results of ``forward``: variable names in tuples, lists, dicts and records, None leaves between them."""


def returned_text(structure: Structure) -> str:
    """Return a structure as the expression that makes it."""
    if isinstance(structure, Record):
        return f"Result({', '.join(f'{key}={returned_text(each)}' for key, each in structure.items())})"
    if isinstance(structure, dict):
        return "{" + ", ".join(f'"{key}": {returned_text(each)}' for key, each in structure.items()) + "}"
    if isinstance(structure, list):
        return "[" + ", ".join(map(returned_text, structure)) + "]"
    if isinstance(structure, tuple):
        return "(" + "".join(returned_text(each) + ", " for each in structure).strip() + ")"
    return str(structure)


def leaves(structure: Structure) -> Iterator[str]:
    """Yield the variables of a structure."""
    if isinstance(structure, str):
        yield structure
    elif structure is not None:
        for each in structure.values() if isinstance(structure, dict) else structure:
            yield from leaves(each)


def renamed(structure: Structure, rename: Callable[[str], str]) -> Structure:
    """Return the structure with other variables."""
    if isinstance(structure, dict):
        return type(structure)({key: renamed(each, rename) for key, each in structure.items()})
    if isinstance(structure, tuple | list):
        return type(structure)(renamed(each, rename) for each in structure)
    return structure if structure is None else rename(structure)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value, in the order of its fields."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [leaf for each in value for leaf in leaves_of(each)]
    return [value]


def plain(value: Any) -> Any:
    """Return the value with its dataclasses as dicts that name their class, for comparisons by ``torch.utils._pytree``."""
    if dataclasses.is_dataclass(value):
        fields = {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"dataclass": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(plain(each) for each in value)
    return value
