"""Step through a rank's program without running it: what each node gives, as values of whoever reads.

    node of the program                     shapes in symbols (verification)           storages (simulation)

    sizes = microbatch_sizes(batch, 2)      (size_mb0, size_mb1)                       (4, 4)
    x = split_batch(input, sizes, 0)        [float32 (size_mb0, 5), ...]               [(4, 5) in the memory of input, ...]
    h = self.stage0_forward_mb0(x[0])       from the stage's own graph                 from the stage's own graph
    pending = all_reduce([dw], ...)         what it gives and expects, and what of     a message, and the buffers that it fills

A subclass says what a tensor is, and what stages, losses and messages give; what programs do besides is the same for all, and here.
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
from passes.ir.comm.primitives import COLLECTIVES, receive, send, wait
from passes.ir.comm.semantics import CollectiveSpec, collective_arguments, collective_spec
from passes.ir.comm.unsummed import AddUnsummed
from passes.ir.errors import VerificationError
from passes.ir.program import LossCall, Program, StageCall, StoreGradients
from passes.ir.tensor_spec import Size, TensorSpec

__all__ = ["UNKNOWN", "AbstractInterpreter", "same_tensors"]


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""What nothing is known of before a run: a target, a loss function, what they give."""


class AbstractInterpreter(ABC):
    """Steps through one program, node by node.

    Args:
        program: read, not changed.
        batch: the rows that it is given.

    Attributes:
        values: node -> a tensor, a size, a tuple or list of such, None or UNKNOWN; of the nodes so far.
        sizes: the rows of each microbatch.
        node: where it is.
    """

    tensor_type: ClassVar[type[Any]]
    """Of its tensors, which have a ``shape`` and a ``dtype``."""

    node: fx.Node

    def __init__(self, program: Program, batch: Size) -> None:
        self.program = program
        self.batch = batch
        self.sizes: tuple[Size, ...] = (batch,)
        self.values: dict[fx.Node, Any] = {}

    def value_of(self, node: fx.Node) -> Any:
        """What a node gives; UNKNOWN for a function that is none of programs."""
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
        """An error at the present node."""
        return VerificationError(
            f"rank {self.program.rank}, {self.node.name}: {problem}",
            remedy=f"print pm.graph({self.program.rank}): a pass, or an edit by hand, has left this node with arguments that do not fit",
        )

    # -- what a subclass says --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def new(self, shape: Sequence[Size], dtype: torch.dtype) -> Any:
        """A new tensor."""

    @abstractmethod
    def view(self, tensor: Any, shape: Sequence[Size]) -> Any:
        """A part of a tensor, in its memory."""

    @abstractmethod
    def same_size(self, one: Size, other: Size) -> bool:
        """Whether two sizes are equal in every run."""

    @abstractmethod
    def input(self, node: fx.Node) -> Any:
        """An argument of the program."""

    @abstractmethod
    def state(self, node: fx.Node) -> Any:
        """A parameter, a buffer or a constant."""

    @abstractmethod
    def stage(self, module: StageCall, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> Any:
        """The call of a stage: placeholders of its graph behind those of its own tensors, and what each is given."""

    @abstractmethod
    def loss(self, module: LossCall, values: Sequence[Any]) -> Any:
        """The call of a loss function with results: the loss, and gradients of those that are differentiated."""

    @abstractmethod
    def store(self, module: StoreGradients, gradients: Any) -> None:
        """The gradients of parameters at their end."""

    @abstractmethod
    def send(self, value: Any, destination: int, tag: int) -> None:
        """A message to another rank."""

    @abstractmethod
    def receive(self, shape: Sequence[Size], dtype: torch.dtype, source: int, tag: int) -> Any:
        """A message of another rank, on its way."""

    @abstractmethod
    def collective(self, *arguments: Any, **keywords: Any) -> Any:
        """Messages between the ranks of a group, on their way."""

    @abstractmethod
    def wait(self, started: Any) -> Any:
        """What has arrived."""

    # -- modules ---------------------------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, arguments: Sequence[Any]) -> Any:
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

    # -- functions -------------------------------------------------------------------------------------------------------------------

    def microbatch_sizes(self, batch: Size, count: int) -> tuple[Size, ...]:
        """The rows of each microbatch: symbols where those of the batch are one, which they add up to."""
        if isinstance(batch, int):
            self.sizes = microbatch.microbatch_sizes(batch, count)
        elif count == 1:
            self.sizes = (batch,)
        else:
            self.sizes = tuple(sympy.Symbol(f"size_mb{index}", integer=True, positive=True) for index in range(count))
        return self.sizes

    def split_batch(self, value: Any, sizes: Sequence[Size], dim: int, parts: int = 1) -> Any:
        """The rows of each microbatch: in the memory of all where rows come first."""
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
        """How many entries a row of the batch has in a size; None where it holds no batch."""
        rows = sum(sizes)
        if isinstance(size, int) and isinstance(rows, int):
            return None if size % rows else size // rows
        in_batches = sympy.sympify(size).subs(self.sizes[-1], self.batch - sum(self.sizes[:-1]))  # what microbatches were put together to
        found = sympy.expand(in_batches) / self.batch
        return int(found) if found.is_Integer else None

    def concatenate(self, values: Sequence[Any], dim: int, _parts: int = 1) -> Any:
        """All along one dimension."""
        if UNKNOWN in values:
            return UNKNOWN
        first = values[0]
        if len(values) == 1:
            return first
        return self.new((*first.shape[:dim], sum(value.shape[dim] for value in values), *first.shape[dim + 1 :]), first.dtype)

    def take_part(self, value: Any, dim: int, sizes: Sequence[Size] | int, index: int) -> Any:
        """One part of a tensor: in its memory where it is cut along its first dimension."""
        if value is UNKNOWN:
            return UNKNOWN
        size = apply_to_sizes(operator.floordiv, value.shape[dim], sizes) if isinstance(sizes, int) else sizes[index]
        shape = (*value.shape[:dim], size, *value.shape[dim + 1 :])
        return self.view(value, shape) if dim == 0 else self.new(shape, value.dtype)

    def alike(self, values: Sequence[Any]) -> Any:
        """The first of tensors that must all be alike."""
        known = [value for value in values if value is not UNKNOWN]
        for value in known[1:]:
            if not self.fits(known[0], value):
                raise self.error(f"adds {value} to {known[0]}")
        return known[0] if known else UNKNOWN

    def total(self, values: Sequence[Any], _weights: Sequence[Any] = ()) -> Any:
        """The sum of tensors."""
        first = self.alike(values)
        return first if len(values) == 1 or first is UNKNOWN else self.new(first.shape, first.dtype)

    def add_lists(self, values: Any, more: Any, new: Sequence[int] = ()) -> Any:
        """Sums of gradients, in the memory of the first but for some."""
        if UNKNOWN in (values, more):
            return UNKNOWN
        if len(values) != len(more):
            raise self.error(f"adds {len(more)} gradients to {len(values)}")
        pairs = zip(values, more, strict=True)
        return [self.total(pair) if index in new else self.alike(pair) for index, pair in enumerate(pairs)]

    def arithmetic(self, left: Any, right: Any) -> Any:
        """Of two tensors, or of two sizes."""
        if isinstance(left, self.tensor_type) or isinstance(right, self.tensor_type):
            return self.total((left, right))
        if UNKNOWN in (left, right):
            return UNKNOWN
        assert callable(self.node.target)
        return apply_to_sizes(self.node.target, left, right)

    def item(self, value: Any, index: int) -> Any:
        """Of a tuple or list."""
        if value is UNKNOWN or isinstance(value, self.tensor_type):
            return UNKNOWN
        if not isinstance(value, tuple | list) or not -len(value) <= index < len(value):
            raise self.error(f"takes item {index} of {value}")
        return value[index]

    def like(self, value: Any, *_rest: Any) -> Any:
        """A new tensor of the shape of another."""
        return value if value is UNKNOWN else self.new(value.shape, value.dtype)

    def fits(self, given: Any, wanted: Any) -> bool:
        """Whether two tensors have equal shapes, and equal dtypes as far as these are known; or two sizes are equal."""
        if isinstance(given, self.tensor_type) and isinstance(wanted, self.tensor_type):
            return same_tensors(given, wanted, self.same_size)
        if isinstance(given, int | sympy.Expr) and isinstance(wanted, int | sympy.Expr):
            return self.same_size(given, wanted)
        return False

    def exchange(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> CollectiveSpec:
        """What the collective at the present node gives, expects and gets."""
        function = self.node.target
        assert callable(function)
        tensors = [TensorSpec(each.shape, each.dtype) if isinstance(each, self.tensor_type) else each for each in arguments[0]]
        try:
            bound = collective_arguments(function, (tensors, *arguments[1:]), keywords)
            return collective_spec(function, bound, self.program.rank, self.same_size)
        except VerificationError as error:
            raise self.error(error.problem) from error


def same_tensors(one: Any, other: Any, same_size: Callable[[Size, Size], bool]) -> bool:
    """Whether two tensors have equal shapes, and equal dtypes as far as these are known."""
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
    microbatch.total: AbstractInterpreter.total,
    microbatch.weighted_total: AbstractInterpreter.total,
    microbatch.add_gradients: AbstractInterpreter.add_lists,
    microbatch.add_gradients_in_place: AbstractInterpreter.add_lists,
    operator.getitem: AbstractInterpreter.item,
    **dict.fromkeys(SIZE_OPERATORS, AbstractInterpreter.arithmetic),
    torch.zeros: lambda reader, shape, dtype, device: reader.new(shape, dtype),  # noqa: ARG005
    torch.zeros_like: AbstractInterpreter.like,
    torch.mul: AbstractInterpreter.like,
    send: lambda reader, *arguments, **keywords: reader.send(*arguments, **keywords),
    receive: lambda reader, *arguments, **keywords: reader.receive(*arguments, **keywords),
    **dict.fromkeys(COLLECTIVES, lambda reader, *arguments, **keywords: reader.collective(*arguments, **keywords)),
    wait: lambda reader, started: reader.wait(started),
}
"""What each function of a program gives."""
