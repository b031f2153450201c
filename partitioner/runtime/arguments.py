"""Match the arguments of a call with the inputs of the traced graph, or raise an error that names the mismatch."""

from __future__ import annotations

import enum
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from partitioner.options.batch_rows import RowParts
from partitioner.tracing.inputs.batch_dims import no_batch_remedy
from partitioner.tracing.inputs.flatten import check_dense
from passes.ir.arguments.describe import described
from passes.ir.errors import ConfigError, PartitionWarning, level_of_caller
from passes.ir.graph import Input, ModelGraph, Results
from passes.ir.program import at_batch
from passes.ir.torch_private import has_tangent, pytree
from passes.normalize.randomness.draw_order import memory_order


@dataclass(frozen=True)
class BoundInputs:
    """The tensors of one call.

    Attributes:
        tensors: placeholder -> tensor, without those that this process was not given.
        batch: rows of the batch.
        requiring_gradient: the placeholders whose gradients are wanted on any process.
        sizes: the sizes of the inputs besides the batch, by name (``ModelGraph.open_sizes``).
        written: placeholder -> the caller's own tensor, of those that this process was given and forward writes.
    """

    tensors: Mapping[str, Tensor]
    batch: int
    requiring_gradient: frozenset[str]
    sizes: Mapping[str, int]
    written: Mapping[str, Tensor] = field(default_factory=dict)

    def at(self, batch: int) -> BoundInputs:
        """Return the same tensors as part of a whole batch of this many rows."""
        return replace(self, batch=batch)


@dataclass(frozen=True)
class GivenInputs:
    """The inputs that a process was given in one call.

    Attributes:
        tensors: placeholder -> tensor.
        batch: rows of the given tensors; None if only inputs that were not given have a batch dimension.
        lacking: names of inputs that were not given.
        sizes: the open sizes of the given tensors, by name.
    """

    tensors: Mapping[str, Tensor]
    batch: int | None
    lacking: tuple[str, ...]
    sizes: Mapping[str, int]

    @property
    def requiring_gradient(self) -> frozenset[str]:
        """The placeholders of given tensors that require a gradient."""
        return frozenset(name for name, tensor in self.tensors.items() if tensor.requires_grad)


def bind_inputs(graph: ModelGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, any_batch: bool) -> BoundInputs:
    """Match a call with the traced inputs; see ``given_inputs``.

    Raises:
        ConfigError: an input does not fit, or is missing.
    """
    given = given_inputs(graph, args, kwargs, any_batch=any_batch)
    if given.lacking:
        raise missing_inputs(given.lacking)
    assert given.batch is not None
    return BoundInputs(given.tensors, given.batch, given.requiring_gradient, given.sizes)


def missing_inputs(names: Sequence[str]) -> ConfigError:
    """Return the error of a process whose stages read inputs that it was not given."""
    verb = "was a tensor when the model was traced and is" if len(names) == 1 else "were tensors when the model was traced and are"
    return ConfigError(f"{', '.join(names)} {verb} None now", remedy="pass tensors; a rank may leave out what its stages do not read")


def given_inputs(graph: ModelGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, any_batch: bool) -> GivenInputs:
    """Match a call with the traced inputs. A tensor may be None, and a call without any argument gives none.

    Args:
        any_batch: whether a batch of another size than the traced one may be given although the graph's is fixed
            (the caller traces again).

    Raises:
        ConfigError: naming the input that differs from what was traced in structure, kind, value, dtype or size.
    """
    leaves = [leaf for leaf in graph.inputs if leaf.dtype is not None]
    if not args and not kwargs and leaves:
        return GivenInputs({}, _batch_of(graph, {}, leaves), tuple(leaf.name for leaf in leaves), {})
    given, tree = pytree.tree_flatten((args, reorder_keywords(graph, dict(kwargs))))
    if tree != graph.input_tree:
        names = ", ".join(leaf.name for leaf in graph.inputs)
        raise ConfigError(
            f"the arguments are not those that the model was traced with: {names}",
            remedy="pass the same arguments in the same places; another signature needs its own partition(..., example_inputs=...)",
        )
    tensors: dict[str, Tensor] = {}
    batches: dict[str, int] = {}
    sizes: dict[str, dict[str, int]] = {}  # name of a size -> input -> its size
    given_leaves: list[tuple[Input, Tensor]] = []
    lacking: list[Input] = []
    for leaf, value in zip(graph.inputs, given, strict=True):
        if leaf.dtype is None:
            _check_constant(leaf, value)
            continue
        if value is None:
            lacking.append(leaf)
            continue
        value = _at_traced_precision(graph, leaf, value)  # noqa: PLW2901
        _check_tensor(leaf, value)
        if leaf.batch_dim is not None:
            batches[leaf.name] = _rows_of(graph, leaf, value)
        for dim, name in leaf.open_sizes:
            sizes.setdefault(name, {}).setdefault(leaf.name, value.shape[dim])
        given_leaves.append((leaf, value))
        if leaf.placeholder is not None:
            tensors[leaf.placeholder] = value
    rows = next(iter(batches.values()), graph.batch_size)
    for leaf, value in given_leaves:
        _check_sizes(graph, leaf, value, rows, any_batch, any_size=True)
        _warn_of_memory_order(leaf, value)
    of_names = {name: _one_size(name, of_inputs) for name, of_inputs in sizes.items()}
    return GivenInputs(tensors, _batch_of(graph, batches, lacking), tuple(leaf.name for leaf in lacking), of_names)


