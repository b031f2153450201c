"""Describe a collective on one rank: the tensors that it gives to each rank of the group, expects of each, and gets, in symbols.

    all_gather([h], (0,), group=(0, 1), sizes=((3, 2),))   on rank 0        h = float32 (3, 8)

        gives      float32 (3, 8) to rank 0,  float32 (3, 8) to rank 1
        expects    float32 (3, 8) of rank 0,  float32 (2, 8) of rank 1
        gets       float32 (5, 8)

Two ranks agree if each gives what the other one expects. Errors leave out rank and node, which the caller adds.
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
from passes.ir.tensor_spec import Size, TensorSpec, total


@dataclass(frozen=True)
class CollectiveSpec:
    """One rank's part in a collective.

    Attributes:
        signature: the kind and all arguments that must be equal on all ranks: ``"all_gather along dimension 0, 1"``.
        group: the ranks.
        given: ``[tensor][position in the group]``: the tensor that this rank gives to that rank.
        expected: ``[tensor][position in the group]``: the tensor that this rank expects from that rank.
        results: the tensors that ``wait`` returns.
    """

    signature: str
    group: tuple[int, ...]
    given: tuple[tuple[TensorSpec, ...], ...]
    expected: tuple[tuple[TensorSpec, ...], ...]
    results: tuple[TensorSpec, ...]


def collective_arguments(function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a collective by name, including defaults.

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
    """Return one rank's part in a collective.

    Args:
        function: one of ``COLLECTIVES``.
        arguments: of the function, by name; specs for tensors.
        rank: the rank.
        same_size: whether two sizes are equal for every batch size.

    Raises:
        VerificationError: the group does not contain the rank, or pieces and sizes do not fit.
    """
    group = arguments["group"]
    if rank not in group or list(group) != sorted(set(group)):
        raise VerificationError(f"the group {group} is not a set of ranks that holds rank {rank}, each once, in ascending order")
    tensors = arguments["tensors"]
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, TensorSpec):
            raise VerificationError(f"unknown argument of {function.__name__}, tensor {index}: {tensor}")
    describer = _Describer(function.__name__, tuple(tensors), len(group), group.index(rank), same_size)
    signature, exchanges = _DESCRIBERS[function](describer, arguments)
    given, expected, results = zip(*exchanges, strict=True) if exchanges else ((), (), ())
    return CollectiveSpec(signature, tuple(group), given, expected, results)


_Exchange = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], TensorSpec]
"""For one tensor: the tensors given to each rank, those expected of each rank, and the result."""


@dataclass(frozen=True)
class _Describer:
    """Describes one collective. Methods return its ``signature``, and an exchange for each tensor.

    Attributes:
        n_ranks: size of the group.
        position: index of this rank in the group.
    """

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
            whole = tensor.resized(dim, total(parts))
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
            exchanges.append((pieces, _cut(own, dim, parts), own.resized(dim, total(parts))))
        return f"{_along('all_to_all', split_dims)} to {_listed(concat_dims)}", exchanges

    def halos(self, arguments: Mapping[str, Any], *, adjoint: bool) -> tuple[str, list[_Exchange]]:
        """Describe a halo_exchange, or (``adjoint``) a halo_add, which moves the same elements from readers to owners."""
        dims = self._dims(arguments["dims"])
        exchanges = []
        for tensor, dim, owned, wanted in zip(self.tensors, dims, arguments["owned"], arguments["wanted"], strict=True):
            own_size, read_size = owned[self.position], length(from_text(wanted)[self.position])
            size, result_size = (read_size, own_size) if adjoint else (own_size, read_size)
            if not self.same_size(tensor.shape[dim], size):
                raise VerificationError(f"{self.name} is given {tensor} where its size along dimension {dim} is said to be {size}")
            copies = segments(tuple(owned), wanted)
            read_by_others = tuple(self._copied(tensor, dim, copies, reader=rank, owner=self.position) for rank in range(self.n_ranks))
            read_of_others = tuple(self._copied(tensor, dim, copies, reader=self.position, owner=rank) for rank in range(self.n_ranks))
            given, expected = (read_of_others, read_by_others) if adjoint else (read_by_others, read_of_others)
            exchanges.append((given, expected, tensor.resized(dim, result_size)))
        return f"{_along(self.name, dims)} of {_listed(arguments['owned'])}: {_listed(arguments['wanted'])}", exchanges

    def _copied(self, tensor: TensorSpec, dim: int, copies: Sequence[Sequence[Segment]], reader: int, owner: int) -> TensorSpec:
        """Return the spec of the elements that one rank reads of another; a rank sends itself nothing."""
        return tensor.resized(dim, 0 if reader == owner else sum(copy.count for copy in copies[reader][owner]))

    def _dims(self, dims: Sequence[int]) -> list[int]:
        """Check the dimensions, one for each tensor, and count negative ones from the front."""
        if len(dims) != len(self.tensors):
            raise VerificationError(f"{self.name} has {len(dims)} dimensions for {len(self.tensors)} tensors")
        for tensor, dim in zip(self.tensors, dims, strict=True):
            if not -len(tensor.shape) <= dim < len(tensor.shape):
                raise VerificationError(f"dimension {dim} of {self.name} is out of range for {tensor}")
        return [dim % len(tensor.shape) for tensor, dim in zip(self.tensors, dims, strict=True)]

    def _sizes(self, sizes: Sequence[Sequence[Any] | None] | None) -> Sequence[Sequence[Any] | None]:
        """Check the sizes of pieces: for each tensor, None or a size for each rank."""
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
        """Return the sizes of the tensors of all ranks along a dimension; ``tensor`` is this rank's."""
        own = tensor.shape[dim]
        if sizes is None:
            return [own] * self.n_ranks
        if not self.same_size(sizes[self.position], own):
            raise VerificationError(
                f"{self.name} is given {tensor} where its size along dimension {dim} is said to be {sizes[self.position]}"
            )
        return list(sizes)

    def _pieces(self, tensor: TensorSpec, dim: int, sizes: Sequence[Size] | None) -> tuple[TensorSpec, ...]:
        """Return the pieces of a tensor for all ranks; equal ones if there are no sizes."""
        whole = tensor.shape[dim]
        if sizes is None:
            if isinstance(whole, int) and whole % self.n_ranks == 0:
                return (tensor.resized(dim, whole // self.n_ranks),) * self.n_ranks
            size = sympy.cancel(sympy.sympify(whole) / self.n_ranks)
            if sympy.fraction(size)[1] != 1:
                raise VerificationError(f"{self.name} cuts {tensor} along dimension {dim} into {self.n_ranks} equal pieces")
            return (tensor.resized(dim, int(size) if size.is_Integer else size),) * self.n_ranks
        if not self.same_size(total(sizes), whole):
            raise VerificationError(f"{self.name} cuts {tensor} along dimension {dim} into pieces of sizes {_listed(sizes)}")
        return _cut(tensor, dim, sizes)


_DESCRIBERS: Mapping[Callable[..., Any], Callable[[_Describer, Mapping[str, Any]], tuple[str, list[_Exchange]]]] = {
    all_reduce: _Describer.all_reduce,
    all_gather: _Describer.all_gather,
    reduce_scatter: _Describer.reduce_scatter,
    all_to_all: _Describer.all_to_all,
    halo_exchange: lambda describer, arguments: describer.halos(arguments, adjoint=False),
    halo_add: lambda describer, arguments: describer.halos(arguments, adjoint=True),
}


def _cut(tensor: TensorSpec, dim: int, sizes: Sequence[Size]) -> tuple[TensorSpec, ...]:
    """Return for each size the tensor resized along a dimension; equal sizes share one object."""
    of_size = {size: tensor.resized(dim, size) for size in set(sizes)}
    return tuple(of_size[size] for size in sizes)


def _along(name: str, dims: Sequence[int]) -> str:
    return f"{name} along dimension {_listed(dims)}"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"
