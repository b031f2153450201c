"""The stages of a plan with their forward and training graphs: what programs are emitted from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.region_cache import RegionTemplates
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.stages.split import StageGraph, split_stages


@dataclass(frozen=True)
class Differentiation:
    """Outputs and inputs of a differentiation: one set of training graphs for each value of this class.

    Attributes:
        outputs: nodes that the model returns whose gradients will be given.
        inputs: placeholders of model inputs whose gradients are wanted.
        parameters: placeholders of parameters whose gradients are wanted.
    """

    outputs: frozenset[str]
    inputs: frozenset[str]
    parameters: frozenset[str]


@dataclass(frozen=True)
class SplitModel:
    """The stages of a plan, ready to be scheduled.

    Attributes:
        graph: the model; where stages have degrees of their own, as the last is cut from it.
        stages: their forward graphs (without autograd).
        stage_ranks: for each stage, the ranks that run it: microbatches are distributed to these round-robin.
        training: for each stage, its training graphs; empty when nothing is differentiated.
        differentiation: what the training graphs differentiate; None when there are none.
        requiring: the values between stages, and those returned, that autograd would track.
        templates: what is known of their regions, however often they are differentiated.
        parts: for each stage the model from which it is cut; empty where that is ``graph`` for all.
        holders: parameter -> ranks that hold it besides those that read it.
    """

    graph: ModelGraph
    stages: tuple[StageGraph, ...]
    stage_ranks: tuple[tuple[int, ...], ...]
    training: tuple[DifferentiatedStage, ...] = ()
    differentiation: Differentiation | None = None
    requiring: frozenset[str] = frozenset()
    templates: RegionTemplates = field(default_factory=RegionTemplates, compare=False, repr=False)
    parts: tuple[ModelGraph, ...] = ()
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def collectors(self) -> tuple[int, ...]:
        """The ranks of the last stage, which compute the loss and collect the results of the model, each of its own microbatches."""
        return self.stage_ranks[-1]

    @property
    def n_ranks(self) -> int:
        return max(map(max, self.stage_ranks)) + 1

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs a stage on a microbatch; stage -1 is the last stage, which also computes the loss."""
        ranks = self.stage_ranks[stage]
        return ranks[microbatch % len(ranks)]

    def graph_of(self, rank: int) -> ModelGraph:
        """Return the model graph from which a rank's stages are cut."""
        return self.parts[self.stages_of(rank)[0].index] if self.parts else self.graph

    def stages_of(self, rank: int) -> tuple[StageGraph, ...]:
        """Return the stages that a rank runs."""
        return tuple(stage for stage in self.stages if rank in self.stage_ranks[stage.index])

    def producer(self, value: str) -> int:
        """Return the stage that computes a value."""
        return next(stage.index for stage in self.stages if value in stage.outputs)

    @property
    def returned(self) -> tuple[str, ...]:
        """The nodes that the model returns, each once."""
        return self.graph.returned

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The nodes of new values of inputs, each once."""
        return tuple(dict.fromkeys(output.node for output in self.graph.writes.values() if output.node is not None))

    @cached_property
    def shared_parameters(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several ranks hold and some rank has a gradient of -> those ranks."""
        holders: dict[str, set[int]] = {name: set(ranks) for name, ranks in self.holders.items()}
        for stage in self.stages:
            for name in stage.parameters:
                holders.setdefault(name, set()).update(self.stage_ranks[stage.index])
        with_gradient = {name for stage in self.training for name in stage.parameters_with_gradient}
        shared = (name for name in self.graph.parameters if len(holders.get(name, ())) > 1 and name in with_gradient)
        return {name: tuple(sorted(holders[name])) for name in shared}


def reached_gradients(lowered: SplitModel, outputs: frozenset[str]) -> frozenset[str]:
    """Return parameters and model inputs that get a gradient when only some differentiated outputs are given one."""
    live, reached = set(outputs), set[str]()
    for training in reversed(lowered.training):
        for name, sources in training.dependence.items():
            if not sources.isdisjoint(live):
                reached.add(name)
        live |= reached
    return frozenset(reached)


def cut_stages(
    parts: Sequence[ModelGraph], plan: Plan, devices: Sequence[torch.device], holders: Mapping[str, tuple[int, ...]] | None = None
) -> SplitModel:
    """Cut a part of the model into the plan's stages.

    Args:
        parts: for each place along the pipeline, what it computes a stage of.
        devices: for each stage, where it runs.
        holders: parameter -> ranks that hold it besides those that read it.

    Raises:
        ConfigError: a stage reads a value that no stage sends: stages of unequal degrees disagree on which of them compute it.
    """
    distinct = {id(part): part for part in parts}
    split = {key: split_stages(part, plan.first_nodes, devices, plan.regions, plan.recomputed) for key, part in distinct.items()}
    stages = tuple(split[id(parts[stage.ranks[0]])][index] for index, stage in enumerate(plan.stages))
    sent = {name for stage in stages for name in stage.outputs}
    for stage in stages:
        if missing := [name for name in stage.values if name not in sent]:
            raise ConfigError(
                f"stage {stage.index} reads {missing[0]}, which the stages before it, of another width, do not send",
                remedy="give all stages as many ranks of the tensor dimension",
            )
    of_stages = tuple(parts[stage.ranks[0]] for stage in plan.stages)
    return SplitModel(of_stages[-1], stages, plan.stage_ranks, parts=of_stages if len(split) > 1 else (), holders=holders or {})
