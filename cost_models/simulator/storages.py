"""Abstract values of a program: shape, dtype and storage.

h = addmm(bias, x, w)        h has a storage of its own
v = view(h, ...)             v shares the storage of h
del h                        nothing is free yet: v holds it
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

Category = Literal["parameters", "gradients", "optimizer", "activations", "communication"]
"""Category of memory."""

CATEGORIES: tuple[Category, ...] = ("parameters", "gradients", "optimizer", "activations", "communication")
"""All of them, in the order of reports."""


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of a device's memory.

    Attributes:
        name: the node that makes it.
        bytes: its size.
        category: what it is for.
        holders: the number of live values that use it.
        stays: whether it outlives the program.
        parts: what it is made of, where several are made and dropped together: their names and sizes.
    """

    name: str
    bytes: int
    category: Category
    holders: int = 0
    stays: bool = False
    parts: tuple[tuple[str, int], ...] = ()

    def of(self, call: str) -> Storage:
        """Return a new storage like this one for a call of the stage."""
        return Storage(f"{self.name} of {call}", self.bytes, self.category, parts=self.parts)

    @property
    def named(self) -> tuple[tuple[str, int], ...]:
        """The name and the size of each part, or its own."""
        _, _, call = self.name.partition(" of ")
        return tuple((f"{name} of {call}" if call else name, size) for name, size in self.parts) or ((self.name, self.bytes),)


@dataclass(slots=True, eq=False)
class Held:
    """A tensor.

    Attributes:
        storage: its memory.
        shape: its sizes, as numbers.
        dtype: of its elements.
        key: the storage that tracing saw it in: values of one graph with one key share memory.
    """

    storage: Storage
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Hashable = None

    @property
    def bytes(self) -> int:
        """Bytes of its elements; its storage may be larger."""
        return math.prod(self.shape) * self.dtype.itemsize


def leaves_of(value: Any) -> Iterator[Held]:
    """Yield the tensors in a value, however nested."""
    if isinstance(value, Held):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves_of(part)


def storages_of(value: Any) -> list[Storage]:
    """Return the storages of a value, each once."""
    if isinstance(value, Held):
        return [value.storage]
    return list({id(leaf.storage): leaf.storage for leaf in leaves_of(value)}.values())
