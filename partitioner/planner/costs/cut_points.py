"""The cut points of a graph: its nodes in order, grouped into units that stay in one stage.

    embedding | add | layer_norm | linear | split getitem getitem getitem | scaled_dot_product_attention | ...
                                            `-- a list crosses: one unit --'

A boundary between two nodes is a cut point unless something crosses it that cannot be sent: a list of tensors, an integer, a tensor whose
size is no function of the batch, memory that is written later, or a written buffer that both sides use. An unread value, a number that is
drawn and forgotten, is no unit of its own: in another mode of the model a stage of it would be empty. Replicable nodes
(``passes.analysis.replicable``) belong to no unit: every stage computes those that it needs.

How the units of a folded model repeat:

    folded      unit   0 1 | 2 3 4 | 5 6 7 | 8          block 2 3 4 stands for three copies, 5 6 7 is the last
    unfolded           0 1 | 2 3 4 | 5 6 7 | 8 9 10 | 11 12 13 | 14

A parameter of units of the block exists once a copy. A value of units of the block and of the last copy goes from each copy to the next.
An item of units before, in and after the block is shared by all copies.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import sympy
import torch
from torch import fx

from partitioner.planner.solvers.stage_memory import Integers
from partitioner.planner.solvers.stage_problem import Shared, Value
from passes.analysis.replicable import replicable_nodes
from passes.graph.aliasing import aliasing, mutated_arguments
from passes.graph.dependencies import parameter_values
from passes.graph.schemas import packet
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph

aten = torch.ops.aten


@dataclass(frozen=True)
class CrossingValue:
    """A tensor that later units read.

    Attributes:
        producer: the unit that computes it.
        readers: the later units that read it, in order. A returned value is read by the last unit, where results are collected.
    """

    node: str
    producer: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class CutPoints:
    """The units of a graph, in order; a cut is before a unit.

    Attributes:
        units: the nodes of each.
        starts: for each unit, the node by which a plan names a cut before it: its first node, of those that it may begin with.
        values: the tensors that cross between them.
        replicated: replicable node -> the units that need it.
        depth: for each unit, the number of modules that a cut before it goes through.
    """

    units: tuple[tuple[str, ...], ...]
    starts: tuple[str, ...]
    values: tuple[CrossingValue, ...]
    replicated: Mapping[str, tuple[int, ...]]
    depth: tuple[int, ...]

    @cached_property
    def unit_of(self) -> dict[str, int]:
        """Node -> its unit."""
        return {node: index for index, unit in enumerate(self.units) for node in unit}

    def readers(self, placeholder: fx.Node) -> tuple[int, ...]:
        """Return the units that read a placeholder, directly or through replicated nodes, in order."""
        units = set[int]()
        for user in placeholder.users:
            units.update([self.unit_of[user.name]] if user.name in self.unit_of else self.replicated.get(user.name, ()))
        return tuple(sorted(units))


def find_cut_points(graph: ModelGraph, at: Collection[str] | None = None) -> CutPoints:
    """Group the nodes into units; none for a graph that computes nothing.

    Args:
        at: the nodes that a unit may begin with, for a graph that is rewritten before it is cut; None: all.
    """
    replicable = replicable_nodes(graph)
    if replicable.issuperset(node.name for node in graph.computing_nodes()):
        replicable = frozenset()  # a graph of replicable nodes alone has units, too
    nodes = [node for node in graph.computing_nodes() if node.name not in replicable]
    position = {node.name: index for index, node in enumerate(nodes)}
    may_begin = [at is None or node.name in at for node in nodes]  # whether a unit may begin with the node
    of_values = (*_untransferable(graph, nodes, position), *_written_memory(graph, position))
    for first, last in (*of_values, *_unread(graph, nodes), *_of_parameters(graph, nodes)):
        may_begin[first + 1 : last + 1] = [False] * (last - first)
    units = _units(nodes, may_begin)
    unit_of = {name: index for index, unit in enumerate(units) for name in unit}
    stacks = {node.name: _module_stack(node) for node in nodes}
    depth = [0, *(_n_common_modules(stacks[before[-1]], stacks[after[0]]) for before, after in itertools.pairwise(units))]
    return CutPoints(
        units=tuple(tuple(unit) for unit in units),
        starts=tuple(next((name for name in unit if at is None or name in at), unit[0]) for unit in units),
        values=tuple(_values(graph, nodes, unit_of)),
        replicated=_replicated(graph, replicable, unit_of),
        depth=tuple(depth[: len(units)]),
    )


def _units(nodes: Sequence[fx.Node], may_begin: Sequence[bool]) -> list[list[str]]:
    """Return the nodes of each unit. Those before the first node that a unit may begin with belong to the first unit."""
    first = next((index for index, may in enumerate(may_begin) if may), 0)
    units: list[list[str]] = []
    for index, node in enumerate(nodes):
        if index == 0 or (index > first and may_begin[index]):
            units.append([])
        units[-1].append(node.name)
    return units


def _module_stack(node: fx.Node) -> tuple[str, ...]:
    """Return the paths of the modules that contain a node, the model itself first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(re.sub(r"@\d+", "", path) for path, _ in stack.values())


