"""How long a step takes at least that has some run of units as a stage: by paths through its schedule, whatever the other stages are.

On stage s, of M microbatches, in front of which the units take ``in`` seconds forward and ``out`` backward, messages with them, and from
which it takes ``behind`` seconds from the end of a forward to the start of the backward of the same microbatch, with f, b the stage's own:

    A    in    F F F F ... B B B B    out          in + M (f + b) + out                            all that the rank does
    C    in    F ~ B  F B  F B  B     out          in + behind + (1 + n) f + M b + out             the first one to the end and back
    E    in    F F B  F B  F ~ B      out          in + behind + M f + (1 + n) b + out             the last one
    D    in    F ~ B  F B  F ~ B      out          in + 2 behind + (1 + n) (f + b) + out           both
    Z    in    F ~ B F ~ B F ~ B      out          in + q behind + (q + r) (f + b) + out           every K-th

The stage is never more than K microbatches ahead: ``n = M - K`` forwards come after its first backward, and as many backwards in front of
its last forward; ``q = ceil(M / K)`` may go to the end and back one after the other, which leaves ``r = M - 1 - (q - 1) K``. Where all
forwards come in front of all backwards, and the last stage is on one rank, one path has them all: ``in + M (f + b) + behind + out``. Where
backwards are split, only their input halves go on to other stages, and a path may end with the stage's last weight half instead of ``out``.
Of a replicated stage the first rank counts: M is the number of its own microbatches.

No step is shorter than the longest of these over its stages. That is a maximum over runs, each with what lies in front of it and behind,
so the dynamic programmes of ``stage_tables`` find the cuts for which it is least. For 1F1B whose stages take t each it is the step itself:
(M + R - 1) t.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts, Runs
from partitioner.planner.solvers.stage_problem import Floats, Integers, StageProblem
from partitioner.schedules.clocks.order import Order

__all__ = ["PathCosts"]


class PathCosts(RunCosts):
    """Seconds of a step that has a run as one of its stages, at least.

    Args:
        halves: (3, N, K) seconds of the forward of each unit and of the input and weight halves of its backward.
    """

    def __init__(self, problem: StageProblem, halves: Floats, order: Order) -> None:
        super().__init__(problem)
        self._order = order
        self._counts = -(-order.n_microbatches // problem.n_replicas)[:, None, None]
        self._ahead = np.array(order.ahead)[:, None, None]
        self._held = np.array(order.in_flight)[:, None, None]
        self._sums = np.cumsum(np.pad(halves[1:], ((0, 0), (1, 0), (0, 0))), axis=1).transpose(0, 2, 1)
        least = np.concatenate([np.zeros((3, 1)), np.cumsum(halves.min(axis=2), axis=1)], axis=1)
        self._forward = least[0]
        self._back = least[1] if order.splits else least[1] + least[2]
        self._there = np.concatenate([[0.0], np.cumsum(_least_messages(problem, forward=True))])
        self._here = np.concatenate([[0.0], np.cumsum(_least_messages(problem, forward=False))])
        self.least_bottleneck *= order.n_microbatches
        self.most *= order.n_microbatches

    def longest(self, bound: float) -> Integers:
        """For each unit, how many units a run from there can have if the step takes no longer than the bound."""
        return super().longest(bound / self._order.n_microbatches)

    def stages(self, runs: Runs, bound: float) -> slice:
        """The stages that can start in a block if the step takes no longer than the bound."""
        return super().stages(runs, bound / self._order.n_microbatches)

    def cost(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds of the longest of the paths."""
        order, places = self._order, np.arange(stages.start, stages.stop)[:, None, None]
        time, own_i, own_w = self._own(runs, stages)
        own_f = time - own_i - own_w
        enter = self._forward[runs.starts, None] + self._there[places]
        leave = self._back[runs.starts, None] + self._here[np.maximum(places - 1, 0)] + self.sending_back(runs, stages)
        turn = (self._forward[-1] + self._back[-1]) - (self._forward + self._back)[runs.behind]
        rest = self._there[-1] - self._there[np.minimum(places + 1, len(self._there) - 1)] + self._here[-1] - self._here[places]
        behind = turn + rest + self.sending(runs, stages)
        count = self._counts[stages]
        if order.fills and self._n_replicas[-1] == 1:
            return np.asarray(enter + count * time + behind + leave)
        after = np.maximum(count - self._ahead[stages], 0)
        if not order.splits:
            own_b = own_i + own_w
            first = behind + (1 + after) * own_f + count * own_b
            last = behind + count * own_f + (1 + after) * own_b
            return np.asarray(enter + leave + _longest(count * time, first, last, self._trips(stages, time, time, behind, after)))
        done = np.maximum(count - self._held[stages], 0)
        first = behind + (1 + after) * own_f + count * own_i + done * own_w
        last = behind + count * own_f + (1 + after) * own_i + done * own_w
        both = np.where(after > 0, 2 * behind + (1 + after) * (own_f + own_i) + done * own_w, 0.0)
        every = self._trips(stages, time, own_f + own_i, behind, done)
        ends_alone = np.maximum(count * time, behind + (1 + after) * own_f + count * (own_i + own_w))
        ends_with = _longest(count * (own_f + own_i) + done * own_w, first, last, both, every)
        return np.asarray(enter + np.maximum(ends_alone, ends_with + np.maximum(leave, own_w)))

    def sends_longer(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds that every path of a later stage is longer by, because of what a run of this stage sends."""
        there, here = np.diff(self._there, append=np.inf), np.diff(self._here, prepend=-np.inf)  # nothing beyond the ends
        longer = self.sending(runs, stages) - there[stages, None, None]
        if not self._order.splits:
            back = self.sending_back(runs, stages) - here[stages, None, None]
            longer = longer + np.where(np.isfinite(back), back, 0.0)
        return np.maximum(longer, 0.0)

    def messages(self, runs: Runs, stages: slice) -> Floats:
        """(stages, C, width) seconds that what a run of this stage sends is on its way, forward and back."""
        return self.sending(runs, stages) + self.sending_back(runs, stages)

    def through(self, stage: int, sent: Floats) -> Floats:
        """Seconds that one microbatch takes to the end and back.

        Args:
            sent: seconds of the messages of the stages up to this one; all others are taken to send the least.
        """
        links = len(self._there) - 1
        rest = self._there[links] - self._there[min(stage + 1, links)] + self._here[links] - self._here[min(stage, links)]
        return np.asarray(self._forward[-1] + self._back[-1] + rest + sent)

    def _own(self, runs: Runs, stages: slice) -> tuple[Floats, Floats, Floats]:
        """(stages, C, width) seconds of a run: of all of it, and of the input and weight halves of its backward."""
        kinds = self._kind[stages]
        inputs, weights = (sums[kinds][:, runs.behind] - sums[kinds][:, runs.starts, None] for sums in self._sums)
        return runs.time[kinds], inputs + (runs.parted if len(runs.parted) == 1 else runs.parted[kinds]), weights

    def _trips(self, stages: slice, time: Floats, last: Floats, behind: Floats, after: Integers) -> Floats:
        """Paths D and Z; ``last``: what of the stage's own time is sure to be on the path of the last microbatch."""
        ahead = self._held[stages] if self._order.splits else self._ahead[stages]
        own = self._counts[stages]
        count = -(-own // ahead)
        rest = own - 1 - (count - 1) * ahead
        both = 2 * behind + after * time + last
        every = count * behind + (count - 1 + rest) * time + last
        return np.where(after > 0, np.maximum(both, every), 0.0)


def _longest(*paths: Floats) -> Floats:
    """The longest of each; in place of one maximum over a stack of them, which would be copied first."""
    return reduce(np.maximum, paths)


def _least_messages(problem: StageProblem, *, forward: bool) -> Floats:
    """(S - 1,) seconds that one microbatch takes over each link at least: what the unit in front of a cut, or behind it, sends alone."""
    n, found = problem.n_units, problem.units.leaving if forward else problem.units.entering
    if n < 2 or not len(problem.latency):
        return np.zeros(len(problem.latency))
    unit = found.before if forward else found.unit
    messages = np.stack([np.bincount(unit, amounts, n) for amounts in (np.ones(len(unit)), found.amount)])
    at_cuts = messages[:, : n - 1] if forward else messages[:, 1:]
    seconds: Floats = (np.outer(problem.latency, at_cuts[0]) + np.outer(problem.seconds_per_byte, at_cuts[1])).min(axis=1)
    return seconds
