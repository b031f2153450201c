"""What ``mode=`` means: a mesh of named dimensions, and what each cuts.

"data"        the batch; parameters replicated, their gradients summed
"fsdp"        the batch; parameters, gradients and optimizer state held in parts ("zero1", "zero2": gathered once a step)
"tensor"      axes of the parameters: heads, ffn, vocab, channels, experts
"sequence"    the sequence
"tile"        height, width, depth: how many tiles, or a grid of them, (2, 2)
"pipeline"    the graph itself, into stages with microbatches
"model"       the graph itself, without microbatches
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from passes.ir.errors import ConfigError
from passes.ir.mesh import ROWS, TILE, TILES, Mesh

__all__ = ["dimension_named", "dimensions_of_one", "resolve_mode", "tiles_in_turn"]

MODES = ("model", "pipeline", "tensor", "sequence", TILE, *ROWS)
"""Every mode that stands for one mesh dimension."""

_SHORT_NAMES = {"dp": "data", "pp": "pipeline", "tp": "tensor", "sp": "sequence"}


def resolve_mode(mode: str | Mapping[str, int | Sequence[int]], n_devices: int) -> Mesh | None:
    """The mesh that a mode asks for; None where the planner is to choose (``"auto"``).

    Raises:
        ConfigError: a mode is unknown, or a mesh does not have as many ranks as there are devices.
    """
    if isinstance(mode, str):
        name = _known(mode)
        return None if name == "auto" else Mesh(((name, n_devices),))
    names = [_known(name) for name in mode]
    for name in names:
        if names.count(name) > 1 or name == "auto":
            problem = f"names {name!r} twice" if name != "auto" else 'names "auto", which is no dimension'
            raise ConfigError(f"the mesh {dict(mode)} {problem}", remedy='name each dimension once: {"data": 2, "tensor": 2}')
    lengths = [_lengths(name, size) for name, size in zip(names, mode.values(), strict=True)]
    size = math.prod(length for each in lengths for length in each)
    if size != n_devices:
        raise ConfigError(f"the mesh {dict(mode)} has {size} devices and {n_devices} were given", remedy=f"pass devices={size}")
    dimensions = tuple(
        (of_grid, length)
        for name, each in zip(names, lengths, strict=True)
        for of_grid, length in zip(TILES if len(each) > 1 else (name,), each, strict=False)
        if length > 1
    )
    mesh = Mesh(dimensions or ((names[0] if names else "pipeline", 1),))
    if "pipeline" in mesh.names and "model" in mesh.names:
        raise ConfigError("a mesh has either a pipeline or a model dimension", remedy="leave one out")
    return mesh


def dimensions_of_one(mode: str | Mapping[str, int | Sequence[int]]) -> frozenset[str]:
    """The dimensions of a mesh that have one rank, which the mesh leaves out: ``{"data": 2, "tensor": 1}``."""
    if isinstance(mode, str):
        return frozenset()
    return frozenset(known for name, size in mode.items() if math.prod(_lengths(known := _known(name), size)) == 1)


def tiles_in_turn(mode: str | Mapping[str, int | Sequence[int]], n_devices: int) -> int | tuple[int, ...] | None:
    """How many tiles, or which grid, one device computes in turn; None where a mode means anything else.

    Raises:
        ConfigError: other modes stand beside the tiles.
    """
    if isinstance(mode, str) or n_devices != 1 or TILE not in map(_known, mode):
        return None
    lengths = {_known(name): _lengths(_known(name), size) for name, size in mode.items()}
    if any(math.prod(each) > 1 for name, each in lengths.items() if name != TILE):
        raise ConfigError(f"the mesh {dict(mode)} needs more than one device", remedy="one device computes tiles in turn, and nothing else")
    tiles = lengths[TILE]
    return None if math.prod(tiles) == 1 else tiles[0] if len(tiles) == 1 else tiles


def _lengths(name: str, size: int | Sequence[int]) -> tuple[int, ...]:
    """The size of a mesh dimension; of tiles in a grid, one for each dimension of space."""
    lengths = (size,) if isinstance(size, int) else tuple(size)
    if not lengths or any(not isinstance(length, int) or length < 1 for length in lengths):  # type: ignore[redundant-expr]  # what a caller passes is not checked
        raise ConfigError(f"the mesh dimension {name!r} has size {size!r}", remedy="a size is a number of ranks: 1 or more")
    if len(lengths) > 1 and name != TILE:
        raise ConfigError(f"the mesh dimension {name!r} has size {size!r}", remedy='only tiles make a grid: {"tile": (2, 2)}')
    if len(lengths) > len(TILES):
        raise ConfigError(f"a grid of tiles has {len(lengths)} dimensions: {size!r}", remedy="space has three dimensions at most")
    return lengths


def _known(name: str) -> str:
    name = _SHORT_NAMES.get(name, name)
    if name not in (*MODES, "auto"):
        raise ConfigError(f"there is no mode {name!r}", remedy=f"choose one of {', '.join(MODES)}, auto")
    return name


def dimension_named(name: str) -> str:
    """The full name of a mesh dimension that may be said short (``"tp"``)."""
    return _SHORT_NAMES.get(name, name)
