"""Collectives against a plain formula: what each rank gets, whatever the dtype, the dimension and the sizes of the pieces."""

from __future__ import annotations

import operator
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from partitioner.runtime.embedded import EmbeddedRuntime
from partitioner.runtime.executor import Executable, ProgramSet
from passes.graph.program_printer import ProgramModule
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import all_gather, all_reduce, all_to_all, reduce_scatter, wait
from passes.ir.errors import CommunicationError
from passes.ir.program import Program
from tests.support.processes.collective_cases import CASES, CollectiveCase


def run_embedded(size: int, write: Callable[[fx.Graph, int, Sequence[fx.Node]], Any], tensors: Sequence[Sequence[Tensor]]) -> list[Any]:
    """Run one small program a rank; ``write`` adds its nodes and returns its result."""
    programs = []
    for rank in range(size):
        graph = fx.Graph()
        given = [graph.placeholder(f"value{index}") for index in range(len(tensors[rank]))]
        graph.output(write(graph, rank, given))
        programs.append(Program("forward", rank, fx.GraphModule({}, graph), ()))
    executables = {program.rank: Executable(program) for program in programs}
    inputs = {rank: {f"value{index}": tensor for index, tensor in enumerate(tensors[rank])} for rank in range(size)}
    found = EmbeddedRuntime([torch.device("cpu")] * size).run(ProgramSet(tuple(programs), executables), inputs)
    return [found[rank] for rank in range(size)]


def run_case(case: CollectiveCase, n_ranks: int) -> list[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Return each rank's results and the expected ones."""
    parts = case.parts(n_ranks)

    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> fx.Node:
        pending = graph.call_function(case.function, (list(given),), {"group": tuple(range(n_ranks)), **parts[rank].keywords})
        return graph.call_function(wait, (pending,))

    before = [[tensor.clone() for tensor in part.tensors] for part in parts]
    found = run_embedded(n_ranks, write, [part.tensors for part in parts])
    for part, kept in zip(parts, before, strict=True):
        assert all(torch.equal(tensor, old) for tensor, old in zip(part.tensors, kept, strict=True))
    return [(got, part.expected) for got, part in zip(found, parts, strict=True)]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.function.__name__}-{case.name}")
def test_every_case(case: CollectiveCase, n_ranks: int) -> None:
    for got, expected in run_case(case, n_ranks):
        assert len(got) == len(expected)
        for tensor, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
            assert tensor.is_contiguous()


def test_sums_have_the_same_bits_on_all_ranks() -> None:
    """First to last, on every reducing rank: in single precision the order shows."""
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert not torch.equal(expected, ((parts[3] + parts[2]) + parts[1]) + parts[0])

    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> list[fx.Node]:
        started = [
            graph.call_function(all_reduce, (given,), {"group": (0, 1, 2, 3)}),
            graph.call_function(reduce_scatter, (given, (0,)), {"group": (0, 1, 2, 3)}),
        ]
        return [graph.call_function(wait, (pending,)) for pending in started]

    for rank, ((whole,), (piece,)) in enumerate(run_embedded(4, write, [[part] for part in parts])):
        assert torch.equal(whole, expected)
        assert torch.equal(piece, expected[250 * rank : 250 * (rank + 1)])


def test_collectives_of_a_group_pair_up_in_order_and_groups_do_not_disturb_each_other() -> None:
    """Three kinds in one group, one of them twice, another group between them; everything is waited for at the end."""

    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> list[fx.Node]:
        pair = (0, 1) if rank < 2 else (2, 3)
        started = [
            graph.call_function(all_reduce, (given,), {"group": (0, 1, 2, 3)}),
            graph.call_function(all_gather, (given, (0,)), {"group": pair}),
            graph.call_function(all_gather, (given, (0,)), {"group": (0, 1, 2, 3)}),
            graph.call_function(all_reduce, (given,), {"group": (0, 1, 2, 3), "operation": "max"}),
            graph.call_function(all_reduce, ([graph.call_function(torch.neg, (given[0],))],), {"group": (0, 1, 2, 3)}),
        ]
        return [graph.call_function(wait, (pending,)) for pending in reversed(started)]

    found = run_embedded(4, write, [[torch.tensor([float(rank)])] for rank in range(4)])
    for rank, (negative, maximum, everything, pair, total) in enumerate(found):
        assert [tensor.tolist() for tensor in (*negative, *maximum, *everything, *total)] == [[-6.0], [3.0], [0.0, 1.0, 2.0, 3.0], [6.0]]
        assert pair[0].tolist() == ([0.0, 1.0] if rank < 2 else [2.0, 3.0])


