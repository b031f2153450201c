"""A tensor of which a process holds blocks, which ``torch.distributed.checkpoint`` saves and loads without assembling the whole.

weight[(3 heads head), hidden] cut by heads over two ranks, rank 0:     q . k . v .     three chunks of one tensor

Chunks are identified by their offsets in the whole, so any number of processes can read the checkpoint of any other number.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from passes.ir.errors import ConfigError
from passes.spmd.shards import Block, Intervals

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

Run = tuple[int, int, int]
"""Consecutive indices of one dimension: the first in the whole, the first in the block, and their number."""


def block_chunks(block: Block) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each contiguous chunk of a block: its offsets in the whole tensor, and its slices of the block."""
    unfolded = list(zip(block.unfolded, block.intervals, strict=True))
    dimensions = []
    for size in block.shape:
        axes: list[tuple[int, Intervals]] = []
        while unfolded and math.prod(length for length, _ in axes) < size:
            axes.append(unfolded.pop(0))
        dimensions.append(_runs(axes))
    for runs in itertools.product(*dimensions):
        yield tuple(start for start, _, _ in runs), tuple(slice(own, own + length) for _, own, length in runs)


def _runs(axes: Sequence[tuple[int, Intervals]]) -> list[Run]:
    """Return the runs of a dimension that consists of axes ``(size, intervals in the block)``; whole last axes are within one run."""
    cut = max((index for index, (size, interval) in enumerate(axes) if interval != ((0, size),)), default=-1)
    if cut < 0:
        return [(0, 0, math.prod(size for size, _ in axes))]
    strides = [math.prod(size for size, _ in axes[index + 1 :]) for index in range(cut + 1)]
    outer = itertools.product(*([place for each in intervals for place in range(*each)] for _, intervals in axes[:cut]))
    runs: list[Run] = []
    end = 0
    for indices in outer:
        start = sum(index * stride for index, stride in zip(indices, strides, strict=False))
        for first, last in axes[cut][1]:
            if length := (last - first) * strides[cut]:
                runs.append((start + first * strides[cut], end, length))
                end += length
    return runs


class BlockTensor(Tensor):
    """A tensor with the shape of the whole that holds some of its blocks, each with a tensor; only checkpoints read it."""

    blocks: tuple[tuple[Block, Tensor], ...]
    _parts: dict[tuple[int, ...], Tensor]

    @staticmethod
    def __new__(cls: type[Self], blocks: Sequence[tuple[Block, Tensor]]) -> Self:
        block, held = blocks[0]
        # No public way leads to a tensor with a shape and without memory.
        wrapper = Tensor._make_wrapper_subclass(cls, block.shape, dtype=held.dtype, device=held.device)  # noqa: SLF001
        wrapper.blocks = tuple(blocks)
        wrapper._parts = {offsets: held[slices] for block, held in blocks for offsets, slices in block_chunks(block)}  # noqa: SLF001
        return wrapper

    def __init__(self, blocks: Sequence[tuple[Block, Tensor]]) -> None:
        super().__init__()

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"BlockTensor({tuple(self.shape)}, {len(self._parts)} chunks here)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Checkpoints detach a tensor and otherwise use only the methods below.
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.new_empty.default and list(args[1]) == list(args[0].shape):
            # Asynchronous checkpoints make an empty tensor for their copy, and then copy the attributes, which hold the blocks.
            options = {"dtype": args[0].dtype, "device": (kwargs or {}).get("device") or args[0].device}
            return Tensor._make_wrapper_subclass(cls, args[0].shape, **options)  # noqa: SLF001
        raise ConfigError(
            f"{func} needs the whole of a tensor of which this process holds blocks",
            remedy="pm.full_state_dict() puts all of them together",
        )

    def __create_write_items__(self, name: str, _tensor: Tensor) -> list[WriteItem]:
        metadata, planner = _checkpoint("metadata"), _checkpoint("planner")
        properties = metadata.TensorProperties.create_from_tensor(next(iter(self._parts.values())))
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(name, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = _checkpoint("metadata").ChunkStorageMetadata
        return [chunk(torch.Size(start), part.shape) for start, part in self._parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._parts[tuple(index.offset or (0,) * self.dim())]


def _checkpoint(module: str) -> Any:
    """Return a module of ``torch.distributed.checkpoint``, whose import takes as long as a fifth of that of this package."""
    return importlib.import_module(f"torch.distributed.checkpoint.{module}")
