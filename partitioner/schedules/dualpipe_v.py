"""DualPipeV: two stages a rank on a V; forwards of one run beside backwards of the other, so that each can hide the other's communication.

DualPipe of DeepSeek-AI 2024 sends microbatches from both ends of 2R stages and keeps two copies of the parameters; cut in half at the turn,
as Sea AI Lab proposed (huggingface.co/blog/ufotalent/cut-in-half), the same order needs R ranks and one copy. Stages r and 2R-1-r are on
rank r. Backwards are split only where the pipeline fills and drains.

    >>> from partitioner.schedules.clocks.unit_time import draw
    >>> print(draw(DUALPIPE_V.build(2, 4)))
    rank 0 |0F0|0F1|0F2|3F0|3I0|3W0|3F1|0F3|3B1    |3F2|0B0    |3B2    |3F3|...|0B1    |3B3    |0I2|0W2|0I3|0W3|
    rank 1 |...|1F0|2F0|1F1|2F1|1F2|2B0    |2F2|1B0    |1F3|2B1    |2F3|1B1    |2B2    |1B2    |2I3|1I3|2W3|1W3|

With m microbatches on R ranks, a rank holds at most min(2m, 2R+1) activations of half-size stages. For m >= 2R and F = I >= W each rank
is idle for (R-1)(F+I-W). DeepSeek's table says (PP/2-1)(F&B + B - 3W), where PP = 2R, B = I+W, and F&B is the time of a forward and
a backward that run as one, so that the forward's result leaves only when both are done: with F&B = F+B this is (R-1) I more. A step with
fewer microbatches is one of 2R without the missing ones.
"""

from __future__ import annotations

from partitioner.schedules.kind import ScheduleKind
from partitioner.schedules.pattern import Move, Rank, on, v_shaped


def dualpipe_v(rank: Rank) -> list[Move]:
    """Alternate forwards of one stage with backwards of the other; only the first and the last backwards are split."""
    down, up = rank.stages
    n_microbatches = max(rank.n_microbatches, 2 * rank.n_ranks)
    fill = on(down, "F") * (2 * rank.n_after)
    fill += (on(down, "F") + on(up, "F")) * (rank.n_before + 1)
    fill += on(up, "IWF") * rank.n_after
    steady = (on(down, "F") + on(up, "BF") + on(down, "B")) * (n_microbatches - 2 * rank.n_ranks + rank.n_before + 1)
    steady += (on(up, "BF") + on(down, "B")) * rank.n_after
    return fill + steady + _drain(rank)


def _drain(rank: Rank) -> list[Move]:
    """Return the backwards after the last forward: whole B, the early I, then W and late I alternately, then the remaining W."""
    down, up = rank.stages
    stages = [up, down] * (rank.n_before + 1) + [down] * rank.n_after
    whole, split = stages[: rank.n_before + 1], stages[rank.n_before + 1 :]
    early_inputs, late_inputs = split[: rank.n_before + 1], split[rank.n_before + 1 :]
    moves = [move for stage in whole for move in on(stage, "B")]
    moves += [move for stage in early_inputs for move in on(stage, "I")]
    for weight_stage, input_stage in zip(split, late_inputs, strict=False):
        moves += on(weight_stage, "W") + on(input_stage, "I")
    return moves + [move for stage in split[len(late_inputs) :] for move in on(stage, "W")]


DUALPIPE_V = ScheduleKind(
    name="DualPipeV",
    source="DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv:2412.19437: DualPipe, cut in half to a V",
    pattern=dualpipe_v,
    placement=v_shaped,
    default_stages_per_rank=2,
    any_stages_per_rank=False,
    splits_backward=True,
    forwards_ahead=lambda n_ranks, rank: 2 * (n_ranks - 1 - rank) + 1,
    idle=0.1,
)
"""Two stages a rank on a V, backwards split where the pipeline fills and drains."""
