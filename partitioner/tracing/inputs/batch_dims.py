"""Read ``batch_dims=``: which dimension of an input, or of a leaf of the target, is the batch.

batch_dims={"x": 1, "pos": None, "target['labels']": 1}      dimension 1 of x is the batch, pos has none, and so on

A name is that of an argument, for all tensors in it, or of one tensor, as errors name it: ``"batch['pos']"``, ``"args[0]"``. A call may
leave it out, or pass None: state=None is the first call of a recurrent model, and ``"state[0]"`` is found in the next ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.graph import ModelGraph

BatchDims = Mapping[str, int | None]
"""Name of an argument, or of a tensor in it -> the dimension of the batch; None: it has none."""

TARGET = "target"
"""The name of the target of a training step."""


def input_dims(given: BatchDims, names: Collection[str], leaves: Collection[Any], parameters: Collection[str]) -> dict[int, int | None]:
    """Return the dimensions of the named inputs: index of a leaf -> its batch dimension.

    Args:
        names: of the leaves of a call.
        leaves: their values.
        parameters: of ``forward``, which other calls may pass.

    Raises:
        ConfigError: there is no input of a name, or it does not have the dimension.
    """
    others = {name for name in given if argument_of(name) == TARGET and TARGET not in {*map(argument_of, names), *parameters}}
    others |= {name for name in given if argument_of(name) in parameters and argument_of(name) not in map(argument_of, names)}
    found = _dims_of_leaves({name: dim for name, dim in given.items() if name not in others}, dict(zip(names, leaves, strict=True)), TARGET)
    return {index: found[name] for index, name in enumerate(names) if name in found}


def target_dims(given: BatchDims, leaves: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the dimensions of the named leaves of a target: name of a leaf, ``"target['labels']"`` -> its batch dimension.

    Raises:
        ConfigError: there is no leaf of a name, or it does not have the dimension.
    """
    return _dims_of_leaves({name: dim for name, dim in given.items() if argument_of(name) == TARGET}, leaves)


def _dims_of_leaves(given: BatchDims, leaves: Mapping[str, Any], *other_names: str) -> dict[str, int | None]:
    """Return name of a leaf -> its dimension, from names of leaves or of their containers; the most exact name of a leaf counts."""
    found: dict[str, int | None] = {}
    for name, dim in sorted(given.items(), key=lambda pair: len(pair[0])):
        named = [leaf for leaf in leaves if _is_in(leaf, name)]
        tensors = [leaf for leaf in named if isinstance(leaves[leaf], Tensor)]
        is_left_out = any(leaves[leaf] is None and (_is_in(leaf, name) or _is_in(name, leaf)) for leaf in leaves)
        if not named and not is_left_out:
            raise _unknown(name, [*leaves, *map(argument_of, leaves), *other_names])
        if not tensors and not is_left_out:
            raise ConfigError(f"batch_dims names {name}, which is no tensor", remedy="name tensors alone")
        for leaf in tensors:
            found[leaf] = None if dim is None else _dimension(leaf, leaves[leaf], dim)
    return found


def _is_in(leaf: str, name: str) -> bool:
    """Return whether a leaf is the one of a name, or in the container of that name: ``"state[0]"`` is in ``"state"``."""
    return leaf == name or leaf.startswith((f"{name}[", f"{name}."))


def _unknown(name: str, known: Collection[str]) -> ConfigError:
    """Return the error for a name that no input has."""
    names = list(dict.fromkeys(known))
    remedy = f"{did_you_mean(name, names)}the names are {', '.join(names)}"
    return ConfigError(f"batch_dims names {name!r}, and there is no such input", remedy=remedy)


def _dimension(name: str, tensor: Tensor, dim: int) -> int:
    """Return a dimension of a tensor, counted from its first; raise ConfigError if it has none such."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ConfigError(
            f"batch_dims says that dimension {dim} of {name} is the batch, and {name} has shape {tuple(tensor.shape)}",
            remedy=f'name a dimension that it has, or none: batch_dims={{"{name}": None}}',
        )
    return dim % tensor.dim()


def argument_of(name: str) -> str:
    """Return the argument that a tensor is in: ``"batch"`` for ``"batch['pos']"``."""
    return name.partition("[")[0].partition(".")[0]


def no_batch_remedy(names: Collection[str]) -> str:
    """Return the option that says that inputs have no batch, as a user writes it."""
    return f"batch_dims={{{', '.join(f'{chr(34)}{name}{chr(34)}: None' for name in names)}}}"


def accidental_batch(graph: ModelGraph) -> str:
    """Return a clause for remedies of rows that meet: an input may be as long as the batch by accident. Empty where one input has it."""
    others = [leaf.name for leaf in graph.inputs if leaf.batch_dim is not None][1:]
    by_accident = f"; if an input is as long as the batch by accident, say so: {no_batch_remedy(others)}" if others else ""
    return by_accident + other_batch(((leaf.name, leaf.shape, leaf.batch_dim) for leaf in graph.inputs), graph.batch_size)


def other_batch(inputs: Iterable[tuple[str, Sequence[object], int | None]], size: int) -> str:
    """Return a clause for remedies: an input may have its batch in another dimension of that size. Empty where none has such a dimension.

    Args:
        inputs: name, shape and assumed batch dimension of each.
        size: of the batch.
    """
    found = dict[str, int]()
    for name, shape, batch_dim in inputs:
        dimensions = [dimension for dimension, each in enumerate(shape) if each == size and dimension != batch_dim]
        if dimensions and size > 1:
            found[name] = dimensions[0]
    if not found:
        return ""
    option = ", ".join(f'"{name}": {dimension}' for name, dimension in found.items())
    return f"; if the batch of {', '.join(found)} is in another dimension, say so: batch_dims={{{option}}}"
