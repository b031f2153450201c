"""Restore a model's attributes after tracing, since its forward may change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["preserve"]


@contextlib.contextmanager
def preserve(*objects: object) -> Iterator[None]:
    """On exit, restore the attributes of objects (of a model: of all its modules) and the items of lists and dicts, also in attributes."""
    lists = [(value, _copy(value)) for value in objects if isinstance(value, list | dict)]
    owners: list[object] = []
    for value in objects:
        if isinstance(value, nn.Module):
            owners.extend(value.modules())
        elif not isinstance(value, list | dict):
            owners.append(value)
    before = [(owner, {name: (value, _copy(value)) for name, value in vars(owner).items()}) for owner in owners]
    try:
        yield
    finally:
        for owner, contents in before:
            _restore(owner, contents)
        for value, copy in lists:
            _refill(value, copy)


def _copy(value: object) -> Any:
    """Return a shallow copy of a list or dict; None for other objects."""
    if isinstance(value, list):
        return list(value)
    return dict(value) if isinstance(value, dict) else None


def _restore(owner: object, contents: dict[str, tuple[Any, Any]]) -> None:
    """Restore the attributes of an object to ``contents``: attribute -> its value, and the ``_copy`` of this value."""
    attributes = vars(owner)
    for name in [name for name in attributes if name not in contents]:
        del attributes[name]
    for name, (value, copy) in contents.items():
        _refill(value, copy)
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value


def _refill(value: object, copy: Any) -> None:
    """Give a list or dict the items of its copy; do nothing for other objects."""
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict) and not _is_same(value, copy):  # some dicts allow no writing at all
        value.clear()
        value.update(copy)


def _is_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether two dicts hold the identical objects in the same order."""
    return list(one) == list(other) and all(left is right for left, right in zip(one.values(), other.values(), strict=True))
