"""Formulas of a rank's step in the rows of a microbatch, read off its program.

node of the program                          counts as
self.stage0_forward(size_mb0, x_mb0)         the work of its graph, for each microbatch; what it saves, as activations
linear_mb0 = aten.linear(...)                its own work, for each microbatch
send(h_mb0, destination=1)                   its bytes, for each microbatch
all_reduce([gradients], group=(0, 1))        its bytes, once a step
    loss(output_mb0, ...)                        nothing: it is the caller's
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from cost_models.ops.cost import node_work, tensor_shapes
from cost_models.ops.work import Work
from passes.graph.aliasing import memory_keys
from passes.ir.comm import primitives as communication
from passes.ir.program import StageCall
from passes.ir.schedule import Action, ActionKind
from passes.ir.tensor_spec import Size, TensorSpec, total
from passes.verify.value_specs import ValueSpecs

ROWS = sympy.Symbol("rows", positive=True)
"""Rows of one microbatch of one rank."""


@dataclass
class Amount:
    """Sums of work, separate for operations limited by arithmetic and by memory.

    Attributes:
        launches: kernels of all.
    """

    launches: int = 0
    _flops: list[Size] = field(default_factory=list)
    _bytes: list[Size] = field(default_factory=list)

    def add(self, work: Work) -> None:
        """Count one node's work."""
        if work.products or work.flops:
            self._flops.append(work.flops)
        else:
            self._bytes.append(work.bytes)
        self.launches += work.launches

    @property
    def flops(self) -> Size:
        """Of operations that multiply matrices."""
        return _rows_for(total(self._flops))

    @property
    def bytes(self) -> Size:
        """Bytes moved by operations that memory limits."""
        return _rows_for(total(self._bytes))


@dataclass(frozen=True)
class Message:
    """One message or collective of a rank.

    Attributes:
        kind: ``"send_receive"`` or a collective.
        group: the ranks that take part.
        bytes: of a message; of a collective the whole tensor; a formula in ``ROWS``.
        is_repeated: whether it is sent for each microbatch; else once a step.
    """

    kind: str
    group: tuple[int, ...]
    bytes: Size
    is_repeated: bool


@dataclass
class ProgramWork:
    """Work of a program.

    Attributes:
        repeated: for each microbatch.
        once: besides, once a step.
        messages: what it sends and takes part in; repeated ones once.
        kept: stage -> bytes that the backward of one microbatch keeps.
        parameters: bytes of parameters, buffers and constants.
        trained: bytes of those that train.
    """

    repeated: Amount = field(default_factory=Amount)
    once: Amount = field(default_factory=Amount)
    messages: list[Message] = field(default_factory=list)
    kept: dict[int, Size] = field(default_factory=dict)
    parameters: int = 0
    trained: int = 0


def program_work(values: ValueSpecs, microbatch_rows: int, trained: Collection[str]) -> ProgramWork:
    """Add up the work of a program.

    Args:
        values: those of the program of one rank.
        microbatch_rows: rows of its microbatch 0, for which sizes of messages are given.
        trained: the parameters that get gradients.
    """
    return _Reader(values, microbatch_rows, trained).read()


