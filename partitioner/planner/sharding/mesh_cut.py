"""A model that is sharded by the dimensions of a mesh: its axes, the layout of every value, and how ranks share attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.planner.sharding.rank_shard import ModelPart, PartGraph
from passes.analysis.axes import Axes
from passes.analysis.axis_names import axis_names, short_names
from passes.analysis.merge_axes import find_axes_to_cut
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.errors import ConfigError
from passes.ir.layout import Shard, Varying
from passes.ir.mesh import SEQUENCE
from passes.ir.plan import ATTENTION
from passes.normalize.randomness.functional_rng import split_randomness
from passes.spmd.mean_to_sum import with_totals
from passes.spmd.propagate.layouts import Layouts


@dataclass(frozen=True, eq=False)
class MeshCut:
    """A model sharded by the dimensions of a mesh that shard axes.

    Attributes:
        assigned: mesh dimension -> the axes that it shards.
        layouts: the layout of every value.
        extra_axes: whether tensor dimensions also shard the sequence between their sharded layers (Korthikanti et al., "Reducing activation
            recomputation in large transformer models", 2022), or, without one, data dimensions also weights that are larger than
            activations (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014), or tile dimensions other axes
            in layers in which halos cost more than space gains (``spatial``).
        gap: the fraction by which another choice of axes could cost less; None if there was nothing to choose.
        halos: the halo strategy of each segment of calls.
        attention: how the ranks of a sequence dimension share attention (``Plan.attention``).
    """

    part: ModelPart
    axes: Axes
    names: tuple[str, ...]
    assigned: Mapping[str, tuple[int, ...]]
    layouts: Layouts
    extra_axes: bool = False
    gap: float | None = None
    halos: tuple[HaloSegment, ...] = ()
    attention: str = ATTENTION[0]

    @property
    def shares_attention(self) -> bool:
        """Whether some attention is shared as ``attention`` says: false for models whose heads are too few, say."""
        index = self.part.cutting.names.index(SEQUENCE)
        return shares_attention(self.layouts, index, self.assigned[SEQUENCE], self.attention)

    @property
    def gathered_attention(self) -> tuple[str, ...]:
        """The calls that compare positions and gather an operand for that: they cannot be shared as ``attention`` says."""
        index, sequences, found = self.part.cutting.names.index(SEQUENCE), set(self.assigned[SEQUENCE]), []
        for name, cuts in self.layouts.cuts.items():
            compares = sum(not sequences.isdisjoint(axes) for axes in self.axes.factors.get(name, ())) > 1
            operands = zip(self.axes.operands[name], self.layouts.needs[name], strict=True) if compares and cuts[index] is not None else ()
            if any(isinstance(self.layouts.results[each.name][0][index], Shard) and need[index] == Varying() for each, need in operands):
                found.append(name)
        return tuple(found)

    def copied_share(self, dimension: str) -> float:
        """Return the fraction of the elements of parameters that every rank along a mesh dimension has whole."""
        index, source = self.part.cutting.names.index(dimension), self.part.source
        parameters = [node for node in source.graph.graph.nodes if node.name in source.graph.parameters]
        sizes = {node.name: node.meta["val"].numel() * len(source.copies(node.name)) for node in parameters}
        copied = sum(size for name, size in sizes.items() if not isinstance(self.layouts.stored[name][index], Shard))
        return float(copied / max(sum(sizes.values()), 1))

    def check_attention(self) -> None:
        """Raise ConfigError if no attention of the model can be shared as asked."""
        if self.attention == ATTENTION[0] or self.shares_attention:
            return
        count = self.part.cutting.length(SEQUENCE)
        if self.attention == "zigzag":
            raise ConfigError(
                f'attention="zigzag": no attention of the model gives {count} ranks an early and a late piece of the sequence each',
                remedy="it needs F.scaled_dot_product_attention with a causal mask, without dropout, and a sequence that "
                f'{2 * count} divides; or use attention="ring"',
            )
        if self.attention == "ring":
            raise ConfigError(
                f'attention="ring": no attention of the model can send its keys and values round {count} ranks',
                remedy=f"it needs F.scaled_dot_product_attention without dropout, a mask that no gradient is asked of, and a sequence "
                f'that {count} divides; or use attention="{ATTENTION[0]}"',
            )
        raise ConfigError(
            f"attention={self.attention!r}: no attention of the model has heads that {count} ranks of {SEQUENCE!r} can exchange",
            remedy=f"it needs {count} heads of queries, keys and values, and no mesh dimension inside {SEQUENCE!r} that cuts them "
            f'({{"tensor": 2, "{SEQUENCE}": {count}}}, tensor outermost); or use attention="{ATTENTION[0]}"',
        )

    def in_whole_model(self) -> tuple[tuple[str, str], ...]:
        """Return the sharding as in ``Plan.axes``: pairs (name of an axis of the whole model, mesh dimension).

        Names without a number ("heads"), and numbers that no folded block shifts, hold for the whole model. Otherwise the axes of the whole
        model are found, and named by it.
        """
        source, cutting, names, assigned = self.part.source, self.part.cutting, self.names, self.assigned
        folded_names = {name: short_names(axes, names) for name, axes in assigned.items()}
        if all("[" not in axis or self._has_same_number(axis) for axes in folded_names.values() for axis in axes):
            return tuple((axis, name) for name in cutting.names for axis in folded_names[name])
        if source.unfolding is not None:
            graph = split_randomness(with_totals(source.whole) if cutting.size > 1 else source.whole)
            whole = find_axes_to_cut(graph, cutting)
            names = axis_names(graph, whole)
            counterparts = _counterparts(self.axes, whole, source)
            assigned = {
                name: tuple(dict.fromkeys(counterpart for axis in axes for counterpart in counterparts.get(axis, ())))
                for name, axes in assigned.items()
            }
        return tuple((axis, name) for name in cutting.names for axis in short_names(assigned[name], names))

    def _has_same_number(self, axis: str) -> bool:
        """Return whether "ffn[3]" is the same axis in the whole model: no axis named ffn is in a folded block."""
        return axis.partition("[")[0] not in self._names_in_block

    @cached_property
    def _names_in_block(self) -> frozenset[str]:
        copies = self.part.source.unfolding.copies if self.part.source.unfolding is not None else {}
        tensors = (tensor for node in copies for tensor in self.axes.tensors.get(node, ()))
        return frozenset(self.names[axis].partition("[")[0] for tensor in tensors for dimension in tensor for axis in dimension)


def shares_attention(layouts: Layouts, index: int, sequences: Collection[int], way: str) -> bool:
    """Return whether some attention is shared in a way (``Plan.attention``) over mesh dimension number ``index``, of the sequence."""
    if way == "zigzag":
        return any(ring.is_zigzag for ring in layouts.rings.values())
    if way == "ring":
        return bool(layouts.rings)
    cuts = (cuts[index] for cuts in layouts.cuts.values())
    return any(cut is not None and cut.axis not in sequences for cut in cuts)


def _counterparts(folded: Axes, whole: Axes, source: PartGraph) -> dict[int, dict[int, None]]:
    """Return axis of the folded graph -> the axes of the whole one that it stands for, as an ordered set."""
    counterparts: dict[int, dict[int, None]] = {}
    for node, tensors in folded.tensors.items():
        for copied_tensors in (whole.tensors[name] for name in source.copies(node)):
            for tensor, copied_tensor in zip(tensors, copied_tensors, strict=True):
                for dimension, copied_dimension in zip(tensor, copied_tensor, strict=True):
                    for axis, counterpart in zip(dimension, copied_dimension, strict=False):
                        counterparts.setdefault(axis, {})[counterpart] = None
    return counterparts
