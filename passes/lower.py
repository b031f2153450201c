"""From a plan to the graphs of every stage: cut, then differentiate from the last stage to the first.

The order matters: a stage's backward takes the gradient of an output only if some later stage (or the loss) gives one, which is known
once those have been differentiated. So None stays None from the loss back to the parameters, as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from passes.alike_stages import form_of, renamed
from passes.differentiate import contiguous_like, differentiate, fake_mode
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.recompute import Recompute
from passes.split_backward import DifferentiatedStage, split_backward
from passes.stages import StageGraph, split_stages
from passes.streaming.differentiate_tiles import differentiate_tiles, tiles_requiring_gradient
from passes.streaming.regions import is_streamed

__all__ = ["Differentiation", "LoweredStages", "cut_stages", "differentiate_stages", "reached_gradients", "values_requiring_gradient"]


@dataclass(frozen=True)
class Differentiation:
    """What is differentiated with respect to what: one set of training graphs for each such value.

    Attributes:
        outputs: nodes that the model returns whose gradients will be given.
        inputs: placeholders of model inputs whose gradients are wanted.
        parameters: placeholders of parameters whose gradients are wanted.
    """

    outputs: frozenset[str]
    inputs: frozenset[str]
    parameters: frozenset[str]


@dataclass(frozen=True)
class LoweredStages:
    """The stages of a plan, ready to be scheduled.

    Attributes:
        graph: the model.
        stages: their forward graphs (without autograd).
        stage_rank: for each stage, the rank that runs it.
        training: for each stage, its training graphs; empty when nothing is differentiated.
        differentiation: what the training graphs differentiate; None when there are none.
        requiring: the values between stages, and those returned, that autograd would track.
    """

    graph: ModelGraph
    stages: tuple[StageGraph, ...]
    stage_rank: tuple[int, ...]
    training: tuple[DifferentiatedStage, ...] = ()
    differentiation: Differentiation | None = None
    requiring: frozenset[str] = frozenset()

    @property
    def collector(self) -> int:
        """The rank that collects what the model returns and computes the loss: the last stage's."""
        return self.stage_rank[-1]

    @property
    def n_ranks(self) -> int:
        return max(self.stage_rank) + 1

    def producer(self, value: str) -> int:
        """The stage that computes a value."""
        return next(stage.index for stage in self.stages if value in stage.outputs)

    @property
    def returned(self) -> tuple[str, ...]:
        """The nodes that the model returns, each once."""
        return self.graph.returned


def reached_gradients(lowered: LoweredStages, outputs: frozenset[str]) -> frozenset[str]:
    """Parameters and model inputs that get a gradient when only some of the differentiated outputs are given one."""
    live, reached = set(outputs), set[str]()
    for training in reversed(lowered.training):
        for name, sources in training.dependence.items():
            if not sources.isdisjoint(live):
                reached.add(name)
        live |= reached
    return frozenset(reached)


def cut_stages(graph: ModelGraph, plan: Plan, devices: Sequence[torch.device]) -> LoweredStages:
    """Cut the graph into the plan's stages. ``devices``: for each rank, where it runs."""
    of_stages = [devices[stage.rank] for stage in plan.stages]
    stages = split_stages(graph, [stage.first_node for stage in plan.stages], of_stages)
    return LoweredStages(graph, stages, plan.stage_rank)


def differentiate_stages(
    lowered: LoweredStages,
    differentiation: Differentiation,
    recompute: Recompute,
    devices: Sequence[torch.device],
    *,
    share: bool = False,
) -> LoweredStages:
    """Add the training graphs.

    Args:
        devices: for each rank, where it runs.
        share: whether stages that compute alike have one graph, whose names are those of one of them: enough to look at costs.
    """
    differentiable = differentiation.parameters | differentiation.inputs
    requiring = values_requiring_gradient(lowered.stages, differentiable)
    given = set(differentiation.outputs)
    training: list[DifferentiatedStage] = []
    known: dict[Hashable, tuple[StageGraph, DifferentiatedStage]] = {}
    for stage in reversed(lowered.stages):
        wanted = frozenset(name for name in stage.bound + stage.arguments if name in differentiable or name in requiring)
        form = form_of(stage, wanted, given & requiring) if share else stage.index
        if form in known:
            other, found = known[form]
            training.insert(0, renamed(found, other, stage))
            given.update(training[0].arguments_with_gradient)
            continue
        of_outputs = frozenset(name for name in stage.outputs if name in given and name in requiring)
        if is_streamed(stage.module.graph):
            training.insert(0, differentiate_tiles(stage, wanted, of_outputs, recompute))
        else:
            joint = differentiate(stage, wanted, of_outputs, devices[lowered.stage_rank[stage.index]])
            training.insert(0, split_backward(joint, recompute))
        known[form] = stage, training[0]
        given.update(training[0].arguments_with_gradient)
    return LoweredStages(lowered.graph, lowered.stages, lowered.stage_rank, tuple(training), differentiation, requiring)


def values_requiring_gradient(stages: Sequence[StageGraph], differentiable: frozenset[str]) -> frozenset[str]:
    """Which values between stages autograd would track, found by running the stages on fake tensors."""
    requiring: set[str] = set()
    known: dict[Hashable, tuple[bool, ...]] = {}
    for stage in stages:
        if is_streamed(stage.module.graph):
            requiring |= tiles_requiring_gradient(stage, differentiable)
            continue
        form = form_of(stage, frozenset(name for name in stage.bound + stage.arguments if name in differentiable | requiring), ())
        if form in known:
            requiring.update(name for name, tracked in zip(stage.outputs, known[form], strict=True) if tracked)
            continue
        with fake_mode(stage.module.graph), torch.enable_grad():
            inputs = []
            for node in stage.module.graph.nodes:
                if node.op == "placeholder":
                    value = node.meta["val"]
                    if isinstance(value, Tensor):
                        value = contiguous_like(value, stage.device) if node.name not in stage.bound else _on(value, stage.device)
                        value.requires_grad_(node.name in differentiable or node.name in requiring)
                    inputs.append(value)
            results = fx.Interpreter(stage.module).run(*inputs)
        known[form] = tuple(bool(getattr(result, "requires_grad", False)) for result in results)
        requiring.update(name for name, tracked in zip(stage.outputs, known[form], strict=True) if tracked)
    return frozenset(requiring)


def _on(value: Tensor, device: torch.device) -> Tensor:
    """A fake tensor like another, where the stage runs: a model on the meta device is lowered for a real one."""
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
