"""Memory of a rank over time, from the storages that its tasks allocate and free: the peak, its time, and the tensors alive then."""

from __future__ import annotations

import operator
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cost_models.simulator.events import Change, RankRun
from cost_models.simulator.storages import CATEGORIES, Storage

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


@dataclass(frozen=True, slots=True)
class _Moment:
    """The memory of a rank at one change, in bytes of each category.

    Attributes:
        time: seconds.
        most: the momentary peak.
        after: the level that stays.
    """

    time: float
    most: tuple[int, ...]
    after: tuple[int, ...]


def memory_of(run: RankRun, stays: Sequence[Storage], optimizer_bytes: int) -> tuple[DeviceMemory, MemoryCurve]:
    """Return the peak memory of a rank, and its memory over time.

    Args:
        run: the simulated step of the rank, with its changes of memory.
        stays: storages that exist from the start: parameters, inputs.
        optimizer_bytes: state of the optimizer.
    """
    changes = _in_order(run)
    moments = list(_moments(changes, stays, optimizer_bytes))
    totals = [sum(moment.most) for moment in moments]
    place = totals.index(max(totals))
    memory = DeviceMemory(
        **dict(zip(CATEGORIES, moments[place].most, strict=True)),
        peak_time=moments[place].time,
        alive=_alive(changes[:place], stays),
        highest={name: _highest(moments, _INDEX[name]) for name in CATEGORIES},
        kept=_kept(run, moments),
    )
    return memory, _curve(moments, totals)


def _moments(changes: Sequence[tuple[float, Change]], stays: Sequence[Storage], optimizer_bytes: int) -> Iterator[_Moment]:
    """Yield the start of a step, and each change: it allocates or frees a storage, or is the momentary rise inside a task."""
    level = [0] * len(CATEGORIES)
    level[_INDEX["optimizer"]] = optimizer_bytes
    for storage in stays:
        level[_INDEX[storage.category]] += storage.bytes
    after = tuple(level)
    yield _Moment(0.0, after, after)
    for time, change in changes:
        if change.rise is not None:
            yield _Moment(time, tuple(map(operator.add, level, change.rise.bytes)), after)
        else:
            assert change.storage is not None
            level[_INDEX[change.storage.category]] += change.storage.bytes if change.made else -change.storage.bytes
            after = tuple(level)
            yield _Moment(time, after, after)


def _highest(moments: Sequence[_Moment], category: int) -> tuple[int, float]:
    """Return the first peak of a category, and its time."""
    highest = max(moments, key=lambda moment: moment.most[category])
    return highest.most[category], highest.time


def _curve(moments: Sequence[_Moment], totals: Sequence[int]) -> MemoryCurve:
    """Return the curve with the highest and the last value at each time."""
    times, sizes = [0.0], [totals[0]]
    for moment, most in zip(moments[1:], totals[1:], strict=True):
        time, after = moment.time, sum(moment.after)
        if most > after:
            times += [time, time]
            sizes += [most, after]
        elif times[-2:] == [time, time] and sizes[-1] <= max(after, sizes[-2]):
            sizes[-2], sizes[-1] = max(sizes[-2], after), after
        else:
            times.append(time)
            sizes.append(after)
    return MemoryCurve(tuple(times), tuple(sizes))


def _kept(run: RankRun, moments: Sequence[_Moment]) -> int:
    """Return the peak of activations at the ends of actions."""
    ends = sorted({each.section: each.end for each in run.computed if _ACTION.fullmatch(each.section)}.values())
    times = [moment.time for moment in moments]
    places = [bisect_right(times, end * (1 + 1e-12)) - 1 for end in ends] or [0]
    return max(moments[place].after[_INDEX["activations"]] for place in places)


def _in_order(run: RankRun) -> list[tuple[float, Change]]:
    """Return the changes in order of time; a storage that a transfer reads is freed after the transfer."""
    timed = [
        (change.time if change.made or change.storage is None else max(change.time, run.held.get(id(change.storage), 0.0)), change)
        for change in run.changes
    ]
    return sorted(timed, key=lambda each: each[0])


def _alive(changes: Sequence[tuple[float, Change]], stays: Sequence[Storage]) -> tuple[Alive, ...]:
    """Return the largest tensors that are alive after these changes; if the last one is a ``Rise``, those at its peak."""
    found = {id(storage): storage for storage in stays}
    for _, change in changes:
        if change.storage is not None and change.made:
            found[id(change.storage)] = change.storage
        elif change.storage is not None:
            found.pop(id(change.storage), None)
    if changes and (rise := changes[-1][1].rise) is not None:
        gone = {id(storage) for storage in rise.gone}
        found = {key: storage for key, storage in found.items() if key not in gone} | {id(storage): storage for storage in rise.alive}
    parts = [Alive(name, size, storage.category) for storage in found.values() for name, size in storage.named]
    return tuple(sorted(parts, key=lambda part: -part.bytes)[:_SHOWN])
