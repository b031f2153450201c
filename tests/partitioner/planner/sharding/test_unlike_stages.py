"""Stages of one pipeline cut different axes over the same mesh dimension, where that is fastest: each uses its ranks in its own way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster, Device, Level, Link
from partitioner import partition

WIDTH = 512

SLOW_BETWEEN_NODES = Cluster(
    [Device("d", {"float64": 1e9}, 2**40, 1e12, launch_overhead=1e-7)] * 4, [Level(2, Link(1e-7, 3e8)), Level(4, Link(1e-7, 3e6))]
)
"""Two nodes of two devices: a pipeline over the nodes, and two ranks for each stage."""


class SmallAlexNet(nn.Module):
    """Convolutions with few weights and large activations, then linear layers with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)),
        )
        self.classifier = nn.Sequential(nn.Linear(8 * 16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, 32, 32) to (batch, 10)."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


@pytest.mark.slow
def test_convolutions_cut_the_batch_and_linear_layers_channels_each_in_its_stage() -> None:
    torch.manual_seed(0)
    model, images, target = SmallAlexNet().double(), torch.randn(16, 3, 32, 32, dtype=torch.float64), torch.randint(10, (16,))
    fixed: dict[str, Any] = {"cluster": SLOW_BETWEEN_NODES, "n_microbatches": 8}  # which three ranks could not share evenly
    pm = partition(copy.deepcopy(model), 4, example_inputs=(images,), progress=False, **fixed)
    assert pm.plan.mesh == (("pipeline", 2), ("data", 2))
    assert pm.plan.gap == 0.0
    assert [stage.modules for stage in pm.plan.stages] == [("features",), ("classifier",)]
    assert dict(pm.plan.axes) == {"batch": "data", "ffn": "data"}
    whole, half = sum(map(Tensor.numel, model.features.parameters())), WIDTH // 2
    biases = half + WIDTH + 10
    assert [stage.parameter_count for stage in pm.plan.stages] == [whole, half * (8 * 16 + WIDTH + 10) + biases]
    expected = nn.functional.cross_entropy(model(images), target)
    expected.backward()
    torch.testing.assert_close(pm.train_step(images, target=target, loss_fn=nn.functional.cross_entropy), expected)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
