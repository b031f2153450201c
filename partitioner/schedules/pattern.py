"""A pattern: what one rank does in a step, before its microbatches are numbered; and the placements of stages on ranks.

A pattern is a list of moves. A move says which stage computes and what, not on which microbatch: every stage takes its microbatches
in ascending order, so the k-th forward of a stage is microbatch k, and numbering is counting.

A schedule whose paper asks for a certain number of microbatches is written down for the next number that it does allow, and the
microbatches that do not exist are left out. What is left keeps its order, and microbatches never wait for each other's results: so it runs
without a wait cycle, holds at most as many activations, and ends no later than the full step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from passes.ir.schedule import Action, ActionKind

Move = tuple[int, ActionKind]
"""A stage and what it computes."""


@dataclass(frozen=True)
class Rank:
    """Position of a rank in the pipeline, on which its pattern depends.

    Attributes:
        n_ranks: ranks in the pipeline.
        stages: the stages that the rank runs, ascending.
        n_microbatches: microbatches that it computes in a step.
        n_before: ranks that come before it, nearer to where microbatches enter; for a replicated stage, how many microbatches fewer it has
            in flight than the first stage.
        n_after: ranks that come after it; for a replicated stage, its forwards before its first backward, less one.
    """

    n_ranks: int
    stages: tuple[int, ...]
    n_microbatches: int
    n_before: int
    n_after: int


def on(stage: int, letters: str) -> list[Move]:
    """Return the moves of one stage, written as letters.

    >>> [kind.name for stage, kind in on(2, "FIW")]
    ['FORWARD', 'BACKWARD_INPUT', 'BACKWARD_WEIGHT']
    """
    return [(stage, ActionKind(letter)) for letter in letters]


def numbered(moves: Iterable[Move], n_microbatches: int) -> tuple[Action, ...]:
    """Turn moves into actions: give every move its microbatch, and leave out microbatches from ``n_microbatches`` on.

    A forward takes the stage's next microbatch, a backward (B or I) likewise, and W the oldest I of the stage that has no W yet.

    >>> print(*numbered(on(0, "FFFIIWBW"), 2))
    0F0 0F1 0I0 0I1 0W0 0W1
    """
    n_forwards: dict[int, int] = defaultdict(int)
    n_backwards: dict[int, int] = defaultdict(int)
    awaiting_weight: dict[int, deque[int]] = defaultdict(deque)
    actions = []
    for stage, kind in moves:
        if kind is ActionKind.FORWARD:
            microbatch = n_forwards[stage]
            n_forwards[stage] += 1
        elif kind is ActionKind.BACKWARD_WEIGHT:
            microbatch = awaiting_weight[stage].popleft()
        else:
            microbatch = n_backwards[stage]
            n_backwards[stage] += 1
            if kind is ActionKind.BACKWARD_INPUT:
                awaiting_weight[stage].append(microbatch)
        if microbatch < n_microbatches:
            actions.append(Action(stage, kind, microbatch))
    return tuple(actions)


def looped(n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage: round after round over the ranks.

    >>> looped(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(n_ranks)) * stages_per_rank


def v_shaped(n_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of each stage: down the ranks and up again. Rank r of R runs stages r and 2R-1-r.

    The turn stays on one rank and costs no communication, and the first rank holds the last stage, where the loss is.

    >>> v_shaped(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(n_ranks))
    return tuple(rank for leg in range(stages_per_rank) for rank in (down if leg % 2 == 0 else reversed(down)))
