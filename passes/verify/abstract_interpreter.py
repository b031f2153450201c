"""Interpret a rank's program without running it, on abstract values that a subclass defines.

    node of the program                     shapes in symbols (verification)           storages (simulation)

    sizes = microbatch_sizes(batch, 2)      (size_mb0, size_mb1)                       (4, 4)
    x = split_batch(input, sizes, 0)        [float32 (size_mb0, 5), ...]               [(4, 5) in the memory of input, ...]
    h = self.stage0_forward_mb0(x[0])       from the stage's own graph                 from the stage's own graph
    pending = all_reduce([dw], ...)         specs that it gives, expects and gets      a message, and the buffers that it fills

A subclass defines tensors, and the results of stages, losses and messages. All other functions of programs are interpreted here.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import sympy
import torch
from torch import fx, nn

from passes.graph.symbolic_sizes import SIZE_OPERATORS, apply_to_sizes
from passes.ir.comm import microbatch
from passes.ir.comm.expert_rows import row_counts
from passes.ir.comm.primitives import COLLECTIVES, receive, send, wait
from passes.ir.comm.semantics import CollectiveSpec, collective_arguments, collective_spec
from passes.ir.comm.unsummed import AddUnsummed
from passes.ir.errors import VerificationError
from passes.ir.program import LossCall, Program, StageCall, StoreGradients
from passes.ir.tensor_spec import Size, TensorSpec


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""A value of which nothing is known before a run: a target, a loss function, their results."""