def test_a_rank_that_starts_another_collective_is_named() -> None:
    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> fx.Node:
        keywords: dict[str, Any] = {"group": (0, 1), **({} if rank else {"dims": (0,)})}
        return graph.call_function(wait, (graph.call_function(all_reduce if rank else all_gather, (given,), keywords),))

    with pytest.raises(CommunicationError) as caught:
        run_embedded(2, write, [[torch.ones(2)]] * 2)
    assert "rank 0 waits for all_gather, collective 0 of ranks 0 and 1" in str(caught.value)
    assert "rank 1 waits for all_reduce (sum), collective 0 of ranks 0 and 1" in str(caught.value)


def test_shapes_that_do_not_fit_are_named() -> None:
    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> fx.Node:
        return graph.call_function(wait, (graph.call_function(all_gather, (given, (0,)), {"group": (0, 1)}),))

    with pytest.raises(CommunicationError, match=r"rank 0 gives rank 1 shape \(2,\) where it expects \(3,\)"):
        run_embedded(2, write, [[torch.ones(2)], [torch.ones(3)]])


@pytest.mark.parametrize(
    ("function", "keywords", "words"),
    [
        (all_gather, {"dims": (0,), "sizes": ((3, 5),)}, r"all_gather: a tensor of shape \(4, 3\) does not have pieces of sizes 3, 5 "),
        (
            reduce_scatter,
            {"dims": (1,)},
            r"reduce_scatter: a tensor of shape \(4, 3\) does not have pieces of sizes 1, 1 along dimension 1",
        ),
        (reduce_scatter, {"dims": (0,), "sizes": ((1, 1, 2),)}, r"3 sizes for a group of 2 ranks"),
        (all_to_all, {"split_dims": (0,), "concat_dims": (1,), "concat_sizes": ((2, 2),)}, r"all_to_all: .* sizes 2, 2 along dimension 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(function: Callable[..., Any], keywords: dict[str, Any], words: str) -> None:
    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> fx.Node:
        return graph.call_function(wait, (graph.call_function(function, (given,), {"group": (0, 1), **keywords}),))

    with pytest.raises(CommunicationError, match=words):
        run_embedded(2, write, [[torch.ones(4, 3)]] * 2)


def test_sizes_may_be_computed() -> None:
    """Parts of a batch whose size is known when the program runs."""

    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> fx.Node:
        sizes = graph.call_function(microbatch_sizes, (given[1], 2))
        first, second = (graph.call_function(operator.getitem, (sizes, index)) for index in range(2))
        keywords: dict[str, Any] = {"group": (0, 1), "sizes": ((first, second),)}
        return graph.call_function(wait, (graph.call_function(all_gather, ([given[0]], (0,)), keywords),))

    whole = torch.arange(9.0)
    for (got,) in run_embedded(2, write, [[whole[:5], 9], [whole[5:], 9]]):  # type: ignore[list-item]
        assert torch.equal(got, whole)


def test_a_program_reads_tensors_of_its_module() -> None:
    """The very object, so that what an optimizer writes is what the next run reads."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    module = torch.nn.Module()
    module.weight = weight
    graph = fx.Graph()
    pending = graph.call_function(all_gather, ([graph.get_attr("weight")], (0,)), {"group": (0,)})
    graph.output(graph.call_function(wait, (pending,)))
    program = Program("forward", 0, ProgramModule(module, graph), ())
    assert "= self.weight" in program.module.code
    restored = pickle.loads(pickle.dumps(program.module))  # noqa: S301  our own
    assert torch.equal(restored.weight, weight)
    assert restored.code == program.module.code
    executables = ProgramSet((program,), {0: Executable(program)})
    for value in (1.0, 5.0):
        with torch.no_grad():
            weight[0] = value
        (got,) = EmbeddedRuntime([torch.device("cpu")]).run(executables, {0: {}})[0]
        assert got.tolist() == [value, 2.0]
        assert not got.requires_grad


def test_what_all_have_waited_for_is_let_go_of() -> None:
    """Else every gathered parameter of a step would be kept until its end."""
    kept: list[weakref.ref[Tensor]] = []

    def make() -> Tensor:
        tensor = torch.ones(3)
        kept.append(weakref.ref(tensor))
        return tensor

    def write(graph: fx.Graph, rank: int, given: Sequence[fx.Node]) -> fx.Node:
        first = graph.call_function(wait, (graph.call_function(all_reduce, ([graph.call_function(make)],), {"group": (0, 1)}),))
        return graph.call_function(alive, (first,))

    def alive(_: Any) -> int:
        return sum(reference() is not None for reference in kept)

    assert 0 in run_embedded(2, write, [[], []])
