"""Choose the loop of a call that a mesh dimension cuts.

A call that could be cut over several assigned axes takes one that also cuts a parameter, and then the one that moves fewest bytes. Over
tiles axes of space come first, others where no axis of space can be cut (early in a model the height, late the batch).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

from torch import fx

from passes.analysis.axis_names import beside_rows, space_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.graph.dependencies import is_differentiable
from passes.graph.schemas import draws
from passes.ir.layout import Partial, Placement, Shard, Varying
from passes.ir.mesh import SEQUENCE, TILES
from passes.spmd.decompose.ring_attention import can_ring, is_causal
from passes.spmd.propagate.call_along import CallAlong, bytes_moved
from passes.spmd.propagate.layouts import Cut


class CutChoice:
    """Chooses the cuts of calls, given the axes that each mesh dimension cuts.

    Attributes:
        assigned: for each mesh dimension, the axes that it cuts -> their priority, 0 for the most expensive.
        beside_rows: for each mesh dimension over rows, the axes that it cuts besides the batch.
    """

    def __init__(
        self,
        facts: LayoutFacts,
        mesh: tuple[tuple[str, int], ...],
        assigned: Mapping[str, Sequence[int]],
        rows: Sequence[str],
        attention: str,
    ) -> None:
        graph, axes = facts.graph, facts.axes
        self._graph, self._axes, self._facts, self._mesh, self._rows = graph, axes, facts, mesh, rows
        self.assigned = [{axis: priority for priority, axis in enumerate(assigned.get(name, ()))} for name, _ in mesh]
        self.beside_rows = [beside_rows(graph, axes, assigned.get(name, ()) if name in rows else ()) for name, _ in mesh]
        self._inputs = frozenset(leaf.placeholder for leaf in graph.inputs)
        in_tiles = any(name in TILES for name, _ in mesh)
        self._space = frozenset(axis for each in space_axes(axes).values() for axis in each) if in_tiles else frozenset[int]()
        self._exchanged_heads = facts.heads if attention == "ulysses" else frozenset[int]()
        self._unambiguous: dict[tuple[str, Cut], bool] = {}

    def cheapest(self, call: CallAlong, mesh_dimension: int, outer: Sequence[Cut | None]) -> Cut | None:
        """Return the cheapest cut of a call over a mesh dimension that the assignment allows; None: the call is replicated.

        Args:
            outer: the cuts over the outer mesh dimensions. A windowed loop is cut over one of them only: no halo of a shard of a shard.
        """
        if call.loops is None or draws(call.node):
            return None
        if self._exchanged_heads and (by_heads := self._cut_by_heads(call, mesh_dimension)) is not None:
            return by_heads
        allowed: list[Cut] = []
        for factor, axes in enumerate(self._axes.factors[call.node.name]):
            is_windowed = factor in call.windowed
            for axis in axes[:1] if is_windowed else axes:  # shards of a windowed loop are intervals
                cut = Cut(factor, axis)
                if axis not in self.assigned[mesh_dimension] or not self.fits(axis, mesh_dimension) or (is_windowed and cut in outer):
                    continue
                if not call.allows(factor, is_outermost=axis == axes[0]) or not self._is_unambiguous(call, cut):
                    continue
                if self._is_worthwhile(call, cut) and self._can_write(call, cut):
                    allowed.append(cut)
        if len(allowed) > 1:
            return min(allowed, key=lambda cut: self._price(call, cut, mesh_dimension))
        return allowed[0] if allowed else None

    def _cut_by_heads(self, call: CallAlong, mesh_dimension: int) -> Cut | None:
        """Return the cut of attention by its heads over a sequence dimension (Ulysses); None: another call, or too few heads.

        A call is one of attention if it compares positions: two of its loops are sequences that the dimension shards, those of queries and
        of keys. Sharded operands are exchanged by all_to_all, so they must have the heads, outermost in a dimension; all but masks, which
        have both sequences.
        """
        if self._mesh[mesh_dimension][0] != SEQUENCE:
            return None
        assert call.loops is not None
        loops, factors, sequences = call.loops, self._axes.factors[call.node.name], self.assigned[mesh_dimension]
        compared = {factor for factor, axes in enumerate(factors) if not sequences.keys().isdisjoint(axes)}
        if len(compared) < 2:
            return None
        sharded = [place for place, current in enumerate(call.current) if isinstance(current, Shard)]
        exchanged = [loops.operands[place] for place in sharded if not compared.issubset(chain(*loops.operands[place]))]
        inner = range(mesh_dimension + 1, len(self._mesh))
        for factor, axes in enumerate(factors):
            if not axes or axes[0] not in self._exchanged_heads or any(axes[0] in self.assigned[other] for other in inner):
                continue  # over an inner mesh dimension, too, shards of heads would have to be sharded again
            cut = Cut(factor, axes[0])
            has_heads = all(any(dimension[:1] == (factor,) for dimension in tensor) for tensor in (*exchanged, *loops.results))
            if (
                has_heads
                and self.fits(axes[0], mesh_dimension)
                and call.allows(factor, is_outermost=True)
                and self._is_unambiguous(call, cut)
            ):
                return cut
        return None

    def ring_placements(self, node: fx.Node, operands: Sequence[fx.Node], mesh_dimension: int) -> dict[int, dict[int, Placement]]:
        """Return the loop of queries -> keys and values -> their shards, of attention in which these go round the ranks; else nothing.

        Parts must be of one size, and cut over one mesh dimension: then every rank does the same at every step.
        """
        loops, (name, count) = self._axes.loops.get(node.name), self._mesh[mesh_dimension]
        if name != SEQUENCE or loops is None or not can_ring(node, operands, self._facts.with_gradient):
            return {}
        query, key = (self._axes.of(operand.name)[-2] for operand in operands[:2])
        sizes = [self._axes.sizes[axis] for axis in (*query, *key)]
        others = [axes for other, axes in enumerate(self.assigned) if other != mesh_dimension]
        is_cut = all(axis in self.assigned[mesh_dimension] and not any(axis in axes for axes in others) for axis in (*query, *key))
        is_even = len(query) == len(key) == 1 and all(isinstance(size, int) and size % count == 0 for size in sizes)
        if not (is_cut and is_even):
            return {}
        (queries,) = loops.operands[0][-2]
        return {queries: {place: Shard(key[0], len(self._axes.of(operands[place].name)) - 2) for place in (1, 2)}}

    def has_two_pieces(self, node: fx.Node, operands: Sequence[fx.Node], mesh_dimension: int) -> bool:
        """Return whether every rank can have two pieces of one size of a causal call's queries, and the same of its keys."""
        query, key = (self._axes.sizes[self._axes.of(operand.name)[-2][0]] for operand in operands[:2])
        return is_causal(node) and query == key and query % (2 * self._mesh[mesh_dimension][1]) == 0

    def _can_write(self, call: CallAlong, cut: Cut) -> bool:
        """Return whether a call writes its mutated operands in a layout that can be stored: not Varying, nor a sharded buffer."""
        mutated = self._facts.written.get(call.node.name)
        if mutated is None:
            return True
        needs = {operand.name: call.need(cut, position) for position, operand in enumerate(call.operands) if operand.name in mutated}
        sharded_buffer = any(isinstance(need, Shard) and name in self._graph.updates for name, need in needs.items())
        return not sharded_buffer and not any(isinstance(need, Varying) for need in needs.values())

    def fits(self, axis: int, mesh_dimension: int) -> bool:
        """Return whether every rank gets a shard of the axis; one of symbolic size is sharded over row dimensions only."""
        size = self._axes.sizes[axis]
        if not isinstance(size, int):
            return self._mesh[mesh_dimension][0] in self._rows
        # Several mesh dimensions may cut one axis, each within the shards of the outer ones.
        lengths = [length for other, (_, length) in enumerate(self._mesh) if axis in self.assigned[other] or other == mesh_dimension]
        return size >= math.prod(lengths)

    def _is_unambiguous(self, call: CallAlong, cut: Cut) -> bool:
        """Return whether parts of the axis are the same steps of the loop in all operands, and no dimension has the axis twice.

        Rows times rows, flattened, have it twice; (rows, 16), flattened and viewed as (2, 8 rows), has other axes than its loops.
        """
        key = (call.node.name, cut)
        if key not in self._unambiguous:
            tensors = (*(self._axes.of(operand.name) for operand in call.operands), *self._axes.tensors[call.node.name])
            is_once = all(axes.count(cut.axis) < 2 for axes in chain(*tensors))
            self._unambiguous[key] = is_once and self._axes.is_aligned(call.node.name, *cut)
        return self._unambiguous[key]

    def _is_worthwhile(self, call: CallAlong, cut: Cut) -> bool:
        """Return whether a cut saves work or memory without a gather: an operand is sharded already, or can be for free.

        Free are parameters, and, along an axis of activations, values without a gradient (words, positions, inputs). A call that contracts,
        or has no operands, is always worth it.
        """
        assert call.loops is not None
        positions = call.operands_with(cut.factor)
        for position in positions:
            operand, current = call.operands[position], call.current[position]
            if isinstance(current, Shard | Partial) or (current is None and operand.name in self._graph.parameters):
                return True
            if cut.axis not in self._facts.parameter_axes and self.has_no_gradient(operand):
                return True
        contracts = any(factor.reduction == "sum" for factor in call.loops.factors) and len(call.operands) > 1
        return not call.operands or (contracts and bool(positions))

    def has_no_gradient(self, node: fx.Node) -> bool:
        """Return whether a value is an input of the model, or has no gradient."""
        return node.name in self._inputs or not is_differentiable(node)

    def _price(self, call: CallAlong, cut: Cut, mesh_dimension: int) -> tuple[bool, bool, float, bool, bool, bool, float, int]:
        """Return a key that orders cuts over a mesh dimension, the cheapest first.

        Over rows, cuts are last that gather a shard or give a partial sum, unless the axis was assigned for just that (weights are larger
        than activations): a parameter's axis may exchange rows only (tokens go to their experts). Over tiles, axes of space are first.
        A cast to a smaller type moves nothing if it can: its result is the smaller message. Then follow axes of parameters, first those
        that the call itself reads (a sequence may be an axis of learned positions); cuts without a reduction inside the call; fewest
        bytes moved; priority in the assignment.
        """
        assert call.loops is not None
        by_rows, in_tiles = self._mesh[mesh_dimension][0] in self._rows, self._mesh[mesh_dimension][0] in TILES
        moves_rows = by_rows and call.gathers_or_sums(cut) and cut.axis not in self.beside_rows[mesh_dimension]
        is_beside_space = in_tiles and cut.axis not in self._space
        reduction = call.loops.factors[cut.factor].reduction
        moved = 0.0
        shards_parameter = False
        for position, (operand, current) in enumerate(zip(call.operands, call.current, strict=True)):
            need, is_parameter = call.need(cut, position), operand.name in self._graph.parameters
            shards_parameter |= is_parameter and isinstance(need, Shard)
            moved += bytes_moved(current, need, is_parameter) * self._facts.bytes.of(operand)
        if reduction not in (None, "whole"):
            moved += 2 * self._facts.bytes.of(call.node)
        has_parameter_axis = shards_parameter if by_rows else cut.axis in self._facts.parameter_axes
        priority = self.assigned[mesh_dimension][cut.axis]
        moved_first = moved if call.narrows() else 0.0
        is_whole = reduction == "whole"
        return moves_rows, is_beside_space, moved_first, not shards_parameter, not has_parameter_axis, is_whole, moved, priority
