"""The attributes of a model: its own ones, and to restore all after tracing, since its forward may change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes in which ``nn.Module`` keeps its own state."""


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module other than those in which ``nn.Module`` keeps its own state."""
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}


@contextlib.contextmanager
def preserve(*objects: object) -> Iterator[None]:
    """Restore, on exit, attributes of objects (of a model: of all its modules) and items of lists and dicts, also nested ones."""
    lists = [(value, _copy(value)) for value in objects if isinstance(value, list | dict)]
    owners: list[object] = []
    for value in objects:
        if isinstance(value, nn.Module):
            owners.extend(value.modules())
        elif not isinstance(value, list | dict):
            owners.append(value)
    before = [(owner, _contents(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, contents in before:
            _restore(owner, contents)
        for value, copy in lists:
            _refill(value, copy)


class Structure:
    """The modules of a model, their attributes, and which parameters are trained, as they were when the model was partitioned.

    The model may be changed later: other adapters of peft may be made active, or merged into the weights. Its other modes, sizes and cached
    forwards are traced from this structure, so that all programs are of one model. Values of tensors are not part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._contents = [(module, _contents(module)) for module in model.modules()]
        self._is_trained = {name: (each, each.requires_grad) for name, each in model.named_parameters(remove_duplicate=False)}

    def trains(self, name: str) -> bool:
        """Return whether a parameter required a gradient."""
        return self._is_trained[name][1]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """While active, the model is as it was; on exit, in its present state."""
        modules = dict.fromkeys([*self._model.modules(), *(module for module, _ in self._contents)])
        now = [(module, _contents(module)) for module in modules]
        flags = [(each, each.requires_grad) for each, _ in self._is_trained.values()]
        try:
            self._set(self._contents, self._is_trained.values())
            yield
        finally:
            self._set(now, flags)

    @staticmethod
    def _set(contents: Iterable[tuple[nn.Module, dict[str, tuple[Any, Any]]]], flags: Iterable[tuple[nn.Parameter, bool]]) -> None:
        for module, attributes in contents:
            _restore(module, attributes)
        for parameter, is_trained in flags:
            parameter.requires_grad_(is_trained)


def _contents(owner: object) -> dict[str, tuple[Any, Any]]:
    """Return attribute -> its value, and a copy of a list or dict."""
    return {name: (value, _copy(value)) for name, value in vars(owner).items()}


def _copy(value: object, around: frozenset[int] = frozenset()) -> Any:
    """Return a shallow copy of a list or dict, and pairs of each list or dict in it and its copy; None for other objects.

    Args:
        around: ids of the lists and dicts around it, which it may contain again.
    """
    if not isinstance(value, _CONTAINERS) or id(value) in around:
        return None
    if not value:
        return _EMPTY[isinstance(value, list)]
    items = value if isinstance(value, list) else value.values()
    nested = [(item, _copy(item, around | {id(value)})) for item in items if isinstance(item, _CONTAINERS)]
    return (list(value) if isinstance(value, list) else dict(value)), nested


_CONTAINERS = (list, dict)

_EMPTY: tuple[Any, Any] = (({}, ()), ([], ()))
"""The copies of an empty dict and list, as most attributes of a module are."""


def _restore(owner: object, contents: dict[str, tuple[Any, Any]]) -> None:
    """Restore the attributes of an object to ``contents``: attribute -> its value, and the ``_copy`` of this value."""
    attributes = vars(owner)
    for name in [name for name in attributes if name not in contents]:
        del attributes[name]
    for name, (value, copy) in contents.items():
        _refill(value, copy)
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value


def _refill(value: object, copied: Any) -> None:
    """Give a list or dict, and those in it, the items of its ``_copy``; do nothing for other objects."""
    if copied is None:
        return
    copy, nested = copied
    if isinstance(value, list):
        value[:] = copy
    elif isinstance(value, dict) and not _is_same(value, copy):  # some dicts allow no writing at all
        value.clear()
        value.update(copy)
    for item, of_item in nested:
        _refill(item, of_item)


def _is_same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether two dicts hold the identical objects in the same order."""
    return list(one) == list(other) and all(left is right for left, right in zip(one.values(), other.values(), strict=True))
