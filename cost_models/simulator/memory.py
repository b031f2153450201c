"""Memory of a rank over time, from the storages that its tasks allocate and free: the peak, its time, and the tensors alive then."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_models.simulator.events import Change, RankRun
from cost_models.simulator.storages import CATEGORIES, Storage

__all__ = ["Alive", "DeviceMemory", "MemoryCurve", "memory_of"]

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}
_ACTION = re.compile(r"\d+[FBIW]\d+")
_SHOWN = 40
"""Number of the largest nodes alive at a peak that are listed."""


@dataclass(frozen=True)
class Alive:
    """The memory of one node at a peak.

    Attributes:
        name: the node, or the parameter.
        bytes: of memory.
        category: one of ``CATEGORIES``.
    """

    name: str
    bytes: int
    category: str


@dataclass(frozen=True)
class DeviceMemory(Mapping[str, int]):
    """The memory of one device at its peak, in bytes; the categories add up to the peak. Also a mapping from their names.

    Attributes:
        parameters: parameters, buffers and constants.
        gradients: of parameters.
        optimizer: its state.
        activations: all other computed values, and inputs.
        communication: receive buffers.
        peak_time: time of the peak, in seconds from the step's start.
        alive: the largest tensors alive then, largest first.
        highest: category -> its own peak, and the time of that.
        kept: the peak of activations between two actions: those saved for backwards, without transient ones.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communication: int
    peak_time: float
    alive: tuple[Alive, ...]
    highest: Mapping[str, tuple[int, float]]
    kept: int

    @property
    def peak(self) -> int:
        """Return the bytes of all categories."""
        return sum(self.values())

    def __getitem__(self, category: str) -> int:
        if category not in _INDEX:
            raise KeyError(category)
        size: int = getattr(self, category)
        return size

    def __iter__(self) -> Iterator[str]:
        return iter(CATEGORIES)

    def __len__(self) -> int:
        return len(CATEGORIES)


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes on a device over time: ``bytes[i]`` from ``times[i]`` on.

    Attributes:
        times: seconds, ascending; a time may occur twice: the momentary peak, and the level after it.
        bytes: of all categories together.
    """

    times: tuple[float, ...]
    bytes: tuple[int, ...]


def memory_of(run: RankRun, stays: Sequence[Storage], optimizer_bytes: int) -> tuple[DeviceMemory, MemoryCurve]:
    """Return the peak memory of a rank, and its memory over time.

    Sweep over the changes in order of time. A change allocates or frees a storage, or is the momentary rise inside a task, which counts for
    peaks only.

    Args:
        run: the simulated step of the rank, with its changes of memory.
        stays: storages that exist from the start: parameters, inputs.
        optimizer_bytes: state of the optimizer.
    """
    changes = _in_order(run)
    level = [0] * len(CATEGORIES)
    level[_INDEX["optimizer"]] = optimizer_bytes
    for storage in stays:
        level[_INDEX[storage.category]] += storage.bytes
    total = peak = sum(level)
    at_peak, place, peak_time = tuple(level), -1, 0.0
    highest = [(size, 0.0) for size in level]
    times, sizes = [0.0], [total]
    between = [(0.0, level[_INDEX["activations"]])]
    for index, (time, change) in enumerate(changes):
        above, most = level, total
        if change.rise is not None:
            above = [here + more for here, more in zip(level, change.rise.bytes, strict=True)]
            most, grown = sum(above), range(len(CATEGORIES))
        else:
            assert change.storage is not None
            category = _INDEX[change.storage.category]
            size = change.storage.bytes if change.made else -change.storage.bytes
            level[category] += size
            most = total = total + size
            grown = range(category, category + 1)
        for category in grown:
            if above[category] > highest[category][0]:
                highest[category] = above[category], time
        if most > peak:
            peak, at_peak, place, peak_time = most, tuple(above), index, time
        _extend(times, sizes, time, total, most)
        if index + 1 == len(changes) or changes[index + 1][0] > time:
            between.append((time, level[_INDEX["activations"]]))
    alive = _alive(changes[: place + 1], stays)
    named = dict(zip(CATEGORIES, at_peak, strict=True))
    return (
        DeviceMemory(
            **named, peak_time=peak_time, alive=alive, highest=dict(zip(CATEGORIES, highest, strict=True)), kept=_kept(run, between)
        ),
        MemoryCurve(tuple(times), tuple(sizes)),
    )


def _kept(run: RankRun, activations: Sequence[tuple[float, int]]) -> int:
    """Return the peak of activations at the ends of actions.

    Args:
        activations: (time, bytes) of each change.
    """
    ends = sorted({each.section: each.end for each in run.computed if _ACTION.fullmatch(each.section)}.values())
    times = [time for time, _ in activations]
    return max((activations[bisect_right(times, end * (1 + 1e-12)) - 1][1] for end in ends), default=activations[0][1])


def _in_order(run: RankRun) -> list[tuple[float, Change]]:
    """Return the changes in order of time; a storage that a transfer reads is freed after the transfer."""
    timed = [
        (change.time if change.made or change.storage is None else max(change.time, run.held.get(id(change.storage), 0.0)), change)
        for change in run.changes
    ]
    return sorted(timed, key=lambda each: each[0])


def _extend(times: list[float], sizes: list[int], time: float, total: int, above: int) -> None:
    """Append a point to the curve; of several at one time, keep the highest and the last."""
    if above > total:
        times += [time, time]
        sizes += [above, total]
    elif len(times) > 1 and times[-1] == time and times[-2] == time and sizes[-1] <= max(total, sizes[-2]):
        sizes[-2], sizes[-1] = max(sizes[-2], total), total
    else:
        times.append(time)
        sizes.append(total)


def _alive(changes: Sequence[tuple[float, Change]], stays: Sequence[Storage]) -> tuple[Alive, ...]:
    """Return the largest tensors that are alive after these changes."""
    found = {id(storage): storage for storage in stays}
    for _, change in changes:
        if change.storage is not None and change.made:
            found[id(change.storage)] = change.storage
        elif change.storage is not None:
            found.pop(id(change.storage), None)
    if changes and (rise := changes[-1][1].rise) is not None:
        found.update({id(storage): storage for storage in rise.alive})
    parts = [Alive(name, size, storage.category) for storage in found.values() for name, size in storage.named]
    return tuple(sorted(parts, key=lambda part: -part.bytes)[:_SHOWN])
