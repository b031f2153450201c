"""Alias analysis compared with real memory: every storage that a run shares must be in one claimed alias set.

Of a single call it is known exactly whether its result is a view, for the arguments that it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from passes.graph.aliasing import aliasing, mutated_arguments, viewed_node
from passes.graph.schemas import viewed_arguments, written_arguments
from passes.ir.comm.primitives import draw_alike
from passes.ir.torch_private import FakeTensorMode, OpOverload, enable_python_dispatcher, tree_map_only
from tests.support.samples.rule_samples import samples
from tests.support.samples.rule_samples_values import Sample, flags, real, whole

aten = torch.ops.aten


class Views(nn.Module):
    """Views of many kinds, declared and undeclared, of one value."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        a, b = y.chunk(2, dim=1)
        c = F.dropout(y, 0.5, False)
        d = torch.einsum("ij->ji", y)
        e, _ = torch.broadcast_tensors(y, y[0])
        f = y.type_as(x).to(torch.float32).contiguous()
        g = y.reshape(-1).view(2, -1)[0]
        h = y * 2
        return a, b, c, d, e, f, g, h, torch.atleast_3d(h)


class Writes(nn.Module):
    """In-place writes: through a view, into a buffer, and by batch normalisation."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        y[:, 0].add_(1.0)
        self.count.add_(1)
        return y.relu() * self.count


def exported(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return torch.export.export(model, inputs, strict=False).module(check_guards=False)


class Storages(fx.Interpreter):
    """Runs a graph and keeps every value, so that equal addresses mean shared memory."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n.name] = value
        return value

    def addresses(self, name: str) -> set[int]:
        return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(self.values[name]) if isinstance(leaf, Tensor)}


@pytest.mark.parametrize(
    ("model", "shape"),
    [(Views(), (4, 6)), (Writes(), (2, 3, 4, 4)), (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8))],
    ids=["views", "writes", "transformer"],
)
def test_every_shared_storage_is_known(model: nn.Module, shape: tuple[int, ...]) -> None:
    module = exported(model, torch.randn(shape))
    memory = aliasing(module.graph)
    run = Storages(module)
    run.run(torch.randn(shape))
    names = [name for name in run.values if name != "output" and run.addresses(name)]
    for name in names:
        for other in names:
            if run.addresses(name) & run.addresses(other):
                assert memory.storages[name] & memory.storages[other], (name, other)


def test_a_fresh_value_shares_nothing() -> None:
    module = exported(Views(), torch.randn(4, 6))
    memory = aliasing(module.graph)
    assert not memory.storages["add"] & memory.storages["mul"]
    assert not memory.storages["x"] & memory.storages["add"]


def test_writers_are_found_through_views_and_hidden_statistics() -> None:
    module = exported(Writes().train(), torch.randn(2, 3, 4, 4))
    memory = aliasing(module.graph)
    nodes = {node.name: node for node in module.graph.nodes}
    written = {name for name, node in nodes.items() if memory.written(node)}
    assert {"norm_running_mean", "norm_running_var", "norm_num_batches_tracked", "count", "batch_norm", "select"} <= written
    assert not {"x", "norm_weight", "relu", "mul"} & written
    assert [node.name for node in mutated_arguments(nodes["batch_norm"])] == ["norm_running_mean", "norm_running_var"]


def test_batch_norm_in_evaluation_writes_nothing() -> None:
    module = exported(nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4))
    assert not aliasing(module.graph).writers


def test_results_of_a_normalisation_are_no_views_of_the_statistics_that_it_updates() -> None:
    graph = fx.Graph()
    x, weight, bias, mean, variance = map(graph.placeholder, ("x", "weight", "bias", "mean", "variance"))
    norm = graph.call_function(aten._native_batch_norm_legit.default, (x, weight, bias, mean, variance, True, 0.1, 1e-5))
    added = graph.call_function(aten.add_.Tensor, (mean, variance))
    assert (written_arguments(norm), viewed_arguments(norm)) == ([mean, variance], [])
    assert viewed_arguments(added) == [mean]


