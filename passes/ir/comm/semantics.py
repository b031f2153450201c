"""What one rank gives to each rank of a group in a collective, what it expects of each, and what it gets: in symbols.

    all_gather([h], (0,), group=(0, 1), sizes=((3, 2),))   on rank 0        h = float32 (3, 8)

        gives      float32 (3, 8) to rank 0,  float32 (3, 8) to rank 1
        expects    float32 (3, 8) of rank 0,  float32 (2, 8) of rank 1
        gets       float32 (5, 8)

Two ranks fit together where each gives what the other one expects. Errors tell the problem alone: whoever asks knows rank and node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from passes.ir.comm.index_ranges import Segment, from_text, length, segments
from passes.ir.comm.primitives import all_gather, all_reduce, all_to_all, halo_add, halo_exchange, reduce_scatter
from passes.ir.errors import VerificationError
from passes.ir.tensor_spec import Size, TensorSpec

__all__ = ["CollectiveSpec", "collective_arguments", "collective_spec"]


@dataclass(frozen=True)
class CollectiveSpec:
    """One rank's part in a collective.

    Attributes:
        manner: the kind and what all ranks must say alike: ``"all_gather along dimension 0, 1"``.
        group: the ranks.
        given: for each tensor what each rank of the group is given.
        expected: for each tensor what each rank of the group gives to this one.
        results: what ``wait`` gives.
    """

    manner: str
    group: tuple[int, ...]
    given: tuple[tuple[TensorSpec, ...], ...]
    expected: tuple[tuple[TensorSpec, ...], ...]
    results: tuple[TensorSpec, ...]


def collective_arguments(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a collective by name, defaults among them.

    Raises:
        VerificationError: the function takes no such arguments.
    """
    try:
        bound = inspect.signature(function).bind(*args, **keywords)
    except TypeError as error:
        raise VerificationError(f"calls {function.__name__} with other arguments than it takes: {error}") from error
    bound.apply_defaults()
    return dict(bound.arguments)


def collective_spec(
    function: Callable[..., Any], arguments: Mapping[str, Any], rank: int, same_size: Callable[[Size, Size], bool]
) -> CollectiveSpec:
    """What a collective gives, expects and gets on one rank.

    Args:
        arguments: of the collective, by name; specs in the place of tensors.
        rank: this one.
        same_size: whether two sizes are equal in every run.

    Raises:
        VerificationError: the group is none of this rank, or pieces and sizes do not fit.
    """
    group = arguments["group"]
    if rank not in group or list(group) != sorted(set(group)):
        raise VerificationError(f"the group {group} is not a set of ranks that holds rank {rank}, each once, in ascending order")
    tensors = arguments["tensors"]
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, TensorSpec):
            raise VerificationError(f"cannot tell what {function.__name__} is given as tensor {index}: {tensor}")
    reader = _Reader(function.__name__, tuple(tensors), len(group), group.index(rank), same_size)
    manner, exchanges = _READERS[function](reader, arguments)
    given, expected, results = zip(*exchanges, strict=True) if exchanges else ((), (), ())
    return CollectiveSpec(manner, tuple(group), given, expected, results)


_Exchange = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], TensorSpec]
"""What is given, expected and got for one tensor."""


