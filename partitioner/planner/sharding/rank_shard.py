"""One rank's shard of a model: costs, cut points and collectives, derived from layouts without rewriting the graph.

    axes sharded by each mesh dimension -> layouts -> local sizes -> costs, collectives, gradient reductions

Links are no part of it: ``ModelPart.prices`` takes them, so that one shard serves every placement of the mesh on the cluster.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from cost_models.collectives.algorithms import GroupLinks
from cost_models.cost_model import CostModel
from cost_models.graph_cost import GraphCost, Reading, graph_cost, read_graph
from cost_models.hardware.clusters import Device
from partitioner.planner.costs.collectives import (
    Exchange,
    GradientSum,
    SumSeconds,
    find_exchanges,
    find_gradient_sums,
    shares_of_bucket,
    sum_seconds,
    with_coalescing_counts,
)
from partitioner.planner.costs.cut_points import CutPoints, Expansion, expansion_of, find_cut_points
from partitioner.planner.costs.decomposed_ops import with_decompositions
from partitioner.planner.costs.memory.checkpoint_regions import checkpoint_regions
from partitioner.planner.costs.memory.named_regions import Patterns, named_regions
from partitioner.planner.costs.part_sizes import PartSizes
from partitioner.planner.costs.unit_costs import UnitCosts, repeat
from partitioner.planner.costs.unit_pricing import Triple, UnitPricing
from passes.analysis.axes import Axes
from passes.analysis.layout_facts import LayoutFacts
from passes.autograd.recompute import Recompute
from passes.emit.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from passes.graph.provenance import source_name
from passes.graph.repeated_subgraphs import Folded
from passes.graph.schemas import draws
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.halo_strategy import HaloSegment, ends_of
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, STORED, Mesh
from passes.ir.plan import ATTENTION, BY_REGION, REDUCE_DTYPES, Region
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.shard_graph import AxisCut, layouts_of_cut


@dataclass(frozen=True, eq=False)
class ModelPart:
    """One rank's shard of a model, over all stages; ``layouts``, ``axes`` and ``sizes`` are None if no axis is sharded.

    Attributes:
        source: the graph that it is a shard of.
        batch_size: samples of one rank.
        cutting: the mesh dimensions that shard axes.
        sums: the gradients that are summed once a step.
        layouts: the layout of every value.
        axes: of the graph.
        sizes: of the local tensors.
        known_prices: cache by kinds of devices, optimizer and policy, shared by all links and batch sizes.
    """

    source: PartGraph
    batch_size: int
    cost: GraphCost
    cutting: Mesh
    sums: tuple[GradientSum, ...] = ()
    layouts: Layouts | None = None
    axes: Axes | None = None
    sizes: PartSizes | None = None
    known_prices: dict[Hashable, UnitPricing] = field(default_factory=dict)

    @cached_property
    def graph(self) -> ModelGraph:
        """The whole model's graph, with one rank's batch size."""
        return dataclasses.replace(self.source.whole, batch_size=self.batch_size)

    @property
    def points(self) -> CutPoints:
        """The units of the whole model, between which stages may be cut."""
        return self.source.points if self.source.unfolding is None else self.source.unfolding.points

    def prices(
        self,
        kinds: Sequence[Device],
        cost_model: CostModel,
        optimizer: str,
        policy: Recompute = "none",
        links: Mapping[str, GroupLinks] = MappingProxyType({}),
        *,
        patterns: Patterns = (),
        in_regions: bool = False,
        n_stages: int = 1,
        adding: bool = True,
        is_run_whole: bool = False,
    ) -> UnitCosts:
        """Return the costs of the shard's units.

        Args:
            kinds: the distinct devices to price for.
            links: mesh dimension -> the links along it.
            patterns: modules and their policies of recomputation, as the caller gave them.
            in_regions: whether values that enter a region are saved under ``"selective"``, too, as in plans with a policy for each region.
            n_stages: number of stages: small collectives of a stage are coalesced.
            adding: whether gradients accumulate over microbatches.
            is_run_whole: whether the waits for messages are those of all copies of a repeated block, not of a few.
        """
        again = self._gathered_by_later_stages if n_stages > 1 else ()
        exchanges = [(exchange.in_stages(n_stages), links[exchange.dimension]) for exchange in (*self.exchanges, *again)]
        key = (tuple(kinds), optimizer, policy, patterns, in_regions)
        if key not in self.known_prices:
            regions = self.source.regions(policy, patterns, in_regions=in_regions)
            known = (self.source.graph, self.cost, self.source.points, kinds, cost_model, optimizer, policy, regions)
            self.known_prices[key] = UnitPricing(
                *known, self.source.known_seconds, self._bucket_bytes, self.layouts is not None, self.source.unfolding
            )
        parameters = (self.source.users, self.held_bytes)
        folded = self.source.graph.parameters
        sums = [(each, links[each.dimension]) for each in self.sums if each.parameter in folded and each.dimension in links]
        costs = self.known_prices[key].on(
            self.batch_size, exchanges, *parameters, sums=sums, adding=adding, n_stages=n_stages, is_run_whole=is_run_whole
        )
        if self.source.unfolding is None:
            return costs
        recomputed = frozenset(copy for name in costs.recomputed[0] for copy in self.source.copies(name))
        return dataclasses.replace(repeat(costs, self.source.unfolding), recomputed=(recomputed,) * len(kinds))

    @cached_property
    def held_bytes(self) -> dict[str, int]:
        """Parameter -> bytes of one rank's shard."""
        return {copy: int(self.cost.bytes[name]) for name in self.source.graph.parameters for copy in self.source.copies(name)}

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The collectives of every microbatch."""
        if self.layouts is None or self.axes is None or self.sizes is None:
            return ()
        exchanges = find_exchanges(self.source.graph, self.axes, self.layouts, self.sizes, self.cost.gradients, self.source.sent)
        found = with_coalescing_counts(exchanges, self.source.graph.graph, dict(self.layouts.mesh), self.source.copies)
        return tuple(dataclasses.replace(each, is_beside=self._is_beside(each), is_ahead=self._is_ahead(each)) for each in found)

    @cached_property
    def _gathered_by_later_stages(self) -> tuple[Exchange, ...]:
        """The collectives of stored values, as tied weights, that calls far apart read: the stage of the last call gathers them, too."""
        unit_of, nodes = self.source.points.unit_of, {node.name: node for node in self.source.graph.graph.nodes}
        found = list[Exchange]()
        for exchange in (each for each in self.exchanges if each.is_stored and each.reader in unit_of):
            readers = [user.name for user in nodes[exchange.value].users if user.name in unit_of]
            last = max(readers, key=unit_of.__getitem__, default=exchange.reader)
            if unit_of[last] - unit_of[exchange.reader] > len(self.source.points.units) / 2:
                found.append(dataclasses.replace(exchange, reader=last))
        return tuple(found)

    def _is_beside(self, exchange: Exchange) -> bool:
        """Return whether the backward sends the gradient of a value while it computes those of its reader's parameters."""
        cost = self.cost.nodes.get(exchange.reader)
        is_alone = bool(exchange.value) and not exchange.is_stored and exchange.n_readers == 1
        return is_alone and cost is not None and cost.first_half == "activation"

    def _is_ahead(self, exchange: Exchange) -> bool:
        """Return whether there are calls between the one that makes a value and the one that waits for it."""
        place = self._place_of_call
        return exchange.value in place and place.get(exchange.reader, 0) > place[exchange.value] + 1

    @cached_property
    def _place_of_call(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.cost.nodes)}

    @cached_property
    def exchange_counts(self) -> tuple[tuple[Exchange, int], ...]:
        """Each distinct collective, compared without its reader, and how often the whole model runs it."""
        counts = Counter[Exchange]()
        for exchange in self.exchanges:
            counts[dataclasses.replace(exchange, reader="")] += len(self.source.copies(exchange.reader))
        return tuple(counts.items())

    @cached_property
    def bytes_summed(self) -> dict[str, float]:
        """Mesh dimension -> bytes of the gradients of all stages that are summed over it."""
        totals: dict[str, float] = {}
        for each in self.sums:
            totals[each.dimension] = totals.get(each.dimension, 0.0) + each.size
        return totals

    @property
    def _bucket_bytes(self) -> tuple[float, float]:
        """The bytes of gradients that are in memory twice, in a bucket and in its reduced copy: at the step's end, and before."""
        sizes = [each.held for each in self.sums]
        at_end = min(BUCKET_BYTES + max(sizes, default=0.0), sum(sizes))
        return at_end, at_end if sum(sizes) > FIRST_BUCKET_BYTES else 0.0

    def sum_seconds(self, by_dimension: Mapping[str, tuple[float, float]], links: Mapping[str, GroupLinks]) -> dict[str, SumSeconds]:
        """Return mesh dimension -> seconds of summing a stage's gradients over it, of its (bytes, buckets) (``StageSums``)."""
        largest = float(shares_of_bucket(np.array([each.held for each in self.sums])).max(initial=0.0))
        return {name: sum_seconds(size, buckets, largest, links[name]) for name, (size, buckets) in by_dimension.items() if size}


