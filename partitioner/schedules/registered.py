"""Schedules of the user's: registered by name, or passed to ``partition``.

    register_schedule("mine", function)                    schedule="mine" in any later call, for any number of microbatches
    partition(..., schedule=Schedule.parse(text))          the same for the actions of one step, under the schedule's name

A schedule is checked when it is registered, and again for the numbers that a plan asks for. The planner relies on nothing but its actions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from partitioner.schedules.catalog import SCHEDULES, add_schedule, find_schedule
from partitioner.schedules.clocks.clock import run_on_clock
from partitioner.schedules.kind import ScheduleKind
from partitioner.schedules.pattern import Move, Rank, numbered
from passes.ir.arguments.checked import at_least, checked_arguments
from passes.ir.errors import ConfigError
from passes.ir.schedule import Action, ActionKind, Schedule

ScheduleFunction = Callable[[int, int], Schedule]
"""A function of stages and microbatches."""

_TRIED = 2, 4
"""Ranks and microbatches for which the function of a schedule is called when it is registered."""


@checked_arguments({"stages_per_device": at_least(1)}, {"name": '"mine"', "function": "a function of stages and microbatches"})
def register_schedule(name: str, function: ScheduleFunction, *, stages_per_device: int = 1) -> None:
    """Register a schedule for ``partition(schedule=name)``; in every process, since a plan knows it by its name alone.

    Args:
        name: not that of another schedule.
        function: returns the ``Schedule`` for a number of stages and of microbatches. It is called with 2 and 4 (times
            ``stages_per_device``, and microbatches), and later with those of each plan.
        stages_per_device: stages that each device runs.

    Raises:
        ConfigError: there is another schedule of this name; or a schedule of the function does not run each stage on one rank, with one
            forward and one backward (or its two halves) for each microbatch, in ascending order.
        VerificationError: ranks wait for each other.
    """
    n_ranks, n_microbatches = _TRIED
    first = _checked(name, function, n_ranks * stages_per_device, stages_per_device, n_microbatches)
    _add(_Registered(name, function, stages_per_device, splits=first.splits_backward))


def read_schedule(schedule: str | Schedule) -> str:
    """Return the name of a schedule; register one that is passed itself.

    Raises:
        ConfigError: there is no schedule of this name; or as ``register_schedule`` does.
    """
    if isinstance(schedule, str):
        return find_schedule(schedule).name
    stages_per_rank = -(-schedule.n_stages // max(1, schedule.n_ranks))
    _checked(schedule.name, _Steps(schedule), schedule.n_stages, stages_per_rank, schedule.n_microbatches)
    _add(_Registered(schedule.name, _Steps(schedule), stages_per_rank, splits=schedule.splits_backward))
    return schedule.name


def microbatches_of(schedule: str | Schedule | None, n_microbatches: int | None) -> int | None:
    """Return the microbatches of a step: those of a schedule that is passed itself; raise ConfigError if others are asked for."""
    if not isinstance(schedule, Schedule):
        return n_microbatches
    if n_microbatches not in (None, schedule.n_microbatches):
        raise ConfigError(
            f"n_microbatches={n_microbatches} does not fit schedule {schedule.name}, which has {schedule.n_microbatches}",
            remedy="leave n_microbatches out",
        )
    return schedule.n_microbatches


@dataclass(frozen=True)
class _Steps:
    """A function that returns one schedule; for fewer microbatches, without those that do not exist."""

    schedule: Schedule

    def __call__(self, n_stages: int, n_microbatches: int) -> Schedule:
        given = self.schedule
        if n_stages != given.n_stages or n_microbatches > given.n_microbatches:
            raise ConfigError(
                f"schedule {given.name} has {given.n_stages} stages and {given.n_microbatches} microbatches, not {n_stages} and "
                f"{n_microbatches}",
                remedy="pass a schedule of these numbers, or register a function that makes one of any: register_schedule",
            )
        actions = (tuple(action for action in of_rank if action.microbatch < n_microbatches) for of_rank in given.actions)
        return replace(given, n_microbatches=n_microbatches, actions=tuple(actions))


@dataclass(frozen=True)
class _Registered:
    """A function of a schedule, as the pattern and the placement of a kind."""

    name: str
    function: ScheduleFunction
    stages_per_rank: int
    splits: bool

    def pattern(self, rank: Rank) -> list[Move]:
        """Return the moves of a rank."""
        schedule = _checked(self.name, self.function, rank.n_ranks * self.stages_per_rank, self.stages_per_rank, rank.n_microbatches)
        if schedule.splits_backward and not self.splits:
            raise ConfigError(
                f"schedule {self.name} splits backwards of {rank.n_microbatches} microbatches, and none of {_TRIED[1]}",
                remedy="register a schedule that splits backwards, and one that does not, by two names",
            )
        return [(action.stage, action.kind) for action in schedule.actions[rank.n_before]]

    def placement(self, n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        n_stages = n_ranks * stages_per_rank
        fixed = self.function.schedule.n_microbatches if isinstance(self.function, _Steps) else n_stages
        return tuple(ranks[0] for ranks in _checked(self.name, self.function, n_stages, stages_per_rank, fixed).stage_ranks)


def _add(registered: _Registered) -> None:
    add_schedule(
        ScheduleKind(
            name=registered.name,
            source="registered by the user",
            pattern=registered.pattern,
            placement=registered.placement,
            default_stages_per_rank=registered.stages_per_rank,
            any_stages_per_rank=False,
            splits_backward=registered.splits,
            is_replicable=False,
        ),
        made_of=registered,
    )


@functools.lru_cache(maxsize=16)
def _checked(name: str, function: ScheduleFunction, n_stages: int, stages_per_rank: int, n_microbatches: int) -> Schedule:
    """Return the schedule of a function, checked; see ``register_schedule``."""
    if not name or name in SCHEDULES:
        raise ConfigError(f"a schedule cannot be registered as {name!r}", remedy=f"choose another name than {', '.join(SCHEDULES)}")
    schedule = function(n_stages, n_microbatches)
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"the function of schedule {name} returns a {type(schedule).__name__}", remedy="return a partitioner.Schedule")
    n_ranks = n_stages // stages_per_rank
    counts = Counter(ranks[0] for ranks in schedule.stage_ranks if len(ranks) == 1)
    is_placed = counts == dict.fromkeys(range(n_ranks), stages_per_rank) and schedule.n_ranks == n_ranks
    if (schedule.n_stages, schedule.n_microbatches) != (n_stages, n_microbatches) or not is_placed:
        raise ConfigError(
            f"schedule {name} has {schedule.n_stages} stages on ranks {schedule.stage_ranks} and {schedule.n_microbatches} microbatches",
            remedy=f"for {n_stages} stages and {n_microbatches} microbatches, run {stages_per_rank} stages on each of {n_ranks} ranks",
        )
    for rank, actions in enumerate(schedule.actions):
        _check_actions(schedule, name, rank)
        expected = numbered([(action.stage, action.kind) for action in actions], n_microbatches)
        wrong = next((pair for pair in zip(actions, expected, strict=False) if pair[0] != pair[1]), None)
        if wrong is not None:
            raise ConfigError(f"schedule {name} runs {wrong[0]} in place of {wrong[1]}", remedy="number microbatches in order")
    run_on_clock(schedule, lambda _: 1.0)
    return replace(schedule, name=name)


def _check_actions(schedule: Schedule, name: str, rank: int) -> None:
    """Raise ConfigError unless a rank runs a forward and a backward, or its halves in order, of each microbatch of its stages."""
    found = Counter((action.stage, action.microbatch, action.kind) for action in schedule.actions[rank])
    stages = [stage for stage, ranks in enumerate(schedule.stage_ranks) if ranks == (rank,)]
    for stage, microbatch, kind in found:
        if stage not in stages or microbatch >= schedule.n_microbatches:
            raise ConfigError(f"schedule {name} runs {stage}{kind.value}{microbatch} on rank {rank}", remedy="leave it out")
    place_of = {action: place for place, action in enumerate(schedule.actions[rank])}
    for stage in stages:
        for microbatch in range(schedule.n_microbatches):
            kinds = "".join(sorted(each.value for each in ActionKind for _ in range(found[stage, microbatch, each])))
            if kinds not in ("BF", "FIW"):
                raise ConfigError(
                    f"schedule {name} runs {', '.join(f'{stage}{each}{microbatch}' for each in kinds) or 'nothing'} for microbatch "
                    f"{microbatch} of stage {stage}",
                    remedy=f"run {stage}F{microbatch} and {stage}B{microbatch}, or {stage}F{microbatch}, {stage}I{microbatch} and "
                    f"{stage}W{microbatch}",
                )
            half, weights = (Action(stage, kind, microbatch) for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT))
            if kinds == "FIW" and place_of[weights] < place_of[half]:
                raise ConfigError(f"schedule {name} runs {weights} before {half}", remedy=f"run {half} first: {weights} reads its results")
