"""Costs at stage boundaries of values that are sharded over the ranks of a stage: they are gathered before they are sent.

            stage of two ranks       boundary       stage of other ranks
values      shards  -> gathered  ->  whole      ->  each rank takes its shard
gradients   each rank takes its  <-  whole      <-  gathered <- shards
            shard
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["GatheredGradient", "GatheredValue"]


class GatheredValue(NamedTuple):
    """A value that is sharded over the ranks of its stage, and gathered once before it is sent to later stages.

    Attributes:
        seconds: of the gather in the forward, for each kind of stage.
        size: bytes of the gathered value, beside the shards, for each kind of stage.
        producer: the unit that computes it; its stage gathers.
        reader: the last unit that reads it; no gather if that is in the same stage.
    """

    seconds: tuple[float, ...]
    size: tuple[float, ...]
    producer: int
    reader: int


class GatheredGradient(NamedTuple):
    """A value that the ranks of a stage read in shards; its gradient is gathered before it is sent back.

    Attributes:
        seconds: of the gather in the input half of the backward, for each kind of stage.
        size: bytes of the gathered gradient, beside the shards, for each kind of stage.
        producer: the unit that computes it; its own stage gathers nothing.
        readers: the units that read it; every other stage of one gathers once.
    """

    seconds: tuple[float, ...]
    size: tuple[float, ...]
    producer: int
    readers: tuple[int, ...]
