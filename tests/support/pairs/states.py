"""Lower the model of a fixture, and collect the texts and runs of the states before and after its pass."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner import partition
from partitioner.reports.dump_passes import _graphs_of
from partitioner.schedules.catalog import make_schedule
from partitioner.tracing import assemble
from partitioner.tracing.trace import source_of, trace_source
from passes.autograd.staged_model import Differentiation
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.graph import Autocast, ModelGraph
from passes.ir.mesh import STAGES
from passes.ir.phase import observing_phases
from passes.ir.plan import Plan, Prediction, Stage
from passes.normalize.order import NORMALIZE, ExportedGraph, Normalizer
from passes.normalize.specialize_batch import fixed_for
from passes.pipeline import PHASES, Lowered, Lowerer, Target
from tests.support.pairs.runs import Subject, run_state
from tests.support.pairs.text import Pair, graph_text
from tests.support.running.traced import Run, assert_equal_runs, run_model

ORDERS = (("export", *(step.name for step in NORMALIZE)), ("start", *(phase.name for phase in PHASES)))
"""The steps of normalization, and the phases; the first name of each order is its starting state."""
PROGRAMS = ("emit", "place")
"""The phases that write programs of a training step, which is run."""


def texts_of_pair(pair: Pair) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the graphs before and after the pass of a fixture, once their runs agree with the model.

    Raises:
        AssertionError: a result, a gradient or a buffer is not the model's.
    """
    options = pair.keywords()
    order = next(order for order in ORDERS if options["phase"] in order)
    phase = order.index(options["phase"])
    with float64():
        subject = _subject(pair.model)
        seen = _Seen((order[phase - 1], order[phase]), subject)
        _lower(subject, options, seen)
        expected = run_model(subject.model, subject.args, {}, gradient_of_inputs=False)
        loss_alone = tuple(leaf if place in options.get("kept", ()) else None for place, leaf in enumerate(expected.leaves))
        for name, run in seen.runs.items():
            if run is not None:
                assert_equal_runs(run, replace(expected, leaves=loss_alone) if name == options["phase"] == "return_loss" else expected)
    before, after = (seen.texts[name] for name in seen.phases)
    return before, after


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Compute in double precision, so that rounding hides no wrong sum."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


@dataclass
class _Seen:
    """Keep texts and runs of two states at the time they are observed, since passes rewrite graphs in place."""

    phases: tuple[str, str]
    subject: Subject

    def __post_init__(self) -> None:
        self.texts: dict[str, Mapping[str, str]] = {}
        self.runs: dict[str, Run | None] = {}

    def __call__(self, phase: str, state: Any, _: float = 0.0) -> None:
        if phase in self.phases:
            graphs = _graphs_of(state)
            if isinstance(state, ExportedGraph):
                graphs |= {name: each.graph for name, each in _submodules(state)}
            for graph in graphs.values():
                graph.lint()
            self.texts[phase] = {name: graph_text(graph) for name, graph in graphs.items()}
            self.runs[phase] = run_state(state, self.subject)


