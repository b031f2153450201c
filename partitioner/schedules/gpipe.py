"""GPipe: all forwards, then all backwards (Huang et al. 2019).

    >>> from partitioner.schedules.clocks.unit_time import draw
    >>> print(draw(GPIPE.build(3, 4)))
    rank 0 |0F0|0F1|0F2|0F3|.......................|0B0    |0B1    |0B2    |0B3    |
    rank 1 |...|1F0|1F1|1F2|1F3|...........|1B0    |1B1    |1B2    |1B3    |
    rank 2 |.......|2F0|2F1|2F2|2F3|2B0    |2B1    |2B2    |2B3    |

With m microbatches on R ranks, every stage holds m activations, and the ranks are idle for (R-1)/(m+R-1) of the step.
"""

from __future__ import annotations

from partitioner.schedules.kind import InFlight, ScheduleKind
from partitioner.schedules.pattern import Move, Rank, looped, on


def gpipe(rank: Rank) -> list[Move]:
    """Run all forwards, then all backwards."""
    (stage,) = rank.stages
    return on(stage, "F") * rank.n_microbatches + on(stage, "B") * rank.n_microbatches


def _in_flight(n_ranks: int, n_microbatches: int) -> InFlight:
    all_microbatches = (n_microbatches,) * n_ranks
    return InFlight(ahead=all_microbatches, saved=all_microbatches, weights_behind=(0,) * n_ranks)


GPIPE = ScheduleKind(
    name="GPipe",
    source="Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, arXiv:1811.06965",
    pattern=gpipe,
    placement=looped,
    default_stages_per_rank=1,
    any_stages_per_rank=False,
    splits_backward=False,
    forwards_first=True,
    in_flight_alone=_in_flight,
    idle=0.05,
)
"""One stage a rank, whole backwards."""
