"""Programs of a plan, lowered when first needed and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.runtime.executor import Executable, ProgramSet
from partitioner.schedules.catalog import schedule_of
from partitioner.schedules.forwards_first import forwards_first
from passes.autograd.staged_model import Differentiation, LoweredStages
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

__all__ = ["Lowering", "representatives_of"]


class Lowering:
    """The programs of one traced graph under one plan.

    Args:
        lowerer: runs the phases.
        target: which of the phases' results are asked for, up to the sharded model.
        plan: where nodes run.
        devices: for each rank, where it runs.
        local_ranks: the ranks of this process: only their programs are bound to tensors.
        state: rank -> placeholder -> tensor.
        slots: rank -> placeholder of a parameter -> where its gradients go.
        trainable: placeholders of the parameters that get gradients, of all ranks.
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
        trainable: frozenset[str],
        inputs: Inputs = "global",
    ) -> None:
        self._lowerer, self._target = lowerer, replace(target, devices=tuple(devices), inputs=inputs)
        self._start = lowerer.after("shard", self._target)
        self.plan = plan
        self.devices = tuple(devices)
        self.graph = self._start.parts[0][plan.stage_ranks[-1][0]]
        self.rows = RowParts(plan.grid if self.graph.part.n_row_parts > 1 else Mesh(()), inputs)
        self._local_ranks = tuple(local_ranks)
        self._state = state
        self._slots = slots
        self._requiring: dict[frozenset[str], frozenset[str]] = {}
        self._programs: dict[Hashable, ProgramSet] = {}
        self.trainable = trainable

    @property
    def cut(self) -> StagedCut:
        """The model, sharded."""
        assert self._start.cut is not None
        return self._start.cut

    @property
    def whole(self) -> ModelGraph:
        """The model in front of sharding."""
        return self._start.graph

    @property
    def n_stage_ranks(self) -> int:
        """How many ranks a pipeline has."""
        return len(self._start.pipelines[0])

    @property
    def collectors(self) -> frozenset[int]:
        """The ranks that have the model's results, and compute the loss: of each pipeline those of the last stage."""
        return frozenset(pipeline[place] for pipeline in self._start.pipelines for place in self.plan.stage_ranks[-1])

    @property
    def stages(self) -> LoweredStages:
        """The stages of the first pipeline, without autograd."""
        return self._lowerer.after("split", replace(self._target, pipelines="kinds")).stages[0, 0]

    @property
    def pipelines(self) -> tuple[LoweredStages, ...]:
        """The stages of every pipeline, without autograd."""
        stages = self._lowerer.after("split", self._target).stages
        return tuple(stages[number, 0] for number in range(len(self._start.parts)))

    def differentiation(self, outputs: frozenset[str], inputs: frozenset[str]) -> Differentiation:
        return Differentiation(outputs, inputs, self.trainable)

    def requiring(self, inputs: frozenset[str]) -> frozenset[str]:
        """The values between stages, and those returned, that autograd would track."""
        if inputs not in self._requiring:
            self._requiring[inputs] = values_requiring_gradient(self.stages, self.trainable | inputs)
        return self._requiring[inputs]

    def everything(self, inputs: frozenset[str]) -> Differentiation:
        """Differentiate every result that autograd would track."""
        return self.differentiation(frozenset(self.stages.returned) & self.requiring(inputs), inputs)

    def training(self, differentiation: Differentiation) -> LoweredStages:
        """The stages of the first pipeline with their training graphs."""
        return self._lowerer.after("differentiate", replace(self._target, differentiation=differentiation)).stages[0, 0]

    def schedule(self, n_microbatches: int, loss: LossForm) -> Schedule:
        """Return the plan's schedule of a step; with all forwards first where the loss needs all rows."""
        schedule = schedule_of(self.plan, n_microbatches)
        return forwards_first(schedule) if loss.reduction == "batch" else schedule

    def train_step(self, differentiation: Differentiation, n_microbatches: int, loss: LossForm, gradients: Gradients = "sum") -> ProgramSet:
        """One training step by the plan's schedule."""
        key = ("train_step", differentiation, n_microbatches, loss, gradients)
        return self._ready(key, lambda: replace(self._step(differentiation, n_microbatches, loss), gradients=gradients))

    def _step(self, differentiation: Differentiation, n_microbatches: int, loss: LossForm) -> Target:
        schedule = self.schedule(n_microbatches, loss)
        return replace(
            self._target, kind="train_step", differentiation=differentiation, n_microbatches=n_microbatches, schedule=schedule, loss=loss
        )

    def target(self, differentiation: Differentiation | None, n_microbatches: int, loss: LossForm) -> Target:
        """What is asked of the phases for a training step; for a forward, where nothing is differentiated."""
        if differentiation is None:
            return replace(self._target, n_microbatches=n_microbatches)
        return self._step(differentiation, n_microbatches, loss)

    def representatives(
        self, differentiation: Differentiation | None, n_microbatches: int, loss: LossForm
    ) -> tuple[tuple[Program, ...], dict[int, int]]:
        """Programs to inspect, not to run, of one pipeline for each kind of part: a training step, or a forward.

        Stages that communicate are calls in them, so that they are as long as the schedule and no longer.

        Returns:
            The programs, and for each rank whose program stands for its own.
        """
        target = replace(self.target(differentiation, n_microbatches, loss), pipelines="kinds", share=True, inline=False)
        return representatives_of(self._lowerer, target)

    def forward(self, n_microbatches: int) -> ProgramSet:
        """A forward without autograd."""
        return self._ready(("forward", n_microbatches), lambda: replace(self._target, n_microbatches=n_microbatches))

    def training_forward(self, differentiation: Differentiation, n_microbatches: int) -> ProgramSet:
        """A forward that also returns what ``backward`` takes."""
        return self._ready(
            ("training_forward", differentiation, n_microbatches),
            lambda: replace(self._target, kind="training_forward", differentiation=differentiation, n_microbatches=n_microbatches),
        )

    def backward(
        self, differentiation: Differentiation, n_microbatches: int, given: frozenset[str], gradients: Gradients = "sum"
    ) -> ProgramSet:
        """The backward of ``training_forward``."""
        target = replace(self._target, kind="backward", differentiation=differentiation, n_microbatches=n_microbatches)
        key = ("backward", differentiation, n_microbatches, given, gradients)
        return self._ready(key, lambda: replace(target, given=given, gradients=gradients))

    def _ready(self, key: Hashable, target: Callable[[], Target]) -> ProgramSet:
        """The programs of a target, those of this process bound to its tensors. Nothing runs that is not proved to fit together."""
        if key not in self._programs:
            programs = self._lowerer.programs(target())
            for rank in self._local_ranks:
                programs[rank].bind(self._state[rank], self._slots[rank])
            self._programs[key] = ProgramSet(programs, {rank: Executable(programs[rank]) for rank in self._local_ranks})
        return self._programs[key]


def representatives_of(lowerer: Lowerer, target: Target) -> tuple[tuple[Program, ...], dict[int, int]]:
    """The programs of a target, one for each kind of pipeline, and for each rank of the mesh the rank whose program stands for its own."""
    placed = lowerer.after("place", target)
    first = placed.first_of_kind if target.pipelines == "kinds" else range(len(placed.pipelines))
    of = {
        rank: rank if placed.plan.grid.widths else placed.pipelines[first[number]][position]
        for number, ranks in enumerate(placed.pipelines)
        for position, rank in enumerate(ranks)
    }
    return tuple(program for _, program in placed.programs), of