def _submodules(state: ExportedGraph) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield the subgraphs that the graph refers to."""
    for node in state.graph.nodes:
        if node.op == "get_attr":
            module = state.module.get_submodule(str(node.target))
            assert isinstance(module, fx.GraphModule)
            yield str(node.target), module


def _subject(text: str) -> Subject:
    """Return the model and its inputs. Arguments of ``forward`` are inputs; other names are attributes of the model."""
    torch.manual_seed(0)
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor}
    given = set(scope)
    exec(text, scope)  # noqa: S102  our own fixtures
    forward = scope["forward"]
    names = forward.__code__.co_varnames[1 : forward.__code__.co_argcount]
    model: nn.Module = type("Model", (nn.Module,), {"forward": forward})()
    for name, value in scope.items():
        if name in given or name in names or name in ("forward", "__builtins__"):
            continue
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            model.register_buffer(name, value)
        else:
            setattr(model, name, value)
    return Subject(model, tuple(scope[name] for name in names))


# -- lowering ----------------------------------------------------------------------------------------------------------------------


def _lower(subject: Subject, options: Mapping[str, Any], seen: _Seen) -> None:
    """Run the passes up to the fixture's."""
    autocast = Autocast("cpu", options["autocast"]) if "autocast" in options else None

    def traced() -> ModelGraph:
        with torch.random.fork_rng():
            source = source_of(copy.deepcopy(subject.model), subject.args, {}, None, autocast)
            return trace_source(source, open_sizes=("length",) if options["phase"] == "fix_sizes" else ())[0]

    if options["phase"] in ORDERS[0]:

        def shown(exported: ExportedGraph) -> Normalizer:
            seen("export", exported)
            return Normalizer(exported)

        with observing_phases(seen), mock.patch.object(assemble, "Normalizer", shown):
            traced()
        return
    graph = traced()
    plan = _plan(graph, options)
    if options["phase"] in PROGRAMS:
        with observing_phases(seen):
            run = _step(subject, plan)
        seen.runs["step"] = run
        return
    devices = tuple(map(torch.device, plan.devices))
    kept, in_parts = options.get("kept"), options.get("in_parts", False)
    target = Target(kept, in_parts, "whole", devices=devices, n_microbatches=plan.n_microbatches)
    start = Lowered(plan, fixed_for(graph, plan))
    lowerer = Lowerer(start)
    seen("start", start)
    with observing_phases(seen):
        if options["phase"] in ("differentiate", "once_a_step"):
            returned = frozenset(lowerer.after("split", target).stages[0, 0].returned)
            target = replace(target, differentiation=Differentiation(returned, frozenset(), frozenset(graph.parameters)))
        lowerer.after(options["phase"], target)
    if None in seen.runs.values():
        seen.runs["step"] = _step(subject, plan)


def _plan(graph: ModelGraph, options: Mapping[str, Any]) -> Plan:
    """Return the plan of a fixture; predictions are zero."""
    mesh: Mapping[str, int] = options.get("mesh", {"pipeline": 1})
    n_ranks = math.prod(mesh.values())
    n_places = math.prod(size for name, size in mesh.items() if name in STAGES)
    schedule, n_microbatches = options.get("schedule", "1F1B"), options.get("n_microbatches", 1)
    first = (graph.computing_nodes()[0].name, *options.get("stages", ()))
    ranks = make_schedule(schedule, n_places, n_microbatches).stage_ranks
    return Plan(
        mesh=tuple(mesh.items()),
        devices=("cpu",) * n_ranks,
        stages=tuple(Stage(own, name, (), 0, 0, 0.0, 0.0, 0.0, 0, 0) for own, name in zip(ranks, first, strict=True)),
        schedule=schedule,
        n_microbatches=n_microbatches,
        recompute=options.get("recompute", "none"),
        recomputed=tuple(options.get("recomputed", ())),
        batch_size=graph.batch_size,
        prediction=Prediction(step_time=0.0, memory=(0,) * n_ranks),
        axes=tuple(options.get("axes", {}).items()),
        batchnorm=options.get("batchnorm", "sync"),
        widths=options.get("widths", ()),
        tiles=options.get("tiles", ()),
        tile_budget=options.get("tile_budget", 0),
        halos=tuple(HaloSegment(first, last, (), strategy, 0, 0.0, 0.0, 0, 0.0) for first, last, strategy in options.get("halos", ())),
    )


def _step(subject: Subject, plan: Plan) -> Run:
    """Partition the model under a plan; return results of a call, and the gradients of a training step."""
    pm = partition(copy.deepcopy(subject.model), plan.n_ranks, example_inputs=subject.args, plan=plan, progress=False)
    rows = subject.args[0].shape[0]
    with torch.no_grad():
        result = pm(*subject.args)
    pm.train_step(*subject.args, target=torch.ones_like(result), loss_fn=_loss)
    gradients = {name: None if gradient is None else gradient * rows for name, gradient in pm.full_gradients().items()}
    return Run((result,), gradients, (), dict(subject.model.named_buffers()))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over rows, which microbatches and ranks add up to."""
    return (output * target).sin().sum() / output.shape[0]
