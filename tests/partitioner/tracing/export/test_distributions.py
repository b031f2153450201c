"""Models with distributions of torch train as unpartitioned ones do; their checks, which read values, are left out of the trace alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal, kl_divergence

from partitioner import partition
from partitioner.tracing.export.distributions import UNCHECKED_NOTE, check_by_default
from passes.ir.errors import TraceError


@pytest.fixture(autouse=True)
def checks() -> Iterator[None]:
    """Distributions check by default; a first ``torch.compile`` turns that off for the process."""
    kept = check_by_default()
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(kept)


class Autoencoder(nn.Module):
    """A variational autoencoder (Kingma and Welling, arXiv 1312.6114): a sample of shape (rows, 4) is decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = self.encoder(x).chunk(2, -1)
        found = Normal(mean, deviation.exp())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.decoder(found.rsample()), kl_divergence(found, prior).sum(-1)


class Policy(nn.Module):
    """The logarithms of the probabilities of actions, and the entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        actions = Categorical(logits=self.head(torch.tanh(self.body(x))))
        return actions.log_prob(action), actions.entropy()


def loss(results: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    first, second = results
    rows = first if first.dim() == 1 else (first - target).square().mean(1)
    return rows.mean() + 0.1 * second.mean()


@pytest.mark.parametrize("mode", ["pipeline", "data", {"fsdp": 2}], ids=str)
@pytest.mark.parametrize("name", ["autoencoder", "policy"])
def test_training(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    model = (Autoencoder() if name == "autoencoder" else Policy()).double()
    x, target = torch.randn(2, 4, 8, dtype=torch.float64)
    inputs = (x,) if name == "autoencoder" else (x, torch.tensor([0, 2, 1, 1]))
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=inputs, progress=False)
    assert UNCHECKED_NOTE in pm.plan.notes
    assert check_by_default()
    torch.manual_seed(1)
    expected = loss(model(*inputs), target)
    expected.backward()
    torch.manual_seed(1)
    found = pm.train_step(*inputs, target=target, loss_fn=loss)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    for parameter, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(parameter).grad, rtol=1e-9, atol=1e-12)


class Checked(nn.Module):
    """Asks for the checks."""

    def forward(self, x: Tensor) -> Tensor:
        drawn: Tensor = Normal(x, x.exp(), validate_args=True).rsample()
        return drawn


def test_checks_that_are_asked_for_are_refused() -> None:
    with pytest.raises(TraceError, match="a distribution of torch check its arguments") as error:
        partition(Checked(), 2, "data", example_inputs=(torch.ones(4, 2),), progress=False)
    assert "leave validate_args=True out" in str(error.value)
    assert check_by_default()


def test_no_note_where_the_program_does_not_check() -> None:
    Distribution.set_default_validate_args(False)
    pm = partition(Autoencoder(), 2, "data", example_inputs=(torch.ones(4, 8),), progress=False)
    assert not check_by_default()
    assert UNCHECKED_NOTE not in pm.plan.notes