def _n_common_modules(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """Return the number of modules in both stacks, without the model itself."""
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return max(len(list(common)) - 1, 0)


def _untransferable(graph: ModelGraph, nodes: Iterable[fx.Node], position: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) positions between which a value is alive that cannot be sent, so that no cut may divide them."""
    returned = set(graph.returned)
    for node in nodes:
        if not _can_be_sent(node, graph.batch):
            readers = [position[user.name] for user in node.users if user.name in position]
            last = len(position) - 1 if node.name in returned else max(readers, default=0)
            if last > position[node.name]:
                yield position[node.name], last


def _unread(graph: ModelGraph, nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each unread node and of the next node; for the last node, of the previous one."""
    returned = set(graph.returned)
    for index, node in enumerate(nodes):
        if not (node.users or node.name in returned or mutated_arguments(node)) and len(nodes) > 1:
            yield (index, index + 1) if index + 1 < len(nodes) else (index - 1, index)


def _of_parameters(graph: ModelGraph, nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield the positions of each value of parameters alone, such as a cast, and of the call that follows, without other casts.

    A stage would send the value in every microbatch, where the next stage can hold the parameter.
    """
    of_parameters = parameter_values(graph)
    following = len(nodes) - 1  # the first call from here on that is neither a cast nor of parameters alone
    for index in reversed(range(len(nodes))):
        if nodes[index].name in of_parameters:
            yield index, following
        elif packet(nodes[index].target) not in _CASTS:
            following = index


_CASTS = frozenset({aten.to, aten._to_copy})  # noqa: SLF001  the operator's own name


def _can_be_sent(node: fx.Node, batch: sympy.Symbol | None) -> bool:
    """Return whether a node's value may be sent between stages: one tensor, whose sizes are numbers or functions of the batch size.

    The receiver allocates it before the sender has computed it.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sizes = (size_of(size) for size in value.shape)
    return all(isinstance(size, int) or size.free_symbols <= {batch} for size in sizes)


def _written_memory(graph: ModelGraph, position: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) positions of the uses of written memory, so that no cut may divide them.

    A computed value stays in one stage until its last write; a written buffer, parameter or input with all its users.
    """
    memory = aliasing(graph.graph)
    members: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        for storage in memory.storages.get(node.name, ()):
            if storage in memory.writers:
                members.setdefault(storage, []).append(node)
    for storage, nodes in members.items():
        positions = [position[node.name] for node in nodes if node.name in position]
        positions += [position[name] for name in memory.writers[storage]]
        last = max(position[name] for name in memory.writers[storage])
        if nodes[0].op == "placeholder":
            positions += [position[user.name] for node in nodes for user in node.users if user.name in position]
            last = max(positions)
        yield min(positions), last


def _values(graph: ModelGraph, nodes: Iterable[fx.Node], unit_of: Mapping[str, int]) -> Iterator[CrossingValue]:
    """Yield the values that a later unit reads; a returned value is read by the last unit, too."""
    returned = set(graph.returned)
    for node in nodes:
        producer = unit_of[node.name]
        readers = {unit_of[user.name] for user in node.users if user.name in unit_of}
        if node.name in returned:
            readers.add(max(unit_of.values()))
        later = sorted(reader for reader in readers if reader > producer)
        if later:
            yield CrossingValue(node.name, producer, tuple(later))


def _replicated(graph: ModelGraph, replicable: frozenset[str], unit_of: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return replicable node -> the units that need it, directly or through other replicable nodes."""
    needed: dict[str, set[int]] = {}
    returned = set(graph.returned)
    for node in reversed(graph.computing_nodes()):
        if node.name in replicable:
            units = {unit_of[user.name] for user in node.users if user.name in unit_of}
            units.update(*(needed[user.name] for user in node.users if user.name in needed))
            if node.name in returned and unit_of:
                units.add(max(unit_of.values()))
            needed[node.name] = units
    return {name: tuple(sorted(units)) for name, units in needed.items()}


# -- how the units of a folded model repeat ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Expansion:
    """How the units of a folded model repeat.

    Attributes:
        start, stop: first unit of the repeated block in the folded model, and the unit after its last.
        count: how often the whole model has the block.
        copies: node or placeholder of the block -> its names in the whole model, its own first.
        points: the cut points of the whole model.
        source: (N,) for each unit of the whole model, its unit in the folded model.
    """

    start: int
    stop: int
    count: int
    copies: Mapping[str, tuple[str, ...]]
    points: CutPoints
    source: Integers

    def places(self, units: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the units in the whole model of each copy of an item that has these units in the folded model.

        With the example of the file: (2, 4) -> (2, 4), (5, 7), (8, 10); (3, 5) -> (3, 5), (6, 8), (9, 11); (0, 8) -> (0, 14).
        """
        length, shift = self.stop - self.start, (self.count - 1) * (self.stop - self.start)
        before = [unit for unit in units if unit < self.start]
        inside = [unit for unit in units if self.start <= unit < self.stop]
        behind = [unit for unit in units if unit >= self.stop]
        if not inside:
            yield tuple(unit if unit < self.start else unit + shift for unit in units)
        elif before and behind:
            repeated = [unit + copy * length for copy in range(self.count) for unit in inside]
            yield (*before, *repeated, *(unit + shift for unit in behind))
        elif before:
            yield (*before, *inside)
        else:
            for copy in range(self.count):
                in_next_copy = [unit - self.stop + self.start + (copy + 1) * length for unit in behind]
                yield (*(unit + copy * length for unit in inside), *in_next_copy)

    def n_copies(self, units: Sequence[int]) -> int:
        """Return the number of copies of an item with these units."""
        inside = any(self.start <= unit < self.stop for unit in units)
        return self.count if inside and not any(unit < self.start for unit in units) else 1

    def shared(self, items: Iterable[Shared]) -> Iterator[Shared]:
        """Yield the copies of shared items."""
        for item in items:
            with_producer = item.units if item.producer < 0 else (item.producer, *item.units)
            for units in self._places(with_producer):
                yield Shared(item.amount, units) if item.producer < 0 else Shared(item.amount, units[1:], units[0])

    def values(self, items: Iterable[Value]) -> Iterator[Value]:
        """Yield the copies of values."""
        for item in items:
            for units in self._places((item.producer, *item.readers)):
                yield Value(units[0], units[1:], item.size, item.gradient_size)

    def _places(self, units: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        if units not in self._known:
            self._known[units] = tuple(self.places(units))
        return self._known[units]

    @cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """A cache of ``places``: the same units are asked for at every microbatch size and on every mesh."""
        return {}


def expansion_of(points: CutPoints, copies: Mapping[str, tuple[str, ...]], following: Mapping[str, str]) -> Expansion | None:
    """Return how units repeat; None if a copy does not begin with a unit of its own.

    The folded model has two of the blocks: one that stands for all copies but the last, and the last.

    Args:
        points: of the folded model.
        copies: node of the block -> its name in each copy that the block stands for, in order (``passes.graph.repeated_subgraphs``).
        following: node of the last copy -> the node of the block that does the same, in order.
    """
    first_of_block, first_of_last = next(iter(copies), None), next(iter(following), None)
    unit_of = {name: index for index, name in enumerate(points.starts)}
    if first_of_block not in unit_of or first_of_last not in unit_of:
        return None
    start, stop, count = unit_of[first_of_block], unit_of[first_of_last], len(copies[first_of_block])
    if [following.get(name) for name in points.starts[stop : 2 * stop - start]] != list(points.starts[start:stop]):
        return None
    block = range(start, stop)
    unfolded = [
        *((unit, 0) for unit in range(stop)),
        *((unit, copy) for copy in range(1, count) for unit in block),
        *((unit, 0) for unit in range(stop, len(points.units))),
    ]

    def name_in(node: str, copy: int) -> str:
        return copies[node][copy] if node in copies else node

    units = tuple(tuple(name_in(node, copy) for node in points.units[unit]) for unit, copy in unfolded)
    starts = tuple(name_in(points.starts[unit], copy) for unit, copy in unfolded)
    depth = tuple(points.depth[unit] for unit, _ in unfolded)
    # What crosses between units and what is replicated are the folded model's, repeated by ``values`` and ``shared``.
    whole = CutPoints(units, starts, (), {}, depth)
    return Expansion(start, stop, count, copies, whole, np.array([unit for unit, _ in unfolded], dtype=np.int64))
