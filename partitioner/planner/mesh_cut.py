"""A model under the dimensions of a mesh that cut axes: which axes they cut, how every value lies, and the part of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from partitioner.planner.model_part import ModelPart
from partitioner.planner.part_graph import PartGraph
from passes.axes import Axes
from passes.axis_names import axis_names, shortened
from passes.ir.halo_run import HaloRun
from passes.ir.mesh import ROWS
from passes.layouts import Layouts
from passes.loss_totals import with_totals
from passes.merge_axes import find_axes_to_cut
from passes.split_randomness import split_randomness

__all__ = ["MeshCut"]


@dataclass(frozen=True, eq=False)
class MeshCut:
    """A model under the dimensions of a mesh that cut axes.

    Attributes:
        part: of one rank.
        axes: of the model.
        names: of the axes.
        assigned: mesh dimension -> the axes that it cuts.
        layouts: how every value lies.
        beside: whether the tensor dimension cuts the sequence, too, where it cuts nothing else (Korthikanti et al., "Reducing activation
            recomputation in large transformer models", 2022); where there is no tensor dimension, whether that of the replicas cuts
            weights that are larger than activations (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014);
            where there are tiles, whether these cut other axes where space is not worth its halos (``space_choice``).
        gap: of the choice of axes, by its own prices; None where there was none.
        halos: how runs of calls pay for them.
    """

    part: ModelPart
    axes: Axes
    names: tuple[str, ...]
    assigned: Mapping[str, tuple[int, ...]]
    layouts: Layouts
    beside: bool = False
    gap: float | None = None
    halos: tuple[HaloRun, ...] = ()

    def in_whole_model(self) -> tuple[tuple[str, str], ...]:
        """What is cut as a plan says it: (axis of the whole model, mesh dimension).

        Where all of a name are cut in the folded model, so are those of all blocks.
        """
        of, cutting = self.part.of, self.part.cutting
        axes, names, assigned = self.axes, self.names, self.assigned
        by_folded = {name: shortened(each, names) for name, each in assigned.items()}
        if all("[" not in axis or self._is_numbered_alike(axis) for each in by_folded.values() for axis in each):
            return tuple((axis, name) for name in cutting.names for axis in by_folded[name])
        if of.unfolding is not None:
            by_rows = any(name in ROWS for name in cutting.names)
            graph = split_randomness(with_totals(of.whole) if by_rows else of.whole)
            whole = find_axes_to_cut(graph, cutting)
            names = axis_names(graph, whole)
            counterparts = _counterparts(axes, whole, of)
            assigned = {
                name: tuple(dict.fromkeys(found for axis in each for found in counterparts.get(axis, ())))
                for name, each in assigned.items()
            }
        return tuple((axis, name) for name in cutting.names for axis in shortened(assigned[name], names))

    def _is_numbered_alike(self, axis: str) -> bool:
        """Whether an axis has the same number in the whole model: none of its name is left out there, with the copies of a block."""
        return axis.partition("[")[0] not in self._names_in_block

    @cached_property
    def _names_in_block(self) -> frozenset[str]:
        copies = self.part.of.unfolding.copies if self.part.of.unfolding is not None else {}
        tensors = (tensor for node in copies for tensor in self.axes.tensors.get(node, ()))
        return frozenset(self.names[axis].partition("[")[0] for tensor in tensors for each in tensor for axis in each)


def _counterparts(folded: Axes, whole: Axes, of: PartGraph) -> dict[int, dict[int, None]]:
    """Axis of a folded graph -> the axes of the whole one that it stands for."""
    found: dict[int, dict[int, None]] = {}
    for node, tensors in folded.tensors.items():
        for copy in of.copies(node):
            for mine, theirs in zip(tensors, whole.tensors[copy], strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    for axis, counterpart in zip(one, other, strict=False):
                        found.setdefault(axis, {})[counterpart] = None
    return found
