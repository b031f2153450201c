"""The schedules by name: to add one, write its file and list it here; users add theirs by ``register_schedule``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from partitioner.schedules.dualpipe_v import DUALPIPE_V
from partitioner.schedules.gpipe import GPIPE
from partitioner.schedules.interleaved import INTERLEAVED
from partitioner.schedules.kind import ScheduleKind
from partitioner.schedules.one_f_one_b import ONE_F_ONE_B
from partitioner.schedules.zbv import ZBV
from partitioner.schedules.zero_bubble import ZERO_BUBBLE
from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.plan import Plan
from passes.ir.schedule import Schedule

__all__ = ["SCHEDULES", "ScheduleKind", "add_schedule", "find_schedule", "interleaves", "make_schedule", "schedule_of"]

SCHEDULES: Mapping[str, ScheduleKind] = MappingProxyType(
    {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPE_V)}
)
"""Every schedule that the planner chooses from, under the name that users write."""

_added: dict[str, ScheduleKind] = {}
_made_of: dict[str, object] = {}


def add_schedule(kind: ScheduleKind, made_of: object) -> None:
    """Add a schedule that is used where a user names it; raise ConfigError if there is one of its name that is made of something else."""
    if _made_of.setdefault(kind.name, made_of) == made_of:
        _added.setdefault(kind.name, kind)
    else:  # caches have results by name
        raise ConfigError(f"there is another schedule {kind.name!r}", remedy="choose a name that no schedule has yet in this process")


def find_schedule(name: str) -> ScheduleKind:
    """Return the schedule of this name; raises ConfigError, with all names and the closest one, if there is none.

    >>> find_schedule("ZBV").default_stages_per_rank
    2
    """
    known = {**SCHEDULES, **_added}
    if name in known:
        return known[name]
    remedy = f"{did_you_mean(name, known)}choose one of {', '.join(known)}, or register it: register_schedule"
    raise ConfigError(f"there is no schedule {name!r}", remedy=remedy)


@lru_cache(maxsize=16)
def make_schedule(
    name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None, replicas: tuple[int, ...] = ()
) -> Schedule:
    """Return the schedule of this name for one step, from a cache of recent ones.

    Args:
        name: of ``SCHEDULES``, or one that was added.
        n_ranks: ranks in the pipeline.
        n_microbatches: microbatches in the step: also fewer than the ranks, also no multiple of them.
        stages_per_rank: stages that each rank runs; None: the schedule's default, 2 for Interleaved1F1B.
        replicas: for each stage, how many ranks run it; empty: one rank each.

    Raises:
        ConfigError: the name is unknown, a number is not positive, or the schedule does not allow this many stages a rank.
    """
    return find_schedule(name).build(n_ranks, n_microbatches, stages_per_rank, replicas)


def schedule_of(plan: Plan, n_microbatches: int) -> Schedule:
    """Return a plan's schedule for a number of microbatches."""
    n_ranks = 1 + max(map(max, plan.stage_ranks))
    stages_per_rank = None if plan.replicas else len(plan.stages) // n_ranks
    return make_schedule(plan.schedule, n_ranks, n_microbatches, stages_per_rank, plan.replicas)


def interleaves(plan: Plan) -> bool:
    """Return whether a plan's schedule runs backwards before its last forward, which ``pm(...)`` and ``backward()`` cannot."""
    return plan.n_microbatches > 1 and not find_schedule(plan.schedule).forwards_first
