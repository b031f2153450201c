"""Nothing to spare: the programs of a step hold the communication of the hand-written ideal, counted from their graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import Cluster, Constraints, PartitionedModel, partition
from passes.emit.coalesce_collectives import ALONE_BYTES
from passes.ir.comm.primitives import COLLECTIVES, all_gather, all_reduce, all_to_all, reduce_scatter, send
from tests.support.models.attention.gpt import Block
from tests.support.models.case import mean_squared_error
from tests.support.models.language import causal_model
from tests.support.running.slow_values import slow
from tests.support.running.transparency import assert_step_equals

WIDTH, HEADS, LENGTH, ROWS = 32, 4, 6, 8
ELEMENT = 8
"""Bytes of a number in float64."""


@dataclass(frozen=True)
class Collective:
    """One of a step.

    Attributes:
        kind: its function.
        group: its ranks.
        n_bytes: of the tensors that this rank gives it.
        backward: whether it belongs to the backward of a microbatch.
    """

    kind: object
    group: tuple[int, ...]
    n_bytes: int
    backward: bool


def collectives_of(graph: fx.Graph) -> Iterator[Collective]:
    """Yield all collectives except that of the loss, which is a number."""
    for node in graph.nodes:
        if node.target in COLLECTIVES and "loss" not in node.name:
            section = str(node.meta["section"])
            yield Collective(
                node.target, node.kwargs["group"], node.meta["bytes"], section.lstrip("0123456789").startswith(("B", "I", "W"))
            )


def after_a_step(model: nn.Module, x: Tensor, mode: str | dict[str, int], devices: int, n_microbatches: int = 1) -> PartitionedModel:
    pm = partition(model, devices=devices, mode=mode, example_inputs=(x,), n_microbatches=n_microbatches, progress=False)
    pm.train_step(x, target=torch.zeros_like(x), loss_fn=mean_squared_error)
    return pm


def step_of(model: nn.Module, x: Tensor, mode: str | dict[str, int], devices: int, n_microbatches: int = 1) -> list[list[Collective]]:
    """Return the collectives of every rank."""
    pm = after_a_step(model, x, mode, devices, n_microbatches)
    return [list(collectives_of(pm.graph(rank).graph)) for rank in range(devices)]


def blocks(depth: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(depth))).double()
    return model, torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)


def perceptron() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 8)).double()
    return model, torch.randn(ROWS, 8, dtype=torch.float64)


def n_parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters()) * ELEMENT


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 4])
def test_a_megatron_block_reduces_twice_forward_and_twice_backward(depth: int) -> None:
    """After attention and after the feed-forward layer; backward before them. Each moves the residual stream."""
    for found in step_of(*blocks(depth), "tensor", 2):
        assert Counter((each.kind, each.backward) for each in found) == {(all_reduce, False): 2 * depth, (all_reduce, True): 2 * depth}
        assert {each.n_bytes for each in found} == {ROWS * LENGTH * WIDTH * ELEMENT}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "element"), [(None, 4), ("bf16-mixed", 2)])
def test_mixed_precision_sends_what_megatron_does_in_the_smaller_type(precision: str | None, element: int) -> None:
    """Queries, keys and values read one cast of the norm, and the gradient of it is one sum; so with both products of a gate."""
    model, ids = causal_model("llama", use_cache=False).train(), torch.arange(8).reshape(2, 4)
    axes = {"heads": "tensor", "ffn": "tensor", "vocab": "tensor"}
    pm = partition(
        model,
        devices=2,
        mode="tensor",
        example_kwargs={"input_ids": ids, "labels": ids},
        precision=precision,
        constraints=Constraints(axes=axes),
        progress=False,
    )
    loss = pm.train_step(input_ids=ids, labels=ids)
    stream, layers = ids.numel() * 32, 2
    expected_bytes = Counter({(False, stream * 4): 1})  # the embedding is not cast
    expected_bytes[False, stream * element] += 2 * layers
    expected_bytes[True, stream * element] += 2 * layers + 1  # the head
    for rank in range(2):
        found = [each for each in collectives_of(pm.graph(rank).graph) if each.n_bytes >= stream * element]
        assert {each.kind for each in found} == {all_reduce}
        assert Counter((each.backward, each.n_bytes) for each in found) == expected_bytes
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    tolerance = 1e-5 if precision is None else 3e-2
    assert abs(loss.item() - expected.item()) < tolerance * abs(expected.item())
    for name, gradient in pm.full_gradients().items():
        wanted = model.get_parameter(name).grad
        assert torch.linalg.vector_norm(gradient - wanted) <= tolerance * torch.linalg.vector_norm(wanted)


class GroupedBlock(nn.Module):
    """Two heads of keys and values, with two queries each, and a gate.

    Args:
        writing: of the heads: each query by itself, or by the head of its keys.
    """

    def __init__(self, writing: str) -> None:
        super().__init__()
        self.writing = writing
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, width, bias=False) for width in (WIDTH, WIDTH // 2, WIDTH // 2, WIDTH))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.q(x), self.k(x).unflatten(-1, (2, 8)).transpose(1, 2), self.v(x).view(rows, length, 2, 8).transpose(1, 2)
        if self.writing == "groups":
            q = q.view(rows, length, 2, 2, 8).permute(0, 2, 3, 1, 4).flatten(1, 2)
        else:
            q = q.unflatten(-1, (4, 8)).transpose(1, 2)
        if self.writing == "repeated":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.writing != "repeated")
        x = x + self.o(attended.transpose(1, 2).reshape(rows, length, width))
        result: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


@pytest.mark.parametrize("writing", [*slow("heads"), "groups", *slow("repeated")])
@pytest.mark.parametrize("pinned", [("ffn",), *slow(("heads", "ffn"))], ids=str)
def test_grouped_queries_are_where_their_keys_are(writing: str, pinned: tuple[str, ...]) -> None:
    """Heads of queries and of keys are cut together, whatever they are written like, and whatever else is pinned."""
    torch.manual_seed(0)
    model, x = GroupedBlock(writing).double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    constraints = Constraints(axes=dict.fromkeys(pinned, "tensor"))
    cluster = Cluster.preset("h100", devices_per_node=2)
    pm = partition(model, devices=2, mode="tensor", example_inputs=(x,), constraints=constraints, cluster=cluster, progress=False)
    assert_step_equals(pm, model, x, target=torch.zeros_like(x))
    stream = ROWS * LENGTH * WIDTH * ELEMENT
    sent = {each.n_bytes for rank in range(2) for each in collectives_of(pm.graph(rank).graph)}
    assert sent <= {stream, stream // 2}, "the residual stream, or a half of it: no keys, and no weights of keys"


class FusedBlock(nn.Module):
    """Queries, keys and values of one projection, in this order, with several queries for each head of keys."""

    def __init__(self, key_heads: int, queries: int) -> None:
        super().__init__()
        self.sizes = (key_heads * queries * 4, key_heads * 4, key_heads * 4)
        self.fused, self.o = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(self.sizes[0], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.fused(x).split(self.sizes, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = x + self.o(attended.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize(("key_heads", "queries"), [(2, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 3), (2, 2)))])
def test_heads_of_fused_projections_are_those_of_their_keys(key_heads: int, queries: int) -> None:
    """The weight has 24, 8 and 8 heads where attention has 8 groups of (3, 1, 1): a rank has the rows of its groups."""
    torch.manual_seed(0)
    model, x = FusedBlock(key_heads, queries).double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    cluster, constraints = Cluster.preset("h100", devices_per_node=2), Constraints(axes={"heads": "tensor"})
    pm = partition(model, devices=2, mode="tensor", example_inputs=(x,), constraints=constraints, cluster=cluster, progress=False)
    assert_step_equals(pm, model, x, target=torch.zeros_like(x))


class Tables(nn.Module):
    """Words, kinds and positions: tables of many rows, and one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.positions = nn.Embedding(16, WIDTH), nn.Embedding(2, WIDTH), nn.Embedding(8, WIDTH)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device)
        result: Tensor = self.words(words) + self.kinds(kinds) + self.positions(positions)
        return result


