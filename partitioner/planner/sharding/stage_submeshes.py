"""The parts of a model whose stages have tensor-parallel degrees of their own: one for each degree, and prices that know them.

mesh pipeline 2 x tensor 2 + 1

    width 2     half of every weight      the stage of ranks 0 and 1
    width 1     every weight              the stage of rank 2

The axes that are cut are those that the widest stage cuts. What crosses from stage to stage is whole on the ranks of both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cost_models.collectives.algorithms import GroupLinks
from cost_models.cost_model import CostModel
from cost_models.formulas.symbols import Numbers
from cost_models.hardware.clusters import Device
from partitioner.options.limits import shared_by_unlike_stages
from partitioner.planner.costs.collectives import Exchange, collectives_between
from partitioner.planner.costs.links import LinkTable
from partitioner.planner.costs.unit_costs import UnitCosts, stack
from partitioner.planner.pipeline.candidate import StageSums
from partitioner.planner.sharding.model import MeshCut
from partitioner.planner.sharding.rank_shard import ModelPart, axis_cut, cut_part
from partitioner.planner.solvers.boundaries import Gathered, Parted
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.layout import Replicate, Shard
from passes.ir.mesh import WIDTH, Mesh

__all__ = ["SubmeshParts", "submesh_parts"]


class _AtBorder(NamedTuple):
    """What it takes a stage to send a value, and to read it; as ``Gathered`` and ``Parted`` have it."""

    forward: float
    size: float
    back: float
    read_size: float


_WHOLE = _AtBorder(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class SubmeshParts:
    """The parts of a model for stages with degrees of their own.

    Attributes:
        mesh: of all ranks.
        by_width: width -> the part of a rank of a stage so wide; that of width 1, which tells the sizes of messages, is always there.
        links: width -> mesh dimension -> the links between the ranks that share a stage so wide.
    """

    mesh: Mesh
    by_width: Mapping[int, ModelPart]
    links: Mapping[int, Mapping[str, GroupLinks]]

    def prices(
        self, kinds: Sequence[Device], places: Sequence[Device], cost_model: CostModel, optimizer: str, policy: Recompute
    ) -> UnitCosts:
        """The prices of the units of stages of each kind.

        Args:
            kinds: devices, told apart by how many share a stage (``mesh_links``).
            places: the device of each place along the pipeline.
        """
        widths = sorted(set(self.mesh.widths))
        known = (kinds, cost_model, optimizer, policy)
        lists = {width: self.by_width[width].prices(*known, self.links[width]) for width in (1, *widths)}
        width_of = dict(zip(places, self.mesh.widths, strict=True))
        of_kind = [widths.index(width_of[kind]) for kind in kinds]
        return stack(of_kind, [lists[width] for width in widths], lists[1], lambda rows: self._borders(of_kind, rows))

    def _borders(self, of_kind: Sequence[int], rows: int) -> tuple[tuple[Gathered, ...], tuple[Parted, ...]]:
        """What stages that hold parts of a value, or of a sum, make whole before they send it, and what they read in parts."""
        widths = sorted(set(self.mesh.widths))
        found = [self._at_borders(width, rows) for width in widths]
        gathered, parted = list[Gathered](), list[Parted]()
        of = self.by_width[1].of
        for value in of.points.values:
            each = [of_width.get(value.node, _WHOLE) for of_width in found]
            if any(at != _WHOLE for at in each):
                of_kinds = [each[place] for place in of_kind]
                forward, back = tuple(at.forward for at in of_kinds), tuple(at.back for at in of_kinds)
                whole, read = tuple(at.size for at in of_kinds), tuple(at.read_size for at in of_kinds)
                for producer, *readers in of.places((value.producer, *value.readers)):
                    gathered.append(Gathered(forward, whole, producer, readers[-1]))
                    parted.append(Parted(back, read, producer, tuple(readers)))
        return tuple(gathered), tuple(parted)

    def _at_borders(self, width: int, rows: int) -> dict[str, _AtBorder]:
        """What crosses between units and does not lie whole on the ranks of a stage so wide."""
        part, links, numbers = self.by_width[width], self.links[width].get(WIDTH), Numbers(rows)
        if links is None or part.layouts is None:
            return {}
        place, found = part.cutting.names.index(WIDTH), dict[str, _AtBorder]()
        share = 1.0 if part.graph.batch is not None else rows / part.graph.batch_size
        for node, layouts in part.layouts.results.items():
            forward, _ = collectives_between(layouts[0][place], Replicate()) if len(layouts) == 1 else (None, None)
            if forward is not None:
                size = numbers[self.by_width[1].cost.bytes[node]] * share
                seconds, _ = Exchange(node, 0, WIDTH, forward, None).seconds(size, links)
                is_read = isinstance(layouts[0][place], Shard)
                back, _ = Exchange(node, 0, WIDTH, "all_gather", None).seconds(size, links) if is_read else (0.0, 0.0)
                found[node] = _AtBorder(seconds, size, back, size if is_read else 0.0)
        return found

    def sum_seconds(self, sums: Mapping[int, StageSums], starts: Sequence[int], stage_ranks: Sequence[tuple[int, ...]]) -> float:
        """Until the ranks of the slowest place have summed their gradients, if nothing hides it.

        Args:
            sums: for each width, the gradients that the ranks of a stage so wide sum (``stage_sums``).
            starts: the first unit of each stage.
            stage_ranks: for each stage, its places.
        """
        seconds = [0.0]
        for width, of_width in sums.items():
            by_dimension = of_width.of_ranks(starts, stage_ranks)
            for place in {ranks[0] for ranks in stage_ranks if self.mesh.widths[ranks[0]] == width}:
                sizes = {name: tuple(of_places[place].tolist()) for name, of_places in by_dimension.items()}
                seconds.append(self.by_width[width].sum_seconds(sizes, self.links[width]))
        return max(seconds)

    def stage_sums(self, prices: UnitCosts) -> dict[int, StageSums]:
        """For each width, the gradients that the ranks of a stage so wide sum at the end of a step."""
        return {width: StageSums(prices, self.by_width[width].sums) for width in sorted(set(self.mesh.widths))}

    @cached_property
    def _shared_parameters(self) -> dict[str, str]:
        """The parameters that several nodes read: placeholder -> name."""
        graph = self.by_width[1].of.whole
        return {
            node.name: graph.parameters[node.name] for node in graph.graph.nodes if node.name in graph.parameters and len(node.users) > 1
        }

    def torn(self, prices: UnitCosts, starts: Sequence[int], stage_ranks: Sequence[tuple[int, ...]]) -> ConfigError | None:
        """The first parameter that stages of unequal degrees would share: no rank could sum its part of the gradient with the others."""
        for placeholder, name in self._shared_parameters.items():
            stages = {bisect_right(starts, unit) - 1 for unit in prices.users[placeholder]}
            widths = {self.mesh.widths[stage_ranks[stage][0]] for stage in stages}
            if len(widths) > 1:
                return shared_by_unlike_stages(name, min(widths), max(widths))
        return None

    def check(self, prices: UnitCosts) -> None:
        """Raise ConfigError where the first and the last stage have unequal degrees and share a parameter, wherever stages are cut."""
        if self.mesh.widths[0] == self.mesh.widths[-1]:
            return
        last = len(self.by_width[1].points.units) - 1
        for placeholder, name in self._shared_parameters.items():
            users = prices.users[placeholder]
            if users and (users[0], users[-1]) == (0, last):
                raise shared_by_unlike_stages(name, self.mesh.widths[0], self.mesh.widths[-1])


def submesh_parts(cut: MeshCut, mesh: Mesh, batchnorm: str, links: LinkTable) -> SubmeshParts:
    """The parts for a mesh whose stages have degrees of their own.

    Args:
        cut: of the widest.
        mesh: of all ranks.
        batchnorm: statistics where the batch is cut: ``"sync"`` or ``"local"``.
    """
    parts, between = dict[int, ModelPart](), dict[int, Mapping[str, GroupLinks]]()
    widest = cut.part.cutting
    for width in sorted({1, *mesh.widths}):
        sizes = {**dict(widest.dimensions), WIDTH: width}
        cutting = Mesh(tuple((name, size) for name, size in sizes.items() if name != WIDTH or size > 1))
        if cutting == widest:
            parts[width] = cut.part
        else:
            own = axis_cut(cutting, {name: cut.assigned[name] for name in cutting.names}, batchnorm, cut.halos)
            rows = cut.part.batch_size * cut.part.n_row_parts
            parts[width] = cut_part(cut.part.of, rows, cut.axes, own)
        place = mesh.widths.index(width) if width in mesh.widths else None
        found = links.at(mesh, mesh.widths.index(max(mesh.widths)) if place is None else place)
        between[width] = {name: found[name] for name in cutting.names}
    return SubmeshParts(mesh, parts, between)
