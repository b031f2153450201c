"""Operations that reduce inside, cut over what they reduce: results, gradients and stored statistics are those of the whole operation.

Every operation is the only one of a model whose tensors are all parameters and buffers, cut over one factor of its rule. The ranks' graphs
run side by side (``tests.support.running.lockstep``) in float64; the reference is the operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.graph.schemas import packet
from passes.ir.comm import functional as collectives
from passes.ir.mesh import Mesh
from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.ops.grouped_mm import grouped_mm
from passes.spmd.decompose.registry import _DECOMPOSITIONS
from passes.spmd.shard_graph import AxisCut, CutModel, cut_axes
from tests.support.running.lockstep import run_cut
from tests.support.running.traced import assert_equal_runs, run_model

FEW_BYTES = 200
"""Of one message of any of these calls: statistics and scores of rows, never what is cut. The smallest operand that is cut has more."""


@dataclass(frozen=True)
class Example:
    """One call.

    Attributes:
        name: of the test.
        factor: of the operation's rule, that is cut.
        function: called with the parameters and buffers by name.
        parameters: shape of each; normally distributed.
        buffers: tensors, statistics and class numbers.
    """

    name: str
    factor: str
    function: Callable[..., Tensor]
    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def _statistics(channels: int) -> dict[str, Tensor]:
    return {
        "running_mean": torch.linspace(-1, 1, channels, dtype=torch.float64),
        "running_var": torch.linspace(1, 2, channels, dtype=torch.float64),
    }


def _batch_norm(name: str, factor: str, *shape: int, affine: bool = True, statistics: bool = True, momentum: float = 0.3) -> Example:
    def function(x: Tensor, **rest: Tensor) -> Tensor:
        return F.batch_norm(
            x, rest.get("running_mean"), rest.get("running_var"), rest.get("weight"), rest.get("bias"), training=True, momentum=momentum
        )

    parameters = {"x": shape, **({"weight": shape[1:2], "bias": shape[1:2]} if affine else {})}
    return Example(f"batch_norm_{name}", factor, function, parameters, _statistics(shape[1]) if statistics else {})


def _channel_statistics(x: Tensor) -> Tensor:
    result: Tensor = channel_statistics(x.detach())
    return result


def _over(function: Callable[..., Tensor], **keywords: Any) -> Callable[..., Tensor]:
    def call(x: Tensor) -> Tensor:
        return function(x, **keywords)

    return call


_ROWS = torch.tensor([3, 0, 6, 2, 6])
_SOME_IGNORED = torch.tensor([3, -100, 6, -100, 0])
_TABLE = {"weight": (7, 4)}
_TOKENS = {"indices": torch.tensor([[3, 0, 6], [2, 6, 5]])}


def _cross_entropy(name: str, shape: tuple[int, ...], target: Tensor, **keywords: Any) -> Example:
    def function(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, **keywords)

    return Example(f"cross_entropy_{name}", "classes", function, {"x": shape}, {"target": target})


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _layer_norm_of_two(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-2:], weight, bias)


def _rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def _rms_norm_eps(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps=0.1)


def _group_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.group_norm(x, 2, weight, bias)


def _instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias)


def _embedding(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices, weight)


def _embedding_with_padding(indices: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(indices, weight, padding_idx=6)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _causal_scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)


def _grouped_mm(rows: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    result: Tensor = grouped_mm(rows, weight, group)
    return result


_QUERIES = {"query": (2, 4, 7, 3), "key": (2, 4, 7, 3), "value": (2, 4, 7, 5)}
_LONGER_KEYS = {"query": (2, 4, 6, 3), "key": (2, 2, 9, 3), "value": (2, 2, 9, 5)}

_AFFINE = {"x": (3, 7), "weight": (7,), "bias": (7,)}
_GROUPS = {"x": (3, 10, 7), "weight": (10,), "bias": (10,)}

EXAMPLES = (
    _batch_norm("batch", "batch", 6, 3, 4),
    _batch_norm("batch_uneven", "batch", 7, 3, 4),
    _batch_norm("batch_of_rows", "batch", 7, 5),
    _batch_norm("space", "space", 5, 3, 7),
    _batch_norm("plain", "batch", 7, 3, 4, affine=False, statistics=False),
    _batch_norm("slow_statistics", "batch", 7, 3, 4, affine=False, momentum=0.01),
    Example("channel_statistics", "batch", _channel_statistics, {"x": (7, 3, 8)}),
    Example("channel_statistics_of_rows", "batch", _channel_statistics, {"x": (11, 5)}),
    Example("channel_statistics_space", "space", _channel_statistics, {"x": (5, 3, 7)}),
    Example("layer_norm", "features", _layer_norm, _AFFINE),
    Example("layer_norm_plain", "features", _layer_norm, {"x": (3, 6)}),
    Example("layer_norm_of_one_row", "features", _layer_norm, {"x": (6,), "weight": (6,), "bias": (6,)}),
    Example("layer_norm_of_all", "features0", _layer_norm_of_two, {"x": (7, 5), "weight": (7, 5), "bias": (7, 5)}),
    Example("layer_norm_of_two", "features0", _layer_norm_of_two, {"x": (3, 7, 5), "weight": (7, 5), "bias": (7, 5)}),
    Example("layer_norm_of_two_inner", "features1", _layer_norm_of_two, {"x": (3, 7, 5), "weight": (7, 5), "bias": (7, 5)}),
    Example("rms_norm", "features", _rms_norm, {"x": (3, 7), "weight": (7,)}),
    Example("rms_norm_plain", "features", _rms_norm, {"x": (3, 6)}),
    Example("rms_norm_eps", "features", _rms_norm_eps, {"x": (3, 7), "weight": (7,)}),
    Example("group_norm_channels", "channels", _group_norm, _GROUPS),
    Example("group_norm_space", "space", _group_norm, _GROUPS),
    Example("instance_norm", "space", _instance_norm, {"x": (2, 6, 7), "weight": (6,), "bias": (6,)}),
    Example("instance_norm_plain", "space", _instance_norm, {"x": (3, 6, 5)}),
    Example("group_norm_plain", "channels", _group_norm, {"x": (3, 8, 5)}),
    Example("embedding", "vocab", _embedding, _TABLE, _TOKENS),
    Example("embedding_with_padding", "vocab", _embedding_with_padding, _TABLE, _TOKENS),
    Example("grouped_mm", "experts", _grouped_mm, {"rows": (7, 3), "weight": (6, 3, 5)}, {"group": torch.tensor([5, 0, 3, 3, 1, 5, 0])}),
    Example("softmax", "dim1", _over(torch.softmax, dim=1), {"x": (3, 7, 2)}),
    Example("softmax_last", "dim1", _over(torch.softmax, dim=-1), {"x": (3, 6)}),
    Example("log_softmax", "dim1", _over(torch.log_softmax, dim=1), {"x": (3, 7, 2)}),
    Example("causal_attention", "queries", _causal, _QUERIES),
    Example("causal_attention_of_groups", "queries", _causal_scaled, _LONGER_KEYS),
    _cross_entropy("mean", (5, 7), _ROWS),
    _cross_entropy("sum", (5, 7), _ROWS, reduction="sum"),
    _cross_entropy("none", (5, 7), _ROWS, reduction="none"),
    _cross_entropy("ignoring", (5, 7), _SOME_IGNORED),
    _cross_entropy("ignoring_a_class", (5, 7), _ROWS, ignore_index=6),
    _cross_entropy("of_one_row", (7,), torch.tensor(6)),
    _cross_entropy("of_images", (2, 7, 2, 2), torch.tensor([[[3, 0], [6, 2]], [[6, 6], [1, -100]]])),
)


class OneCall(nn.Module):
    """A model of one operation on its own tensors; the input takes no part."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.function = example.function
        self.names = (*example.parameters, *example.buffers)
        generator = torch.Generator().manual_seed(0)
        for name, shape in example.parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        for name, value in example.buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, x_outside: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(**{name: getattr(self, name) for name in self.names}), x_outside * 2


