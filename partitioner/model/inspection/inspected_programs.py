"""The programs of a model that reports describe: printed, explained, simulated."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from partitioner.reports.sources import MANY_RANKS, Explained, LoweredModel, RankClass
from partitioner.reports.tables.devices import DeviceTable, device_table
from partitioner.specialize.programs import results_in_training
from partitioner.specialize.request import Request
from partitioner.specialize.sharded_model import ShardedModel, schedule_of_step
from partitioner.specialize.trace import Trace
from passes.autograd.staged_model import SplitModel
from passes.emit.programs import LossForm
from passes.ir.program import Program
from passes.normalize.loss_alone import results_of_step

__all__ = ["InspectedPrograms", "explained", "table_of_devices"]


@dataclass(frozen=True)
class InspectedPrograms:
    """The programs that reports describe.

    Attributes:
        trace: the model.
        request: of a training step, of a ``call`` (``pm(...)`` and ``backward()``), or of a forward, for the plan's batch.
    """

    trace: Trace
    request: Request

    @classmethod
    def of(cls, trace: Trace, last_step: Request | None) -> InspectedPrograms:
        """Return the programs of the last training step; without one, of a step that differentiates all results, or of a forward."""
        batch, programs, graph = trace.plan.batch_size, trace.programs, trace.graph
        if graph.training and last_step is not None:
            return cls(trace, last_step)
        if graph.training:
            request = programs.request(batch, results=results_in_training(graph), kept=results_of_step(graph))
            everything = programs.sharded(request).everything(frozenset())
            if everything.outputs:
                return cls(trace, request.train_step(everything, LossForm()))
        return cls(trace, programs.request(batch))

    @classmethod
    def of_call(cls, trace: Trace) -> InspectedPrograms:
        """Return the programs of a step by ``pm(...)`` and ``backward()`` of all results; of a forward where there is no gradient."""
        is_gathered = not any(output.combine in ("mean", "sum") for output in trace.graph.outputs)
        request = trace.programs.request(trace.plan.batch_size, results="whole" if is_gathered else "rows")
        everything = trace.programs.sharded(request).everything(frozenset())
        if not (trace.graph.training and everything.outputs):
            return cls.of(trace, None)
        return cls(trace, request.call(everything))

    @property
    def sharded(self) -> ShardedModel:
        """The model, sharded for the plan's batch."""
        return self.trace.programs.sharded(self.request)

    @property
    def stages(self) -> SplitModel:
        """The stages that the programs run."""
        differentiation = self.request.differentiation
        return self.sharded.stages if differentiation is None else self.sharded.training(differentiation)

    @property
    def programs(self) -> tuple[Program, ...]:
        """One program for each rank."""
        return self.trace.programs.get(self.request).programs

    def classes(self) -> tuple[RankClass, ...]:
        """Return the programs by classes of equal ranks; of few ranks, each is a class, and its program the one that runs."""
        size = self.trace.plan.n_ranks
        if size <= MANY_RANKS:
            return RankClass.of_each(self.programs)
        programs, representative_of = self.sharded.representatives(self.request, "first")
        members: dict[int, list[int]] = {}
        for rank in range(size):
            members.setdefault(representative_of[rank], []).append(rank)
        return tuple(RankClass(program, tuple(members[program.rank])) for program in sorted(programs, key=lambda program: program.rank))


def explained(trace: Trace, last_step: Request | None) -> Explained:
    """Return a model and its plan as reports read them, with the programs of the last training step."""

    @functools.cache
    def inspected() -> InspectedPrograms:
        return InspectedPrograms.of(trace, last_step)

    def lower() -> LoweredModel:
        sharded = inspected().sharded
        return LoweredModel(sharded.cut, inspected().stages, sharded.pipelines)

    def make() -> Explained:
        trains = trace.graph.training and bool(trained)
        schedule = schedule_of_step(trace.plan, trace.plan.n_microbatches, (last_step and last_step.loss) or LossForm())
        parts = (trace.name, trace.plan, trace.graph, trace.cuts.plan_cut, trace.state.blocks, lower)
        programs = (lambda: inspected().programs, lambda: inspected().classes())
        limits, planned_for = trace.assumed.limits, trace.assumed.planned_for(trace.plan)
        return Explained(*parts, *programs, schedule if trains else None, limits, planned_for)

    trained = trace.state.gradients.trained
    return trace.reported(("explained", last_step, trained), (trace.cuts, trace.state), make)


def table_of_devices(trace: Trace, last_step: Request | None) -> DeviceTable:
    """Return the table that ``print`` shows: a line for each rank, or of many ranks for each class of equal ones."""
    sources = explained(trace, last_step)
    return sources.once("devices", lambda: device_table(sources))
