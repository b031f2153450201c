"""Lower a normalized graph and a plan to the programs of all ranks: the phases, in their order.

    ModelGraph, Plan
      return_loss          the loss is returned alone, if a step reads nothing else
      mean_to_sum          means over the batch become partial sums, if microbatches or ranks split the batch
      tile                 regions are computed tile by tile on one device, if the plan says so
      functional_rng       random draws become values of the graph, if ranks compute parts of them
      boundary_layouts     values between stages are replicated, if stages have submeshes of different shapes
      shard                each rank's graph, with its collectives
      split                each pipeline's stages
      differentiate        their training graphs
      once_a_step          ZeRO gathers parameters, and scatters gradients, once for all microbatches
      emit                 the programs of one pipeline, by its schedule
      place                the programs of all ranks on the mesh
      verify               the proof that these fit together

``PHASES`` is the only place that knows this order. ``Lowerer`` runs the phases and caches their results. Before them,
``passes.normalize.order.NORMALIZE`` turns an exported graph into a ``ModelGraph``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias, cast

import torch

from passes.analysis.layout_facts import LayoutFacts
from passes.autograd.deduplicate import form_of, renamed
from passes.autograd.joint_from_regions import differentiate_regions, tracked_outputs
from passes.autograd.partition_joint import DifferentiatedStage, split_backward
from passes.autograd.precision.own_casts import with_own_casts, with_shared_casts
from passes.autograd.precision.wide_sums import with_wide_sums
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, SplitModel, cut_stages
from passes.emit.inline_stages import Inline, inline_stages
from passes.emit.once_a_step import communicating_once
from passes.emit.place_on_mesh import Gradients, arrange_collectives, place_on_mesh
from passes.emit.programs import LossForm, emit_backward, emit_call, emit_forward, emit_train_step
from passes.emit.random_state import share_state
from passes.emit.sums_in_type import sum_gradients_in
from passes.graph.buffer_writes import verify_writes
from passes.graph.lazy_graph_module import gc_paused
from passes.graph.program_printer import ProgramModule
from passes.ir.graph import ModelGraph, Results
from passes.ir.mesh import GATHERED_ONCE, owning_pipelines, pipelines
from passes.ir.phase import Phase, PhaseRunner
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.normalize.loss_alone import return_only
from passes.normalize.randomness.functional_rng import split_randomness
from passes.normalize.randomness.fused_attention import fuse_attention
from passes.spmd.mean_to_sum import with_totals
from passes.spmd.shard_stages import StagedCut, StoredLayouts, cut_by_plan, facts_to_cut
from passes.stages.boundary_layouts import mark_boundaries
from passes.stages.split import StageGraph
from passes.tiling.backward import differentiate_tiles, tiles_requiring_gradient
from passes.tiling.rewrite import tiled_graph
from passes.tiling.steps import is_streamed
from passes.verify.programs import verify

Kind: TypeAlias = Literal["train_step", "forward", "training_forward", "backward", "call"]
"""Kind of a set of programs: a training step; a forward; a forward that also returns what ``backward`` takes; that backward; both."""


@dataclass(frozen=True)
class Target:
    """The programs that a plan is lowered to.

    Attributes:
        kept: the indices of the results that are returned, for a step that reads no others; None: all are.
        in_parts: whether means over the batch that the model returns are computed as partial sums.
        results: whether ranks that shard the batch return whole results or those of their own rows.
        rows: whether the mesh shards the batch; False replicates it, for a batch that the mesh does not divide.
        stored: layouts of parameters, buffers and constants that ranks store already; ``shard`` chooses those that are missing.
        devices: of each rank: graphs name the device that they create tensors on.
        pipelines: ``"all"``, or ``"kinds"``: one pipeline of each kind (``Lowered.last_of_kind``), for programs that are only inspected.
        differentiation: the outputs (by their names in the first pipeline), inputs and parameters to differentiate; None: nothing.
        share: whether stages that compute the same share one training graph, with the names of one of them: enough to inspect costs.
        kind: what the programs do.
        n_microbatches: of a step, a forward or a backward.
        schedule: of a training step.
        loss: of a training step.
        given: for a backward, the outputs that are given a gradient other than zero, by their names in the first pipeline.
        gradients: whether gradients of parameters are summed over ranks.
        inputs: ``"global"`` gathers results that are sharded by rows; ``"local"`` leaves them on the ranks that have the rows.
        inline: which calls of stages that communicate are inlined in programs of a mesh.
        fused_attention: whether attention with dropout that no mesh dimension shards is a fused kernel, as on accelerators: the programs
            are timed, and cannot run.
    """

    kept: tuple[int, ...] | None = None
    in_parts: bool = False
    results: Results = "rows"
    rows: bool = True
    stored: StoredLayouts | None = None
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
    inline: Inline = "all"
    fused_attention: bool = False


@dataclass(frozen=True)
class Lowered:
    """The state of lowering: the results of the phases so far.

    Attributes:
        plan: the plan to lower.
        graph: the whole model.
        cut: the sharded model.
        stages: (pipeline, replica) -> the stages for the ranks with that index in round-robin stages; equal ones are one object.
        programs: (pipeline, program) of each rank: a rank of its pipeline, or after ``place``, a rank of the mesh.
        known_facts: cache of the facts that all cuts of a graph read, by its id, for all targets.
        shared: cache of ``stages`` for all targets, by inputs: pipelines with equal graphs on equal devices share one object.
    """

    plan: Plan
    graph: ModelGraph
    cut: StagedCut | None = None
    stages: Mapping[tuple[int, int], SplitModel] = field(default_factory=dict)
    programs: tuple[tuple[int, Program], ...] = ()
    known_facts: dict[int, LayoutFacts] = field(default_factory=dict, compare=False, repr=False)
    shared: dict[Hashable, SplitModel] = field(default_factory=dict, compare=False, repr=False)

    @property
    def parts(self) -> tuple[tuple[ModelGraph, ...], ...]:
        """For each pipeline, the sharded graphs that the stages of its ranks are split from, by pipeline position."""
        assert self.cut is not None
        return self.cut.parts

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """For each pipeline its ranks, by pipeline position."""
        return pipelines(self.plan.grid)

    @cached_property
    def last_of_kind(self) -> tuple[int, ...]:
        """For each pipeline, the last pipeline with the same graphs, whose programs represent it.

        It takes as long as the slowest of its kind: where only the first rank of a group adds a value, the others fill zeros.
        With per-stage submeshes, equal graphs may communicate with different ranks, so that each pipeline represents itself.
        """
        if self.plan.grid.widths:
            return tuple(range(len(self.parts)))
        kinds = [tuple(map(id, graphs)) for graphs in self.parts]
        last = {kind: pipeline for pipeline, kind in enumerate(kinds)}
        return tuple(last[kind] for kind in kinds)


def return_loss(lowered: Lowered, target: Target) -> Lowered:
    """Return the graph of the loss alone, if the model returns it and a step reads nothing else."""
    return lowered if target.kept is None else replace(lowered, graph=return_only(lowered.graph, target.kept))


def mean_to_sum(lowered: Lowered, target: Target) -> Lowered:
    """Compute means over the batch that the model returns as partial sums."""
    return replace(lowered, graph=with_totals(lowered.graph)) if target.in_parts else lowered


def tile(lowered: Lowered, _: Target) -> Lowered:
    """Compute the plan's tiled regions tile by tile, on one device."""
    plan = lowered.plan
    return replace(lowered, graph=tiled_graph(lowered.graph, plan.tiles, plan.tile_budget)) if plan.tiles else lowered


