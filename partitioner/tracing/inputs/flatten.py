"""The inputs of a model: flattened, named as its signature names them, and resized along the batch.

Paths through nested inputs and outputs, as a user writes them.

{"loss": ., "states": (., {"key": .})}    ->    loss, states[0], states[1]['key']
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.errors import ConfigError
from passes.ir.graph import Autocast
from passes.ir.torch_private import TreeSpec, is_view, tree_flatten, tree_unflatten
from passes.normalize.randomness.draw_order import memory_order

__all__ = ["BatchLayout", "ModelInputs", "check_dense", "flatten_inputs", "output_names"]


@dataclass(frozen=True)
class ModelInputs:
    """``(args, kwargs)`` of one call of a model, as leaves.

    Attributes:
        leaves: in pytree order; tensors and anything else.
        names: for each leaf, its name as a user would say it: ``"input_ids"``, ``"args[0]"``, ``"mask['key']"``.
        tree: the structure of ``(args, kwargs)``.
        autocast: the mixed precision around the call.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    tree: TreeSpec
    autocast: Autocast | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        args, _ = tree_unflatten(self.leaves, self.tree)
        return tuple(args)

    @property
    def kwargs(self) -> dict[str, Any]:
        _, kwargs = tree_unflatten(self.leaves, self.tree)
        return dict(kwargs)

    def moved_with(self, model: nn.Module) -> ModelInputs:
        """On the meta device, where the model is."""
        if not any(tensor.device.type == "meta" for tensor in (*model.parameters(), *model.buffers())):
            return self
        leaves = tuple(leaf.to("meta") if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return replace(self, leaves=leaves)

    def layout(self, dimension: int) -> BatchLayout:
        """Where the batch may be, if it is in this dimension of the first tensor that has it; nowhere when there is none.

        Every tensor with as large a size takes part: in the same dimension, else in its first.
        """
        tensors = [(index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        size = next((leaf.shape[dimension] for _, leaf in tensors if leaf.ndim > dimension), None)
        if size is None:
            return BatchLayout(1, ())
        dimensions = []
        for index, leaf in tensors:
            found = next((each for each in dict.fromkeys((dimension, 0)) if leaf.ndim > each and leaf.shape[each] == size), None)
            if found is not None:
                dimensions.append((index, found))
        return BatchLayout(size, tuple(dimensions))

    def with_batch(self, size: int, layout: BatchLayout) -> ModelInputs:
        """The same inputs with another batch size; values of resized tensors mean nothing."""
        resized = list(self.leaves)
        for index, dimension in layout.dimensions:
            leaf = resized[index]
            if leaf.shape[dimension] != size:
                resized[index] = _resized(leaf, dimension, size)
        return replace(self, leaves=tuple(resized))


def _resized(leaf: Tensor, dimension: int, size: int) -> Tensor:
    """A new tensor, no view, of another size in one dimension, its dimensions in the same order in memory."""
    shape = [size if each == dimension else other for each, other in enumerate(leaf.shape)]
    strides, inner = [0] * leaf.dim(), 1
    for each in reversed(memory_order(leaf)):
        strides[each], inner = inner, inner * shape[each]
    return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)


@dataclass(frozen=True)
class BatchLayout:
    """Which inputs hold the batch.

    Attributes:
        size: the batch size.
        dimensions: pairs of a leaf and its dimension that holds the batch.
    """

    size: int
    dimensions: tuple[tuple[int, int], ...]

    def smaller(self) -> Iterator[BatchLayout]:
        """Layouts of fewer leaves: all but one, then the first alone."""
        for dropped in reversed(self.dimensions[1:]):
            yield BatchLayout(self.size, tuple(pair for pair in self.dimensions if pair != dropped))
        if len(self.dimensions) > 2:
            yield BatchLayout(self.size, self.dimensions[:1])


def flatten_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ModelInputs:
    """Flatten and name the inputs of one call.

    Raises:
        ConfigError: the model's ``forward`` does not take them.

    One tensor passed twice becomes two, which a trace would take for one input, and tensors of inference mode, and views of larger tensors,
    become plain ones: a trace would describe what they are views of.
    """
    args, kwargs = tuple(args), dict(kwargs)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the example inputs do not fit {type(model).__name__}.forward: {error}",
            remedy=f"pass example_inputs=(...) and example_kwargs={{...}} that fit forward{signature}",
        ) from error
    leaves, tree = tree_flatten((args, kwargs))
    names = []
    for name, value in zip([*_positional_names(signature, len(args)), *kwargs], [*args, *kwargs.values()], strict=True):
        names += [name + path for path in _leaf_paths(tree_flatten(value)[1])]
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Tensor):
            check_dense(f"the input {name}", leaf)
    return ModelInputs(tuple(_distinct(leaves)), tuple(names), tree)


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a tensor without strides (sparse, MKL-DNN), or of several shapes (nested): no rule says how to cut it."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested (of several shapes)" if tensor.is_nested else f"sparse ({tensor.layout})"
        remedy = "a padded tensor and a mask" if tensor.is_nested else "it dense, x.to_dense(), or its indices and values as a tensor each"
        raise ConfigError(f"{name} is {kind} and has no rows to divide", remedy=f"pass {remedy}")


def _distinct(leaves: list[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    for leaf in leaves:
        replaced = isinstance(leaf, Tensor) and (id(leaf) in seen or leaf.is_inference() or is_view(leaf))
        seen.add(id(leaf))
        with torch.inference_mode(mode=False):
            yield leaf.detach().clone().requires_grad_(leaf.requires_grad) if replaced else leaf


def _positional_names(signature: inspect.Signature, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{index}]" for index in range(count - len(names))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names[:count]


# -- paths through nested inputs and outputs ---------------------------------------------------------------------------------------


def _leaf_paths(tree: TreeSpec) -> tuple[str, ...]:
    """For each leaf, its path behind the root: ``""``, ``"[0]"``, ``"['key']"``, ``".field"``, or several of them."""
    if tree.is_leaf():
        return ("",)
    return tuple(step + rest for step, child in zip(_steps(tree), tree.children(), strict=True) for rest in _leaf_paths(child))


def output_names(tree: TreeSpec) -> tuple[str, ...]:
    """For each leaf of a result, its path; a key or field at the top stands bare: ``"logits"``, ``"states[0]"``."""
    if tree.is_leaf():
        return ("",)
    names = []
    for step, child in zip(_steps(tree), tree.children(), strict=True):
        bare = step.removeprefix(".")
        if step.startswith("['"):
            bare = step[2:-2]
        names += [bare + path for path in _leaf_paths(child)]
    return tuple(names)


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
