"""Compare the values of all nodes: the model's graph on the whole batch beside the stages' graphs on its microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.reports.check.compare import Comparison, compare, largest_magnitude
from partitioner.reports.check.report import Difference
from passes.autograd.staged_model import LoweredStages
from passes.graph.provenance import place_of
from passes.ir.comm.microbatch import split_batch
from passes.ir.graph import ModelGraph
from passes.stages.split import StageGraph

__all__ = ["NodeWalk", "values_of", "walk_nodes"]

Values = dict[str, Tensor]


@dataclass(frozen=True)
class NodeWalk:
    """What the walk found.

    Attributes:
        comparisons: of every node whose values over microbatches make a value over the batch, in graph order.
        first: the first that differs.
    """

    comparisons: tuple[Comparison, ...]
    first: Difference | None


class _Recorder(fx.Interpreter):
    """Keeps the tensors of all nodes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: Values = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op == "call_function":
            self.values[n.name] = result.detach()
        return result


@dataclass
class _Parts:
    """Values of the stages over microbatches.

    Attributes:
        of: node -> its value on each microbatch.
        stage: node -> the first stage that computes it.
        in_training: value that leaves a stage -> the same of the stage's training graph.
    """

    of: dict[str, list[Tensor]] = field(default_factory=dict)
    stage: dict[str, int] = field(default_factory=dict)
    in_training: dict[str, list[Tensor]] = field(default_factory=dict)


def walk_nodes(
    whole: ModelGraph, lowered: LoweredStages, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], sizes: Sequence[int], seed: int
) -> NodeWalk:
    """Run both and compare node by node.

    Args:
        whole: the model's graph, for the whole batch.
        lowered: the stages, with their training graphs if there are any; their graphs are for microbatches.
        tensors: parameters, buffers and constants by placeholder; they stay as they are.
        inputs: the model's inputs by placeholder, whole batch.
        sizes: rows of each microbatch.
        seed: of the random numbers that both draw.
    """
    with torch.no_grad():
        reference = values_of(whole, {**tensors, **inputs, "batch": sum(sizes)}, seed)
        torch.manual_seed(seed)
        parts = _run_stages(lowered, _own(whole, tensors), inputs, sizes)
    comparisons: list[Comparison] = []
    first: Difference | None = None
    for node, comparison, in_training in _compared(whole, reference, parts):
        comparisons.append(comparison)
        if first is None and not comparison.equal:
            stage = parts.stage[node.name]
            cause = "the stage's forward graph computes the right value, its training graph does not" if in_training else ""
            first = Difference(node.name, place_of(node), stage, lowered.stage_ranks[stage][0], comparison, cause)
    return NodeWalk(tuple(comparisons), first)


def values_of(graph: ModelGraph, given: Mapping[str, Any], seed: int) -> Values:
    """The tensors of all calls of a graph, from values of its placeholders that stay as they are."""
    torch.manual_seed(seed)
    recorder, own = _Recorder(graph.module), _own(graph, given)
    recorder.run(*(own[node.name] for node in graph.graph.nodes if node.op == "placeholder"))
    return recorder.values


def _own(graph: ModelGraph, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors; buffers in memory of their own, for a run may write them."""
    return {name: tensor.clone() if name in graph.buffers else tensor for name, tensor in tensors.items()}


def _run_stages(lowered: LoweredStages, tensors: Values, inputs: Mapping[str, Tensor], sizes: Sequence[int]) -> _Parts:
    graph = lowered.graph
    batch_dims = {leaf.placeholder: leaf.batch_dim for leaf in graph.inputs}
    cut = {
        name: split_batch(value, sizes, dim) if (dim := batch_dims[name]) is not None else [value] * len(sizes)
        for name, value in inputs.items()
        if name in batch_dims
    }
    parts = _Parts()
    for stage in lowered.stages:
        for microbatch, size in enumerate(sizes):
            values = {name: parts.of[name][microbatch] for name in stage.values}
            given = {**tensors, **{name: pieces[microbatch] for name, pieces in cut.items()}, **values, "batch": size}
            _record_training(lowered, stage, {**given, **_own(graph, tensors)}, parts)
            recorder = _Recorder(stage.module)
            recorder.run(*(given[name] for name in stage.bound + stage.arguments))
            for name, value in recorder.values.items():
                if parts.stage.setdefault(name, stage.index) == stage.index:
                    parts.of.setdefault(name, []).append(value)
    return parts


def _record_training(lowered: LoweredStages, stage: StageGraph, given: Mapping[str, Any], parts: _Parts) -> None:
    """What the stage's training graph computes, from the same random numbers."""
    if not lowered.training:
        return
    module = lowered.training[stage.index].forward
    devices = sorted({value.device.index or 0 for value in given.values() if isinstance(value, Tensor) and value.is_cuda})
    with torch.random.fork_rng(devices=devices):
        results = module(*(given[name] for name in stage.bound + stage.arguments))
    for name, result in zip(stage.outputs, results, strict=False):
        parts.in_training.setdefault(name, []).append(result)


def _compared(whole: ModelGraph, values: Values, parts: _Parts) -> Iterator[tuple[fx.Node, Comparison, bool]]:
    """Every comparison that can be made, in graph order; True for that of a training graph."""
    scales: dict[fx.Node, float] = {}
    for node in whole.graph.nodes:
        if node.name not in values or node.name not in parts.of:
            continue
        scales[node] = largest_magnitude(values[node.name])
        scale = max((scales.get(source, 0.0) for source in node.all_input_nodes), default=0.0)
        for found, in_training in ((parts.of[node.name], False), (parts.in_training.get(node.name, []), True)):
            joined = _joined(values[node.name], found)
            if joined is not None:
                yield node, compare(node.name, values[node.name], joined, scale=scale), in_training


def _joined(whole: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
    """The value over the batch; None where values over microbatches do not make one (a sum over the rows)."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    if any(part.dim() != whole.dim() for part in parts):
        return None
    unlike = [dim for dim in range(whole.dim()) if any(part.shape[dim] != whole.shape[dim] for part in parts)]
    if len(unlike) == 1 and sum(part.shape[unlike[0]] for part in parts) == whole.shape[unlike[0]]:
        return torch.cat([part.to(whole.device) for part in parts], unlike[0])
    return None
