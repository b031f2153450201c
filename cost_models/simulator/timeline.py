"""When everything was: slices of computing and communication a device, and its memory; simulated, or recorded from a run.

One form for both, so that a prediction and a measurement can be laid beside each other: slices of a run have the names that the
simulation gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.simulator.events import Slice
from cost_models.simulator.gantt import draw
from cost_models.simulator.memory import MemoryCurve
from passes.ir.checked_arguments import checked_arguments
from passes.ir.text_files import write_text

__all__ = ["Timeline"]

_MICRO = 1e6


@dataclass(frozen=True)
class Timeline:
    """Slices and memory of all devices.

    Attributes:
        title: ``"simulated"``, ``"measured"``.
        ranks: the devices that are shown; of many that do the same, one.
        computed: slices of computing: one for each action, as ``actions`` gathers nodes.
        communicated: slices of communication.
        memory: for each device bytes over time; empty where nobody looked.
    """

    title: str
    ranks: tuple[int, ...]
    computed: tuple[Slice, ...]
    communicated: tuple[Slice, ...]
    memory: tuple[MemoryCurve, ...] = ()

    @property
    def end(self) -> float:
        """When the last slice ends, in seconds."""
        return max((each.end for each in (*self.computed, *self.communicated)), default=0.0)

    def to_json(self, *others: Timeline) -> str:
        """Chrome's trace format, which https://ui.perfetto.dev opens: a process a device, threads for its streams, memory as a counter.

        Args:
            others: timelines to lay beside this one.
        """
        events = [event for number, timeline in enumerate((self, *others)) for event in timeline.events(number)]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    @checked_arguments()
    def save(self, path: str | Path, *others: Timeline) -> None:
        """Write ``to_json`` to a file."""
        write_text(path, self.to_json(*others), "the timeline")

    def svg(self, *others: Timeline) -> str:
        """A picture: device against time, communication below computing, memory as a curve.

        Args:
            others: timelines to draw below this one, on one scale of time.
        """
        return draw((self, *others))

    def _repr_svg_(self) -> str:
        return self.svg()

    def events(self, number: int = 0) -> Iterator[dict[str, Any]]:
        """Chrome trace events; ``number`` tells timelines in one file apart."""
        shift = number * (max(self.ranks, default=0) + 1)
        for rank in self.ranks:
            process = shift + rank
            yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"rank {rank}, {self.title}"}}
            yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": rank * 2 + number}}
            for thread, name in ((0, "compute"), (1, "communication")):
                yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": name}}
        for each in self.computed:
            yield self._slice(shift, 0, each, each.section or each.name)
        for each in self.communicated:
            yield self._slice(shift, 1, each, each.name)
        for rank, curve in zip(self.ranks, self.memory, strict=False):
            for time, size in zip(curve.times, curve.bytes, strict=True):
                yield {"ph": "C", "pid": shift + rank, "ts": time * _MICRO, "name": "memory", "args": {"bytes": size}}

    def _slice(self, shift: int, thread: int, each: Slice, name: str) -> dict[str, Any]:
        arguments = {"node": each.name, **({"bytes": each.bytes} if each.bytes else {})}
        return {
            "ph": "X",
            "pid": shift + each.rank,
            "tid": thread,
            "ts": each.start * _MICRO,
            "dur": (each.end - each.start) * _MICRO,
            "name": name,
            "cat": each.kind,
            "args": arguments,
        }
