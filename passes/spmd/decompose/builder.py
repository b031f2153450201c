"""Writers of decompositions: emit the local kernels and collectives that compute an op on one rank's shard.

In the decompositions, ``write.call(aten.add.Tensor, a, b)`` emits a call, and ``write["weight"]`` is an argument of the decomposed op.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes.ir.comm import functional as collectives
from passes.rules.loops import Size
from passes.spmd.local_shapes import product

aten = torch.ops.aten


@dataclass(frozen=True)
class ReductionCut:
    """One mesh dimension that shards a factor over which an op reduces.

    Attributes:
        over: the mesh dimension.
        factor: the name of the factor.
        parts: the size of each rank's shard.
        own: that of this rank's.
    """

    over: str
    factor: str
    parts: tuple[Size, ...]
    own: Size


@dataclass(frozen=True)
class PartWriter:
    """Emits the decomposition of one call on a shard.

    Attributes:
        emit: ``(function, args, kwargs, name)`` emits one call.
        arguments: parameter -> argument of the decomposed call, with local tensors.
        name: that of the decomposed call.
    """

    emit: Callable[[Any, tuple[Any, ...], Mapping[str, Any], str], fx.Node]
    arguments: Mapping[str, Any]
    name: str

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call, named after the decomposed call and the function."""
        return self.emit(function, args, kwargs, f"{self.name}_{function.__name__.partition('.')[0]}")


@dataclass(frozen=True)
class ReductionWriter(PartWriter):
    """Emits the decomposition of an op that reduces over a sharded axis.

    Attributes:
        write_size: emits a size, which may depend on the batch.
        cuts: the mesh dimensions that shard the reduction.
        factors: name of each factor of the op -> its whole size.
        own: name of each factor -> its size on this rank.
    """

    write_size: Callable[[Size], Any]
    cuts: tuple[ReductionCut, ...]
    factors: Mapping[str, Size]
    own: Mapping[str, Size]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def in_single_precision(self, write: Callable[[ReductionWriter], fx.Node], widened: Collection[str]) -> fx.Node:
        """Compute in float32 with half-precision arguments, and round the result to their dtype, as torch's kernels do.

        Args:
            widened: the arguments that are converted.
        """
        source = self.arguments["input"] if "input" in self.arguments else self.arguments["self"]
        dtype = source.meta["val"].dtype
        if dtype not in _HALF:
            return write(self)
        arguments = {
            name: self.in_float32(value) if name in widened and isinstance(value, fx.Node) else value
            for name, value in self.arguments.items()
        }
        result = write(replace(self, arguments=arguments))
        wanted = self.arguments.get("dtype") or dtype
        return result if result.meta["val"].dtype == wanted else self.call(aten.to.dtype, result, wanted)

    def in_float32(self, value: fx.Node) -> fx.Node:
        """Emit a conversion of a tensor to float32, if it is of half precision."""
        return self.call(aten.to.dtype, value, torch.float32) if value.meta["val"].dtype in _HALF else value

    def rank(self, name: str) -> int:
        """Return the number of dimensions of an argument."""
        return int(self.arguments[name].meta["val"].dim())

    def total(self, part: fx.Node) -> fx.Node:
        """Emit the sum over all ranks of their parts."""
        for cut in self.cuts:
            part = self.emit(collectives.all_reduce, (part, cut.over, "sum"), {}, f"{self.name}_all_reduce_{cut.over}")
        return part

    def greatest(self, part: fx.Node) -> fx.Node:
        """Emit the maximum over all ranks of their parts, without a gradient."""
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
        """Emit indices into the whole axis as indices from the start of this rank's shard; the outermost mesh dimension first."""
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
        """Emit the product of the whole sizes of factors: the number of elements that the op reduces over."""
        return self.write_size(product(self.factors[name] for name in factors))

    def own_count(self, *factors: str) -> Any:
        """Emit the product of this rank's sizes of factors."""
        return self.write_size(product(self.own[name] for name in factors))


_HALF = (torch.bfloat16, torch.float16)
