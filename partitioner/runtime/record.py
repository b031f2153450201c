"""``pm.record()``: the timeline of a real run, to compare with a simulated one.

with pm.record() as run:
    pm.train_step(x, target=y, loss_fn=loss_fn)
pm.simulate().timeline.save("both.json", run.timeline)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from cost_models.simulator.events import Slice
from cost_models.simulator.timeline import Timeline
from partitioner.runtime.base import Runtime
from partitioner.runtime.recording.recorder import Recorder, recording
from passes.ir.errors import ConfigError


class Recording:
    """The timeline of all ranks inside ``pm.record()``. Under torchrun all processes leave the block together."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Slices of all ranks; time 0 is the start of the first one. Raises ConfigError inside the block."""
        if self._timeline is None:
            raise ConfigError("the recording is not over", remedy="read it after the with block")
        return self._timeline

    def finish(self, recorders: Mapping[int, Recorder], runtime: Runtime) -> None:
        """Gather what all ranks recorded."""
        encoded = {f"{rank}": _encode(recorder) for rank, recorder in recorders.items()}
        of_ranks = {int(rank): _decode(tensor) for rank, tensor in runtime.collect(encoded).items() if tensor is not None}
        ranks = tuple(sorted(of_ranks))
        computed, communicated = ([piece for rank in ranks for piece in of_ranks[rank][kind]] for kind in (0, 1))
        start = min((piece.start for piece in (*computed, *communicated)), default=0.0)
        self._timeline = Timeline("measured", ranks, _shifted(computed, start), _shifted(communicated, start))


@contextlib.contextmanager
def record(runtime: Runtime) -> Iterator[Recording]:
    """Record when every rank computes and communicates; slices have the names of those of ``simulate().timeline``."""
    result = Recording()
    with recording() as recorders:
        yield result
    result.finish(recorders, runtime)


def _encode(recorder: Recorder) -> torch.Tensor:
    """Encode what a rank recorded as a tensor of bytes, which runtimes carry between processes."""
    kinds = [[dataclasses.astuple(piece) for piece in kind] for kind in (recorder.computed, recorder.communicated)]
    return torch.frombuffer(bytearray(json.dumps(kinds).encode()), dtype=torch.uint8)


def _decode(tensor: torch.Tensor) -> list[list[Slice]]:
    """Return the slices of computing, and those of communicating, of a rank."""
    return [[Slice(*each) for each in kind] for kind in json.loads(bytes(tensor.cpu().tolist()).decode())]


def _shifted(slices: Sequence[Slice], start: float) -> tuple[Slice, ...]:
    """Return the slices with times relative to ``start``."""
    return tuple(dataclasses.replace(piece, start=piece.start - start, end=piece.end - start) for piece in slices)