class _Reader:
    def __init__(self, values: ValueSpecs, microbatch_rows: int, trained: Collection[str]) -> None:
        self._program = values.program
        self._rows = microbatch_rows
        self._trained = trained
        self._work = ProgramWork()
        self._held: dict[str, tuple[int, bool]] = {}
        self._shapes = _program_shapes(values)

    def read(self) -> ProgramWork:
        """Add up the nodes of microbatch 0 and those of no microbatch."""
        for node in self._program.module.graph.nodes:
            section = node.meta.get("section")
            if isinstance(section, Action) and section.microbatch != 0:
                continue
            self._count(node, section)
        self._count_kept()
        self._work.parameters = sum(size for size, _ in self._held.values())
        self._work.trained = sum(size for size, trains in self._held.values() if trains)
        return self._work

    def _count(self, node: fx.Node, section: Any) -> None:
        amount = self._work.repeated if isinstance(section, Action) else self._work.once
        if node.op == "call_module":
            module = self._program.module.get_submodule(str(node.target))
            if isinstance(module, StageCall):
                self._count_stage(module, section, amount)
        elif node.op == "get_attr":
            self._hold(str(node.target), node)
        elif node.target in _KINDS:
            self._work.messages.append(self._message(node, section))
        else:
            amount.add(node_work(node, self._shapes))

    def _count_stage(self, module: StageCall, section: Any, amount: Amount) -> None:
        placeholders = [node for node in module.graph.graph.nodes if node.op == "placeholder"]
        for name, node in zip(module.bound_names, placeholders, strict=False):
            self._hold(name, node)
        for node in module.graph.graph.nodes:
            amount.add(node_work(node))
        if isinstance(section, Action) and section.kind is ActionKind.FORWARD:
            bound = _storages(placeholders[: len(module.bound_names)])
            saved = _saved_nodes(module.graph.graph)
            self._keep(section.stage, {key: size for key, size in _storages(saved).items() if key not in bound})

    def _count_kept(self) -> None:
        """Count the values that inlined nodes of a forward hand to nodes of a backward."""
        kept: defaultdict[int, dict[Any, Size]] = defaultdict(dict)
        for node in self._program.module.graph.nodes:
            section = node.meta.get("section")
            if not isinstance(section, Action) or section.microbatch or section.kind is not ActionKind.FORWARD or node.op == "get_attr":
                continue
            users = [user.meta.get("section") for user in node.users if user.meta.get("is_of_microbatch")]
            if any(isinstance(user, Action) and user.kind is not ActionKind.FORWARD for user in users):
                kept[section.stage].update(_storages([node]))
        bound = _storages([node for node in self._program.module.graph.nodes if node.op == "get_attr"])
        for stage, storages in kept.items():
            self._keep(stage, {key: size for key, size in storages.items() if key not in bound})

    def _keep(self, stage: int, storages: Mapping[Any, Size]) -> None:
        self._work.kept[stage] = self._work.kept.get(stage, 0) + _rows_for(total(storages.values()))

    def _hold(self, name: str, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            self._held[name] = (int(value.numel()) * value.dtype.itemsize, name in self._trained)

    def _message(self, node: fx.Node, section: Any) -> Message:
        size: Size = node.meta.get("bytes", 0)
        is_repeated = isinstance(section, Action)
        formula = size * ROWS / self._rows if is_repeated else size
        kind = _KINDS[node.target]  # type: ignore[index]  # the caller looked
        if kind == "send_receive":
            peer = node.kwargs.get("destination", node.args[1] if len(node.args) > 1 else None)
            return Message(kind, (self._program.rank, int(peer)), formula, is_repeated)  # type: ignore[arg-type]
        group = node.kwargs.get("group", node.args[-1])
        return Message(kind, tuple(group), formula, is_repeated)  # type: ignore[arg-type]


_KINDS: Mapping[Callable[..., Any], str] = {
    communication.send: "send_receive",
    communication.all_reduce: "all_reduce",
    communication.all_gather: "all_gather",
    communication.reduce_scatter: "reduce_scatter",
    communication.all_to_all: "all_to_all",
}


def _program_shapes(values: ValueSpecs) -> dict[fx.Node, tuple[TensorSpec, ...]]:
    """Return the shapes of the tensors that each node of a program gives, in ``ROWS``.

    Operators carry theirs from tracing. Inputs of a microbatch, received values and gradients of a loss follow from what they are made of.
    Both name the batch in symbols of their own, so all become one.
    """
    nodes = values.program.module.graph.nodes
    shapes = {node: tensor_shapes(node.meta.get("val")) or _spec_shapes(values.of[node]) for node in nodes}
    return {node: tuple(TensorSpec(tuple(map(_rows_for, each.shape)), each.dtype) for each in tensors) for node, tensors in shapes.items()}


def _spec_shapes(value: Any) -> tuple[TensorSpec, ...]:
    if isinstance(value, TensorSpec):
        return (TensorSpec(value.shape, value.dtype or torch.get_default_dtype()),)
    if isinstance(value, list | tuple):
        return tuple(shape for item in value for shape in _spec_shapes(item))
    return ()


@functools.lru_cache(maxsize=65536, typed=True)
def _rows_for(size: Size) -> Size:
    """Replace the batch symbol of a graph, whatever its name, by ``ROWS``."""
    if not isinstance(size, sympy.Basic):
        return size
    return size.subs(dict.fromkeys(size.free_symbols, ROWS))


def _saved_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Return the saved nodes of a forward graph: the second of its two results."""
    output = next(node for node in graph.nodes if node.op == "output")
    results = output.args[0]
    if isinstance(results, list | tuple) and len(results) == 2 and isinstance(results[1], list | tuple):
        return [node for node in results[1] if isinstance(node, fx.Node)]
    return []


def _storages(nodes: list[fx.Node]) -> dict[Any, Size]:
    """Return the bytes of each storage of the tensors."""
    found: dict[Any, Size] = {}
    for tensor, key in (pair for node in nodes for pair in memory_keys(node)):
        shape: TensorSpec = tensor_shapes(tensor)[0]
        known = found.get(key, 0)
        found[key] = known if _is_at_least(known, shape.bytes) else shape.bytes
    return found


def _is_at_least(one: Size, other: Size) -> bool:
    """Return whether ``one >= other`` at 64 rows; both are formulas in the row count."""
    at = [size.subs(dict.fromkeys(size.free_symbols, 64)) if isinstance(size, sympy.Basic) else size for size in (one, other)]
    return bool(at[0] >= at[1])