ARGS = (torch.arange(4, dtype=torch.float64),)


def cut(example: Example, mesh: tuple[tuple[str, int], ...]) -> tuple[nn.Module, CutModel]:
    """Return the one call, cut over its factor along every mesh dimension."""
    model = OneCall(example)
    graph = trace(model, ARGS)
    axes = find_axes(graph.graph)
    (node,) = [node for node in graph.graph.nodes if node.op == "call_function" and packet(node.target) in _DECOMPOSITIONS]
    factors = {factor.name: own for factor, own in zip(axes.loops[node.name].factors, axes.factors[node.name], strict=True)}
    assigned = {name: factors[example.factor] for name, _ in mesh}
    made = cut_axes(graph, axes, AxisCut(Mesh(mesh), assigned, (), ()), "whole")
    assert all(made.layouts.cuts[node.name]), f"{node} is not cut"
    return model, made


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
@pytest.mark.parametrize("mesh", [(("one", 2),), (("one", 3),)], ids=["two_parts", "three_parts"])
def test_a_cut_operation_is_the_whole_one(example: Example, mesh: tuple[tuple[str, int], ...]) -> None:
    model, made = cut(example, mesh)
    assert_equal_runs(run_cut(made, model, ARGS), run_model(model, ARGS, {}))


@pytest.mark.parametrize(
    "example",
    [each for each in EXAMPLES if each.name in ("embedding", "cross_entropy_mean", "cross_entropy_ignoring", "causal_attention")],
    ids=lambda example: example.name,
)
def test_parts_of_parts_count_their_places(example: Example) -> None:
    model, made = cut(example, (("one", 2), ("two", 2)))
    assert_equal_runs(run_cut(made, model, ARGS), run_model(model, ARGS, {}))