def test_tables_are_summed_once_whatever_is_added_between() -> None:
    """Two kinds are too few for four ranks: every rank has their table, and the first one adds it."""
    torch.manual_seed(0)
    model, words = Tables().double(), torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 16
    kinds, constraints = words % 2, Constraints(axes={"vocab": "tensor"})
    pm = partition(model, devices=4, mode="tensor", example_inputs=(words, kinds), constraints=constraints, progress=False)
    target = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    assert_step_equals(pm, model, words, kinds, target=target)
    stream = ROWS * LENGTH * WIDTH * ELEMENT
    assert [(each.kind, each.n_bytes) for each in collectives_of(pm.graph(0).graph)] == [(all_reduce, stream)]


@pytest.mark.slow
def test_each_rank_holds_its_half_of_a_block() -> None:
    """All but what is added or multiplied to the whole residual stream: two norms and the biases of the two row-cut layers."""
    model, x = blocks(1)
    pm = after_a_step(model, x, "tensor", 2)
    whole = 2 * 2 * WIDTH + 2 * WIDTH
    total = sum(parameter.numel() for parameter in model.parameters())
    held = [sum(of_rank.tensors[name].numel() for name in pm.traced.graph.parameters) for of_rank in pm.traced.state.bound.values()]
    assert sum(held) == total + whole
    assert held[0] == held[1]
    assert sum(parameter.numel() for parameter in pm.parameters()) == total  # ranks of one process share what they all hold


