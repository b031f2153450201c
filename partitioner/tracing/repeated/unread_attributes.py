"""Find the attributes of modules that are read while a model runs: unread ones need not be equal in copies of a block.

    blocks.0.attention   Attention(heads=12, layer_idx=0)        layer_idx says where a cache is written, which this call has none of
    blocks.1.attention   Attention(heads=12, layer_idx=1)

A read of an instance's attribute is seen by a data descriptor of its class, which Python asks first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

Attribute: TypeAlias = tuple[type[nn.Module], str]
"""An attribute of the instances of a class of modules."""


@dataclass(frozen=True)
class _Recorded:
    """The descriptor of one attribute: gives what the instance holds, and notes that it was asked.

    Attributes:
        attribute: whose reads are noted.
        read: where they are noted.
    """

    attribute: Attribute
    read: set[Attribute] = field(compare=False)

    def __get__(self, instance: Any, owner: type) -> Any:
        name = self.attribute[1]
        if instance is None:
            raise AttributeError(f"type object {owner.__name__!r} has no attribute {name!r}")
        self.read.add(self.attribute)
        if name not in vars(instance):
            raise AttributeError(name)  # Python asks __getattr__ then, as without a descriptor
        return vars(instance)[name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.attribute[1]] = value

    def __delete__(self, instance: Any) -> None:
        if self.attribute[1] not in vars(instance):
            raise AttributeError(self.attribute[1])
        del vars(instance)[self.attribute[1]]


def recordable(kind: type[nn.Module], name: str) -> bool:
    """Return whether reads of an attribute can be recorded: its class is written in Python and has nothing of that name."""
    return not hasattr(kind, name) and "__dict__" in dir(kind) and "__getattribute__" not in _overridden(kind)


def _overridden(kind: type) -> set[str]:
    """Return the names that a class and its bases define, those of ``object`` left out."""
    return {name for base in kind.__mro__ if base is not object for name in vars(base)}


@contextlib.contextmanager
def record_reads(attributes: Collection[Attribute]) -> Iterator[set[Attribute]]:
    """Yield a set that receives each of these attributes when one is read, of any instance. Only one thread may do this at a time."""
    read: set[Attribute] = set()
    with contextlib.ExitStack() as stack:
        for attribute in attributes:
            kind, name = attribute
            setattr(kind, name, _Recorded(attribute, read))
            stack.callback(delattr, kind, name)
        yield read