class RowsOfTwo(nn.Module):
    """A table of (two three) rows in which another operation sees the two and the three."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(24.0, dtype=torch.float64).reshape(6, 4))
        self.weight = nn.Parameter(torch.arange(3.0, dtype=torch.float64))

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        return F.embedding(words, self.table), torch.einsum("abc,b->ac", self.table.view(2, 3, 4), self.weight)


@pytest.mark.parametrize("part", ["two", "three"])
def test_places_are_counted_in_runs(part: str) -> None:
    """Every third row is no run of rows: what counts places in them is not cut so."""
    model, args = RowsOfTwo(), (torch.tensor([[0, 5, 2], [1, 3, 4]]),)
    graph = trace(model, args, batch_size=2)
    axes = find_axes(graph.graph)
    two, three = axes.of("p_table")[0]
    count = 2 if part == "two" else 3
    made = cut_axes(graph, axes, AxisCut(Mesh((("one", count),)), {"one": (two if part == "two" else three,)}, (), ()), "whole")
    assert (made.layouts.cuts["embedding"] != (None,)) == (part == "two")
    assert made.layouts.cuts["einsum"] != (None,)
    assert_equal_runs(run_cut(made, model, args), run_model(model, args, {}))


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if not each.name.startswith(("embedding", "causal", "grouped"))], ids=lambda example: example.name
)
def test_it_never_gathers_what_is_cut(example: Example) -> None:
    """Statistics and scores of rows are reduced; the only pieces that come together are those of the model's own result."""
    _, made = cut(example, (("one", 2),))
    returned = made.parts[0].graph.output_node().all_input_nodes
    for node in made.parts[0].graph.nodes:
        if node.target in (collectives.all_gather, collectives.replicate, collectives.exchange):
            assert node in returned or all(user in returned for user in node.users)
        if node.target is collectives.all_reduce:
            assert node.meta["val"].numel() * 8 <= FEW_BYTES


@pytest.mark.slow
def test_every_operation_of_the_table_has_an_example() -> None:
    shown = set()
    for example in EXAMPLES:
        graph = trace(OneCall(example), ARGS)
        shown |= {packet(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    aten = torch.ops.aten
    same = {aten._softmax: aten.softmax, aten._log_softmax: aten.log_softmax}
    assert {same.get(operator, operator) for operator in _DECOMPOSITIONS} <= shown
