"""A model with its axes, the axes that each mesh dimension shards, and one rank's shard; each is computed once for all meshes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import sympy
from torch import fx

from cost_models.graph_cost import graph_cost
from partitioner.options.constraints import TENSOR, Constraints
from partitioner.planner.constraints.axes import constrained_axes
from partitioner.planner.constraints.tile_grid import fits, tile_axes, with_grid
from partitioner.planner.costs.links import ClockRate
from partitioner.planner.costs.memory.named_regions import policy_key
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.axis_problem import AxisChoice, AxisProblem
from partitioner.planner.sharding.mesh_cut import MeshCut, shares_attention
from partitioner.planner.sharding.rank_shard import ModelPart, PartGraph, axis_cut, cut_part, part_graph, whole_part
from partitioner.planner.sharding.spatial import Hardware, SpaceProblem, may_be_hybrid
from passes.analysis.axes import Axes, find_axes
from passes.analysis.axis_names import axes_named, axis_names, batch_axes, expert_axes, space_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.analysis.merge_axes import merge_short_axes
from passes.graph.repeated_subgraphs import Folded, fold_repeats
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, SEQUENCE, TILE, TILES, Mesh
from passes.ir.plan import ATTENTION
from passes.normalize.randomness.functional_rng import split_randomness
from passes.normalize.specialize_batch import fix_batch
from passes.rules.ops.fused_heads import FusedHeads, find_fused_heads
from passes.spmd.mean_to_sum import with_totals
from passes.spmd.propagate.walk import assign_layouts
from passes.spmd.shard_graph import AxisCut

DATA = "data"
"""The mesh dimension of replicas."""


@dataclass(frozen=True, eq=False)
class _Assignment:
    """The axes that each mesh dimension shards (``MeshCut``), of a graph whose batch size the mesh divides: symbolic, or fixed."""

    source: PartGraph
    graph: ModelGraph
    axes: Axes
    names: tuple[str, ...]
    assigned: Mapping[str, tuple[int, ...]]
    gap: float | None
    fixed_batch: bool


class CuttableModel:
    """A model with caches of its axes, shardings and shards.

    Args:
        clock_rate: clock rate of the ranks that shard axes of parameters; None: see ``AxisProblem``.
        hardware: the cluster and cost model that tiles are priced for; None: tiles shard only space.
    """

    def __init__(
        self, graph: ModelGraph, request: PlanRequest, *, clock_rate: ClockRate | None = None, hardware: Hardware | None = None
    ) -> None:
        self._request, self._clock_rate, self._hardware = request, clock_rate, hardware
        self._whole = graph
        self._folded = fold_repeats(graph, lambda node: policy_key(node, request.patterns))
        self._graphs: dict[tuple[bool, bool, bool], PartGraph] = {}
        self._found_axes: dict[tuple[fx.Graph, tuple[str, ...]], Axes] = {}
        self._axes: dict[object, tuple[Axes, tuple[str, ...]]] = {}
        self._assignments_of: list[tuple[PlanRequest, dict[object, _Assignment]]] = []
        self._assignments = self._assignments_under(request)
        self._problems: dict[object, dict[frozenset[int], AxisProblem]] = {}
        self._cuts: dict[object, MeshCut] = {}
        self._known_ways: dict[object, bool] = {}
        self._uncut: list[ModelPart] = []

    def under(self, request: PlanRequest) -> CuttableModel:
        """Return the same model under another request with equal ``graph_options``; all share caches of the rest."""
        assert request.graph_options == self._request.graph_options
        other = copy.copy(self)
        vars(other).update(_request=request, _assignments=self._assignments_under(request))
        return other

    def constrained(self, constraints: Constraints) -> CuttableModel:
        """Return the same model under other constraints."""
        return self.under(dataclasses.replace(self._request, constraints=constraints))

    def _assignments_under(self, request: PlanRequest) -> dict[object, _Assignment]:
        """Return the cache of assignments for a request; its key is the constraints, the number of microbatches and the mode."""
        key = (request.constraints, request.n_microbatches, request.mode)
        for known, assignments in self._assignments_of:
            if (known.constraints, known.n_microbatches, known.mode) == key:
                return assignments
        assignments = {}
        self._assignments_of.append((request, assignments))
        return assignments

    def kinds_of_axes(self, cutting: Mesh, dimension: str) -> dict[str, bool]:
        """Name the kinds of axes that are long enough for a mesh dimension, ``"heads"`` for all of the heads.

        Returns:
            For each name, whether parameters have such an axis.
        """
        graph = self._part_graph(cutting).graph
        axes, names = self._find_axes(graph, cutting)
        count, kinds = cutting.length(dimension), dict[str, bool]()
        parameters = (name for name in graph.parameters if name in axes.tensors)
        of_parameters = {axis for name in parameters for axes_of_dimension in axes.of(name) for axis in axes_of_dimension}
        for axis, name in enumerate(names):
            if fits(axes, axis, count):
                kind = name.partition("[")[0]
                kinds[kind] = kinds.get(kind, False) or axis in of_parameters
        return dict(sorted(kinds.items()))

    def n_operations(self, cutting: Mesh) -> int:
        """Count the operations of the graph that a mesh shards: repeated blocks are one, but for tiles."""
        return sum(node.op == "call_function" for node in self._part_graph(cutting).graph.graph.nodes)

    @cached_property
    def has_sequence(self) -> bool:
        """Whether the model has attention over a sequence."""
        return any("queries" in roles or "keys" in roles for roles in self.axes_of(self._folded.graph).roles)

    @cached_property
    def has_space(self) -> bool:
        """Whether windows (convolutions, pooling) slide over an axis that tiles could shard."""
        axes = self.axes_of(self._folded.graph)
        space = {axis for each in space_axes(axes).values() for axis in each}
        return any(not space.isdisjoint(each) for each in axes.slid_over.values())

    def axes_of(self, graph: ModelGraph, fused: Mapping[str, FusedHeads] = MappingProxyType({})) -> Axes:
        """Return ``find_axes`` of the folded graph, or of another that is made of the model's; cached."""
        key = (graph.graph, tuple(fused))
        if key not in self._found_axes:
            self._found_axes[key] = find_axes(graph.graph, fused=fused)
        return self._found_axes[key]

    @property
    def whole(self) -> ModelPart:
        """The shard of a mesh that shards no axes: the whole model."""
        if not self._uncut:
            self._uncut.append(whole_part(part_graph(self._folded, self._whole, lambda graph: graph)))
        return self._uncut[0]

    def cut(
        self,
        cutting: Mesh,
        *,
        extra_axes: bool = False,
        limit: float = math.inf,
        halos: tuple[HaloSegment, ...] = (),
        attention: str = ATTENTION[0],
    ) -> MeshCut:
        """Return the model sharded by a mesh; raise ConfigError if a dimension has no axis to shard.

        Args:
            extra_axes: whether tensor also shards the sequence, data large weights, or tiles other axes than space (``MeshCut``).
            limit: bytes of parameters that one pipeline may store; axes are chosen so that they fit, if possible.
            halos: segments of calls with a halo strategy of their own; all others exchange each halo and wait.
            attention: how the ranks of a sequence dimension share attention (``Plan.attention``).
        """
        chosen = self._assignment(cutting, extra_axes, limit)
        key = (cutting, extra_axes, tuple(chosen.assigned.items()), chosen.gap, halos, chosen.fixed_batch, attention)
        if key not in self._cuts:
            cut = axis_cut(cutting, chosen.assigned, self._request.batchnorm, halos, attention)
            part = self._part(chosen.source, chosen.graph.batch_size, chosen.axes, cut)
            assert part.layouts is not None
            found = (part, chosen.axes, chosen.names, chosen.assigned, part.layouts, extra_axes, chosen.gap, halos, attention)
            self._cuts[key] = MeshCut(*found)
        return self._cuts[key]

    def axes_cut(self, cutting: Mesh, *, extra_axes: bool = False, limit: float = math.inf) -> dict[str, tuple[str, ...]]:
        """Return the names of the axes that each mesh dimension shards, as ``cut`` does, but without computing the shard."""
        chosen = self._assignment(cutting, extra_axes, limit)
        return {name: tuple(chosen.names[axis] for axis in axes) for name, axes in chosen.assigned.items()}

    def part_for_bounds(
        self, cutting: Mesh, *, extra_axes: bool = False, limit: float = math.inf, attention: str = ATTENTION[0]
    ) -> ModelPart:
        """Return one rank's shard, for bounds: on two ranks instead of all if a single mesh dimension shards axes.

        The size of an exchanged value that is not sharded is the same for any number of ranks, so one shard serves all numbers. With
        several dimensions the value is itself sharded over the others, and its size depends on their lengths.
        """
        chosen = self._assignment(cutting, extra_axes, limit)
        of_two = cutting if len(cutting.names) > 1 else Mesh(tuple((name, 2) for name in cutting.names))
        cut = axis_cut(of_two, chosen.assigned, self._request.batchnorm, attention=attention)
        return cut_part(chosen.source, chosen.graph.batch_size, chosen.axes, cut)

    def _assignment(self, cutting: Mesh, extra_axes: bool, limit: float) -> _Assignment:
        key = (cutting, extra_axes, limit)
        if key not in self._assignments:
            self._assignments[key] = self._assign(*key)
        return self._assignments[key]

    def _assign(self, cutting: Mesh, extra_axes: bool, limit: float) -> _Assignment:
        """Choose the axes to shard: those that constraints name, and the cheapest others."""
        in_tiles = any(name in TILES for name in cutting.names)
        of_tiles, fixed_batch = self._hybrid_axes(cutting) if extra_axes and in_tiles else (None, False)
        source = self._part_graph(cutting, fixed_batch=fixed_batch)
        axes, names = self._find_axes(source.graph, cutting, fixed_batch=fixed_batch)
        graph = _with_divisible_batch(source.graph, cutting)
        fixed = constrained_axes(graph, axes, names, cutting, self._request.constraints)
        chosen = {name: self._axes_of_dimension(source, graph, axes, names, cutting, name, fixed, limit) for name in cutting.names}
        if of_tiles is not None:
            chosen |= of_tiles
        elif extra_axes and TENSOR not in chosen:
            chosen[DATA] = self._batch_and_weight_axes(source, graph, axes, cutting, limit)
        assigned = {name: choice.axes for name, choice in chosen.items()}
        if extra_axes and TENSOR in assigned and of_tiles is None:
            assigned[TENSOR] = (*_sequence_axes(axes, names, cutting, assigned), *assigned[TENSOR])
        gap = max((choice.gap for choice in chosen.values() if choice.gap is not None), default=None)
        return _Assignment(source, graph, axes, names, assigned, gap, fixed_batch)

    def with_grid(self, mesh: Mesh) -> Mesh:
        """Return the mesh with its tile dimension, if any, replaced by a grid."""
        if TILE not in mesh.names:  # then axes need not be found
            return mesh
        graph = self._part_graph(mesh).graph
        return with_grid(self._find_axes(graph, mesh.cutting)[0], mesh)

    def has_extra_axes(self, mesh: Mesh, *, alone: bool = False) -> bool:
        """Return whether there is a choice with extra axes (``cut``), by the axes of two ranks unless no other mesh matters (``alone``)."""
        if any(name in TILES for name in mesh.names):
            return self._may_be_hybrid(mesh.cutting)
        if mesh.cutting.names == (DATA,) and self._clock_rate is not None and not self._request.constraints.axes:
            return self._may_shard_weights_over_data(mesh.cutting if alone else Mesh(((DATA, 2),)))
        if TENSOR not in mesh.names or SEQUENCE in mesh.names:
            return False
        plain = self._assignment(mesh.cutting if alone else Mesh(((TENSOR, 2),)), False, math.inf)
        return bool(_sequence_axes(plain.axes, plain.names, Mesh(((TENSOR, mesh.length(TENSOR)),)), plain.assigned))

    def _may_be_hybrid(self, cutting: Mesh) -> bool:
        """Return whether tiles may shard other axes than space."""
        graph = self._part_graph(cutting).graph
        axes, names = self._find_axes(graph, cutting)
        fixed = constrained_axes(graph, axes, names, cutting, self._request.constraints)
        return self._hardware is not None and may_be_hybrid(axes, cutting, fixed, free=self._is_free)

    def attention_choices(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the ways to share attention (``Plan.attention``) to plan: the user's, or all that apply; one without a sequence dimension.

        Raises:
            ConfigError: the mesh cannot shard the model.
        """
        if SEQUENCE not in mesh.names:
            return ATTENTION[:1]
        if self._request.constraints.attention is not None:
            return (self._request.constraints.attention,)
        return (ATTENTION[0], *(way for way in ATTENTION[1:] if self._may_share_attention(mesh.cutting, way)))

    def _may_share_attention(self, cutting: Mesh, way: str) -> bool:
        """Return whether ranks of a sequence dimension could share some attention so, if there were as few of them as it takes."""
        chosen = self._assignment(cutting, False, math.inf)
        assigned = {SEQUENCE: chosen.assigned[SEQUENCE]}
        key = (id(chosen.axes), assigned[SEQUENCE], way)
        if key not in self._known_ways:
            facts = chosen.source.facts(chosen.axes)
            layouts = assign_layouts(facts.graph, facts.axes, ((SEQUENCE, 1),), assigned, (), facts=facts, attention=way)
            self._known_ways[key] = shares_attention(layouts, 0, assigned[SEQUENCE], way)
        return self._known_ways[key]

    @property
    def _is_free(self) -> bool:
        """Whether the planner chose the mesh, not the user."""
        return self._clock_rate is not None and not self._clock_rate.asked

    def _hybrid_axes(self, cutting: Mesh) -> tuple[dict[str, AxisChoice], bool]:
        """Return the axes of tile dimensions, with the batch if a graph with a fixed batch size allows it; and whether it does."""
        assert self._hardware is not None
        if self._may_shard_batch_unevenly(cutting):
            chosen, shards_batch = self._solve_hybrid(self._hardware, cutting, fixed_batch=True)
            if shards_batch:
                return chosen, True
        return self._solve_hybrid(self._hardware, cutting, fixed_batch=False)[0], False

    def _solve_hybrid(self, hardware: Hardware, cutting: Mesh, *, fixed_batch: bool) -> tuple[dict[str, AxisChoice], bool]:
        """Return the axes of tile dimensions in one of the graphs, and whether axes of the batch are among them."""
        source = self._part_graph(cutting, fixed_batch=fixed_batch)
        axes, names = self._find_axes(source.graph, cutting, fixed_batch=fixed_batch)
        cost = graph_cost(source.graph, differentiate=source.graph.training, reading=source.reading)
        fixed = constrained_axes(source.graph, axes, names, cutting, self._request.constraints)
        ranks = hardware.along(cutting, self._request.n_microbatches or 1)
        chosen = SpaceProblem(source.graph, axes, cost, cutting, ranks, fixed, free=self._is_free).solve()
        batch = batch_axes(source.graph, axes)
        return chosen, any(axis in batch for choice in chosen.values() for axis in choice.axes)

    def _may_shard_batch_unevenly(self, cutting: Mesh) -> bool:
        """Return whether the batch could be sharded unevenly, as any other axis, in a graph with a fixed batch size."""
        one_microbatch = self._request.mode in ("model", "auto") and self._request.n_microbatches in (None, 1)
        return self._whole.batch is not None and one_microbatch and self._whole.batch_size % cutting.n_row_parts == 0

    def _may_shard_weights_over_data(self, cutting: Mesh) -> bool:
        """Return whether the data dimension would shard any axis besides the batch."""
        source = self._part_graph(cutting)
        axes, _ = self._find_axes(source.graph, cutting)
        graph = _with_divisible_batch(source.graph, cutting)
        batch = batch_axes(graph, axes)
        if graph.batch is None or not batch:
            return False
        return not set(self._batch_and_weight_axes(source, graph, axes, cutting, math.inf).axes) <= batch

    def _batch_and_weight_axes(self, source: PartGraph, graph: ModelGraph, axes: Axes, cutting: Mesh, limit: float) -> AxisChoice:
        """Choose for the data dimension: the batch, and axes of weights whose gradients cost more to sum than activations to exchange."""
        count, batch = cutting.length(DATA), tuple(sorted(batch_axes(graph, axes)))

        def problem() -> AxisProblem:
            known = (graph, axes, (DATA, count), batch, expert_axes(graph, axes), self._clock_rate)
            return AxisProblem(*known, lambda name: len(source.copies(name)), rows=True, facts=_facts(source, graph, axes))

        return self._problem(axes, count, (DATA, batch), problem).solve(count, limit) or AxisChoice(batch)

    def _problem(self, axes: Axes, count: int, key: Hashable, make: Callable[[], AxisProblem]) -> AxisProblem:
        """Return a problem for ``count`` ranks, cached: that of ranks for which the same axes are long enough, or of fewer ranks."""
        fitting = _fitting_axes(axes, count)
        problems = self._problems.setdefault((id(axes), key), {})
        if fitting not in problems:
            narrowed = (problem.for_more_ranks(count) for among, problem in problems.items() if fitting < among)
            problems[fitting] = next((problem for problem in narrowed if problem is not None), None) or make()
        return problems[fitting]

    def _part(self, source: PartGraph, batch_size: int, axes: Axes, cut: AxisCut) -> ModelPart:
        """Return one rank's shard: that of two replicas serves all numbers of them, unless exchanges or draws depend on the batch size."""
        batch = batch_axes(source.graph, axes)
        only_batch = all(set(cut.assigned[name]) <= batch and name not in cut.stored for name in cut.rows)
        if not cut.rows or not only_batch or source.graph.batch is None or source.draws:
            return cut_part(source, batch_size, axes, cut)
        two_replicas = Mesh(tuple((name, 2 if name in cut.rows else size) for name, size in cut.mesh.dimensions))
        part = cut_part(source, batch_size, axes, dataclasses.replace(cut, mesh=two_replicas))
        if any(each.dimension in cut.rows and isinstance(each.size, sympy.Expr) for each in part.exchanges):
            return cut_part(source, batch_size, axes, cut)
        return dataclasses.replace(part, cutting=cut.mesh, batch_size=-(-batch_size // math.prod(map(cut.mesh.length, cut.rows))))

    def _part_graph(self, mesh: Mesh, *, fixed_batch: bool = False) -> PartGraph:
        """Return the graph to shard, with a symbolic or fixed batch; for tiles unfolded, since a halo segment may span several blocks."""
        in_parts, in_tiles = _shards_rows_and_space(mesh)
        key = (in_parts, in_tiles, fixed_batch)
        if key not in self._graphs:
            whole = fix_batch(self._whole, self._whole.batch_size) if fixed_batch else self._whole
            folded = Folded(whole, {}, {}) if in_tiles else self._folded
            self._graphs[key] = part_graph(
                folded, whole, lambda graph: split_randomness(with_totals(graph) if in_parts else graph), self._request.reduce_dtype
            )
        return self._graphs[key]

    def _find_axes(self, graph: ModelGraph, cutting: Mesh, *, fixed_batch: bool = False) -> tuple[Axes, tuple[str, ...]]:
        """Return the axes and their names, with axes merged that are too short for a mesh dimension alone; cached."""
        kind = (*_shards_rows_and_space(cutting), fixed_batch)
        others = tuple(dimension for dimension in cutting.dimensions if dimension[0] not in ROWS)
        if (kind, ()) not in self._axes:
            plain = self.axes_of(graph)
            self._axes[kind, ()] = plain, axis_names(graph, plain)
        if (kind, others) not in self._axes:
            unmerged = self._axes[kind, ()]
            fused = find_fused_heads(graph.graph, max(count for _, count in others))
            axes = self.axes_of(graph, fused)
            for _, count in others:
                axes = merge_short_axes(graph, axes, count)
            self._axes[kind, others] = unmerged if axes is unmerged[0] else (axes, axis_names(graph, axes))
        return self._axes[kind, others]

    def _axes_of_dimension(
        self,
        source: PartGraph,
        graph: ModelGraph,
        axes: Axes,
        names: tuple[str, ...],
        cutting: Mesh,
        dimension: str,
        fixed: Mapping[str, tuple[int, ...]],
        limit: float,
    ) -> AxisChoice:
        """Return the axes that one mesh dimension shards: those that the user ``fixed`` for it, and those that its kind implies."""
        of_others = {axis for other, fixed_axes in fixed.items() if other != dimension for axis in fixed_axes}
        if dimension in ROWS:
            batch = tuple(sorted(batch_axes(graph, axes)))
            if not batch:
                raise ConfigError(
                    f'the model has no batch that mode "{dimension}" could cut', remedy="pass inputs whose first dimension is the batch"
                )
            _check_groups_of_rows(graph, axes, batch, cutting)
            return AxisChoice((*batch, *(axis for axis in fixed[dimension] if axis not in batch)))
        if dimension in TILES:
            return AxisChoice(tile_axes(axes, cutting, dimension))
        if dimension == SEQUENCE:
            sequence = set(axes_named(SEQUENCE, names))
            rest = () if sequence & set(fixed[dimension]) else tuple(axis for axis in sorted(sequence) if axis not in of_others)
            if not (*fixed[dimension], *rest):
                raise ConfigError(
                    'nothing is left for the mesh dimension "sequence": constraints cut the sequence over another',
                    remedy="leave the dimension out, or the constraint",
                )
            return AxisChoice((*fixed[dimension], *rest))
        count = cutting.length(dimension)

        def make() -> AxisProblem:
            sequence = {axis for axis, name in enumerate(names) if name.startswith("sequence[")}  # has a mesh dimension of its own
            excluded = of_others | sequence - set(fixed[dimension])
            known = (graph, axes, (dimension, count), fixed[dimension], excluded, self._clock_rate)
            named = _by_name(fixed[dimension], names)
            return AxisProblem(*known, lambda name: len(source.copies(name)), facts=_facts(source, graph, axes), named=named)

        problem = self._problem(axes, count, (dimension, fixed[dimension], tuple(sorted(of_others))), make)
        chosen = problem.solve(count, limit)
        if chosen is None or not chosen.axes:
            chosen = problem.solve(count, math.inf)
        if chosen is None or not chosen.axes:
            is_named = self._request.mode != "auto"
            raise ConfigError(
                f"no axis of the model's parameters can be cut into {count} parts",
                remedy="use fewer devices for this mesh dimension, or another mode" if is_named else "pass fewer devices, or name a mode",
            )
        return chosen


def _by_name(chosen: Collection[int], names: Sequence[str]) -> list[list[int]]:
    """Return axes in sets of one name without its number."""
    sets: dict[str, list[int]] = {}
    for axis in chosen:
        sets.setdefault(names[axis].partition("[")[0], []).append(axis)
    return list(sets.values())


def _sequence_axes(axes: Axes, names: tuple[str, ...], cutting: Mesh, assigned: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sequence axes that a tensor dimension could also shard: long enough, and not sharded yet."""
    sharded = {axis for of_dimension in assigned.values() for axis in of_dimension}
    free = [axis for axis, name in enumerate(names) if name.startswith("sequence[") and axis not in sharded]
    return tuple(axis for axis in free if fits(axes, axis, cutting.length(TENSOR)))


def _fitting_axes(axes: Axes, count: int) -> frozenset[int]:
    """Return the axes that are long enough for ``count`` ranks."""
    return frozenset(axis for axis in range(len(axes.sizes)) if fits(axes, axis, count))


def _shards_rows_and_space(mesh: Mesh) -> tuple[bool, bool]:
    """Return whether a mesh may shard what a mean is taken over, and whether it shards space."""
    return mesh.size > 1, any(name in (TILE, *TILES) for name in mesh.names)


def _check_groups_of_rows(graph: ModelGraph, axes: Axes, batch: tuple[int, ...], cutting: Mesh) -> None:
    """Raise ConfigError where the model keeps rows together, ``x.reshape(3, 4, -1)`` of 12 rows, in groups that the ranks do not divide."""
    parts, rows = cutting.n_row_parts, graph.batch_size
    for size in (axes.sizes[axis] for axis in batch):
        if isinstance(size, int) and size % parts:
            raise ConfigError(
                f"the model keeps the {rows} rows of the batch together in {size} groups, which {parts} ranks cannot share equally",
                remedy="use as many replicas as divide the groups; pass inputs whose first dimension is the batch",
            )


def _with_divisible_batch(graph: ModelGraph, cutting: Mesh) -> ModelGraph:
    """Return the graph with a batch size that the mesh divides: a symbolic batch is rounded up, a fixed one must be divisible."""
    parts, rows = cutting.n_row_parts, graph.batch_size
    if rows % parts == 0:
        return graph
    if graph.batch is None:
        raise ConfigError(
            f"a batch of {rows} rows cannot be cut into {parts} equal parts, and this model was traced for that size alone",
            remedy=f"pass example inputs with a multiple of {parts} rows",
        )
    return dataclasses.replace(graph, batch_size=rows + -rows % parts)


def _facts(source: PartGraph, graph: ModelGraph, axes: Axes) -> LayoutFacts | None:
    """Return the shared facts of the graph to shard; None if it is another, with rows for all ranks."""
    return source.facts(axes) if graph is source.graph else None
