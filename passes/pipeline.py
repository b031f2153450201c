"""From a normalized graph and a plan to the programs of all ranks: the phases, in their order.

    ModelGraph, Plan
      mean_to_sum          means over the batch become sums of parts, where microbatches or ranks share the batch
      tile                 regions become tiles in sequence on one device, where the plan says so
      functional_rng       draws become values of the graph, where ranks compute parts of them
      boundary_layouts     values that cross stages lie whole, where stages have submeshes of unlike shape
      shard                each rank's graph, with its collectives
      split                each pipeline's stages
      differentiate        their training graphs
      emit                 the programs of one pipeline, by its schedule
      place                the programs of all ranks on the mesh
      verify               the proof that these fit together

``PHASES`` is the order; nothing else knows it. ``Lowerer`` runs it and keeps what it made; ``passes.normalize.order.NORMALIZE`` is the
order in front of it, from an exported graph to a ``ModelGraph``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias, cast

import torch

from passes.autograd.deduplicate import form_of, renamed
from passes.autograd.joint_from_regions import differentiate_regions, tracked_outputs
from passes.autograd.partition_joint import DifferentiatedStage, split_backward
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, LoweredStages, cut_stages
from passes.emit.inline_stages import inline_stages
from passes.emit.place_on_mesh import Gradients, arrange_collectives, place_on_mesh
from passes.emit.programs import LossForm, emit_backward, emit_forward, emit_train_step
from passes.graph.buffer_writes import verify_writes
from passes.graph.lazy_graph_module import gc_paused
from passes.graph.program_printer import ProgramModule
from passes.ir.graph import ModelGraph, Results
from passes.ir.mesh import homes, pipelines
from passes.ir.phase import Phase, PhaseRunner
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.normalize.randomness.functional_rng import split_randomness
from passes.spmd.mean_to_sum import with_totals
from passes.spmd.shard_stages import StagedCut, cut_by_plan
from passes.stages.boundary_layouts import mark_boundaries
from passes.stages.split import StageGraph
from passes.tiling.backward import differentiate_tiles, tiles_requiring_gradient
from passes.tiling.rewrite import streamed
from passes.tiling.steps import is_streamed
from passes.verify.programs import verify

__all__ = ["PHASES", "Kind", "Lowered", "Lowerer", "Target", "differentiate_stages", "values_requiring_gradient"]

Kind: TypeAlias = Literal["train_step", "forward", "training_forward", "backward"]
"""What a set of programs does: a training step; a forward; a forward that also returns what ``backward`` takes; that backward."""


@dataclass(frozen=True)
class Target:
    """Which programs of a plan are written.

    Attributes:
        in_parts: whether means over the batch that the model returns are sums of parts.
        results: what ranks return that cut the batch.
        rows: whether the mesh cuts the batch; it does not cut one that it does not divide.
        devices: for each rank, where it runs: graphs name the device that they create tensors on.
        pipelines: ``"all"``, or ``"kinds"``: one pipeline for each kind of part, for programs that are inspected and do not run.
        differentiation: what is differentiated, by the names of results in the first pipeline; None: nothing.
        share: whether stages that compute alike share one training graph, with the names of one of them: enough to inspect costs.
        kind: what the programs do.
        n_microbatches: of a step.
        schedule: of a training step.
        loss: of a training step.
        given: of a backward, the outputs whose gradients are not mere zeros, by their names in the first pipeline.
        gradients: whether gradients of parameters are summed over ranks.
        inputs: whether results that lie by rows are put together, or stay with the ranks that have the rows.
        inline: whether all stages that communicate are inlined in programs of a mesh.
    """

    in_parts: bool = False
    results: Results = "rows"
    rows: bool = True
    devices: tuple[torch.device, ...] = ()
    pipelines: Literal["all", "kinds"] = "all"
    differentiation: Differentiation | None = None
    share: bool = False
    kind: Kind = "forward"
    n_microbatches: int = 1
    schedule: Schedule | None = None
    loss: LossForm = field(default_factory=LossForm)
    given: frozenset[str] = frozenset()
    gradients: Gradients = "sum"
    inputs: Literal["global", "local"] = "global"
    inline: bool = True


@dataclass(frozen=True)
class Lowered:
    """A model on its way from a plan to programs: what the phases so far have made.

    Attributes:
        plan: what was decided.
        graph: the whole model.
        held: another sharding by the same plan, as which ranks hold parameters, buffers and constants; None: as this one wants them.
        cut: the model, sharded.
        stages: (pipeline, number of a rank among those that share a stage) -> the stages for such ranks; equal ones are one object.
        programs: of the pipelines, each with the number of its pipeline; after ``place``, of all ranks of the mesh.
        shared: stages by what they were made from, for all targets: pipelines with equal parts on equal devices have the same object.
    """

    plan: Plan
    graph: ModelGraph
    held: StagedCut | None = None
    cut: StagedCut | None = None
    stages: Mapping[tuple[int, int], LoweredStages] = field(default_factory=dict)
    programs: tuple[tuple[int, Program], ...] = ()
    shared: dict[Hashable, LoweredStages] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parts(self) -> tuple[tuple[ModelGraph, ...], ...]:
        """For each pipeline, the graphs that its ranks compute stages of."""
        assert self.cut is not None
        return self.cut.parts

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """For each pipeline its ranks, in the order of its places."""
        return pipelines(self.plan.grid)

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """For each pipeline the first that computes equal parts: its programs stand for the other's.

        Neighbours of a stage with a submesh of another shape send to unlike ranks: there each stands for itself.
        """
        first: dict[tuple[int, ...], int] = {}
        kinds = (tuple(map(id, parts)) for parts in self.parts)
        return tuple(number if self.plan.grid.widths else first.setdefault(kind, number) for number, kind in enumerate(kinds))


def mean_to_sum(lowered: Lowered, target: Target) -> Lowered:
    """Let means over the batch that the model returns be sums of parts."""
    return replace(lowered, graph=with_totals(lowered.graph)) if target.in_parts else lowered


def tile(lowered: Lowered, _: Target) -> Lowered:
    """Let regions be computed tile by tile on one device."""
    plan = lowered.plan
    return replace(lowered, graph=streamed(lowered.graph, plan.tiles, plan.tile_budget)) if plan.tiles else lowered


def functional_rng(lowered: Lowered, _: Target) -> Lowered:
    """Let what is drawn be a value of the graph of which a rank takes its part."""
    return replace(lowered, graph=split_randomness(lowered.graph)) if lowered.plan.grid.cutting.size > 1 else lowered


def boundary_layouts(lowered: Lowered, _: Target) -> Lowered:
    """Let values that cross between stages with submeshes of unlike shape lie whole on the ranks of both."""
    plan = lowered.plan
    return replace(lowered, graph=mark_boundaries(lowered.graph, plan.first_nodes)) if plan.grid.widths else lowered


def shard(lowered: Lowered, target: Target) -> Lowered:
    """Shard the model over the mesh."""
    return replace(lowered, cut=cut_by_plan(lowered.graph, lowered.plan, target.results, rows=target.rows, like=lowered.held))


def split(lowered: Lowered, target: Target) -> Lowered:
    """Split each pipeline's part of the model into stages."""
    stages: dict[tuple[int, int], LoweredStages] = {}
    for number in _pipelines_of(lowered, target):
        parts = lowered.parts[number]
        for replica in range(max(map(len, lowered.plan.stage_ranks))):
            devices = _stage_devices(lowered, target, number, replica)
            key = ("split", tuple(map(id, parts)), devices)
            if key not in lowered.shared:
                lowered.shared[key] = cut_stages(parts, lowered.plan, devices)
            stages[number, replica] = lowered.shared[key]
    return replace(lowered, stages=stages)