def test_alias_sets_are_numbered_the_same_each_time() -> None:
    graph = exported(Writes(), torch.randn(2, 3, 4, 4)).graph
    assert aliasing(graph) == aliasing(graph)


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,ij->ij", "ij,->ij", "i...,jk->i..."])
def test_an_einsum_of_two_operands_is_no_view(equation: str) -> None:
    """Joined with a parameter, memory that tiles are written in one by one would look like the parameter's."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.einsum(equation, x, y)

    inputs = torch.rand(3, 3), torch.rand(()) if ",->" in equation else torch.rand(3, 3)
    product = Product()(*inputs)
    assert product.untyped_storage().data_ptr() not in {each.untyped_storage().data_ptr() for each in inputs}
    graph = exported(Product(), *inputs).graph
    storages = aliasing(graph).storages
    found = [storages[node.name] for node in graph.nodes if node.name in {"x", "y", "einsum"}]
    assert len(found) == len(set(found)) == 3


@pytest.mark.parametrize(
    ("operator", "is_shared"), [(aten.bernoulli.p, False), (aten.rrelu_with_noise_functional.default, False), (aten.dropout.default, True)]
)
def test_numbers_that_ranks_draw_alike_lie_where_the_operator_puts_them(operator: OpOverload, *, is_shared: bool) -> None:
    """A dropout may return its argument; other draws are new memory, though ``draw_alike`` has no schema that says so."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    drawn = graph.call_function(draw_alike, (operator, (0, 1), x, 0.5, True))
    graph.output(drawn)
    x.meta["val"], drawn.meta["val"] = torch.ones(3), torch.ones(3)
    memory = aliasing(graph)
    assert bool(memory.storages[x.name] & memory.storages[drawn.name]) == is_shared


# -- one call --------------------------------------------------------------------------------------------------------------------------


def views_of_some_arguments() -> Iterator[Sample]:
    """Yield calls of operators whose schemas do not state a view: those that return one, and those with new memory."""
    x = real(2, 4, 4)
    for equation in ("abc->abc", "abc->cab", "abb->ab", "abc->ab", "...->..."):
        yield Sample(aten.einsum.default, equation, [x])
    yield Sample(aten.einsum.default, "abc->bc", [x[:1]])
    yield Sample(aten.einsum.default, "abc,->abc", [x, real()])
    for value in (x, whole(5, 2, 3), flags(2, 3), torch.complex(x, x)):
        for operator in (aten.conj_physical, aten.conj, aten.resolve_conj, aten.resolve_neg, aten.real):
            yield Sample(operator.default, value)
    for size in ([2, 4, 4], [4, 4], [1, 1, 4]):
        yield Sample(aten.sum_to_size.default, x, size)
    yield Sample(aten.sum_to_size.default, x[:1], [4, 4])
    for other in (real(), whole(5, 2)):
        yield Sample(aten.type_as.default, x, other)
    for value in (real(), real(3), x):
        for operator in (aten.atleast_1d, aten.atleast_2d, aten.atleast_3d):
            yield Sample(operator.default, value)
            yield Sample(operator.Sequence, [value, value * 2])
    for values in ([x], [x, x[0]], [x[:1], x]):
        yield Sample(aten.broadcast_tensors.default, values)
    for lines in ([real(3)], [real(3), real(1)]):
        yield Sample(aten.cartesian_prod.default, lines)
        yield Sample(aten.meshgrid.default, lines)
    yield Sample(aten.unsafe_chunk.default, x, 2, 1)
    yield Sample(aten.unsafe_split.Tensor, x, 3, 1)
    yield Sample(aten.unsafe_split_with_sizes.default, x, [1, 3], 1)
    yield Sample(aten._unsafe_view.default, x, [2, 16])


def copies_of_fake_tensors() -> Iterator[Sample]:
    """Yield calls whose result shares memory in a run and not as a fake tensor, or the reverse."""
    dropouts = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout, aten.native_dropout)
    for operator, p, train in itertools.product(dropouts, (0.0, 0.3, 1.0), (True, False)):
        yield Sample(operator.default, real(2, 4, 4), p, train)
    for operator, groups in itertools.product((aten.channel_shuffle, aten.native_channel_shuffle), (1, 2, 4)):
        yield Sample(operator.default, real(2, 4, 2, 2), groups)