def functional_rng(lowered: Lowered, target: Target) -> Lowered:
    """Make random draws values of the graph, of which each rank takes its part; keep unsharded attention fused if asked for."""
    if lowered.plan.grid.cutting.size > 1:
        return replace(lowered, graph=split_randomness(lowered.graph))
    return replace(lowered, graph=fuse_attention(lowered.graph)) if target.fused_attention else lowered


def boundary_layouts(lowered: Lowered, _: Target) -> Lowered:
    """Replicate values between stages over the ranks of both stages, if their submeshes have different shapes."""
    plan = lowered.plan
    return replace(lowered, graph=mark_boundaries(lowered.graph, plan.first_nodes)) if plan.grid.widths else lowered


def shard(lowered: Lowered, target: Target) -> Lowered:
    """Shard the model over the mesh."""
    known, key = lowered.known_facts, id(lowered.graph)
    if key not in known:
        known[key] = facts_to_cut(lowered.graph, lowered.plan)  # keeps the graph, and so its id
    return replace(lowered, cut=cut_by_plan(known[key], lowered.plan, target.results, rows=target.rows, stored=target.stored))


def split(lowered: Lowered, target: Target) -> Lowered:
    """Split the graphs of each pipeline into stages, for the devices of each replica of round-robin stages."""
    stages: dict[tuple[int, int], SplitModel] = {}
    n_replicas = max(map(len, lowered.plan.stage_ranks))
    for pipeline in sorted({0, *_pipelines_to_lower(lowered, target)}):  # names of values are those in the first
        graphs = lowered.parts[pipeline]
        for replica in range(n_replicas):
            devices = _stage_devices(lowered, target, pipeline, replica)
            key = ("split", tuple(map(id, graphs)), devices)  # all targets of one model have the same holders
            if key not in lowered.shared:
                lowered.shared[key] = cut_stages(graphs, lowered.plan, devices, target.stored.holders if target.stored else {})
            stages[pipeline, replica] = lowered.shared[key]
    return replace(lowered, stages=stages)


