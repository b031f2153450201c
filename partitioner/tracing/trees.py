"""Paths through nested inputs and outputs, as a user writes them.

{"loss": ., "states": (., {"key": .})}    ->    loss, states[0], states[1]['key']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["leaf_paths", "output_names"]


def leaf_paths(tree: TreeSpec) -> tuple[str, ...]:
    """For each leaf, its path behind the root: ``""``, ``"[0]"``, ``"['key']"``, ``".field"``, or several of them."""
    return tuple(_paths(tree))


def output_names(tree: TreeSpec) -> tuple[str, ...]:
    """For each leaf of a result, its path; a key or field at the top stands bare: ``"logits"``, ``"states[0]"``."""
    if tree.is_leaf():
        return ("",)
    names = []
    for step, child in zip(_steps(tree), tree.children(), strict=True):
        bare = step.removeprefix(".")
        if step.startswith("['"):
            bare = step[2:-2]
        names += [bare + path for path in leaf_paths(child)]
    return tuple(names)


def _paths(tree: TreeSpec) -> Iterator[str]:
    if tree.is_leaf():
        yield ""
        return
    for step, child in zip(_steps(tree), tree.children(), strict=True):
        for rest in _paths(child):
            yield step + rest


def _steps(tree: TreeSpec) -> list[str]:
    """How the children of a node are reached: by key where it is a mapping, by field where it is a dataclass or named tuple."""
    children = tree.num_children
    keys: Any = tree.context
    if isinstance(tree.type, type) and issubclass(tree.type, dict):
        keys = _keys_of_mapping(tree)
        if keys is not None:
            return [f"[{key!r}]" for key in keys]
    if isinstance(tree.type, type) and dataclasses.is_dataclass(tree.type) and len(dataclasses.fields(tree.type)) == children:
        return [f".{field.name}" for field in dataclasses.fields(tree.type)]
    fields = getattr(keys if isinstance(keys, type) else tree.type, "_fields", None)
    if fields is not None and len(fields) == children:
        return [f".{field}" for field in fields]
    return [f"[{index}]" for index in range(children)]


def _keys_of_mapping(tree: TreeSpec) -> list[Any] | None:
    """The keys of a mapping of any registered kind, found by putting it together from its own leaves' numbers."""
    try:
        mapping = tree_unflatten(list(range(tree.num_leaves)), tree)
        keys = list(mapping)
        in_order = [leaf for key in keys for leaf in tree_flatten(mapping[key])[0]]
    except (TypeError, ValueError, KeyError):
        return None
    return keys if len(keys) == tree.num_children and in_order == sorted(in_order) else None
