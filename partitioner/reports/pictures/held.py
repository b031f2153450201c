"""What ranks hold of a tensor of the model, as a table of blocks."""

from __future__ import annotations

import math

from cost_models.hardware.units import format_bytes
from partitioner.reports.explain.sharding import tensor_layout
from partitioner.reports.pictures.blocks import BlockTable, block_table
from partitioner.reports.sources import Explained

__all__ = ["cut_weights", "held_blocks"]


def held_blocks(explained: Explained, placeholder: str, name: str) -> BlockTable:
    """The table.

    Args:
        placeholder: of a parameter or buffer.
        name: that it is shown under.
    """
    dtype = next(node.meta["val"].dtype for node in explained.graph.graph.nodes if node.name == placeholder)
    blocks = dict(sorted(explained.blocks[placeholder].items()))
    held = [
        f"rank {rank} holds {block.part}, {format_bytes(math.prod(block.part) * dtype.itemsize)}"
        + ("" if not block.is_whole or len(blocks) == 1 else ", the whole")
        for rank, block in blocks.items()
    ]
    detail = f"{tensor_layout(explained, placeholder)}  {str(dtype).removeprefix('torch.')} {next(iter(blocks.values())).shape}"
    return block_table(name, detail, blocks, held)


def cut_weights(explained: Explained, most: int) -> list[BlockTable]:
    """Matrices that ranks hold in parts, one for each layout, the first of them; biases lie as their matrices do."""
    found: dict[str, BlockTable] = {}
    for placeholder, name in explained.graph.parameters.items():
        blocks = explained.blocks.get(placeholder, {})
        is_cut = any(len(block.shape) > 1 and not block.is_whole for block in blocks.values())
        layout = tensor_layout(explained, placeholder) if is_cut else ""
        if layout and layout not in found and len(found) < most:
            found[layout] = held_blocks(explained, placeholder, name)
    return list(found.values())
