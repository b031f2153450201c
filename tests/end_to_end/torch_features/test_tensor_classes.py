"""Quantized weights in plain tensors serve in every mode; classes of tensors with rules of their own are refused by name."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import parametrizations, parametrize, prune

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError, PartitionError, TraceError
from tests.support.running.slow_values import slow


class Doubled(Tensor):
    """Its linear layers give twice the values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result * 2 if func is F.linear else result


class Quantized(Tensor):
    """Integers and scales, which it multiplies when it is used: a class like those of torchao."""

    @staticmethod
    def __new__(cls: Any, numbers: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        plain = [each.numbers.to(each.scale.dtype) * each.scale if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Named(Tensor):
    """Computes as any tensor does."""


class Int8Linear(nn.Module):
    weight: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def _inputs() -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64)


@pytest.mark.parametrize("mode", [*slow("pipeline"), "tensor", *slow("fsdp")])
def test_weights_of_eight_bits_in_buffers(mode: str) -> None:
    layers = [Int8Linear(layer) if isinstance(layer, nn.Linear) else layer for layer in _model()]
    model, x = nn.Sequential(*layers).eval(), _inputs()
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), progress=False)
    with torch.no_grad():
        torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=1e-12)


def _with_weight(weight: Tensor) -> nn.Module:
    model = _model().eval()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(weight[: layer.out_features, : layer.in_features] if type(weight) is Doubled else weight, False)
    return model


def test_weights_of_a_class_with_rules_are_refused_by_name() -> None:
    quantized = Quantized(torch.ones(16, 8, dtype=torch.int8), torch.ones(16, 1, dtype=torch.float64))
    for weight in (torch.ones(16, 16, dtype=torch.float64).as_subclass(Doubled), quantized):
        with pytest.raises(TraceError, match=rf"0.weight is a {type(weight).__name__}, a class of tensors") as caught:
            trace(_with_weight(weight), (_inputs(),))
        assert "buffers of torch.int8" in str(caught.value)


def test_weights_of_a_class_without_rules_are_plain() -> None:
    model, x = _model(), _inputs()
    named = copy.deepcopy(model)
    named[0].weight = nn.Parameter(model.get_parameter("0.weight").detach().as_subclass(Named))
    torch.testing.assert_close(partition(named, 2, "tensor", example_inputs=(x,), progress=False)(x), model(x), rtol=1e-12, atol=1e-12)


def test_inputs_of_a_class_with_rules_are_refused_by_name() -> None:
    model, x = _model(), _inputs()
    with pytest.raises(ConfigError, match="the input input is a Doubled") as caught:
        trace(model, (x.as_subclass(Doubled),))
    assert "as_subclass(torch.Tensor)" in str(caught.value)
    pm = partition(model, 2, "tensor", example_inputs=(x,), progress=False)
    with pytest.raises(ConfigError, match="is a Doubled"):
        pm(x.as_subclass(Doubled))


class _Applied(nn.Module):
    def __init__(self, apply: Any) -> None:
        super().__init__()
        self.layer, self.apply_to = nn.Linear(8, 8), apply

    def forward(self, x: Tensor) -> Any:
        return self.apply_to(self.layer(x))


CONSTANT = torch.ones(8, 8).as_subclass(Doubled)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda y: F.linear(y, CONSTANT), "rules of its own"),
        (lambda y: F.scaled_dot_product_attention(y[None], y[None], y[None], attn_mask=causal_lower_right(4, 4)), "rules of its own"),
        (lambda y: torch.nested.as_nested_tensor([y[0], y[1]]).to_padded_tensor(0.0), "nested tensor"),
    ],
    ids=["constant", "bias", "nested"],
)
def test_what_a_model_makes_is_refused_by_name(function: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        trace(_Applied(function), (torch.ones(4, 8),))
    assert "test_tensor_classes.py" in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_quantized_modules_and_tensors_are_refused_by_name() -> None:
    quantized = torch.ao.quantization.quantize_dynamic(_model().float().eval(), {nn.Linear})
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8))
    for each, reason in ((quantized, "no tensor, as quantized modules do"), (model, "table is a quantized tensor")):
        with pytest.raises(PartitionError, match=reason) as caught:
            trace(each, (torch.ones(4, 8),))
        assert "buffers of torch.int8" in str(caught.value)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def _parametrized() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)).double()
    parametrizations.weight_norm(model[0])
    parametrizations.spectral_norm(model[2])
    parametrizations.orthogonal(model[3], orthogonal_map="cayley")
    parametrize.register_parametrization(model[4], "weight", _Symmetric())
    prune.l1_unstructured(model[0], "bias", 0.5)
    return model


@pytest.mark.parametrize("mode", ["pipeline", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("tensor", "fsdp", "data"))])
def test_parametrized_weights_train(mode: str) -> None:
    """Norms, orthogonal and pruned weights; the spectral norm's buffers are updated."""
    model, x = _parametrized(), _inputs()
    pm = partition(_parametrized(), 2, mode, example_inputs=(x,), progress=False)
    found, wanted = pm(x), model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-9)
    state = pm.full_state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
