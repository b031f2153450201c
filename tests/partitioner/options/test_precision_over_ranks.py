"""Mixed precision over ranks: what is gathered and summed in which type, beside DistributedDataParallel's way and float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.comm.primitives import all_gather, all_reduce, reduce_scatter
from tests.support.running.slow_values import slow

functional = nn.functional
Mode = str | Mapping[str, int]
ROWS, WIDTH = 24, 32
SINGLE = 2e-6
"""Rounding of sums in float32, of the largest element of a gradient."""


class Layers(nn.Module):
    """A norm and linear layers, one of them frozen, with a weight that is read whole in float32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(WIDTH, 48), nn.LayerNorm(48), nn.Linear(48, 48)
        self.last = nn.Linear(48, 6)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(functional.gelu(self.first(x))))
        result: Tensor = self.last(hidden) + x[:, :6] * self.last.bias
        return result


class Views(nn.Module):
    """Weights that are cast after views of them: transposed, reshaped, one of several."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.several = nn.Parameter(torch.randn(WIDTH, 64) / 6), nn.Parameter(torch.randn(6, 16, WIDTH) / 6)
        self.last = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.weight + functional.linear(x, self.weight.t())
        folded = functional.linear(x, self.several.reshape(96, WIDTH))
        result: Tensor = self.last(hidden) + folded[:, :6] + functional.linear(x, self.several[1])[:, :6]
        return result


class Attention(nn.Module):
    """Queries, keys and values in one weight: its shards are of an inner axis."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.last = nn.Linear(8, 24), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x.reshape(-1, 4, 8)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.last(attended.transpose(1, 2).flatten(-2)).mean(1)
        return result


MODELS: Mapping[str, Callable[[], nn.Module]] = {"layers": Layers, "views": Views, "attention": Attention}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 6, generator=generator)


def gradients_of_ddp(model: Callable[[], nn.Module], n_ranks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return gradients of a batch as in DistributedDataParallel: each rank's rows under autocast, summed in float32."""
    total: dict[str, Tensor] = {}
    for x, target in zip(*(tensor.chunk(n_ranks) for tensor in example()), strict=True):
        replica = model()
        with torch.autocast("cpu", dtype):
            loss = functional.mse_loss(replica(x), target) / n_ranks
        loss.backward()
        for name, parameter in replica.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, torch.zeros(())) + parameter.grad
    return total


def stepped(model: nn.Module, devices: int, mode: Mode, **options: Any) -> PartitionedModel:
    """Partition a model under mixed precision and take one training step."""
    x, target = example()
    given = {"precision": "bf16-mixed", "progress": False, **options}
    pm = partition(model, devices, mode, example_inputs=(x,), **given)
    pm.train_step(x, target=target, loss_fn=functional.mse_loss)
    return pm


