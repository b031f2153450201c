"""Models on the meta device beside the same on one device; some of it runs on every rank of worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

from partitioner import partition
from tests.support.models.case import BATCH_SIZE, Instance
from tests.support.models.zoo import case_named
from tests.support.running.transparency import loss_of, make_partitioned

Mode = str | Mapping[str, int]
SEED = 5


def on_meta(model: Callable[[], nn.Module]) -> nn.Module:
    """Return a model of shapes alone, in float64."""
    with torch.device("meta"):
        return model().to(torch.float64)


def reset(module: nn.Module) -> None:
    """Reset a module as its constructor does."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is not None:
        method()


def initialized_difference(name: str, mode: Mode, devices: int) -> str | None:
    """Return the first tensor that differs from that of one device by a bit, and the first step's loss by more than rounding."""
    case = case_named(name)
    instance = case.build()
    model = on_meta(case.model)
    pm = make_partitioned(Instance(model, instance.args, instance.kwargs, None), devices=devices, mode=mode, n_microbatches=1)
    pm.initialize(seed=SEED)
    reference = instance.model
    torch.manual_seed(SEED)
    reference.apply(reset)
    found = pm.full_state_dict()
    differing = [key for key, tensor in reference.state_dict().items() if not torch.equal(tensor, found[key])]
    loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
    expected = loss_of(case, reference(*instance.args, **instance.kwargs), instance.target)
    if differing:
        return f"{differing[0]} differs"
    return None if abs(loss - expected) <= case.tolerance * abs(expected) else f"loss {loss}, expected {expected}"


def initialize_from_unlike_seeds() -> None:
    """Initialise each rank with its own seed."""
    case = case_named("perceptron")
    pm = partition(on_meta(case.model), 2, "data", example_inputs=case.build(batch_size=BATCH_SIZE).args, progress=False)
    pm.initialize(seed=int(os.environ["RANK"]))
