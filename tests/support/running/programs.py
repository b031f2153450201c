"""Programs of small models without a planner: the graph is cut into stages of equally many nodes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import torch

from partitioner.schedules.catalog import make_schedule
from partitioner.tracing.trace import trace
from passes.analysis.replicable import replicable_nodes
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, SplitModel, cut_stages
from passes.emit.programs import LossForm, emit_backward, emit_forward, emit_train_step
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan, Prediction, Stage
from passes.ir.program import Program
from passes.pipeline import differentiate_stages, values_requiring_gradient
from tests.support.models.case import Case

Kind = Literal["train_step", "forward", "training_forward", "backward"]

FIXED_SIZE = 2
"""Rows of a microbatch where a model cannot be traced for any number of rows."""


@functools.cache
def traced(case: Case, batch_size: int, input_gradients: bool) -> tuple[ModelGraph, Differentiation]:
    """Return a case's graph, and all that can be differentiated in it."""
    instance = case.build(batch_size=batch_size)
    graph = trace(instance.model, instance.args, instance.kwargs)
    if graph.batch is None:
        graph = trace(instance.model, instance.args, instance.kwargs, batch_size=FIXED_SIZE)
    trainable = frozenset(name for name, original in graph.parameters.items() if instance.model.get_parameter(original).requires_grad)
    floating = {leaf.placeholder for leaf in graph.inputs if leaf.dtype is not None and leaf.dtype.is_floating_point}
    inputs = frozenset(name for name in floating if name is not None) if input_gradients else frozenset[str]()
    returned = frozenset(output.node for output in graph.outputs if output.node is not None)
    return graph, Differentiation(returned, inputs, trainable)


def even_plan(graph: ModelGraph, schedule: str, n_ranks: int, n_microbatches: int, recompute: Recompute = "none") -> Plan:
    """Equally many nodes a stage; what a planner would predict is zero."""
    stage_ranks = make_schedule(schedule, n_ranks, n_microbatches).stage_ranks
    replicable = replicable_nodes(graph)
    names = [node.name for node in graph.computing_nodes() if node.name not in replicable and not node.name.startswith("getitem")]
    first_nodes = [names[index * len(names) // len(stage_ranks)] for index in range(len(stage_ranks))]
    stages = tuple(Stage(ranks, name, (), 0, 0, 0.0, 0.0, 0.0, 0, 0) for ranks, name in zip(stage_ranks, first_nodes, strict=True))
    return Plan(
        mesh=(("pipeline", n_ranks),),
        devices=("cpu",) * n_ranks,
        stages=stages,
        schedule=schedule,
        n_microbatches=n_microbatches,
        recompute=recompute,
        batch_size=graph.batch_size,
        prediction=Prediction(step_time=0.0, memory=(0,) * n_ranks),
    )


def lowered_stages(
    case: Case,
    schedule: str,
    n_ranks: int,
    n_microbatches: int,
    *,
    recompute: Recompute = "none",
    input_gradients: bool = False,
    batch_size: int = 9,
) -> SplitModel:
    """Return the stages with their training graphs."""
    graph, everything = traced(case, batch_size, input_gradients)
    plan = even_plan(graph, schedule, n_ranks, n_microbatches, recompute)
    stages = cut_stages([graph] * len(plan.stages), plan, [torch.device("cpu")] * len(plan.stages))
    requiring = values_requiring_gradient(stages, everything.parameters | everything.inputs)
    wanted = Differentiation(everything.outputs & requiring, everything.inputs, everything.parameters)
    return differentiate_stages(stages, wanted, recompute)


def programs(
    case: Case,
    schedule: str,
    n_ranks: int,
    n_microbatches: int,
    *,
    recompute: Recompute = "none",
    input_gradients: bool = False,
    batch_size: int = 9,
) -> Mapping[Kind, tuple[Program, ...]]:
    """Return every kind of program of every rank."""
    lowered = lowered_stages(
        case, schedule, n_ranks, n_microbatches, recompute=recompute, input_gradients=input_gradients, batch_size=batch_size
    )
    devices = [torch.device("cpu")] * n_ranks
    assert lowered.differentiation is not None
    return {
        "train_step": emit_train_step(lowered, make_schedule(schedule, n_ranks, n_microbatches), LossForm(), devices),
        "forward": emit_forward(lowered, n_microbatches, devices, training=False),
        "training_forward": emit_forward(lowered, n_microbatches, devices, training=True),
        "backward": emit_backward(lowered, n_microbatches, lowered.differentiation.outputs, devices),
    }