def difference(found: Mapping[str, Any], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of gradients, in the largest element of each."""
    assert {name for name, gradient in found.items() if gradient is not None} == expected.keys()
    return max(float((found[name] - gradient).abs().max() / gradient.abs().max()) for name, gradient in expected.items())


@pytest.mark.parametrize(
    ("name", "devices", "mode", "options"),
    [
        ("layers", 2, "data", {}),
        pytest.param("layers", 4, {"data": 2, "fsdp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("layers", 3, "zero2", {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("views", 2, "fsdp", {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("views", 2, "data", {}, marks=pytest.mark.slow),
        pytest.param("views", 3, "zero1", {"recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("views", 4, {"data": 2, "fsdp": 2}, {}, marks=pytest.mark.slow),
        ("attention", 2, "fsdp", {}),
        pytest.param("attention", 2, "data", {"precision": "16-mixed"}, marks=pytest.mark.slow),
        pytest.param("attention", 4, {"data": 2, "zero1": 2}, {"precision": "16-mixed"}, marks=pytest.mark.slow),
        pytest.param("attention", 3, "fsdp", {"recompute": "full"}, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_ddp(name: str, devices: int, mode: Mode, options: dict[str, Any]) -> None:
    """Each rank's gradient is rounded once, to the lower precision, and the ranks' gradients are summed in float32."""
    dtype = torch.float16 if options.get("precision") == "16-mixed" else torch.bfloat16
    found = stepped(build(name), devices, mode, **options).full_gradients()
    assert difference(found, gradients_of_ddp(lambda: build(name), devices, dtype)) < SINGLE


@pytest.mark.parametrize(
    ("devices", "mode", "options"),
    [
        (8, "data", {}),
        pytest.param(8, "fsdp", {}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "data": 2}, {"n_microbatches": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"pipeline": 2, "fsdp": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_errors_do_not_exceed_those_of_ddp(devices: int, mode: Mode, options: dict[str, Any]) -> None:
    exact = build("layers").double()
    x, target = example()
    functional.mse_loss(exact(x.double()), target.double()).backward()

    def error(gradients: Mapping[str, Any]) -> float:
        pairs = [(gradients[name], parameter.grad) for name, parameter in exact.named_parameters() if parameter.grad is not None]
        return math.fsum(((found.double() - grad).norm() / grad.norm()).item() for found, grad in pairs) / len(pairs)

    n_replicas = devices if isinstance(mode, str) else 2
    by_ddp = error(gradients_of_ddp(lambda: build("layers"), n_replicas, torch.bfloat16))
    assert error(stepped(build("layers"), devices, mode, **options).full_gradients()) <= by_ddp * 1.02


# -- bytes and messages ------------------------------------------------------------------------------------------------------------


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 6, bias=False)]
    return nn.Sequential(*layers)


def sent(pm: PartitionedModel, n_ranks: int) -> tuple[dict[str, float], Counter[str], set[tuple[str, torch.dtype]]]:
    """Return by kind, without the loss: bytes that a rank sends for each parameter, times n / (n - 1); messages; types."""
    parameters = sum(parameter.numel() for parameter in perceptron().parameters())
    sizes, messages, types = dict[str, float](), Counter[str](), set[tuple[str, torch.dtype]]()
    times = {all_gather: n_ranks, reduce_scatter: 1, all_reduce: 2}  # of the bytes that are given: a part, or the whole
    for node in pm.graph(0).graph.nodes:
        if node.target in times and node.meta.get("reduces") != ("loss_of_batch",):
            name = node.target.__name__
            messages[name] += 1
            sizes[name] = sizes.get(name, 0.0) + times[node.target] * node.meta["bytes"] / parameters
            types.update((name, operand.meta["val"].dtype) for operand in node.args[0] if "val" in operand.meta)
    return sizes, messages, types


GATHERED = ("all_gather", torch.bfloat16)
SUMMED = ("reduce_scatter", torch.float32)

LATER = (64 * 64 + 64 * 6) / (64 * WIDTH + 64 * 64 + 64 * 6)
"""The part of the perceptron's parameters that is not in its first layer."""


@pytest.mark.parametrize(
    ("mode", "recompute", "gathered", "n_gathers"),
    [
        ("fsdp", "full", 2 + 2 * LATER, 2),
        pytest.param("zero1", "full", 2, 1, marks=pytest.mark.slow),
        pytest.param("zero2", "selective", 2, 1, marks=pytest.mark.slow),
        ("zero1", "none", 2, 1),
    ],
)
def test_parameters_are_gathered_in_the_lower_precision(mode: str, recompute: str, gathered: int, n_gathers: int) -> None:
    """FSDP2's bytes: 2 for each gather, and 4 for the sum of gradients. ZeRO gathers once a step, whatever is recomputed.

    The output of the first layer is where the next region begins: it is saved, and nothing reads the layer's weight in the backward.
    """
    sizes, messages, types = sent(stepped(perceptron(), 2, mode, recompute=recompute), 2)
    assert sizes == {"all_gather": pytest.approx(gathered), "reduce_scatter": 4}
    assert messages == {"all_gather": n_gathers, "reduce_scatter": 1}
    assert types == {GATHERED, SUMMED}


@pytest.mark.parametrize("n_microbatches", [*slow(1), 4])
def test_gradients_of_replicas_are_summed_in_float32_in_buckets(n_microbatches: int) -> None:
    sizes, messages, types = sent(stepped(perceptron(), 2, "data", n_microbatches=n_microbatches), 2)
    assert sizes == {"all_reduce": 2 * 4}
    assert messages == {"all_reduce": 1}
    assert types <= {("all_reduce", torch.float32)}


def test_a_gather_without_recomputation_leaves_out_what_the_backward_does_not_read() -> None:
    """The first layer's weight is no part of any gradient that is asked for."""
    sizes, _, _ = sent(stepped(perceptron(), 2, "fsdp", recompute="none"), 2)
    whole = sum(parameter.numel() for parameter in perceptron().parameters())
    assert sizes["all_gather"] == pytest.approx(2 + 2 * (whole - 64 * WIDTH) / whole)


class Repeated(nn.Module):
    """A layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = functional.relu(self.layer(x))
        result: Tensor = self.last(x)
        return result


def test_a_repeated_layer_is_gathered_once_and_its_gradients_are_added_before_they_are_sent() -> None:
    """As under autocast, which casts a parameter once."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Repeated()

    pm = stepped(model(), 2, "fsdp", recompute="full")
    assert difference(pm.full_gradients(), gradients_of_ddp(model, 2, torch.bfloat16)) < SINGLE
    gathers = [node for node in pm.graph(0).graph.nodes if node.target is all_gather]
    assert [len(node.args[0]) for node in gathers] == [4, 3]  # the backward does not read the last bias


def test_messages_hold_one_type() -> None:
    """A weight that is gathered in float32 does not share a message with those in bfloat16."""
    pm = stepped(build("layers"), 2, "fsdp")
    gathers = [node for node in pm.graph(0).graph.nodes if node.target is all_gather]
    types = [{operand.meta["val"].dtype for operand in node.args[0]} for node in gathers]
    assert all(len(each) == 1 for each in types)
    assert {torch.float32, torch.bfloat16} == set().union(*types)
