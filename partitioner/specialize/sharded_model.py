"""A traced model that is sharded by a plan, for one kind of batch: its stages, its training graphs, and the targets of its programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from partitioner.options.batch_rows import RowParts
from partitioner.schedules.catalog import schedule_of
from partitioner.schedules.forwards_first import forwards_first
from partitioner.specialize.request import Request, Variant
from passes.autograd.staged_model import Differentiation, SplitModel
from passes.emit.inline_stages import Inline
from passes.emit.programs import LossForm
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.pipeline import Lowerer, Target, values_requiring_gradient
from passes.spmd.shard_stages import StagedCut


class ShardedModel:
    """One traced graph, sharded by a plan for one kind of batch.

    Args:
        lowerer: runs the phases.
        target: the options of the phases up to the sharded model.
        plan: by which the model is lowered.
        devices: for each rank, where it runs.
        trainable: returns the placeholders of the parameters that get gradients, of all ranks: more of them when some are unfrozen.
        variant: the kind of batch.
    """

    def __init__(
        self,
        lowerer: Lowerer,
        target: Target,
        plan: Plan,
        devices: Sequence[torch.device],
        trainable: Callable[[], frozenset[str]],
        variant: Variant,
    ) -> None:
        self.lowerer, self._target = lowerer, replace(target, devices=tuple(devices), inputs=variant.inputs)
        self._sharded = lowerer.after("shard", self._target)
        self.plan = plan
        self.devices = tuple(devices)
        self.graph = self._sharded.parts[0][plan.stage_ranks[-1][0]]  # of a rank that has the model's results
        self.rows = RowParts(plan.grid if self.graph.part.n_row_parts > 1 else Mesh(()), variant.inputs)
        self._requiring: dict[tuple[frozenset[str], frozenset[str]], frozenset[str]] = {}
        self._trainable = trainable

    @property
    def cut(self) -> StagedCut:
        """The model, sharded."""
        assert self._sharded.cut is not None
        return self._sharded.cut

    @property
    def whole(self) -> ModelGraph:
        """The model before it is tiled or sharded."""
        return self.lowerer.after("mean_to_sum", self._target).graph

    def part(self, rank: int) -> ModelGraph:
        """Return the sharded graph that a rank's stages are split from."""
        number = next(number for number, ranks in enumerate(self._sharded.pipelines) if rank in ranks)
        return self._sharded.parts[number][self._sharded.pipelines[number].index(rank)]

    @property
    def collectors(self) -> frozenset[int]:
        """The ranks that have the model's results, and compute the loss: of each pipeline those of the last stage."""
        return frozenset(pipeline[place] for pipeline in self._sharded.pipelines for place in self.plan.stage_ranks[-1])

    @property
    def stages(self) -> SplitModel:
        """The stages of the first pipeline, without autograd."""
        return self.lowerer.after("split", replace(self._target, pipelines="kinds")).stages[0, 0]

    @property
    def pipelines(self) -> tuple[SplitModel, ...]:
        """The stages of every pipeline, without autograd."""
        stages = self.lowerer.after("split", self._target).stages
        return tuple(stages[number, 0] for number in range(len(self._sharded.parts)))

    def differentiation(self, outputs: frozenset[str], inputs: frozenset[str]) -> Differentiation:
        return Differentiation(outputs, inputs, self._trainable())

    def requiring(self, inputs: frozenset[str]) -> frozenset[str]:
        """Return the values between stages, and the returned ones, that autograd would track if ``inputs`` require gradients."""
        key = inputs, self._trainable()
        if key not in self._requiring:
            self._requiring[key] = values_requiring_gradient(self.stages, frozenset[str]().union(*key))
        return self._requiring[key]

    def everything(self, inputs: frozenset[str]) -> Differentiation:
        """Return the differentiation of every result that autograd would track."""
        return self.differentiation(frozenset(self.stages.returned) & self.requiring(inputs), inputs)

    def training(self, differentiation: Differentiation) -> SplitModel:
        """Return the stages of the first pipeline with their forward and backward graphs."""
        return self.lowerer.after("differentiate", replace(self._target, differentiation=differentiation)).stages[0, 0]

    def target(self, request: Request) -> Target:
        """Return the target to which the phases lower the programs of a request."""
        target = replace(
            self._target,
            kind=request.kind,
            n_microbatches=request.n_microbatches,
            differentiation=request.differentiation,
            given=request.given,
            gradients=request.gradients,
        )
        if request.loss is None:
            return target
        return replace(target, schedule=schedule_of_step(self.plan, request.n_microbatches, request.loss), loss=request.loss)

    def representatives(
        self, request: Request, inline: Inline = "none", *, fused_attention: bool = False
    ) -> tuple[tuple[Program, ...], dict[int, int]]:
        """Return programs to inspect, not to run: those of a request, of one pipeline for each kind of pipeline.

        Args:
            inline: which calls of stages that communicate are inlined; a program with none is no longer than its schedule.
            fused_attention: lower attention with dropout as on accelerators (``Target.fused_attention``).

        Returns:
            The programs, and rank -> the rank whose program represents it.
        """
        target = replace(self.target(request), pipelines="kinds", share=inline == "none", inline=inline, fused_attention=fused_attention)
        return representatives_of(self.lowerer, target)


def schedule_of_step(plan: Plan, n_microbatches: int, loss: LossForm) -> Schedule:
    """Return the plan's schedule of a step, with all forwards first if the loss needs all rows."""
    schedule = schedule_of(plan, n_microbatches)
    return forwards_first(schedule) if loss.reduction == "batch" else schedule


def representatives_of(lowerer: Lowerer, target: Target) -> tuple[tuple[Program, ...], dict[int, int]]:
    """Return the programs of a target, and rank -> the rank whose program represents it.

    Pipelines of one kind have equal programs: the target may ask for those of the last alone (``Target.pipelines``). A rank is then
    represented by the rank at its position in that pipeline, otherwise by itself.
    """
    placed = lowerer.after("place", target)
    pipelines = placed.pipelines
    represented_by = placed.last_of_kind if target.pipelines == "kinds" else range(len(pipelines))
    representative_of: dict[int, int] = {}
    for ranks, representative in zip(pipelines, represented_by, strict=True):
        representative_of.update(zip(ranks, pipelines[representative], strict=True))
    return tuple(program for _, program in placed.programs), representative_of
