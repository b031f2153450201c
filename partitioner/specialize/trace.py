"""A trace of a partitioned model, with its plan, tensors and programs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Cluster
from partitioner.options.batch_rows import Inputs
from partitioner.options.devices import hardware_of
from partitioner.planner.plan import PlanProblem
from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.specialize.arguments import TracedArguments
from partitioner.specialize.programs import Programs
from partitioner.specialize.shard_holders import PlanCuts
from partitioner.tracing.inputs.batch_dims import BatchDims
from partitioner.tracing.restore import Structure
from passes.ir.graph import Autocast, ModelGraph
from passes.ir.plan import Plan

_Report = TypeVar("_Report")


@dataclass(frozen=True)
class Assumptions:
    """Hardware, costs and optimizer that a model was planned for.

    Attributes:
        cluster: the machine.
        cost_model: prices; None: an analytic roofline.
        optimizer: the memory model counts its state.
        problem: the planning problem that the plan solves; None: the caller passed the plan.
        progress: whether a line shows what runs; None: on a terminal.
    """

    cluster: Cluster
    cost_model: CostModel | None
    optimizer: str
    problem: PlanProblem | None = None
    progress: bool | None = None

    @property
    def limits(self) -> tuple[float, ...]:
        """Memory limit of each rank in bytes; empty if the caller passed the plan, whose hardware is not known."""
        return () if self.problem is None else self.problem.limits

    def planned_for(self, plan: Plan) -> str:
        """Return the hardware that a plan was made for, ``"2 x h100"``; empty if it is the hardware that runs it."""
        planned = self.cluster.first(plan.n_ranks)
        if planned == hardware_of([torch.device(name) for name in plan.devices]):
            return ""
        return " and ".join(f"{count} x {name}" for name, count in Counter(device.name for device in planned.devices).items())


@dataclass(frozen=True)
class Tracing:
    """How a model was traced.

    Attributes:
        args, kwargs: the example of a call; None: taken from the model.
        modes: the flag ``training`` of every module, in the order of ``named_modules``.
        autocast: the mixed precision that it was traced in.
        inputs: what each process passes.
        dtype: floating-point inputs are converted to it; None: they are not converted.
        structure: the model when it was partitioned.
        with_gradients: whether gradients were on, as in training.
        batch_dims: the batch dimension of inputs and target, by name.
    """

    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any] | None
    modes: tuple[bool, ...]
    autocast: Autocast | None
    inputs: Inputs
    dtype: torch.dtype | None
    structure: Structure
    with_gradients: bool = True
    batch_dims: BatchDims = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace of the model, and all that its calls read. Only the values of tensors change, and programs are lowered when first used.

    Attributes:
        original: the model; never changed.
        graph: its graph.
        plan: where everything runs, and when.
        runtime: runs the programs.
        state: the tensors of this process's ranks.
        programs: the table of programs.
        assumed: the hardware, costs and optimizer that it was planned for.
        cuts: of the graph, from which programs are lowered.
        tracing: how the graph was traced.
        last_reports: kind of report -> the objects that it was last made of, and the report.
    """

    original: nn.Module
    graph: ModelGraph
    plan: Plan
    runtime: Runtime
    state: State
    programs: Programs
    assumed: Assumptions
    cuts: PlanCuts
    tracing: Tracing
    last_reports: dict[Hashable, tuple[tuple[Any, ...], Any]] = field(default_factory=dict, init=False)

    @property
    def dtype(self) -> torch.dtype | None:
        """Floating-point inputs are converted to it; None: they are not converted."""
        return self.tracing.dtype

    @property
    def name(self) -> str:
        """Name of the model's class."""
        return type(self.original).__name__

    @functools.cached_property
    def stand_in(self) -> tuple[nn.Parameter, ...]:
        """An empty parameter where this process trains none of the model's, and others may; else nothing.

        That is decided by the model as it was partitioned: later freezing, also of a copy, does not change the number.
        """
        trains = self.tracing.structure.trains
        own = [trains(name) for name, _ in self.state.named_parameters()]
        others_train = len(self.runtime.local_ranks) < self.runtime.n_ranks and any(map(trains, self.state.parameter_names))
        return self.state.stand_in if not own or (others_train and not any(own)) else ()

    @functools.cached_property
    def arguments(self) -> TracedArguments:
        """The arguments of the trace, with which those of calls are matched."""
        return TracedArguments(self.original, self.graph, self.dtype)

    def with_microbatches(self, count: int | None) -> Trace:
        """Return a trace with the same tensors and programs, and ``count`` microbatches unless that is None."""
        plan = self.plan if count is None else replace(self.plan, n_microbatches=count)
        return replace(self, plan=plan, programs=self.programs.with_microbatches(count))

    def reported(self, kind: Hashable, of: tuple[Any, ...], make: Callable[[], _Report]) -> _Report:
        """Return a report; the last one of its kind, if that was made of the same objects."""
        last, report = self.last_reports.get(kind, ((), None))
        if len(last) != len(of) or any(one is not other for one, other in zip(last, of, strict=True)):
            report = make()
            self.last_reports[kind] = of, report
        made: _Report = report
        return made
