"""Cut a model as a plan says: for all stages alike, or, where these are of unlike width, once for each width.

plan                                    of_places
pipeline 2 x tensor 2                   one cut over tensor 2, for both stages
pipeline 2 x tensor 2 + 1               a cut over tensor 2, for stage 0; the whole model, for stage 1

Every cut is of the whole model; each stage is taken from the cut that is for it.

From a plan to the graphs of every stage: split, then differentiate from the last stage to the first.

The order matters: a stage's backward takes the gradient of an output only if some later stage (or the loss) gives one, which is known
once those have been differentiated. So None stays None from the loss back to the parameters, as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from passes.analysis.axis_names import axes_named, axis_names
from passes.analysis.merge_axes import find_axes_to_cut
from passes.autograd.deduplicate import form_of, renamed
from passes.autograd.joint_from_regions import differentiate_regions, tracked_outputs
from passes.autograd.partition_joint import DifferentiatedStage, split_backward
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, LoweredStages
from passes.graph.lazy_graph_module import nothing_collected
from passes.ir.comm.halo_strategy import ends_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph, Results
from passes.ir.layout import BATCH
from passes.ir.mesh import ROWS, STORED, Mesh, pipelines
from passes.ir.plan import Plan
from passes.normalize.functional_rng import split_randomness
from passes.spmd.shard_graph import AxisCut, CutModel, cut_axes
from passes.spmd.shards import Block
from passes.stages.boundary_layouts import with_borders
from passes.stages.split import StageGraph, split_stages
from passes.tiling.backward import differentiate_tiles, tiles_requiring_gradient
from passes.tiling.steps import is_streamed

__all__ = ["StagedCut", "cut_by_plan", "cut_stages", "differentiate_stages", "values_requiring_gradient"]


@dataclass(frozen=True)
class StagedCut:
    """A model cut for the stages of a plan.

    Attributes:
        mesh: of all ranks.
        of_places: for each place along the pipeline, the cut that its stages are taken from; equal ones are one object.
    """

    mesh: Mesh
    of_places: tuple[CutModel, ...]

    @property
    def widest(self) -> CutModel:
        """The cut over all ranks of ``mesh.cutting``."""
        return max(self.of_places, key=lambda cut: cut.cut.mesh.size)

    @property
    def is_cut(self) -> bool:
        """Whether ranks compute parts."""
        return self.mesh.cutting.size > 1

    @cached_property
    def parts(self) -> tuple[tuple[ModelGraph, ...], ...]:
        """For each pipeline (``passes.ir.mesh.pipelines``) the graph of its part of the model, for each place along it."""
        return tuple(
            tuple(cut.parts[self._number(place, rank)] for place, (cut, rank) in enumerate(zip(self.of_places, ranks, strict=True)))
            for ranks in pipelines(self.mesh)
        )

    def blocks(self, place: int, rank: int) -> Mapping[str, Block]:
        """For each parameter, buffer and constant, the block that a rank holds which stands at a place along the pipeline."""
        return self.of_places[place].blocks[self._number(place, rank)]

    def _number(self, place: int, rank: int) -> int:
        """Which of the parts of a place a rank has."""
        return self.mesh.cutting_at(place).rank(self.mesh.coordinate(rank))


@nothing_collected()
def cut_by_plan(graph: ModelGraph, plan: Plan, results: Results = "rows", *, rows: bool = True, like: StagedCut | None = None) -> StagedCut:
    """Cut a model.

    Args:
        results: what ranks return.
        rows: False leaves the batch whole, for one that the mesh does not divide: every rank then computes all of it.
        like: a cut by the same plan, as which ranks hold parameters, buffers and constants; None: as the plan's cut wants them.
    """
    mesh = plan.grid
    graph = split_randomness(graph) if mesh.cutting.size > 1 else graph
    graph = with_borders(graph, plan.first_nodes) if mesh.widths else graph
    axes = find_axes_to_cut(graph, mesh)
    names, cuts = axis_names(graph, axes), dict[Mesh, CutModel]()
    wide, overlapped = ends_of(plan.halos, "recompute"), ends_of(plan.halos, "overlap")
    n_places = len(pipelines(mesh)[0])
    for place, over in ((place, mesh.cutting_at(place)) for place in range(n_places)):
        if over in cuts:
            continue
        assigned: dict[str, tuple[int, ...]] = dict.fromkeys(over.names, ())
        for name, dimension in plan.axes:
            if dimension in assigned and (rows or dimension not in ROWS or not name.startswith(BATCH)):
                assigned[dimension] += axes_named(name, names)
        cut_rows = tuple(name for name in over.names if name in ROWS) if rows else ()
        stored = tuple(name for name in over.names if name in STORED)
        cut = AxisCut(over, assigned, cut_rows, stored, plan.batchnorm == "local", wide, overlapped)
        held = like.of_places[place].layouts.stored if like is not None and over.size > 1 else None
        cuts[over] = cut_axes(graph, axes, cut, results, held)
    return StagedCut(mesh, tuple(cuts[mesh.cutting_at(place)] for place in range(n_places)))


# -- from a plan to the graphs of every stage --------------------------------------------------------------------------------------


def cut_stages(parts: Sequence[ModelGraph], plan: Plan, devices: Sequence[torch.device]) -> LoweredStages:
    """Cut a part of the model into the plan's stages.

    Args:
        parts: for each place along the pipeline, what it computes a stage of.
        devices: for each stage, where it runs.

    Raises:
        ConfigError: a stage reads what no stage sends: those of unlike width disagree on what each computes for itself.
    """
    split = {id(part): split_stages(part, plan.first_nodes, devices) for part in {id(part): part for part in parts}.values()}
    stages = tuple(split[id(parts[stage.ranks[0]])][index] for index, stage in enumerate(plan.stages))
    sent = {name for stage in stages for name in stage.outputs}
    for stage in stages:
        if missing := [name for name in stage.values if name not in sent]:
            raise ConfigError(
                f"stage {stage.index} reads {missing[0]}, which the stages in front of it, of another width, do not send",
                remedy="give all stages as many ranks of the tensor dimension",
            )
    of_stages = tuple(parts[stage.ranks[0]] for stage in plan.stages)
    return LoweredStages(of_stages[-1], stages, plan.stage_ranks, parts=of_stages if len(split) > 1 else ())


def differentiate_stages(
    lowered: LoweredStages, differentiation: Differentiation, recompute: Recompute, *, share: bool = False
) -> LoweredStages:
    """Add the training graphs.

    Args:
        share: whether stages that compute alike have one graph, whose names are those of one of them: enough to look at costs.
    """
    differentiable = differentiation.parameters | differentiation.inputs
    requiring = values_requiring_gradient(lowered, differentiable)
    given = set(differentiation.outputs)
    training: list[DifferentiatedStage] = []
    known: dict[Hashable, tuple[StageGraph, DifferentiatedStage]] = {}
    for stage in reversed(lowered.stages):
        wanted = frozenset(name for name in stage.bound + stage.arguments if name in differentiable or name in requiring)
        form = form_of(stage, wanted, given & requiring) if share else stage.index
        if form in known:
            other, found = known[form]
            training.insert(0, renamed(found, other, stage))
            given.update(training[0].arguments_with_gradient)
            continue
        of_outputs = frozenset(name for name in stage.outputs if name in given and name in requiring)
        if is_streamed(stage.module.graph):
            training.insert(0, differentiate_tiles(stage, wanted, of_outputs, recompute))
        else:
            joint = differentiate_regions(stage, wanted, of_outputs, lowered.templates)
            training.insert(0, split_backward(joint, recompute))
        known[form] = stage, training[0]
        given.update(training[0].arguments_with_gradient)
    return replace(lowered, training=tuple(training), differentiation=differentiation, requiring=requiring)


def values_requiring_gradient(lowered: LoweredStages, differentiable: frozenset[str]) -> frozenset[str]:
    """Which values between stages autograd would track, found by running the stages on fake tensors."""
    requiring: set[str] = set()
    known: dict[Hashable, tuple[bool, ...]] = {}
    for stage in lowered.stages:
        if is_streamed(stage.module.graph):
            requiring |= tiles_requiring_gradient(stage, differentiable)
            continue
        wanted = frozenset(name for name in stage.bound + stage.arguments if name in differentiable or name in requiring)
        form = form_of(stage, wanted, ())
        if form not in known:
            found = tracked_outputs(stage, wanted, lowered.templates)
            known[form] = tuple(name in found for name in stage.outputs)
        requiring.update(name for name, tracked in zip(stage.outputs, known[form], strict=True) if tracked)
    return frozenset(requiring)
