"""Precisions: what a partitioned model computes is what the original computes in that precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from partitioner.options.precision import check_scaler
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError, TraceError
from passes.ir.graph import Autocast
from passes.ir.mesh import Mesh
from tests.support.models.case import Instance
from tests.support.models.zoo import case_named
from tests.support.running.transparency import loss_of, make_partitioned

Mode = str | Mapping[str, int]
UNITS = 8
"""Rounding units of the lower precision, of the largest value of a tensor, that cutting a sum may cost; measured: up to 3."""


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 0.0) -> bool:
    """Equal but for the rounding of a precision; ``scale``: what the rounding of terms that cancel is beside."""
    allowed = UNITS * torch.finfo(dtype).eps * max(expected.abs().max().item(), scale)
    return found.dtype == expected.dtype and (found - expected).abs().max().item() <= allowed


# -- casts -------------------------------------------------------------------------------------------------------------------------


class ManyOperations(nn.Module):
    """Operations of every kind that autocast distinguishes, and regions without it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(5, 4), nn.Linear(4, 8), nn.LayerNorm(8)
        self.down, self.mix = nn.Linear(8, 4), nn.Conv1d(4, 4, 1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, index: Tensor) -> Any:
        hidden = self.norm(self.up(x))
        hidden = torch.softmax(hidden @ hidden.transpose(-1, -2), -1) @ hidden
        narrow = self.down(hidden)
        narrow = self.attention(narrow, narrow, narrow)[0]
        with torch.autocast("cpu", enabled=False):
            whole = x @ x.transpose(1, 2)
        both = torch.cat([whole, hidden], -1).to(hidden.dtype)
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        loss = nn.functional.cross_entropy(self.down(attended).flatten(0, 1), index.flatten()) + nn.functional.mse_loss(attended, hidden)
        return torch.einsum("bsd,bsd->bs", narrow, narrow), both, loss, self.mix(self.embed(index).transpose(1, 2)), hidden.relu_()


