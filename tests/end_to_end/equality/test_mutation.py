"""Models that write in place train as they are, in every mode; what cannot be made functional is refused by name."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from partitioner import ConfigError, TraceError, VerificationError, partition
from partitioner.tracing.trace import trace
from passes.graph.aliasing import mutated_arguments
from passes.graph.buffer_writes import verify_writes
from passes.normalize.functional.functionalize import functionalize
from tests.support.running.slow_values import all_but
from tests.support.running.traced import assert_equal_runs, run_model, run_traced
from tests.support.running.writing_models import BUFFERS, IMAGES, VIEWS, Layers, assert_trains_as_original, example, refusal

aten = torch.ops.aten


def circular() -> nn.Module:
    def layer() -> nn.Module:
        return nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")

    return nn.Sequential(layer(), nn.ReLU(), layer())


def layers(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "circular":
        return circular()
    if name in BUFFERS:
        return Layers(*BUFFERS[name])
    return Layers((IMAGES if name in IMAGES else VIEWS)[name], of_images=name in IMAGES)


# -- the graph -------------------------------------------------------------------------------------------------------------------------


LONG = {
    *("assigned", "average_read", "cache", "circular", "count", "dropped_channels", "quadrants", "queue", "recurrence", "ring", "rows"),
    *("shapes", "split", "stale_view", "strided", "sum", "transposed", "two_names", "unfold"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in (*VIEWS, *IMAGES, *BUFFERS, "circular")]
)
def test_a_traced_graph_writes_declared_buffers_alone(name: str) -> None:
    """And computes what the model does: results, gradients, buffers."""
    model = layers(name).double()
    inputs = (example(model),)
    graph = trace(model, inputs)
    for node in graph.computing_nodes():
        written = [each.name for each in mutated_arguments(node)]
        assert not written or (node.target is aten.copy_.default and written[0] in graph.buffers), node.format_node()
    assert_equal_runs(run_traced(graph, model, inputs, {}), run_model(model, inputs, {}))


def test_a_value_that_is_read_by_an_old_name_is_the_new_one() -> None:
    graph = fx.Graph()
    base = graph.placeholder("base")
    base.meta["val"] = torch.zeros(4, 4)
    whole = _call(graph, aten.clone.default, base)
    row = _call(graph, aten.select.int, whole, 0, 1)
    column = _call(graph, aten.select.int, whole, 1, 2)
    _call(graph, aten.fill_.Scalar, row, 3.0)
    graph.output((column, whole))
    functionalize(graph)
    graph.lint()
    found = fx.GraphModule({}, graph)(torch.zeros(4, 4))
    torch.testing.assert_close(found[0], torch.tensor([0.0, 3.0, 0.0, 0.0]))
    assert found[1].sum() == 12


def _call(graph: fx.Graph, target: Callable[..., Any], *arguments: Any) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*fx.map_arg(arguments, lambda each: each.meta["val"]))
    return node


VIEW_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda t: t.as_strided((2, 3), (12, 5), 1),
    "chunk": lambda t: t.chunk(3, 1)[1],
    "diagonal": lambda t: t.diagonal(1, 0, 2),
    "flatten": lambda t: t.flatten(1),
    "hsplit": lambda t: t.hsplit(3)[2],
    "movedim": lambda t: t.movedim((0, 2), (1, 0)),
    "narrow": lambda t: t.narrow(2, -3, 2),
    "permute": lambda t: t.permute(2, 0, 1),
    "select": lambda t: t.select(-1, -2),
    "slice": lambda t: t[:, 1:, ::2],
    "split": lambda t: t.split([1, 2], 1)[1],
    "squeeze": lambda t: t.unsqueeze(0).squeeze(),
    "swapaxes": lambda t: t.swapaxes(-1, 0),
    "tensor_split": lambda t: t.tensor_split((1, 3), 2)[1],
    "transpose": lambda t: t.transpose(0, -1),
    "unbind": lambda t: t.unbind(2)[3],
    "unflatten": lambda t: t.unflatten(2, (2, 2)),
    "unfold": lambda t: t.unfold(2, 2, 2),
    "view": lambda t: t.view(6, 4),
    "view_as": lambda t: t.view_as(torch.empty(4, 6)),
    "view_dtype": lambda t: t.view(torch.int64).view(torch.float64),
    "mT": lambda t: t.mT,
    "T": lambda t: t[0].t(),
    "expand": lambda t: t.expand(2, 3, 4),
    "detach": lambda t: t.detach(),
    "of_view": lambda t: t.permute(2, 0, 1)[1:].transpose(1, 2)[..., 1],
}
"""Views of a tensor of shape (2, 3, 4)."""

UNANNOTATED_VIEW_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.5, training=False),
    "channel_shuffle": lambda t: F.channel_shuffle(t[None].mT, 1),
    "conj_physical": lambda t: t.conj_physical(),
    "dropout": lambda t: F.dropout(t, 0.0),
    "dropout_in_evaluation": lambda t: F.dropout(F.dropout(t.mT, 0.5, training=False), 0.0)[:, 1:],
    "dropout_of_some": lambda t: F.dropout(t, 0.5),
    "einsum": lambda t: torch.einsum("abc->cab", t),
    "einsum_sum": lambda t: torch.einsum("abc->cb", t),
    "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.0, training=True),
    "feature_dropout": lambda t: F.dropout1d(t, 0.3, training=False),
    "real": lambda t: t.real,
    "sum_to_size": lambda t: t.sum_to_size(2, 3, 4),
    "type_as": lambda t: t.type_as(t),
    "unsafe_chunk": lambda t: torch.unsafe_chunk(t, 2, 2)[1],
    "unsafe_split": lambda t: torch.unsafe_split(t, 2, 1)[0],
}
"""Calls whose schemas do not say that they return their argument or a view of it, which they do for some arguments."""


QUICK_CALLS = ("slice", "split", "of_view", "alpha_dropout", "einsum", "feature_alpha_dropout")


@pytest.mark.parametrize("name", all_but(QUICK_CALLS, [*VIEW_CALLS, *UNANNOTATED_VIEW_CALLS]))
def test_a_write_through_a_view_reaches_its_base(name: str) -> None:
    take = (VIEW_CALLS | UNANNOTATED_VIEW_CALLS)[name]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            base = x * 1
            other = base.flatten()[3:7]
            view = take(base)
            with torch.no_grad():
                view.copy_(torch.arange(view.numel()).view(view.shape) * 0.5 - view)
            return base, other

    assert_traced_alike(Model())


LONG_CALLS = {"channel_shuffle", "einsum", "feature_alpha_dropout", "feature_dropout", "sum_to_size"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG_CALLS else ()) for name in UNANNOTATED_VIEW_CALLS]
)
def test_gradients_of_a_write_through_what_may_be_a_view(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            base = x * 1
            other = base.flatten()[3:7]
            view = UNANNOTATED_VIEW_CALLS[name](base)
            view.mul_(2.0).add_(0.5)
            return base, other, view

    assert_traced_alike(Model())


def assert_traced_alike(model: nn.Module) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    graph = trace(model, (x,), batch_size=2)
    verify_writes(graph.graph, "normalization")
    assert_equal_runs(run_traced(graph, model, (x,), {}), run_model(model, (x,), {}))


# -- what cannot be written otherwise --------------------------------------------------------------------------------------------------


@torch.library.custom_op("tests_writing::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    """Double a tensor in place."""
    x.mul_(2)


class Writes(nn.Module):
    """A change of what a layer gives, that may write anything that the model has."""

    table: Tensor

    def __init__(self, change: Callable[[Writes, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self.plain = torch.zeros(4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, self.layer(x))


def _custom(_: Writes, y: Tensor) -> Tensor:
    z = y.detach().clone()
    double_(z)
    return y + z


def _parameter(self: Writes, y: Tensor) -> Tensor:
    with torch.no_grad():
        self.layer.weight.mul_(0.5)
    return y


def _attribute(self: Writes, y: Tensor) -> Tensor:
    self.plain.add_(1)
    return y + self.plain


def _resized(self: Writes, y: Tensor) -> Tensor:
    self.table.unsqueeze_(0)
    return y + self.table


def _expanded(_: Writes, y: Tensor) -> Tensor:
    torch.zeros(1).expand(4).add_(1)
    return y + torch.zeros(1).expand(4).add_(1)


def _statistics(self: Writes, y: Tensor) -> Tensor:
    mean, variance = torch.zeros(4), torch.ones(4)
    return nn.functional.batch_norm(y, mean, variance, training=True) + mean


REFUSED: dict[str, tuple[Callable[[Writes, Tensor], Tensor], str]] = {
    "attribute": (_attribute, "a constant tensor"),
    "custom": (_custom, "tests_writing.double_"),
    "expanded": (_expanded, "share memory"),
    "parameter": (_parameter, "a parameter"),
    "resized": (_resized, "size or memory"),
    "statistics": (_statistics, "running statistics"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_functional_form_is_refused_by_name(name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(TraceError, match=words) as caught:
        trace(Writes(change), (torch.zeros(2, 4),))
    assert f"{__file__}:" in str(caught.value)
    assert caught.value.remedy


def test_statistics_that_nobody_keeps_are_left_out() -> None:
    """Normalisation with statistics that are thrown away, as functional code has it."""
    model = Writes(lambda _, y: nn.functional.batch_norm(y, y.new_zeros(4), y.new_ones(4), training=True)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    graph = trace(model, (x,))
    verify_writes(graph.graph, "normalization")
    assert_equal_runs(run_traced(graph, model, (x,), {}), run_model(model, (x,), {}))


def test_a_write_that_a_pass_leaves_is_found() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(4)
    y = _call(graph, aten.relu.default, x)
    _call(graph, aten.add_.Tensor, y, x)
    graph.output((y,))
    verify_writes(graph, "tiling", owns_memory=True)
    with pytest.raises(VerificationError, match=r"after some pass, .* writes relu_default in place"):
        verify_writes(graph, "some pass")


# -- training --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "devices", "mode", "options"),
    [
        pytest.param("circular", 2, "data", {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("circular", 2, "pipeline", {"recompute": "selective", "n_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("circular", 1, {"tile": 2}, {}, marks=pytest.mark.slow),
        pytest.param("narrow", 2, "model", {}, marks=pytest.mark.slow),
        pytest.param("dropped", 2, "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("dropped_channels", 1, {"tile": 2}, {}, marks=pytest.mark.slow),
        pytest.param("dropped_channels", 2, "tile", {}, marks=pytest.mark.slow),
        ("dropped_buffer", 2, "data", {}),
        pytest.param("border", 2, "tile", {}, marks=pytest.mark.slow),
        pytest.param("overwritten", 2, "data", {}, marks=pytest.mark.slow),
        pytest.param("two_names", 2, "tensor", {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("no_grad", 2, "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_writes_in_place_trains_as_it_is(name: str, devices: int, mode: Any, options: dict[str, Any]) -> None:
    assert_trains_as_original(layers(name), devices, mode, **options)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("dropped", "pipeline", marks=pytest.mark.slow),
        ("dropped", "data"),
        pytest.param("dropped_channels", "tile", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_writes_in_place_evaluates_as_it_is(name: str, mode: str) -> None:
    model = layers(name).double().eval()
    x = example(model)
    pm = partition(model, 2, mode, example_inputs=(x,))
    torch.testing.assert_close(pm(x), model(x), rtol=0, atol=1e-12)


MODES: list[tuple[int, Any, dict[str, Any]]] = [
    (2, "model", {}),
    (2, "pipeline", {"n_microbatches": 4, "schedule": "1F1B"}),
    (2, "pipeline", {"n_microbatches": 4, "schedule": "ZB1P"}),
    (2, "pipeline", {"n_microbatches": 4, "schedule": "GPipe"}),
    (2, "pipeline", {"n_microbatches": 1}),
    (2, "data", {}),
    (2, "fsdp", {}),
    (2, "zero1", {}),
    (2, "tensor", {}),
    (2, "tile", {}),
    (1, {"tile": 2}, {}),
    (4, {"data": 2, "pipeline": 2}, {"n_microbatches": 2}),
    (4, {"data": 2, "tensor": 2}, {}),
    (3, {"pipeline": (2, 1)}, {"n_microbatches": 4}),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Every rank of .* computes .* whole")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", [*VIEWS, *IMAGES, "circular"])
def test_every_mode_trains_as_the_model_or_refuses(name: str, recompute: str) -> None:
    refused = []
    for devices, mode, options in MODES:
        if "tile" in str(mode) and name not in (*IMAGES, "circular"):
            continue
        error = refusal(layers(name), devices, mode, recompute=recompute, **options)
        if error is not None:
            assert isinstance(error, ConfigError)
            refused.append((mode, error.problem))
    assert all("microbatches" in problem or "strides" in problem or "ranks" in problem for _, problem in refused), refused