def _pipelines_to_lower(lowered: Lowered, target: Target) -> list[int]:
    """Return the indices of all pipelines, or of the last pipeline of each kind, as the target asks."""
    indices = range(len(lowered.pipelines))
    return [index for index in indices if target.pipelines == "all" or lowered.last_of_kind[index] == index]


def _stage_devices(lowered: Lowered, target: Target, pipeline: int, replica: int) -> tuple[torch.device, ...]:
    """Return the device of each stage of a pipeline for one replica; a stage with fewer replicas uses them in sequence."""
    ranks = lowered.pipelines[pipeline]
    return tuple(target.devices[ranks[positions[replica % len(positions)]]] for positions in lowered.plan.stage_ranks)


def differentiate(lowered: Lowered, target: Target) -> Lowered:
    """Add the training graphs of all stages."""
    if target.differentiation is None:
        return lowered
    recompute, reduce_dtype = cast(Recompute, lowered.plan.recompute), _reduce_dtype(lowered.plan)
    training: dict[tuple[int, int], SplitModel] = {}
    for pipeline_and_replica, stages in lowered.stages.items():
        outputs = _names_in_pipeline(lowered, stages, target.differentiation.outputs)
        differentiation = replace(target.differentiation, outputs=outputs)
        key = ("differentiate", id(stages), differentiation, target.share)
        if key not in lowered.shared:
            lowered.shared[key] = differentiate_stages(stages, differentiation, recompute, share=target.share, reduce_dtype=reduce_dtype)
        training[pipeline_and_replica] = lowered.shared[key]
    return replace(lowered, stages=training)


def _reduce_dtype(plan: Plan) -> torch.dtype | None:
    return None if plan.reduce_dtype is None else cast(torch.dtype, getattr(torch, plan.reduce_dtype))


def _names_in_pipeline(lowered: Lowered, stages: SplitModel, outputs: frozenset[str]) -> frozenset[str]:
    """Translate names of model outputs in the first pipeline to their names in the pipeline of ``stages``.

    Shards of different sizes need different calls, so that the same name may even stand for different values.
    """
    pairs = zip(lowered.stages[0, 0].graph.outputs, stages.graph.outputs, strict=True)
    names = {first.node: own.node for first, own in pairs if first.node is not None and own.node is not None}
    return frozenset(names[name] for name in outputs)


def once_a_step(lowered: Lowered, target: Target) -> Lowered:
    """Gather the parameters of ZeRO, and scatter their gradients, once for all microbatches, if there are several."""
    if target.n_microbatches == 1 or lowered.plan.tiles or not any(name in GATHERED_ONCE for name in lowered.plan.grid.names):
        return lowered
    found: dict[tuple[int, int], SplitModel] = {}
    for pipeline_and_replica, stages in lowered.stages.items():
        key = ("once a step", id(stages))
        if key not in lowered.shared:
            lowered.shared[key] = communicating_once(stages)
        found[pipeline_and_replica] = lowered.shared[key]
    return replace(lowered, stages=found)


