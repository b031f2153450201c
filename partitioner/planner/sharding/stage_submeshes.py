"""Shards and costs of a model with a tensor-parallel degree for each stage (its width): one shard for each degree.

mesh pipeline 2 x tensor 2 + 1

    width 2     half of every weight      the stage of ranks 0 and 1
    width 1     every weight              the stage of rank 2

All stages shard the axes that the widest one shards. Values between stages are replicated on the ranks of both.
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
from partitioner.planner.costs.memory.named_regions import Patterns
from partitioner.planner.costs.unit_costs import UnitCosts, stack
from partitioner.planner.pipeline.candidate import StageSums
from partitioner.planner.sharding.mesh_cut import MeshCut
from partitioner.planner.sharding.rank_shard import ModelPart, axis_cut, cut_part
from partitioner.planner.solvers.stage_problem import Gathered
from passes.autograd.recompute import Recompute
from passes.ir.errors import ConfigError
from passes.ir.layout import Replicate, Shard
from passes.ir.mesh import WIDTH, Mesh


class _GatherCost(NamedTuple):
    """Seconds and bytes of gathering a value before it is sent, and of gathering its gradient before that is sent back."""

    seconds: float
    size: float
    gradient_seconds: float
    gradient_size: float


_REPLICATED = _GatherCost(0.0, 0.0, 0.0, 0.0)
"""The cost of a value that all ranks have whole."""


@dataclass(frozen=True, eq=False)
class SubmeshParts:
    """The shards of a model for stages with a tensor-parallel degree (width) each.

    Attributes:
        mesh: of all ranks.
        by_width: width -> the shard of a rank in a stage of that width; width 1, which gives the sizes of messages, is always included.
        links: width -> mesh dimension -> the links between the ranks of a stage of that width.
    """

    mesh: Mesh
    by_width: Mapping[int, ModelPart]
    links: Mapping[int, Mapping[str, GroupLinks]]

    def prices(
        self,
        kinds: Sequence[Device],
        places: Sequence[Device],
        cost_model: CostModel,
        optimizer: str,
        policy: Recompute,
        patterns: Patterns = (),
    ) -> UnitCosts:
        """Return the costs of the units on each kind of device.

        Args:
            kinds: devices, distinguished by the width of their stage (``links.places_of``).
            places: the device at each pipeline position.
        """
        widths = sorted(set(self.mesh.widths))
        known = (kinds, cost_model, optimizer, policy)
        tables = {width: self.by_width[width].prices(*known, self.links[width], patterns=patterns) for width in (1, *widths)}
        width_of = dict(zip(places, self.mesh.widths, strict=True))
        table_of_kind = [widths.index(width_of[kind]) for kind in kinds]
        return stack(table_of_kind, [tables[width] for width in widths], tables[1], lambda rows: self._gathers(table_of_kind, rows))

    def _gathers(self, table_of_kind: Sequence[int], rows: int) -> tuple[tuple[Gathered, ...], tuple[Gathered, ...]]:
        """Return the values, and the gradients, that stages gather before sending; ``table_of_kind``: kind -> number of its width."""
        by_width = [self._gather_costs(width, rows) for width in sorted(set(self.mesh.widths))]
        values, gradients = list[Gathered](), list[Gathered]()
        source = self.by_width[1].source
        for value in source.points.values:
            costs = [costs_of_nodes.get(value.node, _REPLICATED) for costs_of_nodes in by_width]
            if any(cost != _REPLICATED for cost in costs):
                seconds, sizes, gradient_seconds, gradient_sizes = zip(*(costs[place] for place in table_of_kind), strict=True)
                for producer, *readers in source.places((value.producer, *value.readers)):
                    values.append(Gathered(seconds, sizes, producer, tuple(readers[-1:])))
                    gradients.append(Gathered(gradient_seconds, gradient_sizes, producer, tuple(readers)))
        return tuple(values), tuple(gradients)

    def _gather_costs(self, width: int, rows: int) -> dict[str, _GatherCost]:
        """Return node -> cost of gathering its value, for those that are not replicated on the ranks of a stage of this width."""
        part, links, numbers = self.by_width[width], self.links[width].get(WIDTH), Numbers(rows)
        if links is None or part.layouts is None:
            return {}
        index, costs = part.cutting.names.index(WIDTH), dict[str, _GatherCost]()
        share = 1.0 if part.graph.batch is not None else rows / part.graph.batch_size
        for node, layouts in part.layouts.results.items():
            collective, _ = collectives_between(layouts[0][index], Replicate()) if len(layouts) == 1 else (None, None)
            if collective is None:
                continue
            size, is_sharded = numbers[self.by_width[1].cost.bytes[node]] * share, isinstance(layouts[0][index], Shard)
            seconds, _ = Exchange(node, 0, WIDTH, collective, None).seconds(size, links)
            back, _ = Exchange(node, 0, WIDTH, "all_gather", None).seconds(size, links) if is_sharded else (0.0, 0.0)
            costs[node] = _GatherCost(seconds, size, back, size if is_sharded else 0.0)
        return costs

    def sum_seconds(self, sums: Mapping[int, StageSums], starts: Sequence[int], stage_ranks: Sequence[tuple[int, ...]]) -> float:
        """Return the seconds of gradient reduction at the slowest pipeline position, without overlap.

        Args:
            sums: width -> the gradients that the ranks of such a stage sum (``stage_sums``).
            starts: the first unit of each stage.
            stage_ranks: the pipeline positions of each stage.
        """
        seconds = [0.0]
        for width, of_width in sums.items():
            by_dimension = of_width.of_ranks(starts, stage_ranks)
            for place in {ranks[0] for ranks in stage_ranks if self.mesh.widths[ranks[0]] == width}:
                sizes = {name: tuple(of_places[place].tolist()) for name, of_places in by_dimension.items()}
                seconds.append(sum(each.alone for each in self.by_width[width].sum_seconds(sizes, self.links[width]).values()))
        return max(seconds)

    def stage_sums(self, prices: UnitCosts) -> dict[int, StageSums]:
        """Return width -> the gradients that the ranks of a stage of that width sum at the end of a step."""
        return {width: StageSums(prices, self.by_width[width].sums) for width in sorted(set(self.mesh.widths))}

    @cached_property
    def _shared_parameters(self) -> dict[str, str]:
        """The parameters that several nodes read: placeholder -> name."""
        graph = self.by_width[1].source.whole
        shared = (node.name for node in graph.graph.nodes if node.name in graph.parameters and len(node.users) > 1)
        return {placeholder: graph.parameters[placeholder] for placeholder in shared}

    def sharing_error(self, prices: UnitCosts, starts: Sequence[int], stage_ranks: Sequence[tuple[int, ...]]) -> ConfigError | None:
        """Return the error for a parameter shared by stages of unequal width, whose gradient shards do not match; None if there is none."""
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
    """Return the shards for a mesh whose stages have a tensor-parallel degree each.

    Args:
        cut: the sharding of the widest stage.
        mesh: of all ranks.
        batchnorm: statistics if the batch is sharded: ``"sync"`` or ``"local"``.
    """
    parts, links_of_width = dict[int, ModelPart](), dict[int, Mapping[str, GroupLinks]]()
    widest = cut.part.cutting
    for width in sorted({1, *mesh.widths}):
        sizes = {**dict(widest.dimensions), WIDTH: width}
        cutting = Mesh(tuple((name, size) for name, size in sizes.items() if name != WIDTH or size > 1))
        if cutting == widest:
            parts[width] = cut.part
        else:
            own = axis_cut(cutting, {name: cut.assigned[name] for name in cutting.names}, batchnorm, cut.halos, cut.attention)
            rows = cut.part.batch_size * cut.part.cutting.n_row_parts
            parts[width] = cut_part(cut.part.source, rows, cut.axes, own)
        place = mesh.widths.index(width if width in mesh.widths else max(mesh.widths))
        at_place = links.at(mesh, place)
        links_of_width[width] = {name: at_place[name] for name in cutting.names}
    return SubmeshParts(mesh, parts, links_of_width)
