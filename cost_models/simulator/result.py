"""Result of a simulated step: time, bubble, memory, communication and timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_models.hardware.units import format_bytes, format_seconds
from cost_models.simulator.memory import DeviceMemory
from cost_models.simulator.storages import CATEGORIES
from cost_models.simulator.timeline import Timeline
from passes.ir.mesh import rank_numbers


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
        limits: the memory limit of each device in bytes; empty: none is known.
    """

    step_time: float
    bubble_fraction: float
    memory: tuple[DeviceMemory, ...]
    communication: Mapping[tuple[int, int], int]
    timeline: Timeline
    rows: int
    latency: float
    limits: Sequence[float] = ()

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """For each device, the most bytes that it holds at once."""
        return tuple(memory.peak for memory in self.memory)

    @property
    def over_limit(self) -> Mapping[int, float]:
        """Each device whose peak exceeds its memory limit, and by how many bytes."""
        return {rank: peak - limit for rank, (peak, limit) in enumerate(zip(self.peak_memory, self.limits, strict=False)) if peak > limit}

    @property
    def over_limit_words(self) -> str:
        """The device that exceeds its memory limit by most, and the number of others that exceed theirs; empty if none does."""
        over = self.over_limit
        if not over:
            return ""
        rank = max(over, key=over.__getitem__)
        others = f", and {len(over) - 1} other{'s' if len(over) > 2 else ''} theirs" if len(over) > 1 else ""
        peak, limit = format_bytes(self.peak_memory[rank]), format_bytes(self.limits[rank])
        return f"the simulated peak of rank {rank}, {peak}, exceeds its limit of {limit} by {format_bytes(over[rank])}{others}"

    @property
    def throughput(self) -> float:
        """Rows of the batch a second, step after step."""
        return self.rows / self.step_time if self.step_time else 0.0

    def __str__(self) -> str:
        lines = [
            f"step        {format_seconds(self.step_time)}    bubble {self.bubble_fraction:.1%}",
            f"latency     {format_seconds(self.latency)}    throughput {self.throughput:,.1f} rows/s",
            *([f"over limit  {self.over_limit_words}"] if self.over_limit else []),
            "",
        ]
        cells = [[_at_peak(memory, name) for name in memory] for memory in self.memory]
        widths = [max(13, *(len(row[index]) for row in cells)) for index in range(len(CATEGORIES))] if cells else []
        heading = "  ".join(f"{name:>{width}}" for name, width in zip(CATEGORIES, widths, strict=False))
        alike: dict[tuple[str, ...], list[int]] = {}  # peak, and its categories -> devices
        for rank, (memory, row) in enumerate(zip(self.memory, cells, strict=True)):
            alike.setdefault((format_bytes(memory.peak), *row), []).append(rank)
        devices = [rank_numbers(ranks) for ranks in alike.values()]
        place = max(map(len, ("device", *devices)))
        lines += [f"{'device':>{place}}  {'peak':>9}  {heading}"] if cells else []
        for name, (peak, *row) in zip(devices, alike, strict=True):
            sizes = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append(f"{name:>{place}}  {peak:>9}  {sizes}")
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
