"""Our data parallelism and FSDP beside ``DistributedDataParallel`` and ``fully_shard``: same model, batch and process group.

    python -m benchmarks.data_parallel            # starts two processes with one thread each, gloo

Two tables, forward and backward, one with a large batch for few parameters, where computing costs most, and one the other way round:

1. the parameters are copied: ours over ``DistributedDataParallel`` with ``static_graph`` and ``gradient_as_bucket_view``;
2. the parameters are cut: ours over ``fully_shard`` on every block and on the whole.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rounds import measure, milliseconds, ratio, run_tables, table
from benchmarks.transformer import VOCABULARY, Block, gpt, loss_of
from partitioner import partition

MODELS = {"computing": (4, 256, 16, 64), "communicating": (4, 384, 2, 16)}
"""Layers, width, rows, length."""


def ours(model: nn.Module, tokens: Tensor, mode: str) -> Callable[[], Tensor]:
    """Return a step in which every rank gets the whole batch, and takes its rows."""
    pm = partition(model, devices=["cpu"] * dist.get_world_size(), mode=mode, example_inputs=(tokens,), recompute="none", progress=False)

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(tokens, target=tokens, loss_fn=loss_of)

    return step


def distributed_data_parallel(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    copied = DistributedDataParallel(copy.deepcopy(model), static_graph=True, gradient_as_bucket_view=True)
    return _step(copied, tokens)


def fully_sharded(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = copy.deepcopy(model)
    for layer in cut.children():
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    fully_shard(cut, mesh=mesh)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of writing into it, which nothing does here
    return _step(cut, tokens)


def _step(model: nn.Module, tokens: Tensor) -> Callable[[], Tensor]:
    """Return a step on this rank's rows."""
    own = tokens.chunk(dist.get_world_size())[dist.get_rank()]

    def step() -> Tensor:
        model.zero_grad()
        loss = loss_of(model(own), own)
        loss.backward()
        return loss.detach()

    return step


def copied_parameters(rounds: int) -> None:
    _show(rounds, "Data parallel over 2", "data", "DDP", distributed_data_parallel)


def cut_parameters(rounds: int) -> None:
    _show(rounds, "FSDP over 2", "fsdp", "fully_shard", fully_sharded)


def _show(rounds: int, title: str, mode: str, name: str, theirs: Callable[[nn.Module, Tensor], Callable[[], Tensor]]) -> None:
    rows = []
    for kind, (layers, width, count, length) in MODELS.items():
        model = gpt(layers, width)
        tokens = torch.randint(0, VOCABULARY, (count, length))
        steps: Mapping[str, Callable[[], Tensor]] = {"ours": ours(model, tokens, mode), name: theirs(model, tokens)}
        expected = loss_of(model(tokens), tokens).detach()
        for contestant, step in steps.items():
            loss = step().clone()
            if contestant != "ours":
                dist.all_reduce(loss)
                loss /= dist.get_world_size()
            torch.testing.assert_close(loss, expected)
        found = measure(steps, rounds, repeats=1)
        size = f"{layers} x {width}"
        rows.append((kind, size, f"{count} x {length}", *(milliseconds(found[each]) for each in steps), ratio(found["ours"], found[name])))
    table(f"{title}, GPT, forward and backward", ("model", "layers", "batch", "ours ms", f"{name} ms", f"ours / {name}"), rows)


if __name__ == "__main__":
    run_tables("benchmarks.data_parallel", __doc__, {"copied": copied_parameters, "cut": cut_parameters}, None)
