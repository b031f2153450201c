"""What is known about a schedule before ranks and microbatches are chosen, and the schedule when they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from partitioner.schedules.in_flight import peak_in_flight
from partitioner.schedules.pattern import Move, Rank, numbered
from passes.ir.errors import ConfigError
from passes.ir.schedule import Schedule

__all__ = ["ScheduleKind"]


@dataclass(frozen=True)
class ScheduleKind:
    """One of the known schedules.

    Attributes:
        name: as users write it: ``"1F1B"``.
        source: the paper that it comes from.
        pattern: what one rank does, in order.
        placement: of (n_ranks, stages_per_rank), for each stage its rank.
        default_stages_per_rank: stages a rank where nobody says.
        any_stages_per_rank: whether other numbers than the default are possible.
        splits_backward: whether backwards may be done in two halves, so that the stages' programs need both.
    """

    name: str
    source: str
    pattern: Callable[[Rank], list[Move]]
    placement: Callable[[int, int], tuple[int, ...]]
    default_stages_per_rank: int
    any_stages_per_rank: bool
    splits_backward: bool

    def allows(self, stages_per_rank: int) -> bool:
        """Whether each rank can run this many stages."""
        return stages_per_rank >= 1 if self.any_stages_per_rank else stages_per_rank == self.default_stages_per_rank

    def stage_rank(self, n_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
        """For each stage, the rank that runs it. Raises ConfigError as ``build`` does."""
        _check_positive("pipeline ranks", n_ranks)
        if stages_per_rank is None:
            stages_per_rank = self.default_stages_per_rank
        if not self.allows(stages_per_rank):
            wanted = "at least 1" if self.any_stages_per_rank else f"exactly {self.default_stages_per_rank}"
            raise ConfigError(
                f"schedule {self.name} cannot run {stages_per_rank} stages on each device: it runs {wanted}",
                remedy=f"pass stages_per_device={self.default_stages_per_rank}, leave it out, or choose another schedule",
            )
        return self.placement(n_ranks, stages_per_rank)

    def build(self, n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
        """The schedule of a step, for any positive number of ranks and microbatches.

        Raises:
            ConfigError: a number is not positive, or the schedule does not allow this many stages a rank.
        """
        _check_positive("microbatches", n_microbatches)
        stage_rank = self.stage_rank(n_ranks, stages_per_rank)
        stages: list[list[int]] = [[] for _ in range(n_ranks)]
        for stage, rank in enumerate(stage_rank):
            stages[rank].append(stage)
        patterns = (self.pattern(Rank(rank, n_ranks, tuple(stages[rank]), n_microbatches)) for rank in range(n_ranks))
        return Schedule(self.name, n_microbatches, stage_rank, tuple(numbered(pattern, n_microbatches) for pattern in patterns))

    def in_flight(self, n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
        """For each stage, the most microbatches whose activations it holds at once. Raises ConfigError as ``build`` does."""
        return peak_in_flight(self.build(n_ranks, n_microbatches, stages_per_rank))


def _check_positive(what: str, number: int) -> None:
    if number < 1:
        raise ConfigError(f"a pipeline cannot have {number} {what}", remedy="pass 1 or more")