def _pipelines_of(lowered: Lowered, target: Target) -> Iterator[int]:
    """The pipelines that the target asks for."""
    numbers = range(len(lowered.pipelines))
    yield from numbers if target.pipelines == "all" else (number for number in numbers if lowered.first_of_kind[number] == number)


def _stage_devices(lowered: Lowered, target: Target, number: int, replica: int) -> tuple[torch.device, ...]:
    """For each stage of a pipeline, where one of its ranks runs."""
    ranks = lowered.pipelines[number]
    return tuple(target.devices[ranks[places[replica % len(places)]]] for places in lowered.plan.stage_ranks)


def differentiate(lowered: Lowered, target: Target) -> Lowered:
    """Add the training graphs of all stages."""
    wanted, recompute = target.differentiation, cast(Recompute, lowered.plan.recompute)
    if wanted is None:
        return lowered
    trained: dict[tuple[int, int], LoweredStages] = {}
    for position, stages in lowered.stages.items():
        own = replace(wanted, outputs=_outputs_here(lowered, stages, wanted.outputs))
        key = ("differentiate", id(stages), own, target.share)
        if key not in lowered.shared:
            lowered.shared[key] = differentiate_stages(stages, own, recompute, share=target.share)
        trained[position] = lowered.shared[key]
    return replace(lowered, stages=trained)


def _outputs_here(lowered: Lowered, stages: LoweredStages, outputs: frozenset[str]) -> frozenset[str]:
    """Return the names that results have in a pipeline's stages.

    Parts of unequal sizes need unequal calls, so that a result may have another name in each, or the name of another value.

    Args:
        outputs: results, by their names in the first pipeline.
    """
    pairs = zip(lowered.stages[0, 0].graph.outputs, stages.graph.outputs, strict=True)
    names = {first.node: own.node for first, own in pairs if first.node is not None and own.node is not None}
    return frozenset(names[name] for name in outputs)