def many_operations() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return ManyOperations(), (torch.randn(2, 3, 4), torch.randint(4, (2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_are_those_of_autocast(dtype: torch.dtype) -> None:
    """To the last bit."""
    model, inputs = many_operations()
    autocast = Autocast("cpu", dtype)
    graph = trace(model, inputs, autocast=autocast)
    with autocast.enabled():
        expected = model(*inputs)
    parameters = dict(model.named_parameters())
    given = {**{name: parameters[key] for name, key in graph.parameters.items()}, "x": inputs[0], "index": inputs[1], "batch": 2}
    found = graph.module(*(given[node.name] for node in graph.graph.nodes if node.op == "placeholder"))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    values = [node.meta["val"] for node in graph.computing_nodes()]
    assert {value.dtype for value in values if isinstance(value, Tensor)} >= {dtype, torch.float32}


def test_casts_are_the_same_inside_of_autocast() -> None:
    model, inputs = many_operations()
    outside = str(trace(model, inputs, autocast=Autocast("cpu", torch.bfloat16)).graph)
    with torch.autocast("cpu", torch.bfloat16):
        inside = str(trace(model, inputs, autocast=Autocast("cpu", torch.bfloat16)).graph)
    assert inside == outside
    assert "aten._to_copy" in outside or "aten.to.dtype" in outside


def test_a_region_of_the_model_itself() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.first(x)
            result: Tensor = self.second(hidden.float())
            return result

    model, x = Region(), torch.randn(4, 6)
    pm = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=1, progress=False)
    assert torch.equal(pm(x), model(x))


@pytest.mark.parametrize("mode", ["pipeline", pytest.param("model", marks=pytest.mark.slow)])
def test_a_region_without_autocast_inside_of_the_callers(mode: str) -> None:
    """Programs are made when they first run, inside of the caller's autocast, which must not cast what the region keeps whole."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            with torch.autocast("cpu", enabled=False):
                result: Tensor = self.second(hidden.float())
            return result

    model, x, target = Whole(), torch.randn(4, 6), torch.randn(4, 6)
    pm = partition(model, 2, mode, example_inputs=(x,), precision="bf16-mixed", progress=False, n_microbatches=1)
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = pm(x), model(x)
        loss = nn.functional.mse_loss(expected, target)
        step = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    loss.backward()
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)
    assert torch.equal(step, loss.detach())
    for one, other in zip(pm.parameters(), model.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.slow
def test_what_casts_inside_is_refused_by_name() -> None:
    instance = case_named("lstm").build(dtype=torch.float32)
    with pytest.raises(TraceError, match=r"aten.lstm.input changes its precision inside under torch.autocast"):
        make_partitioned(instance, devices=2, mode="pipeline", precision="bf16-mixed")


# -- mixed -------------------------------------------------------------------------------------------------------------------------


def differences(name: str, mode: Mode, precision: str) -> list[str]:
    """Return the differences of outputs, loss and gradients of one batch from the original under autocast."""
    case = case_named(name)
    instance = case.build(dtype=torch.float32)
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    devices = 4 if isinstance(mode, dict) else 2
    pm = make_partitioned(instance, devices=devices, mode=mode, precision=precision, n_microbatches=2 if "pipeline" in mode else 1)
    assert all(parameter.dtype == torch.float32 for parameter in pm.parameters())
    with Autocast("cpu", dtype).enabled():
        expected = instance.model(*instance.args, **instance.kwargs)
        expected_loss = loss_of(case, expected, instance.target)
    expected_loss.backward()
    with torch.no_grad():
        output = pm(*instance.args, **instance.kwargs)
    loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
    found = pm.full_gradients()
    gradients = {key: parameter.grad for key, parameter in instance.model.named_parameters() if parameter.grad is not None}
    scale = max(gradient.abs().max().item() for gradient in gradients.values())
    wrong = [] if close(output, expected.detach(), dtype) else ["output"]
    wrong += [] if close(loss, expected_loss.detach(), dtype) else ["loss"]
    return wrong + [key for key, gradient in gradients.items() if not close(found[key], gradient, dtype, scale)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "mode", "precision"),
    [
        pytest.param("gpt", "tensor", "bf16-mixed", marks=pytest.mark.slow),
        ("batch_norm_convolution", "data", "bf16-mixed"),
        pytest.param("group_norm_convolution", "tensor", "16-mixed", marks=pytest.mark.slow),
        pytest.param("shared_layer", {"fsdp": 2, "pipeline": 2}, "bf16-mixed", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mixed_is_the_original_under_autocast(name: str, mode: Mode, precision: str) -> None:
    assert differences(name, mode, precision) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("mode", ["pipeline", "data", "tensor", "fsdp", {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "unet", "padded_attention", "encoder_decoder", "branches"])
def test_mixed_models(name: str, mode: Mode, precision: str) -> None:
    assert differences(name, mode, precision) == []


def perceptron(precision: str | None = None, rows: int = 8) -> tuple[nn.Module, PartitionedModel, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(rows, 16)
    return model, partition(model, 2, "data", example_inputs=(x,), precision=precision, progress=False), x


def test_a_scaler_outside() -> None:
    """Scaled losses, unscaled steps, and a step that is left out."""
    model, pm, x = perceptron("16-mixed")
    target = torch.randn(8, 4)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, pm)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1024.0, 1024.0)]
    for large in (1.0, 1e6, 1.0):
        for each, optimizer, scaler in zip((model, pm), optimizers, scalers, strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.mse_loss(each(x), target) * large
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[1].get_scale() < 1024.0, "one step was left out"
    state = pm.full_state_dict()
    assert all(close(state[name], tensor, torch.float16) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_memory_counts_the_bytes_of_the_precision() -> None:
    whole, mixed, half = (perceptron(precision, 4096)[1].simulate().memory[0] for precision in (None, "bf16-mixed", "bf16-true"))
    assert mixed.parameters == whole.parameters == 2 * half.parameters
    assert half.activations * 2 <= whole.activations * 1.05
    assert half.activations < mixed.activations < 0.7 * whole.activations


# -- true --------------------------------------------------------------------------------------------------------------------------


def test_true_converts_a_copy() -> None:
    model, pm, x = perceptron("bf16-true")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reference = perceptron()[0].bfloat16()
    result = pm(x)
    assert torch.equal(result, reference(x.bfloat16()))
    pm.train_step(x, target=torch.zeros(8, 4), loss_fn=nn.functional.mse_loss)
    assert {parameter.dtype for parameter in pm.parameters()} == {torch.bfloat16}
    assert {parameter.grad.dtype for parameter in pm.parameters() if parameter.grad is not None} == {torch.bfloat16}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert pm.check(x)


@pytest.mark.slow
def test_single_precision_of_a_double_model() -> None:
    instance = case_named("perceptron").build()
    pm = make_partitioned(instance, devices=2, mode="tensor", precision="32-true")
    expected = case_named("perceptron").build(dtype=torch.float32).model(instance.args[0].float())
    assert close(pm(*instance.args), expected, torch.float32)
    assert {parameter.dtype for parameter in instance.model.parameters()} == {torch.float64}


# -- refusals ----------------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no precision='half'"):
        perceptron("half")


def test_a_call_inside_another_autocast_computes_in_it() -> None:
    model, pm, x = perceptron()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert close(pm(x), model(x), torch.bfloat16)
    assert close(pm(x), model(x), pm(x).dtype)


def test_inputs_that_a_framework_has_rounded() -> None:
    """Fabric converts inputs to the dtype of mixed precision."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(4, 4)
    pm = partition(model, 2, "tensor", example_inputs=(x,), precision="bf16-mixed", progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert close(pm(x.bfloat16()), model(x.bfloat16()), torch.bfloat16)


def test_scalers_that_would_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a GradScaler in each would leave out different steps"):
        check_scaler("16-mixed", Mesh((("data", 2), ("pipeline", 2))), 4)
    check_scaler("16-mixed", Mesh((("data", 4),)), 4)
    check_scaler("16-mixed", Mesh((("pipeline", 4),)), None)
    check_scaler("bf16-mixed", Mesh((("fsdp", 4),)), 4)


def test_check_runs_the_original_in_the_same_precision() -> None:
    _, pm, x = perceptron("bf16-mixed")
    report = pm.check(x)
    assert report, str(report)


@pytest.mark.slow
def test_instances_are_as_they_were() -> None:
    """Tracing in a precision leaves no trace in the model."""
    instance: Instance = case_named("gpt").build(dtype=torch.float32)
    before = instance.model(*instance.args)
    make_partitioned(instance, devices=2, mode="data", precision="bf16-mixed")
    assert torch.equal(instance.model(*instance.args), before)
