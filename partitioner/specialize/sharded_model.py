"""Lower a plan to programs when they are first needed, and cache them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.runtime.executor import Executable, ProgramSet
from partitioner.schedules.catalog import schedule_of
from partitioner.schedules.forwards_first import forwards_first
from passes.autograd.staged_model import Differentiation, SplitModel
from passes.emit.inline_stages import Inline
from passes.emit.place_on_mesh import Gradients
from passes.emit.programs import LossForm
from passes.ir.comm.unsummed import GradientSlot
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.pipeline import Lowerer, Target, values_requiring_gradient
from passes.spmd.shard_stages import StagedCut

__all__ = ["ShardedModel", "representatives_of"]


class ShardedModel:
    """The programs of one traced graph under one plan.

    Args:
        lowerer: runs the phases.
        target: the options of the phases up to the sharded model.
        plan: by which the model is lowered.
        devices: for each rank, where it runs.
        local_ranks: the ranks of this process: only their programs are bound to tensors.
        state: rank -> placeholder -> tensor.
        slots: rank -> placeholder of a parameter -> where its gradients go.
        trainable: returns the placeholders of the parameters that get gradients, of all ranks: more of them when some are unfrozen.
        inputs: what each process passes.
    """

    def __init__(
        self,
        lowerer: Lowerer,
        target: Target,
        plan: Plan,
        devices: Sequence[torch.device],
        local_ranks: Sequence[int],
        state: Mapping[int, Mapping[str, Tensor]],
        slots: Mapping[int, Mapping[str, GradientSlot]],
        trainable: Callable[[], frozenset[str]],
        inputs: Inputs = "global",
    ) -> None:
        self._lowerer, self._target = lowerer, replace(target, devices=tuple(devices), inputs=inputs)
        self._sharded = lowerer.after("shard", self._target)
        self.plan = plan
        self.devices = tuple(devices)
        self.graph = self._sharded.parts[0][plan.stage_ranks[-1][0]]  # of a rank that has the model's results
        self.rows = RowParts(plan.grid if self.graph.part.n_row_parts > 1 else Mesh(()), inputs)
        self._local_ranks = tuple(local_ranks)
        self._state = state
        self._slots = slots
        self._requiring: dict[tuple[frozenset[str], frozenset[str]], frozenset[str]] = {}
        self._programs: dict[Hashable, ProgramSet] = {}
        self._trainable = trainable

    @property
    def cut(self) -> StagedCut:
        """The model, sharded."""
        assert self._sharded.cut is not None
        return self._sharded.cut

    @property
    def whole(self) -> ModelGraph:
        """The model before it is tiled or sharded."""
        return self._lowerer.after("mean_to_sum", self._target).graph

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
        return self._lowerer.after("split", replace(self._target, pipelines="kinds")).stages[0, 0]

    @property
    def pipelines(self) -> tuple[SplitModel, ...]:
        """The stages of every pipeline, without autograd."""
        stages = self._lowerer.after("split", self._target).stages
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
        return self._lowerer.after("differentiate", replace(self._target, differentiation=differentiation)).stages[0, 0]

    def schedule(self, n_microbatches: int, loss: LossForm) -> Schedule:
        """Return the plan's schedule of a step, with all forwards first if the loss needs all rows."""
        schedule = schedule_of(self.plan, n_microbatches)
        return forwards_first(schedule) if loss.reduction == "batch" else schedule

    def train_step(self, differentiation: Differentiation, n_microbatches: int, loss: LossForm, gradients: Gradients = "sum") -> ProgramSet:
        """Return the programs of one training step by the plan's schedule."""
        key = ("train_step", differentiation, n_microbatches, loss, gradients)
        return self._cached(key, lambda: replace(self._step_target(differentiation, n_microbatches, loss), gradients=gradients))

    def call(self, differentiation: Differentiation, n_microbatches: int) -> ProgramSet:
        """Return ``training_forward``, a loss and ``backward`` as one program on each rank, to inspect."""
        return self._cached(("call", differentiation, n_microbatches), lambda: self.target(differentiation, n_microbatches, None))

    def _step_target(self, differentiation: Differentiation, n_microbatches: int, loss: LossForm) -> Target:
        schedule = self.schedule(n_microbatches, loss)
        return replace(
            self._target, kind="train_step", differentiation=differentiation, n_microbatches=n_microbatches, schedule=schedule, loss=loss
        )

    def target(self, differentiation: Differentiation | None, n_microbatches: int, loss: LossForm | None) -> Target:
        """Return the target of a training step, or of ``call`` if ``loss`` is None; of a forward if ``differentiation`` is None."""
        if differentiation is None:
            return replace(self._target, n_microbatches=n_microbatches)
        if loss is None:
            return replace(self._target, kind="call", differentiation=differentiation, n_microbatches=n_microbatches)
        return self._step_target(differentiation, n_microbatches, loss)

    def representatives(
        self, differentiation: Differentiation | None, n_microbatches: int, loss: LossForm | None, inline: Inline = "none"
    ) -> tuple[tuple[Program, ...], dict[int, int]]:
        """Return programs to inspect, not to run: those of ``target``, of one pipeline for each kind of pipeline.

        Args:
            inline: which calls of stages that communicate are inlined; a program with none is no longer than its schedule.

        Returns:
            The programs, and rank -> the rank whose program represents it.
        """
        target = replace(self.target(differentiation, n_microbatches, loss), pipelines="kinds", share=inline == "none", inline=inline)
        return representatives_of(self._lowerer, target)

    def forward(self, n_microbatches: int) -> ProgramSet:
        """Return the programs of a forward without autograd."""
        return self._cached(("forward", n_microbatches), lambda: replace(self._target, n_microbatches=n_microbatches))

    def training_forward(self, differentiation: Differentiation, n_microbatches: int) -> ProgramSet:
        """Return the programs of a forward that also returns the saved values that ``backward`` takes."""
        return self._cached(
            ("training_forward", differentiation, n_microbatches),
            lambda: replace(self._target, kind="training_forward", differentiation=differentiation, n_microbatches=n_microbatches),
        )

    def backward(
        self, differentiation: Differentiation, n_microbatches: int, given: frozenset[str], gradients: Gradients = "sum"
    ) -> ProgramSet:
        """Return the programs of the backward of ``training_forward``; ``given`` names the outputs whose gradients it takes."""
        target = replace(self._target, kind="backward", differentiation=differentiation, n_microbatches=n_microbatches)
        key = ("backward", differentiation, n_microbatches, given, gradients)
        return self._cached(key, lambda: replace(target, given=given, gradients=gradients))

    def _cached(self, key: Hashable, target: Callable[[], Target]) -> ProgramSet:
        """Return the programs of a target, lowered and verified once, with those of this process bound to its tensors."""
        if key not in self._programs:
            programs = self._lowerer.programs(target())
            for rank in self._local_ranks:
                programs[rank].bind(self._state[rank], self._slots[rank])
            self._programs[key] = ProgramSet(programs, {rank: Executable(programs[rank]) for rank in self._local_ranks})
        return self._programs[key]


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
