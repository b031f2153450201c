"""Describe the value of every node of a program: shapes in symbols, dtypes, and the tuples and lists around them.

    batch               batch
    sizes               (size_mb0, size_mb1)                    with  batch = size_mb0 + size_mb1
    ids_parts           [int64 (size_mb0, 5), int64 (size_mb1, 5)]
    stage0_forward_mb0  (float32 (size_mb0, 5, 16), (...))      from the stage's own graph, its batch being size_mb0

Every call of a stage is checked against the placeholders of its graph. So the shape of a message is derived from the computation, not
from the shape that the emitter wrote down.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.symbolic_sizes import canonical_size, size_of
from passes.ir.comm.semantics import CollectiveSpec
from passes.ir.program import LossCall, Program, StageCall, StoreGradients
from passes.ir.schedule import Action
from passes.ir.tensor_spec import Size, TensorSpec, row_count
from passes.verify.abstract_interpreter import UNKNOWN, AbstractInterpreter, same_tensors


@dataclass(frozen=True)
class Pending:
    """The result of a receive or a collective.

    Attributes:
        value: the result of its ``wait``.
        collective: the tensors that go between the ranks; None for a receive.
    """

    value: Any
    collective: CollectiveSpec | None = None


@dataclass(frozen=True)
class ValueSpecs:
    """The descriptions of all nodes of a program.

    Attributes:
        program: the program.
        of: node -> a TensorSpec, a size, a Pending, a tuple or list of such, None or UNKNOWN.
        batch: the batch size.
        sizes: the sizes of the microbatches.
    """

    program: Program
    of: Mapping[fx.Node, Any]
    batch: Size
    sizes: tuple[Size, ...]

    def same_size(self, one: Size, other: Size) -> bool:
        """Return whether two sizes are equal for every batch size."""
        return _same_size(one, other, self.batch, self.sizes)

    def same(self, one: TensorSpec, other: TensorSpec) -> bool:
        """Return whether two tensors have equal shapes for every batch size, and dtypes that do not differ or are unknown."""
        return same_tensors(one, other, self.same_size)


def describe_values(program: Program) -> ValueSpecs:
    """Describe every node of a program.

    Raises:
        VerificationError: naming rank and node: an argument of a stage does not fit its graph, tensors that are added or stored
            differ in shape, or something that is not pending is waited for.
    """
    interpreter = _SpecInterpreter(program)
    for node in program.module.graph.nodes:
        interpreter.values[node] = interpreter.value_of(node)
    return ValueSpecs(program, interpreter.values, interpreter.batch, interpreter.sizes)


def _same_size(one: Size, other: Size, batch: Size, sizes: Sequence[Size]) -> bool:
    """Return whether two sizes are equal, given that the microbatch ``sizes`` add up to ``batch``."""
    if one == other:
        return True
    difference = sympy.sympify(one - other)
    if isinstance(batch, sympy.Symbol):
        difference = difference.subs(batch, sympy.Add(*sizes))
    return bool(sympy.expand(difference) == 0)


class _SpecInterpreter(AbstractInterpreter):
    """Interprets one program on specs; ``symbol`` is that of the batch size in the traced values of placeholders, if it is symbolic."""

    tensor_type = TensorSpec

    def __init__(self, program: Program) -> None:
        traced = next((node.meta.get("val") for node in program.module.graph.nodes if node.target == "batch"), None)
        super().__init__(program, traced if isinstance(traced, int) else sympy.Symbol("batch", integer=True, positive=True))
        self.symbol = traced.node.expr if isinstance(traced, torch.SymInt) else None
        self.bound = _bound_tensors(program)
        sections = (node.meta.get("section") for node in program.module.graph.nodes)
        last = max((section.microbatch for section in sections if isinstance(section, Action)), default=0)
        # A program need not call microbatch_sizes to have values of microbatches.
        self.microbatch_sizes(self.batch, last + 1)

    def value_of(self, node: fx.Node) -> Any:
        """Return the spec of a node; for a function that is not interpreted, from its traced value."""
        value = super().value_of(node)
        if value is UNKNOWN and isinstance(node.meta.get("val"), Tensor | torch.SymInt | int):
            section = node.meta.get("section")
            rows = self.sizes[section.microbatch] if isinstance(section, Action) and node.meta.get("is_of_microbatch") else self.batch
            return _spec_of_traced(node.meta["val"], {self.symbol: rows})
        return value

    def new(self, shape: Sequence[Size], dtype: torch.dtype) -> TensorSpec:
        return TensorSpec(tuple(shape), dtype)

    def view(self, tensor: TensorSpec, shape: Sequence[Size]) -> TensorSpec:
        return TensorSpec(tuple(shape), tensor.dtype)

    def same_size(self, one: Size, other: Size) -> bool:
        return _same_size(one, other, self.batch, self.sizes)

    def input(self, _node: fx.Node) -> Any:
        return UNKNOWN

    def state(self, node: fx.Node) -> Any:
        return _spec_of_traced(node.meta.get("val", operator.attrgetter(str(node.target))(self.program.module)), {})

    def stage(self, module: StageCall, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> Any:
        """Check the arguments of a stage against the placeholders of its graph; return the specs of its results."""
        symbols = self._solve_symbols(placeholders, arguments)
        for index, (placeholder, argument) in enumerate(zip(placeholders, arguments, strict=True)):
            expected = _spec_of_traced(placeholder.meta["val"], symbols)
            if UNKNOWN not in (argument, expected) and not self.fits(argument, expected):
                name = self._name_of_argument(module, index, len(arguments))
                raise self.error(f"gives {name}, {argument}, where the stage's {placeholder.name} is {expected}")
        returned = module.graph.graph.output_node().args[0]
        return fx.map_arg(returned, lambda result: _spec_of_traced(result.meta.get("val"), symbols))

    def _name_of_argument(self, module: StageCall, index: int, n_arguments: int) -> str:
        """Return the name of an argument of the current stage call: ``"h"``, or ``"saved[2]"`` in the tuple of saved values."""
        n_saved = n_arguments - len(self.node.args) + 1 if module.takes_tuple else 0
        return f"{self.node.args[0]}[{index}]" if index < n_saved else str(self.node.args[index - max(n_saved - 1, 0)])

    def _solve_symbols(self, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> dict[sympy.Symbol | None, Size]:
        """Return the value of the batch symbol of a stage's graph in the current call.

        Solve the first size that is linear in it: a placeholder (4*s0 + 1, 8) and an argument (9, 8) give s0 = 2. Default: the microbatch.
        """
        unsolved: set[sympy.Symbol] = set()
        for placeholder, argument in zip(placeholders, arguments, strict=True):
            for traced, size in _paired_sizes(placeholder.meta["val"], argument):
                if isinstance(traced, sympy.Expr) and len(traced.free_symbols) == 1:
                    (symbol,) = traced.free_symbols
                    factor = traced.coeff(symbol)
                    constant = traced - factor * symbol
                    if factor.is_number and factor != 0 and constant.is_number:
                        return {symbol: (size - constant) / factor if traced != symbol else size}
            unsolved.update(_free_symbols(placeholder.meta["val"]))
        section = self.node.meta.get("section")
        if isinstance(section, Action):
            return dict.fromkeys(unsolved, self.sizes[section.microbatch])
        return {}

    def loss(self, module: LossCall, values: Sequence[Any]) -> Any:
        return (TensorSpec((), None), *(values[index] for index in module.differentiated))

    def store(self, module: StoreGradients, gradients: Any) -> None:
        if gradients is UNKNOWN:
            return
        if len(gradients) != len(module.names):
            raise self.error(f"stores {len(gradients)} gradients of {len(module.names)} parameters")
        for name, gradient in zip(module.names, gradients, strict=True):
            if name in self.bound and gradient is not UNKNOWN and not self.fits(gradient, self.bound[name]):
                raise self.error(f"stores {gradient} as the gradient of {name}, which is {self.bound[name]}")

    def send(self, value: Any, destination: int, tag: int) -> None:
        """Do nothing: ``passes.verify.programs`` checks the message with its receive."""

    def receive(self, shape: Sequence[Size], dtype: torch.dtype, source: int, tag: int) -> Pending:
        return Pending(TensorSpec(tuple(shape), dtype))

    def collective(self, *arguments: Any, **keywords: Any) -> Pending:
        spec = self.spec_of_collective(arguments, keywords)
        return Pending(list(spec.results), spec)

    def rows_between(self, count: int, rows: Size, route: str) -> Callable[[int, int], Size]:
        """Return symbols of the rows between two ranks, equal on both; those sent, and those received, add up to ``rows`` of each rank."""
        last = count - 1

        def between(source: int, target: int) -> Size:
            if source < last and target < last:
                return row_count(sympy.sympify(rows) / count, f"{route}: {source} to {target}")
            if source < last:
                return rows - sum(between(source, other) for other in range(last))
            return rows - sum(between(other, target) for other in range(last))

        return between

    def wait(self, started: Any) -> Any:
        if not isinstance(started, Pending):
            raise self.error("waits for something that is neither a receive nor a collective")
        return started.value


def _bound_tensors(program: Program) -> dict[str, TensorSpec]:
    """Return the parameters, buffers and constants of the program's stages, by placeholder name."""
    specs = {}
    for module in program.module.children():
        if isinstance(module, StageCall):
            placeholders = [node for node in module.graph.graph.nodes if node.op == "placeholder"]
            for name, node in zip(module.bound_names, placeholders, strict=False):
                specs[name] = _spec_of_traced(node.meta["val"], {})
    return specs


