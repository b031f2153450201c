"""Time matrix products larger than a device: tiles of the result, in waves over the processors.

    columns, tiles of 128            108 processors, 120 tiles
    +----+----+----+--               wave 1   108 tiles
    |    |    |    |                 wave 2    12 tiles: as long as the first
    +----+----+----+--
    |    |    |    |   rows,         A tile at the border is computed whole: 257 rows take two tiles of 256.
    +----+----+----+--   256

NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantization). A tile takes the longer of its multiplications and
of reading its operands from the cache, and then the time to write it. Of the kernels there are, and of cutting the sum between processors
(split-K, whose parts are added in memory), the fastest is taken, as cuBLAS's heuristics mean to.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from cost_models.hardware.clusters import Device
from cost_models.ops.work import Product

_SPLITS = (1, 2, 4, 8, 16, 32)
"""Into how many parts a sum may be cut."""

_SHORTEST_SUM = 256
"""No part of a sum is shorter."""

_PARTIAL_SUM_BYTES = 4
"""Parts of a sum are added in float32."""


@lru_cache(maxsize=65536)
def product_time(product: Product, device: Device, dtype: torch.dtype) -> float:
    """Return the seconds of a batch of products of numeric sizes. A device without tiles has no quantisation."""
    rate = device.flops(dtype)
    if not device.tiles:
        return product.computed * float(product.flops) / rate
    tiled = (_tiled(product, device, dtype, tile, parts) for tile in device.tiles for parts in _SPLITS if _may_split(product, parts))
    return product.computed * min(tiled)


def _may_split(product: Product, parts: int) -> bool:
    return parts == 1 or product.inner / parts >= _SHORTEST_SUM


def _tiled(product: Product, device: Device, dtype: torch.dtype, tile: tuple[int, int], parts: int) -> float:
    """Return the seconds with one kernel: waves times the time of a tile on one processor; ``parts``: of the summed dimension."""
    rows, columns = tile
    count = product.batch * math.ceil(product.rows / rows) * math.ceil(product.columns / columns) * parts
    inner = math.ceil(product.inner / parts)
    share = device.processors
    multiply = 2 * rows * columns * inner / (device.flops(dtype) / share)
    read = (rows + columns) * inner * dtype.itemsize / (device.cache_bandwidth / share)
    write = rows * columns * dtype.itemsize / (device.store_bandwidth / share)
    added = 0.0
    if parts > 1:
        added = 2 * parts * product.batch * product.rows * product.columns * _PARTIAL_SUM_BYTES / device.bandwidth
    return float(math.ceil(count / device.processors) * (max(multiply, read) + write) + added)