@pytest.mark.parametrize("n_microbatches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_data_parallel_reduces_every_gradient_once(n_microbatches: int) -> None:
    model, x = perceptron()
    for found in step_of(model, x, "data", 2, n_microbatches):
        assert {each.kind for each in found} == {all_reduce}
        assert sum(each.n_bytes for each in found) == n_parameter_bytes(model)


@pytest.mark.slow
def test_data_parallel_pipelines_reduce_every_gradient_once() -> None:
    """Each stage in its own group, once for all microbatches."""
    model, x = blocks(4)
    ranks = step_of(model, x, {"data": 2, "pipeline": 2}, 4, 4)
    assert {each.kind for found in ranks for each in found} == {all_reduce}
    assert {each.group for found in ranks for each in found} == {(0, 2), (1, 3)}
    first_pipeline = sum(each.n_bytes for found in ranks[:2] for each in found)
    assert first_pipeline == n_parameter_bytes(model)


@pytest.mark.slow
def test_data_parallel_reduces_what_a_tensor_rank_holds() -> None:
    model, x = blocks(2)
    pm = after_a_step(model, x, {"data": 2, "tensor": 2}, 4)
    for rank in range(4):
        program = pm.graph(rank)
        found = [each for each in collectives_of(program.graph) if each.group == (rank % 2, rank % 2 + 2)]
        held = sum(block.numel() for block in (*program.parameters(), *program.buffers())) * ELEMENT
        assert n_parameter_bytes(model) / 2 <= held < n_parameter_bytes(model)
        assert sum(each.n_bytes for each in found) == held


def test_fsdp_gathers_parameters_forward_and_backward_and_scatters_gradients_once() -> None:
    """As the ZeRO paper counts: three times the parameters. Backward needs no bias, and no weight of the first layer."""
    model, x = perceptron()
    parameters = n_parameter_bytes(model)
    backward = sum(layer.weight.numel() for layer in (model[2], model[4])) * ELEMENT  # type: ignore[index]
    for found in step_of(model, x, "fsdp", 2):
        assert {each.kind for each in found} == {all_gather, reduce_scatter}
        gathered = [each for each in found if each.kind is all_gather]
        assert sum(2 * each.n_bytes for each in gathered if not each.backward) == parameters
        assert sum(2 * each.n_bytes for each in gathered if each.backward) == backward
        assert sum(each.n_bytes for each in found if each.kind is reduce_scatter) == parameters


def test_large_parameters_go_alone_and_small_ones_together() -> None:
    side = 256
    assert side * side * ELEMENT // 2 >= ALONE_BYTES > side * ELEMENT
    model, x = nn.Sequential(nn.Linear(side, side), nn.Linear(side, side)).double(), torch.randn(ROWS, side, dtype=torch.float64)
    pm = after_a_step(model, x, "fsdp", 2)
    sizes = [
        [value.meta["val"].numel() for value in node.args[0]]
        for node in pm.graph(0).graph.nodes
        if node.target in (all_gather, reduce_scatter)
    ]
    weight, bias = side * side // 2, side // 2
    assert Counter(map(tuple, sizes)) == {(weight,): 3, (bias, bias): 1, (2 * weight,): 2, (2 * bias, 2 * bias): 1}


def test_ranks_with_uneven_parts_send_the_same_together() -> None:
    """Two ranks of three have a part that is large enough to go alone; the third would send its own with others."""
    side, rows = 256, 3 * ALONE_BYTES // (256 * ELEMENT) - 1
    model, x = nn.Sequential(nn.Linear(side, rows), nn.Linear(rows, side)).double(), torch.randn(9, side, dtype=torch.float64)
    pm = after_a_step(model, x, "fsdp", 3)
    moved = [[len(node.args[0]) for node in pm.graph(rank).graph.nodes if node.target in COLLECTIVES] for rank in range(3)]
    assert moved[0] == moved[1] == moved[2]


@pytest.mark.parametrize("mode", [pytest.param("zero1", marks=pytest.mark.slow), "zero2"])
def test_zero_gathers_parameters_once_and_scatters_gradients_once(mode: str) -> None:
    model, x = perceptron()
    for found in step_of(model, x, mode, 2):
        moved = Counter[object]()
        for each in found:
            moved[each.kind] += each.n_bytes
        assert moved == {all_gather: n_parameter_bytes(model) // 2, reduce_scatter: n_parameter_bytes(model)}


@pytest.mark.slow
def test_nothing_moves_that_nobody_cuts() -> None:
    model, x = blocks(2)
    for found in step_of(model, x, "pipeline", 2, 4):
        assert found == []


@pytest.mark.slow
def test_no_step_exchanges_or_gathers_activations_of_a_tensor_rank() -> None:
    """Cut heads and cut feed-forward layers: nothing but sums, whatever the number of ranks."""
    for found in step_of(*blocks(2), "tensor", 4):
        assert {each.kind for each in found} == {all_reduce}
        assert all_to_all not in {each.kind for each in found}


@pytest.mark.parametrize("mesh", [{"pipeline": 2, "fsdp": 2}, {"zero1": 2, "pipeline": 2}, {"pipeline": 2, "zero2": 2}])
def test_each_stage_gathers_a_tied_weight_for_itself(mesh: dict[str, int]) -> None:
    """Only activations, and their gradients, are sent from stage to stage: no weight that a stage gathered."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 40), nn.Linear(40, 6)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 6), first, nn.Tanh(), second).double()
    x, rows = torch.randn(ROWS, 6, dtype=torch.float64), ROWS // 4
    pm = partition(model, devices=4, mode=mesh, example_inputs=(x,), n_microbatches=2, schedule="1F1B", progress=False)
    assert_step_equals(pm, model, x, target=torch.zeros_like(x))
    for rank in range(4):
        sent = [node.meta["bytes"] for node in pm.graph(rank).graph.nodes if node.target is send and "loss" not in node.name]
        assert len(sent) == 2
        assert max(sent) <= rows * 40 * ELEMENT < first.weight.numel() * ELEMENT


class TwoRecurrent(nn.Module):
    """Two layers that read the input; the result of the first is flattened in the stage of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.RNN(4, 3, batch_first=True).double(), nn.GRU(4, 3, batch_first=True).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.first(x)[0], self.second(x)[0]
        return first.flatten(1), second


def test_gradients_are_sent_before_tied_weights_are_summed() -> None:
    """The first stage sums tied weights after its backward, for which it waits for these gradients."""
    model, x = TwoRecurrent(), torch.randn(8, 7, 4, dtype=torch.float64)
    pm = partition(model, devices=4, mode={"pipeline": 2, "zero2": 2}, example_inputs=(x,), n_microbatches=1, progress=False)

    def loss_fn(output: tuple[Tensor, Tensor], _: object) -> Tensor:
        return output[0].pow(2).mean() + output[1].pow(2).mean()

    expected = loss_fn(model(x), None)
    expected.backward()
    loss = loss_fn(pm(x), None)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


class ShortSides(nn.Module):
    """Parameters whose sides are too short for three parts, a large one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Parameter(torch.rand((2,) * 14).double()), nn.Parameter(torch.rand(2).double())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x * self.table + self.bias
        return result


def test_gradients_that_are_summed_without_being_scattered_share_messages() -> None:
    """Small ones come late only where they were scattered before."""
    for collectives in step_of(ShortSides(), torch.randn(9, *(2,) * 14, dtype=torch.float64), "fsdp", 3):
        assert [(each.kind, each.n_bytes) for each in collectives] == [(all_reduce, (2**14 + 2) * ELEMENT)]
