"""Attributes of modules left by forward, as results of the traced call.

    self.aux = x.pow(2).mean()          Edit("layer", ("aux",), <tensor>)
    self.maps.append(weights)           Edit("attention", ("maps", APPENDED), <tensor>)
    self.seen = {"rows": x.shape[0]}    Edit("", ("seen",), {"rows": <size>})

A forward hook compares the attributes of all modules before and after the call. It returns the tensors and symbolic sizes among what is new
beside the result of the model, so that the graph computes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from partitioner.tracing.carried.watched_values import is_watched_list
from partitioner.tracing.restore import own_attributes
from passes.graph.canonicalize import remove_dead
from passes.ir.graph import APPENDED, Edit, Result
from passes.ir.torch_private import tree_flatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SYMBOLIC = (torch.SymInt,)

Contents = Mapping[nn.Module, Mapping[str, Any]]
"""Module -> attribute -> ``_Content`` of a list or dict, or any other value."""


@dataclasses.dataclass(frozen=True)
class LeftByCall:
    """Attributes left by each call of a traced model.

    Attributes:
        edits: of attributes; their results come last in the graph.
        is_pair: whether the trace returns a pair, of the result of the model and of a list.
    """

    edits: tuple[Edit, ...] = ()
    is_pair: bool = False


@dataclasses.dataclass(frozen=True)
class _Content:
    """A list or dict, and the items that it had."""

    container: Any
    items: Mapping[Any, Any]


def attribute_contents(model: nn.Module) -> Contents:
    """Return the attributes of all modules, with the items of lists and dicts, as they are now."""
    return {module: {name: _content(value, frozenset()) for name, value in own_attributes(module).items()} for module in model.modules()}


def _content(value: Any, around: frozenset[int]) -> Any:
    """Return a value; of a list or dict its items, too. ``around``: ids of the containers that it is in."""
    if not (type(value) in (list, dict) or is_watched_list(value)) or id(value) in around:
        return value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return _Content(value, {key: _content(item, around | {id(value)}) for key, item in items})


def edits_of_call(model: nn.Module, before: Contents) -> tuple[tuple[Edit, ...], list[Any]]:
    """Return the edits of attributes since ``before``, and the tensors and sizes in them, which ``Result`` numbers."""
    results: list[Any] = []
    edits: list[Edit] = []
    for path, module in model.named_modules():
        of_module = before.get(module, {})
        for name, value in own_attributes(module).items():
            for keys, new in _changes((name,), of_module.get(name, _NOTHING), value):
                edit = _edit(path, keys, new, results)
                edits += [] if edit is None else [edit]
    return tuple(edits), results


_NOTHING = object()


def _changes(path: tuple[Any, ...], before: Any, now: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and value of each change in an attribute, or in an item of one."""
    if not isinstance(before, _Content) or before.container is not now:
        old = before.container if isinstance(before, _Content) else before
        is_equal = type(old) is type(now) and isinstance(now, _PLAIN) and old == now
        if old is not now and not is_equal:
            yield path, now
        return
    items = dict(now.items() if isinstance(now, dict) else enumerate(now))
    if not before.items.keys() <= items.keys():
        yield path, dict(now) if isinstance(now, dict) else list(now)
        return
    for key, item in items.items():
        if key in before.items:
            yield from _changes((*path, key), before.items[key], item)
        else:
            yield (*path, APPENDED if isinstance(now, list) else key), item


def _edit(module: str, path: tuple[Any, ...], value: Any, results: list[Any]) -> Edit | None:
    """Return one change; None if it holds objects whose content is not known."""
    leaves, tree = tree_flatten(value)
    if not all(isinstance(leaf, (*_PLAIN, *_SYMBOLIC, Tensor)) for leaf in (*leaves, *path[1:]) if leaf is not APPENDED):
        return None
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, (*_SYMBOLIC, Tensor)):
            described.append(Result(len(results)))
            results.append(leaf)
        else:
            described.append(leaf)
    return Edit(module, path, tree, tuple(described))


def keep_results(program: ExportedProgram, n_left: int, edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Remove from a graph, in place, what only computes values that are in none of these edits; return the edits numbered anew.

    Args:
        n_left: how many of the last results of the graph it leaves.
    """
    if not n_left:
        return tuple(edits)
    output = program.graph.output_node()
    (results,) = output.args
    assert isinstance(results, tuple | list)
    kept = [leaf.index for edit in edits for leaf in edit.leaves if isinstance(leaf, Result)]
    left = results[len(results) - n_left :]
    output.args = ((*results[: len(results) - n_left], *(left[index] for index in kept)),)
    for node in program.graph.nodes:  # torch.export leaves users out where it makes a graph of a block without gradients
        for argument in node.all_input_nodes:
            argument.users.setdefault(node)
    remove_dead(program.graph)
    new = {index: Result(place) for place, index in enumerate(kept)}
    return tuple(
        dataclasses.replace(edit, leaves=tuple(new[leaf.index] if isinstance(leaf, Result) else leaf for leaf in edit.leaves))
        for edit in edits
    )


def without_left(program: ExportedProgram, n_left: int) -> None:
    """Remove from a graph, in place, what only computes values that the call leaves."""
    keep_results(program, n_left, ())
