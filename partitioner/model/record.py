"""``pm.record()``: the timeline of a real run, to lay beside a simulated one.

with pm.record() as run:
    pm.train_step(x, target=y, loss_fn=loss_fn)
pm.simulate().timeline.save("both.json", run.timeline)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping

import torch

from cost_models.simulator.events import Slice
from cost_models.simulator.result import Timeline
from partitioner.runtime.base import Runtime
from partitioner.runtime.recorder import Recorder, recording
from passes.ir.errors import ConfigError

__all__ = ["Recording", "record"]


class Recording:
    """What ran inside ``pm.record()``. On all ranks: under torchrun all processes leave the block together."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Slices of all ranks, from the first one's start on; raises ConfigError inside the block."""
        if self._timeline is None:
            raise ConfigError("the recording is not over", remedy="read it behind the with block")
        return self._timeline

    def finish(self, recorders: Mapping[int, Recorder], runtime: Runtime) -> None:
        """Put together what all ranks recorded."""
        owned = {f"{rank}": _packed(recorder) for rank, recorder in recorders.items()}
        found = {int(rank): _unpacked(tensor) for rank, tensor in runtime.collect(owned).items() if tensor is not None}
        start = min((each.start for slices in found.values() for kind in slices for each in kind), default=0.0)
        computed, communicated = (
            tuple(
                dataclasses.replace(each, start=each.start - start, end=each.end - start)
                for rank in sorted(found)
                for each in found[rank][kind]
            )
            for kind in (0, 1)
        )
        self._timeline = Timeline("measured", tuple(sorted(found)), computed, communicated)


@contextlib.contextmanager
def record(runtime: Runtime) -> Iterator[Recording]:
    """Take down when every rank computes and communicates; slices are named as those of ``simulate().timeline``."""
    found = Recording()
    with recording() as recorders:
        yield found
    found.finish(recorders, runtime)


def _packed(recorder: Recorder) -> torch.Tensor:
    """As bytes, which runtimes carry between processes."""
    slices = [[dataclasses.astuple(each) for each in kind] for kind in (recorder.computed, recorder.communicated)]
    return torch.frombuffer(bytearray(json.dumps(slices).encode()), dtype=torch.uint8)


def _unpacked(tensor: torch.Tensor) -> tuple[list[Slice], list[Slice]]:
    computed, communicated = ([Slice(*fields) for fields in kind] for kind in json.loads(bytes(tensor.cpu().tolist()).decode()))
    return computed, communicated
