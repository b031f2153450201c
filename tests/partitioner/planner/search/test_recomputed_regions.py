"""Under a limit of memory, plans recompute no more blocks than they must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.field.memory import Residual
from partitioner import PartitionedModel, partition
from passes.ir.plan import Plan
from tests.cost_models.simulator.test_simulated_memory import measured
from tests.support.running.slow_values import slow

BLOCKS, WIDTH = 8, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def example() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.randn(2048, WIDTH)


def planned(mode: str, devices: int, **options: Any) -> PartitionedModel:
    model, x = example()
    return partition(model, devices, mode, example_inputs=(x,), training=True, progress=False, optimizer="sgd", **options)


INTERLEAVED = {"n_microbatches": 4, "schedule": "Interleaved1F1B", "stages_per_device": 2}

MODES: list[Any] = [
    ("model", 1, {}),
    *slow(("fsdp", 2, {}), ("pipeline", 2, {"n_microbatches": 4, "schedule": "1F1B"}), ("pipeline", 2, INTERLEAVED)),
]


@pytest.mark.filterwarnings("ignore:train_step\\(\\) fits:partitioner.PartitionWarning")
@pytest.mark.parametrize("setting", MODES, ids=str)
@pytest.mark.parametrize("fraction", [*slow(0.8), 0.5, *slow(0.2, 0.0)])
def test_blocks_that_fit_are_kept(setting: tuple[str, int, dict[str, Any]], fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, devices, options = setting
    uniform = {policy: planned(mode, devices, recompute=policy, **options) for policy in ("none", "selective", "full")}
    most, least = (max(uniform[policy].plan.memory) for policy in ("none", "full"))
    limit = int(least + fraction * (most - least))
    pm = planned(mode, devices, memory_limit=limit, **options)
    assert max(pm.plan.memory) <= limit
    fitting = [each.plan.step_time for each in uniform.values() if max(each.plan.memory) <= limit]
    assert pm.plan.step_time <= min(fitting, default=float("inf")) * (1 + 1e-9)
    simulated = pm.simulate()
    assert max(simulated.peak_memory) <= 1.05 * limit
    _, x = example()

    def step() -> None:
        pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)

    step()
    pm.zero_grad()
    found = measured(step, monkeypatch)
    for rank, memory in enumerate(simulated.memory):
        assert found[rank] + memory.parameters <= 1.05 * limit


@pytest.mark.filterwarnings("ignore:train_step\\(\\) fits:partitioner.PartitionWarning")
@pytest.mark.parametrize("fraction", [0.5, *slow(0.75, 0.25)])
def test_regions_of_residual_blocks_hold_what_is_planned(fraction: float) -> None:
    """A policy for all blocks computes some sums again from those before; where policies differ, what enters a region is saved."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual(16) for _ in range(8))), torch.randn(4, 16, 24, 24)
    options: dict[str, Any] = {"example_inputs": (x,), "training": True, "progress": False, "optimizer": "sgd"}
    most, least = (partition(model, 1, "model", recompute=policy, **options).plan.memory[0] for policy in ("none", "full"))
    pm = partition(model, 1, "model", memory_limit=int(least + fraction * (most - least)), **options)
    assert pm.plan.memory[0] == pytest.approx(pm.simulate().peak_memory[0], rel=0.01)


@pytest.mark.filterwarnings("ignore:train_step\\(\\) fits:partitioner.PartitionWarning")
def test_the_choice_is_said_kept_and_trains_as_the_model() -> None:
    pm = planned("model", 1, memory_limit="14MiB")
    full, selective = (sum(region.recompute == policy for region in pm.plan.regions) for policy in ("full", "selective"))
    assert full
    assert selective
    assert f"{full} full and {selective} selective of {len(pm.plan.regions)} regions" in pm.explain()
    read = Plan.from_json(pm.plan.to_json())
    assert (read.regions, read.recomputed) == (pm.plan.regions, pm.plan.recomputed)
    model, x = example()
    loss = nn.functional.mse_loss(model(x), x)
    loss.backward()
    torch.testing.assert_close(pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss), loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train_step\\(\\) fits:partitioner.PartitionWarning")
def test_ranks_with_several_stages_keep_what_fits() -> None:
    """Gradients are those of the model, and ranks recompute less than all."""
    uniform = {policy: planned("pipeline", 2, recompute=policy, **INTERLEAVED).plan for policy in ("none", "full")}
    limit = int(sum(max(plan.memory) for plan in uniform.values()) / 2)
    pm = planned("pipeline", 2, memory_limit=limit, **INTERLEAVED)
    assert any(region.recompute != "none" for region in pm.plan.regions)
    assert any(region.recompute != "full" for region in pm.plan.regions)
    assert max(pm.plan.memory) <= limit
    assert uniform["none"].step_time < pm.plan.step_time < uniform["full"].step_time
    pm.verify()
    model, x = example()
    nn.functional.mse_loss(model(x), x).backward()
    pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_gradients()[name], parameter.grad)
