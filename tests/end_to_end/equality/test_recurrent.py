"""Recurrent layers in float32, where PyTorch has a kernel of its own for an LSTM on a CPU: they train as in the unpartitioned model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models.case import Instance
from tests.support.running.transparency import compare_gradients, compare_values, make_partitioned

ROWS, LENGTH, FEATURES, HIDDEN, CLASSES = 6, 3, 5, 4, 3
LAYERS: tuple[dict[str, Any], ...] = ({}, {"num_layers": 2, "bidirectional": True})
FLOAT32_TOLERANCE = 1e-5


class Classifier(nn.Module):
    """A recurrent layer on the model's own input, which requires no gradient; then a norm and a classifier of the last position."""

    def __init__(self, layer: nn.Module, width: int, *, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = layer
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        sequence, _ = self.layer(x)
        return torch.as_tensor(self.head(self.norm(sequence[:, -1] if self.batch_first else sequence[-1])))


class FromLearnedState(nn.Module):
    """An LSTM with fixed weights that starts from a state that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=True).requires_grad_(requires_grad=False)
        self.state = nn.Parameter(torch.randn(1, 1, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        state = self.state.expand(1, x.shape[0], HIDDEN).contiguous()
        sequence, states = self.lstm(x, (state, state.tanh()))
        return sequence, states


def assert_trains_alike(model: nn.Module, *, devices: int, batch_first: bool = True, **partition_arguments: Any) -> None:
    """Compare one step with the same step of the unpartitioned model, whose loss and gradients come first."""
    x = torch.randn((ROWS, LENGTH, FEATURES) if batch_first else (LENGTH, ROWS, FEATURES))
    target = torch.randint(CLASSES, (ROWS,))
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    enabled = torch.backends.mkldnn.enabled
    pm = make_partitioned(Instance(model, (x,), {}, target), devices=devices, mode="pipeline", n_microbatches=2, **partition_arguments)
    partitioned_loss = pm.train_step(x, target=target, loss_fn=nn.functional.cross_entropy)
    assert compare_values(loss.detach(), partitioned_loss.detach(), FLOAT32_TOLERANCE) is None
    found: Mapping[str, Tensor | None] = pm.full_gradients()
    assert compare_gradients(gradients, found, FLOAT32_TOLERANCE) is None
    assert torch.backends.mkldnn.enabled == enabled, "the setting that chooses the kernel was not put back"


@pytest.mark.parametrize(
    ("kind", "batch_first", "arguments"),
    [
        pytest.param(
            kind,
            batch_first,
            arguments,
            id="-".join([kind.__name__, "batch_first" if batch_first else "time_first", *arguments]),
            marks=pytest.mark.slow if kind is nn.GRU or batch_first or arguments else (),
        )
        for kind, batch_first, arguments in itertools.product((nn.LSTM, nn.GRU), (True, False), LAYERS)
    ],
)
def test_first_layer(kind: type[nn.LSTM | nn.GRU], batch_first: bool, arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = kind(FEATURES, HIDDEN, batch_first=batch_first, **arguments)
    width = HIDDEN * (2 if layer.bidirectional else 1)
    assert_trains_alike(Classifier(layer, width, batch_first=batch_first), devices=2, batch_first=batch_first, schedule="ZB1P")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"bias": False}, {"proj_size": HIDDEN - 1}], ids=["no_bias", "projections"])
def test_other_weights(arguments: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(FEATURES, HIDDEN, batch_first=True, **arguments)
    assert_trains_alike(Classifier(layer, layer.proj_size or HIDDEN), devices=2)


@pytest.mark.slow
def test_state_that_is_trained_under_fixed_weights() -> None:
    torch.manual_seed(0)
    assert_trains_alike(Classifier(FromLearnedState(), HIDDEN), devices=1)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "none", "selective"])
def test_layer_without_gradients(recompute: str) -> None:
    """The kernel for inference stays, and returns several values at once, of which the norm after it reads one."""
    torch.manual_seed(0)
    layer = nn.LSTM(FEATURES, HIDDEN, batch_first=True).requires_grad_(requires_grad=False)
    assert_trains_alike(Classifier(layer, HIDDEN), devices=1, recompute=recompute)
