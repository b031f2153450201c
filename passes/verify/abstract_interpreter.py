"""What every node of a program is, without running it: shapes in symbols, dtypes, and the structure around them.

    batch               batch
    sizes               (size_mb0, size_mb1)                    with  batch = size_mb0 + size_mb1
    ids_parts           [int64 (size_mb0, 5), int64 (size_mb1, 5)]
    stage0_forward_mb0  (float32 (size_mb0, 5, 16), (...))      from the stage's own graph, its batch being size_mb0

Every call of a stage is checked against the placeholders of its graph on the way. So what a program sends has the shape that the
computation gives it, not one that the emitter wrote down.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.symbolic_sizes import SIZE_OPERATORS, apply_to_sizes, canonical_size, size_of
from passes.ir.comm import microbatch
from passes.ir.comm.primitives import COLLECTIVES, receive, send, wait
from passes.ir.comm.semantics import CollectiveSpec, collective_arguments, collective_spec
from passes.ir.comm.unsummed import AddUnsummed
from passes.ir.errors import VerificationError
from passes.ir.program import LossCall, Program, StageCall, StoreGradients
from passes.ir.schedule import Action
from passes.ir.tensor_spec import Size, TensorSpec

__all__ = ["UNKNOWN", "Pending", "TensorSpec", "ValueSpecs", "describe_values"]


@dataclass(frozen=True)
class Pending:
    """What a receive or a collective returns.

    Attributes:
        value: what ``wait`` makes of it.
        collective: what goes between the ranks; None for a receive.
    """

    value: Any
    collective: CollectiveSpec | None = None


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()
"""What nothing is known of: a target, a loss function, what a forward saved."""


@dataclass(frozen=True)
class ValueSpecs:
    """What describe_values found.

    Attributes:
        program: whose nodes they are.
        of: node -> a TensorSpec, a size, a Pending, a tuple or list of such, None or UNKNOWN.
        batch: the batch size.
        sizes: the sizes of the microbatches.
    """

    program: Program
    of: Mapping[fx.Node, Any]
    batch: Size
    sizes: tuple[Size, ...]

    def same_size(self, one: Size, other: Size) -> bool:
        """Whether two sizes are equal for every batch size."""
        return _same_size(one, other, self.batch, self.sizes)

    def same(self, one: TensorSpec, other: TensorSpec) -> bool:
        """Whether two tensors have equal shapes for every batch size, and equal dtypes as far as these are known."""
        return _same(one, other, self.batch, self.sizes)


def describe_values(program: Program) -> ValueSpecs:
    """Find out what every node of a program is.

    Raises:
        VerificationError: naming rank and node: a stage is called with what its graph does not take, tensors that are added or
            stored differ in shape, or something that is not pending is waited for.
    """
    reader = _Reader(program)
    for node in program.module.graph.nodes:
        reader.values[node] = reader.describe(node)
    return ValueSpecs(program, reader.values, reader.batch, reader.sizes)


def _same_size(one: Size, other: Size, batch: Size, sizes: Sequence[Size]) -> bool:
    if one == other:
        return True
    difference = sympy.sympify(one - other)
    if isinstance(batch, sympy.Symbol):
        difference = difference.subs(batch, sympy.Add(*sizes))
    return bool(sympy.expand(difference) == 0)


def _same(one: TensorSpec, other: TensorSpec, batch: Size, sizes: Sequence[Size]) -> bool:
    if one.dtype is not None and other.dtype is not None and one.dtype is not other.dtype:
        return False
    return len(one.shape) == len(other.shape) and all(
        _same_size(size, other_size, batch, sizes) for size, other_size in zip(one.shape, other.shape, strict=True)
    )


class _Reader:
    """Describes one program, node by node."""

    node: fx.Node

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[fx.Node, Any] = {}
        traced = next((node.meta.get("val") for node in program.module.graph.nodes if node.target == "batch"), None)
        self.symbol = traced.node.expr if isinstance(traced, torch.SymInt) else None
        self.batch: Size = traced if isinstance(traced, int) else sympy.Symbol("batch", integer=True, positive=True)
        self.bound = _bound_tensors(program)
        sections = (node.meta.get("section") for node in program.module.graph.nodes)
        last = max((part.microbatch for part in sections if isinstance(part, Action)), default=0)
        # A program that cuts nothing does not ask for sizes, and still has values of microbatches.
        self.sizes = self.microbatch_sizes(self.batch, last + 1)

    def error(self, problem: str) -> VerificationError:
        return VerificationError(
            f"rank {self.program.rank}, {self.node.name}: {problem}",
            remedy=f"print pm.graph({self.program.rank}): a pass, or an edit by hand, has left this node with arguments that do not fit",
        )

    def describe(self, node: fx.Node) -> Any:
        self.node = node
        value = self._value(node)
        if value is UNKNOWN and isinstance(node.meta.get("val"), Tensor | torch.SymInt | int):
            section = node.meta.get("section")
            rows = self.sizes[section.microbatch] if isinstance(section, Action) and node.meta.get("is_of_microbatch") else self.batch
            return _of_traced(node.meta["val"], {self.symbol: rows})
        return value

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return UNKNOWN
        if node.op == "get_attr":
            return _of_traced(node.meta.get("val", operator.attrgetter(str(node.target))(self.program.module)), {})
        arguments = fx.map_arg(node.args, self.values.__getitem__)
        keywords = fx.map_arg(node.kwargs, self.values.__getitem__)
        if node.op == "output":
            return arguments[0]
        if node.op == "call_module":
            return self._module(self.program.module.get_submodule(str(node.target)), arguments)
        rule = _RULES.get(node.target) if callable(node.target) else None
        return UNKNOWN if rule is None else rule(_Call(self, arguments, keywords))

    # -- modules -------------------------------------------------------------------------------------------------------------------

    def _module(self, module: torch.nn.Module, arguments: Sequence[Any]) -> Any:
        if isinstance(module, StageCall):
            return self._stage(module, arguments)
        if isinstance(module, LossCall):
            values = arguments[0]
            return (TensorSpec((), None), *(values[index] for index in module.differentiated))
        if isinstance(module, AddUnsummed):
            return arguments[0]
        if isinstance(module, StoreGradients):
            self._store(module, arguments[0])
        return None if isinstance(module, StoreGradients) else UNKNOWN

    def _stage(self, module: StageCall, arguments: Sequence[Any]) -> Any:
        """Check what a stage's graph is given against its placeholders; its results follow."""
        placeholders = [one for one in module.graph.graph.nodes if one.op == "placeholder"][len(module.bound_names) :]
        names = [str(argument) for argument in self.node.args]
        if module.takes_tuple:
            spread = arguments[0] if arguments[0] is not UNKNOWN else [UNKNOWN] * (len(placeholders) - len(arguments) + 1)
            arguments = (*spread, *arguments[1:])
            names = [*(f"{names[0]}[{index}]" for index in range(len(spread))), *names[1:]]
        if len(placeholders) != len(arguments):
            raise self.error(f"gives {len(arguments)} values to a graph that takes {len(placeholders)}")
        symbols = self._symbols(placeholders, arguments)
        for name, placeholder, given in zip(names, placeholders, arguments, strict=True):
            wanted = _of_traced(placeholder.meta["val"], symbols)
            if given is not UNKNOWN and not self._fits(given, wanted):
                raise self.error(f"gives {name}, {given}, where the stage's {placeholder.name} is {wanted}")
        returned = module.graph.graph.output_node().args[0]
        return fx.map_arg(returned, lambda result: _of_traced(result.meta.get("val"), symbols))

    def _symbols(self, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> dict[sympy.Symbol | None, Size]:
        """What the batch symbol of a stage's graph stands for in one call: found where an argument shows it."""
        unsolved: set[sympy.Symbol] = set()
        for placeholder, given in zip(placeholders, arguments, strict=True):
            for traced, size in _paired_sizes(placeholder.meta["val"], given):
                if isinstance(traced, sympy.Expr) and len(traced.free_symbols) == 1:
                    (symbol,) = traced.free_symbols
                    factor = traced.coeff(symbol)
                    rest = traced - factor * symbol
                    if factor.is_number and factor != 0 and rest.is_number:
                        return {symbol: (size - rest) / factor if traced != symbol else size}
            unsolved.update(_free_symbols(placeholder.meta["val"]))
        section = self.node.meta.get("section")
        if isinstance(section, Action):
            return dict.fromkeys(unsolved, self.sizes[section.microbatch])
        return {}

    def _fits(self, given: Any, wanted: Any) -> bool:
        if isinstance(given, TensorSpec) and isinstance(wanted, TensorSpec):
            return _same(given, wanted, self.batch, self.sizes)
        if isinstance(given, int | sympy.Expr) and isinstance(wanted, int | sympy.Expr):
            return _same_size(given, wanted, self.batch, self.sizes)
        return False

    def _store(self, module: StoreGradients, gradients: Any) -> None:
        if gradients is UNKNOWN:
            return
        if len(gradients) != len(module.names):
            raise self.error(f"stores {len(gradients)} gradients of {len(module.names)} parameters")
        for name, gradient in zip(module.names, gradients, strict=True):
            if name in self.bound and gradient is not UNKNOWN and not self._fits(gradient, self.bound[name]):
                raise self.error(f"stores {gradient} as the gradient of {name}, which is {self.bound[name]}")

    # -- functions -----------------------------------------------------------------------------------------------------------------

    def require_same(self, values: Sequence[Any]) -> Any:
        """The first of tensors that must all be alike."""
        known = [value for value in values if value is not UNKNOWN]
        for value in known[1:]:
            if not self._fits(known[0], value):
                raise self.error(f"adds {value} to {known[0]}")
        return known[0] if known else UNKNOWN

    def microbatch_sizes(self, batch: Size, count: int) -> tuple[Size, ...]:
        if isinstance(batch, int):
            sizes: tuple[Size, ...] = microbatch.microbatch_sizes(batch, count)
        elif count == 1:
            sizes = (batch,)
        else:
            sizes = tuple(sympy.Symbol(f"size_mb{index}", integer=True, positive=True) for index in range(count))
        self.sizes = sizes
        return sizes

    def split_batch(self, value: Any, sizes: Sequence[Size], dim: int, _parts: int = 1) -> Any:
        if value is UNKNOWN:
            return UNKNOWN
        others = sum(self.sizes[:-1])
        in_batches = sympy.sympify(value.shape[dim]).subs(self.sizes[-1], self.batch - others)  # what microbatches were put together to
        per_row = sympy.expand(in_batches) / self.batch  # of all parts
        if not per_row.is_Integer:
            raise self.error(f"cuts {value} over dimension {dim}, which does not hold the batch")
        return [TensorSpec((*value.shape[:dim], size * int(per_row), *value.shape[dim + 1 :]), value.dtype) for size in sizes]

    def concatenate(self, values: Sequence[Any], dim: int, _parts: int = 1) -> Any:
        if UNKNOWN in values:
            return UNKNOWN
        first = values[0]
        whole = sum(value.shape[dim] for value in values)
        return TensorSpec((*first.shape[:dim], whole, *first.shape[dim + 1 :]), first.dtype)

    def add_lists(self, values: Any, more: Any) -> Any:
        if UNKNOWN in (values, more):
            return UNKNOWN
        if len(values) != len(more):
            raise self.error(f"adds {len(more)} gradients to {len(values)}")
        return [self.require_same(pair) for pair in zip(values, more, strict=True)]

    def arithmetic(self, left: Any, right: Any) -> Any:
        if isinstance(left, TensorSpec) or isinstance(right, TensorSpec):
            return self.require_same((left, right))
        if UNKNOWN in (left, right):
            return UNKNOWN
        assert callable(self.node.target)
        return apply_to_sizes(self.node.target, left, right)

    def item(self, value: Any, index: int) -> Any:
        if value is UNKNOWN or isinstance(value, TensorSpec):
            return UNKNOWN
        if not isinstance(value, tuple | list) or not -len(value) <= index < len(value):
            raise self.error(f"takes item {index} of {value}")
        return value[index]

    def collective(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Pending:
        function = self.node.target
        assert callable(function)
        try:
            arguments = collective_arguments(function, args, keywords)
            spec = collective_spec(function, arguments, self.program.rank, self.same_size)
        except VerificationError as error:
            raise self.error(error.problem) from error
        return Pending(list(spec.results), spec)

    def same_size(self, one: Size, other: Size) -> bool:
        return _same_size(one, other, self.batch, self.sizes)

    def wait(self, value: Any) -> Any:
        if not isinstance(value, Pending):
            raise self.error("waits for something that is neither a receive nor a collective")
        return value.value


@dataclass(frozen=True)
class _Call:
    """One call of a function, what is known of its arguments in their place."""

    reader: _Reader
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]


_RULES: Mapping[Callable[..., Any], Callable[[_Call], Any]] = {
    microbatch.microbatch_sizes: lambda call: call.reader.microbatch_sizes(*call.args),
    microbatch.split_batch: lambda call: call.reader.split_batch(*call.args),
    microbatch.concatenate: lambda call: call.reader.concatenate(*call.args),
    microbatch.total: lambda call: call.reader.require_same(call.args[0]),
    microbatch.weighted_total: lambda call: call.reader.require_same(call.args[0]),
    microbatch.add_gradients: lambda call: call.reader.add_lists(*call.args[:2]),
    microbatch.add_gradients_in_place: lambda call: call.reader.add_lists(*call.args),
    operator.getitem: lambda call: call.reader.item(*call.args),
    **dict.fromkeys(SIZE_OPERATORS, lambda call: call.reader.arithmetic(*call.args)),
    torch.zeros: lambda call: TensorSpec(tuple(call.args[0]), call.keywords["dtype"]),
    torch.zeros_like: lambda call: call.args[0],
    torch.mul: lambda call: call.args[0],
    receive: lambda call: Pending(TensorSpec(tuple(call.args[0]), call.args[1])),
    **dict.fromkeys(COLLECTIVES, lambda call: call.reader.collective(call.args, call.keywords)),
    send: lambda _: None,
    wait: lambda call: call.reader.wait(call.args[0]),
}
"""What each function of a program gives, from what it is given. A function without a rule gives UNKNOWN."""


def _bound_tensors(program: Program) -> dict[str, TensorSpec]:
    """The parameters and buffers of the program's stages, by placeholder name."""
    found = {}
    for module in program.module.children():
        if isinstance(module, StageCall):
            placeholders = [node for node in module.graph.graph.nodes if node.op == "placeholder"]
            for name, node in zip(module.bound_names, placeholders, strict=False):
                found[name] = _of_traced(node.meta["val"], {})
    return found


def _of_traced(value: Any, symbols: Mapping[sympy.Symbol | None, Size]) -> Any:
    """The spec of a traced value, its symbols replaced."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(_replaced(size, symbols) for size in value.shape), value.dtype)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return _replaced(value, symbols)
    if isinstance(value, tuple | list):
        return type(value)(_of_traced(part, symbols) for part in value)
    return UNKNOWN


def _replaced(size: int | torch.SymInt, symbols: Mapping[sympy.Symbol | None, Size]) -> Size:
    if isinstance(size, int):
        return size
    expression = canonical_size(size_of(size))
    if isinstance(expression, int) or expression in symbols:
        return symbols.get(expression, expression)
    result = expression.subs([(symbol, by) for symbol, by in symbols.items() if symbol is not None])
    return int(result) if result.is_Integer else result


def _paired_sizes(traced: Any, given: Any) -> list[tuple[Size, Size]]:
    """Sizes of a traced value beside those that it is given."""
    if isinstance(traced, Tensor) and isinstance(given, TensorSpec):
        return [(size_of(size), other) for size, other in zip(traced.shape, given.shape, strict=False)]
    if isinstance(traced, torch.SymInt) and isinstance(given, int | sympy.Expr):
        return [(size_of(traced), given)]
    return []


def _free_symbols(traced: Any) -> set[sympy.Symbol]:
    sizes = traced.shape if isinstance(traced, Tensor) else (traced,) if isinstance(traced, torch.SymInt) else ()
    return {symbol for size in sizes for symbol in getattr(size_of(size), "free_symbols", ())}
