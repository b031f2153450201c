"""What an operation that reduces inside is written with, on one rank's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.ir.comm import functional as collectives
from passes.rules.loops import Size
from passes.spmd.local_shapes import product

__all__ = ["InsideCut", "InsideWriter", "PartWriter"]

aten = torch.ops.aten


@dataclass(frozen=True)
class InsideCut:
    """One mesh dimension that cuts what an operation reduces over.

    Attributes:
        over: the mesh dimension.
        factor: name of the factor that is cut.
        parts: the sizes of all ranks' parts of it.
        own: this rank's.
    """

    over: str
    factor: str
    parts: tuple[Size, ...]
    own: Size


@dataclass(frozen=True)
class PartWriter:
    """Writes the calls that take the place of one operation on a part.

    Attributes:
        emit: writes one call: function, arguments, keywords, name.
        arguments: the operation's, its tensors those of the part.
        name: of the call that is decomposed.
    """

    emit: Callable[[Any, tuple[Any, ...], Mapping[str, Any], str], fx.Node]
    arguments: Mapping[str, Any]
    name: str

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """One call, named after the operation."""
        return self.emit(function, args, kwargs, f"{self.name}_{function.__name__.partition('.')[0]}")


@dataclass(frozen=True)
class InsideWriter(PartWriter):
    """Writes calls on parts of what an operation reduces over.

    Attributes:
        write_size: writes a size of the whole operation.
        cuts: the mesh dimensions that cut inside.
        factors: name of each factor of the operation -> its size in the whole.
        own: name of each factor -> its size in this rank's part.
    """

    write_size: Callable[[Size], Any]
    cuts: tuple[InsideCut, ...]
    factors: Mapping[str, Size]
    own: Mapping[str, Size]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def in_single_precision(self, write: Callable[[InsideWriter], fx.Node]) -> fx.Node:
        """Write with half-precision arguments made float32, and the result in their precision: as torch's kernels compute inside."""
        source = self.arguments["input"] if "input" in self.arguments else self.arguments["self"]
        dtype = source.meta["val"].dtype
        if dtype not in _HALF:
            return write(self)
        arguments = {
            name: self.call(aten.to.dtype, value, torch.float32) if name in _WIDENED and _is_half(value) else value
            for name, value in self.arguments.items()
        }
        result = write(replace(self, arguments=arguments))
        wanted = self.arguments.get("dtype") or dtype
        return result if result.meta["val"].dtype == wanted else self.call(aten.to.dtype, result, wanted)

    def rank(self, name: str) -> int:
        """How many dimensions an argument has."""
        return int(self.arguments[name].meta["val"].dim())

    def total(self, part: fx.Node) -> fx.Node:
        """The sum over all parts."""
        for cut in self.cuts:
            part = self.emit(collectives.all_reduce, (part, cut.over, "sum"), {}, f"{self.name}_all_reduce_{cut.over}")
        return part

    def greatest(self, part: fx.Node) -> fx.Node:
        """The maximum over all parts, without a gradient."""
        part = self.call(aten.detach.default, part)
        for cut in self.cuts:
            part = self.emit(collectives.all_reduce, (part, cut.over, "max"), {}, f"{self.name}_greatest_{cut.over}")
        return part

    def vary(self, whole: fx.Node) -> fx.Node:
        """Emit ``vary`` of a replicated value that sharded work reads: its gradient is summed over ranks."""
        for cut in self.cuts:
            whole = self.emit(collectives.vary, (whole, cut.over), {}, f"{self.name}_vary_{cut.over}")
        return whole

    def from_own_start(self, index: fx.Node) -> fx.Node:
        """Indices into what is cut, counted from where this rank's part starts: an outer mesh dimension's, and in it an inner one's."""
        for cut in self.cuts:
            even = len(set(cut.parts)) == 1
            sizes: tuple[Any, Any] = ([], 0) if even else (list(cut.parts), cut.own)
            arguments = (index, cut.over, len(cut.parts), self.write_size(cut.own), *sizes)
            index = self.emit(collectives.local_index, arguments, {}, f"{self.name}_local_index")
        return index

    def own_size(self) -> Any:
        """Return the size of this rank's shard of the reduced factor."""
        return self.write_size(self.cuts[-1].own)

    def local_index(self, index: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Emit indices into this rank's shard for indices into the whole axis (0 for other shards), and whether each is in this shard."""
        local = self.from_own_start(index)
        inside = self.call(aten.logical_and.default, self.call(aten.ge.Scalar, local, 0), self.call(aten.lt.Scalar, local, self.own_size()))
        return self.call(aten.mul.Tensor, local, inside), inside

    def count(self, *factors: str) -> Any:
        """How many elements the whole operation reduces over: the product of factors' sizes."""
        return self.write_size(product(self.factors[name] for name in factors))


_HALF = (torch.bfloat16, torch.float16)
_WIDENED = ("input", "self", "weight", "bias")
"""Arguments that are read; stored statistics are written, and stay what they are."""


def _is_half(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.meta["val"].dtype in _HALF