def whole_part(source: PartGraph) -> ModelPart:
    """Return the whole model as the shard of a mesh that shards no axes."""
    cost = graph_cost(source.graph, differentiate=source.graph.training, reading=source.reading)
    return ModelPart(source, source.graph.batch_size, cost, Mesh(()))


def cut_part(source: PartGraph, batch_size: int, axes: Axes, cut: AxisCut) -> ModelPart:
    """Return one rank's shard of a graph; equal shards are computed once.

    Args:
        batch_size: samples of the whole batch.
        axes: of the folded graph.
    """
    key = (id(axes), tuple(cut.assigned.items()), *(getattr(cut, each.name) for each in dataclasses.fields(cut) if each.name != "assigned"))
    if key not in source.known_parts:
        source.known_parts[key] = _cut_part(source, batch_size, axes, cut)
    part = source.known_parts[key]
    own_rows = -(-batch_size // part.cutting.n_row_parts)
    return part if part.batch_size == own_rows else dataclasses.replace(part, batch_size=own_rows)


def _cut_part(source: PartGraph, batch_size: int, axes: Axes, cut: AxisCut) -> ModelPart:
    layouts = layouts_of_cut(source.facts(axes), cut)
    sizes = PartSizes(source.graph, axes, layouts, cut.rows, source.reading.shapes)
    cost = graph_cost(source.graph, differentiate=source.graph.training, parts=sizes, reading=source.reading)
    cost = with_decompositions(cost, source.graph, axes, layouts, sizes)
    folded_sums = find_gradient_sums(layouts, cost.bytes, cost.gradients, source.sent)
    sums = tuple(dataclasses.replace(each, parameter=name) for each in folded_sums for name in source.copies(each.parameter))
    return ModelPart(source, -(-batch_size // cut.mesh.n_row_parts), cost, cut.mesh, sums, layouts, axes, sizes)


def axis_cut(
    cutting: Mesh,
    assigned: Mapping[str, tuple[int, ...]],
    batchnorm: str,
    halos: Sequence[HaloSegment] = (),
    attention: str = ATTENTION[0],
) -> AxisCut:
    """Return the sharding of a mesh: ``assigned`` lists the axes of each mesh dimension, ``halos`` the segments with a halo strategy."""
    rows = tuple(name for name in cutting.names if name in ROWS)
    stored = tuple(name for name in cutting.names if name in STORED)
    wide, overlapped = ends_of(halos, "recompute"), ends_of(halos, "overlap")
    return AxisCut(cutting, assigned, rows, stored, batchnorm == "local", wide, overlapped, attention)


# -- the graph that is sharded -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PartGraph:
    """The graph that is sharded: the model's, or one with repeated blocks folded into one.

    Attributes:
        graph: of the model, repeated blocks folded.
        points: its units.
        whole: the graph of the whole model.
        unfolding: how the units repeat; None if nothing is folded.
        reduce_dtype: type in which ranks sum gradients of parameters, by name; None: that of the parameters.
        named: the nodes that a plan may name, where ``whole`` is rewritten; empty: all.
        known_seconds: cache of operations' seconds by kind of device and microbatch size, shared by all shards, meshes and policies.
        known_facts: axes, of which there are few, by identity -> what is known of them.
        known_parts: cache of ``cut_part``.
    """

    graph: ModelGraph
    points: CutPoints
    whole: ModelGraph
    unfolding: Expansion | None = None
    reduce_dtype: str | None = None
    named: frozenset[str] = frozenset()
    known_seconds: dict[Hashable, Triple] = field(default_factory=dict)
    known_facts: dict[int, LayoutFacts] = field(default_factory=dict)
    known_parts: dict[Hashable, ModelPart] = field(default_factory=dict)

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Placeholder -> the units of the whole model that read it, in order."""
        unit_of, users = self.points.unit_of, dict[str, tuple[int, ...]]()
        for node in (node for node in self.graph.graph.nodes if node.op == "placeholder"):
            units = tuple(sorted({unit_of[user.name] for user in node.users if user.name in unit_of}))
            users.update(dict.fromkeys(self.copies(node.name), ()))
            if units:
                users.update(zip(self.copies(node.name), self.places(units), strict=False))
        return users

    @property
    def shares_weights(self) -> bool:
        """Whether several units read one parameter: ranks that do not follow each other in a pipeline may then sum its gradients."""
        return any(
            node.name in self.graph.parameters and len(self.points.readers(node)) > 1
            for node in self.graph.graph.nodes
            if node.op == "placeholder"
        )

    def places(self, units: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """Translate units of the folded graph into units of the whole model: one tuple for each repeat of the block."""
        return (units,) if self.unfolding is None else self.unfolding.places(units)

    @cached_property
    def reading(self) -> Reading:
        """The facts about the graph that the costs of all its shards share."""
        return read_graph(self.graph, differentiate=self.graph.training)

    def facts(self, axes: Axes) -> LayoutFacts:
        """Return the facts about the graph that all shards over some axes read."""
        if id(axes) not in self.known_facts:
            self.known_facts[id(axes)] = LayoutFacts(self.graph, axes)
        return self.known_facts[id(axes)]

    @cached_property
    def sent(self) -> dict[str, float]:
        """Parameter -> bytes of its gradient where ranks sum it, in bytes of the parameter."""
        held = {node.name: node.meta["val"].dtype.itemsize for node in self.graph.graph.nodes if node.name in self.graph.parameters}
        return {name: REDUCE_DTYPES.get(self.reduce_dtype or "", size) / size for name, size in held.items()}

    def regions(self, policy: Recompute, patterns: Patterns, *, in_regions: bool = False) -> tuple[Region, ...]:
        """Return the regions of recomputation of the whole model under a policy; the others as in ``ModelPart.prices``."""
        if policy == BY_REGION:
            return self._in_names_of_plans(named_regions(self.whole, patterns))
        if policy == "full" or in_regions:
            return tuple(dataclasses.replace(region, recompute=policy) for region in self._checkpoint_regions)
        return ()

    def _in_names_of_plans(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Return regions that begin with nodes of the model: with a dropout, where its mask is drawn before it."""
        if not self.named:
            return tuple(regions)
        names = [node.name for node in self.whole.graph.nodes]
        following = {region.first_node: names[names.index(region.first_node) :] for region in regions}
        firsts = {first: next(name for name in later if name in self.named) for first, later in following.items()}
        return tuple(dataclasses.replace(region, first_node=firsts[region.first_node]) for region in regions)

    @cached_property
    def draws(self) -> bool:
        """Whether calls draw random numbers: each rank draws those of all ranks."""
        return any(node.op == "call_function" and draws(node) for node in self.graph.graph.nodes)

    @cached_property
    def _checkpoint_regions(self) -> tuple[Region, ...]:
        points = self.points if self.whole is self.graph else find_cut_points(self.whole)
        return self._in_names_of_plans(checkpoint_regions(self.whole, points))

    def copies(self, name: str) -> tuple[str, ...]:
        """Return the nodes of the whole model that a node of the folded graph stands for."""
        return (name,) if self.unfolding is None else self.unfolding.copies.get(name, (name,))


def unfolded(graph: ModelGraph) -> PartGraph:
    """Return the part graph of a graph whose repeated blocks are not folded."""
    return PartGraph(graph, find_cut_points(graph), graph)


def part_graph(
    folded: Folded, whole: ModelGraph, prepare: Callable[[ModelGraph], ModelGraph], reduce_dtype: str | None = None
) -> PartGraph:
    """Return the graph to shard, rewritten by ``prepare``: the folded one, or the whole if repeats do not start at unit boundaries."""
    if folded.n_copies > 1:
        graph = prepare(folded.graph)
        points = _cheapest_cut_points(graph, folded)
        unfolding = expansion_of(points, _copies_of_rewritten(folded, graph), folded.following)
        if unfolding is not None:
            return PartGraph(graph, points, whole, unfolding, reduce_dtype)
    graph = prepare(whole)
    named = frozenset(node.name for node in whole.graph.nodes)
    return PartGraph(graph, find_cut_points(graph, named), graph, reduce_dtype=reduce_dtype, named=named)


def _copies_of_rewritten(folded: Folded, graph: ModelGraph) -> dict[str, tuple[str, ...]]:
    """Return the copies of each node of the rewritten graph: ``dropout_mask``, from ``dropout``, has ``dropout_1_mask``, ..."""
    known = {node.name for node in folded.graph.graph.nodes}
    copies = dict(folded.copies)
    for name in (node.name for node in graph.graph.nodes if node.name not in known):
        source = source_name(name, known)
        if source in folded.copies:
            copies[name] = tuple(f"{copy}{name.removeprefix(source)}" for copy in folded.copies[source])
    return copies


def _cheapest_cut_points(graph: ModelGraph, folded: Folded) -> CutPoints:
    """Return the units of a folded graph; if there are many, only those at which the fewest bytes cross a boundary inside a copy."""
    names = frozenset(node.name for node in folded.graph.graph.nodes)
    points = find_cut_points(graph, names)
    in_block = [index for index, name in enumerate(points.starts) if name in folded.copies]
    if len(in_block) * folded.n_copies < _PLENTY:
        return points
    crossing = np.zeros(len(points.units))
    nodes = {node.name: node for node in graph.graph.nodes}
    for value in points.values:
        size = bytes_of(nodes[value.node].meta["val"], graph.batch, graph.batch_size)
        crossing[value.producer + 1 : value.readers[-1] + 1] += size
    least = crossing[in_block].min()
    return find_cut_points(graph, frozenset(name for name, size in zip(points.starts, crossing, strict=True) if size <= least * 1.01))


_PLENTY = 60
"""Number of units from which stages are cut only where the fewest bytes cross."""
