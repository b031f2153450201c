"""Communication as graph nodes: the functions that programs name, and that the transport of a rank executes.

Nothing communicates outside these nodes. A communication is started by one node and finished by a ``wait`` node, so that compute
between the two overlaps with it:

    pending = receive((2, 16), dtype=float32, source=0, tag=7)     # posted: returns at once
    ...                                                             # compute
    x = wait(pending)                                               # the value
    send(y, destination=2, tag=9)                                   # returns at once; y is kept alive until it has left

Messages go between two ranks. Collectives go between the ranks of a group, ``(0, 2)`` say, and take several tensors at once, which travel
together; ``wait`` gives a list. For one tensor and two ranks (letters are pieces along a dimension, ``ab`` one after the other):

                     rank 0     rank 1           rank 0     rank 1
    all_reduce       x          y           ->   x + y      x + y
    all_gather       a          b           ->   ab         ab
    reduce_scatter   ab         cd          ->   a + c      b + d
    all_to_all       ab         cd          ->   ac         bd
    halo_exchange    ab         cd          ->   abc        bcd         each reads one element of the other
    halo_add         abc        def         ->   a, b+d     c+e, f      its gradient: elements return to their owners, and are added

Pieces may differ in size, and be empty: then ``sizes`` has the size of the piece of each rank of the group, in the group's order.
Programs do not change tensors that are communicated, before or after. The collectives of a group pair up in the order of their calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from passes.ir.errors import CommunicationError

Operation: TypeAlias = Literal["sum", "max", "min"]
"""The reduction of an all_reduce."""

Sizes: TypeAlias = Sequence[Sequence[int] | None]
"""For each tensor, the sizes of the pieces of all ranks of a group along a dimension; None: all are equal."""


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _communication(declared: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a stand-in that programs name; a runtime calls the method of the same name on the rank's transport instead."""

    @functools.wraps(declared)
    def refuse(*_args: _P.args, **_kwargs: _P.kwargs) -> _R:
        raise CommunicationError(
            "a program was called with no other ranks to communicate with",
            remedy="call the PartitionedModel, which runs the programs of all ranks",
        )

    torch.fx.node.has_side_effect(refuse)
    return refuse


@_communication
def send(tensor: Tensor, destination: int, tag: int) -> None:
    """Start sending a tensor to a rank. The tag names the message: unique in a step between two ranks in one direction."""


@_communication
def receive(shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> Any:
    """Post the receive of a message; ``wait`` gives its tensor."""


@_communication
def all_reduce(tensors: Sequence[Tensor], group: tuple[int, ...], operation: Operation = "sum") -> Any:
    """Start reducing tensors over a group of ranks; ``wait`` gives the list of sums (or maxima, minima), bitwise the same on every rank."""


@_communication
def all_gather(tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
    """Start concatenating tensors of a group of ranks, each along its dimension, in the group's order; ``wait`` gives the list.

    Args:
        sizes: size of each rank's tensor along that dimension.
    """


@_communication
def reduce_scatter(tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
    """Start summing tensors over a group of ranks; ``wait`` gives the list of this rank's pieces of the sums.

    Args:
        dims: for each tensor, the dimension that its sum is cut along.
        sizes: size of each rank's piece.
    """


@_communication
def all_to_all(
    tensors: Sequence[Tensor],
    split_dims: Sequence[int],
    concat_dims: Sequence[int],
    group: tuple[int, ...],
    split_sizes: Sizes | None = None,
    concat_sizes: Sizes | None = None,
) -> Any:
    """Start sending each rank of a group its piece of each tensor; ``wait`` gives the list of the received pieces, concatenated.

    Args:
        split_dims: for each tensor, the dimension that it is cut along.
        concat_dims: for each tensor, the dimension that received pieces are concatenated along, in the group's order.
        split_sizes: size of the piece for each rank.
        concat_sizes: size of the piece from each rank, along ``concat_dims``.
    """


@_communication
def halo_exchange(
    tensors: Sequence[Tensor],
    dims: Sequence[int],
    group: tuple[int, ...],
    owned: Sequence[tuple[int, ...]],
    wanted: Sequence[str],
    fill: float = 0.0,
) -> Any:
    """Start fetching the elements of a sharded dimension that this rank reads; ``wait`` gives the list.

    Args:
        dims: for each tensor, the dimension that is sharded over the group.
        owned: for each tensor, the number of elements that each rank of the group has.
        wanted: for each tensor, the runs of elements that each rank reads (``passes.ir.comm.index_ranges``): ``"_1 0:9|7:16 _1"``.
        fill: the value of padding.
    """


@_communication
def halo_add(
    tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], owned: Sequence[tuple[int, ...]], wanted: Sequence[str]
) -> Any:
    """Start returning gradients of the elements that ``halo_exchange`` fetched to their owners, which add them; ``wait`` gives the list."""


@_communication
def draw_alike(function: Callable[..., Any], group: tuple[int, ...], /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function that draws random numbers: all ranks of a group call it, and get the numbers of the unpartitioned model.

    It does not communicate: the ranks have the same state of the generator (``share_random_state``).
    """


@_communication
def share_random_state(group: tuple[int, ...], source: int, *, after_loss: bool = False) -> None:
    """Set the random generators of a group of ranks to the state of one of them, which is the model's from here on.

    Args:
        after_loss: whether the loss has drawn random numbers on that rank, and nothing draws after it.
    """


@_communication
def wait(pending: Any) -> Any:
    """Wait for a receive or a collective, and return its tensor or list of tensors."""


COLLECTIVES = (all_reduce, all_gather, reduce_scatter, all_to_all, halo_exchange, halo_add)
"""The functions that all ranks of a ``group`` call; the first argument is the tensors."""

COMMUNICATION = (send, receive, *COLLECTIVES, wait)
"""Every function of this module that a program may call: kept by dead-code elimination."""
