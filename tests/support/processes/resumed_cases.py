"""A training that goes on under another plan, on every rank of worker processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from partitioner import partition


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def resumed_difference(first: str | Mapping[str, int], second: str | Mapping[str, int]) -> float:
    """Return the distance of weights from one device's, after two steps under each of two plans with one optimizer state."""
    x, target = torch.empty(4, 8, 6), torch.empty(4, 8, 4)
    x, target = torch.linspace(-1, 1, x.numel()).double().view_as(x), torch.linspace(1, -1, target.numel()).double().view_as(target)
    whole = model_of()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for rows, wanted in zip(x, target, strict=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(whole(rows), wanted).backward()
        optimizer.step()
    state, weights = None, None
    for mode, steps in ((first, range(2)), (second, range(2, 4))):
        pm = partition(model_of(), 2, mode, example_inputs=(x[0],), progress=False)
        parts = torch.optim.AdamW(pm.parameters(), lr=1e-2)
        if state is not None and weights is not None:
            pm.load_state_dict(weights)
            pm.load_optimizer_state_dict(parts, state)
        for step in steps:
            parts.zero_grad()
            pm.train_step(x[step], target=target[step], loss_fn=nn.functional.mse_loss)
            parts.step()
        state, weights = pm.full_optimizer_state_dict(parts), pm.full_state_dict()
    assert weights is not None
    return max(float((weights[name] - tensor).abs().max()) for name, tensor in whole.state_dict().items())
