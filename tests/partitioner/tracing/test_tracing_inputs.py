"""Inputs of models that come without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from tests.support.models.zoo import case_named


def shapes(model: nn.Module) -> Any:
    args, kwargs = find_example_inputs(model)
    return [tuple(value.shape) for value in args], {name: tuple(value.shape) for name, value in kwargs.items()}


@pytest.mark.parametrize("example", [torch.ones(4, 3), (torch.ones(4, 3),), {"input": torch.ones(4, 3)}])
def test_of_lightning(example: Any) -> None:
    model = nn.Linear(3, 2)
    model.example_input_array = example
    graph = trace(model)
    assert [leaf.shape for leaf in graph.inputs] == [(graph.batch, 3)]
    assert graph.batch_size == 4


@pytest.mark.parametrize(
    ("name", "expected"), [("bert", "input_ids"), ("t5", "input_ids"), ("vit", "pixel_values"), ("resnet", "pixel_values")]
)
def test_of_transformers(name: str, expected: str) -> None:
    model = case_named(name).build().model
    args, kwargs = find_example_inputs(model)
    assert args == ()
    assert expected in kwargs
    assert isinstance(model, transformers.PreTrainedModel)
    model(**kwargs)


@pytest.mark.parametrize("dummy", [torch.ones(5, 3), (torch.ones(5, 3),), {"input": torch.ones(5, 3)}], ids=["tensor", "tuple", "mapping"])
def test_dummy_inputs_of_any_model(dummy: Any) -> None:
    model = nn.Linear(3, 2)
    model.dummy_inputs = dummy
    assert trace(model).batch_size == 5
    model.example_input_array = torch.ones(4, 3)
    assert trace(model).batch_size == 4, "example_input_array comes first"


def test_dummy_inputs_that_forward_does_not_take() -> None:
    model = nn.Linear(3, 2)
    vars(model)["dummy_inputs"] = {"input_ids": torch.ones(5, 3)}
    assert shapes(model) == ([(2, 3)], {})


def test_of_timm() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    vars(model)["pretrained_cfg"] = {"input_size": (3, 8, 8)}
    assert shapes(model) == ([(2, 3, 8, 8)], {})


class Positions(nn.Module):
    """Takes no more tokens than it has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 6)
        self.positions = nn.Embedding(8, 6)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        result: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return result


class LargeImages(nn.Module):
    """Small images vanish in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 65, stride=8), nn.Conv2d(4, 4, 3))

    def forward(self, image: Tensor) -> Any:
        return self.layers(image)


@pytest.mark.parametrize(
    ("model", "shape", "dtype"),
    [
        (nn.Sequential(nn.Dropout(), nn.Linear(7, 2)), (2, 7), torch.float32),
        (nn.Sequential(nn.Linear(7, 2)).double(), (2, 7), torch.float64),
        (Positions(), (2, 8), torch.int64),
        (nn.Conv1d(5, 2, 3), (2, 5, 64), torch.float32),
        (nn.Sequential(nn.Conv3d(2, 2, 3), nn.ReLU()), (2, 2, 64, 64, 64), torch.float32),
        (LargeImages(), (2, 3, 224, 224), torch.float32),
    ],
    ids=["linear", "double", "embedding", "conv1d", "conv3d", "large_images"],
)
def test_of_the_first_layer(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (value,), kwargs = find_example_inputs(model)
    assert (tuple(value.shape), value.dtype, kwargs) == (shape, dtype, {})
    model(value)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        return self.layer(x) * scale


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (TwoInputs(), "example_inputs=(x, scale,)"),
        (nn.LSTM(3, 3), "example_inputs=(input,)"),
        (nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), "example_inputs=(input,)"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4)), "example_inputs=(input,)"),
        (nn.ReLU(), "example_inputs=(input,)"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(5, 2)), "example_inputs=(input,)"),
    ],
    ids=["two_inputs", "recurrent", "norm_first", "does_not_run", "no_parameters", "no_size_fits"],
)
def test_what_cannot_be_told_is_an_error_that_says_what_to_pass(model: nn.Module, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(model)
    assert line in str(caught.value)
