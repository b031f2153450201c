"""What a simulated step comes to: time, bubble, memory, communication, and a timeline of it all.

When everything was: slices of computing and communication a device, and its memory; simulated, or recorded from a run.

One form for both, so that a prediction and a measurement can be laid beside each other: slices of a run have the names that the
simulation gives them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.hardware.units import format_bytes, format_seconds
from cost_models.simulator.events import Slice
from cost_models.simulator.gantt import draw
from cost_models.simulator.memory import DeviceMemory, MemoryCurve
from cost_models.simulator.storages import CATEGORIES
from cost_models.text_files import write_text
from passes.ir.checked_arguments import checked_arguments

__all__ = ["Simulation", "Timeline"]


@dataclass(frozen=True)
class Simulation:
    """One step of all devices on a clock.

    Attributes:
        step_time: seconds until the last device is done.
        bubble_fraction: the share of all devices' time in which they compute nothing.
        memory: for each device what it holds at its peak, by category.
        communication: (source rank, destination rank) -> bytes sent that way.
        timeline: when everything was; ``timeline.save("step.json")`` for Perfetto, ``timeline.svg()`` as a picture.
        rows: of the batch.
        latency: seconds until the first microbatch is through the model: its outputs, or its loss, are there.
    """

    step_time: float
    bubble_fraction: float
    memory: tuple[DeviceMemory, ...]
    communication: Mapping[tuple[int, int], int]
    timeline: Timeline
    rows: int
    latency: float

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """For each device, the most bytes that it holds at once."""
        return tuple(memory.peak for memory in self.memory)

    @property
    def throughput(self) -> float:
        """Rows of the batch a second, step after step."""
        return self.rows / self.step_time if self.step_time else 0.0

    def __str__(self) -> str:
        lines = [
            f"step        {format_seconds(self.step_time)}    bubble {self.bubble_fraction:.1%}",
            f"latency     {format_seconds(self.latency)}    throughput {self.throughput:,.1f} rows/s",
            "",
        ]
        cells = [[_at_peak(memory, name) for name in memory] for memory in self.memory]
        widths = [max(13, *(len(row[index]) for row in cells)) for index in range(len(CATEGORIES))] if cells else []
        heading = "  ".join(f"{name:>{width}}" for name, width in zip(CATEGORIES, widths, strict=False))
        lines += [f"{'device':>6}  {'peak':>9}  {heading}"] if cells else []
        for rank, (memory, row) in enumerate(zip(self.memory, cells, strict=True)):
            sizes = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append(f"{rank:>6}  {format_bytes(memory.peak):>9}  {sizes}")
        if any("(" in cell for row in cells for cell in row):
            lines.append("categories are of the moment of the peak; in brackets the most of one that is not there then")
        total = sum(self.communication.values())
        lines += ["", f"{format_bytes(total)} between devices, over {len(self.communication)} links"]
        return "\n".join(lines)


def _at_peak(memory: DeviceMemory, category: str) -> str:
    """Write what a category holds at the peak; where that is nothing, the most that it holds before or after."""
    size, (most, time) = memory[category], memory.highest[category]
    if size or not most:
        return format_bytes(size)
    return f"{format_bytes(size)} ({format_bytes(most)} {'before' if time < memory.peak_time else 'after'})"


# -- when everything was -----------------------------------------------------------------------------------------------------------


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
