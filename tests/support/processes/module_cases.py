"""What worker processes do for the tests of a partitioned model as a module: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy

import torch
from torch import nn

from partitioner import partition
from tests.support.models.switched import switched

__all__ = ["mode_differences"]


def mode_differences() -> str:
    """Train and validate with one partitioned model, in processes that hold replicas, shards or stages."""
    found = ""
    for mode in ("data", "fsdp", "pipeline"):
        reference, x = switched()
        pm = partition(copy.deepcopy(reference), 2, mode, example_inputs=(x,), progress=False)
        module: nn.Module
        results = []
        for module in (reference, pm):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(2):
                torch.manual_seed(step)
                optimizer.zero_grad()
                module.train()
                if module is pm:
                    pm.train_step(x, target=x[:, :3], loss_fn=nn.functional.mse_loss)
                else:
                    nn.functional.mse_loss(module(x), x[:, :3]).backward()
                optimizer.step()
            with torch.no_grad():
                results.append(module.eval()(x))
        state = pm.full_state_dict()
        same = torch.allclose(*results) and all(torch.allclose(state[name], each) for name, each in reference.state_dict().items())
        found += "" if same else f"{mode} differs; "
    return found
