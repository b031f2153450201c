"""Layouts of values, read as a picture: node -> a word for each mesh dimension.

    R  whole on every rank         V  whole, used on a part of the work
    P  a part of a sum             S0 a part along dimension 0

The expected pictures are those of the papers: Megatron's columns and rows, data parallel's rows.
"""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.analysis.axes import Axes, find_axes
from passes.analysis.axis_names import axes_named, axis_names
from passes.ir.graph import ModelGraph
from passes.ir.layout import Layout, Partial, Shard, Varying
from passes.spmd.propagate.call_along import cuttable_axes
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.propagate.walk import assign_layouts
from tests.support.models.zoo import case_named
from tests.support.running.slow_values import slow

TENSOR = (("tensor", 2),)
DATA = (("data", 2),)


def letter(placement: object) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dimension}"
    return "P" if isinstance(placement, Partial) else "V" if isinstance(placement, Varying) else "R"


def written(layout: Layout) -> str:
    return " ".join(letter(placement) for placement in layout)


class Picture:
    """The layouts of a small model.

    Args:
        cuts: mesh dimension -> names of axes, or parameters with a dimension: ``"up.weight:0"``.
    """

    def __init__(self, model: nn.Module, *args: Tensor, mesh: tuple[tuple[str, int], ...] = TENSOR, **cuts: tuple[str, ...]) -> None:
        self.graph: ModelGraph = trace(model, args)
        self.axes: Axes = find_axes(self.graph.graph)
        names = axis_names(self.graph, self.axes)
        assigned: dict[str, list[int]] = {}
        for dimension, wanted in cuts.items():
            assigned[dimension] = [axis for each in wanted for axis in self._axes(each, names)]
        rows = [name for name, _ in mesh if name == "data"]
        self.layouts: Layouts = assign_layouts(self.graph, self.axes, mesh, assigned, rows)

    def _axes(self, wanted: str, names: tuple[str, ...]) -> tuple[int, ...]:
        if ":" not in wanted:
            return axes_named(wanted, names)
        name, dimension = wanted.split(":")
        return self.axes.of(self._placeholder(name))[int(dimension)]

    def _placeholder(self, name: str) -> str:
        return next(placeholder for placeholder, original in self.graph.parameters.items() if original == name)

    def held(self, name: str) -> str:
        """Return how ranks hold a parameter."""
        return written(self.layouts.stored[self._placeholder(name)])

    def table(self) -> list[str]:
        """Return each call: ``linear(R, S0, S0) = S2``."""
        return [
            f"{operator(node)}({', '.join(written(each) for each in self.layouts.needs[node.name])}) "
            f"= {', '.join(written(each) for each in self.layouts.results[node.name])}"
            for node in self.graph.graph.nodes
            if node.op == "call_function" and node.name in self.layouts.needs
        ]

    def returned(self) -> list[str]:
        return [written(each) for each in self.layouts.needs["output"]]


def operator(node: fx.Node) -> str:
    target: Any = node.target
    return str(target.__name__).partition(".")[0]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 3)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_megatrons_feed_forward_layer() -> None:
    """Columns, then rows; the sum is added up where the residual stream reads it, and the last bias is added once."""
    picture = Picture(FeedForward(), torch.randn(5, 7, 6), tensor=("up.weight:0",))
    assert picture.table() == ["linear(V, S0, S0) = S2", "relu(S2) = S2", "linear(S2, S1, P) = P", "add(R, R) = R"]
    assert {name: picture.held(name) for name in ("up.weight", "up.bias", "down.weight", "down.bias")} == {
        "up.weight": "S0",
        "up.bias": "S0",
        "down.weight": "S1",
        "down.bias": "R",
    }
    assert picture.returned() == ["R"]


def test_megatrons_attention() -> None:
    picture = Picture(Attention(), torch.randn(5, 7, 12), tensor=("heads",))
    project = ["linear(V, S0, S0) = S2", "unflatten(S2) = S2", "transpose(S2) = S1"]
    assert picture.table() == [
        *project * 3,
        "scaled_dot_product_attention(S1, S1, S1) = S1",
        "transpose(S1) = S2",
        "flatten(S2) = S2",
        "linear(S2, S1, P) = P",
        "add(R, R) = R",
    ]
    assert [picture.held(f"{name}.weight") for name in ("query", "key", "value", "out")] == ["S0", "S0", "S0", "S1"]


def test_data_parallel_cuts_rows_and_nothing_else() -> None:
    """Parameters are used on a part of the work: their gradients are summed once, at the end."""
    picture = Picture(FeedForward(), torch.randn(6, 7, 6), mesh=DATA, data=("batch",))
    assert picture.table() == ["linear(S0, V, V) = S0", "relu(S0) = S0", "linear(S0, V, V) = S0", "add(S0, S0) = S0"]
    assert picture.returned() == ["S0"]
    assert all(picture.held(name) == "R" for name in ("up.weight", "up.bias", "down.weight", "down.bias"))
    assert set(picture.layouts.varying.values()) == {frozenset({0})}


def test_a_mesh_of_both_is_both() -> None:
    picture = Picture(FeedForward(), torch.randn(6, 7, 6), mesh=(*DATA, *TENSOR), data=("batch",), tensor=("up.weight:0",))
    assert picture.table() == ["linear(S0 V, V S0, V S0) = S0 S2", "relu(S0 S2) = S0 S2", "linear(S0 S2, V S1, V P) = S0 P",
                               "add(S0 R, S0 R) = S0 R"]  # fmt: skip
    assert picture.held("up.weight") == "R S0"


