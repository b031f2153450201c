"""Tasks of a rank's program, in order: compute, start a transfer, wait for one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cost_models.simulator.storages import CATEGORIES, Storage

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}


@dataclass(slots=True, eq=False)
class Transfer:
    """One rank's part in a message or a collective.

    Attributes:
        name: of the node that starts it.
        kind: ``"message"`` or the collective's name.
        group: the ranks that take part, for a message source and destination.
        key: what the parts of one transfer have in common, on all its ranks.
        bytes: of a message; of a collective the size of the whole tensor, as ``cost_models.collectives.alpha_beta`` counts.
        inputs: what is communicated: it stays alive until the transfer is over, and the rank has waited for it.
        buffers: where it arrives.
    """

    name: str
    kind: str
    group: tuple[int, ...]
    key: Any
    bytes: int
    inputs: tuple[Storage, ...] = ()
    buffers: tuple[Storage, ...] = ()


@dataclass(frozen=True, slots=True)
class Rise:
    """Peak memory inside a merged step.

    Attributes:
        offset: seconds from the step's start.
        bytes: above what was there before the step, by category.
        alive: what of the step's own is alive then.
        gone: what was there before the step and has gone by then.
    """

    offset: float
    bytes: tuple[int, ...]
    alive: tuple[Storage, ...]
    gone: tuple[Storage, ...]


@dataclass(slots=True, eq=False)
class Step:
    """One task.

    Attributes:
        kind: compute, start a transfer, or wait for one.
        name: of the node.
        section: the action that it belongs to (``"0F1"``), or words.
        seconds: of computing.
        made: storages that it makes; at its start, or at its end where ``rise`` describes its course.
        dropped: storages that are free after it.
        transfer: what is started or waited for.
        rise: for several steps in one, what they need in between.
    """

    kind: Literal["compute", "start", "wait"]
    name: str
    section: str
    seconds: float = 0.0
    made: list[Storage] = field(default_factory=list)
    dropped: list[Storage] = field(default_factory=list)
    transfer: Transfer | None = None
    rise: Rise | None = None


def merge_compute_steps(steps: list[Step]) -> list[Step]:
    """Merge consecutive compute steps of a section; memory made and dropped inside the merged step appears in its rise alone."""
    result: list[Step] = []
    run: list[Step] = []
    for step in [*steps, None]:
        if step is not None and step.kind == "compute" and (not run or run[-1].section == step.section):
            run.append(step)
            continue
        if run:
            result.append(_merge(run))
        run = []
        if step is not None and step.kind == "compute":
            run = [step]
        elif step is not None:
            result.append(step)
    return result


def _merge(run: list[Step]) -> Step:
    if len(run) == 1:
        return run[0]
    elapsed = 0.0
    level = [0] * len(CATEGORIES)
    alive: dict[int, Storage] = {}
    gone: dict[int, Storage] = {}
    best = Rise(0.0, tuple(level), (), ())
    highest = 0
    for step in run:
        for storage in step.made:
            level[_INDEX[storage.category]] += storage.bytes
            alive[id(storage)] = storage
        if sum(level) > highest:
            highest = sum(level)
            best = Rise(elapsed, tuple(level), tuple(alive.values()), tuple(gone.values()))
        for storage in step.dropped:
            level[_INDEX[storage.category]] -= storage.bytes
            if alive.pop(id(storage), None) is None:
                gone[id(storage)] = storage
        elapsed += step.seconds
    return Step("compute", run[0].name, run[0].section, elapsed, list(alive.values()), list(gone.values()), rise=best)


def combine_storages(steps: list[Step], apart: Iterable[Storage]) -> list[Step]:
    """Return the steps with storages combined that have one category, and are made in one step and dropped in one step.

    step 0 makes a (8 bytes) and b (4 bytes), step 3 drops both    ->    a (12 bytes), whose ``parts`` are a and b

    Args:
        apart: storages that are never combined, since other steps may hold them; nor are those of transfers.
    """
    separate = {id(storage) for storage in apart}
    for step in steps:
        if step.transfer is not None:
            separate.update(map(id, (*step.transfer.inputs, *step.transfer.buffers)))
    dropped_in = {id(storage): place for place, step in enumerate(steps) for storage in step.dropped}
    combined: dict[int, Storage] = {}
    for step in steps:
        groups: dict[tuple[int, str], list[Storage]] = {}
        for storage in step.made:
            if id(storage) in dropped_in and id(storage) not in separate:
                groups.setdefault((dropped_in[id(storage)], storage.category), []).append(storage)
        for group in groups.values():
            if len(group) > 1:
                parts = tuple((storage.name, storage.bytes) for storage in group)
                whole = Storage(group[0].name, sum(storage.bytes for storage in group), group[0].category, parts=parts)
                combined.update((id(storage), whole) for storage in group)

    def replaced(storages: list[Storage]) -> list[Storage]:
        found = [combined.get(id(storage), storage) for storage in storages]
        return list({id(storage): storage for storage in found}.values())

    return [replace(step, made=replaced(step.made), dropped=replaced(step.dropped)) for step in steps]
