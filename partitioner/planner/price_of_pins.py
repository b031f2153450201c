"""The user-fixed choices of a plan, and the price of each: how much faster the best plan without it is, with all others fixed.

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

_WHOLE = ("device_map", "tp_plan", "split_spec", "attention")
"""Constraints that are priced as a whole."""

_EACH = ("axes", "pin")
"""Constraints of which each entry is priced."""


@dataclass(frozen=True)
class Pinned:
    """One user-fixed choice.

    Attributes:
        choice: as the user wrote it: ``'schedule="GPipe"'``.
        price: seconds of a step that it costs, not negative; None if there is no plan without it.
        without: the plan without it, in words; if there is none, why.
    """

    choice: str
    price: float | None
    without: str


def pinned(problem: PlanProblem, plan: Plan) -> tuple[Pinned, ...]:
    """Price every user-fixed choice of a problem, whose best plan is given."""
    return tuple(_priced(choice, free, plan) for choice, free in pinned_choices(problem))


def _priced(choice: str, free: PlanProblem, plan: Plan) -> Pinned:
    """Price a choice of a plan; ``free``: the problem without it."""
    try:
        without = free.solve()
    except PartitionError as error:
        return Pinned(choice, None, str(error).splitlines()[0])
    saved = plan.step_time - without.step_time
    if saved <= _ROUNDING * plan.step_time:  # the search of the larger space found no better plan
        return Pinned(choice, 0.0, "no faster plan was found")
    return Pinned(choice, saved, words_of(without))


def pinned_choices(problem: PlanProblem) -> Iterator[tuple[str, PlanProblem]]:
    """Yield the user-fixed choices: each as the user wrote it, with the problem without it."""
    request, constraints = problem.request, problem.request.constraints
    if problem.sequential_tiles is not None or (problem.mesh is not None and problem.mesh.size > 1):
        free = dataclasses.replace(request, mode="auto", replicas=())
        yield f"mode={_mode(problem)}", dataclasses.replace(problem, mesh=None, sequential_tiles=None, request=free)
    for argument, field in _ARGUMENTS.items():
        value = getattr(request, field)
        change: dict[str, Any] = {field: None}
        if value is not None:
            yield f"{argument}={_text(value)}", dataclasses.replace(problem, request=dataclasses.replace(request, **change))
    whole = [(name, getattr(constraints, name)) for name in _WHOLE]
    without: list[tuple[str, Mapping[str, Any]]] = [(f"{name}={_shortened(entries)}", {name: None}) for name, entries in whole if entries]
    for name in _EACH:
        entries = getattr(constraints, name) or {}
        for key, value in entries.items():
            rest = {other: each for other, each in entries.items() if other != key}
            without.append((f"{name}={_text({key: value})}", {name: rest or None}))
    for choice, left in without:
        free = dataclasses.replace(request, constraints=dataclasses.replace(constraints, **left))
        yield choice, dataclasses.replace(problem, request=free)


def _mode(problem: PlanProblem) -> str:
    """Return the ``mode=`` of the call that named the problem's mesh."""
    if problem.sequential_tiles is not None:
        return _text({"tile": problem.sequential_tiles})
    mesh: Mesh | None = problem.mesh
    assert mesh is not None
    stages = {name: problem.request.replicas for name in mesh.names if name in STAGES and problem.request.replicas}
    stages |= {WIDTH: widths_of_stages(mesh, problem.request.replicas)} if mesh.widths else {}
    return _text({**dict(mesh.dimensions), **stages} if len(mesh.dimensions) > 1 or stages else mesh.names[0])


def _shortened(entries: Mapping[str, Any] | str) -> str:
    """Return entries as the user wrote them; if that is long, their number."""
    text = _text(entries)
    return text if len(text) <= _LONG else f"{{{len(entries)} entries}}"


def _text(value: Any) -> str:
    return json.dumps(value, default=str)


_LONG = 48
"""Characters beyond which entries are counted instead."""

_ROUNDING = 1e-9
"""Relative differences of prices that are rounding."""