def emit(lowered: Lowered, target: Target) -> Lowered:
    """Emit the programs of each pipeline. Replicas of round-robin stages on other devices need graphs that name these devices."""
    replica_of = {position: replica for positions in lowered.plan.stage_ranks for replica, position in enumerate(positions)}
    owner = owning_pipelines(lowered.plan.grid)
    programs: list[tuple[int, Program]] = []
    for pipeline in _pipelines_to_lower(lowered, target):
        ranks = lowered.pipelines[pipeline]
        devices = [target.devices[rank] for rank in ranks]
        own_target = replace(target, given=_names_in_pipeline(lowered, lowered.stages[pipeline, 0], target.given))
        stage_devices = {replica: _stage_devices(lowered, target, pipeline, replica) for replica in sorted(set(replica_of.values()))}
        emitted: dict[tuple[torch.device, ...], tuple[Program, ...]] = {}
        for replica, key in stage_devices.items():
            if key not in emitted:
                emitted[key] = _emit_pipeline(lowered.stages[pipeline, replica], own_target, devices)
        by_position = [emitted[stage_devices[replica]][position] for position, replica in sorted(replica_of.items())]
        programs += [(pipeline, program) for program in by_position if owner[ranks[program.rank]] == pipeline]
    loss_rank = lowered.pipelines[0][lowered.stages[0, 0].collectors[0]] if target.kind == "train_step" and target.loss.draws else None
    share_state([program for _, program in programs], tuple(range(lowered.plan.n_ranks)), loss_rank)
    return replace(lowered, programs=tuple(programs))


def _emit_pipeline(stages: SplitModel, target: Target, devices: Sequence[torch.device]) -> tuple[Program, ...]:
    """Return the programs of one pipeline by pipeline position, given the device of each."""
    if target.kind == "train_step":
        assert target.schedule is not None
        return emit_train_step(stages, target.schedule, target.loss, devices)
    if target.kind == "call":
        return emit_call(stages, target.n_microbatches, devices)
    if target.kind == "backward":
        return emit_backward(stages, target.n_microbatches, target.given, devices)
    return emit_forward(stages, target.n_microbatches, devices, training=target.kind == "training_forward")


def place(lowered: Lowered, target: Target) -> Lowered:
    """Place the programs of pipelines on the mesh: sums over ranks, peers by mesh rank, stages that communicate inlined."""
    placed = [_place_program(lowered, target, pipeline, program) for pipeline, program in lowered.programs]
    if (reduce_dtype := _reduce_dtype(lowered.plan)) is not None:
        for (pipeline, program), on_mesh in zip(lowered.programs, placed, strict=True):
            graph = lowered.parts[pipeline][program.rank]
            parameters = {node.name: node.meta["val"] for node in graph.graph.nodes if node.name in graph.parameters}
            assert isinstance(on_mesh.module, ProgramModule)
            sum_gradients_in(on_mesh.module, reduce_dtype, parameters)
    if len(lowered.parts) > 1 and not lowered.plan.tiles:
        arrange_collectives((program.rank, on_mesh) for (_, program), on_mesh in zip(lowered.programs, placed, strict=True))
    return replace(lowered, programs=tuple((pipeline, on_mesh) for (pipeline, _), on_mesh in zip(lowered.programs, placed, strict=True)))


def _place_program(lowered: Lowered, target: Target, pipeline: int, program: Program) -> Program:
    """Place one program of a pipeline on the mesh; a single unsharded pipeline stays, but for stages of tiles, which are inlined."""
    mesh, parts, ranks = lowered.plan.grid, lowered.parts, lowered.pipelines[pipeline]
    if lowered.plan.tiles:
        assert isinstance(program.module, ProgramModule)
        return replace(program, module=inline_stages(program.module, mesh, program.rank))
    if len(parts) == 1:
        return program
    return place_on_mesh(program, parts[pipeline][program.rank], mesh, ranks, target.gradients, target.inputs, inline=target.inline)


def prove(lowered: Lowered, target: Target) -> Lowered:
    """Prove that the programs of all ranks fit together.

    Raises:
        VerificationError: names the nodes.
    """
    if target.pipelines == "all":
        verify(sorted((program for _, program in lowered.programs), key=lambda program: program.rank))
    return lowered


PHASES: tuple[Phase[Lowered, Target], ...] = (
    Phase("return_loss", return_loss, ("kept",)),
    Phase("mean_to_sum", mean_to_sum, ("in_parts",)),
    Phase("tile", tile),
    Phase("functional_rng", functional_rng, ("fused_attention",)),
    Phase("boundary_layouts", boundary_layouts),
    Phase("shard", shard, ("results", "rows", "stored")),
    Phase("split", split, ("devices", "pipelines")),
    Phase("differentiate", differentiate, ("differentiation", "share")),
    Phase("once_a_step", once_a_step, ("n_microbatches",)),
    Phase("emit", emit, None),
    Phase("place", place, None),
    Phase("verify", prove, None),
)
"""The phases in order, each with the fields of ``Target`` that it reads; None: not cached, as ``place`` rewrites programs in place."""


