"""The graphs that a stage is differentiated into compute what autograd computes, however the backward is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from partitioner import TraceError, partition
from partitioner.tracing.trace import trace
from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.recompute import Recompute
from passes.autograd.staged_model import Differentiation, cut_stages
from passes.pipeline import differentiate_stages
from passes.stages.split import StageGraph
from tests.support.running.programs import even_plan
from tests.support.running.slow_values import all_but

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (2, 4))
        query, key, value = self.qkv(self.norm(tokens)).chunk(3, -1)
        weights = (query @ key.transpose(-1, -2) / 2).softmax(-1)
        return torch.as_tensor((tokens + self.out(weights @ value)).flatten(1))


class TwoBiases(nn.Module):
    """Both biases have the same gradient: two tensors, not one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(4, 8))
        self.second = nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


class LastColumns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y[:, 4:]


class SliceWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        y[:, :2] = 2 * y[:, 2:4]
        y[:, 4:] *= 0.5
        return torch.as_tensor(self.linear(y).tanh())


class Partly(nn.Module):
    """One parameter has no gradient; one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.used(self.used(x).relu()) + self.unused(x).detach())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "batch_norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 8)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 3, padding=1), nn.SiLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 8)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(8, 8)),
    "partly": Partly,
    "slice_writes": SliceWrites,
    "two_biases": TwoBiases,
    "last_columns": LastColumns,
}


@dataclass(frozen=True)
class Built:
    """A model as one stage, its input, and the gradient of its output."""

    model: nn.Module
    stage: StageGraph
    training: DifferentiatedStage
    x: Tensor
    cotangent: Tensor

    def tensors(self, names: tuple[str, ...]) -> list[Tensor]:
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        short = {name.replace(".", "_"): tensor.detach() for name, tensor in own.items()}
        return [short[name.split("_", 1)[1]] for name in names]

    def forward(self) -> list[object]:
        torch.manual_seed(0)
        batch = [len(self.x)] if self.stage.has_batch else []
        return list(self.training.forward(*self.tensors(self.stage.bound), *batch, self.x))


def build(name: str, recompute: Recompute) -> Built:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    x = torch.randn(4, 8, dtype=torch.float64)
    graph = trace(model, (x,))
    cheap = (node.name for node in graph.computing_nodes() if node.target is not torch.ops.aten.linear.default)
    plan = replace(even_plan(graph, "GPipe", 1, 1), recomputed=tuple(cheap) if recompute == "selective" else ())
    lowered = cut_stages([graph], plan, [CPU])
    wanted = Differentiation(
        frozenset(graph.returned),
        frozenset({"x"} if "x" in lowered.stages[0].model_inputs else lowered.stages[0].model_inputs),
        frozenset(graph.parameters),
    )
    lowered = differentiate_stages(lowered, wanted, recompute)
    cotangent = torch.randn_like(model(x))
    torch.manual_seed(0)
    return Built(MODELS[name]().double(), lowered.stages[0], lowered.training[0], x, cotangent)


def reference(built: Built) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output and gradients by eager autograd."""
    x = built.x.clone().requires_grad_()
    torch.manual_seed(0)
    output = built.model(x)
    output.backward(built.cotangent)
    gradients: dict[str, Tensor | None] = {"p_" + n.replace(".", "_"): p.grad for n, p in built.model.named_parameters()}
    return output.detach(), {**gradients, built.stage.model_inputs[0]: x.grad}


def check(built: Built, gradients: dict[str, Tensor]) -> None:
    _, expected = reference(built)
    assert gradients.keys() == {name for name, gradient in expected.items() if gradient is not None}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12, msg=name)


def each_pair(*slow: str) -> pytest.MarkDecorator:
    """Return every model under every policy; those named take seconds."""
    pairs = [(name, recompute, f"{name}-{recompute}") for name in MODELS for recompute in RECOMPUTE]
    parameters = [pytest.param(name, recompute, id=pair, marks=pytest.mark.slow if pair in slow else ()) for name, recompute, pair in pairs]
    return pytest.mark.parametrize(("name", "recompute"), parameters)


