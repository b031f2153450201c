"""The blocks of a parameter or buffer that ranks hold, as a table."""

from __future__ import annotations

import itertools
import math

from cost_models.hardware.units import format_bytes
from partitioner.reports.explain.sharding import tensor_layout
from partitioner.reports.pictures.blocks import BlockTable, block_table
from partitioner.reports.sources import Explained

__all__ = ["cut_weights", "held_blocks"]

_MOST_RANKS = 64
"""Ranks that have a line each."""


def held_blocks(explained: Explained, placeholder: str, name: str) -> BlockTable:
    """Return the table of the blocks of a parameter or buffer, given by its placeholder; ``name`` is the title."""
    dtype = next(node.meta["val"].dtype for node in explained.graph.graph.nodes if node.name == placeholder)
    blocks = dict(sorted(explained.blocks[placeholder].items()))
    held = []
    for rank, block in itertools.islice(blocks.items(), _MOST_RANKS):
        whole = ", the whole" if block.is_whole and len(blocks) > 1 else ""
        held.append(f"rank {rank} holds {block.part}, {format_bytes(math.prod(block.part) * dtype.itemsize)}{whole}")
    if len(blocks) > _MOST_RANKS:
        held.append(f"and {len(blocks) - _MOST_RANKS} more ranks")
    detail = f"{tensor_layout(explained, placeholder)}  {str(dtype).removeprefix('torch.')} {next(iter(blocks.values())).shape}"
    return block_table(name, detail, blocks, held)


def cut_weights(explained: Explained, most: int) -> list[BlockTable]:
    """Return the tables of sharded weights: the first weight of each layout, at most ``most``; vectors are left out."""
    by_layout: dict[str, BlockTable] = {}
    for placeholder, name in explained.graph.parameters.items():
        if len(by_layout) == most:
            break
        blocks = explained.blocks.get(placeholder, {})
        is_cut = any(len(block.shape) > 1 and not block.is_whole for block in blocks.values())
        layout = tensor_layout(explained, placeholder) if is_cut else ""
        if layout and layout not in by_layout:
            by_layout[layout] = held_blocks(explained, placeholder, name)
    return list(by_layout.values())
