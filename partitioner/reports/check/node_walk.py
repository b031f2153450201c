"""Compare the values of all nodes: the model's graph on the whole batch beside the stages' graphs on its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.reports.check.compare import Comparison, compare, largest_magnitude
from partitioner.reports.check.original import SEED
from partitioner.reports.check.report import Difference
from passes.autograd.staged_model import SplitModel
from passes.graph.provenance import place_of
from passes.ir.comm.microbatch import split_batch
from passes.ir.graph import ModelGraph
from passes.stages.split import StageGraph

Values = dict[str, Tensor]


@dataclass(frozen=True)
class NodeWalk:
    """The result of a comparison node by node.

    Attributes:
        comparisons: one for each node whose values over microbatches can be concatenated, in graph order.
        first: the first node that differs.
    """

    comparisons: tuple[Comparison, ...]
    first: Difference | None


class _Recorder(fx.Interpreter):
    """Runs a graph and records the tensor results of its calls in ``values``, by node name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: Values = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function":
            self.values[n.name] = result.detach()
        return result


@dataclass
class _StageValues:
    """Values that the stages compute.

    Attributes:
        by_node: node -> its value on each microbatch.
        stage: node -> the first stage that computes it.
        in_training: output of a stage -> its value on each microbatch, computed by the stage's training graph.
    """

    by_node: dict[str, list[Tensor]] = field(default_factory=dict)
    stage: dict[str, int] = field(default_factory=dict)
    in_training: dict[str, list[Tensor]] = field(default_factory=dict)


def walk_nodes(
    whole: ModelGraph, lowered: SplitModel, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], sizes: Sequence[int]
) -> NodeWalk:
    """Run the whole graph and the stages' graphs, and compare node by node.

    Args:
        whole: the model's graph, for the whole batch.
        lowered: the stages, with their training graphs if there are any; their graphs are for microbatches.
        tensors: parameters, buffers and constants by placeholder; they are not written.
        inputs: the model's inputs by placeholder, whole batch.
        sizes: rows of each microbatch.
    """
    with torch.no_grad():
        reference = values_of(whole, {**tensors, **inputs, "batch": sum(sizes)})
        torch.manual_seed(SEED)
        actual = _run_stages(lowered, _with_own_buffers(whole, tensors), inputs, sizes)
    comparisons: list[Comparison] = []
    first: Difference | None = None
    for node, comparison, in_training in _compare_nodes(whole, reference, actual):
        comparisons.append(comparison)
        if first is None and not comparison.equal:
            stage = actual.stage[node.name]
            cause = "the stage's forward graph computes the right value, its training graph does not" if in_training else ""
            first = Difference(node.name, place_of(node), stage, lowered.stage_ranks[stage][0], comparison, cause)
    return NodeWalk(tuple(comparisons), first)


def values_of(graph: ModelGraph, given: Mapping[str, Any]) -> Values:
    """Run a graph and return the tensors of all its calls by node name; the values of its placeholders are not written."""
    torch.manual_seed(SEED)
    recorder, own = _Recorder(graph.module), _with_own_buffers(graph, given)
    recorder.run(*(own[node.name] for node in graph.graph.nodes if node.op == "placeholder"))
    return recorder.values


def _with_own_buffers(graph: ModelGraph, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Clone the buffers among the tensors, because a run may write them."""
    return {name: tensor.clone() if name in graph.buffers else tensor for name, tensor in tensors.items()}


def _run_stages(lowered: SplitModel, tensors: Values, inputs: Mapping[str, Tensor], sizes: Sequence[int]) -> _StageValues:
    """Run every stage on every microbatch, and record the values of all nodes; arguments as for ``walk_nodes``."""
    graph = lowered.graph
    microbatches: dict[str, Sequence[Any]] = {}
    for leaf in graph.inputs:
        name, dim = leaf.placeholder, leaf.batch_dim
        if name is not None and name in inputs:
            microbatches[name] = [inputs[name]] * len(sizes) if dim is None else split_batch(inputs[name], sizes, dim)
    results = _StageValues()
    for stage in lowered.stages:
        for microbatch, size in enumerate(sizes):
            received = {name: results.by_node[name][microbatch] for name in stage.values}
            own_inputs = {name: pieces[microbatch] for name, pieces in microbatches.items()}
            given = {**tensors, **own_inputs, **received, "batch": size}
            _record_training(lowered, stage, {**given, **_with_own_buffers(graph, tensors)}, results)
            recorder = _Recorder(stage.module)
            recorder.run(*(given[name] for name in stage.bound + stage.arguments))
            for name, value in recorder.values.items():
                if results.stage.setdefault(name, stage.index) == stage.index:
                    results.by_node.setdefault(name, []).append(value)
    return results


def _record_training(lowered: SplitModel, stage: StageGraph, given: Mapping[str, Any], recorded: _StageValues) -> None:
    """Run the stage's training graph and record its outputs; restore the random generators, so that the forward draws the same numbers."""
    if not lowered.training:
        return
    module = lowered.training[stage.index].forward
    devices = sorted({value.device.index or 0 for value in given.values() if isinstance(value, Tensor) and value.is_cuda})
    with torch.random.fork_rng(devices=devices):
        results = module(*(given[name] for name in stage.bound + stage.arguments))
    for name, result in zip(stage.outputs, results, strict=False):
        recorded.in_training.setdefault(name, []).append(result)


def _compare_nodes(whole: ModelGraph, reference: Values, actual: _StageValues) -> Iterator[tuple[fx.Node, Comparison, bool]]:
    """Yield the comparisons of each node in graph order: (node, comparison, whether the value is that of a training graph)."""
    magnitudes: dict[fx.Node, float] = {}
    for node in whole.graph.nodes:
        if node.name not in reference or node.name not in actual.by_node:
            continue
        expected = reference[node.name]
        magnitudes[node] = largest_magnitude(expected)
        scale = max((magnitudes.get(source, 0.0) for source in node.all_input_nodes), default=0.0)
        for pieces, in_training in ((actual.by_node[node.name], False), (actual.in_training.get(node.name, []), True)):
            joined = _concatenate(pieces, expected)
            if joined is not None:
                yield node, compare(node.name, expected, joined, scale=scale), in_training


def _concatenate(pieces: Sequence[Tensor], like: Tensor) -> Tensor | None:
    """Concatenate the values of microbatches to the shape of ``like``; None if no dimension fits, as for a sum over the rows."""
    if len(pieces) <= 1:
        return pieces[0] if pieces else None
    if any(piece.dim() != like.dim() for piece in pieces):
        return None
    split_dims = [dim for dim in range(like.dim()) if any(piece.shape[dim] != like.shape[dim] for piece in pieces)]
    if len(split_dims) == 1 and sum(piece.shape[split_dims[0]] for piece in pieces) == like.shape[split_dims[0]]:
        return torch.cat([piece.to(like.device) for piece in pieces], split_dims[0])
    return None