def emit(lowered: Lowered, target: Target) -> Lowered:
    """Write the programs of each pipeline: those of ranks that share a stage from graphs of their own devices, where these differ."""
    replicas = {place: number for places in lowered.plan.stage_ranks for number, place in enumerate(places)}
    owner, programs = homes(lowered.plan.grid), []
    for number in _pipelines_of(lowered, target):
        ranks = lowered.pipelines[number]
        first: dict[tuple[torch.device, ...], int] = {}
        alike = {each: first.setdefault(_stage_devices(lowered, target, number, each), each) for each in sorted(set(replicas.values()))}
        devices = [target.devices[rank] for rank in ranks]
        given = _outputs_here(lowered, lowered.stages[number, 0], target.given)
        emitted = {each: _emitted(lowered.stages[number, each], replace(target, given=given), devices) for each in first.values()}
        own = (emitted[alike[replica]][place] for place, replica in sorted(replicas.items()))
        programs += [(number, program) for program in own if owner[ranks[program.rank]] == number]
    return replace(lowered, programs=tuple(programs))


def _emitted(stages: LoweredStages, target: Target, devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """The programs of one pipeline."""
    if target.kind == "train_step":
        assert target.schedule is not None
        return emit_train_step(stages, target.schedule, target.loss, devices)
    if target.kind == "backward":
        return emit_backward(stages, target.n_microbatches, target.given, devices)
    return emit_forward(stages, target.n_microbatches, devices, training=target.kind == "training_forward")


def place(lowered: Lowered, target: Target) -> Lowered:
    """Place the programs of pipelines on the mesh: sums over ranks, peers by their rank, stages that communicate inlined."""
    placed = [_placed(lowered, target, number, program) for number, program in lowered.programs]
    if len(lowered.parts) > 1 and not lowered.plan.tiles:
        arrange_collectives((program.rank, own) for (_, program), own in zip(lowered.programs, placed, strict=True))
    return replace(lowered, programs=tuple((number, own) for (number, _), own in zip(lowered.programs, placed, strict=True)))


def _placed(lowered: Lowered, target: Target, number: int, program: Program) -> Program:
    mesh, parts, ranks = lowered.plan.grid, lowered.parts, lowered.pipelines[number]
    if lowered.plan.tiles:
        assert isinstance(program.module, ProgramModule)
        return replace(program, module=inline_stages(program.module, mesh, program.rank))
    if len(parts) == 1:
        return program
    return place_on_mesh(program, parts[number][program.rank], mesh, ranks, target.gradients, target.inputs, inlined=target.inline)


def prove(lowered: Lowered, target: Target) -> Lowered:
    """Prove that the programs of all ranks fit together.

    Raises:
        VerificationError: names the nodes.
    """
    if target.pipelines == "all":
        verify(sorted((program for _, program in lowered.programs), key=lambda program: program.rank))
    return lowered


PHASES: tuple[Phase[Lowered, Target], ...] = (
    Phase("mean_to_sum", mean_to_sum, ("in_parts",)),
    Phase("tile", tile),
    Phase("functional_rng", functional_rng),
    Phase("boundary_layouts", boundary_layouts),
    Phase("shard", shard, ("results", "rows")),
    Phase("split", split, ("devices", "pipelines")),
    Phase("differentiate", differentiate, ("differentiation", "share")),
    Phase("emit", emit, None),
    Phase("place", place, None),
    Phase("verify", prove, None),
)
"""The order, and what of a target each phase reads. Programs are made anew, because ``place`` rewrites what ``emit`` wrote."""


class Lowerer:
    """Runs the phases on one model under one plan; what a phase made serves every target that agrees in what it reads.

    Args:
        start: the model and the plan.
    """

    def __init__(self, start: Lowered) -> None:
        self._runner = PhaseRunner(PHASES, start, check_lowered)

    @gc_paused()
    def after(self, phase: str, target: Target) -> Lowered:
        """The model after a phase, for a target."""
        return self._runner.after(phase, target)

    def programs(self, target: Target) -> tuple[Program, ...]:
        """The programs of a target, in the order of their ranks."""
        proved = (program for _, program in self.after("verify", target).programs)
        return tuple(sorted(proved, key=lambda program: program.rank))


def check_lowered(lowered: Lowered, phase: str) -> None:
    """Verify a graph that a phase has rewritten; later phases verify the graphs of parts and stages as they write them.

    Raises:
        VerificationError: a call writes memory that is no buffer's.
    """
    if lowered.cut is None:
        lowered.graph.graph.lint()
        verify_writes(lowered.graph.graph, phase, owns_memory=bool(lowered.plan.tiles))


# -- the training graphs of stages -------------------------------------------------------------------------------------------------


def differentiate_stages(
    lowered: LoweredStages, differentiation: Differentiation, recompute: Recompute, *, share: bool = False
) -> LoweredStages:
    """Add the training graphs, from the last stage to the first.

    The order matters: a stage's backward takes the gradient of an output only if some later stage (or the loss) gives one, which is known
    once those have been differentiated. So None stays None from the loss back to the parameters, as in eager PyTorch.

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
            trained = renamed(found, other, stage)
        else:
            of_outputs = frozenset(name for name in stage.outputs if name in given and name in requiring)
            if is_streamed(stage.module.graph):
                trained = differentiate_tiles(stage, wanted, of_outputs, recompute)
            else:
                trained = split_backward(differentiate_regions(stage, wanted, of_outputs, lowered.templates), recompute)
            known[form] = stage, trained
        training.insert(0, trained)
        given.update(trained.arguments_with_gradient)
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
