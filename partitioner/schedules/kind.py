"""Kinds of schedules: the facts that hold for any number of ranks and microbatches, and the ``Schedule`` for given numbers.

A microbatch is in flight at a stage from the start of its forward to the end of the backward that frees its activations: B, or W if the
backward is split. The peak depends on the order of each rank's actions alone, not on their times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from partitioner.schedules.pattern import Move, Rank, numbered, v_shaped
from passes.ir.errors import ConfigError
from passes.ir.schedule import Action, ActionKind, Schedule


class InFlight(NamedTuple):
    """For each stage, the microbatches in flight if each rank has one stage.

    Attributes:
        ahead: the most forwards that begin before the backward (the input half, if split) of the first of them has ended.
        saved: the most microbatches whose activations are in memory at once: as ``ahead``, but until the weight half, if split.
        weights_behind: input halves before the first weight half; 0 if backwards are not split.
    """

    ahead: tuple[int, ...]
    saved: tuple[int, ...]
    weights_behind: tuple[int, ...]


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule for any number of ranks and microbatches: the actions of each rank, and the facts that the planner relies on.

    ``pattern`` and ``placement`` are the schedule: ``build`` numbers the moves of every rank. All other fields are facts about it. The
    planner compares no names of schedules: its bounds rely on the facts stated here, and assume none that is left out, so a fact that is
    left out makes a search longer and never its plan wrong. Tests compare every fact with the actions that ``build`` gives.

        ONE_F_ONE_B = ScheduleKind("1F1B", source, pattern=one_f_one_b, placement=looped, default_stages_per_rank=1, ...)

        pattern    rank 0 of 2, 3 microbatches:  F F B F B B    ->  build    0F0 0F1 0B0 0F2 0B1 0B2
                   rank 1 of 2                   F B F B F B                 1F0 1B0 1F1 1B1 1F2 1B2

    A schedule of the user's (``register_schedule``) is a kind with the required fields alone.

    Attributes:
        name: as users write it: ``"1F1B"``.
        source: the paper that it comes from.
        pattern: function from a rank to its moves, in order.
        placement: function from (n_ranks, stages_per_rank) to the rank of each stage.
        default_stages_per_rank: stages a rank unless the user says otherwise.
        any_stages_per_rank: whether other numbers than the default are possible.
        splits_backward: whether some backwards run in two halves, so that the stages' programs need both.
        forwards_first: whether all forwards of a rank come before all its backwards.
        is_replicable: whether a stage, where each rank has one, may run on several ranks round-robin: the pattern of a replica is that of
            another position.
        alternates: whether a rank with one stage runs a forward for each later rank first, and then alternates forward and backward.
        forwards_ahead: function from (n_ranks, rank), for two stages a rank, to the most forwards of a rank's first stage before the
            first forward of its second. With it, a V schedule guarantees that its order before and after the steady state is the same
            for ``2 * n_ranks`` microbatches and for more; a looped one guarantees whole backwards, and at most as many of the first stage
            after the last one of the second. None: no guarantee.
        in_flight_alone: function from (n_ranks, n_microbatches), for one stage a rank, to the microbatches in flight. None: they are
            counted in the schedule.
        idle: guess of the part of 1F1B's bubble that is left beyond the lower bounds; it only orders the search.
    """

    name: str
    source: str
    pattern: Callable[[Rank], list[Move]]
    placement: Callable[[int, int], tuple[int, ...]]
    default_stages_per_rank: int
    any_stages_per_rank: bool
    splits_backward: bool
    forwards_first: bool = False
    is_replicable: bool = True
    alternates: bool = False
    forwards_ahead: Callable[[int, int], int] | None = None
    in_flight_alone: Callable[[int, int], InFlight] | None = None
    idle: float = 0.5

    @property
    def is_v(self) -> bool:
        """Whether ranks run one stage on the way down and one on the way up."""
        return self.placement is v_shaped

    def allows(self, stages_per_rank: int) -> bool:
        """Return whether each rank can run this many stages."""
        return stages_per_rank >= 1 if self.any_stages_per_rank else stages_per_rank == self.default_stages_per_rank

    @property
    def has_one_stage(self) -> bool:
        """Whether each rank runs one stage."""
        return self.default_stages_per_rank == 1 and not self.any_stages_per_rank

    @property
    def has_replicas(self) -> bool:
        """Whether a stage may run on several ranks."""
        return self.has_one_stage and self.is_replicable

    def check(self, stages_per_rank: int | None, replicas: Sequence[int] = ()) -> None:
        """Raise ConfigError if the schedule does not allow this many stages a rank, or ranks a stage."""
        if replicas and not (self.has_replicas and stages_per_rank in (None, 1)):
            reason = "each rank has several stages" if self.is_replicable else "it gives each stage one rank"
            raise ConfigError(
                f"schedule {self.name} cannot run stages on {' + '.join(map(str, replicas))} ranks: {reason}",
                remedy="choose GPipe, 1F1B or ZB1P, or give each stage as many ranks as the others",
            )
        if not replicas and stages_per_rank is not None and not self.allows(stages_per_rank):
            wanted = "at least 1" if self.any_stages_per_rank else f"exactly {self.default_stages_per_rank}"
            raise ConfigError(
                f"schedule {self.name} cannot run {stages_per_rank} stages on each device: it runs {wanted}",
                remedy=f"pass stages_per_device={self.default_stages_per_rank}, leave it out, or choose another schedule",
            )

    def stage_ranks(self, n_ranks: int, stages_per_rank: int | None = None, replicas: Sequence[int] = ()) -> tuple[tuple[int, ...], ...]:
        """Return for each stage the ranks that run it. Raises ConfigError as ``build`` does."""
        _check_positive("pipeline ranks", n_ranks)
        self.check(stages_per_rank, replicas)
        if replicas:
            return self._ranks_of_replicas(n_ranks, replicas)
        if stages_per_rank is None:
            stages_per_rank = self.default_stages_per_rank
        check_forwards(n_ranks * stages_per_rank)
        return tuple((rank,) for rank in self.placement(n_ranks, stages_per_rank))

    def _ranks_of_replicas(self, n_ranks: int, replicas: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each stage, ``replicas[stage]`` of them: ``(2, 1)`` gives ``((0, 1), (2,))``."""
        if sum(replicas) != n_ranks or min(replicas) < 1:
            raise ConfigError(f"stages on {' + '.join(map(str, replicas))} ranks do not make a pipeline of {n_ranks}")
        ends = list(itertools.accumulate(replicas))
        return tuple(tuple(range(end - count, end)) for count, end in zip(replicas, ends, strict=True))

    def build(self, n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None, replicas: Sequence[int] = ()) -> Schedule:
        """Return the schedule of a step, for any positive number of ranks and microbatches.

        Replicas of a stage take the microbatches round-robin (1F1B-RR of Narayanan et al. 2019, PipeDream).

        Args:
            n_ranks: ranks in the pipeline.
            n_microbatches: microbatches in a step.
            stages_per_rank: stages that each rank runs; None: the schedule's default.
            replicas: for each stage, how many ranks run it; empty: one rank each.

        Raises:
            ConfigError: a number is not positive, or the schedule does not allow this many stages a rank, or ranks a stage.
        """
        _check_positive("microbatches", n_microbatches)
        stage_ranks = self.stage_ranks(n_ranks, stages_per_rank, replicas)
        check_forwards(len(stage_ranks) * n_microbatches)
        stages: list[list[int]] = [[] for _ in range(n_ranks)]
        for stage, ranks in enumerate(stage_ranks):
            for rank in ranks:
                stages[rank].append(stage)
        actions = (self._actions(rank, n_ranks, tuple(stages[rank]), stage_ranks, n_microbatches) for rank in range(n_ranks))
        return Schedule(self.name, n_microbatches, stage_ranks, tuple(actions))

    def _actions(
        self, rank: int, n_ranks: int, stages: tuple[int, ...], stage_ranks: Sequence[tuple[int, ...]], n_microbatches: int
    ) -> tuple[Action, ...]:
        """Return the actions of one rank.

        One of n replicas of a stage runs every n-th microbatch. It follows the pattern of a rank in a longer pipeline without replicas,
        at the position (``n_before``, ``n_after``) with the same microbatches in flight.
        """
        replicas = stage_ranks[stages[0]]
        microbatches = range(replicas.index(rank), n_microbatches, len(replicas))
        n_after, n_before = n_ranks - 1 - rank, rank
        if max(map(len, stage_ranks)) > 1:
            in_flight = _in_flight_of_replicas([len(ranks) for ranks in stage_ranks])
            own_in_flight = in_flight[stages[0]] // len(replicas)
            first_in_flight = -(-in_flight[0] // len(replicas))  # rounded up
            n_after, n_before = own_in_flight - 1, first_in_flight - own_in_flight
        actions = numbered(self.pattern(Rank(n_ranks, stages, len(microbatches), n_before, n_after)), len(microbatches))
        if len(replicas) == 1:
            return actions
        return tuple(action._replace(microbatch=microbatches[action.microbatch]) for action in actions)


def _in_flight_of_replicas(replicas: Sequence[int]) -> list[int]:
    """Return for each stage the microbatches in flight, on all its replicas: each has one more than its part of the next stage's.

    With fewer, a replica would wait for the backward of an earlier microbatch before it starts a forward that the next stage needs.
    """
    in_flight: list[int] = []
    for count in reversed(replicas):
        per_replica = -(-in_flight[0] // count) + 1 if in_flight else 1  # the division rounds up
        in_flight.insert(0, count * per_replica)
    return in_flight


MOST_FORWARDS = 2**18
"""The most forwards (stages times microbatches) in a step: programs and clocks have an action for each, and more would take minutes."""


def check_forwards(n_forwards: int) -> None:
    """Raise ConfigError for a step of more forwards than ``MOST_FORWARDS``."""
    if n_forwards > MOST_FORWARDS:
        raise ConfigError(
            f"a step of {n_forwards} forwards (stages times microbatches): there may be {MOST_FORWARDS} at most",
            remedy="pass fewer microbatches, or fewer stages",
        )


def _check_positive(what: str, number: int) -> None:
    if number < 1:
        raise ConfigError(f"a pipeline cannot have {number} {what}", remedy="pass 1 or more")


_FREES = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


def peak_in_flight(schedule: Schedule, ends: Collection[ActionKind] = _FREES, *, later: bool = False) -> tuple[int, ...]:
    """Return for each stage the most microbatches in flight on any one of its ranks: from their forward to an action of kind ``ends``.

    Args:
        ends: by default the actions that free activations.
        later: count only after the first end of the stage, when gradients are in memory too.
    """
    peak = [0] * schedule.n_stages
    for actions in schedule.actions:
        in_flight = [0] * schedule.n_stages
        has_ended = [False] * schedule.n_stages
        for action in actions:
            stage = action.stage
            if action.kind is ActionKind.FORWARD:
                in_flight[stage] += 1
            if has_ended[stage] or not later:
                peak[stage] = max(peak[stage], in_flight[stage])
            if action.kind in ends:
                in_flight[stage] -= 1
                has_ended[stage] = True
    return tuple(peak)


class Awaiting(NamedTuple):
    """For each stage, the most microbatches in flight while the message for its next action is received; 0: it receives none then.

    Receives are posted one action ahead, so their buffers are in memory while the action before them runs.

    Attributes:
        forward, later_forward: the next action is a forward: before the stage has gradients, and after.
        backward, later_backward: the next action is a backward, or an input half.
    """

    forward: tuple[int, ...]
    later_forward: tuple[int, ...]
    backward: tuple[int, ...]
    later_backward: tuple[int, ...]


def in_flight_while_awaiting(schedule: Schedule) -> Awaiting:
    """Return the microbatches in flight while messages are received; actions that follow one of another stage are not counted.

    >>> from partitioner.schedules.catalog import make_schedule
    >>> in_flight_while_awaiting(make_schedule("1F1B", 2, 3))  # of stage 0: F0 F1 B0 F2 B1 B2
    Awaiting(forward=(2, 1), later_forward=(0, 1), backward=(2, 1), later_backward=(2, 1))
    """
    peaks = {phase: [0] * schedule.n_stages for phase in Awaiting._fields}
    for actions in schedule.actions:
        in_flight, has_gradients = [0] * schedule.n_stages, [False] * schedule.n_stages
        for action, following in itertools.pairwise(actions):
            stage = action.stage
            in_flight[stage] += action.kind is ActionKind.FORWARD
            if following.stage == stage and following.kind is not ActionKind.BACKWARD_WEIGHT:
                is_forward = following.kind is ActionKind.FORWARD
                phase = ("later_" if has_gradients[stage] else "") + ("forward" if is_forward else "backward")
                peaks[phase][stage] = max(peaks[phase][stage], in_flight[stage])
            if action.kind in _FREES:
                in_flight[stage] -= 1
                has_gradients[stage] = True
    return Awaiting(**{phase: tuple(counts) for phase, counts in peaks.items()})
