"""Restore a model's attributes after tracing, since its forward may change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["preserved"]


@contextlib.contextmanager
def preserved(*objects: object) -> Iterator[None]:
    """Restore every attribute of every module, training flags and the contents of lists and dicts among them.

    Args:
        objects: models, and other objects: their own attributes; lists and dicts: what they hold.
    """
    lists = [(value, _copy(value)) for value in objects if isinstance(value, list | dict)]
    others = [value for value in objects if not isinstance(value, list | dict)]
    owners = [owner for value in others for owner in (value.modules() if isinstance(value, nn.Module) else [value])]
    before = [(owner, {name: (value, _copy(value)) for name, value in vars(owner).items()}) for owner in owners]
    try:
        yield
    finally:
        for owner, contents in before:
            _restore(owner, contents)
        for value, copy in lists:
            _refill(value, copy)


def _copy(value: object) -> Any:
    return list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else None


def _restore(owner: object, contents: dict[str, tuple[Any, Any]]) -> None:
    """Remove the attributes that tracing added, put back those it replaced or removed, and refill lists and dicts.

    Args:
        contents: attribute -> its value, and a copy of what a list or dict holds.
    """
    attributes = vars(owner)
    for name in [name for name in attributes if name not in contents]:
        del attributes[name]
    for name, (value, copy) in contents.items():
        _refill(value, copy)
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value


def _refill(value: object, copy: Any) -> None:
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict) and not _is_same(value, copy):  # some dicts allow no writing at all
        value.clear()
        value.update(copy)


def _is_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dicts hold the very same objects in the same order."""
    return list(one) == list(other) and all(left is right for left, right in zip(one.values(), other.values(), strict=True))
