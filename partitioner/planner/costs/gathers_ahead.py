"""Seconds that calls wait for stored parameters, which are gathered one message ahead.

forward     links        gather w1 ====  gather w2 ====     gather w3 =====
            computing                   call 1 ########     call 2 ###     call 3 #######
                                                                      |---|  call 3 waits: its gather began with call 2

backward    links        gather w2 ====  scatter dw3 ====  gather w1 ====
            computing    call 3 ########  call 2 ##########               call 1 ########
                                                                 |-------|

While calls compute from one reader of a gathered parameter to the next, the links carry the gather for the next one and, in the backward,
the scattered gradient of the one before. What takes longer than the calls is waited for. Processors are busy with a part of every message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partitioner.planner.solvers.stage_problem import Floats

__all__ = ["Message", "waiting_for_gathers"]


class Message(NamedTuple):
    """The collectives of the stored parameters of one call.

    Attributes:
        gather: seconds of gathers for its forward.
        again: of those for its backward.
        scatter: of scatters of gradients.
        host_share: the fraction of these in which processors compute nothing.
    """

    gather: float
    again: float
    scatter: float
    host_share: float

    def __add__(self, other: tuple[object, ...]) -> Message:
        assert isinstance(other, Message)
        return Message(self.gather + other.gather, self.again + other.again, self.scatter + other.scatter, self.host_share)


def waiting_for_gathers(messages: Mapping[int, Message], unit: Sequence[int], seconds: Floats, n_units: int) -> Floats:
    """Return (3, N, K) seconds that units wait, in the forward and in the halves of the backward.

    Args:
        messages: place of a call -> its messages.
        unit: (P,) the unit of the call at each place.
        seconds: (2, P, K) of the forward and the backward of each call, on each kind of device.
        n_units: N.
    """
    waiting = np.zeros((3, n_units, seconds.shape[2]))
    places = sorted(messages)
    before = np.pad(np.cumsum(seconds, axis=1), ((0, 0), (1, 0), (0, 0)))  # of all calls before a place
    nothing = Message(0.0, 0.0, 0.0, 0.0)
    ordered = [messages[place] for place in places]
    later = [*ordered[2:], nothing, nothing]
    for number, (place, message) in enumerate(zip(places, ordered, strict=True)):
        forward = before[0, place] - before[0, places[number - 1]] if number else 0.0
        is_last = number + 1 == len(places)
        backward = 0.0 if is_last else before[1, places[number + 1] + 1] - before[1, place + 1]
        on_links = message.again + later[number].scatter
        waiting[0, unit[place]] += np.maximum(message.host_share * message.gather, message.gather - forward)
        waiting[1, unit[place]] += np.maximum(message.host_share * on_links, on_links - backward)
    for place, message in zip(places[:2], ordered[:2], strict=False):  # after the first readers there is little left to compute
        waiting[1, unit[place]] += message.scatter
    return waiting
