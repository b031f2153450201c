"""Functions of worker processes in the tests of faults: each function runs on every rank at once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from partitioner.runtime.torchrun import TorchrunRuntime


def partitioned(mode: str) -> tuple[PartitionedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    pm = partition(model, dist.get_world_size(), mode, example_inputs=(torch.zeros(8, 5),), progress=False)
    return pm, torch.optim.SGD(pm.parameters(), lr=0.1)


def batches(count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        x, target = torch.randn(2, 8, 5, generator=generator)
        yield number, x, target


def train_step(pm: PartitionedModel, x: Tensor, target: Tensor) -> None:
    pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)


def skip_a_step(mode: str) -> None:
    """Leave out the third of ten batches on rank 1."""
    pm, optimizer = partitioned(mode)
    for number, x, target in batches(10):
        if number == 2 and dist.get_rank() == 1:
            continue
        train_step(pm, x, target)
        optimizer.step()
        optimizer.zero_grad()


def skip_a_train_step() -> None:
    """Leave out ``train_step`` once on rank 1, but not its optimizer step; the batch is always the same."""
    pm, optimizer = partitioned("fsdp")
    ((_, x, target),) = batches(1)
    for number in range(10):
        if number != 2 or dist.get_rank() != 1:
            train_step(pm, x, target)
        optimizer.step()


def end_a_step_early(mode: str) -> None:
    """Make one step less on rank 1, with the same batch, before all ranks gather the weights."""
    pm, _ = partitioned(mode)
    ((_, x, target),) = batches(1)
    for _ in range(4 - dist.get_rank()):
        train_step(pm, x, target)
    pm.full_state_dict()


def call_alone(call: str, mode: str) -> None:
    """Call on rank 0 alone a function that needs all ranks, or leave out a backward, while the rest loop."""
    pm, optimizer = partitioned(mode)
    calls: dict[str, Callable[[], object]] = {
        "state_dict": pm.state_dict,
        "optimizer": optimizer.state_dict,
        "norm": lambda: pm.clip_grad_norm_(1.0),
    }
    for number, x, target in batches(4):
        if number == 2 and dist.get_rank() == 0 and call in calls:
            calls[call]()
        loss = nn.functional.mse_loss(pm(x), target)
        if not (call == "no backward" and number == 2 and dist.get_rank() == 0):
            loss.backward()
        optimizer.step()


def without_environment() -> list[int]:
    """Return the ranks of this process, where the script has made the process group and torchrun has not set its variables."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    try:
        pm, optimizer = partitioned("pipeline")
        assert isinstance(pm.traced.runtime, TorchrunRuntime)
        for _, x, target in batches(2):
            train_step(pm, x, target)
            optimizer.step()
        return list(pm.traced.runtime.local_ranks)
    finally:
        os.environ.update(kept)


def unlike_values(mode: str) -> tuple[bool, float, float, list[str]]:
    """Return results of different seeds: whether replicas are equal after a step, distances from rank 0, and warnings."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.BatchNorm1d(5)).double()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pm = partition(model, dist.get_world_size(), mode, example_inputs=(torch.zeros(8, 5).double(),), progress=False)
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.BatchNorm1d(5)).double()
    found = pm.full_state_dict()
    apart = max(float((found[name] - value).abs().max()) for name, value in reference.state_dict().items())
    ((_, x, target),) = batches(1)
    x, target = x.double(), target.double()
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    torch.optim.SGD(pm.parameters(), lr=0.1).step()
    sums = [float(part.sum()) for _, part in pm.named_parts(dist.get_rank())]
    everywhere: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, sums)
    alike = mode != "data" or all(each == sums for each in everywhere)
    expected = nn.functional.mse_loss(reference(x), target)
    return alike, apart, abs(float(loss - expected)), [each.filename for each in said if "different values" in str(each.message)]
