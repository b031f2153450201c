"""Sorts by group disappear where nothing else sees the order, whatever way back to it is written, and products of groups always."""

# Tensors of indices are Any.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner.tracing.trace import trace
from passes.graph.schemas import packet
from passes.rules.ops.grouped_mm import _by_kernel, _outer_by_kernel, grouped_mm, grouped_outer
from tests.support.models.attention.experts import EXPERTS, Dropless, back_by_inverse, ends_by_histogram
from tests.support.running.slow_values import all_but

aten = torch.ops.aten

WIDTH = 8

TOKENS = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def back_by_sorting_the_order(order: Tensor, y: Tensor, best: int) -> Tensor:
    return y.index_select(0, order.argsort()).unflatten(0, (-1, best)).sum(1)


def back_by_scattering_the_inverse(order: Tensor, y: Tensor, best: int) -> Tensor:
    inverse = torch.zeros_like(order).scatter_(0, order, torch.arange(order.shape[0]))
    return y[inverse].unflatten(0, (-1, best)).sum(1)


def back_by_adding(order: Tensor, y: Tensor, best: int) -> Tensor:
    return y.new_zeros(order.shape[0] // best, y.shape[1]).index_add(0, order // best, y)


def back_by_adding_by_index(order: Tensor, y: Tensor, best: int) -> Tensor:
    result = y.new_zeros(order.shape[0] // best, y.shape[1])
    return result.index_put((order.div(best, rounding_mode="floor"),), y, accumulate=True)


def back_by_writing(order: Tensor, y: Tensor, best: int) -> Tensor:
    result = torch.empty_like(y)
    result[order] = y
    return result.unflatten(0, (-1, best)).sum(1)


WAYS_BACK = (
    back_by_inverse,
    back_by_sorting_the_order,
    back_by_scattering_the_inverse,
    back_by_adding,
    back_by_adding_by_index,
    back_by_writing,
)


def by_one_hot(keys: Tensor) -> Tensor:
    return F.one_hot(keys, EXPERTS).sum(0).cumsum(0).int()


def traced(model: nn.Module, x: Tensor) -> fx.Graph:
    """Return the model's graph, after a comparison with the model: outputs, gradients of the input and of all weights."""
    graph = trace(model.double(), (x,))
    assert equal(model, graph.graph, x)
    return graph.graph


def equal(model: nn.Module, graph: fx.Graph, x: Tensor) -> bool:
    module = fx.GraphModule({}, graph)
    named = {name.replace(".", "_"): value for name, value in (*model.named_parameters(), *model.named_buffers())}
    placeholders = [node.name for node in graph.find_nodes(op="placeholder")]

    def interpreted(y: Tensor) -> Tensor:
        result: Tensor = fx.Interpreter(module).run(*(argument(name, named, y) for name in placeholders))[0]
        return result

    found = []
    for run in (model, interpreted):
        y = x.clone().requires_grad_()
        result = run(y)
        loss = (result * torch.linspace(0, 1, result.shape[-1], dtype=torch.float64)).sum()
        found.append((result, *torch.autograd.grad(loss, (y, *model.parameters()))))
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in zip(*found, strict=True))


def argument(name: str, named: dict[str, Tensor], x: Tensor) -> Tensor | int:
    return x.shape[0] if name == "batch" else named.get(name[2:], x)


def has(graph: fx.Graph, *operators: object) -> bool:
    return any(packet(node.target) in operators for node in graph.nodes)


@pytest.mark.parametrize(
    ("back", "ends"),
    [
        (back_by_inverse, by_one_hot),
        *(
            pytest.param(back, ends_by_histogram, marks=() if back in (back_by_adding, back_by_writing) else pytest.mark.slow)
            for back in WAYS_BACK
        ),
    ],
)
def test_rows_are_computed_in_their_own_order(back: Callable[..., Tensor], ends: Callable[[Tensor], Tensor]) -> None:
    graph = traced(Dropless(WIDTH, back=back, ends=ends), TOKENS)
    assert not has(graph, aten.sort, aten.argsort, aten.histc, aten.cumsum, aten.arange)
    assert sum(node.target is grouped_mm for node in graph.nodes) == 2
    assert all(node.users for node in graph.nodes if node.op == "call_function")


class Shown(Dropless):
    """Returns something that depends on the order of rows."""

    def __init__(self, show: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH)
        self.show = show

    def hidden(self, y: Tensor) -> Tensor:
        return y + self.show(y)


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "running sum": lambda y: y.cumsum(0),
    "neighbours": lambda y: y.roll(1, 0),
    "numbered": lambda y: torch.arange(y.shape[0]).unsqueeze(-1) / y.shape[0],
    "one row": lambda y: y[0],
}


