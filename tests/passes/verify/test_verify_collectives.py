"""The static proof of collectives: what fits is accepted and described, and what does not is refused by name."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import COLLECTIVES, all_gather, all_reduce, all_to_all, halo_add, halo_exchange, reduce_scatter, wait
from passes.ir.errors import VerificationError
from passes.ir.program import Program
from passes.verify.programs import verify
from passes.verify.value_specs import ValueSpecs, describe_values
from tests.support.processes.collective_cases import CASES, CollectiveCase


@dataclass(frozen=True)
class Call:
    """A collective of one rank, on zeros of these shapes."""

    function: Callable[..., Any]
    shapes: Sequence[Sequence[int]]
    keywords: dict[str, Any]
    dtypes: Sequence[torch.dtype] | None = None

    def __call__(self, graph: fx.Graph, name: str) -> fx.Node:
        dtypes = self.dtypes or [torch.float32] * len(self.shapes)
        device = torch.device("cpu")
        given = [
            graph.call_function(torch.zeros, (tuple(shape),), {"dtype": dtype, "device": device})
            for shape, dtype in zip(self.shapes, dtypes, strict=True)
        ]
        return graph.create_node("call_function", self.function, (given,), self.keywords, name=name)


def programs(*ranks: Sequence[Call]) -> list[Program]:
    """Return programs in which each rank starts its collectives in order, and waits for all of them."""
    found = []
    for rank, calls in enumerate(ranks):
        graph = fx.Graph()
        batch = graph.placeholder("batch")
        started = [call(graph, f"call{index}") for index, call in enumerate(calls)]
        graph.output((batch, *(graph.call_function(wait, (pending,)) for pending in started)))
        found.append(Program("forward", rank, fx.GraphModule({}, graph), (rank,)))
    return found


def refused(found: Sequence[Program], *words: str) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(found)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def gather(*shapes: Sequence[int], dims: Sequence[int] = (0,), group: tuple[int, ...] = (0, 1), sizes: Any = None) -> Call:
    return Call(all_gather, shapes, {"dims": tuple(dims), "group": group, "sizes": sizes})


def scatter(*shapes: Sequence[int], dims: Sequence[int] = (0,), group: tuple[int, ...] = (0, 1), sizes: Any = None) -> Call:
    return Call(reduce_scatter, shapes, {"dims": tuple(dims), "group": group, "sizes": sizes})


def exchange(shape: Sequence[int], split_dim: int, concat_dim: int, split_sizes: Any = None, concat_sizes: Any = None) -> Call:
    keywords = {"split_dims": (split_dim,), "concat_dims": (concat_dim,), "group": (0, 1)}
    return Call(all_to_all, [shape], {**keywords, "split_sizes": split_sizes, "concat_sizes": concat_sizes})


def halo(function: Any, size: int) -> Call:
    """Return a call on two ranks with two elements each; each reads one of the other."""
    return Call(function, [(size,)], {"dims": (0,), "group": (0, 1), "owned": ((2, 2),), "wanted": ("0:3|1:4",)})


def reduce(*shapes: Sequence[int], group: tuple[int, ...] = (0, 1), operation: str = "sum", dtype: torch.dtype = torch.float32) -> Call:
    return Call(all_reduce, shapes, {"group": group, "operation": operation}, [dtype] * len(shapes))


# -- what fits -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function.__name__}-{case.name}")
def test_what_runs_is_accepted_and_described(case: CollectiveCase, n_ranks: int) -> None:
    """The very calls that the tests of the runtimes make; the shapes are those that these give."""
    parts = case.parts(n_ranks)
    group = {"group": tuple(range(n_ranks))}
    calls = [
        Call(
            case.function, [tensor.shape for tensor in part.tensors], {**part.keywords, **group}, [tensor.dtype for tensor in part.tensors]
        )
        for part in parts
    ]
    found = programs(*([call] for call in calls))
    verify(found)
    for program, part in zip(found, parts, strict=True):
        specs = describe_values(program)
        (waited,) = [node for node in program.module.graph.nodes if node.target is wait]
        assert [(spec.shape, spec.dtype) for spec in specs.of[waited]] == [(tuple(tensor.shape), tensor.dtype) for tensor in part.expected]


def batch_programs(order: Sequence[int]) -> list[Program]:
    """Return programs: rank 0 has the rows of the first microbatch, rank 1 those of the second; ``order``: the stated rows."""
    found = []
    for rank in range(2):
        graph = fx.Graph()
        sizes = graph.call_function(microbatch_sizes, (graph.placeholder("batch"), 2))
        parts = [graph.call_function(operator.getitem, (sizes, index)) for index in range(2)]
        keywords: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
        rows = graph.call_function(torch.zeros, ((parts[rank], 3),), keywords)
        said = tuple(parts[index] for index in order)
        pending = graph.create_node("call_function", all_gather, ([rows], (0,)), {"group": (0, 1), "sizes": (said,)}, name="rows")
        graph.output(graph.create_node("call_function", wait, (pending,), name="whole"))
        found.append(Program("forward", rank, fx.GraphModule({}, graph), (rank,)))
    return found


def test_sizes_in_symbols() -> None:
    """For every batch size."""
    found = batch_programs((0, 1))
    verify(found)
    specs = describe_values(found[0])
    (whole,) = next(value for node, value in specs.of.items() if node.name == "whole")
    assert specs.same_size(whole.shape[0], specs.batch)


def test_sizes_that_are_equal_for_even_batches_alone() -> None:
    refused(batch_programs((1, 0)), "rank 0, rows: all_gather is given float32 (size_mb0, 3)", "said to be size_mb1")


def test_one_after_the_other() -> None:
    """Waiting for the first needs nothing of the second, though both are of one group."""
    found = []
    for rank in range(2):
        graph = fx.Graph()
        graph.placeholder("batch")
        waited = [graph.call_function(wait, (reduce((2,))(graph, f"call{index}"),)) for index in range(2)]
        graph.output(waited)
        found.append(Program("forward", rank, fx.GraphModule({}, graph), (rank,)))
    verify(found)


# -- what does not ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        pytest.param([reduce((3,))], [gather((3,))], ("is all_reduce (sum) where", "is all_gather along dimension 0"), id="kind"),
        pytest.param([reduce((3,))], [reduce((3,), operation="max")], ("is all_reduce (sum) where", "is all_reduce (max)"), id="operation"),
        pytest.param([gather((3, 3))], [gather((3, 3), dims=(1,))], ("along dimension 0 where", "along dimension 1"), id="dimension"),
        pytest.param([scatter((4, 4))], [scatter((4, 4), dims=(1,))], ("along dimension 0 where", "along dimension 1"), id="cut_dimension"),
        pytest.param(
            [exchange((4, 4), 0, 1)], [exchange((4, 4), 1, 0)], ("along dimension 0 to 1 where", "1 to 0"), id="exchanged_dimensions"
        ),
        pytest.param([reduce((3,))], [reduce((3,), (2,))], ("has 1 tensors where", "has 2"), id="number_of_tensors"),
        pytest.param([reduce((3,))], [reduce((4,))], ("gives float32 (3) as tensor 0", "expects float32 (4)"), id="summed_shapes"),
        pytest.param(
            [reduce((3,))], [reduce((3,), dtype=torch.float64)], ("gives float32 (3) as tensor 0", "expects float64 (3)"), id="dtypes"
        ),
        pytest.param([gather((3, 2))], [gather((4, 2))], ("gives float32 (3, 2)", "expects float32 (4, 2)"), id="gathered_sizes"),
        pytest.param([gather((3, 2))], [gather((3, 5))], ("gives float32 (3, 2)", "expects float32 (3, 5)"), id="gathered_other_dimension"),
        pytest.param(
            [gather((3, 2), sizes=((3, 4),))],
            [gather((5, 2), sizes=((3, 5),))],
            ("gives float32 (5, 2)", "expects float32 (4, 2)"),
            id="tables",
        ),
        pytest.param([gather((3,), (2,), dims=(0, 0))], [gather((3,), (4,), dims=(0, 0))], ("as tensor 1",), id="second_tensor"),
        pytest.param(
            [scatter((4,), sizes=((1, 3),))], [scatter((4,), sizes=((3, 1),))], ("gives float32 (3)", "expects float32 (1)"), id="cut_sizes"
        ),
        pytest.param([scatter((4, 2))], [scatter((4, 3))], ("gives float32 (2, 2)", "expects float32 (2, 3)"), id="cut_other_dimension"),
        pytest.param(
            [exchange((4, 3), 0, 1, concat_sizes=((3, 2),))],
            [exchange((4, 2), 0, 1, concat_sizes=((1, 2),))],
            ("gives float32 (2, 3)", "expects float32 (2, 1)"),
            id="exchanged_sizes",
        ),
        pytest.param([reduce((3,)), gather((3,))], [gather((3,)), reduce((3,))], ("call0 of rank 0 is all_reduce (sum)",), id="order"),
        pytest.param(
            [gather((3,))],
            [gather((3,)), scatter((4,))],
            ("call1 of rank 1 goes between ranks 0, 1", "rank 0 takes no part"),
            id="one_more",
        ),
    ],
)
def test_ranks_that_do_not_fit(first: Sequence[Call], second: Sequence[Call], words: Sequence[str]) -> None:
    refused(programs(first, second), *words)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(
            gather((3,), sizes=((4, 3),)), "all_gather is given float32 (3) where its size along dimension 0 is said to be 4", id="own"
        ),
        pytest.param(gather((3,), sizes=((3, 3, 3),)), "all_gather has 3 sizes for 2 ranks", id="too_many_sizes"),
        pytest.param(gather((3,), (3,), dims=(0, 0), sizes=((3, 3),)), "all_gather has sizes for 1 of 2 tensors", id="too_few_tables"),
        pytest.param(gather((3,), dims=(0, 1)), "all_gather has 2 dimensions for 1 tensors", id="too_many_dimensions"),
        pytest.param(gather((3,), dims=(1,)), "dimension 1 of all_gather is out of range for float32 (3)", id="no_such_dimension"),
        pytest.param(scatter((3,)), "reduce_scatter cuts float32 (3) along dimension 0 into 2 equal pieces", id="not_even"),
        pytest.param(
            scatter((3,), sizes=((1, 1),)), "reduce_scatter cuts float32 (3) along dimension 0 into pieces of sizes 1, 1", id="rest"
        ),
        pytest.param(
            exchange((4, 3), 1, 0), "all_to_all cuts float32 (4, 3) along dimension 1 into 2 equal pieces", id="exchange_not_even"
        ),
        pytest.param(exchange((4, 3), 0, 1, None, ((2, 3),)), "all_to_all is given float32 (2, 3)", id="own_exchanged"),
        pytest.param(reduce((3,), group=(1, 0)), "the group (1, 0) is not a set of ranks that holds rank 0", id="order_of_group"),
        pytest.param(Call(all_gather, [(3,)], {"group": (0, 1)}), "calls all_gather with other arguments than it takes", id="arguments"),
    ],
)
def test_a_collective_that_is_wrong_by_itself(call: Call, words: str) -> None:
    refused(programs([call], [call]), f"rank 0, call0: {words}")


def test_sizes_that_nobody_knows() -> None:
    found = programs([gather((3,))], [gather((3,))])
    for program in found:
        (node,) = [node for node in program.module.graph.nodes if node.target is all_gather]
        (batch,) = [node for node in program.module.graph.nodes if node.op == "placeholder"]
        node.kwargs = {**node.kwargs, "sizes": ((3, batch),)}
    refused(found, "rank 0, call0: cannot tell the size of a piece of all_gather: unknown")


@pytest.mark.parametrize("seed", range(60))
def test_ranks_agree_exactly_where_any_two_do(seed: int) -> None:
    """The proof looks at each group and each two groups once; the definition, at every two ranks."""
    draw = random.Random(seed)
    groups = [tuple(sorted(draw.sample(range(4), draw.randint(2, 4)))) for _ in range(3)]
    order = [(draw.choice(groups), draw.randint(1, 2)) for _ in range(5)]
    ranks = [[(group, size) for group, size in order if rank in group] for rank in range(4)]
    changed = draw.choice([calls for calls in ranks if calls])
    if seed % 4 == 1:
        draw.shuffle(changed)
    elif seed % 4 == 2:
        changed.pop(0)
    elif seed % 4 == 3:
        changed.append(changed[0])
    found = programs(*([reduce((size,), group=group) for group, size in calls] for calls in ranks))
    agree = all(
        [call for call in ranks[one] if {one, other} <= set(call[0])] == [call for call in ranks[other] if {one, other} <= set(call[0])]
        for one, other in itertools.combinations(range(4), 2)
    )
    if agree:
        verify(found)
    else:
        refused(found, "rank")


def test_ranks_of_a_large_group_are_not_compared_each_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []
    monkeypatch.setattr(ValueSpecs, "same", lambda *operands: compared.append(operands))
    group = tuple(range(64))
    verify(programs(*([reduce((3,), group=group), gather((2, 3), group=group)] for _ in group)))
    assert not compared


def test_groups_in_another_order() -> None:
    """All wait for all sums, but would enter them in different orders: with blocking collectives none ends."""
    pair, all_three = reduce((2,), group=(0, 1)), reduce((2,), group=(0, 1, 2))
    refused(
        programs([pair, all_three], [all_three, pair], [all_three]),
        "call0 of rank 0 goes between ranks 0, 1 where call0 of rank 1 goes between ranks 0, 1, 2",
    )


@pytest.mark.parametrize("function", COLLECTIVES)
def test_a_collective_that_nobody_waits_for(function: Callable[..., Any]) -> None:
    calls = {
        all_reduce: reduce((2,)),
        all_gather: gather((2,)),
        reduce_scatter: scatter((2,)),
        all_to_all: exchange((2, 2), 0, 1),
        halo_exchange: halo(halo_exchange, 2),
        halo_add: halo(halo_add, 3),
    }
    call = calls[function]
    found = programs([call], [call])
    graph = found[1].module.graph
    (waiting,) = [node for node in graph.nodes if node.target is wait]
    graph.output_node().args = (None,)
    graph.erase_node(waiting)
    refused(found, "call0 of rank 1 is never waited for")


def test_waiting_for_each_other_in_a_circle() -> None:
    """Each rank starts its second collective only after the first, and they have them the other way round in two groups of three."""
    found = []
    for rank, (first, second) in enumerate([((0, 1), (0, 2)), ((1, 2), (0, 1)), ((0, 2), (1, 2))]):
        graph = fx.Graph()
        batch = graph.placeholder("batch")
        waited = []
        for number, group in enumerate((first, second)):
            pending = gather((2,), group=group)(graph, f"call{number}")
            waited.append(graph.call_function(wait, (pending,)))
        graph.output((batch, *waited))
        found.append(Program("forward", rank, fx.GraphModule({}, graph), (rank,)))
    refused(found, "the ranks wait for each other in a circle", "of rank 1", "of rank 2")


def test_parameters_of_a_program_have_their_shapes() -> None:
    """A graph may name tensors of its module."""
    found = []
    for rank in range(2):
        graph = fx.Graph()
        weight = graph.get_attr("weight")
        pending = graph.create_node("call_function", all_gather, ([weight], (0,)), {"group": (0, 1)}, name="gather")
        graph.output(graph.call_function(wait, (pending,)))
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros(2 + rank, 3))
        found.append(Program("forward", rank, fx.GraphModule(module, graph), (rank,)))
    refused(found, "gather of rank 0 gives float32 (2, 3) as tensor 0 where gather of rank 1 expects float32 (3, 3)")
