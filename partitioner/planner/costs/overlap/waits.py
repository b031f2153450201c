"""Seconds that calls wait for collectives which run while ranks compute: by the clock of the simulator, one rank's microbatch.

forward     links        gather w1 ====  gather w2 ====     gather w3 =====
            computing                   call 1 ########     call 2 ###     call 3 #######
                                                                      |---|  call 3 waits: its gather began with call 2

backward    links        gather w2 ====  scatter dw3 ====  gather w1 ====  scatter dw2 ====
            computing    call 3 ########  call 2 ##########               call 1 ########
                                                                 |-------|

The order is that of programs (``overlap_collectives`` and ``coalesce_collectives`` in ``passes.emit``): parameters are gathered one message
ahead of their use; a scatter or a sum starts when its last gradient is there, and at most two are under way; a gradient that is scattered
over one mesh dimension is summed over another one after that; small parameters share messages. A value leaves once it is made in a forward,
and is waited for by its first reader. A value that the backward gathers again is waited for by its last reader; a shard that is computed
again leaves after that, a saved one ahead of its use, but for the first of a stage. Messages of one mesh dimension follow each other, those
of several share links. A matrix product computes each gradient by a kernel of its own, and messages run beside the second:

    y = x w       dw | dx      dw is scattered while dx is computed; w is gathered for dx
    y = x w + b   dx | dw      dx is reduced while dw is computed

A stage of a pipeline computes forwards after forwards: each waits for its first gather, which a backward before it would hide. A backward
in two halves scatters in the second one, where less is computed beside its messages:

    whole         links        scatter dw3 ====  scatter dw2 ====  scatter dw1 ====
                  computing    3: dx dw ######  2: dx dw ######  1: dx dw ######

    in halves     links                                 scatter dw3 ====  scatter dw2 ====  scatter dw1 ====
                  computing    dx 3 ### dx 2 ### dx 1 ### dw 3 ### dw 2 ### dw 1 ### |---------------------|

A folded model has a repeated block once: it is run three times or more, so that the waits of its copies are those of a long model; for a
mesh that the user names, as often as it repeats.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from partitioner.planner.costs.overlap.messages import (
    Activation,
    GradientOfCall,
    Message,
    Repeat,
    Stored,
    backward_order,
    calls_in_order,
    gathers_of,
    reductions_of,
    regathers_of,
    stages_of_calls,
)
from partitioner.planner.costs.overlap.program import Program
from partitioner.planner.solvers.stage_memory import Floats

FirstHalf: TypeAlias = Literal["", "activation", "weight"]
"""``OperationCost.first_half``."""


_Gathers: TypeAlias = dict[int, list[Message]]
"""Gathers by the call of a pass that waits for them."""


class CallSeconds(NamedTuple):
    """Seconds of P calls, (P,) each.

    Attributes:
        forward: of the forward.
        of_input, of_weight: of the halves of the backward.
        casting: of casts of gradients of parameters to the type in which ranks sum them.
        again: of the recomputation.
    """

    forward: Sequence[float]
    of_input: Sequence[float]
    of_weight: Sequence[float]
    casting: Sequence[float]
    again: Sequence[float]


def waiting_for_messages(
    stored: Sequence[Stored],
    activations: Sequence[Activation],
    sums: Sequence[GradientOfCall],
    seconds: CallSeconds,
    first: Sequence[FirstHalf],
    needed: Sequence[int],
    repeat: Repeat | None,
    *,
    n_microbatches: int,
    n_stages: int = 1,
    is_split: bool = False,
) -> Floats:
    """Return (3, P) seconds that calls wait for collectives, in the forward, and in the input and weight halves of the backward.

    Args:
        sums: gradients that are summed while the backward computes.
        first: the half of each call's backward that is computed first.
        needed: for each call, the place of the call before whose backward it is computed again.
        repeat: the repeated block; None: the model is not folded.
        n_microbatches: of a step; the second stands for all that follow, and in a pipeline for the first, too.
        n_stages: of the pipeline; in one of several, forwards follow forwards, and backwards backwards. In one stage each backward follows
            its own forward.
        is_split: whether all input halves come before all weight halves; else the waits of both count in the first.
    """
    order, program, in_pipeline = list(calls_in_order(len(seconds.forward), repeat)), Program(activations), n_stages > 1
    backwards = list(backward_order(order, seconds.again, needed))
    weights = (1.0,) if n_microbatches == 1 else (0.0, 1.0) if in_pipeline else (1 / n_microbatches, 1 - 1 / n_microbatches)
    ahead, again = _gathers_of_passes(stored, order, [index for index, _ in backwards], len(weights), are_chained=not in_pipeline)
    weight_halves = {index for index, (place, _) in enumerate(order) if is_split and seconds.of_weight[place]}
    stage_of = stages_of_calls(order, [sum(each) for each in zip(*seconds, strict=True)], n_stages)

    def forward(number: int) -> None:
        if in_pipeline and number:
            _start_first(program, ahead[number], [seconds.forward[place] for place, _ in order])
        for call, (place, share) in enumerate(order):
            program.begin(place, 0, weights[number] * share)
            program.gather(ahead[number].get(call, ()))
            program.exchange()
            program.compute(seconds.forward[place])
            program.send()

    def backward(number: int) -> None:
        reductions = reductions_of(stored, sums, order, stage_of)
        recomputed, awaited, started = regathers_of(activations, order, backwards, stage_of, weight_halves)
        late = list[tuple[int, float, int]]()
        for call, (index, is_recomputation) in enumerate(backwards):
            place, share = order[index][0], weights[number] * order[index][1]
            messages = again[number].get(call, ())
            program.begin(place, 1, share)
            if is_recomputation:
                program.gather((*messages, *recomputed.get(index, ())))
                program.compute(seconds.again[place])
                program.start_all(started.get(index, ()))
            elif is_split:
                program.gather((*messages, *(() if index in weight_halves else awaited.get(index, ()))))
                program.compute(seconds.of_input[place])
                program.exchange()
                late.append((place, share, index))
            else:
                _differentiate(program, place, seconds, first[place], messages, awaited.get(index, ()), reductions.get(index, ()))
        for place, share, index in late:
            program.begin(place, 2, share)
            program.start_all(started.get(index, ()))
            _compute_weights(program, place, seconds, awaited.get(index, ()), reductions.get(index, ()))
        if in_pipeline or number == len(weights) - 1:
            program.finish()

    passes = [(act, number) for act in (forward, backward) for number in range(len(weights))]
    for act, number in passes if in_pipeline else sorted(passes, key=lambda each: each[1]):
        act(number)
    return program.waiting(len(seconds.forward))


def _gathers_of_passes(
    stored: Sequence[Stored], order: Sequence[tuple[int, float]], backwards: Sequence[int], count: int, *, are_chained: bool
) -> tuple[list[_Gathers], list[_Gathers]]:
    """Return the gathers of the forwards and of the backwards of ``count`` microbatches.

    Args:
        backwards: indices in ``order`` of the calls of a backward.
        are_chained: whether the last gather of a microbatch starts the first of the next one.
    """
    ahead, again, chain = list[_Gathers](), list[_Gathers](), list[Message]()
    for _ in range(count):
        ahead.append(gathers_of(stored, order, range(len(order)), chain if are_chained else [], again=False))
        of_backward = list[Message]()
        again.append(gathers_of(stored, order, backwards, of_backward, again=True))
        chain = of_backward or chain
    return ahead, again


def _start_first(program: Program, gathers: Mapping[int, Sequence[Message]], seconds: Sequence[float]) -> None:
    """Append the start of a forward's first gather, and what a stage that ends in the middle of the model computes after its last one.

    Args:
        gathers: by number of the call that waits for them, in order.
        seconds: of the calls.
    """
    if not gathers:
        return
    ends, numbers = list(itertools.accumulate(seconds)), list(gathers)
    middle = bisect.bisect_left(ends, ends[-1] / 2)
    following = bisect.bisect_right(numbers, middle)
    program.begin(0, 0, 0.0)
    program.start(gathers[numbers[0]][0])
    program.compute(sum(seconds[numbers[max(following - 1, 0)] : numbers[following] if following < len(numbers) else len(seconds)]))


def _differentiate(
    program: Program,
    place: int,
    seconds: CallSeconds,
    first: FirstHalf,
    gathers: Sequence[Message],
    regathers: Sequence[Message],
    reductions: Sequence[Message],
) -> None:
    """Append the backward of a call: its halves, each after the messages that it waits for, and the messages that it completes."""
    of_weight, casting = seconds.of_weight[place], seconds.casting[place]
    if first == "weight" and of_weight:
        program.gather(regathers)
        program.compute(of_weight)
        early = () if casting else reductions
        program.reduce_all(early)
        program.gather(gathers)
        program.compute(seconds.of_input[place])
        program.exchange()
        program.compute(casting)
        program.reduce_all(() if early else reductions)
        return

    program.gather(gathers)
    program.gather(() if first == "activation" else regathers)
    program.compute(seconds.of_input[place])
    if first == "activation":
        program.exchange(beside=lambda: _compute_weights(program, place, seconds, regathers, reductions))
    else:
        program.compute(of_weight + casting)
        program.exchange()
        program.reduce_all(reductions)


def _compute_weights(
    program: Program, place: int, seconds: CallSeconds, regathers: Sequence[Message], reductions: Sequence[Message]
) -> None:
    """Append the weight half of a call's backward, and the messages that it completes."""
    program.gather(regathers)
    program.compute(seconds.of_weight[place] + seconds.casting[place])
    program.reduce_all(reductions)