@pytest.mark.parametrize("shown", all_but(["neighbours"], SHOWN))
def test_an_order_that_is_seen_stays(shown: str) -> None:
    """And products of groups that are given by their ends are products of groups that are given by row."""
    graph = traced(Shown(SHOWN[shown]), TOKENS)
    assert has(graph, aten.sort)
    assert [node.target for node in graph.nodes if "grouped" in str(node.target)] == [grouped_mm] * 2


def test_sums_over_rows_do_not_see_their_order() -> None:
    graph = traced(Shown(lambda y: y.sum(0) + y.amax(0)), TOKENS)
    assert not has(graph, aten.sort)


def test_a_dropout_of_sorted_rows_draws_for_them() -> None:
    """The model's mask for the same seed is one of sorted rows."""
    graph = trace(Shown(lambda y: F.dropout(y, 0.5)).double(), (TOKENS,)).graph
    assert has(graph, aten.sort)


def test_a_descending_order_is_none_of_the_groups() -> None:
    """The library's product then takes rows of other groups, whatever that is good for."""

    class Descending(Dropless):
        def sort(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
            return chosen.sort(descending=True)

    graph = traced(Descending(WIDTH), TOKENS)
    assert has(graph, aten.sort)


@pytest.mark.slow
def test_two_mixtures_one_of_which_shows_its_order() -> None:
    model = nn.Sequential(Dropless(WIDTH), Shown(SHOWN["running sum"]))
    graph = traced(model, TOKENS)
    assert sum(packet(node.target) is aten.sort for node in graph.nodes) == 1


def test_the_product_and_its_gradients() -> None:
    rows, weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    group = torch.tensor([3, 1, -1, 1, 4, 0, 3])  # no row is in group 2, two rows are in none
    known = ((group >= 0) & (group < 4)).unsqueeze(-1)
    expected = torch.bmm(rows.unsqueeze(1), weight[group.clamp(0, 3)]).squeeze(1) * known
    torch.testing.assert_close(grouped_mm(rows, weight, group), expected)
    assert torch.autograd.gradcheck(grouped_mm, (rows, weight, group))
    assert torch.autograd.gradcheck(lambda x, w: grouped_mm(x, w.transpose(1, 2), group, True), (rows, weight))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_of_gpus(transposed: bool) -> None:
    """In bfloat16; torch has it on CPU, too, where it is not faster."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, other = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((24, 16), (4, 16, 8), (24, 8)))
    group = torch.randint(-1, 5, (24,), generator=generator)
    stored = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    expected = grouped_mm(rows.double(), weight.double(), group)
    torch.testing.assert_close(_by_kernel(rows, stored, group).double(), expected, rtol=0.02, atol=0.05)
    expected = grouped_outer(rows.double(), other.double(), group, 4)
    torch.testing.assert_close(_outer_by_kernel(rows, other, group, 4).double(), expected, rtol=0.02, atol=0.05)


def test_no_rows() -> None:
    nobody = torch.zeros(0, dtype=torch.int64)
    assert grouped_mm(torch.randn(0, 3), torch.randn(4, 3, 2), nobody).shape == (0, 2)
    assert not grouped_outer(torch.randn(0, 3), torch.randn(0, 2), nobody, 4).any()
