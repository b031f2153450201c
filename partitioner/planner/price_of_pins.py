"""What a user pinned, and the price of each: how much longer a step takes than without it, all other pins kept, by the same search.

mode="tensor", schedule=None, n_microbatches=4

    without mode              auto, 4 microbatches     0.98 ms     price 0.31 ms
    without n_microbatches    tensor                   1.29 ms     price nothing
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partitioner.planner.plan import PlanProblem
from partitioner.planner.search.describe import words_of
from passes.ir.errors import PartitionError
from passes.ir.mesh import STAGES, WIDTH, Mesh, widths_of_stages
from passes.ir.plan import Plan

__all__ = ["Pinned", "pinned", "pinned_choices"]

_ARGUMENTS = {
    "schedule": "schedule",
    "n_microbatches": "n_microbatches",
    "stages_per_device": "stages_per_rank",
    "recompute": "recompute",
    "memory_limit": "memory_limit",
}
"""Arguments of a call that decide something -> fields of the request."""

_WHOLE = ("device_map", "tp_plan", "split_spec")
"""Constraints whose entries say one thing together."""

_EACH = ("axes", "pin")
"""Constraints whose entries say a thing each."""


@dataclass(frozen=True)
class Pinned:
    """One thing that the user decided.

    Attributes:
        choice: as it was said: ``'schedule="GPipe"'``.
        price: seconds of a step that it costs, not negative; None where there is no plan without it.
        without: the plan without it, in words; where there is none, why.
    """

    choice: str
    price: float | None
    without: str


def pinned(problem: PlanProblem, plan: Plan) -> tuple[Pinned, ...]:
    """Price everything that is pinned."""
    return tuple(_priced(choice, free, plan) for choice, free in pinned_choices(problem))


def _priced(choice: str, free: PlanProblem, plan: Plan) -> Pinned:
    try:
        without = free.solve()
    except PartitionError as error:
        return Pinned(choice, None, str(error).splitlines()[0])
    saved = plan.step_time - without.step_time
    if saved <= _ROUNDING * plan.step_time:  # what was pinned is a plan of the larger space, too
        return Pinned(choice, 0.0, "no faster plan was found")
    return Pinned(choice, saved, words_of(without))


def pinned_choices(problem: PlanProblem) -> Iterator[tuple[str, PlanProblem]]:
    """Everything that is pinned, as it was said, with the problem that is left without it."""
    request, constraints = problem.request, problem.request.constraints
    if problem.sequential_tiles is not None or (problem.mesh is not None and problem.mesh.size > 1):
        free = dataclasses.replace(request, mode="auto", replicas=())
        yield f"mode={_mode(problem)}", dataclasses.replace(problem, mesh=None, sequential_tiles=None, request=free)
    for argument, field in _ARGUMENTS.items():
        value = getattr(request, field)
        change: dict[str, Any] = {field: None}
        if value is not None:
            yield f"{argument}={_said(value)}", dataclasses.replace(problem, request=dataclasses.replace(request, **change))
    said = [(name, getattr(constraints, name)) for name in _WHOLE]
    without: list[tuple[str, Mapping[str, Any]]] = [(f"{name}={_shortened(entries)}", {name: None}) for name, entries in said if entries]
    for name in _EACH:
        entries = getattr(constraints, name) or {}
        for key, value in entries.items():
            rest = {other: each for other, each in entries.items() if other != key}
            without.append((f"{name}={_said({key: value})}", {name: rest or None}))
    for choice, left in without:
        free = dataclasses.replace(request, constraints=dataclasses.replace(constraints, **left))
        yield choice, dataclasses.replace(problem, request=free)


def _mode(problem: PlanProblem) -> str:
    if problem.sequential_tiles is not None:
        return _said({"tile": problem.sequential_tiles})
    mesh: Mesh | None = problem.mesh
    assert mesh is not None
    stages = {name: problem.request.replicas for name in mesh.names if name in STAGES and problem.request.replicas}
    stages |= {WIDTH: widths_of_stages(mesh, problem.request.replicas)} if mesh.widths else {}
    return _said({**dict(mesh.dimensions), **stages} if len(mesh.dimensions) > 1 or stages else mesh.names[0])


def _shortened(entries: Mapping[str, Any]) -> str:
    """Entries as they were said; of many, how many."""
    said = _said(entries)
    return said if len(said) <= _LONG else f"{{{len(entries)} entries}}"


def _said(value: Any) -> str:
    return json.dumps(value, default=str)


_LONG = 48
"""Letters beyond which entries are counted."""

_ROUNDING = 1e-9
"""Relative differences of prices that are rounding."""
