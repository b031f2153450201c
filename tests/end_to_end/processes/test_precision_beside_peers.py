"""Errors of gradients in bf16-mixed beside those of DistributedDataParallel and FSDP2, in the same processes with the same batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from partitioner import partition
from tests.support.models.attention.gpt import Gpt
from tests.support.processes.processes import Workers

Errors = tuple[float, float]
"""Of ours and of the peer."""

RANKS, ROWS, LENGTH, VOCABULARY = 4, 16, 6, 23


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(depth=2)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, target = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return tokens, target


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def gradients(model: nn.Module, tokens: Tensor, target: Tensor, *, autocast: bool = False) -> dict[str, Tensor]:
    """Return gradients of a step in float64, whole."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_fn(model(tokens), target)
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name.removeprefix("module.")] = whole.double()
    return found


def error(found: Mapping[str, Tensor | None], exact: Mapping[str, Tensor]) -> float:
    """Return the mean over parameters of the relative norm of the difference."""
    differences = []
    for name, gradient in exact.items():
        value = found[name]
        assert value is not None
        differences.append(float((value.double() - gradient).norm() / gradient.norm()))
    return math.fsum(differences) / len(differences)


def errors(mode: str | Mapping[str, int]) -> Errors:
    """Run on every rank."""
    tokens, target = batch()
    pm = partition(gpt(), RANKS, mode, example_inputs=(tokens,), precision="bf16-mixed", progress=False)
    pm.train_step(tokens, target=target, loss_fn=loss_fn)
    ours = pm.full_gradients()
    own = [each.chunk(RANKS)[dist.get_rank()] for each in (tokens, target)]
    if mode == "data":
        theirs = gradients(DistributedDataParallel(gpt()), own[0], own[1], autocast=True)
    else:
        sizes, names = ((2, 2), ("replicas", "shards")) if isinstance(mode, Mapping) else ((RANKS,), ("shards",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model, mesh = gpt(), init_device_mesh("cpu", sizes, mesh_dim_names=names)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=mode != "zero2")
        theirs = gradients(model, own[0], own[1])
    exact = gradients(gpt().double(), tokens, target)
    return error(ours, exact), error(theirs, exact)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["data", "fsdp", "zero2", {"data": 2, "fsdp": 2}], ids=str)
def test_errors_are_at_most_those_of_the_peer(mode: str | Mapping[str, int], workers: Callable[[int], Workers]) -> None:
    for ours, theirs in workers(RANKS).values(errors, mode, timeout=200):
        assert 0 < ours <= 1.1 * theirs, (ours, theirs)
