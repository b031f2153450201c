"""The user's request to the planner."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partitioner.options.constraints import Constraints
from partitioner.planner.constraints.modules import check_patterns
from partitioner.planner.costs.memory.named_regions import Patterns
from partitioner.schedules.catalog import find_schedule
from partitioner.schedules.gpipe import GPIPE
from partitioner.schedules.kind import check_forwards
from partitioner.tracing.inputs.batch_dims import accidental_batch
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import OBJECTIVES


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a user may say about a plan; None lets the planner choose.

    Attributes:
        mode: ``"model"``, ``"pipeline"`` or ``"auto"``, the better of the two.
        devices: for each rank, the device that it runs on, for the plan to name.
        n_microbatches: microbatches a step.
        schedule: name of the schedule.
        stages_per_rank: stages that each rank runs.
        replicas: for each stage, how many ranks run it round-robin; empty: each rank has stages of its own.
        recompute: what the backward computes again: ``"none"``, ``"selective"``, ``"full"``; None: regions that the model
            marks, or the cheapest policy that fits in memory.
        patterns: instead of ``recompute``, pairs of a pattern of modules and its policy.
        memory_limit: of each device: bytes, or ``"16GiB"``; None: 92 % of what the device has.
        optimizer: whose state the memory counts. A graph in evaluation mode is planned for its forward alone and has none.
        constraints: what is decided already.
        modules: names of the model's modules, so that constraints may name one that computes nothing.
        batchnorm: statistics of batch normalisation where the batch is cut: ``"sync"`` or ``"local"``. With ``"sync"`` the planner does
            not cut a batch that batch normalisation takes statistics of into microbatches.
        reduce_dtype: type in which gradients of parameters are summed over ranks; None: that of the parameters.
        objective: what the best plan has least or most of: one of ``passes.ir.plan.OBJECTIVES``.
        time_limit: seconds of the search; None: it ends by its limits of work.
        most_bytes: of any device, beside ``memory_limit``.
        is_trial: whether a failure is no error of the user: it needs no remedy, which takes long to find.
        names_mesh: whether the user names the mesh. One plan is priced then, and all copies of repeated blocks are run for it.
    """

    mode: str
    devices: tuple[str, ...]
    n_microbatches: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    replicas: tuple[int, ...] = ()
    recompute: str | None = None
    patterns: Patterns = ()
    memory_limit: int | str | None = None
    optimizer: str = "adamw"
    constraints: Constraints = field(default_factory=Constraints)
    modules: frozenset[str] = frozenset()
    batchnorm: str = "sync"
    reduce_dtype: str | None = None
    objective: str = OBJECTIVES[0]
    time_limit: float | None = None
    most_bytes: float = math.inf
    is_trial: bool = False
    names_mesh: bool = False

    @property
    def graph_options(self) -> Hashable:
        """The options that change the costs of a sharded graph."""
        return self.batchnorm, self.patterns, self.reduce_dtype

    def check(self, graph: ModelGraph) -> None:
        """Raise ConfigError for the first argument that is invalid by itself, or does not fit the model."""
        self.checked()
        if self.schedule is not None:
            kind = find_schedule(self.schedule)
            check_forwards(len(self.replicas) or len(self.devices) * (self.stages_per_rank or kind.default_stages_per_rank))
        if graph.batch_size < 1:
            raise ConfigError(f"the batch has {graph.batch_size} rows", remedy="pass example inputs with at least one row")
        check_patterns(self.patterns, self.modules, graph)
        self._check_microbatches(graph)
        self._check_replicas(graph)

    def checked(self) -> PlanRequest:
        """Return this request; raise ConfigError for the first combination of arguments that is invalid for every model.

        ``partitioner.options.arguments`` has checked each argument by itself.
        """
        self._check_schedule()
        count = self.n_microbatches
        if count is not None and count > 1 and self.mode == "model":
            problem = f'n_microbatches={count} does not fit a mode without a "pipeline" dimension, which cuts no batch'
            raise ConfigError(problem, remedy='use mode "pipeline"')
        return self

    def _check_schedule(self) -> None:
        if self.mode == "model":
            for name, value, only in (("schedule", self.schedule, GPIPE.name), ("stages_per_device", self.stages_per_rank, 1)):
                if value not in (None, only):
                    problem = f'{name}={value!r} does not fit a mode without a "pipeline" dimension'
                    raise ConfigError(problem, remedy='leave it out, or use mode "pipeline"')
        if self.schedule is not None:
            find_schedule(self.schedule).check(self.stages_per_rank, self.replicas)
        elif self.replicas and self.stages_per_rank not in (None, 1):
            raise ConfigError(
                f"stages_per_device={self.stages_per_rank} cannot be combined with replicated stages, {{'pipeline': {self.replicas}}}",
                remedy="remove stages_per_device",
            )

    def _check_microbatches(self, graph: ModelGraph) -> None:
        count = self.n_microbatches
        if count is None:
            return
        if count > 1 and graph.mixed:
            raise ConfigError(
                f"the batch cannot be cut into {count} microbatches: rows of the batch are mixed in {', '.join(graph.mixed)}",
                remedy=f"pass n_microbatches=1, or return, and keep in buffers, what does not mix rows{accidental_batch(graph)}",
            )
        if count > graph.batch_size and graph.batch is None:
            raise ConfigError(
                f"n_microbatches={count}: the model was traced for a batch of {graph.batch_size} rows a pipeline, and for no other",
                remedy=f"pass n_microbatches={graph.batch_size} or fewer, or example_inputs of the batch to plan for",
            )

    def _check_replicas(self, graph: ModelGraph) -> None:
        most = max(self.replicas, default=1)
        whole = graph.batch is None or bool(graph.mixed) or (bool(graph.mixing) and self.batchnorm == "sync")
        count = self.n_microbatches or (1 if whole else graph.batch_size)
        if count < most:
            statistics = " (BatchNorm then takes its statistics over each microbatch)" if graph.mixing.normalizations else ""
            raise ConfigError(
                f"a stage has {most} replicas, and there {'is 1 microbatch' if count == 1 else f'are {count} microbatches'}",
                remedy=f"pass n_microbatches={most} or more, if the model lets its batch be cut{statistics}, or give the stage fewer ranks",
            )


def recompute_fields(recompute: str | Mapping[str, str] | None) -> dict[str, Any]:
    """Return the fields of a request for ``recompute=``: a policy for all, or one for each pattern of modules."""
    return {"patterns": tuple(recompute.items())} if isinstance(recompute, Mapping) else {"recompute": recompute}
