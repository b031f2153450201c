"""The time of a training step of a small model beyond its kernels and messages, beside eager PyTorch, all ranks in this process.

    python -m benchmarks.step_overhead                         # 60 parameters: 30 linear layers of width 64
    python -m benchmarks.step_overhead --layers 100 --steps 500

"programs" is the time in the runtime, from the start of the programs to their end: their kernels, their messages, and the sums of gradients
into ``.grad``. "copies" brings the shards that ranks read up to date, where they are no views of a parameter: data that moves before the
programs start. "ours" is the rest of ``pm.train_step``: matching the call, finding its programs, cutting the batch, reading the result.
Each figure is the median of all steps, in microseconds of the processor; gradients are cleared between steps, outside of the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from partitioner.runtime.embedded import EmbeddedRuntime
from partitioner.runtime.executor import ProgramSet
from partitioner.specialize.make_trace import first_trace

MODES: Mapping[str, tuple[int, str]] = {
    "pipeline": (2, "pipeline"),
    "data": (2, "data"),
    "fsdp": (2, "fsdp"),
    "tensor": (2, "tensor"),
}
"""Name -> devices and mode."""

_WARM_UP = 5
"""Steps before the first that counts: they trace, prove the loss, and lower."""


@dataclass(frozen=True)
class Overhead:
    """Microseconds of a step.

    Attributes:
        eager: of the model itself.
        programs: in the runtime.
        copies: of parameters, before.
        ours: of ``train_step`` besides.
    """

    eager: float
    programs: float
    copies: float
    ours: float


class _TimedRuntime(EmbeddedRuntime):
    """Notes how long programs run."""

    seconds = 0.0

    def run(
        self,
        programs: ProgramSet,
        inputs: Mapping[int, Mapping[str, Any]],
        given: Mapping[str, Tensor] | None = None,
        optimizer_steps: Sequence[int] = (),
    ) -> dict[int, Any]:
        before = time.thread_time()
        results = super().run(programs, inputs, given, optimizer_steps)
        self.seconds = time.thread_time() - before
        return results


def overhead(devices: int, mode: str, *, layers: int = 30, steps: int = 200) -> Overhead:
    """Return the times of a step of a model of linear layers in a mode."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    made = partition(model, devices=devices, mode=mode, example_inputs=(x,), n_microbatches=2 if mode == "pipeline" else None).traced
    runtime = _TimedRuntime(made.runtime.devices)
    pm = PartitionedModel(first_trace(made.original, made.graph, made.plan, runtime, made.assumed, made.tracing, {}))

    def eager() -> None:
        nn.functional.mse_loss(model(x), target).backward()

    def step() -> None:
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)

    refresh = pm.traced.state.refresh
    of_steps = [(_seconds(step, pm), runtime.seconds, _seconds(refresh, pm)) for _ in range(_WARM_UP + steps)][_WARM_UP:]
    of_eager = [_seconds(eager, model) for _ in range(_WARM_UP + steps)][_WARM_UP:]
    parts = zip(*((programs, copies, whole - programs - copies) for whole, programs, copies in of_steps), strict=True)
    return Overhead(*(1e6 * statistics.median(each) for each in (of_eager, *parts)))


def _seconds(call: Callable[[], object], model: nn.Module) -> float:
    before = time.thread_time()
    call()
    seconds = time.thread_time() - before
    model.zero_grad()
    return seconds


def _main() -> None:
    parser = argparse.ArgumentParser(description="the time of a step beyond its kernels and messages")
    parser.add_argument("--layers", type=int, default=30, help="linear layers; each has two parameters")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{2 * arguments.layers} parameters, microseconds of a step\n{'':10} {'eager':>8} {'programs':>9} {'copies':>7} {'ours':>7}")
    for name, (devices, mode) in MODES.items():
        found = overhead(devices, mode, layers=arguments.layers, steps=arguments.steps)
        print(f"{name:10} {found.eager:8.0f} {found.programs:9.0f} {found.copies:7.0f} {found.ours:7.0f}")


if __name__ == "__main__":
    _main()
