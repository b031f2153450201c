"""What each rank gives and gets in a collective: the same for every transport.

Every collective is one exchange of pieces within a group, after which a rank puts together what it got, or reduces it:

                     gives to each rank        makes of what it gets
    all_reduce       the tensor                sum, maximum or minimum
    all_gather       the tensor                concatenation
    reduce_scatter   that rank's piece         sum
    all_to_all       that rank's piece         concatenation
    halo_exchange    what that rank reads      puts it in its places, beside what it has itself
    halo_add         gradients of that         adds it in its places

A transport that moves pieces can carry out all of them. Reduced is in the group's order, first to last, so that all ranks have the
very same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from partitioner.runtime.collectives.exchange import Exchange
from partitioner.runtime.collectives.halo import Halo
from passes.ir.comm.primitives import Operation, Sizes
from passes.ir.errors import CommunicationError

__all__ = ["Collective", "CollectiveTransport", "writes_in_place"]

Collective: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo_exchange", "halo_add"]
"""The name of a collective."""


class CollectiveTransport(ABC):
    """The collectives of a transport, all of them exchanges that it starts."""

    rank: int

    @abstractmethod
    def start(self, name: Collective, group: tuple[int, ...], exchanges: Sequence[Exchange], operation: Operation) -> Any:
        """Start a collective and return what ``wait`` takes."""

    def draw_turn(self, stage: int) -> Any:  # noqa: B027  of processes each has a generator of its own
        """What a stage waits for before it draws random numbers: nothing."""

    def end_draw_turn(self, stage: int) -> None:  # noqa: B027
        """Say that a stage has drawn its numbers: nobody waits."""

    def all_reduce(self, tensors: Sequence[Tensor], group: tuple[int, ...], operation: Operation = "sum") -> Any:
        """Start reducing each tensor over the group."""
        return self.start("all_reduce", group, self._exchanges("all_reduce", tensors, group), operation)

    def all_gather(self, tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
        """Start putting the group's tensors together."""
        exchanges = self._exchanges("all_gather", tensors, group, concats=_cuts(dims, sizes, group))
        return self.start("all_gather", group, exchanges, "sum")

    def reduce_scatter(self, tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
        """Start summing this rank's pieces of the group's tensors."""
        exchanges = self._exchanges("reduce_scatter", tensors, group, splits=_cuts(dims, sizes, group))
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
        splits, concats = _cuts(split_dims, split_sizes, group), _cuts(concat_dims, concat_sizes, group)
        return self.start("all_to_all", group, self._exchanges("all_to_all", tensors, group, splits, concats), "sum")

    def _exchanges(
        self,
        name: Collective,
        tensors: Sequence[Tensor],
        group: tuple[int, ...],
        splits: Sequence[_Cut] | None = None,
        concats: Sequence[_Cut] | None = None,
    ) -> list[Exchange]:
        """What this rank gives and gets of each tensor.

        Args:
            splits: how tensors are cut into a piece for each rank; None: each rank is given the whole.
            concats: how what this rank gets is put together; None: it is reduced.
        """
        here, n_ranks = group.index(self.rank), len(group)
        every = [None] * len(tensors)
        exchanges = []
        for tensor, split, concat in zip(tensors, splits or every, concats or every, strict=True):
            pieces: Sequence[Tensor] = [tensor] * n_ranks
            own: Sequence[int] = tensor.shape
            if split is not None:
                dim, sizes = split
                sizes = sizes or [own[dim] // n_ranks] * n_ranks
                _require(sum(sizes) == own[dim], name, tensor, dim, sizes)
                pieces, own = tensor.split(list(sizes), dim), _resized(own, dim, sizes[here])
            shapes: Sequence[Sequence[int]] = [own] * n_ranks
            if concat is not None:
                dim, sizes = concat
                sizes = sizes or [own[dim]] * n_ranks
                _require(sizes[here] == own[dim], name, tensor, dim, sizes)
                shapes = _shapes(own, dim, sizes)
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
        """Start fetching the elements that this rank reads."""
        position = group.index(self.rank)
        halos = [Halo(dim, position, tuple(each), read) for dim, each, read in zip(dims, owned, wanted, strict=True)]
        return self.start("halo_exchange", group, [halo.fetch(x, fill) for halo, x in zip(halos, tensors, strict=True)], "sum")

    def halo_add(
        self,
        tensors: Sequence[Tensor],
        dims: Sequence[int],
        group: tuple[int, ...],
        owned: Sequence[tuple[int, ...]],
        wanted: Sequence[str],
    ) -> Any:
        """Start giving gradients of fetched elements back."""
        position = group.index(self.rank)
        halos = [Halo(dim, position, tuple(each), read) for dim, each, read in zip(dims, owned, wanted, strict=True)]
        return self.start("halo_add", group, [halo.give_back(x) for halo, x in zip(halos, tensors, strict=True)], "sum")


def writes_in_place(function: Callable[..., Any]) -> bool:
    """Whether an operator writes its first argument and returns it (``aten.bernoulli_``)."""
    return function.__name__.partition(".")[0].endswith("_")


_Cut: TypeAlias = tuple[int, Sequence[int] | None]
"""The dimension along which a tensor is cut, and the sizes of the pieces; None: all are equal."""


def _cuts(dims: Sequence[int], sizes: Sizes | None, group: tuple[int, ...]) -> list[_Cut]:
    """The cut of each tensor into pieces for a group."""
    for found in sizes or ():
        if found is not None and len(found) != len(group):
            raise CommunicationError(
                f"{len(found)} sizes for a group of {len(group)} ranks",
                remedy="sizes has the size of each rank's piece, in the group's order",
            )
    return list(zip(dims, sizes or [None] * len(dims), strict=True))


def _require(fits: bool, name: str, tensor: Tensor, dim: int, sizes: Sequence[int]) -> None:
    if not fits:
        raise CommunicationError(
            f"{name}: a tensor of shape {tuple(tensor.shape)} does not have pieces of sizes {', '.join(map(str, sizes))} "
            f"along dimension {dim}",
            remedy="give sizes where the pieces of a group's ranks differ",
        )


def _shapes(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> list[list[int]]:
    """A shape with each of these sizes along a dimension; those of one size are one object."""
    made = {size: _resized(shape, dim, size) for size in set(sizes)}
    return [made[size] for size in sizes]


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    resized = list(shape)
    resized[dim] = size
    return resized
