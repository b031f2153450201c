"""Express every collective as an exchange of pieces within a group, the same for every transport.

Each rank sends a piece to every rank of the group, and concatenates, reduces or adds those that it receives:

                     sends to each rank        result of what it receives
    all_reduce       the tensor                sum, maximum or minimum
    all_gather       the tensor                concatenation
    reduce_scatter   that rank's piece         sum
    all_to_all       that rank's piece         concatenation
    halo_exchange    elements that it reads    placed among the rank's own elements
    halo_add         gradients of those        added to the gradients of the rank's own elements

A transport that moves pieces can carry out all of them. Reductions go through the group in order, first to last, so that all ranks get the
same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.collectives.halo import Halo
from partitioner.runtime.collectives.random_stream import RandomStream
from passes.ir.comm.primitives import Operation, Sizes
from passes.ir.errors import CommunicationError

Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo_exchange", "halo_add"]
"""The name of a collective."""


class CollectiveTransport(ABC):
    """Executes the communication of one rank: has a method for each function of ``passes.ir.comm.primitives``.

    Collectives are implemented here by ``start``. A transport defines this and the other methods; ``ready`` returns whether ``wait`` may be
    called now, always if its ``wait`` blocks, and ``finish`` waits until everything sent has left.
    """

    rank: int
    device: torch.device
    stream: RandomStream

    @abstractmethod
    def start(self, name: Collective, group: tuple[int, ...], exchanges: Sequence[Exchange], operation: Operation) -> Any:
        """Start a collective; return the handle that ``wait`` takes."""

    def begin_draw(self, draws: tuple[int, int] | None) -> None:
        """Let the random numbers that follow be those of the forward of (microbatch, stage); None: of the loss."""
        if draws is None:
            self.stream.enter_loss(self.rank, self.device)
        else:
            self.stream.enter(draws, self.device)

    def end_draws(self, draws: tuple[int, int]) -> None:
        """Note that the forward of (microbatch, stage) has drawn all its random numbers."""
        self.stream.leave(draws, self.device)

    def all_reduce(self, tensors: Sequence[Tensor], group: tuple[int, ...], operation: Operation = "sum") -> Any:
        """Start reducing each tensor over the group."""
        return self.start("all_reduce", group, self._exchanges("all_reduce", tensors, group), operation)

    def all_gather(self, tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
        """Start concatenating the group's tensors along ``dims``."""
        exchanges = self._exchanges("all_gather", tensors, group, concats=_splits(dims, sizes, group))
        return self.start("all_gather", group, exchanges, "sum")

    def reduce_scatter(self, tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
        """Start summing this rank's pieces of the group's tensors."""
        exchanges = self._exchanges("reduce_scatter", tensors, group, splits=_splits(dims, sizes, group))
        return self.start("reduce_scatter", group, exchanges, "sum")

    def all_to_all(
        self,
        tensors: Sequence[Tensor],
        split_dims: Sequence[int],
        concat_dims: Sequence[int],
        group: tuple[int, ...],
        split_sizes: Sizes | None = None,
        concat_sizes: Sizes | None = None,
    ) -> Any:
        """Start exchanging pieces with every rank of the group."""
        splits, concats = _splits(split_dims, split_sizes, group), _splits(concat_dims, concat_sizes, group)
        return self.start("all_to_all", group, self._exchanges("all_to_all", tensors, group, splits, concats), "sum")

    def _exchanges(
        self,
        name: Collective,
        tensors: Sequence[Tensor],
        group: tuple[int, ...],
        splits: Sequence[_Split] | None = None,
        concats: Sequence[_Split] | None = None,
    ) -> list[Exchange]:
        """Return this rank's part in the exchange of each tensor.

        Args:
            splits: of each tensor, how it is split into a piece for each rank; None: each rank is sent the whole.
            concats: of each tensor, how the received pieces are concatenated; None: they are reduced.
        """
        position, n_ranks = group.index(self.rank), len(group)
        no_split = [None] * len(tensors)
        exchanges = []
        for tensor, split, concat in zip(tensors, splits or no_split, concats or no_split, strict=True):
            pieces: Sequence[Tensor] = [tensor] * n_ranks
            own_shape: Sequence[int] = tensor.shape
            if split is not None:
                dim, sizes = split
                sizes = sizes or [own_shape[dim] // n_ranks] * n_ranks
                _require(sum(sizes) == own_shape[dim], name, tensor, dim, sizes)
                pieces, own_shape = tensor.split(list(sizes), dim), _resized(own_shape, dim, sizes[position])
            shapes: Sequence[Sequence[int]] = [own_shape] * n_ranks
            if concat is not None:
                dim, sizes = concat
                sizes = sizes or [own_shape[dim]] * n_ranks
                _require(sizes[position] == own_shape[dim], name, tensor, dim, sizes)
                shapes = _shapes(own_shape, dim, sizes)
            exchanges.append(Exchange(tensor, pieces, split and split[0], shapes, concat and concat[0]))
        return exchanges

    def halo_exchange(
        self,
        tensors: Sequence[Tensor],
        dims: Sequence[int],
        group: tuple[int, ...],
        owned: Sequence[tuple[int, ...]],
        wanted: Sequence[str],
        fill: float = 0.0,
    ) -> Any:
        """Start fetching the elements that this rank reads (``Halo.fetch``)."""
        halos = self._halos(dims, group, owned, wanted)
        return self.start("halo_exchange", group, [halo.fetch(x, fill) for halo, x in zip(halos, tensors, strict=True)], "sum")

    def halo_add(
        self,
        tensors: Sequence[Tensor],
        dims: Sequence[int],
        group: tuple[int, ...],
        owned: Sequence[tuple[int, ...]],
        wanted: Sequence[str],
    ) -> Any:
        """Start returning the gradients of fetched elements to their owners (``Halo.give_back``)."""
        halos = self._halos(dims, group, owned, wanted)
        return self.start("halo_add", group, [halo.give_back(x) for halo, x in zip(halos, tensors, strict=True)], "sum")

    def _halos(self, dims: Sequence[int], group: tuple[int, ...], owned: Sequence[tuple[int, ...]], wanted: Sequence[str]) -> list[Halo]:
        position = group.index(self.rank)
        return [Halo(dim, position, tuple(counts), indices) for dim, counts, indices in zip(dims, owned, wanted, strict=True)]


def writes_in_place(function: Callable[..., Any]) -> bool:
    """Return whether an operator writes its first argument and returns it (``aten.bernoulli_``)."""
    return function.__name__.partition(".")[0].endswith("_")


_Split: TypeAlias = tuple[int, Sequence[int] | None]
"""The dimension along which a tensor is split, and the sizes of the pieces; None: all are equal."""


def _splits(dims: Sequence[int], sizes: Sizes | None, group: tuple[int, ...]) -> list[_Split]:
    """Return the split of each tensor into one piece for each rank of a group; ``sizes`` holds the piece sizes of each tensor."""
    for piece_sizes in sizes or ():
        if piece_sizes is not None and len(piece_sizes) != len(group):
            raise CommunicationError(
                f"{len(piece_sizes)} sizes for a group of {len(group)} ranks",
                remedy="sizes has the size of each rank's piece, in the group's order",
            )
    return list(zip(dims, sizes or [None] * len(dims), strict=True))


def _require(fits: bool, name: str, tensor: Tensor, dim: int, sizes: Sequence[int]) -> None:
    """Raise CommunicationError unless the piece sizes fit the tensor."""
    if not fits:
        raise CommunicationError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} does not have pieces of sizes {', '.join(map(str, sizes))} "
            f"along dimension {dim}",
            remedy="give sizes where the pieces of a group's ranks differ",
        )


def _shapes(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[list[int]]:
    """Return the shape with each of these sizes along a dimension; equal sizes share one list."""
    shape_of = {size: _resized(shape, dim, size) for size in set(sizes)}
    return [shape_of[size] for size in sizes]


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    resized = list(shape)
    resized[dim] = size
    return resized
