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
        n_ranks = len(group)
        exchanges = [Exchange(tensor, [tensor] * n_ranks, None, [tensor.shape] * n_ranks, None) for tensor in tensors]
        return self.start("all_reduce", group, exchanges, operation)

    def all_gather(self, tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
        """Start putting the group's tensors together."""
        exchanges = _gather_exchanges(tensors, dims, len(group), group.index(self.rank), sizes)
        return self.start("all_gather", group, exchanges, "sum")

    def reduce_scatter(self, tensors: Sequence[Tensor], dims: Sequence[int], group: tuple[int, ...], sizes: Sizes | None = None) -> Any:
        """Start summing this rank's pieces of the group's tensors."""
        exchanges = _scatter_exchanges(tensors, dims, len(group), group.index(self.rank), sizes)
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
        position = group.index(self.rank)
        exchanges = _transpose_exchanges(tensors, split_dims, concat_dims, len(group), position, split_sizes, concat_sizes)
        return self.start("all_to_all", group, exchanges, "sum")

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


# -- what each collective exchanges -----------------------------------------------------------------------------------------------------


def _gather_exchanges(tensors: Sequence[Tensor], dims: Sequence[int], n_ranks: int, position: int, sizes: Sizes | None) -> list[Exchange]:
    """Of an all_gather. ``position``: of this rank in the group."""
    exchanges = []
    for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        parts = _sizes_of(sizes, index, n_ranks) or [tensor.shape[dim]] * n_ranks
        _require(parts[position] == tensor.shape[dim], "all_gather", tensor, dim, parts)
        exchanges.append(Exchange(tensor, [tensor] * n_ranks, None, _shapes(tensor.shape, dim, parts), dim))
    return exchanges


def _scatter_exchanges(tensors: Sequence[Tensor], dims: Sequence[int], n_ranks: int, position: int, sizes: Sizes | None) -> list[Exchange]:
    """Of a reduce_scatter. ``position``: of this rank in the group."""
    exchanges = []
    for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        parts = _split_sizes("reduce_scatter", tensor, dim, _sizes_of(sizes, index, n_ranks), n_ranks)
        own = _resized(tensor.shape, dim, parts[position])
        exchanges.append(Exchange(tensor, tensor.split(parts, dim), dim, [own] * n_ranks, None))
    return exchanges


def _transpose_exchanges(
    tensors: Sequence[Tensor],
    split_dims: Sequence[int],
    concat_dims: Sequence[int],
    n_ranks: int,
    position: int,
    split_sizes: Sizes | None,
    concat_sizes: Sizes | None,
) -> list[Exchange]:
    """Return the exchanges of an all_to_all, one for each tensor; ``position``: of this rank in the group."""
    exchanges = []
    for index, (tensor, split_dim, concat_dim) in enumerate(zip(tensors, split_dims, concat_dims, strict=True)):
        split = _split_sizes("all_to_all", tensor, split_dim, _sizes_of(split_sizes, index, n_ranks), n_ranks)
        own = _resized(tensor.shape, split_dim, split[position])
        parts = _sizes_of(concat_sizes, index, n_ranks) or [own[concat_dim]] * n_ranks
        _require(parts[position] == own[concat_dim], "all_to_all", tensor, concat_dim, parts)
        shapes = _shapes(own, concat_dim, parts)
        exchanges.append(Exchange(tensor, tensor.split(split, split_dim), split_dim, shapes, concat_dim))
    return exchanges


def _sizes_of(sizes: Sizes | None, index: int, n_ranks: int) -> list[int] | None:
    found = None if sizes is None else sizes[index]
    if found is not None and len(found) != n_ranks:
        raise CommunicationError(
            f"{len(found)} sizes for a group of {n_ranks} ranks", remedy="sizes has the size of each rank's piece, in the group's order"
        )
    return None if found is None else list(found)


def _split_sizes(name: str, tensor: Tensor, dim: int, sizes: list[int] | None, n_ranks: int) -> list[int]:
    """How large the piece for each rank is."""
    whole = tensor.shape[dim]
    parts = [whole // n_ranks] * n_ranks if sizes is None else sizes
    _require(sum(parts) == whole, name, tensor, dim, parts)
    return parts


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