class FewKeyHeads(nn.Module):
    """Attention in bfloat16 with three heads of queries and one of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8 * heads, bias=False) for heads in (3, 1, 1))
        self.project = nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        query, key, value = (each.expand(-1, 3, -1, -1).to(torch.bfloat16) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value)
        return x + self.project(attended.transpose(1, 2).flatten(2).float())


def test_a_cast_to_a_smaller_type_is_before_an_exchange() -> None:
    """Keys of a rank's positions are cast, then exchanged for its heads: half of the bytes."""
    picture = Picture(FewKeyHeads(), torch.randn(2, 6, 8), tensor=("heads", "sequence"))
    table = picture.table()
    attention = table.index("scaled_dot_product_attention(S1, S1, S1) = S1")
    assert [line for line in table[:attention] if line.startswith("to(")] == ["to(S1) = S1", "to(S2) = S2", "to(S2) = S2"]


class TwoSums(nn.Module):
    """Two row-cut layers whose results are added, scaled and only then read."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu((self.left(x) + self.right(x)) * 0.5)


def test_partial_sums_pass_through_what_is_linear_in_them() -> None:
    """One reduction for both, where relu, which is not linear, reads them."""
    picture = Picture(TwoSums(), torch.randn(5, 8), tensor=("left.weight:1",))
    assert picture.table() == ["linear(S1, S1) = P", "linear(S1, S1) = P", "add(P, P) = P", "mul(P) = P", "relu(R) = R"]


class Dropped(nn.Module):
    """A feed-forward layer whose result is dropped in part, beside another such layer where there is one, on a cut sequence."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(7, 6))
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.ModuleList(nn.Linear(8, 6, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = x + self.position
        sums = [layer(self.up(x)) * kept for layer in self.down]
        return x + sum(sums[1:], sums[0])


def test_a_sum_is_reduced_where_calls_are_cut_that_it_could_pass() -> None:
    """Each rank drops its own part; a sum that would meet another one waits for it, and both are reduced at once."""
    arguments = torch.randn(5, 7, 6), torch.ones(5, 7, 6)
    one, two = (Picture(Dropped(layers), *arguments, tensor=("up.weight:0", "position:0")) for layers in (1, 2))
    assert one.table() == ["add(S1, S0) = S1", "linear(V, S0) = S2", "linear(S2, S1) = P", "mul(S1, S1) = S1", "add(S1, S1) = S1"]
    sums = ["linear(V, S0) = S2", "linear(S2, S1) = P", "mul(P, V) = P"]
    assert two.table() == ["add(S1, S0) = S1", *sums * 2, "add(P, P) = P", "add(S1, S1) = S1"]


class Product(nn.Module):
    """A product of two partial sums is no sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) * self.right(x)


def test_partial_sums_do_not_pass_through_a_product() -> None:
    picture = Picture(Product(), torch.randn(5, 8), tensor=("left.weight:1",))
    assert picture.table() == ["linear(S1, S1) = P", "linear(S1, S1) = P", "mul(R, R) = R"]


def test_nothing_is_cut_where_nothing_is_assigned() -> None:
    picture = Picture(FeedForward(), torch.randn(5, 7, 6), tensor=())
    assert set("".join(picture.table())) & set("SPV") == set()


def test_an_axis_shorter_than_the_mesh_is_whole() -> None:
    picture = Picture(FeedForward(), torch.randn(5, 7, 6), mesh=(("tensor", 9),), tensor=("up.weight:0",))
    assert picture.held("up.weight") == "R"
    assert picture.table()[0] == "linear(R, R, R) = R"


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.token(tokens)), labels)


def test_a_cut_vocabulary_gathers_no_logits() -> None:
    """Rows of the table are found by the rank that holds them, logits are made and compared on the rank of their classes."""
    args = torch.randint(11, (5,)), torch.randint(11, (5,))
    picture = Picture(Lookup(), *args, tensor=("vocab",))
    assert picture.table() == ["embedding(S0, V) = P", "linear(V, S0) = S1", "cross_entropy_loss(S1, V) = R"]
    assert [picture.held(name) for name in ("token.weight", "head.weight")] == ["S0", "S0"]


def test_gradients_of_complex_values_are_added_up() -> None:
    """Each rank has its columns of a complex product, and so a part of the gradient of what is multiplied."""

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.complex128))
            self.last = nn.Linear(8, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last((x.to(torch.complex128) @ self.weight).abs())
            return y

    torch.manual_seed(0)
    model, x = Waves(), torch.randn(4, 6, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, "tensor", example_inputs=(x,))
    assert pm.plan.axes
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    pm(ours).sum().backward()
    model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["group_norm_convolution", "perceptron", *slow("gpt", "resnet", "unet")])
def test_axes_that_no_call_can_be_cut_over_cut_none(name: str) -> None:
    """Those of a kernel, say: alone or not, over a mesh dimension they would change nothing."""
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, dict(instance.kwargs), training=True)
    axes = find_axes(graph.graph)
    others = [axis for axis, size in enumerate(axes.sizes) if isinstance(size, int) and size > 1 and axis not in cuttable_axes(graph, axes)]
    layouts = assign_layouts(graph, axes, (("tensor", 2),), {"tensor": others}, ())
    assert not [name for name, cuts in layouts.cuts.items() if cuts != (None,)]
    if "convolution" in name:
        kernels = {axis for each in graph.parameters for dimension in axes.of(each)[2:] for axis in dimension}
        assert {axis for axis in kernels if axes.sizes[axis] == 3} <= set(others)
