"""PyTorch's tools around an optimizer work on a partitioned model: clipping, schedulers of the learning rate, loss scaling."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition

MODES: list[tuple[str | Mapping[str, int], int]] = [
    ("data", 2),
    ("fsdp", 2),
    ("tensor", 2),
    ({"data": 2, "tensor": 2}, 4),
    ({"data": 2, "pipeline": 2}, 4),
]


class Tied(nn.Module):
    """Words in and out by one weight; a norm that tensor ranks all hold; a layer whose bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.words.weight
        self.up.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.head(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def pair(mode: str | Mapping[str, int], devices: int) -> tuple[nn.Module, PartitionedModel, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Tied().double()
    tokens, target = torch.randint(10, (2, 4, 5)).unbind(0)
    return copy.deepcopy(model), partition(model, devices, mode, example_inputs=(tokens,), progress=False), tokens, target


def assert_same_parameters(reference: nn.Module, pm: PartitionedModel) -> None:
    state = pm.full_state_dict()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm_type", "mode", "devices"),
    [(norm_type, mode, devices) for norm_type in (2.0, float("inf")) for mode, devices in MODES],
)
def test_clipping_counts_each_parameter_once(norm_type: float, mode: str | Mapping[str, int], devices: int) -> None:
    reference, pm, tokens, target = pair(mode, devices)
    loss(reference(tokens), target).backward()
    pm.train_step(tokens, target=target, loss_fn=loss)
    largest = 0.01
    expected = nn.utils.clip_grad_norm_(reference.parameters(), largest, norm_type)
    assert expected > largest
    torch.testing.assert_close(pm.clip_grad_norm_(largest, norm_type), expected)
    gradients = pm.full_gradients()
    assert gradients["up.bias"] is None
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), MODES)
def test_a_scheduler_of_the_learning_rate(mode: str | Mapping[str, int], devices: int) -> None:
    reference, pm, tokens, target = pair(mode, devices)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (reference, pm)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.5, total_steps=4) for each in optimizers]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(reference(tokens), target).backward()
        pm.train_step(tokens, target=target, loss_fn=loss)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_same_parameters(reference, pm)


@pytest.mark.parametrize(("mode", "devices"), [MODES[1], *(pytest.param(*each, marks=pytest.mark.slow) for each in (MODES[0], MODES[2]))])
def test_scaled_losses(mode: str | Mapping[str, int], devices: int) -> None:
    """Gradients are unscaled before they are clipped."""
    reference, pm, tokens, target = pair(mode, devices)
    for model in (reference, pm):
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss(model(tokens), target)).backward()
            scaler.unscale_(optimizer)
            if isinstance(model, PartitionedModel):
                model.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert_same_parameters(reference, pm)
