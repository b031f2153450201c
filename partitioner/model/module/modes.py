"""A form of a partitioned model: its trace in given modes, with programs that share the tensors of all forms.

pm.train(); pm(x)      traced in training mode        first.state: parameters, buffers ──┐  the same tensors
pm.eval();  pm(x)      traced when first called       a plan for the same shards       ──┘
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from partitioner.model.calls import Calls
from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.losses.losses import Losses
from partitioner.model.module.program_state import refuse_changed_buffers, refuse_changed_program
from partitioner.model.session import Assumptions, Session, Tracing
from partitioner.options.batch_statistics import warn_of_microbatches
from partitioner.options.given_plan import check_fits
from partitioner.runtime.base import Runtime
from partitioner.runtime.broadcast_values import broadcast_values
from partitioner.runtime.state.hooks import TensorHooks
from partitioner.runtime.state.parameters import State, materialize, state_of_trace
from partitioner.specialize.programs import Programs, Tensors, first_variant
from partitioner.specialize.request import Request
from partitioner.specialize.shard_holders import PlanCuts
from partitioner.specialize.transfer import stored_as_in, transferred_plan
from partitioner.tracing.autograd.hooks import GRADIENTS_ON
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.restore import preserve
from partitioner.tracing.trace import trace
from partitioner.tracing.traced_model import trace_model
from passes.graph.equivalence import graph_digest
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan
from passes.ir.torch_private import tree_flatten, tree_leaves, tree_unflatten
from passes.normalize.specialize_batch import fixed_for
from passes.spmd.shard_stages import StoredLayouts

__all__ = ["Form", "first_session", "modes_after_train", "modes_of", "modes_of_trace", "session_of_trace", "session_of_tracing", "traced"]


_GradientState = tuple[bool, frozenset[str]]
"""Whether gradients are on, and the placeholders of the inputs that require one."""

_SIZES_KEPT = 32
"""Sizes of inputs, besides the planned ones, whose programs are kept."""


@dataclasses.dataclass(eq=False)
class Form:
    """A partitioned model in given modes, for given arguments.

    Attributes:
        session: its parts.
        calls: runs its programs.
        losses: what was proved of loss functions.
        last_step: the last training step in these modes, for the plan's batch; None: there was none.
        of_sizes: the forms for sizes of the inputs that were not planned, least recently used first.
        of_gradients: the forms for other states of autograd, see ``for_gradients``.
    """

    session: Session
    calls: Calls
    losses: Losses
    last_step: Request | None = None
    of_sizes: OrderedDict[tuple[int, ...], Form] = dataclasses.field(default_factory=OrderedDict)
    of_gradients: dict[_GradientState, Form] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Form:
        """Return the form of a session."""
        calls = Calls(session.original, session.graph, session.runtime, session.state, session.programs.rows, session.left, session.dtype)
        losses = Losses(session.runtime, session.graph, session.programs.rows, session.left, session.tracing.batch_dims)
        return cls(session, calls, losses)

    def for_gradients(self, requiring: frozenset[str], *, tracked: bool) -> Form:
        """Return the form for a call with gradients on or off: of a model whose code asks for that, another trace.

        Every rank must call it.

        Args:
            requiring: placeholders of the inputs that require a gradient.
            tracked: whether gradients are on.

        Raises:
            ConfigError: the model asks which tensors require gradients, and a parameter was frozen since; or it computes otherwise with
                plain state of the program that has changed since.
        """
        session = self.session
        _refuse_changed_program(session)
        if not session.graph.gradient_questions:
            return self
        _refuse_frozen(session, tracked=tracked)
        state = (tracked, requiring)
        if state == (session.tracing.with_gradients, _requiring_in_trace(session)):
            return self
        if state not in self.of_gradients:
            with session.runtime.failing_together():
                args, kwargs = _with_requiring(session, requiring)
                tracing = dataclasses.replace(session.tracing, args=args, kwargs=kwargs, with_gradients=tracked)
                other = session_of_tracing(session, tracing)
            is_equal = not session.graph.constants and graph_digest(other.graph) == graph_digest(session.graph)
            self.of_gradients[state] = self if is_equal else Form.of(other)
        return self.of_gradients[state]

    def at(self, sizes: Mapping[str, int]) -> Form:
        """Return the form for sizes of the inputs besides the batch, by name, made when they first come; the last ones are kept.

        Raises:
            ConfigError: the model does not take inputs of these sizes.
        """
        if sizes == self.session.graph.open_sizes:
            return self
        key = tuple(sizes.values())
        if key not in self.of_sizes:
            with self.session.runtime.failing_together():
                self.of_sizes[key] = Form.of(session_of_sizes(self.session, sizes))
            if len(self.of_sizes) > _SIZES_KEPT:
                self.of_sizes.popitem(last=False)
        self.of_sizes.move_to_end(key)
        return self.of_sizes[key]


def _example(session: Session) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments that a model was traced with."""
    tracing = session.tracing
    if tracing.args is None and tracing.kwargs is None:
        return find_example_inputs(session.original)
    return tracing.args or (), tracing.kwargs or {}


