"""Small models of a few layers, for pipelines whose stages have different numbers of ranks, and what holds for all of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import PartitionedModel, partition

__all__ = [
    "ALIKE",
    "FEATURES",
    "FLOPS",
    "ROWS",
    "assert_accumulated_and_clipped",
    "assert_alike",
    "assert_training_goes_on",
    "inputs",
    "perceptron",
    "planned_and_simulated",
    "wide",
]

LAYERS, FEATURES, ROWS = 3, 256, 64
FLOPS = 1e9
ALIKE = Cluster([Device("d", {"float64": FLOPS}, 2**40, 1e15, launch_overhead=0.0, compute_efficiency=1.0)] * 3, Link(0.0, 1e15))
"""Nothing but products of matrices takes time."""


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(LAYERS))).double()


def planned_and_simulated(mode: Mapping[str, Any], n_microbatches: int) -> tuple[float, float, float]:
    """Return seconds of a step of ``wide`` under 1F1B, two layers in the first of two stages; and of a layer's forward of a microbatch."""
    x = torch.randn(ROWS, FEATURES, dtype=torch.float64)
    arguments: dict[str, Any] = {"n_microbatches": n_microbatches, "schedule": "1F1B", "optimizer": "none", "progress": False}
    pm = partition(wide(), 3, mode, example_inputs=(x,), cluster=ALIKE, **arguments)
    assert [stage.modules for stage in pm.plan.stages] == [("0", "1"), ("2",)]
    return pm.plan.step_time, pm.simulate().step_time, 2 * ROWS / n_microbatches * FEATURES * FEATURES / FLOPS


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))).double()


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch, and a target."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, dtype=torch.float64, generator=generator), torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def assert_alike(model: nn.Module, pm: PartitionedModel, rows: int) -> None:
    """Compare the loss of a step, gradients of the input and of parameters, and a call."""
    x, target = inputs(rows)
    x.requires_grad_()
    expected = nn.functional.mse_loss(model(x), target)
    expected.backward()
    (of_input,), x.grad = (x.grad,), None
    torch.testing.assert_close(pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss), expected)
    torch.testing.assert_close(x.grad, of_input)
    assert_gradients_alike(model, pm)
    with torch.no_grad():
        torch.testing.assert_close(pm(x), model(x))


def assert_gradients_alike(model: nn.Module, pm: PartitionedModel) -> None:
    found = pm.full_gradients()
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def assert_accumulated_and_clipped(model: nn.Module, pm: PartitionedModel) -> None:
    """Check two batches, the first without communication."""
    with pm.no_sync():
        x, target = inputs(8)
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        nn.functional.mse_loss(model(x), target).backward()
    x, target = inputs(6)
    pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    nn.functional.mse_loss(model(x), target).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.125)
    torch.testing.assert_close(pm.clip_grad_norm_(0.125), norm)
    assert_gradients_alike(model, pm)


def assert_training_goes_on(model: nn.Module, plans: Iterable[PartitionedModel]) -> None:
    """Check a step of AdamW under each plan, which gets weights and optimizer state from the one before it."""
    reference = torch.optim.AdamW(model.parameters(), 1e-2)
    state: tuple[dict[str, Any], Any] | None = None
    for pm in plans:
        optimizer = torch.optim.AdamW(pm.parameters(), 1e-2)
        if state is not None:
            pm.load_state_dict(state[0])
            pm.load_optimizer_state_dict(optimizer, state[1])
        x, target = inputs(12)
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        nn.functional.mse_loss(model(x), target).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        state = pm.full_state_dict(), pm.full_optimizer_state_dict(optimizer)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[0][name], value, rtol=1e-9, atol=1e-11)