class AbstractInterpreter(ABC):
    """Interprets one program, node by node.

    Args:
        program: read, not changed.
        batch: the batch size.

    Attributes:
        values: node -> a tensor, a size, a tuple or list of such, None or UNKNOWN; of the nodes so far.
        sizes: the number of rows of each microbatch.
        node: the current node.
    """

    tensor_type: ClassVar[type[Any]]
    """The class of abstract tensors, which have a ``shape`` and a ``dtype``."""

    node: fx.Node

    def __init__(self, program: Program, batch: Size) -> None:
        self.program = program
        self.batch = batch
        self.sizes: tuple[Size, ...] = (batch,)
        self.values: dict[fx.Node, Any] = {}

    def value_of(self, node: fx.Node) -> Any:
        """Return the abstract result of a node; UNKNOWN for a function that programs do not normally call."""
        self.node = node
        if node.op == "placeholder":
            return self.input(node)
        if node.op == "get_attr":
            return self.state(node)
        arguments: Any = fx.map_arg(node.args, self.values.__getitem__)
        keywords: Any = fx.map_arg(node.kwargs, self.values.__getitem__)
        if node.op == "output":
            return arguments[0]
        if node.op == "call_module":
            return self._module(self.program.module.get_submodule(str(node.target)), arguments)
        assert callable(node.target)
        function = _FUNCTIONS.get(node.target)
        return UNKNOWN if function is None else function(self, *arguments, **keywords)

    def error(self, problem: str) -> VerificationError:
        """Return an error at the current node."""
        return VerificationError(
            f"rank {self.program.rank}, {self.node.name}: {problem}",
            remedy=f"print pm.graph({self.program.rank}): a pass, or an edit by hand, has left this node with arguments that do not fit",
        )

    # -- defined by a subclass -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def new(self, shape: Sequence[Size], dtype: torch.dtype) -> Any:
        """Return a tensor in new memory."""

    @abstractmethod
    def view(self, tensor: Any, shape: Sequence[Size]) -> Any:
        """Return a tensor of another shape in a part of the memory of ``tensor``."""

    @abstractmethod
    def same_size(self, one: Size, other: Size) -> bool:
        """Return whether two sizes are equal for every batch size."""

    @abstractmethod
    def input(self, node: fx.Node) -> Any:
        """Return the value of a placeholder of the program."""

    @abstractmethod
    def state(self, node: fx.Node) -> Any:
        """Return the parameter, buffer or constant of a ``get_attr`` node."""

    @abstractmethod
    def stage(self, module: StageCall, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> Any:
        """Return the results of a stage; ``placeholders`` of its graph, except bound parameters and buffers, get ``arguments``."""

    @abstractmethod
    def loss(self, module: LossCall, values: Sequence[Any]) -> Any:
        """Return the loss for the model's ``values``, and the gradients of those that are differentiated."""

    @abstractmethod
    def store(self, module: StoreGradients, gradients: Any) -> None:
        """Store gradients of parameters in ``.grad``."""

    @abstractmethod
    def send(self, value: Any, destination: int, tag: int) -> None:
        """Send a message to another rank."""

    @abstractmethod
    def receive(self, shape: Sequence[Size], dtype: torch.dtype, source: int, tag: int) -> Any:
        """Return a pending message of another rank."""

    @abstractmethod
    def collective(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the pending result of a collective at the current node."""

    @abstractmethod
    def wait(self, started: Any) -> Any:
        """Return the result of a pending receive or collective."""

    def _module(self, module: nn.Module, arguments: Sequence[Any]) -> Any:
        """Return the result of a ``call_module`` node by the class of the module."""
        if isinstance(module, StageCall):
            return self._stage(module, arguments)
        if isinstance(module, LossCall):
            return self.loss(module, arguments[0])
        if isinstance(module, AddUnsummed):
            return arguments[0]
        if isinstance(module, StoreGradients):
            self.store(module, arguments[0])
            return None
        return UNKNOWN

    def _stage(self, module: StageCall, arguments: Sequence[Any]) -> Any:
        """Return the results of a stage's graph; of an unknown tuple of saved values, each value is unknown."""
        placeholders = [each for each in module.graph.graph.nodes if each.op == "placeholder"][len(module.bound_names) :]
        if module.takes_tuple:
            saved, *others = arguments
            if saved is UNKNOWN:
                saved = [UNKNOWN] * (len(placeholders) - len(others))
            arguments = (*saved, *others)
        if len(placeholders) != len(arguments):
            raise self.error(f"gives {len(arguments)} values to a graph that takes {len(placeholders)}")
        return self.stage(module, placeholders, arguments)

    def microbatch_sizes(self, batch: Size, count: int) -> tuple[Size, ...]:
        """Return the number of rows of each microbatch: symbols if the batch size is one."""
        if isinstance(batch, int):
            self.sizes = microbatch.microbatch_sizes(batch, count)
        elif count == 1:
            self.sizes = (batch,)
        else:
            self.sizes = tuple(sympy.Symbol(f"size_mb{index}", integer=True, positive=True) for index in range(count))
        return self.sizes

    def split_batch(self, value: Any, sizes: Sequence[Size], dim: int, parts: int = 1) -> Any:
        """Return the rows of each microbatch: views if the batch is the first dimension, else new tensors."""
        if value is UNKNOWN:
            return [UNKNOWN] * len(sizes)
        per_row = self._per_row(value.shape[dim], sizes)
        if per_row is None:
            raise self.error(f"cuts {value} over dimension {dim}, which does not hold the batch")
        shapes = [(*value.shape[:dim], size * per_row, *value.shape[dim + 1 :]) for size in sizes]
        if parts == 1 and (dim == 0 or len(sizes) == 1):
            return [self.view(value, shape) for shape in shapes]
        return [self.new(shape, value.dtype) for shape in shapes]

    def _per_row(self, size: Size, sizes: Sequence[Size]) -> int | None:
        """Return how many entries of a dimension belong to one row of the batch; None if it does not hold the batch.

        The dimension of a concatenation is a sum of the microbatches' symbols: the last one is replaced to make it a multiple of the batch.
        """
        rows = sum(sizes)
        if isinstance(size, int) and isinstance(rows, int):
            return None if size % rows else size // rows
        in_batches = sympy.sympify(size).subs(self.sizes[-1], self.batch - sum(self.sizes[:-1]))
        per_row = sympy.expand(in_batches) / self.batch
        return int(per_row) if per_row.is_Integer else None

    def concatenate(self, values: Sequence[Any], dim: int, _parts: int = 1) -> Any:
        """Return a new tensor, of tensors along a dimension; a single tensor itself."""
        if UNKNOWN in values:
            return UNKNOWN
        first = values[0]
        if len(values) == 1:
            return first
        return self.new((*first.shape[:dim], sum(value.shape[dim] for value in values), *first.shape[dim + 1 :]), first.dtype)

    def take_part(self, value: Any, dim: int, sizes: Sequence[Size] | int, index: int) -> Any:
        """Return one part of a tensor, a new tensor."""
        if value is UNKNOWN:
            return UNKNOWN
        size = apply_to_sizes(operator.floordiv, value.shape[dim], sizes) if isinstance(sizes, int) else sizes[index]
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        return self.new(shape, value.dtype)

    def require_equal(self, values: Sequence[Any]) -> Any:
        """Return the first of tensors that are added, and check that all have its shape and dtype."""
        known = [value for value in values if value is not UNKNOWN]
        for value in known[1:]:
            if not self.fits(known[0], value):
                raise self.error(f"adds {value} to {known[0]}")
        return known[0] if known else UNKNOWN

    def total(self, values: Sequence[Any], _weights: Sequence[Any] = ()) -> Any:
        """Return the sum of tensors: new memory, except for a single one."""
        first = self.require_equal(values)
        return first if len(values) == 1 or first is UNKNOWN else self.new(first.shape, first.dtype)

    def add_lists(self, values: Any, more: Any, new: Sequence[int] = ()) -> Any:
        """Return the sums of two lists of gradients: in the memory of ``values``, or in new memory at the indices in ``new``."""
        if UNKNOWN in (values, more):
            return UNKNOWN
        if len(values) != len(more):
            raise self.error(f"adds {len(more)} gradients to {len(values)}")
        pairs = zip(values, more, strict=True)
        return [self.total(pair) if index in new else self.require_equal(pair) for index, pair in enumerate(pairs)]

    def row_counts(self, _counts: Any, rows: Any, group: tuple[int, ...], route: str, *, sends: bool) -> Any:
        """Return the numbers of rows that go to each rank of a group, or come from it, if each rank receives as many as it has."""
        if rows is UNKNOWN:
            return UNKNOWN
        place, between = group.index(self.program.rank), self.rows_between(len(group), rows.shape[0], route)
        return tuple(between(place, other) if sends else between(other, place) for other in range(len(group)))

    def rows_between(self, count: int, rows: Size, _route: str) -> Callable[[int, int], Size]:
        """Return a function of two places in a group of ``count`` ranks: how many of its ``rows`` one rank sends to the other."""
        assert isinstance(rows, int)
        return lambda source, target: rows // count + ((target - source) % count < rows % count)

    def arithmetic(self, left: Any, right: Any) -> Any:
        """Return the result of an operator on two tensors, or on two sizes."""
        if isinstance(left, self.tensor_type) or isinstance(right, self.tensor_type):
            return self.total((left, right))
        if UNKNOWN in (left, right):
            return UNKNOWN
        assert callable(self.node.target)
        return apply_to_sizes(self.node.target, left, right)

    def item(self, value: Any, index: int) -> Any:
        """Return an item of a tuple or list."""
        if value is UNKNOWN or isinstance(value, self.tensor_type):
            return UNKNOWN
        if not isinstance(value, tuple | list) or not -len(value) <= index < len(value):
            raise self.error(f"takes item {index} of {value}")
        return value[index]

    def like(self, value: Any, *_rest: Any) -> Any:
        """Return a new tensor with the shape and dtype of another."""
        return value if value is UNKNOWN else self.new(value.shape, value.dtype)

    def fits(self, given: Any, expected: Any) -> bool:
        """Return whether two tensors have equal shapes and known dtypes that do not differ, or two sizes are equal."""
        if isinstance(given, self.tensor_type) and isinstance(expected, self.tensor_type):
            return same_tensors(given, expected, self.same_size)
        if isinstance(given, int | sympy.Expr) and isinstance(expected, int | sympy.Expr):
            return self.same_size(given, expected)
        return False

    def spec_of_collective(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> CollectiveSpec:
        """Return the tensors that the collective at the current node gives, expects and gets."""
        function = self.node.target
        assert callable(function)
        tensors = [TensorSpec(value.shape, value.dtype) if isinstance(value, self.tensor_type) else value for value in arguments[0]]
        try:
            bound = collective_arguments(function, (tensors, *arguments[1:]), keywords)
            return collective_spec(function, bound, self.program.rank, self.same_size)
        except VerificationError as error:
            raise self.error(error.problem) from error


def same_tensors(one: Any, other: Any, same_size: Callable[[Size, Size], bool]) -> bool:
    """Return whether two tensors have equal shapes, and dtypes that do not differ or are unknown (None)."""
    if one.dtype is not None and other.dtype is not None and one.dtype is not other.dtype:
        return False
    return len(one.shape) == len(other.shape) and all(map(same_size, one.shape, other.shape))


_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    microbatch.microbatch_sizes: AbstractInterpreter.microbatch_sizes,
    microbatch.microbatch_weights: lambda _, sizes, *_rest: [UNKNOWN] * len(sizes),
    microbatch.split_batch: AbstractInterpreter.split_batch,
    microbatch.split_target: lambda _, _target, sizes: [UNKNOWN] * len(sizes),
    microbatch.concatenate: AbstractInterpreter.concatenate,
    microbatch.take_part: AbstractInterpreter.take_part,
    row_counts: AbstractInterpreter.row_counts,
    microbatch.total: AbstractInterpreter.total,
    microbatch.weighted_total: AbstractInterpreter.total,
    microbatch.add_gradients: AbstractInterpreter.add_lists,
    microbatch.add_gradients_in_place: AbstractInterpreter.add_lists,
    operator.getitem: AbstractInterpreter.item,
    **dict.fromkeys(SIZE_OPERATORS, AbstractInterpreter.arithmetic),
    torch.zeros: lambda interpreter, shape, dtype, device: interpreter.new(shape, dtype),  # noqa: ARG005
    torch.zeros_like: AbstractInterpreter.like,
    torch.mul: AbstractInterpreter.like,
    send: lambda interpreter, *arguments, **keywords: interpreter.send(*arguments, **keywords),
    receive: lambda interpreter, *arguments, **keywords: interpreter.receive(*arguments, **keywords),
    **dict.fromkeys(COLLECTIVES, lambda interpreter, *arguments, **keywords: interpreter.collective(*arguments, **keywords)),
    wait: lambda interpreter, started: interpreter.wait(started),
}
"""Function of a program -> the method that interprets it."""