def changes_nothing() -> Iterator[Sample]:
    """Yield calls that equal their first argument: of some of them PyTorch returns the argument, or a view of it."""
    x, image = real(2, 4, 4), real(2, 3, 4, 4)
    last = image.contiguous(memory_format=torch.channels_last)
    for value, form in itertools.product((image, last, x.mT), (torch.contiguous_format, torch.preserve_format, torch.channels_last)):
        if form is not torch.channels_last or value.dim() == 4:
            yield Sample(aten.to.dtype, value, torch.float64, memory_format=form)
        if form is not torch.preserve_format and (form is not torch.channels_last or value.dim() == 4):
            yield Sample(aten.contiguous.default, value, memory_format=form)
    for dtype, copied in itertools.product((torch.float64, torch.float32), (True, False)):
        yield Sample(aten.to.dtype, x, dtype, False, copied)
    for value in (x, x.mT):
        yield Sample(aten.reshape.default, value, [2, 16])
        yield Sample(aten.reshape.default, value, [2, 4, 4])
        yield Sample(aten.flatten.using_ints, value)
        yield Sample(aten.ravel.default, value)
    yield Sample(aten.expand_as.default, x, x)
    yield Sample(aten.pad.default, x, [0, 0])
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield Sample(aten.pad.default, x, [0, 0], mode)
    for factor in (aten.pixel_shuffle, aten.pixel_unshuffle):
        yield Sample(factor.default, image, 1)
    for name in ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"):
        rest = () if name == "upsample_nearest2d" else (False,)
        yield Sample(getattr(aten, name).vec, image, [4, 4], *rest, None)
    yield Sample(aten.adaptive_avg_pool2d.default, image, [4, 4])
    yield Sample(aten.tile.default, x, [1])
    yield Sample(aten.repeat.default, x, [1, 1, 1])
    yield Sample(aten.repeat_interleave.self_int, x, 1, 0)
    yield Sample(aten.roll.default, x, [0], [0])
    yield Sample(aten.rot90.default, x, 4)
    yield Sample(aten.flip.default, x, [])
    yield Sample(aten.matrix_power.default, x, 1)
    yield Sample(aten.chain_matmul.default, [x[0]])
    yield Sample(aten.clamp.default, x, -99.0)
    yield Sample(aten.positive.default, x)
    for operator in (aten.cat, aten.hstack, aten.vstack, aten.block_diag):
        yield Sample(operator.default, [x[0]])
    yield Sample(aten.movedim.int, x, 0, 0)
    yield Sample(aten.tensor_split.sections, x, 1)
    yield Sample(aten.unflatten.int, x, 0, [2])


NOTHING = -1
"""Memory of a tensor without elements."""


def viewed_in_a_run(sample: Sample) -> list[int | None]:
    """Return, for each tensor of the result, the argument whose memory it shares."""
    given = [each for each in tree_leaves(sample.args) if isinstance(each, Tensor)]
    places = {each.untyped_storage().data_ptr(): place for place, each in reversed(list(enumerate(given))) if each.numel()}
    results = [each for each in tree_leaves(sample.operator(*sample.args, **sample.kwargs)) if isinstance(each, Tensor)]
    return [places.get(each.untyped_storage().data_ptr()) if each.numel() else NOTHING for each in results]


def viewed_as_known(sample: Sample) -> list[int | None]:
    """Return the same by the graph of the call, with fake tensors as tracing leaves them."""
    graph = fx.Graph()
    placeholders: list[fx.Node] = []

    def placeholder(tensor: Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(placeholders)}")
        node.meta["val"] = mode.from_tensor(tensor)
        placeholders.append(node)
        return node

    with FakeTensorMode() as mode, enable_python_dispatcher():
        call = graph.call_function(sample.operator, *tree_map_only(Tensor, placeholder, (sample.args, sample.kwargs)))
        arguments, keywords = fx.map_arg((call.args, call.kwargs), lambda node: node.meta["val"])
        call.meta["val"] = sample.operator(*arguments, **keywords)
    items = [call] if isinstance(call.meta["val"], Tensor) else []
    for place, value in enumerate(call.meta["val"] if not items else ()):
        items.append(graph.call_function(getitem, (call, place)))
        items[-1].meta["val"] = value
    found = [viewed_node(item) for item in items if isinstance(item.meta["val"], Tensor)]
    return [None if node is None else placeholders.index(node) for node in found]


def returns_fixed_sizes(sample: Sample) -> bool:
    """Return whether a call returns what it computes, of sizes that follow from sizes: others have no fake tensor."""
    by_values = (aten.bincount, aten.masked_select, aten.nonzero, aten.where.default, aten.repeat_interleave.self_Tensor)
    by_mask = sample.operator is aten.index.Tensor and any(each is not None and each.dtype is torch.bool for each in sample.args[1])
    writes = sample.operator._schema.is_mutable
    return not (writes or by_mask) and not {sample.operator, sample.operator.overloadpacket} & set(by_values)


CALLS = [*copies_of_fake_tensors(), *views_of_some_arguments(), *changes_nothing(), *filter(returns_fixed_sizes, samples())]


@pytest.mark.parametrize("sample", CALLS, ids=repr)
def test_a_call_is_a_view_exactly_where_it_is_one_in_a_run(sample: Sample) -> None:
    result = viewed_in_a_run(sample)
    if result != [NOTHING]:
        assert viewed_as_known(sample) == result
