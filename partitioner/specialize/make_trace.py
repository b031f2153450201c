"""Trace the model as it is partitioned, and later in other modes or for other arguments, by the same plan and with the same tensors.

pm.train(); pm(x)      traced in training mode        first.state: parameters, buffers ──┐  the same tensors
pm.eval();  pm(x)      traced when first called       a plan for the same shards       ──┘
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from partitioner.options.batch_statistics import warn_of_microbatches
from partitioner.options.given_plan import check_fits
from partitioner.runtime.base import Runtime
from partitioner.runtime.broadcast_values import broadcast_values
from partitioner.runtime.state.hooks import TensorHooks
from partitioner.runtime.state.materialize import materialize, state_of_trace
from partitioner.runtime.state.parameters import State
from partitioner.specialize.programs import Programs, Tensors, first_variant
from partitioner.specialize.shard_holders import PlanCuts
from partitioner.specialize.trace import Assumptions, Trace, Tracing
from partitioner.specialize.transfer import held_by_stage, positions_of, stored_as_in, transferred_plan
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.restore import preserve
from partitioner.tracing.trace import trace
from partitioner.tracing.traced_model import trace_model
from passes.graph.equivalence import graph_digest
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.ir.torch_private import tree_flatten, tree_leaves, tree_unflatten
from passes.normalize.specialize_batch import fixed_for
from passes.spmd.shard_stages import StoredLayouts


def example_of(trace: Trace) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments that a model was traced with."""
    tracing = trace.tracing
    if tracing.args is None and tracing.kwargs is None:
        return find_example_inputs(trace.original)
    return tracing.args or (), tracing.kwargs or {}


def requiring_in_trace(trace: Trace) -> frozenset[str]:
    """Return the placeholders of the inputs that required a gradient in the example."""
    pairs = zip(trace.graph.inputs, tree_leaves(example_of(trace)), strict=True)
    return frozenset(leaf.placeholder for leaf, value in pairs if leaf.placeholder is not None and value.requires_grad)


