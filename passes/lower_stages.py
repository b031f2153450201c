"""From a plan to the graphs of every stage: split, then differentiate from the last stage to the first.

The order matters: a stage's backward takes the gradient of an output only if some later stage (or the loss) gives one, which is known
once those have been differentiated. So None stays None from the loss back to the parameters, as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from passes.alike_stages import form_of, renamed
from passes.differentiate_regions import differentiate_regions, tracked_outputs
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.lower import Differentiation, LoweredStages
from passes.recompute import Recompute
from passes.split_backward import DifferentiatedStage, split_backward
from passes.stages import StageGraph, split_stages
from passes.streaming.differentiate_tiles import differentiate_tiles, tiles_requiring_gradient
from passes.streaming.regions import is_streamed

__all__ = ["cut_stages", "differentiate_stages", "values_requiring_gradient"]


def cut_stages(parts: Sequence[ModelGraph], plan: Plan, devices: Sequence[torch.device]) -> LoweredStages:
    """Cut a part of the model into the plan's stages.

    Args:
        parts: for each place along the pipeline, what it computes a stage of.
        devices: for each stage, where it runs.

    Raises:
        ConfigError: a stage reads what no stage sends: those of unlike width disagree on what each computes for itself.
    """
    split = {id(part): split_stages(part, plan.first_nodes, devices) for part in {id(part): part for part in parts}.values()}
    stages = tuple(split[id(parts[stage.ranks[0]])][index] for index, stage in enumerate(plan.stages))
    sent = {name for stage in stages for name in stage.outputs}
    for stage in stages:
        if missing := [name for name in stage.values if name not in sent]:
            raise ConfigError(
                f"stage {stage.index} reads {missing[0]}, which the stages in front of it, of another width, do not send",
                remedy="give all stages as many ranks of the tensor dimension",
            )
    of_stages = tuple(parts[stage.ranks[0]] for stage in plan.stages)
    return LoweredStages(of_stages[-1], stages, plan.stage_ranks, parts=of_stages if len(split) > 1 else ())


def differentiate_stages(
    lowered: LoweredStages, differentiation: Differentiation, recompute: Recompute, *, share: bool = False
) -> LoweredStages:
    """Add the training graphs.

    Args:
        share: whether stages that compute alike have one graph, whose names are those of one of them: enough to look at costs.
    """
    differentiable = differentiation.parameters | differentiation.inputs
    requiring = values_requiring_gradient(lowered, differentiable)
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
            joint = differentiate_regions(stage, wanted, of_outputs, lowered.templates)
            training.insert(0, split_backward(joint, recompute))
        known[form] = stage, training[0]
        given.update(training[0].arguments_with_gradient)
    return replace(lowered, training=tuple(training), differentiation=differentiation, requiring=requiring)


def values_requiring_gradient(lowered: LoweredStages, differentiable: frozenset[str]) -> frozenset[str]:
    """Which values between stages autograd would track, found by running the stages on fake tensors."""
    requiring: set[str] = set()
    known: dict[Hashable, tuple[bool, ...]] = {}
    for stage in lowered.stages:
        if is_streamed(stage.module.graph):
            requiring |= tiles_requiring_gradient(stage, differentiable)
            continue
        wanted = frozenset(name for name in stage.bound + stage.arguments if name in differentiable or name in requiring)
        form = form_of(stage, wanted, ())
        if form not in known:
            found = tracked_outputs(stage, wanted, lowered.templates)
            known[form] = tuple(name in found for name in stage.outputs)
        requiring.update(name for name, tracked in zip(stage.outputs, known[form], strict=True) if tracked)
    return frozenset(requiring)
