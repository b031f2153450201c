"""A model with its axes, the axes that each mesh dimension shards, and one rank's shard; each is computed once for all meshes."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import sympy

from cost_models.graph_cost import graph_cost
from partitioner.options.constraints import TENSOR, Constraints
from partitioner.planner.constraints.axes import constrained_axes
from partitioner.planner.costs.links import ClockRate
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.axis_problem import AxisChoice, AxisProblem
from partitioner.planner.sharding.rank_shard import ModelPart, PartGraph, axis_cut, cut_part, part_graph, whole_part
from partitioner.planner.sharding.spatial import Hardware, SpaceProblem, Switched, may_switch
from partitioner.planner.tile_grid import fits, tile_axes, with_grid
from passes.analysis.axes import Axes, find_axes
from passes.analysis.axis_names import axes_named, axis_names, batch_axes, expert_axes, short_names, space_axes
from passes.analysis.merge_axes import find_axes_to_cut, merge_short_axes
from passes.graph.repeated_subgraphs import Folded, fold_repeats
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import ROWS, TILE, TILES, Mesh
from passes.normalize.randomness.functional_rng import split_randomness
from passes.normalize.specialize_batch import fix_batch
from passes.spmd.mean_to_sum import with_totals
from passes.spmd.propagate import Layouts
from passes.spmd.shard_graph import AxisCut

__all__ = ["CuttableModel", "MeshCut"]


DATA = "data"
"""The mesh dimension of replicas."""


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The sharded axes and their graph; ``in_numbers``: whether that graph has a fixed batch size instead of a symbolic one."""

    of: PartGraph
    graph: ModelGraph
    axes: Axes
    names: tuple[str, ...]
    assigned: Mapping[str, tuple[int, ...]]
    gap: float | None
    in_numbers: bool


