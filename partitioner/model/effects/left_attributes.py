"""The attributes that forward leaves on modules, as the modules of a partitioned model show them.

    model(x)    layer.aux = tensor          on the module
    pm(x)       pm.layer.aux                from this table, which each call writes; the model itself is never changed

A call that does not compute an attribute leaves an error in its place, which reading it raises: a stale value would be a wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from passes.ir.errors import ConfigError, Place
from passes.ir.graph import APPENDED, Attribute, Edit, ModelGraph, Result
from passes.ir.torch_private import tree_unflatten

_Key = tuple[str, str]
"""Path of a module, and the name of an attribute."""


@dataclass(frozen=True)
class _Missing:
    """Stands for a value that the last call has not computed; ``why`` is a clause."""

    why: str
    remedy: str


class LeftAttributes:
    """The attributes that calls of a partitioned model have left.

    Args:
        model: gives lists and dicts their first items.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values: dict[_Key, Any] = {}
        self._read: set[_Key] | None = None

    def declare(self, edits: Sequence[Edit]) -> None:
        """Copy the lists and dicts of the model in which calls change items."""
        for edit in edits:
            if len(edit.path) > 1 and not self.has(edit.module, edit.path[0]):
                self._values[edit.module, edit.path[0]] = _copied(vars(self._model.get_submodule(edit.module))[edit.path[0]])

    def has(self, module: str, name: str) -> bool:
        """Return whether a call has left an attribute, or changes items in it."""
        return (module, name) in self._values

    def read(self, module: str, name: str) -> Any:
        """Return an attribute; raise ConfigError if the last call has not computed it."""
        if self._read is not None:
            self._read.add((module, name))
        value = self._values[module, name]
        if isinstance(value, _Missing):
            path = f"{module}.{name}".removeprefix(".")
            raise ConfigError(f"{path} has no value: {value.why}", place=Place(module=module), remedy=value.remedy)
        return value

    def assign(self, module: str, name: str, value: Any) -> None:
        """Set an attribute, as the user does."""
        self._values[module, name] = value

    def apply(self, edits: Sequence[Edit], results: Mapping[int, Any]) -> None:
        """Leave what a call has left: ``results`` are its values by index."""
        for edit in edits:
            if all(leaf.index in results for leaf in edit.leaves if isinstance(leaf, Result)):
                leaves = [results[leaf.index] if isinstance(leaf, Result) else leaf for leaf in edit.leaves]
                self._apply(edit, tree_unflatten(leaves, edit.tree))
            else:
                self._values[edit.module, edit.path[0]] = _Missing(
                    "it mixes rows of the batch, and the call was computed in microbatches", "partition with n_microbatches=1"
                )

    def _apply(self, edit: Edit, value: Any) -> None:
        name, *keys = edit.path
        if not keys:
            added = 0 if edit.count_before is None else self._number(edit.module, name) - edit.count_before
            self._values[edit.module, name] = value + added if added else value
            return
        container = self._container(edit.module, name)
        for key in keys[:-1]:
            container = container[key]
        if keys[-1] is APPENDED:
            container.append(value)
        elif edit.count_before is not None:
            container[keys[-1]] += value - edit.count_before
        else:
            container[keys[-1]] = value

    def _number(self, module: str, name: str) -> Any:
        """Return a number as calls have left it; before the first call, that of the model."""
        if self.has(module, name):
            return self._values[module, name]
        return vars(self._model.get_submodule(module))[name]

    def _container(self, module: str, name: str) -> Any:
        """Return the list or dict in an attribute; where something else has taken its place, a copy of the model's."""
        if not isinstance(self._values.get((module, name)), list | dict):
            self._values[module, name] = _copied(vars(self._model.get_submodule(module))[name])
        return self._values[module, name]

    def forget(self, edits: Sequence[Edit], why: str) -> None:
        """Leave an error in place of the attributes that these edits change."""
        for edit in edits:
            self._values[edit.module, edit.path[0]] = _Missing(why, "read it in loss_fn, or call pm(...)")

    @contextlib.contextmanager
    def installed(self, edits: Sequence[Edit], results: Mapping[int, Any]) -> Iterator[None]:
        """While active, attributes have the values that a call with these results would leave, as far as they are given."""
        before = self._values
        self._values = {key: _copied(value) for key, value in before.items()}
        try:
            self.apply(edits, results)
            yield
        finally:
            self._values = before

    @contextlib.contextmanager
    def recorded(self) -> Iterator[set[_Key]]:
        """Yield a set that receives the attributes that are read while it is active."""
        self._read = read = set[_Key]()
        try:
            yield read
        finally:
            self._read = None


def _copied(value: Any) -> Any:
    """Return a copy of a list or dict, and of those in it; any other value unchanged."""
    if type(value) is list:
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def attribute_results(graph: ModelGraph) -> tuple[int, ...]:
    """Return the indices of the results in attributes that a graph computes."""
    return tuple(place for place, each in enumerate(graph.outputs) if isinstance(each.destination, Attribute) and each.is_computed)


def loss_with_attributes(
    left: LeftAttributes, edits: tuple[Edit, ...], places: tuple[int, ...], loss_fn: Callable[..., Tensor], packed: Any, target: Any
) -> Tensor:
    """Return a loss that reads attributes of modules.

    Args:
        places: indices of the results in the attributes that it reads.
        packed: what the model returns, and the values of these results (``ModelGraph.loss_tree``).
    """
    result, values = packed
    with left.installed(edits, dict(zip(places, values, strict=True))):
        return loss_fn(result, target)
