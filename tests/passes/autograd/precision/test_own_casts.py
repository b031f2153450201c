"""Gradients of readers that share a cast, added in the type in which autocast adds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import PartitionedModel, partition
from passes.ir.program import StageCall

aten = torch.ops.aten
WIDTH = 16


class Projections(nn.Module):
    """Three layers read one value, each through a cast of its own under autocast; two more read one cast that the model writes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.up, self.gate = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float() * self.scale
        hidden = x + torch.sigmoid(self.query(hidden)) * self.value(hidden) + self.key(hidden)
        narrow = (hidden * self.last).to(torch.get_autocast_dtype("cpu"))
        result: Tensor = self.up(narrow) * self.gate(narrow)
        return result


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Projections(), Projections())


def gradients(pm: PartitionedModel | nn.Module, x: Tensor) -> dict[str, Any]:
    pm(x).float().square().mean().backward()
    if isinstance(pm, PartitionedModel):
        return pm.full_gradients()
    return {name: parameter.grad for name, parameter in pm.named_parameters()}


def casts_of_forwards(pm: PartitionedModel) -> list[int]:
    """Return, for each stage, the casts to bfloat16 in its forward."""
    stages = [module for module in pm.graph(0).modules() if isinstance(module, StageCall)]
    graphs: list[fx.Graph] = [stage.graph.graph for stage in stages if "Forward" in type(stage.graph).__name__]
    is_cast = {"dtype": torch.bfloat16}
    return [sum(node.target is aten._to_copy.default and is_cast.items() <= node.kwargs.items() for node in each.nodes) for each in graphs]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("pipeline", {"n_microbatches": 1}),
        pytest.param("pipeline", {"n_microbatches": 1, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("pipeline", {"n_microbatches": 1, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param("model", {}, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_autocast(mode: str, options: dict[str, Any]) -> None:
    """To the last bit: casts of several readers are added in float32, and readers of one cast in bfloat16."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    reference = model()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(reference, x)
    pm = partition(model(), 2, mode, example_inputs=(x,), precision="bf16-mixed", progress=False, **options)
    found = gradients(pm, x)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_a_forward_computes_and_saves_one_cast() -> None:
    x = torch.randn(4, WIDTH)
    pm = partition(model(), 1, "model", example_inputs=(x,), precision="bf16-mixed", progress=False)
    pm.train_step(x, target=x, loss_fn=lambda output, target: nn.functional.mse_loss(output.float(), target))
    inputs, weights = 1 + 2 * 2, 2 + 2 * 5  # of activations: the input, and of each block two; of parameters each
    assert casts_of_forwards(pm) == [inputs + weights]
