"""Programs of a plan, lowered when first needed and kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from partitioner.runtime.executor import ProgramSet, compile_program
from partitioner.schedules.catalog import make_schedule
from passes.emit_programs import LossForm, emit_backward, emit_forward, emit_train_step
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.ir.schedule import Schedule
from passes.lower import Differentiation, LoweredStages, cut_stages, differentiate_stages, values_requiring_gradient
from passes.split_backward import Recompute
from passes.verify import verify

__all__ = ["Lowering"]

Value = TypeVar("Value")
"""What is lowered."""


class Lowering:
    """The programs of one traced graph under one plan.

    Args:
        graph: the model.
        plan: where its nodes run.
        devices: for each rank, where it runs.
        local_ranks: the ranks of this process: only their programs are bound to tensors.
        state: rank -> placeholder -> tensor.
        trainable: placeholders of the parameters that get gradients, of all ranks.
    """

    def __init__(
        self,
        graph: ModelGraph,
        plan: Plan,
        devices: Sequence[torch.device],
        local_ranks: Sequence[int],
        state: Mapping[int, Mapping[str, Tensor]],
        trainable: frozenset[str],
    ) -> None:
        self.graph = graph
        self.plan = plan
        self.devices = tuple(devices)
        self.stages = cut_stages(graph, plan, devices)
        self._local_ranks = tuple(local_ranks)
        self._state = state
        self._kept: dict[Hashable, Any] = {}
        self.trainable = trainable

    @property
    def stages_per_rank(self) -> int:
        return len(self.plan.stages) // self.plan.n_ranks

    def differentiation(self, outputs: frozenset[str], inputs: frozenset[str]) -> Differentiation:
        return Differentiation(outputs, inputs, self.trainable)

    def requiring(self, inputs: frozenset[str]) -> frozenset[str]:
        """The values between stages, and those returned, that autograd would track."""
        return self._keep(("requiring", inputs), lambda: values_requiring_gradient(self.stages.stages, self.trainable | inputs))

    def everything(self, inputs: frozenset[str]) -> Differentiation:
        """Differentiate every result that autograd would track."""
        return self.differentiation(frozenset(self.stages.returned) & self.requiring(inputs), inputs)

    def training(self, differentiation: Differentiation) -> LoweredStages:
        """The stages with their training graphs."""
        recompute = cast(Recompute, self.plan.recompute)
        return self._keep(
            ("training", differentiation), lambda: differentiate_stages(self.stages, differentiation, recompute, self.devices)
        )

    def schedule(self, n_microbatches: int) -> Schedule:
        """The plan's schedule of a step."""
        return make_schedule(self.plan.schedule, self.plan.n_ranks, n_microbatches, self.stages_per_rank)

    def train_step(self, differentiation: Differentiation, n_microbatches: int, loss: LossForm) -> ProgramSet:
        """One training step by the plan's schedule."""

        def lower() -> ProgramSet:
            return self._ready(emit_train_step(self.training(differentiation), self.schedule(n_microbatches), loss, self.devices))

        return self._keep(("train_step", differentiation, n_microbatches, loss), lower)

    def forward(self, n_microbatches: int) -> ProgramSet:
        """A forward without autograd."""
        return self._keep(
            ("forward", n_microbatches), lambda: self._ready(emit_forward(self.stages, n_microbatches, self.devices, training=False))
        )

    def training_forward(self, differentiation: Differentiation, n_microbatches: int) -> ProgramSet:
        """A forward that also returns what ``backward`` takes."""
        return self._keep(
            ("training_forward", differentiation, n_microbatches),
            lambda: self._ready(emit_forward(self.training(differentiation), n_microbatches, self.devices, training=True)),
        )

    def backward(self, differentiation: Differentiation, n_microbatches: int, given: frozenset[str]) -> ProgramSet:
        """The backward of ``training_forward``."""
        return self._keep(
            ("backward", differentiation, n_microbatches, given),
            lambda: self._ready(emit_backward(self.training(differentiation), n_microbatches, given, self.devices)),
        )

    def _ready(self, programs: Sequence[Program]) -> ProgramSet:
        """Nothing runs that is not proved to fit together."""
        verify(programs)
        for rank in self._local_ranks:
            programs[rank].bind(self._state[rank])
        return ProgramSet(tuple(programs), {rank: compile_program(programs[rank]) for rank in self._local_ranks})

    def _keep(self, key: Hashable, make: Callable[[], Value]) -> Value:
        if key not in self._kept:
            self._kept[key] = make()
        return cast(Value, self._kept[key])