class TestAgainstAutograd:
    @each_pair(
        *("attention-none", "attention-selective", "attention-full", "batch_norm-none", "batch_norm-selective"),
        *("convolution-none", "convolution-selective", "convolution-full", "dropout-selective", "dropout-full"),
        *("partly-none", "partly-selective", "partly-full", "slice_writes-none", "slice_writes-selective", "slice_writes-full"),
        *("two_biases-none", "two_biases-selective"),
    )
    def test_whole_backward(self, name: str, recompute: Recompute) -> None:
        built = build(name, recompute)
        output, saved = built.forward()
        torch.testing.assert_close(output, reference(build(name, recompute))[0], rtol=1e-12, atol=1e-12)
        training = built.training
        assert training.backward is not None
        assert isinstance(saved, tuple)
        *of_arguments, of_parameters = training.backward(*built.tensors(training.backward_bound), *saved, built.cotangent)
        named = dict(zip(training.arguments_with_gradient, of_arguments, strict=True))
        check(built, {**named, **dict(zip(training.parameters_with_gradient, of_parameters, strict=True))})

    @each_pair(
        *("attention-none", "attention-selective", "attention-full", "batch_norm-none", "batch_norm-full", "convolution-none"),
        *("convolution-selective", "dropout-none", "partly-selective", "slice_writes-selective", "slice_writes-full"),
        *("two_biases-none", "two_biases-full"),
    )
    def test_two_halves(self, name: str, recompute: Recompute) -> None:
        built = build(name, recompute)
        _, saved = built.forward()
        training = built.training
        assert training.backward_input is not None
        assert training.backward_weight is not None
        assert isinstance(saved, tuple)
        *of_arguments, kept = training.backward_input(*built.tensors(training.backward_bound), *saved, built.cotangent)
        (of_parameters,) = training.backward_weight(*built.tensors(training.weight_bound), *kept)
        named = dict(zip(training.arguments_with_gradient, of_arguments, strict=True))
        check(built, {**named, **dict(zip(training.parameters_with_gradient, of_parameters, strict=True))})


@pytest.mark.parametrize("name", all_but(["batch_norm", "dropout", "partly"], MODELS))
def test_parameter_gradients_own_their_memory(name: str) -> None:
    built = build(name, "none")
    _, saved = built.forward()
    training = built.training
    assert training.backward is not None
    assert isinstance(saved, tuple)
    before = [value.clone() if isinstance(value, Tensor) else value for value in saved]
    *_, of_parameters = training.backward(*built.tensors(training.backward_bound), *saved, built.cotangent)
    memory = [gradient.untyped_storage().data_ptr() for gradient in of_parameters]
    assert len(set(memory)) == len(memory)
    for gradient in of_parameters:
        gradient.zero_()
    assert all(torch.equal(one, other) for one, other in zip(saved, before, strict=True) if isinstance(one, Tensor))


def saved_bytes(name: str, recompute: Recompute) -> int:
    values = build(name, recompute).training.saved_values
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def test_full_recomputation_saves_the_arguments_alone() -> None:
    assert saved_bytes("attention", "full") == 4 * 8 * 8


@pytest.mark.slow
def test_selective_recomputation_keeps_weight_contractions() -> None:
    # For each row the input (8) and the fused projection (24); the norm, scores, softmax and the core's result are computed again.
    assert saved_bytes("attention", "selective") == 4 * (8 + 24) * 8
    assert saved_bytes("attention", "full") < saved_bytes("attention", "selective") < saved_bytes("attention", "none")


def test_random_masks_are_saved_whatever_the_policy() -> None:
    # Recomputation would draw another mask; the equality above would fail, this says why.
    arguments_and_mask = 4 * 8 * 8 * 2
    assert saved_bytes("dropout", "full") >= arguments_and_mask


def test_a_backward_of_one_batch_size_is_refused() -> None:
    """PyTorch reads the sizes of a fractional pool as numbers where it is differentiated: every later size would be fixed with it."""
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.FractionalMaxPool2d(2, output_size=4)), torch.randn(6, 3, 8, 8)
    with pytest.raises(TraceError, match=r"stage 0 cannot be differentiated: .* for 6 rows alone\n  where: module 0, 1"):
        partition(model, devices=1, mode="model", example_inputs=(x,))(x)


def test_a_copy_that_leaves_the_stage_is_recorded_with_its_own_memory() -> None:
    """Half of the columns, copied: its record once had the strides and the memory of all."""
    copies = [node for node in build("last_columns", "none").training.forward.graph.nodes if node.target is torch.ops.aten.clone.default]
    assert copies
    assert all(node.meta["val"].is_contiguous() for node in copies)
