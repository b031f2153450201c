"""Predicted memory beside that of a run: every storage that the operators of a training step make, for as long as it is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.live_storages import LiveStorages
from partitioner import PartitionedModel, partition
from partitioner.runtime import embedded
from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.state import gradient_slots
from passes.spmd.shards import Block
from tests.support.models.attention.gpt import VOCABULARY, Gpt

ROWS, LENGTH, WIDTH = 16, 6, 48


def measured(step: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Measure, for each rank, the peak bytes of a step, as if it had a process to itself.

    What one rank sends another is copied, as between devices, into memory that the receiver makes when it starts to receive; so is a
    gathered value. A rank keeps the operands of a collective until it has waited for the result, however long the other ranks take. Of a
    parameter that ranks share here, each holds the gradient of its block; the one ``.grad`` that adds these up is of no rank.
    """
    counter = LiveStorages()
    advance, add = embedded._advance, gradient_slots._add
    transport = embedded._EmbeddedTransport
    send, receive, start, wait = transport.send, transport.receive, transport.start, transport.wait
    operands: dict[tuple[int, Any], Sequence[Exchange]] = {}
    received: dict[Any, Tensor] = {}
    gathered: dict[tuple[int, Any], Sequence[Tensor]] = {}
    gradients_of_blocks: list[Tensor] = []

    def counted(rank: int, *rest: Any) -> None:
        counter.rank = rank
        advance(rank, *rest)

    def copied(self: Any, tensor: Tensor, destination: int, tag: int) -> None:
        counter.rank = -1
        copy = tensor.clone()
        counter.rank = self.rank
        send(self, copy, destination, tag)

    def made(self: Any, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> Any:
        pending = receive(self, shape, dtype, source, tag)
        received[pending] = torch.empty(tuple(shape), dtype=dtype)
        return pending

    def started(self: Any, name: Any, group: tuple[int, ...], exchanges: Sequence[Exchange], operation: Any) -> Any:
        counter.rank = -1
        sent = [replace(each, tensor=each.tensor.clone(), pieces=[piece.clone() for piece in each.pieces]) for each in exchanges]
        pending = start(self, name, group, sent, operation)
        counter.rank = self.rank
        operands[self.rank, pending] = exchanges
        if name == "all_gather":
            gathered[self.rank, pending] = [each.tensor.new_empty(sum(map(math.prod, each.shapes))) for each in exchanges]
        return pending

    def waited(self: Any, pending: Any) -> Any:
        gathered.pop((self.rank, pending), None)
        result = wait(self, pending)
        operands.pop((self.rank, pending), None)
        return received.pop(pending).copy_(result) if isinstance(result, Tensor) and pending in received else result

    def added(total: Tensor | None, gradient: Tensor, block: Block | None, parameter: Tensor) -> Tensor:
        rank = counter.rank
        if block is not None:
            gradients_of_blocks.append(gradient)
            counter.rank = -1
        try:
            return add(total, gradient, block, parameter)
        finally:
            counter.rank = rank

    monkeypatch.setattr(gradient_slots, "_add", added)
    monkeypatch.setattr(embedded, "_advance", counted)
    for name, function in (("send", copied), ("receive", made), ("start", started), ("wait", waited)):
        monkeypatch.setattr(transport, name, function)
    with counter:
        step()
    return {rank: peak for rank, peak in counter.peaks.items() if rank >= 0}


def measured_step(pm: PartitionedModel, x: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return ``measured`` of a later training step that starts without gradients."""

    def step() -> None:
        pm.train_step(x, target=target, loss_fn=lambda output, target: nn.functional.cross_entropy(output.flatten(0, -2), target.flatten()))

    step()
    for parameter in pm.parameters():
        parameter.grad = None
    return measured(step, monkeypatch)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(WIDTH, 4, 4)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 8 * 8, VOCABULARY))


CASES: dict[str, tuple[Callable[[], nn.Module], int, Any, dict[str, Any]]] = {
    "one device": (gpt, 1, "model", {}),
    "1F1B": (gpt, 2, "pipeline", {"schedule": "1F1B", "n_microbatches": 8}),
    "GPipe, all recomputed": (gpt, 2, "pipeline", {"schedule": "GPipe", "n_microbatches": 8, "recompute": "full"}),
    "zero bubble": (gpt, 2, "pipeline", {"schedule": "ZB1P", "n_microbatches": 8}),
    "zero bubble, all recomputed": (gpt, 2, "pipeline", {"schedule": "ZB1P", "n_microbatches": 4, "recompute": "full"}),
    "zero bubble of one microbatch": (gpt, 2, "pipeline", {"schedule": "ZB1P", "n_microbatches": 1}),
    "interleaved": (gpt, 2, "pipeline", {"schedule": "Interleaved1F1B", "n_microbatches": 8}),
    "data": (gpt, 2, "data", {}),
    "gathered parameters": (gpt, 2, "fsdp", {}),
    "gathered parameters, four ranks": (gpt, 4, "fsdp", {}),
    "cut gradients": (gpt, 2, "zero2", {}),
    "tensor": (gpt, 2, "tensor", {}),
    "mesh": (gpt, 4, {"pipeline": 2, "tensor": 2}, {"schedule": "1F1B", "n_microbatches": 4}),
    "convolutions": (convolutions, 2, "pipeline", {"schedule": "1F1B", "n_microbatches": 4}),
}
FAST = ("convolutions",)


@pytest.mark.filterwarnings("ignore:BatchNorm under microbatches:partitioner.PartitionWarning")
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_peak_is_that_of_a_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 5 %: gradients, activations, communication, and what operators need in between."""
    build, devices, mode, options = CASES[name]
    x = torch.randint(VOCABULARY, (ROWS, LENGTH)) if build is gpt else torch.randn(ROWS, 3, 16, 16)
    target = torch.randint(VOCABULARY, (ROWS, LENGTH) if build is gpt else (ROWS,))
    pm = partition(build(), devices, mode, example_inputs=(x,), optimizer="adamw", progress=False, **options)
    found = measured_step(pm, x, target, monkeypatch)
    for rank, memory in enumerate(pm.simulate().memory):
        given = x.nbytes if "input_1" in pm.programs()[rank].placeholders or "tokens" in pm.programs()[rank].placeholders else 0
        assert memory.peak - memory.parameters - memory.optimizer == pytest.approx(found[rank] + given, rel=0.05)


def test_example_inputs_that_are_views_change_no_memory() -> None:
    """Batches are often slices of a data set, and images turned to channels first."""
    data = torch.randn(64, 16, 16, 3)
    views = [data[:5].permute(0, 3, 1, 2).contiguous(), torch.randn(64, 3, 16, 16)[:5]]
    peaks = []
    for x in views:
        pm = partition(convolutions(), 2, "data", example_inputs=(x,), progress=False)
        peaks.append([memory.peak for memory in pm.simulate().memory])
    assert peaks[0] == peaks[1]