class Lowerer:
    """Runs the phases on ``start``, a model and a plan. A phase runs once for all targets that agree in the fields that it reads.

    ``tell``: called with the number and name of a phase before it runs (``PhaseRunner``).
    """

    def __init__(self, start: Lowered, tell: Callable[[int, str], None] | None = None) -> None:
        self._runner = PhaseRunner(PHASES, start, check_lowered, tell)

    @gc_paused()
    def after(self, phase: str, target: Target) -> Lowered:
        """Return the state after a phase, for a target."""
        return self._runner.after(phase, target)

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the verified programs of a target, ordered by rank."""
        verified = (program for _, program in self.after("verify", target).programs)
        return tuple(sorted(verified, key=lambda program: program.rank))


def check_lowered(lowered: Lowered, phase: str) -> None:
    """Verify the model's graph after a phase; from ``shard`` on, phases verify the graphs that they write themselves.

    Raises:
        VerificationError: a call writes memory other than that of buffers.
    """
    if lowered.cut is None:
        lowered.graph.graph.lint()
        verify_writes(lowered.graph.graph, phase, owns_memory=bool(lowered.plan.tiles))


def differentiate_stages(
    lowered: SplitModel,
    differentiation: Differentiation,
    recompute: Recompute,
    *,
    share: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> SplitModel:
    """Add the training graphs, from the last stage to the first.

    A stage's backward takes the gradient of an output only if a later stage or the loss gives one, which is known once those are
    differentiated. So None stays None from the loss back to the parameters, as in eager PyTorch.

    Args:
        share: whether stages that compute the same share one graph, with the names of one of them: enough to inspect costs.
        reduce_dtype: type in which gradients of parameters are summed over ranks; None: that of the parameters.
    """
    lowered = replace(lowered, stages=tuple(map(with_own_casts, lowered.stages)))
    differentiable = differentiation.parameters | differentiation.inputs
    requiring = values_requiring_gradient(lowered, differentiable)
    with_gradient = set(differentiation.outputs)
    training: list[DifferentiatedStage] = []
    known: dict[Hashable, tuple[StageGraph, DifferentiatedStage]] = {}
    for stage in reversed(lowered.stages):
        inputs = _differentiable_inputs(stage, differentiable | requiring)
        form = form_of(stage, inputs, with_gradient & requiring) if share else stage.index
        if form in known:
            first_stage, first_graphs = known[form]
            graphs = renamed(first_graphs, first_stage, stage)
        else:
            outputs = frozenset(name for name in stage.outputs if name in with_gradient and name in requiring)
            if is_streamed(stage.module.graph):
                graphs = differentiate_tiles(stage, inputs, outputs, recompute)
            else:
                joint = with_shared_casts(differentiate_regions(stage, inputs, outputs, lowered.templates))
                joint = with_wide_sums(joint, reduce_dtype)
                graphs = split_backward(joint, recompute)
            known[form] = stage, graphs
        training.insert(0, graphs)
        with_gradient.update(graphs.arguments_with_gradient)
    return replace(lowered, training=tuple(training), differentiation=differentiation, requiring=requiring)


def _differentiable_inputs(stage: StageGraph, requiring: frozenset[str]) -> frozenset[str]:
    """Return the placeholders of a stage (parameters, model inputs, values of earlier stages) that require a gradient."""
    return frozenset(name for name in stage.bound + stage.arguments if name in requiring)


def values_requiring_gradient(lowered: SplitModel, differentiable: frozenset[str]) -> frozenset[str]:
    """Return the outputs of stages that autograd would track, found by running each different stage on fake tensors."""
    requiring: set[str] = set()
    tracked_by_form: dict[Hashable, tuple[bool, ...]] = {}
    for stage in lowered.stages:
        if is_streamed(stage.module.graph):
            requiring |= tiles_requiring_gradient(stage, differentiable)
            continue
        inputs = _differentiable_inputs(stage, differentiable | requiring)
        form = form_of(stage, inputs, ())
        if form not in tracked_by_form:
            tracked_names = tracked_outputs(stage, inputs, lowered.templates)
            tracked_by_form[form] = tuple(name in tracked_names for name in stage.outputs)
        requiring.update(name for name, is_tracked in zip(stage.outputs, tracked_by_form[form], strict=True) if is_tracked)
    return frozenset(requiring)
