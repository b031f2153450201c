"""Lower bounds of a step with a given stage, whatever the other stages are, by paths through the schedule.

Stage s runs M microbatches, f seconds forward and b seconds backward each. The units before it, with their messages, take ``in`` seconds
forward and ``out`` seconds backward; ``behind`` seconds pass from the end of its forward to the start of the same microbatch's backward.

    A    in    F F F F ... B B B B    out          in + M (f + b) + out                            all actions of the stage
    C    in    F ~ B  F B  F B  B     out          in + behind + (1 + n) f + M b + out             the first microbatch to the end and back
    E    in    F F B  F B  F ~ B      out          in + behind + M f + (1 + n) b + out             the last microbatch
    D    in    F ~ B  F B  F ~ B      out          in + 2 behind + (1 + n) (f + b) + out           both
    Z    in    F ~ B F ~ B F ~ B      out          in + q behind + (q + r) (f + b) + out           every K-th microbatch

The stage is never more than K microbatches ahead: ``n = M - K`` forwards come after its first backward, and as many backwards before its
last forward; ``q = ceil(M / K)`` microbatches go to the end and back one after the other, which leaves ``r = M - 1 - (q - 1) K``. If all
forwards precede all backwards, and the last stage is on one rank, one path has them all: ``in + M (f + b) + behind + out``. If backwards
are split, only their input halves precede other stages' actions, and a path may end with the stage's last weight half instead of ``out``.
For a replicated stage the first rank counts: M is the number of its own microbatches.

A step is at least as long as the longest of these paths over all stages. That is a maximum of one value per stage, so the dynamic
programmes of ``stage_tables`` find the cuts for which it is least. For 1F1B with stages of t seconds it is the step itself: (M + R - 1) t.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from partitioner.planner.solvers.run_tables import RunCosts, Runs
from partitioner.planner.solvers.stage_memory import Floats, Integers
from partitioner.planner.solvers.stage_problem import StageProblem
from partitioner.schedules.clocks.order import Order


class PathCosts(RunCosts):
    """Lower bounds of a step by its stages: ``cost`` is the longest path through a run instead of the run's own seconds.

    Args:
        halves: (3, N, K) seconds of each unit's forward, and of the input and weight halves of its backward.
    """

    def __init__(self, problem: StageProblem, halves: Floats, order: Order) -> None:
        super().__init__(problem)
        self._order = order
        self._counts = -(-order.n_microbatches // problem.n_replicas)[:, None, None]
        self._ahead = np.array(order.ahead)[:, None, None]
        self._held = np.array(order.in_flight)[:, None, None]
        # Prefix sums: (2, K, N + 1) backward halves; (N + 1,) least seconds of units; (S,) least seconds of messages over links.
        self._backward_sums = np.cumsum(np.pad(halves[1:], ((0, 0), (1, 0), (0, 0))), axis=1).transpose(0, 2, 1)
        least = np.concatenate([np.zeros((3, 1)), np.cumsum(halves.min(axis=2), axis=1)], axis=1)
        self._forward = least[0]
        self._back = least[1] if order.splits else least[1] + least[2]
        self._sends = np.concatenate([[0.0], np.cumsum(_least_message_seconds(problem, forward=True))])
        self._sends_back = np.concatenate([[0.0], np.cumsum(_least_message_seconds(problem, forward=False))])
        self.least_bottleneck *= order.n_microbatches
        self.most *= order.n_microbatches

    def longest(self, bound: float) -> Integers:
        """Return (N,) the units of the longest run from each unit in steps of at most ``bound`` seconds."""
        return super().longest(bound / self._order.n_microbatches)

    def stages(self, runs: Runs, bound: float) -> slice:
        """Return the stages that can start in a block in steps of at most ``bound`` seconds."""
        return super().stages(runs, bound / self._order.n_microbatches)

    def cost(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) seconds of the longest path, named as in the table above."""
        order, places = self._order, np.arange(stages.start, stages.stop)[:, None, None]
        time, own_input, own_weight = self._own_seconds(runs, stages)
        own_forward = time - own_input - own_weight
        enter = self._forward[runs.starts, None] + self._sends[places]
        leave = self._back[runs.starts, None] + self._sends_back[np.maximum(places - 1, 0)] + self.send_back_seconds(runs, stages)
        later_units = (self._forward[-1] + self._back[-1]) - (self._forward + self._back)[runs.behind]
        later_sends = self._sends[-1] - self._sends[np.minimum(places + 1, len(self._sends) - 1)]
        later_messages = later_sends + self._sends_back[-1] - self._sends_back[places]
        behind = later_units + later_messages + self.send_seconds(runs, stages)
        count = self._counts[stages]
        if order.fills and self._n_replicas[-1] == 1:
            return np.asarray(enter + count * time + behind + leave)
        after = np.maximum(count - self._ahead[stages], 0)
        if not order.splits:
            own_back = own_input + own_weight
            path_c = behind + (1 + after) * own_forward + count * own_back
            path_e = behind + count * own_forward + (1 + after) * own_back
            paths_d_z = self._round_trips(stages, time, time, behind, after)
            return np.asarray(enter + leave + _longest(count * time, path_c, path_e, paths_d_z))
        done = np.maximum(count - self._held[stages], 0)  # weight halves before the last forward
        path_a = count * (own_forward + own_input) + done * own_weight
        path_c = behind + (1 + after) * own_forward + count * own_input + done * own_weight
        path_e = behind + count * own_forward + (1 + after) * own_input + done * own_weight
        path_d = np.where(after > 0, 2 * behind + (1 + after) * (own_forward + own_input) + done * own_weight, 0.0)
        paths_d_z = self._round_trips(stages, time, own_forward + own_input, behind, done)
        with_weights = np.maximum(count * time, behind + (1 + after) * own_forward + count * (own_input + own_weight))
        with_exit = _longest(path_a, path_c, path_e, path_d, paths_d_z) + np.maximum(leave, own_weight)
        return np.asarray(enter + np.maximum(with_weights, with_exit))

    def sends_longer(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) seconds by which a run's messages lengthen all paths of later stages, which assume the least."""
        least, least_back = np.diff(self._sends, append=np.inf), np.diff(self._sends_back, prepend=-np.inf)  # no links beyond the ends
        longer = self.send_seconds(runs, stages) - least[stages, None, None]
        if not self._order.splits:
            back = self.send_back_seconds(runs, stages) - least_back[stages, None, None]
            longer = longer + np.where(np.isfinite(back), back, 0.0)
        return np.maximum(longer, 0.0)

    def messages(self, runs: Runs, stages: slice) -> Floats:
        """Return (stages, C, width) seconds of a run's messages, forward and back."""
        return self.send_seconds(runs, stages) + self.send_back_seconds(runs, stages)

    def through(self, stage: int, sent: Floats) -> Floats:
        """Return a lower bound of one microbatch through all stages and back; ``sent``: message seconds of the stages up to this one."""
        links = len(self._sends) - 1
        later_sends = self._sends[links] - self._sends[min(stage + 1, links)]
        later_messages = later_sends + self._sends_back[links] - self._sends_back[min(stage, links)]
        return np.asarray(self._forward[-1] + self._back[-1] + later_messages + sent)

    def _own_seconds(self, runs: Runs, stages: slice) -> tuple[Floats, Floats, Floats]:
        """Return (stages, C, width) seconds of a run: the whole, the input half of its backward, and the weight half."""
        kinds = self._kind[stages]
        inputs, weights = (sums[kinds][:, runs.behind] - sums[kinds][:, runs.starts, None] for sums in self._backward_sums)
        return runs.time[kinds], inputs + self._of_stages(runs.gradient_gathers, stages), weights

    def _round_trips(self, stages: slice, time: Floats, last: Floats, behind: Floats, after: Integers) -> Floats:
        """Return the longer of the paths D and Z without ``in`` and ``out``; 0 where n (``after``) is 0.

        ``time`` are the stage's seconds for one microbatch, ``last`` those on the path for the last one.
        """
        ahead = self._held[stages] if self._order.splits else self._ahead[stages]
        own = self._counts[stages]
        trips = -(-own // ahead)  # q
        others = own - 1 - (trips - 1) * ahead  # r
        path_d = 2 * behind + after * time + last
        path_z = trips * behind + (trips - 1 + others) * time + last
        return np.where(after > 0, np.maximum(path_d, path_z), 0.0)


def _longest(*paths: Floats) -> Floats:
    """Return the elementwise maximum; one maximum over a stack of them would copy them first."""
    return reduce(np.maximum, paths)


def _least_message_seconds(problem: StageProblem, *, forward: bool) -> Floats:
    """Return (S - 1,) least seconds over each link for a microbatch: values of the unit before a cut, or gradients of the one after."""
    n, uses = problem.n_units, problem.units.leaving if forward else problem.units.entering
    if n < 2 or not len(problem.latency):
        return np.zeros(len(problem.latency))
    unit = uses.before if forward else uses.unit
    messages = np.stack([np.bincount(unit, amounts, n) for amounts in (np.ones(len(unit)), uses.amount)])
    at_cuts = messages[:, : n - 1] if forward else messages[:, 1:]
    seconds: Floats = (np.outer(problem.latency, at_cuts[0]) + np.outer(problem.seconds_per_byte, at_cuts[1])).min(axis=1)
    return seconds
