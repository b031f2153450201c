"""Leave a model as it was, whatever its forward does to it while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["preserved"]


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Restore every attribute of every module, training flags and the contents of lists and dicts among them."""
    before = [(module, _contents(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, contents in before:
            _restore(module, contents)


def _contents(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Attribute -> its value, and a copy of what a list or dict holds."""
    contents = {}
    for name, value in vars(module).items():
        copy = list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else None
        contents[name] = (value, copy)
    return contents


def _restore(module: nn.Module, contents: dict[str, tuple[Any, Any]]) -> None:
    attributes = vars(module)
    for name in [name for name in attributes if name not in contents]:
        del attributes[name]
    for name, (value, copy) in contents.items():
        if isinstance(value, list):
            value[:] = copy
        elif isinstance(value, dict) and not _is_same(value, copy):  # some dicts allow no writing at all
            value.clear()
            value.update(copy)
        attributes[name] = value


def _is_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts hold the very same objects in the same order."""
    return list(one) == list(other) and all(left is right for left, right in zip(one.values(), other.values(), strict=True))
