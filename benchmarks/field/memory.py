"""Measured memory and time of recomputation: beside eager PyTorch, beside FSDP2, and under limits of memory.

python -m benchmarks.field --parts memory           # on this process alone, and on 2 and 4 processes with gloo
python -m benchmarks.field.memory --ranks 1

blocks      a training step (forward, mean squared error, backward) without recomputation and with it around every block. One process: eager
            PyTorch with ``torch.utils.checkpoint``, ours with ``recompute="full"``. Several: FSDP2 (``fully_shard`` on every block and
            the whole) with checkpoints, ours with ``mode="fsdp"``
limits      a limit of memory between that of ``"none"`` and that of ``"full"``: what the planner chooses, measured, beside the fastest
            of the policies for all blocks that fits

peak        the most bytes of all storages that a step allocates, its gradients among them; parameters are there before and not counted
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks.live_storages import LiveStorages
from benchmarks.transformer import VOCABULARY, Block, gpt
from partitioner import PartitionWarning, partition

MIB = 2**20
ROUNDS = 5
RANKS = (1, 2, 4)
FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Limits, between the memory of ``"full"`` (0) and of ``"none"`` (1)."""


class Gated(nn.Module):
    """A block of Llama: RMSNorm, grouped queries, a gated perceptron."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.size = size = width // heads
        self.norm, self.norm_of_ffn = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.keys, self.values = (nn.Linear(width, key_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.size)).transpose(1, 2)
        return heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        queries, keys, values = (self._heads(each(y)) for each in (self.queries, self.keys, self.values))
        attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm_of_ffn(x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


class Residual(nn.Module):
    """A block of ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(nn.functional.relu(self.norms[0](self.first(x)))))
        return nn.functional.relu(x + y)


class UNet(nn.Module):
    """Four levels; each joins the result of the level below to its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(4)]
        self.down = nn.ModuleList(_double(before, after) for before, after in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(_double(low + high, high) for high, low in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for block, skip in reversed(list(zip(self.up, kept, strict=False))):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return x


def _double(before: int, after: int) -> nn.Module:
    layers = [layer for width in (before, after) for layer in (nn.Conv2d(width, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU())]
    return nn.Sequential(*layers)


@dataclass(frozen=True)
class Case:
    """A model with its blocks and one batch."""

    build: Callable[[], nn.Module]
    example: Callable[[], Tensor]

    def blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules that people put a checkpoint around."""
        if isinstance(model, UNet):
            yield from (*model.down, *model.up)
        else:
            yield from (module for module in model.children() if isinstance(module, Block | Gated | Residual))


