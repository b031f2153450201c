"""Run the states of lowering: exported graphs, model graphs, graphs of ranks side by side, stages one after another."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.autograd.staged_model import SplitModel
from passes.ir.comm.functional import COLLECTIVES
from passes.ir.graph import ModelGraph
from passes.normalize.order import ExportedGraph
from passes.pipeline import Lowered
from tests.support.running.lockstep import CARRIED_OUT, run_cut
from tests.support.running.traced import SEED, Run, backward


@dataclass(frozen=True)
class Subject:
    """A model and the inputs of one call."""

    model: nn.Module
    args: tuple[Any, ...]


def run_state(state: Any, subject: Subject) -> Run | None:
    """Return results, gradients and buffers of a state; None if its graphs do not run by themselves."""
    if isinstance(state, ExportedGraph):
        return _run_exported(state, subject)
    assert isinstance(state, Lowered)
    if state.programs:
        return None
    if state.cut is None:
        return _run_graph(state.graph, subject)
    if not state.cut.is_cut:
        return _run_stages(state.stages[0, 0], subject) if state.stages else None
    collectives = {node.target for part in state.cut.widest.parts for node in part.graph.nodes} & set(COLLECTIVES)
    if state.stages or len(state.cut.of_places) > 1 or not collectives <= CARRIED_OUT:
        return None
    run = run_cut(state.cut.widest, subject.model, subject.args)
    return Run(run.leaves, run.gradients, (), run.buffers)


def _run_exported(state: ExportedGraph, subject: Subject) -> Run:
    model = copy.deepcopy(subject.model)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    by_name = {re.sub(r"\W", "_", name): value for name, value in tensors.items()}
    names = subject.model.forward.__code__.co_varnames[1:]
    by_name |= {name: value.clone() if isinstance(value, Tensor) else value for name, value in zip(names, subject.args, strict=False)}
    by_name["batch"] = subject.args[0].shape[0]
    given = []
    for node in state.graph.nodes:
        if node.op == "placeholder":
            name = re.sub(r"^[pbc]_", "", node.name)
            given.append(by_name[name] if name in by_name else by_name[node.name])
    torch.manual_seed(SEED)
    results = fx.Interpreter(state.module, graph=state.graph).run(*given)
    returned = state.graph.output_node().args[0]
    assert isinstance(returned, tuple)
    # A parameter among them is no result: the forward leaves it on a module.
    return _run_of([each for each, node in zip(results, returned, strict=True) if not str(node).startswith("p_")], model)


def _run_graph(graph: ModelGraph, subject: Subject) -> Run:
    model = copy.deepcopy(subject.model)
    values = _values(graph, model, subject.args)
    torch.manual_seed(SEED)
    return _run_of(graph.module(*(values[node.name] for node in graph.graph.nodes if node.op == "placeholder")), model)


def _values(graph: ModelGraph, model: nn.Module, args: Sequence[Any]) -> dict[str, Any]:
    """Return the value of each placeholder; totals are counted over the batch, as programs do."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: dict[str, Any] = {**graph.constants, "batch": args[0].shape[0]}
    values |= {placeholder: tensors[name] for placeholder, name in (*graph.parameters.items(), *graph.buffers.items())}
    values |= {leaf.placeholder: value for leaf, value in zip(graph.inputs, args, strict=False) if leaf.placeholder is not None}
    for total in graph.totals:
        values[total.placeholder] = total.module(*(values[name] for name in total.arguments))
    return values


def _run_stages(lowered: SplitModel, subject: Subject) -> Run:
    """Run the stages one after another on the whole batch, and their backward graphs, if any, in reverse."""
    model = copy.deepcopy(subject.model)
    graph, values = lowered.graph, _values(lowered.graph, model, subject.args)
    torch.manual_seed(SEED)
    if not lowered.training:
        for stage in lowered.stages:
            results = stage.module(*(values[name] for name in (*stage.bound, *stage.arguments)))
            values.update(zip(stage.outputs, results, strict=True))
        return _run_of([values[output.node] for output in graph.outputs if output.node is not None], model)
    return _run_training(lowered, model, values)


def _run_training(lowered: SplitModel, model: nn.Module, values: dict[str, Any]) -> Run:
    graph, saved = lowered.graph, []
    with torch.no_grad():
        for stage, training in zip(lowered.stages, lowered.training, strict=True):
            *results, own = training.forward(*(values[name] for name in (*stage.bound, *stage.arguments)))
            values.update(zip(stage.outputs, results, strict=True))
            saved.append(own)
    leaves = [values[output.node].detach().requires_grad_() for output in graph.outputs if output.node is not None]
    backward(leaves)
    gradients = {output.node: leaf.grad for output, leaf in zip(graph.outputs, leaves, strict=True)}
    of_parameters: dict[str, Tensor | None] = dict.fromkeys(graph.parameters)
    with torch.no_grad():
        for training, own in zip(reversed(lowered.training), reversed(saved), strict=True):
            if training.backward is None:
                continue
            bound = [values[name] for name in training.backward_bound]
            *found, of_own = training.backward(*bound, *own, *(gradients[name] for name in training.outputs_with_gradient))
            _add(gradients, training.arguments_with_gradient, found)
            _add(of_parameters, training.parameters_with_gradient, of_own)
    named = {original: of_parameters[name] for name, original in graph.parameters.items()}
    return Run(tuple(leaf.detach() for leaf in leaves), named, (), dict(model.named_buffers()))


def _add(totals: dict[Any, Tensor | None], names: Sequence[str], found: Sequence[Tensor]) -> None:
    for name, gradient in zip(names, found, strict=True):
        known = totals.get(name)
        totals[name] = gradient if known is None else known + gradient


def _run_of(results: Sequence[Any], model: nn.Module) -> Run:
    backward(results)
    leaves = tuple(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in results)
    gradients: Mapping[str, Tensor | None] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Run(leaves, gradients, (), dict(model.named_buffers()))
