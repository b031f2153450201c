"""Layouts of casts of parameters: where the parameter is stored, in the layout in which it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.axis_names import batch_axes
from passes.analysis.layout_facts import LayoutFacts
from passes.ir.graph import Autocast
from passes.ir.layout import Layout, Replicate, Shard, Varying
from passes.ir.mesh import Mesh
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.shard_graph import AxisCut, layouts_of_cut


def layouts_over(model: nn.Module, x: Tensor, mode: str, autocast: Autocast | None = None) -> Layouts:
    """Return the layouts of a model over two ranks that share the rows of the batch."""
    graph = trace(model, (x,), autocast=autocast)
    axes = find_axes(graph.graph)
    cut = AxisCut(Mesh(((mode, 2),)), {mode: tuple(batch_axes(graph, axes))}, (mode,), () if mode == "data" else (mode,))
    return layouts_of_cut(LayoutFacts(graph, axes), cut)


def layouts_of_casts(layouts: Layouts) -> dict[str, list[Layout]]:
    """Parameter -> the layouts of its casts, and of the views that lead to them."""
    found: dict[str, list[Layout]] = {}
    for cast, parameter in layouts.casts.items():
        found.setdefault(parameter, []).append(layouts.results[cast][0])
    return found


MIXED = Autocast("cpu", torch.bfloat16)


def test_a_cast_is_computed_on_the_shard() -> None:
    layouts = layouts_over(nn.Linear(8, 4), torch.randn(6, 8), "fsdp", MIXED)
    for parameter, results in layouts_of_casts(layouts).items():
        assert results == [layouts.stored[parameter]]
        assert isinstance(layouts.stored[parameter][0], Shard)
    assert set(layouts.varying.values()) == {frozenset()}


def test_a_cast_of_a_replica_leaves_the_gradient_a_partial_sum() -> None:
    layouts = layouts_over(nn.Linear(8, 4), torch.randn(6, 8), "data", MIXED)
    assert set(layouts.varying.values()) == {frozenset({0})}
    assert all(results == [(Varying(),)] for results in layouts_of_casts(layouts).values())


def test_views_that_lead_to_casts_are_computed_on_the_shard() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.t())

    layouts = layouts_over(Transposed(), torch.randn(6, 8), "fsdp", MIXED)
    ((parameter, (view, cast)),) = layouts_of_casts(layouts).items()
    (stored,) = layouts.stored[parameter]
    assert isinstance(stored, Shard)
    assert view == cast == (Shard(stored.axis, 1 - stored.dimension),)


class Repeated(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(torch.relu(self.layer(torch.relu(self.layer(x))))))


@pytest.mark.parametrize(("mode", "n_equal"), [("fsdp", 4), ("data", 0)])
def test_a_layer_that_is_called_several_times_is_gathered_once(mode: str, n_equal: int) -> None:
    layouts = layouts_over(Repeated(), torch.randn(6, 8), mode, MIXED)
    assert len(layouts.casts) == 6
    assert len(layouts.equal_casts) == n_equal
    assert len(set(layouts.equal_casts.values())) == n_equal // 2


def test_a_cast_to_a_wider_type_stays() -> None:
    """The parameter is the smaller message."""

    class Wider(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8).bfloat16())

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.float())

    layouts = layouts_over(Wider(), torch.randn(6, 8), "fsdp")
    assert layouts.casts == {}
    assert any(layout == (Replicate(),) for results in layouts.results.values() for layout in results)