@dataclass(frozen=True)
class _Reader:
    """Reads one collective."""

    name: str
    tensors: tuple[TensorSpec, ...]
    n_ranks: int
    position: int
    same_size: Callable[[Size, Size], bool]

    def all_reduce(self, arguments: Mapping[str, Any]) -> tuple[str, list[_Exchange]]:
        return f"all_reduce ({arguments['operation']})", [
            ((tensor,) * self.n_ranks, (tensor,) * self.n_ranks, tensor) for tensor in self.tensors
        ]

    def all_gather(self, arguments: Mapping[str, Any]) -> tuple[str, list[_Exchange]]:
        dims = self._dims(arguments["dims"])
        exchanges = []
        for tensor, dim, sizes in zip(self.tensors, dims, self._sizes(arguments["sizes"]), strict=True):
            parts = self._parts(tensor, dim, sizes)
            whole = tensor.resized(dim, _total(parts))
            exchanges.append(((tensor,) * self.n_ranks, _cut(tensor, dim, parts), whole))
        return _along("all_gather", dims), exchanges

    def reduce_scatter(self, arguments: Mapping[str, Any]) -> tuple[str, list[_Exchange]]:
        dims = self._dims(arguments["dims"])
        exchanges = []
        for tensor, dim, sizes in zip(self.tensors, dims, self._sizes(arguments["sizes"]), strict=True):
            pieces = self._pieces(tensor, dim, sizes)
            own = pieces[self.position]
            exchanges.append((pieces, (own,) * self.n_ranks, own))
        return _along("reduce_scatter", dims), exchanges

    def all_to_all(self, arguments: Mapping[str, Any]) -> tuple[str, list[_Exchange]]:
        split_dims, concat_dims = self._dims(arguments["split_dims"]), self._dims(arguments["concat_dims"])
        split_sizes, concat_sizes = self._sizes(arguments["split_sizes"]), self._sizes(arguments["concat_sizes"])
        exchanges = []
        for index, tensor in enumerate(self.tensors):
            pieces = self._pieces(tensor, split_dims[index], split_sizes[index])
            own, dim = pieces[self.position], concat_dims[index]
            parts = self._parts(own, dim, concat_sizes[index])
            exchanges.append((pieces, _cut(own, dim, parts), own.resized(dim, _total(parts))))
        return f"{_along('all_to_all', split_dims)} to {_listed(concat_dims)}", exchanges

    def halo_exchange(self, arguments: Mapping[str, Any]) -> tuple[str, list[_Exchange]]:
        return self._halos(arguments, back=False)

    def halo_add(self, arguments: Mapping[str, Any]) -> tuple[str, list[_Exchange]]:
        return self._halos(arguments, back=True)

    def _halos(self, arguments: Mapping[str, Any], *, back: bool) -> tuple[str, list[_Exchange]]:
        """What is read of others, or, on the way back, what others have read; a rank gives itself nothing."""
        dims = self._dims(arguments["dims"])
        exchanges = []
        for tensor, dim, owned, wanted in zip(self.tensors, dims, arguments["owned"], arguments["wanted"], strict=True):
            sizes = (owned[self.position], length(from_text(wanted)[self.position]))
            have, make = reversed(sizes) if back else sizes
            if not self.same_size(tensor.shape[dim], have):
                raise VerificationError(f"{self.name} is given {tensor} where its size along dimension {dim} is said to be {have}")
            read = segments(tuple(owned), wanted)
            to_others = tuple(self._copied(tensor, dim, read, reader=rank, owner=self.position) for rank in range(self.n_ranks))
            of_others = tuple(self._copied(tensor, dim, read, reader=self.position, owner=rank) for rank in range(self.n_ranks))
            given, expected = (of_others, to_others) if back else (to_others, of_others)
            exchanges.append((given, expected, tensor.resized(dim, make)))
        return f"{_along(self.name, dims)} of {_listed(arguments['owned'])}: {_listed(arguments['wanted'])}", exchanges

    def _copied(self, tensor: TensorSpec, dim: int, read: Sequence[Sequence[Segment]], reader: int, owner: int) -> TensorSpec:
        return tensor.resized(dim, 0 if reader == owner else sum(copy.count for copy in read[reader][owner]))

    # -- dimensions and sizes ------------------------------------------------------------------------------------------------------

    def _dims(self, dims: Sequence[int]) -> list[int]:
        """One for each tensor, counted from the front."""
        if len(dims) != len(self.tensors):
            raise VerificationError(f"{self.name} has {len(dims)} dimensions for {len(self.tensors)} tensors")
        for tensor, dim in zip(self.tensors, dims, strict=True):
            if not -len(tensor.shape) <= dim < len(tensor.shape):
                raise VerificationError(f"{self.name} goes along dimension {dim} of {tensor}, which has {len(tensor.shape)}")
        return [dim % len(tensor.shape) for tensor, dim in zip(self.tensors, dims, strict=True)]

    def _sizes(self, sizes: Sequence[Sequence[Any] | None] | None) -> Sequence[Sequence[Any] | None]:
        """One table for each tensor, each with a size for each rank."""
        if sizes is None:
            return [None] * len(self.tensors)
        if len(sizes) != len(self.tensors):
            raise VerificationError(f"{self.name} has sizes for {len(sizes)} of {len(self.tensors)} tensors")
        for table in sizes:
            if table is not None and len(table) != self.n_ranks:
                raise VerificationError(f"{self.name} has {len(table)} sizes for {self.n_ranks} ranks")
            unknown = [size for size in table or () if not isinstance(size, int | sympy.Expr)]
            if unknown:
                raise VerificationError(f"cannot tell the size of a piece of {self.name}: {unknown[0]}")
        return sizes

    def _parts(self, tensor: TensorSpec, dim: int, sizes: Sequence[Size] | None) -> list[Size]:
        """How large the parts of all ranks are, this tensor being this rank's."""
        own = tensor.shape[dim]
        if sizes is None:
            return [own] * self.n_ranks
        if not self.same_size(sizes[self.position], own):
            raise VerificationError(
                f"{self.name} is given {tensor} where its size along dimension {dim} is said to be {sizes[self.position]}"
            )
        return list(sizes)

    def _pieces(self, tensor: TensorSpec, dim: int, sizes: Sequence[Size] | None) -> tuple[TensorSpec, ...]:
        """What a tensor is cut into."""
        whole = tensor.shape[dim]
        if sizes is None:
            if isinstance(whole, int) and whole % self.n_ranks == 0:
                return (tensor.resized(dim, whole // self.n_ranks),) * self.n_ranks
            size = sympy.cancel(sympy.sympify(whole) / self.n_ranks)
            if sympy.fraction(size)[1] != 1:
                raise VerificationError(f"{self.name} cuts {tensor} along dimension {dim} into {self.n_ranks} equal pieces")
            return (tensor.resized(dim, int(size) if size.is_Integer else size),) * self.n_ranks
        if not self.same_size(_total(sizes), whole):
            raise VerificationError(f"{self.name} cuts {tensor} along dimension {dim} into pieces of sizes {_listed(sizes)}")
        return _cut(tensor, dim, sizes)


_READERS: Mapping[Callable[..., Any], Callable[[_Reader, Mapping[str, Any]], tuple[str, list[_Exchange]]]] = {
    all_reduce: _Reader.all_reduce,
    all_gather: _Reader.all_gather,
    reduce_scatter: _Reader.reduce_scatter,
    all_to_all: _Reader.all_to_all,
    halo_exchange: _Reader.halo_exchange,
    halo_add: _Reader.halo_add,
}


def _cut(tensor: TensorSpec, dim: int, sizes: Sequence[Size]) -> tuple[TensorSpec, ...]:
    """A tensor with each of these sizes along a dimension; those of one size are one object."""
    made = {size: tensor.resized(dim, size) for size in set(sizes)}
    return tuple(made[size] for size in sizes)


def _total(sizes: Sequence[Size]) -> Size:
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) == len(sizes):
        return sum(numbers)
    result = sympy.Add(*sizes)
    return int(result) if result.is_Integer else result


def _along(name: str, dims: Sequence[int]) -> str:
    return f"{name} along dimension {_listed(dims)}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"