def refuse_tangents(values: Iterable[object]) -> None:
    """Raise ConfigError where one of these values is a dual tensor of forward-mode AD."""
    if has_tangent(values):
        raise ConfigError(
            "forward-mode AD (torch.autograd.forward_ad): a partitioned model computes no tangents, and those given would be lost",
            remedy="call the model itself for Jacobian-vector products; backward() of a partitioned model gives vector-Jacobian products",
        )


def check_shapes(graph: ModelGraph, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a given tensor has not the sizes of the graph, but for its batch; ``tensors``: placeholder -> tensor."""
    given = [(leaf, tensors[leaf.placeholder]) for leaf in graph.inputs if leaf.placeholder is not None and leaf.placeholder in tensors]
    rows = next((_rows_of(graph, leaf, tensor) for leaf, tensor in given if leaf.batch_dim is not None), graph.batch_size)
    for leaf, tensor in given:
        _check_sizes(graph, leaf, tensor, rows, any_batch=True)


def _one_size(name: str, of_inputs: Mapping[str, int]) -> int:
    """Return the size that all inputs have; raise ConfigError if they differ."""
    if len(set(of_inputs.values())) > 1:
        sizes = ", ".join(f"{each} has {size}" for each, size in of_inputs.items())
        raise ConfigError(f"the inputs differ in {name}: {sizes}", remedy=f"give every input the same {name}")
    size = next(iter(of_inputs.values()))
    if size < 1:
        raise ConfigError(f"{next(iter(of_inputs))} is empty: its {name} is 0", remedy="give at least one element")
    return size


def _batch_of(graph: ModelGraph, batches: Mapping[str, int], lacking: Sequence[Input]) -> int | None:
    """Return the rows of the batch from those of each given input; None if only ``lacking`` inputs have a batch dimension."""
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{name} has {rows}" for name, rows in batches.items())
        first = next(iter(batches.values()))
        accidental = no_batch_remedy([name for name, rows in batches.items() if rows != first])
        raise ConfigError(
            f"the inputs differ in batch size: {sizes}",
            remedy=f"give every input the same number of rows; of one that has none, say so: partition(..., {accidental})",
        )
    if not batches and any(leaf.batch_dim is not None for leaf in lacking):
        return None
    batch = next(iter(batches.values()), graph.batch_size)
    if batch < 1:
        raise ConfigError("the batch is empty", remedy="give at least one row")
    return batch


def check_target(target: Any, rows: RowParts, batch: int, n_microbatches: int, results: Results) -> None:
    """Check a target before a step.

    Args:
        rows: the rows that each process passes.
        batch: rows of the whole batch.
        n_microbatches: of each rank's rows.
        results: whether the loss is computed on each rank's rows, or on the whole batch.

    Raises:
        ConfigError: a tensor in it cannot be cut into microbatches, for its first dimension is not the batch; or it holds the rows of one
            rank where the loss takes all.
    """
    refuse_tangents(pytree.tree_leaves(target))
    passed = rows.rows_passed(batch)
    is_split = results != "whole" and (n_microbatches > 1 or rows.count > 1)
    for path, leaf in pytree.tree_flatten_with_path(target)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise ConfigError(
                f"target{pytree.keystr(path)} requires a gradient, and train_step computes none for targets",
                remedy="pass it to the model as an input, and let the model return it; or .detach() it",
            )
        if not isinstance(leaf, Tensor):
            continue
        _check_values(f"target{pytree.keystr(path)}", leaf)
        if leaf.dim() == 0:
            continue
        if results == "whole" and passed < batch and leaf.shape[0] == passed:
            raise ConfigError(
                f"target{pytree.keystr(path)} has the rows of one rank, and the loss takes those of all",
                remedy='let the model return its loss, or loss_fn compute the target; or pass the whole batch, with inputs="global"',
            )
        if is_split and leaf.shape[0] != passed:
            name = f"target{pytree.keystr(path)}"
            dim = next((dim for dim, size in enumerate(leaf.shape) if size == passed), None)
            raise ConfigError(
                f"{name} has shape {tuple(leaf.shape)} and the batch has {passed} rows",
                remedy="give it one row for each row of the batch; if it has none, or in another dimension, say so: "
                f'partition(..., batch_dims={{"{name}": {dim}}})',
            )


def as_traced(graph: ModelGraph, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the call with the arguments of the trace, positional or by keyword as there; unchanged if it cannot match.

    ``f(x)`` may be ``f(x=x)``. An argument that is no tensor and has its default may be left out, or be passed where the trace has none.
    """
    places = pytree.tree_unflatten(list(range(graph.input_tree.num_leaves)), graph.input_tree)
    traced_args, traced_kwargs = places
    if len(args) == len(traced_args) and set(kwargs) == set(traced_kwargs):
        return args, kwargs
    parameters = list(signature.parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters) or len(args) > len(parameters):
        return args, kwargs
    positional = dict(zip((parameter.name for parameter in parameters), args, strict=False))
    if positional.keys() & kwargs.keys():
        return args, kwargs
    names = [parameter.name for parameter in parameters[: len(traced_args)]]
    traced = {**dict(zip(names, traced_args, strict=False)), **traced_kwargs}
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.default is not inspect.Parameter.empty}
    given = {**positional, **kwargs}
    # None stays: it may stand for a tensor that this rank does not read.
    unneeded = {name for name in given.keys() - traced.keys() if name in defaults and given[name] is not None}
    given = {name: value for name, value in given.items() if not (name in unneeded and _is_same(value, defaults[name]))}
    for name in (traced.keys() - given.keys()) & defaults.keys():
        if all(graph.inputs[place].dtype is None for place in pytree.tree_leaves(traced[name])):
            given[name] = defaults[name]
    if given.keys() != traced.keys():
        return args, kwargs
    return tuple(given[name] for name in names), {name: given[name] for name in traced_kwargs}


