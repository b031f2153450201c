"""What every node of a program is: shapes in symbols, dtypes, and the structure around them.

    batch               batch
    sizes               (size_mb0, size_mb1)                    with  batch = size_mb0 + size_mb1
    ids_parts           [int64 (size_mb0, 5), int64 (size_mb1, 5)]
    stage0_forward_mb0  (float32 (size_mb0, 5, 16), (...))      from the stage's own graph, its batch being size_mb0

Every call of a stage is checked against the placeholders of its graph on the way. So what a program sends has the shape that the
computation gives it, not one that the emitter wrote down.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from passes.graph.symbolic_sizes import canonical_size, size_of
from passes.ir.comm.semantics import CollectiveSpec
from passes.ir.program import LossCall, Program, StageCall, StoreGradients
from passes.ir.schedule import Action
from passes.ir.tensor_spec import Size, TensorSpec
from passes.verify.abstract_interpreter import UNKNOWN, AbstractInterpreter, same_tensors

__all__ = ["Pending", "ValueSpecs", "describe_values"]


@dataclass(frozen=True)
class Pending:
    """What a receive or a collective returns.

    Attributes:
        value: what ``wait`` makes of it.
        collective: what goes between the ranks; None for a receive.
    """

    value: Any
    collective: CollectiveSpec | None = None


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
        return same_tensors(one, other, self.same_size)


def describe_values(program: Program) -> ValueSpecs:
    """Find out what every node of a program is.

    Raises:
        VerificationError: naming rank and node: a stage is called with what its graph does not take, tensors that are added or
            stored differ in shape, or something that is not pending is waited for.
    """
    reader = _SpecReader(program)
    for node in program.module.graph.nodes:
        reader.values[node] = reader.value_of(node)
    return ValueSpecs(program, reader.values, reader.batch, reader.sizes)


def _same_size(one: Size, other: Size, batch: Size, sizes: Sequence[Size]) -> bool:
    if one == other:
        return True
    difference = sympy.sympify(one - other)
    if isinstance(batch, sympy.Symbol):
        difference = difference.subs(batch, sympy.Add(*sizes))
    return bool(sympy.expand(difference) == 0)


class _SpecReader(AbstractInterpreter):
    """Describes one program."""

    tensor_type = TensorSpec

    def __init__(self, program: Program) -> None:
        traced = next((node.meta.get("val") for node in program.module.graph.nodes if node.target == "batch"), None)
        super().__init__(program, traced if isinstance(traced, int) else sympy.Symbol("batch", integer=True, positive=True))
        self.symbol = traced.node.expr if isinstance(traced, torch.SymInt) else None
        self.bound = _bound_tensors(program)
        sections = (node.meta.get("section") for node in program.module.graph.nodes)
        last = max((part.microbatch for part in sections if isinstance(part, Action)), default=0)
        # A program that cuts nothing does not ask for sizes, and still has values of microbatches.
        self.microbatch_sizes(self.batch, last + 1)

    def value_of(self, node: fx.Node) -> Any:
        value = super().value_of(node)
        if value is UNKNOWN and isinstance(node.meta.get("val"), Tensor | torch.SymInt | int):
            section = node.meta.get("section")
            rows = self.sizes[section.microbatch] if isinstance(section, Action) and node.meta.get("is_of_microbatch") else self.batch
            return _of_traced(node.meta["val"], {self.symbol: rows})
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
        return _of_traced(node.meta.get("val", operator.attrgetter(str(node.target))(self.program.module)), {})

    # -- modules -------------------------------------------------------------------------------------------------------------------

    def stage(self, module: StageCall, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> Any:
        """Check what a stage's graph is given against its placeholders; its results follow."""
        symbols = self._symbols(placeholders, arguments)
        for place, (placeholder, given) in enumerate(zip(placeholders, arguments, strict=True)):
            wanted = _of_traced(placeholder.meta["val"], symbols)
            if given is not UNKNOWN and not self.fits(given, wanted):
                name = self._name_of_argument(module, place, len(arguments))
                raise self.error(f"gives {name}, {given}, where the stage's {placeholder.name} is {wanted}")
        returned = module.graph.graph.output_node().args[0]
        return fx.map_arg(returned, lambda result: _of_traced(result.meta.get("val"), symbols))

    def _name_of_argument(self, module: StageCall, place: int, n_arguments: int) -> str:
        spread = n_arguments - len(self.node.args) + 1 if module.takes_tuple else 0
        return f"{self.node.args[0]}[{place}]" if place < spread else str(self.node.args[place - max(spread - 1, 0)])

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

    # -- communication -------------------------------------------------------------------------------------------------------------

    def send(self, value: Any, destination: int, tag: int) -> None:
        """What is sent is checked with its receive (``passes.verify.programs``)."""

    def receive(self, shape: Sequence[Size], dtype: torch.dtype, source: int, tag: int) -> Pending:
        return Pending(TensorSpec(tuple(shape), dtype))

    def collective(self, *arguments: Any, **keywords: Any) -> Pending:
        spec = self.exchange(arguments, keywords)
        return Pending(list(spec.results), spec)

    def wait(self, started: Any) -> Any:
        if not isinstance(started, Pending):
            raise self.error("waits for something that is neither a receive nor a collective")
        return started.value


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