def _spec_of_traced(value: Any, symbols: Mapping[sympy.Symbol | None, Size]) -> Any:
    """Return the spec of a traced value (a fake tensor, a size, or a tuple of such), with symbols replaced by sizes."""
    if isinstance(value, Tensor):
        return TensorSpec(tuple(_substitute(size, symbols) for size in value.shape), value.dtype)
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return _substitute(value, symbols)
    if isinstance(value, tuple | list):
        return type(value)(_spec_of_traced(part, symbols) for part in value)
    return UNKNOWN


def _substitute(size: int | torch.SymInt, symbols: Mapping[sympy.Symbol | None, Size]) -> Size:
    """Return a traced size with symbols replaced; an int if no symbol is left."""
    if isinstance(size, int):
        return size
    expression = canonical_size(size_of(size))
    if isinstance(expression, int) or expression in symbols:
        return symbols.get(expression, expression)
    return _replace(expression, tuple((symbol, value) for symbol, value in symbols.items() if symbol is not None))


@functools.lru_cache(maxsize=65536, typed=True)
def _replace(expression: sympy.Expr, values: tuple[tuple[sympy.Symbol, Size], ...]) -> Size:
    """Return an expression with symbols replaced; an int if no symbol is left."""
    result = expression.subs(values)
    return int(result) if result.is_Integer else result


def _paired_sizes(traced: Any, argument: Any) -> list[tuple[Size, Size]]:
    """Pair each size of the traced value of a placeholder with the size of its argument."""
    if isinstance(traced, Tensor) and isinstance(argument, TensorSpec):
        return [(size_of(size), argument_size) for size, argument_size in zip(traced.shape, argument.shape, strict=False)]
    if isinstance(traced, torch.SymInt) and isinstance(argument, int | sympy.Expr):
        return [(size_of(traced), argument)]
    return []


def _free_symbols(traced: Any) -> set[sympy.Symbol]:
    sizes = traced.shape if isinstance(traced, Tensor) else (traced,) if isinstance(traced, torch.SymInt) else ()
    return {symbol for size in sizes for symbol in getattr(size_of(size), "free_symbols", ())}