def reorder_keywords(graph: ModelGraph, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments in the order of the trace; unchanged if their names differ."""
    traced_kwargs = pytree.tree_unflatten([None] * graph.input_tree.num_leaves, graph.input_tree)[1]
    if isinstance(traced_kwargs, dict) and set(traced_kwargs) == set(kwargs):
        return {name: kwargs[name] for name in traced_kwargs}
    return kwargs


def _check_constant(leaf: Input, value: Any) -> None:
    """Raise ConfigError if an argument that is no tensor differs from the traced one."""
    if not _is_same(value, leaf.constant):
        shown = described(value)
        raise ConfigError(
            f"{leaf.name} was {described(leaf.constant)} when the model was traced and is {shown} now",
            remedy=f"what is no tensor is frozen at trace time; partition again with example inputs that have {leaf.name}={shown}",
        )


def is_as_traced(graph: ModelGraph, leaf: Input, value: Any, dtype: torch.dtype | None) -> bool:
    """Return whether an argument has the traced value, or as a tensor the traced dtype.

    Args:
        value: a tensor where one was traced, or None in its place.
        dtype: floating-point inputs are converted to it; None: they are not converted.
    """
    if leaf.dtype is None:
        return _is_same(value, leaf.constant)
    if value is None or (dtype is not None and value.is_floating_point()):
        return True
    return bool(_at_traced_precision(graph, leaf, value).dtype == leaf.dtype)


def may_be_traced(leaf: Input, value: Any) -> bool:
    """Return whether a model is traced anew for an argument other than the traced one: a plain value, or another kind of number.

    No other object is a reason to trace: most are new in each call. Nor is another precision of the same kind of number: it is mostly a
    mistake, and an error of the program shows it.
    """
    if leaf.dtype is None:
        return isinstance(value, _PLAIN)
    return _kind(leaf.dtype) != _kind(value.dtype)


def _kind(dtype: torch.dtype) -> str:
    """Return which numbers a dtype has."""
    if dtype == torch.bool:
        return "truth values"
    return "complex" if dtype.is_complex else "real" if dtype.is_floating_point else "whole"


_PLAIN = (bool, int, float, complex, str, type(None), enum.Enum, torch.dtype, torch.device)
"""Types of arguments whose values a trace is made for."""


def _is_same(value: Any, constant: Any) -> bool:
    """Return whether a value equals the traced one; False for values without a single truth value of ``==``, such as arrays."""
    try:
        return not isinstance(value, Tensor) and bool(value is constant or value == constant)
    except (RuntimeError, TypeError, ValueError):
        return False


def _at_traced_precision(graph: ModelGraph, leaf: Input, value: Any) -> Any:
    """Return an input in the traced dtype if a framework has rounded it to that of mixed precision, as Fabric does; else unchanged."""
    is_rounded = isinstance(value, Tensor) and graph.autocast is not None and value.dtype == graph.autocast.dtype
    return value.to(leaf.dtype) if is_rounded and leaf.dtype == torch.float32 else value


def _check_tensor(leaf: Input, value: Any) -> None:
    """Raise ConfigError unless a value is a tensor of the traced dtype and number of dimensions."""
    if not isinstance(value, Tensor):
        raise ConfigError(f"{leaf.name} was a tensor when the model was traced and is {described(value)} now", remedy="pass a tensor")
    _check_values(leaf.name, value)
    if value.dtype != leaf.dtype:
        raise ConfigError(
            f"{leaf.name} has dtype {value.dtype}; the model was traced with {leaf.dtype}",
            remedy=f"convert it: {leaf.name}.to({leaf.dtype})",
        )
    if value.dim() != len(leaf.shape):
        is_sample = value.dim() == len(leaf.shape) - 1 and leaf.batch_dim == 0
        raise ConfigError(
            f"{leaf.name} has {_dimensions(value.dim())}; the model was traced with {len(leaf.shape)}: {leaf.shape_text}",
            remedy=f"pass a tensor of {_dimensions(len(leaf.shape))}{f'; for one sample, {leaf.name}[None]' if is_sample else ''}",
        )


def _dimensions(count: int) -> str:
    """Return a number of dimensions in words."""
    return f"{count} dimension" if count == 1 else f"{count} dimensions"


def _check_values(name: str, tensor: Tensor) -> None:
    """Raise ConfigError for a tensor that programs cannot read."""
    if tensor.device.type == "meta":
        raise ConfigError(f"{name} is on the meta device: it has no values", remedy="pass a tensor that has")
    check_dense(name, tensor)


def _warn_of_memory_order(leaf: Input, value: Tensor) -> None:
    """Emit a PartitionWarning if the model draws random numbers and the input has another order of dimensions in memory than traced."""
    order = tuple(memory_order(value))
    if leaf.memory_order in (None, order):
        return
    warnings.warn(
        f"{leaf.name} has its dimensions in the order {order} in memory, and was traced with {leaf.memory_order}: the model draws random "
        f"numbers (dropout ...) in the order of memory, so other elements get them than in the unpartitioned model\n"
        f"  remedy: {leaf.name}.contiguous(), or partition again with example inputs in the memory format of the calls",
        PartitionWarning,
        stacklevel=level_of_caller(),
    )


def _rows_of(graph: ModelGraph, leaf: Input, value: Tensor) -> int:
    """Return the rows of the batch that an input has; its batch dimension may hold several elements for each row."""
    assert leaf.batch_dim is not None
    size, traced = value.shape[leaf.batch_dim], leaf.shape[leaf.batch_dim]
    per_row = int(traced.subs(graph.batch, 1)) if isinstance(traced, sympy.Expr) else traced // graph.batch_size
    return size // max(per_row, 1)


def _check_sizes(graph: ModelGraph, leaf: Input, value: Tensor, rows: int, any_batch: bool, any_size: bool = False) -> None:
    """Raise ConfigError if a dimension differs from the traced size; with ``any_batch`` the batch may, with ``any_size`` open sizes.

    Args:
        rows: of the batch, for inputs that hold none; their sizes may follow from it (one offset more than rows).
    """
    batch = _rows_of(graph, leaf, value) if leaf.batch_dim is not None else rows
    open_dims = {dim for dim, _ in leaf.open_sizes} if any_size else set[int]()
    for dim, traced in enumerate(leaf.shape):
        if (dim == leaf.batch_dim and any_batch) or dim in open_dims:
            continue
        expected = at_batch(traced, batch)
        if value.shape[dim] != expected:
            raise ConfigError(
                f"{leaf.name} has shape {tuple(value.shape)}; the model was traced with {leaf.shape_text}",
                remedy="pass that shape, or partition again with example inputs of the new shape",
            )


def values_on(values: Any, device: torch.device) -> Any:
    """Return values of any structure with their tensors detached and on a device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), values)