def _requiring_in_trace(session: Session) -> frozenset[str]:
    """Return the placeholders of the inputs that required a gradient in the example."""
    pairs = zip(session.graph.inputs, tree_leaves(_example(session)), strict=True)
    return frozenset(leaf.placeholder for leaf, value in pairs if leaf.placeholder is not None and value.requires_grad)


def _with_requiring(session: Session, requiring: frozenset[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the example with gradients required of these placeholders alone."""
    values, tree = tree_flatten(_example(session))
    leaves = [
        value if leaf.placeholder is None else value.detach().requires_grad_(leaf.placeholder in requiring)
        for leaf, value in zip(session.graph.inputs, values, strict=True)
    ]
    args, kwargs = tree_unflatten(leaves, tree)
    return tuple(args), dict(kwargs)


def _refuse_frozen(session: Session, *, tracked: bool) -> None:
    """Raise ConfigError where code of the model asks which tensors require gradients, and another parameter does than in the trace."""
    questions = [question for question in session.graph.gradient_questions if question != GRADIENTS_ON]
    trained = {name: session.tracing.structure.trains(name) for name in session.graph.parameters.values()}
    changes = {
        "frozen": [name for name, parameter in session.state.named_parameters() if trained[name] and not parameter.requires_grad],
        "unfrozen": [name for name in session.state.gradients.trained if not trained[name]],
    }
    for change, names in changes.items():
        if tracked and questions and names:
            raise ConfigError(
                f"{first_few(names)} was {change} after the model was partitioned, and its forward asks for {questions[0]} of its tensors",
                remedy="freeze, or unfreeze, the parameters of the model, and partition it again",
            )


def _refuse_changed_program(session: Session) -> None:
    """Raise ConfigError where state that decides what the model computes has changed since the trace."""
    changed = [reading for reading in session.graph.program_state if reading.is_changed()]
    if changed:
        refuse_changed_program(session, changed)
    if session.graph.deciding_buffers:
        refuse_changed_buffers(session)


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
def first_session(
    model: nn.Module, graph: ModelGraph, plan: Plan, runtime: Runtime, assumed: Assumptions, tracing: Tracing, hooks: TensorHooks
) -> Session:
    """Materialize the parameters of this process's ranks; programs are lowered from the plan when they are first read or run."""
    graph = fixed_for(graph, plan)
    cuts = _cuts(model, graph, plan, tracing)
    blocks = cuts.holdings(first_variant(graph, plan, tracing.inputs), runtime.devices)
    # With local statistics, and where ranks share microbatches, each rank's buffers are those of its own rows.
    equal_buffers = plan.batchnorm == "sync" and not plan.replicas
    state = materialize(model, graph, blocks, runtime.devices, runtime.local_ranks, hooks, equal_buffers=equal_buffers)
    broadcast_values(model, state, runtime)
    return _session(model, graph, plan, runtime, state, cuts, assumed, tracing, LeftAttributes(model))


@gc_paused()
def session_of_tracing(first: Session, tracing: Tracing) -> Session:
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
    plan = transferred_plan(first.plan, first.graph, graph, _held_by_stage(first), fixed_microbatches=fixed_microbatches)
    check_fits(plan, graph)
    if 0 in runtime.local_ranks:
        warn_of_microbatches(graph, plan)
    return session_of_trace(first, fixed_for(graph, plan), plan, tracing)


def _held_by_stage(first: Session) -> list[list[frozenset[str]]]:
    """Return for each stage the names of the parameters that its ranks hold; where these do not fit a call, of fewer parameters.

    In one process any rank can read what one device holds whole: first what the plan does not read, then everything.
    """
    names, held_at = first.graph.parameters, _positions(first, first.graph.parameters.values())
    held = [frozenset(name for name, places in held_at.items() if set(places).issuperset(stage)) for stage in first.plan.stage_ranks]
    fixed = frozenset(name for each, name in names.items() if not first.state.is_whole_here(each))
    read = frozenset(names[node.name] for node in first.graph.graph.nodes if node.name in names and node.users)
    return [held] if fixed == frozenset(held_at) else [held, [each & (read | fixed) for each in held], [each & fixed for each in held]]


def _positions(first: Session, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return parameter -> the pipeline positions that hold it."""
    position = {rank: place for ranks in pipelines(first.plan.grid) for place, rank in enumerate(ranks)}
    return {name: tuple(sorted({position[rank] for rank in first.state.blocks_in_processes(name)})) for name in names}


def session_of_trace(first: Session, graph: ModelGraph, plan: Plan, tracing: Tracing) -> Session:
    """Return the session of another trace, with the parameters and buffers of the first one."""
    runtime = first.runtime
    apart = [name for placeholder, name in first.graph.parameters.items() if not first.state.is_whole_here(placeholder)]
    stored = stored_as_in(first.cuts.plan_cut, first.graph, graph, _positions(first, apart))
    cuts = _cuts(first.original, graph, plan, tracing, stored)
    blocks = cuts.holdings(first_variant(graph, plan, tracing.inputs), runtime.devices)
    state = state_of_trace(first.state, graph, blocks)
    return _session(first.original, graph, plan, runtime, state, cuts, first.assumed, tracing, first.left)


@gc_paused()
def session_of_sizes(planned: Session, sizes: Mapping[str, int]) -> Session:
    """Return the session for other sizes of the inputs: the same plan and tensors, and programs for these sizes.

    Raises:
        ConfigError: the model does not take them.
    """
    assert planned.graph.for_sizes is not None
    with _in_modes(planned.original, planned.tracing):
        graph = fixed_for(planned.graph.for_sizes.at(sizes), planned.plan)
    args, kwargs = planned.graph.for_sizes.call_of(sizes)
    tracing = dataclasses.replace(planned.tracing, args=args, kwargs=kwargs)
    cuts = _cuts(planned.original, graph, planned.plan, tracing, planned=planned.cuts)
    return _session(planned.original, graph, planned.plan, planned.runtime, planned.state, cuts, planned.assumed, tracing, planned.left)


def _cuts(
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    tracing: Tracing,
    stored: StoredLayouts | None = None,
    planned: PlanCuts | None = None,
) -> PlanCuts:
    """Return the cuts of a trace by a plan; a batch size that the trace does not serve is traced in the same modes."""

    def trace_again(rows: int | None) -> ModelGraph:
        graph = traced(model, tracing, rows)
        return fixed_for(graph, plan) if rows is None else graph

    return PlanCuts(graph, plan, trace_again, stored, planned)


def _session(
    model: nn.Module,
    graph: ModelGraph,
    plan: Plan,
    runtime: Runtime,
    state: State,
    cuts: PlanCuts,
    assumed: Assumptions,
    tracing: Tracing,
    left: LeftAttributes,
) -> Session:
    """Return the session of a trace whose tensors are ``state``."""

    def trainable() -> frozenset[str]:
        return frozenset(placeholder for placeholder, name in graph.parameters.items() if name in state.gradients.trained)

    programs = Programs(graph, plan, cuts, runtime, Tensors(state.by_rank, state.slots, trainable), tracing.inputs)
    return Session(model, graph, plan, runtime, state, programs, assumed, cuts, tracing, left)
