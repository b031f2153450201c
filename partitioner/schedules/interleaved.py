"""Interleaved 1F1B: each rank runs v thin stages instead of a thick one, so that the pipeline fills v times sooner (Narayanan et al. 2021).

Stage s is on rank s mod R. Microbatches go in groups of R: a group runs through all stages of a rank before the next group enters.

    >>> from partitioner.schedules.clocks.unit_time import draw
    >>> print(draw(INTERLEAVED.build(2, 4)))
    rank 0 |0F0|0F1|2F0|2F1|0F2|...|2B0    |0F3|2B1    |2F2|0B0    |2F3|0B1    |...|2B2    |...|2B3    |0B2    |0B3    |
    rank 1 |...|1F0|1F1|3F0|3B0    |3F1|3B1    |1F2|1B0    |1F3|1B1    |3F2|3B2    |3F3|3B3    |1B2    |1B3    |

With v >= 2 stages a rank and m microbatches on R ranks, rank r holds min(v m, 2 (R-1-r) + (v-1) R + 1) activations of thin stages, at
most; with one stage a rank the schedule is 1F1B. Where R divides m the ranks are idle for (R-1)/(v m + R-1) of the step. The paper asks
that R divides m. Other numbers run the next multiple of R without the missing microbatches: the memory stays, the step takes up to as long
as the multiple's. (torch.distributed.pipelining makes the groups larger instead, where groups of equal size are possible: a shorter
step for more memory than the paper's bound.)
"""

from __future__ import annotations

from partitioner.schedules.kind import ScheduleKind
from partitioner.schedules.one_f_one_b import alternate, one_f_one_b
from partitioner.schedules.pattern import Move, Rank, looped, on


def interleaved(rank: Rank) -> list[Move]:
    """Run microbatches in groups of R: each group passes the rank's stages one after the other, backwards in the opposite order.

    More forwards than in 1F1B come first, because a group passes all stages of a rank before its backwards begin. One stage a rank is 1F1B.
    """
    if len(rank.stages) == 1:
        return one_f_one_b(rank)
    n_groups = -(-rank.n_microbatches // rank.n_ranks)
    forwards = [on(stage, "F") for stage in rank.stages for _ in range(rank.n_ranks)]
    backwards = [on(stage, "B") for stage in reversed(rank.stages) for _ in range(rank.n_ranks)]
    n_ahead = (len(rank.stages) - 1) * rank.n_ranks + 2 * rank.n_after
    return alternate(forwards * n_groups, backwards * n_groups, n_ahead)


INTERLEAVED = ScheduleKind(
    name="Interleaved1F1B",
    source="Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv:2104.04473",
    pattern=interleaved,
    placement=looped,
    default_stages_per_rank=2,
    any_stages_per_rank=True,
    splits_backward=False,
    alternates=True,
    forwards_ahead=lambda n_ranks, _: n_ranks,
)
"""Any number of stages a rank in a loop over the ranks, whole backwards."""
