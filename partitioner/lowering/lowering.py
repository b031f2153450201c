"""Programs of a plan, lowered when first needed and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from partitioner.options.batch_rows import Inputs, RowParts
from partitioner.runtime.executor import ProgramSet, compile_program
from partitioner.schedules.catalog import schedule_of
from partitioner.schedules.forwards_first import forwards_first
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, LoweredStages
from passes.emit.inline_stages import inline_stages
from passes.emit.place_on_mesh import Gradients, place_on_mesh
from passes.emit.programs import LossForm, emit_backward, emit_forward, emit_train_step
from passes.graph.lazy_graph_module import nothing_collected
from passes.graph.program_printer import ProgramModule
from passes.ir.comm.unsummed import GradientSlot
from passes.ir.mesh import Mesh, homes, pipelines
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.pipeline import StagedCut, cut_stages, differentiate_stages, values_requiring_gradient
from passes.verify.programs import verify

__all__ = ["Lowering"]

Value = TypeVar("Value")
"""What is lowered."""

Emit = Callable[[int, int], Sequence[Program]]
"""Writes the programs of one pipeline; the last number says which ranks of stages it is written for."""


class Lowering:
    """The programs of one traced graph under one plan.

    Args:
        cut: for each rank, the graph that it computes a stage of; those that are equal are one object.
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
        cut: StagedCut,
        plan: Plan,
        devices: Sequence[torch.device],
        local_ranks: Sequence[int],
        state: Mapping[int, Mapping[str, Tensor]],
        slots: Mapping[int, Mapping[str, GradientSlot]],
        trainable: frozenset[str],
        inputs: Inputs = "global",
    ) -> None:
        self.cut = cut
        self.plan = plan
        self.devices = tuple(devices)
        self._parts = cut.parts
        self._mesh = cut.mesh
        self._pipelines, self._homes = pipelines(self._mesh), homes(self._mesh)
        self.graph = self._parts[0][plan.stage_ranks[-1][0]]
        self.rows = RowParts(self._mesh if self.graph.part.n_row_parts > 1 else Mesh(()), inputs)
        self._local_ranks = tuple(local_ranks)
        self._state = state
        self._slots = slots
        self._kept: dict[Hashable, Any] = {}
        self.trainable = trainable

    @property
    def n_stage_ranks(self) -> int:
        """How many ranks a pipeline has."""
        return len(self._pipelines[0])

    @property
    def collectors(self) -> frozenset[int]:
        """The ranks that have the model's results, and compute the loss: of each pipeline those of the last stage."""
        return frozenset(pipeline[place] for pipeline in self._pipelines for place in self.plan.stage_ranks[-1])

    @property
    def stages(self) -> LoweredStages:
        """The stages of the first pipeline, without autograd."""
        return self._stages(0)

    @property
    def pipelines(self) -> tuple[LoweredStages, ...]:
        """The stages of every pipeline, without autograd."""
        return tuple(self._stages(number) for number in range(len(self._parts)))

    def _stages(self, pipeline: int, replica: int = 0) -> LoweredStages:
        devices = self._stage_devices(pipeline, replica)
        return self._keep(("stages", self._kind(pipeline), devices), lambda: cut_stages(self._parts[pipeline], self.plan, devices))

    def _kind(self, pipeline: int) -> tuple[int, ...]:
        """What is equal of pipelines that compute equal parts."""
        return tuple(map(id, self._parts[pipeline]))

    def _stage_devices(self, pipeline: int, replica: int) -> tuple[torch.device, ...]:
        """For each stage, where one of its ranks runs: graphs name the device that they create tensors on."""
        ranks = self._pipelines[pipeline]
        return tuple(self.devices[ranks[places[replica % len(places)]]] for places in self.plan.stage_ranks)

    def _devices(self, pipeline: int) -> tuple[torch.device, ...]:
        return tuple(self.devices[rank] for rank in self._pipelines[pipeline])

    def differentiation(self, outputs: frozenset[str], inputs: frozenset[str]) -> Differentiation:
        return Differentiation(outputs, inputs, self.trainable)

    def requiring(self, inputs: frozenset[str]) -> frozenset[str]:
        """The values between stages, and those returned, that autograd would track."""
        return self._keep(("requiring", inputs), lambda: values_requiring_gradient(self.stages, self.trainable | inputs))

    def everything(self, inputs: frozenset[str]) -> Differentiation:
        """Differentiate every result that autograd would track."""
        return self.differentiation(frozenset(self.stages.returned) & self.requiring(inputs), inputs)

    def training(self, differentiation: Differentiation) -> LoweredStages:
        """The stages of the first pipeline with their training graphs."""
        return self._training(differentiation, 0)

    def _training(self, differentiation: Differentiation, pipeline: int, replica: int = 0) -> LoweredStages:
        recompute = cast(Recompute, self.plan.recompute)
        devices = self._stage_devices(pipeline, replica)
        return self._keep(
            ("training", differentiation, self._kind(pipeline), devices),
            lambda: differentiate_stages(self._stages(pipeline, replica), differentiation, recompute),
        )

    def schedule(self, n_microbatches: int, loss: LossForm) -> Schedule:
        """Return the plan's schedule of a step; with all forwards first where the loss needs all rows."""
        schedule = schedule_of(self.plan, n_microbatches)
        return forwards_first(schedule) if loss.reduction == "batch" else schedule

    def train_step(self, differentiation: Differentiation, n_microbatches: int, loss: LossForm, gradients: Gradients = "sum") -> ProgramSet:
        """One training step by the plan's schedule."""

        def emit(pipeline: int, replica: int) -> Sequence[Program]:
            lowered = self._training(differentiation, pipeline, replica)
            return emit_train_step(lowered, self.schedule(n_microbatches, loss), loss, self._devices(pipeline))

        return self._keep(("train_step", differentiation, n_microbatches, loss, gradients), lambda: self._ready(emit, gradients))

    def representatives(
        self, differentiation: Differentiation | None, n_microbatches: int, loss: LossForm
    ) -> tuple[tuple[Program, ...], dict[int, int]]:
        """Programs to look at, not to run, of one pipeline for each kind of part: a training step, or a forward.

        Stages that communicate are calls in them, so that they are as long as the schedule and no longer.

        Returns:
            The programs, and for each rank whose program stands for its own.
        """
        found: dict[int, Program] = {}
        first: dict[tuple[int, ...], int] = {}
        for number, (parts, ranks) in enumerate(zip(self._parts, self._pipelines, strict=True)):
            # Neighbours of a stage of another width send to unlike ranks: none stands for the other.
            kind = (number,) if self._mesh.widths else self._kind(number)
            if first.setdefault(kind, number) != number:
                continue
            devices = self._devices(number)
            if differentiation is None:
                emitted = emit_forward(self._stages(number), n_microbatches, devices, training=False)
            else:
                recompute = cast(Recompute, self.plan.recompute)
                lowered = differentiate_stages(self._stages(number), differentiation, recompute, share=True)
                emitted = emit_train_step(lowered, self.schedule(n_microbatches, loss), loss, devices)
            for place, program in enumerate(emitted):
                if self._homes[ranks[place]] == number:
                    is_alone = len(self._parts) == 1
                    placed = program if is_alone else place_on_mesh(program, parts[place], self._mesh, ranks, written_out=False)
                    found[ranks[place]] = placed
        of = {
            rank: rank if self._mesh.widths else self._pipelines[first[self._kind(number)]][place]
            for number, ranks in enumerate(self._pipelines)
            for place, rank in enumerate(ranks)
        }
        return tuple(found.values()), of

    def forward(self, n_microbatches: int) -> ProgramSet:
        """A forward without autograd."""

        def emit(pipeline: int, replica: int) -> Sequence[Program]:
            return emit_forward(self._stages(pipeline, replica), n_microbatches, self._devices(pipeline), training=False)

        return self._keep(("forward", n_microbatches), lambda: self._ready(emit))

    def training_forward(self, differentiation: Differentiation, n_microbatches: int) -> ProgramSet:
        """A forward that also returns what ``backward`` takes."""

        def emit(pipeline: int, replica: int) -> Sequence[Program]:
            lowered = self._training(differentiation, pipeline, replica)
            return emit_forward(lowered, n_microbatches, self._devices(pipeline), training=True)

        return self._keep(("training_forward", differentiation, n_microbatches), lambda: self._ready(emit))

    def backward(
        self, differentiation: Differentiation, n_microbatches: int, given: frozenset[str], gradients: Gradients = "sum"
    ) -> ProgramSet:
        """The backward of ``training_forward``."""

        def emit(pipeline: int, replica: int) -> Sequence[Program]:
            lowered = self._training(differentiation, pipeline, replica)
            return emit_backward(lowered, n_microbatches, given, self._devices(pipeline))

        return self._keep(("backward", differentiation, n_microbatches, given, gradients), lambda: self._ready(emit, gradients))

    def _ready(self, emit: Emit, gradients: Gradients = "sum") -> ProgramSet:
        """The programs of all pipelines, each rank's in its place. Nothing runs that is not proved to fit together."""
        found: dict[int, Program] = {}
        for number, (parts, ranks) in enumerate(zip(self._parts, self._pipelines, strict=True)):
            for program in self._emitted(emit, number):
                if self._homes[ranks[program.rank]] != number:
                    continue
                if self.plan.tiles:
                    assert isinstance(program.module, ProgramModule)
                    placed = replace(program, module=inline_stages(program.module, self._mesh, program.rank))
                elif len(self._parts) == 1:
                    placed = program
                else:
                    placed = place_on_mesh(program, parts[program.rank], self._mesh, ranks, gradients, self.rows.inputs)
                found[placed.rank] = placed
        programs = tuple(found[rank] for rank in range(len(found)))
        verify(programs)
        for rank in self._local_ranks:
            programs[rank].bind(self._state[rank], self._slots[rank])
        return ProgramSet(programs, {rank: compile_program(programs[rank]) for rank in self._local_ranks})

    def _emitted(self, emit: Emit, pipeline: int) -> Sequence[Program]:
        """The programs of one pipeline: those of ranks that share a stage from graphs of their own devices, where these differ."""
        numbers = {place: number for places in self.plan.stage_ranks for number, place in enumerate(places)}
        first: dict[tuple[torch.device, ...], int] = {}
        alike = [first.setdefault(self._stage_devices(pipeline, number), number) for number in range(max(numbers.values()) + 1)]
        emitted = {number: emit(pipeline, number) for number in first.values()}
        return [emitted[alike[number]][place] for place, number in sorted(numbers.items())]

    def _keep(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self._kept:
            with nothing_collected():
                self._kept[key] = make()
        return cast(Value, self._kept[key])
