"""Collectives in ``pm.explain()``: the bytes are those of the pieces that a run hands over, the words those of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner.reports.communication.summary import transfers
from partitioner.reports.sources import RankClass
from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.embedded import EmbeddedRuntime, _EmbeddedTransport
from partitioner.runtime.executor import Executable, ProgramSet
from passes.autograd.staged_model import SplitModel
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import all_gather, all_reduce, reduce_scatter, wait
from passes.ir.program import Program
from tests.support.models.zoo import case_named
from tests.support.processes.collective_cases import CASES, CollectiveCase
from tests.support.running.programs import lowered_stages


@pytest.fixture(scope="module")
def lowered() -> SplitModel:
    """Return stages of a model whose parameters and inputs have names."""
    return lowered_stages(case_named("residual"), "GPipe", 2, 2)


def program(rank: int, write: Callable[[fx.Graph], Any], parameters: Mapping[str, Tensor] | None = None) -> Program:
    graph = fx.Graph()
    graph.output(write(graph))
    root = nn.Module()
    for name, tensor in (parameters or {}).items():
        setattr(root, name, tensor)
    module = fx.GraphModule(root, graph)
    module.meta["batch_size"] = 9
    return Program("train_step", rank, module, ())


def started(graph: fx.Graph, function: Callable[..., Any], *args: Any, meta: Mapping[str, Any] | None = None, **keywords: Any) -> fx.Node:
    node = graph.call_function(function, args, keywords)
    node.meta.update(meta or {})
    return graph.call_function(wait, (node,))


def zeros(graph: fx.Graph, *shape: Any, dtype: torch.dtype = torch.float32) -> fx.Node:
    return graph.call_function(torch.zeros, (shape,), {"dtype": dtype, "device": torch.device("cpu")})


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function.__name__}-{case.name}")
def test_bytes_are_those_of_the_pieces(case: CollectiveCase, n_ranks: int, lowered: SplitModel, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = case.parts(n_ranks)
    group = tuple(range(n_ranks))

    def write(graph: fx.Graph, rank: int) -> fx.Node:
        given = [zeros(graph, *tensor.shape, dtype=tensor.dtype) for tensor in parts[rank].tensors]
        return started(graph, case.function, given, group=group, **parts[rank].keywords)

    programs = [program(rank, lambda graph, rank=rank: write(graph, rank)) for rank in group]  # type: ignore[misc]
    handed_over = 0
    start = _EmbeddedTransport.start

    def counted(self: _EmbeddedTransport, name: Any, group: tuple[int, ...], exchanges: Sequence[Exchange], operation: Any) -> Any:
        nonlocal handed_over
        if case.function is all_reduce:
            handed_over += 2 * (n_ranks - 1) * sum(exchange.tensor.nbytes for exchange in exchanges)
        else:
            others = [position for position, rank in enumerate(group) if rank != self.rank]
            handed_over += n_ranks * sum(exchange.pieces[position].nbytes for exchange in exchanges for position in others)
        return start(self, name, group, exchanges, operation)

    monkeypatch.setattr(_EmbeddedTransport, "start", counted)
    runtime = EmbeddedRuntime([torch.device("cpu")] * n_ranks)
    runtime.run(ProgramSet(tuple(programs), {rank: Executable(programs[rank]) for rank in group}), {rank: {} for rank in group})
    found = transfers(lowered, RankClass.of_each(programs))
    assert n_ranks * sum(transfer.bytes for transfer in found) == handed_over
    assert sum(transfer.times for transfer in found) == (n_ranks if n_ranks > 1 else 0)


def test_alike_in_all_layers_and_microbatches_is_one_line(lowered: SplitModel) -> None:
    """Two layers, a batch of 9 in two microbatches, two groups of two ranks."""

    def write(graph: fx.Graph, rank: int) -> list[fx.Node]:
        sizes = graph.call_function(microbatch_sizes, (graph.placeholder("batch"), 2))
        results = []
        for microbatch in range(2):
            rows = graph.call_function(operator.getitem, (sizes, microbatch))
            for layer in range(2):
                group = (0, 1) if rank < 2 else (2, 3)
                summed = started(graph, all_reduce, [zeros(graph, rows, 16)], group=group, meta={"reason": f"down_{layer}"})
                results.append(graph.call_function(operator.getitem, (summed, 0)))
                results[-1].meta["nn_module_stack"] = {"": (f"h.{layer}.mlp", nn.Linear)}
        return results

    programs = [program(rank, lambda graph, rank=rank: write(graph, rank)) for rank in range(4)]  # type: ignore[misc]
    (line,) = transfers(lowered, RankClass.of_each(programs))
    assert (line.value, line.shape) == ("result of h.0.mlp and 1 more", "float32 (5, 16)")
    assert line.bytes == 2 * 2 * 2 * (5 + 4) * 16 * 4  # groups, layers; there and back between two ranks: once for each
    assert line.times == 2 * 2 * 4
    assert line.source == "ranks 0 and 1; ranks 2 and 3"
    assert line.reason == "all-reduce: each rank has a part of the sum"


def test_parameters_have_their_names(lowered: SplitModel) -> None:
    (first, *_), (original, *_) = lowered.graph.parameters.keys(), lowered.graph.parameters.values()

    def write(graph: fx.Graph) -> list[fx.Node]:
        weight = graph.get_attr(first)
        whole = started(graph, all_gather, [weight], (0,), group=(0, 1))
        names = (first,)
        return [whole, started(graph, reduce_scatter, [zeros(graph, 6, 2)], (0,), group=(0, 1), meta={"reduces": names})]

    programs = [program(rank, write, {first: torch.zeros(3, 2)}) for rank in range(2)]
    gathered, scattered = transfers(lowered, RankClass.of_each(programs))
    assert (gathered.value, gathered.bytes, gathered.times) == (original, 2 * 3 * 2 * 4, 2)
    assert (scattered.value, scattered.shape, scattered.bytes) == (f"gradient of {original}", "summed and cut", 2 * 3 * 2 * 4)
    assert scattered.reason == "reduce-scatter: a parameter that these ranks share"


def test_a_sum_that_is_no_gradient(lowered: SplitModel) -> None:
    def write(graph: fx.Graph) -> fx.Node:
        return started(graph, all_reduce, [zeros(graph)], group=(0, 1), meta={"reduces": ("loss",)})

    programs = [program(rank, write) for rank in range(2)]
    (line,) = transfers(lowered, RankClass.of_each(programs))
    assert (line.value, line.shape, line.bytes) == ("loss", "summed", 2 * 4)
    assert line.reason == "all-reduce: each rank has a part of it"