def with_requiring(trace: Trace, requiring: frozenset[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the example with gradients required of these placeholders alone."""
    values, tree = tree_flatten(example_of(trace))
    leaves = [
        value if leaf.placeholder is None else value.detach().requires_grad_(leaf.placeholder in requiring)
        for leaf, value in zip(trace.graph.inputs, values, strict=True)
    ]
    args, kwargs = tree_unflatten(leaves, tree)
    return tuple(args), dict(kwargs)


def modes_of(model: nn.Module) -> tuple[bool, ...]:
    """Return the flag ``training`` of every module, in the order of ``named_modules``."""
    return tuple(module.training for module in model.modules())


def modes_of_trace(model: nn.Module, training: bool | None) -> tuple[bool, ...]:
    """Return the modes that ``trace`` traces in: those of the model if it is in the mode asked for, else that mode for every module."""
    if training in (None, model.training):
        return modes_of(model)
    return modes_after_train(model, modes_of(model), bool(training))


def modes_after_train(model: nn.Module, modes: Sequence[bool], training: bool) -> tuple[bool, ...]:
    """Return the modes of all modules after ``model.train(training)``, which a class may override; the model is not changed."""
    with TRACING, preserve(model):
        _set_modes(model, modes)
        model.train(training)
        return modes_of(model)


def _set_modes(model: nn.Module, modes: Sequence[bool]) -> None:
    """Set the flag of every module, without ``train()``, which a class may override."""
    for module, is_training in zip(model.modules(), modes, strict=True):
        module.training = is_training


@contextlib.contextmanager
def _in_modes(model: nn.Module, tracing: Tracing) -> Iterator[None]:
    """Hold a model in given modes, with the structure that was partitioned, while it is traced."""
    modes = tracing.modes
    with TRACING, tracing.structure.restored():
        before = modes_of(model)
        _set_modes(model, modes)
        try:
            yield
        finally:
            _set_modes(model, before)


def traced(model: nn.Module, tracing: Tracing, rows: int | None = None) -> ModelGraph:
    """Trace a model in given modes, for a number of rows or as the example has them."""
    with _in_modes(model, tracing):
        call, mode, dims = (model, tracing.args, tracing.kwargs, None), tracing.with_gradients, tracing.batch_dims
        if rows is None:
            return trace_model(*call, tracing.autocast, with_gradients=mode, batch_dims=dims).graph
        return trace(*call, rows, tracing.autocast, with_gradients=mode, batch_dims=dims)


@gc_paused()
def first_trace(
    model: nn.Module, graph: ModelGraph, plan: Plan, runtime: Runtime, assumed: Assumptions, tracing: Tracing, hooks: TensorHooks
) -> Trace:
    """Materialize the parameters of this process's ranks; programs are lowered from the plan when they are first read or run."""
    graph = fixed_for(graph, plan)
    cuts = _cuts(model, graph, plan, tracing, assumed.progress)
    blocks = cuts.holdings(first_variant(graph, plan, tracing.inputs), runtime.devices)
    # With local statistics, and where ranks share microbatches, each rank's buffers are those of its own rows.
    equal_buffers = plan.batchnorm == "sync" and not plan.replicas
    state = materialize(model, graph, blocks, runtime.devices, runtime.local_ranks, hooks, equal_buffers=equal_buffers)
    broadcast_values(model, state, runtime)
    return _trace(model, graph, plan, runtime, state, cuts, assumed, tracing)


@gc_paused()
def trace_for(first: Trace, tracing: Tracing) -> Trace:
    """Trace the model in other modes, in another autocast or with other arguments, and lower it by the same plan, with the same tensors.

    Every rank must call it.

    Raises:
        TraceError: the model cannot be made one graph so.
        ConfigError: processes ask for another trace; or the plan does not fit, or needs parameters where the first form has none.
    """
    runtime = first.runtime
    graph = traced(first.original, tracing)
    if len(runtime.local_ranks) < runtime.n_ranks:
        runtime.agree("modes", f"{'training' if graph.training else 'evaluation'} (graph {graph_digest(graph)})")
    problem = first.assumed.problem
    fixed_microbatches = problem is None or problem.request.n_microbatches is not None
    plan = transferred_plan(first.plan, first.graph, graph, held_by_stage(first), fixed_microbatches=fixed_microbatches)
    check_fits(plan, graph)
    if 0 in runtime.local_ranks:
        warn_of_microbatches(graph, plan)
    return trace_of_graph(first, fixed_for(graph, plan), plan, tracing)


def trace_of_graph(first: Trace, graph: ModelGraph, plan: Plan, tracing: Tracing) -> Trace:
    """Return the trace of another trace, with the parameters and buffers of the first one."""
    runtime = first.runtime
    apart = [name for placeholder, name in first.graph.parameters.items() if not first.state.is_whole_here(placeholder)]
    stored = stored_as_in(first.cuts.plan_cut, first.graph, graph, positions_of(first, apart))
    cuts = _cuts(first.original, graph, plan, tracing, first.assumed.progress, stored)
    blocks = cuts.holdings(first_variant(graph, plan, tracing.inputs), runtime.devices)
    state = state_of_trace(first.state, graph, blocks)
    return _trace(first.original, graph, plan, runtime, state, cuts, first.assumed, tracing)


@gc_paused()
def trace_of_sizes(planned: Trace, sizes: Mapping[str, int], rows: int) -> Trace:
    """Return the trace for other sizes of the inputs: the same plan and tensors, and programs for these sizes.

    Args:
        rows: of the call, for the error.

    Raises:
        ConfigError: the model does not take them.
    """
    assert planned.graph.for_sizes is not None
    with _in_modes(planned.original, planned.tracing):
        graph = fixed_for(planned.graph.for_sizes.at(sizes, rows), planned.plan)
    args, kwargs = planned.graph.for_sizes.call_of(sizes)
    tracing = dataclasses.replace(planned.tracing, args=args, kwargs=kwargs)
    cuts = _cuts(planned.original, graph, planned.plan, tracing, planned.assumed.progress, planned=planned.cuts)
    return _trace(planned.original, graph, planned.plan, planned.runtime, planned.state, cuts, planned.assumed, tracing)


def _cuts(
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    tracing: Tracing,
    progress: bool | None,
    stored: StoredLayouts | None = None,
    planned: PlanCuts | None = None,
) -> PlanCuts:
    """Return the cuts of a trace by a plan; a batch size that the trace does not serve is traced in the same modes."""

    def trace_again(rows: int | None) -> ModelGraph:
        graph = traced(model, tracing, rows)
        return fixed_for(graph, plan) if rows is None else graph

    return PlanCuts(graph, plan, trace_again, stored, planned, progress)


def _trace(
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    runtime: Runtime,
    state: State,
    cuts: PlanCuts,
    assumed: Assumptions,
    tracing: Tracing,
) -> Trace:
    """Return the trace of a trace whose tensors are ``state``."""

    def trainable() -> frozenset[str]:
        return frozenset(placeholder for placeholder, name in graph.parameters.items() if name in state.gradients.trained)

    programs = Programs(graph, plan, cuts, runtime, Tensors(state.of_rank, trainable), tracing.inputs)
    return Trace(model, graph, plan, runtime, state, programs, assumed, cuts, tracing)
