"""Communication as graph nodes: the functions that programs call, and the transport that carries them out.

Nothing communicates outside these nodes. A communication is started by one node and finished by a ``wait`` node, so that compute
between the two overlaps with it:

    pending = receive((2, 16), dtype=float32, source=0, tag=7)     # posted: returns at once
    ...                                                             # compute
    x = wait(pending)                                               # the value
    send(y, destination=2, tag=9)                                   # returns at once; y is kept alive until it has left
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from passes.ir.errors import CommunicationError

__all__ = ["COMMUNICATION", "Transport", "all_reduce", "receive", "send", "use_transport", "wait"]


class Transport(Protocol):
    """What carries out the communication of one rank. A pending value is whatever the transport says it is."""

    rank: int
    device: torch.device

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        """Start sending; the tensor is kept alive until it has left."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> Any:
        """Post a receive and return what ``wait`` takes."""

    def all_reduce(self, tensors: Sequence[Tensor], group: tuple[int, ...]) -> Any:
        """Start summing each tensor over the ranks of the group and return what ``wait`` takes. Calls of a group pair up in order."""

    def ready(self, pending: Any) -> bool:
        """Whether ``wait`` may be called now; a transport whose ``wait`` blocks always says yes."""

    def wait(self, pending: Any) -> Any:
        """The received tensor, or the list of summed tensors; raises CommunicationError when it cannot come."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


_TRANSPORT: contextvars.ContextVar[Transport | None] = contextvars.ContextVar("transport", default=None)


@contextlib.contextmanager
def use_transport(transport: Transport) -> Iterator[None]:
    """Carry out the communication of programs that are called inside."""
    token = _TRANSPORT.set(transport)
    try:
        yield
    finally:
        _TRANSPORT.reset(token)


def current_transport() -> Transport:
    transport = _TRANSPORT.get()
    if transport is None:
        raise CommunicationError(
            "a program was called with no other ranks to communicate with",
            remedy="call the PartitionedModel, which runs all programs; or call it inside use_transport(...)",
        )
    return transport


def send(tensor: Tensor, destination: int, tag: int) -> None:
    """Start sending a tensor to a rank. The tag names the message: unique in a step between two ranks in one direction."""
    current_transport().send(tensor, destination, tag)


def receive(shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> Any:
    """Post the receive of a message; ``wait`` gives its tensor."""
    return current_transport().receive(shape, dtype, source, tag)


def all_reduce(tensors: Sequence[Tensor], group: tuple[int, ...]) -> Any:
    """Start summing tensors over a group of ranks; ``wait`` gives the list of sums, bitwise the same on every rank."""
    return current_transport().all_reduce(tensors, group)


def wait(pending: Any) -> Any:
    """Finish a receive or an all_reduce."""
    return current_transport().wait(pending)


COMMUNICATION = (send, receive, all_reduce, wait)
"""Every function of this module that a program may call: kept by dead-code elimination."""

for _function in COMMUNICATION:
    torch.fx.node.has_side_effect(_function)