class CuttableModel:
    """A model with caches of its axes, shardings and shards.

    Args:
        pace: clock rate of the ranks that shard axes of parameters; None: see ``AxisProblem``.
        hardware: the cluster and cost model that tiles are priced for; None: tiles shard only space.
    """

    def __init__(self, graph: ModelGraph, request: PlanRequest, *, pace: ClockRate | None = None, hardware: Hardware | None = None) -> None:
        self._request, self._pace, self._hardware = request, pace, hardware
        self._whole = graph
        self._folded = fold_repeats(graph)
        self._graphs: dict[tuple[bool, bool, bool], PartGraph] = {}
        self._axes: dict[object, tuple[Axes, tuple[str, ...]]] = {}
        self._chosen: dict[object, _Chosen] = {}
        self._problems: dict[object, AxisProblem] = {}
        self._cuts: dict[object, MeshCut] = {}
        self._of_two: dict[object, ModelPart] = {}
        self._among_few: dict[object, ModelPart] = {}

    def constrained(self, constraints: Constraints) -> CuttableModel:
        """Return the same model under other constraints; what does not depend on them is found once."""
        other = copy.copy(self)
        vars(other).update(_request=dataclasses.replace(self._request, constraints=constraints), _chosen={})
        return other

    def kinds_of_axes(self, cutting: Mesh, dimension: str) -> dict[str, bool]:
        """Name the kinds of axes that are long enough for a mesh dimension, ``"heads"`` for all of the heads.

        Returns:
            For each name, whether parameters have such an axis.
        """
        graph = self._prepared(cutting).graph
        axes, names = self._find_axes(graph, cutting)
        count, found = cutting.length(dimension), dict[str, bool]()
        of_parameters = {axis for name in graph.parameters if name in axes.tensors for each in axes.of(name) for axis in each}
        for axis, name in enumerate(names):
            if fits(axes, axis, count):
                kind = name.partition("[")[0]
                found[kind] = found.get(kind, False) or axis in of_parameters
        return dict(sorted(found.items()))

    @cached_property
    def has_sequence(self) -> bool:
        """Whether the model has attention over a sequence."""
        return any("queries" in roles or "keys" in roles for roles in find_axes(self._folded.graph.graph).roles)

    @cached_property
    def has_space(self) -> bool:
        """Whether windows (convolutions, pooling) slide over an axis that tiles could shard."""
        axes = find_axes(self._folded.graph.graph)
        space = {axis for each in space_axes(axes).values() for axis in each}
        return any(not space.isdisjoint(each) for each in axes.slid_over.values())

    @cached_property
    def whole(self) -> ModelPart:
        """The shard of a mesh that shards no axes: the whole model."""
        return whole_part(part_graph(self._folded, self._whole, lambda graph: graph))

    def cut(self, cutting: Mesh, *, beside: bool = False, limit: float = math.inf, halos: tuple[HaloSegment, ...] = ()) -> MeshCut:
        """Return the model sharded by a mesh; raise ConfigError if a dimension has no axis to shard.

        Args:
            beside: whether the tensor dimension also shards the sequence, the data dimension large weights, or tiles other axes than space.
            limit: bytes of parameters that one pipeline may store; axes are chosen so that they fit, if possible.
            halos: segments of calls with a halo strategy of their own; all others exchange each halo and wait.
        """
        chosen = self._choose(cutting, beside, limit)
        key = (cutting, beside, tuple(chosen.assigned.items()), chosen.gap, halos, chosen.in_numbers)
        if key not in self._cuts:
            cut = axis_cut(cutting, chosen.assigned, self._request.batchnorm, halos)
            part = self._part(chosen.of, chosen.graph.batch_size, chosen.axes, cut, beside)
            assert part.layouts is not None
            self._cuts[key] = MeshCut(part, chosen.axes, chosen.names, chosen.assigned, part.layouts, beside, chosen.gap, halos)
        return self._cuts[key]

    def axes_cut(self, cutting: Mesh, *, beside: bool = False, limit: float = math.inf) -> dict[str, tuple[str, ...]]:
        """Return the names of the axes that each mesh dimension shards, as ``cut`` does, but without computing the shard."""
        chosen = self._choose(cutting, beside, limit)
        return {name: tuple(chosen.names[axis] for axis in each) for name, each in chosen.assigned.items()}

    def cut_among_few(self, cutting: Mesh, *, beside: bool = False, limit: float = math.inf) -> ModelPart:
        """Return one rank's shard, for bounds: on two ranks instead of all if a single mesh dimension shards axes.

        The size of an exchanged value that is not sharded is the same for any number of ranks, so one shard serves all numbers. With
        several dimensions the value is itself sharded over the others, and its size depends on their lengths.
        """
        chosen = self._choose(cutting, beside, limit)
        few = cutting if len(cutting.names) > 1 else Mesh(tuple((name, 2) for name in cutting.names))
        key = (few, beside, tuple(chosen.assigned.items()), id(chosen.axes))
        if key not in self._among_few:
            cut = axis_cut(few, chosen.assigned, self._request.batchnorm)
            self._among_few[key] = cut_part(chosen.of, chosen.graph.batch_size, chosen.axes, cut)
        return self._among_few[key]

    def _choose(self, cutting: Mesh, beside: bool, limit: float) -> _Chosen:
        """Return the axes to shard, cached."""
        asked = (cutting, beside, limit)
        if asked not in self._chosen:
            self._chosen[asked] = self._choice(*asked)
        return self._chosen[asked]

    def _choice(self, cutting: Mesh, beside: bool, limit: float) -> _Chosen:
        """Choose the axes to shard: those that constraints name, and the cheapest others."""
        in_tiles = any(name in TILES for name in cutting.names)
        switched = self._beside_space(cutting) if beside and in_tiles else None
        in_numbers = switched is not None and switched.in_numbers
        of = self._prepared(cutting, in_numbers=in_numbers)
        axes, names = self._find_axes(of.graph, cutting, in_numbers=in_numbers)
        graph = _with_divisible_batch(of.graph, cutting)
        fixed = constrained_axes(graph, axes, names, cutting, self._request.constraints)
        chosen = {name: self._assigned(of, graph, axes, names, cutting, name, fixed, limit) for name in cutting.names}
        if switched is not None:
            chosen |= switched.chosen
        elif beside and TENSOR not in chosen:
            chosen[DATA] = self._beside_rows(of, graph, axes, cutting, limit)
        assigned = {name: each.axes for name, each in chosen.items()}
        if beside and TENSOR in assigned and switched is None:
            assigned[TENSOR] = (*_sequence(axes, names, cutting, assigned), *assigned[TENSOR])
        gap = max((each.gap for each in chosen.values() if each.gap is not None), default=None)
        return _Chosen(of, graph, axes, names, assigned, gap, in_numbers)

    def with_grid(self, mesh: Mesh) -> Mesh:
        """A mesh whose tiles, if it has any, make a grid."""
        if TILE not in mesh.names:
            return mesh
        graph = self._prepared(mesh).graph
        return with_grid(self._find_axes(graph, mesh.cutting)[0], mesh)

    def can_cut_beside(self, mesh: Mesh, *, alone: bool = False) -> bool:
        """Return whether a tensor dimension may cut the sequence, too, that of the replicas large weights, or tiles more than space.

        Args:
            alone: whether no other mesh is asked about: the axes that this one cuts are chosen in any case. The answer for many meshes
                is that of the axes that two ranks would cut, which are chosen once.
        """
        if any(name in TILES for name in mesh.names):
            return self._may_switch(mesh.cutting)
        if mesh.cutting.names == (DATA,) and self._pace is not None and not self._request.constraints.axes:
            return self._gains_beside_rows(mesh.cutting)
        if TENSOR not in mesh.names or "sequence" in mesh.names:
            return False
        plain = self._choose(mesh.cutting if alone else Mesh(((TENSOR, 2),)), False, math.inf)
        return bool(_sequence(plain.axes, plain.names, Mesh(((TENSOR, mesh.length(TENSOR)),)), plain.assigned))

    def _may_switch(self, cutting: Mesh) -> bool:
        of = self._prepared(cutting)
        axes, names = self._find_axes(of.graph, cutting)
        fixed = constrained_axes(of.graph, axes, names, cutting, self._request.constraints)
        return self._hardware is not None and may_switch(axes, cutting, fixed, free=self._is_free)

    @property
    def _is_free(self) -> bool:
        """Whether the planner chose the mesh, not the user."""
        return self._pace is not None and not self._pace.asked

    def _beside_space(self, cutting: Mesh) -> Switched:
        """Choose the axes of tile dimensions. If a graph with a fixed batch size allows it, tiles may also shard the batch."""
        assert self._hardware is not None
        found: Switched | None = None
        for in_numbers in (True, False)[not self._could_cut_batch(cutting) :]:
            of = self._prepared(cutting, in_numbers=in_numbers)
            axes, names = self._find_axes(of.graph, cutting, in_numbers=in_numbers)
            cost = graph_cost(of.graph, differentiate=of.graph.training, reading=of.reading)
            fixed = constrained_axes(of.graph, axes, names, cutting, self._request.constraints)
            ranks = self._hardware.along(cutting, self._request.n_microbatches or 1)
            problem = SpaceProblem(of.graph, axes, cost, cutting, ranks, fixed, free=self._is_free)
            found = Switched(problem.solve(), in_numbers)
            if found.cuts(batch_axes(of.graph, axes)):
                return found
        assert found is not None
        return found

    def _could_cut_batch(self, cutting: Mesh) -> bool:
        """Return whether the batch could be sharded unevenly, as any other axis, in a graph with a fixed batch size."""
        rows = math.prod(cutting.length(name) for name in cutting.names if name in ROWS)
        alone = self._request.mode in ("model", "auto") and self._request.n_microbatches in (None, 1)
        return self._whole.batch is not None and alone and self._whole.batch_size % rows == 0

    def _gains_beside_rows(self, cutting: Mesh) -> bool:
        """Return whether the data dimension would shard any axis besides the batch."""
        of = self._prepared(cutting)
        axes, _ = self._find_axes(of.graph, cutting)
        graph = _with_divisible_batch(of.graph, cutting)
        batch = batch_axes(graph, axes)
        if graph.batch is None or not batch:
            return False
        return not set(self._beside_rows(of, graph, axes, cutting, math.inf).axes) <= batch

    def _beside_rows(self, of: PartGraph, graph: ModelGraph, axes: Axes, cutting: Mesh, limit: float) -> AxisChoice:
        """The batch, and the axes of parameters whose gradients would take longer to sum than their calls' activations to exchange."""
        count, batch = cutting.length(DATA), tuple(sorted(batch_axes(graph, axes)))
        key = (id(axes), DATA, _longer(axes, count), batch)
        if key not in self._problems:
            known = (graph, axes, (DATA, count), batch, expert_axes(graph, axes), self._pace)
            self._problems[key] = AxisProblem(*known, lambda name: len(of.copies(name)), rows=True)
        return self._problems[key].solve(count, limit) or AxisChoice(batch)

    def _part(self, of: PartGraph, batch_size: int, axes: Axes, cut: AxisCut, beside: bool) -> ModelPart:
        """Return one rank's shard. In terms of its samples it is equal for all numbers of replicas, unless they exchange activations."""
        alone = all(set(cut.assigned[name]) <= batch_axes(of.graph, axes) and name not in cut.stored for name in cut.rows)
        if not cut.rows or not alone or of.graph.batch is None:
            return cut_part(of, batch_size, axes, cut)
        fewest = Mesh(tuple((name, 2 if name in cut.rows else size) for name, size in cut.mesh.dimensions))
        key = (fewest, beside, tuple(sorted(cut.assigned.items())), cut.wide, cut.overlapped)
        if key not in self._of_two:
            self._of_two[key] = cut_part(of, batch_size, axes, dataclasses.replace(cut, mesh=fewest))
        part = self._of_two[key]
        if any(each.dimension in cut.rows and isinstance(each.size, sympy.Expr) for each in part.exchanges):
            return cut_part(of, batch_size, axes, cut)
        return dataclasses.replace(part, cutting=cut.mesh, batch_size=-(-batch_size // math.prod(map(cut.mesh.length, cut.rows))))

    def _prepared(self, mesh: Mesh, *, in_numbers: bool = False) -> PartGraph:
        """Return the graph to shard; for tiles unfolded, since a halo segment may span several blocks.

        Args:
            in_numbers: whether the graph has a fixed batch size instead of a symbolic one.
        """
        by_rows, in_tiles = _kind(mesh)
        key = (by_rows, in_tiles, in_numbers)
        if key not in self._graphs:
            whole = fix_batch(self._whole, self._whole.batch_size) if in_numbers else self._whole
            folded = Folded(whole, {}, {}) if in_tiles else self._folded
            self._graphs[key] = part_graph(folded, whole, lambda graph: split_randomness(with_totals(graph) if by_rows else graph))
        return self._graphs[key]

    def _find_axes(self, graph: ModelGraph, cutting: Mesh, *, in_numbers: bool = False) -> tuple[Axes, tuple[str, ...]]:
        """The axes, found once for all meshes that need the same short ones merged."""
        kind, others = (*_kind(cutting), in_numbers), tuple(dimension for dimension in cutting.dimensions if dimension[0] not in ROWS)
        if (kind, ()) not in self._axes:
            plain = find_axes(graph.graph)
            self._axes[kind, ()] = plain, axis_names(graph, plain)
        if (kind, others) not in self._axes:
            axes = self._axes[kind, ()][0]
            for _, count in others:
                axes = merge_short_axes(graph, axes, count)
            same = axes is self._axes[kind, ()][0]
            self._axes[kind, others] = self._axes[kind, ()] if same else (axes, axis_names(graph, axes))
        return self._axes[kind, others]

    def _assigned(
        self,
        of: PartGraph,
        graph: ModelGraph,
        axes: Axes,
        names: tuple[str, ...],
        cutting: Mesh,
        dimension: str,
        fixed: Mapping[str, tuple[int, ...]],
        limit: float,
    ) -> AxisChoice:
        """Return the axes that one mesh dimension shards: those that the user fixed, and those that its kind implies."""
        elsewhere = {axis for other, each in fixed.items() if other != dimension for axis in each}
        if dimension in ROWS:
            found = tuple(sorted(batch_axes(graph, axes)))
            if not found:
                raise ConfigError(
                    f'the model has no batch that mode "{dimension}" could cut', remedy="pass inputs whose first dimension is the batch"
                )
            _check_groups_of_rows(graph, axes, found, cutting)
            return AxisChoice((*found, *(axis for axis in fixed[dimension] if axis not in found)))
        if dimension in TILES:
            return AxisChoice(tile_axes(axes, cutting, dimension))
        if dimension == "sequence":
            along = set(axes_named("sequence", names))
            rest = () if along & set(fixed[dimension]) else tuple(axis for axis in sorted(along) if axis not in elsewhere)
            if not (*fixed[dimension], *rest):
                raise ConfigError(
                    'nothing is left for the mesh dimension "sequence": constraints cut the sequence over another',
                    remedy="leave the dimension out, or the constraint",
                )
            return AxisChoice((*fixed[dimension], *rest))
        count = cutting.length(dimension)
        key = (id(axes), dimension, _longer(axes, count), fixed[dimension], tuple(sorted(elsewhere)))
        if key not in self._problems:
            along = {axis for axis, name in enumerate(names) if name.startswith("sequence[")}  # has a mesh dimension of its own
            others = elsewhere | along - set(fixed[dimension])
            known = (graph, axes, (dimension, count), fixed[dimension], others, self._pace)
            self._problems[key] = AxisProblem(*known, lambda name: len(of.copies(name)))
        chosen = self._problems[key].solve(count, limit)
        if chosen is None or not chosen.axes:
            chosen = self._problems[key].solve(count, math.inf)
        if chosen is None or not chosen.axes:
            raise ConfigError(
                f"no axis of the model's parameters can be cut into {count} parts",
                remedy="use fewer devices for this mesh dimension, or another mode",
            )
        return chosen


def _sequence(axes: Axes, names: tuple[str, ...], cutting: Mesh, assigned: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sequence axes that a tensor dimension could also shard: long enough, and not sharded yet."""
    taken = {axis for each in assigned.values() for axis in each}
    along = [axis for axis, name in enumerate(names) if name.startswith("sequence[") and axis not in taken]
    return tuple(axis for axis in along if fits(axes, axis, cutting.length(TENSOR)))


def _longer(axes: Axes, count: int) -> frozenset[int]:
    """Return the axes that are long enough for ``count`` ranks."""
    return frozenset(axis for axis in range(len(axes.sizes)) if fits(axes, axis, count))


def _kind(mesh: Mesh) -> tuple[bool, bool]:
    """Return whether a mesh shards the batch, and whether it shards space."""
    return any(name in ROWS for name in mesh.names), any(name in (TILE, *TILES) for name in mesh.names)


def _check_groups_of_rows(graph: ModelGraph, axes: Axes, batch: tuple[int, ...], cutting: Mesh) -> None:
    """Raise ConfigError where the model keeps rows together, ``x.reshape(3, 4, -1)`` of 12 rows, in groups that the ranks do not divide."""
    parts = math.prod(cutting.length(name) for name in cutting.names if name in ROWS)
    rows = graph.batch_size
    for size in (axes.sizes[axis] for axis in batch):
        if isinstance(size, int) and size % parts:
            raise ConfigError(
                f"the model keeps the {rows} rows of the batch together in {size} groups, which {parts} ranks cannot share equally",
                remedy="use as many replicas as divide the groups; pass inputs whose first dimension is the batch",
            )


def _with_divisible_batch(graph: ModelGraph, cutting: Mesh) -> ModelGraph:
    """Return the graph with a batch size that the mesh divides: a symbolic batch is rounded up, a fixed one must be divisible."""
    parts = math.prod(cutting.length(name) for name in cutting.names if name in ROWS)
    rows = graph.batch_size
    if rows % parts == 0:
        return graph
    if graph.batch is None:
        raise ConfigError(
            f"a batch of {rows} rows cannot be cut into {parts} equal parts, and this model was traced for that size alone",
            remedy=f"pass example inputs with a multiple of {parts} rows",
        )
    return dataclasses.replace(graph, batch_size=rows + -rows % parts)


# -- a model under the dimensions of a mesh that cut axes --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MeshCut:
    """A model under the dimensions of a mesh that cut axes.

    Attributes:
        assigned: mesh dimension -> the axes that it cuts.
        layouts: how every value lies.
        beside: whether the tensor dimension cuts the sequence, too, where it cuts nothing else (Korthikanti et al., "Reducing activation
            recomputation in large transformer models", 2022); where there is no tensor dimension, whether that of the replicas cuts
            weights that are larger than activations (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014);
            where there are tiles, whether these cut other axes where space is not worth its halos (``space_choice``).
        gap: of the choice of axes, by its own prices; None where there was none.
        halos: the halo strategy of each segment of calls.
    """

    part: ModelPart
    axes: Axes
    names: tuple[str, ...]
    assigned: Mapping[str, tuple[int, ...]]
    layouts: Layouts
    beside: bool = False
    gap: float | None = None
    halos: tuple[HaloSegment, ...] = ()

    def in_whole_model(self) -> tuple[tuple[str, str], ...]:
        """What is cut as a plan says it: (axis of the whole model, mesh dimension).

        Where all of a name are cut in the folded model, so are those of all blocks.
        """
        of, cutting = self.part.of, self.part.cutting
        axes, names, assigned = self.axes, self.names, self.assigned
        by_folded = {name: short_names(each, names) for name, each in assigned.items()}
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
        return tuple((axis, name) for name in cutting.names for axis in short_names(assigned[name], names))

    def _is_numbered_alike(self, axis: str) -> bool:
        """Whether an axis has the same number in the whole model: none of its name is left out there, with the copies of a block."""
        return axis.partition("[")[0] not in self._names_in_block

    @cached_property
    def _names_in_block(self) -> frozenset[str]:
        copies = self.part.of.unfolding.copies if self.part.of.unfolding is not None else {}
        tensors = (tensor for node in copies for tensor in self.axes.tensors.get(node, ()))
        return frozenset(self.names[axis].partition("[")[0] for tensor in tensors for each in tensor for axis in each)


def _counterparts(folded: Axes, whole: Axes, of: PartGraph) -> dict[int, dict[int, None]]:
    """Return axis of the folded graph -> the axes of the whole one that it stands for, as an ordered set."""
    counterparts: dict[int, dict[int, None]] = {}
    for node, tensors in folded.tensors.items():
        for copied_tensors in (whole.tensors[name] for name in of.copies(node)):
            for tensor, copied_tensor in zip(tensors, copied_tensors, strict=True):
                for dimension, copied_dimension in zip(tensor, copied_tensor, strict=True):
                    for axis, counterpart in zip(dimension, copied_dimension, strict=False):
                        counterparts.setdefault(axis, {})[counterpart] = None
    return counterparts