def _images(rows: int, size: int, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(rows, channels, size, size)


MODELS: Mapping[str, Case] = {
    "GPT": Case(lambda: gpt(8, 256), lambda: torch.randint(0, VOCABULARY, (16, 128))),
    "Llama": Case(
        lambda: nn.Sequential(nn.Embedding(1024, 256), *(Gated(256, 8, 2) for _ in range(8))), lambda: torch.randint(0, 1024, (16, 128))
    ),
    "ResNet": Case(lambda: nn.Sequential(*(Residual(32) for _ in range(8))), _images(8, 48, 32)),
    "U-Net": Case(lambda: UNet(16), _images(4, 96)),
}


def _target(case: Case, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.zeros_like(case.build()(x))


def _checkpointed(case: Case, model: nn.Module) -> nn.Module:
    for block in case.blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _sharded(case: Case, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in case.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _eager_step(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    own, own_target = (each.chunk(_ranks())[_rank()] for each in (x, target))

    def step() -> None:
        model.zero_grad()
        nn.functional.mse_loss(model(own), own_target).backward()

    return step


def _our_step(
    model: nn.Module, x: Tensor, target: Tensor, recompute: str | None, limit: int | None = None
) -> tuple[Callable[[], None], str, int, float]:
    mode = "model" if _ranks() == 1 else "fsdp"
    options = {"training": True, "optimizer": "sgd", "progress": False}
    pm = partition(model, _ranks(), mode, example_inputs=(x,), recompute=recompute, memory_limit=limit, **options)  # type: ignore[arg-type]
    regions = f"{sum(each.recompute != 'none' for each in pm.plan.regions)} of {len(pm.plan.regions)}" if pm.plan.regions else ""
    words = regions if pm.plan.recompute == "by region" else pm.plan.recompute

    def step() -> None:
        pm.zero_grad()
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)

    return step, words, max(pm.plan.memory), pm.plan.step_time


def _ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _peak(step: Callable[[], None]) -> float:
    """Return the peak of a step in MiB: of this process, of the fullest of several."""
    step()
    with LiveStorages() as counter:
        step()
    peak = torch.tensor([float(max(counter.peaks.values()))])
    if _ranks() > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return float(peak) / MIB


def _seconds(steps: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median seconds of each step; rounds run every step once."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in found.items()}


def _named(words: Sequence[str]) -> list[tuple[str, Case]]:
    return [(name, case) for name, case in MODELS.items() if not words or any(word in name for word in words)]


def _say(text: str) -> None:
    if _rank() == 0:
        print(text, flush=True)


def blocks(models: Sequence[str]) -> None:
    """Print the table of recomputation by block."""
    other = "eager" if _ranks() == 1 else "FSDP2"
    _say(f"\n{_ranks()} process{'es' if _ranks() > 1 else ''}, peak MiB and milliseconds of a step")
    _say(f"{'model':8} {other:>15} {'ours':>15}  {'ratio':>5}   {other + ' by block':>18} {'ours full':>15}  {'ratio':>5}")
    for name, case in _named(models):
        x = case.example()
        target = _target(case, x)

        def theirs(case: Case = case, *, recompute: bool, batch: tuple[Tensor, Tensor] = (x, target)) -> Callable[[], None]:
            model = _checkpointed(case, case.build()) if recompute else case.build()
            return _eager_step(_sharded(case, model) if _ranks() > 1 else model, *batch)

        steps = {"theirs": theirs(recompute=False), "ours": _our_step(case.build(), x, target, "none")[0]}
        steps |= {"theirs by block": theirs(recompute=True), "ours full": _our_step(case.build(), x, target, "full")[0]}
        peaks, seconds = {key: _peak(step) for key, step in steps.items()}, _seconds(steps)
        cells = {key: f"{peaks[key]:7.1f} {seconds[key] * 1e3:5.0f} ms" for key in steps}
        plain, full = peaks["ours"] / peaks["theirs"], peaks["ours full"] / peaks["theirs by block"]
        without = f"{cells['theirs']:>15} {cells['ours']:>15}  {plain:5.2f}"
        _say(f"{name:8} {without}   {cells['theirs by block']:>18} {cells['ours full']:>15}  {full:5.2f}")


def limits(models: Sequence[str]) -> None:
    """Print the planner's choice under limits of memory."""
    _say("\nlimits of memory: the plan, its measured peak with parameters, its step beside the fastest policy for all blocks that fits")
    _say(f"{'model':8} {'limit':>9} {'recomputed':>12} {'planned':>9} {'measured':>9}  {'step / best of one policy':>26}")
    for name, case in _named(models):
        x, held = case.example(), sum(parameter.nbytes for parameter in case.build().parameters()) / MIB
        target = _target(case, x)
        uniform = {policy: _our_step(case.build(), x, target, policy) for policy in ("none", "selective", "full")}
        most, least = uniform["none"][2], min(uniform["none"][2], uniform["full"][2])
        for fraction in FRACTIONS:
            limit = int(least + fraction * (most - least))
            step, words, planned, seconds = _our_step(case.build(), x, target, None, limit)
            best = min(each[3] for each in uniform.values() if each[2] <= limit)
            peak = _peak(step) + held + x.nbytes / MIB
            _say(f"{name:8} {limit / MIB:9.1f} {words:>12} {planned / MIB:9.1f} {peak:9.1f}  {seconds / best:26.3f}")


def main(models: Sequence[str] = (), n_ranks: Sequence[int] = RANKS) -> None:
    """Print the tables on each number of processes, for models whose names contain one of the given words (none: all)."""
    for ranks in n_ranks:
        if ranks == 1:
            _prepare()
            blocks(models)
            limits(models)
        else:
            launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
            command = [sys.executable, *launcher, "-m", "benchmarks.field.memory", "--worker", "--models", *models]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _prepare() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PartitionWarning)


def _run_worker(models: Sequence[str]) -> None:
    _prepare()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    dist.init_process_group("gloo")
    blocks(models)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _run_worker(options.models)
    else:
        main(options.models, options.ranks)
