"""What ``mode=`` means: a mesh of named dimensions, and what each cuts.

"data"        the batch; parameters replicated, their gradients summed
"fsdp"        the batch; parameters, gradients and optimizer state held in parts ("zero1", "zero2": gathered once a step)
"tensor"      axes of the parameters: heads, ffn, vocab, channels, experts; beside stages, as (2, 1), for each over so many ranks
"sequence"    the sequence
"tile"        height, width, depth: how many tiles, or a grid of them, (2, 2)
"pipeline"    the graph itself, into stages with microbatches: one on each rank, or, as (4, 2, 2), on so many each
"model"       the graph itself, without microbatches
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from passes.ir.errors import ConfigError
from passes.ir.mesh import DIMENSIONS, STAGES, STORED, TILE, TILES, WIDTH, Mesh

__all__ = [
    "REST",
    "dimension_named",
    "dimensions_of_one",
    "mode_text",
    "parse_mode",
    "ranks_of_mesh",
    "ranks_of_stages",
    "resolve_mode",
    "sequential_tiles",
    "without_rest",
]


_SHORT_NAMES = {"dp": "data", "pp": "pipeline", "tp": "tensor", "sp": "sequence"}


def resolve_mode(mode: str | Mapping[str, int | Sequence[int]], n_devices: int) -> Mesh | None:
    """The mesh that a mode asks for; None where the planner is to choose (``"auto"``).

    Raises:
        ConfigError: a mode is unknown, or a mesh does not have as many ranks as there are devices.
    """
    if isinstance(mode, str):
        name = _known(mode)
        return None if name == "auto" else Mesh(((name, n_devices),))
    if not mode:
        raise ConfigError("mode={} names no dimension", remedy='name each with its size: mode={"data": 2, "tensor": 2}')
    names = [_known(name) for name in mode]
    for name in names:
        if names.count(name) > 1 or name == "auto":
            problem = f"names {name!r} twice" if name != "auto" else 'names "auto", which is no dimension'
            raise ConfigError(f"the mesh {dict(mode)} {problem}", remedy='name each dimension once: {"data": 2, "tensor": 2}')
    lengths = _sizes(mode)
    widths = _widths(mode, lengths)
    size = ranks_of_mesh(mode)
    if size != n_devices:
        raise ConfigError(f"the mesh {dict(mode)} has {size} devices and {n_devices} were given", remedy=f"pass devices={size}")
    dimensions = tuple(
        (of_grid, length)
        for name, each in lengths.items()
        for of_grid, length in (zip(TILES, each, strict=False) if name == TILE and len(each) > 1 else ((name, _ranks(name, each)),))
        if length > 1
    )
    mesh = Mesh(dimensions or ((names[0] if names else "pipeline", 1),), widths)
    if "pipeline" in mesh.names and "model" in mesh.names:
        raise ConfigError("a mesh has either a pipeline or a model dimension", remedy="leave one out")
    if len(stored := [name for name in mesh.names if name in STORED]) > 1:
        raise ConfigError(
            f"the mesh {dict(mode)} shards parameters and optimizer state in {len(stored)} ways: {', '.join(stored)}",
            remedy=f'keep one of them, and name the rest "data": {{"data": 2, "{stored[0]}": 2}}',
        )
    return mesh


def ranks_of_mesh(mode: Mapping[str, int | Sequence[int]]) -> int:
    """How many ranks a mesh has.

    >>> ranks_of_mesh({"data": 2, "pipeline": (2, 1)}), ranks_of_mesh({"data": 2, "pipeline": 2, "tensor": (2, 1)})
    (6, 6)
    """
    lengths = _sizes(mode)
    widths = _widths(mode, lengths)
    beside = (_ranks(name, each) for name, each in lengths.items() if not widths or name not in (*STAGES, WIDTH))
    return math.prod(beside) * sum(widths or (1,))


def _widths(mode: Mapping[str, int | Sequence[int]], lengths: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """For each place along the pipeline, how many ranks share its stage; empty where all have as many."""
    each = lengths.get(WIDTH, (1,))
    if len(set(each)) == 1:
        return ()
    stages = next((lengths[name] for name in STAGES if name in lengths), (1,))
    turns = tuple(stages) if len(stages) > 1 else (1,) * stages[0]
    if len(each) != len(turns):
        raise ConfigError(
            f"the mesh {dict(mode)} gives {len(each)} stages a number of ranks, and has {len(turns)}",
            remedy='give one number for each stage: {"pipeline": 2, "tensor": (2, 1)}',
        )
    return tuple(width for width, count in zip(each, turns, strict=True) for _ in range(count))


def dimensions_of_one(mode: str | Mapping[str, int | Sequence[int]]) -> frozenset[str]:
    """The dimensions of a mesh that have one rank, which the mesh leaves out: ``{"data": 2, "tensor": 1}``."""
    if isinstance(mode, str):
        return frozenset()
    return frozenset(name for name, lengths in _sizes(mode).items() if _ranks(name, lengths) == 1)


def ranks_of_stages(mode: str | Mapping[str, int | Sequence[int]]) -> tuple[int, ...]:
    """How many ranks each stage is given, ``{"pipeline": (2, 1)}``; empty where each has one, or the planner is to choose."""
    if isinstance(mode, str):
        return ()
    each = _sizes(mode).get("pipeline", ())
    return each if len(each) > 1 and max(each) > 1 else ()


def sequential_tiles(mode: str | Mapping[str, int | Sequence[int]], n_devices: int) -> int | tuple[int, ...] | None:
    """How many tiles, or which grid, one device computes one after the other; None where a mode means anything else.

    Raises:
        ConfigError: other modes stand beside the tiles.
    """
    if isinstance(mode, str) or n_devices != 1 or TILE not in map(_known, mode):
        return None
    lengths = _sizes(mode)
    if any(_ranks(name, each) > 1 for name, each in lengths.items() if name != TILE):
        raise ConfigError(
            f"the mesh {dict(mode)} needs more than one device", remedy="one device computes tiles one after the other, and nothing else"
        )
    tiles = lengths[TILE]
    return None if math.prod(tiles) == 1 else tiles[0] if len(tiles) == 1 else tiles


def _sizes(mode: Mapping[str, int | Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The sizes of the dimensions of a mesh, by full name."""
    return {(known := _known(name)): _lengths(known, size) for name, size in mode.items()}


def _lengths(name: str, size: int | Sequence[int]) -> tuple[int, ...]:
    """The size of a mesh dimension; of tiles in a grid, one for each dimension of space, and of stages on several ranks, one for each."""
    lengths = (size,) if isinstance(size, int) else tuple(size)
    if not lengths or any(not isinstance(length, int) or length < 1 for length in lengths):  # type: ignore[redundant-expr]  # what a caller passes is not checked
        raise ConfigError(f"the mesh dimension {name!r} has size {size!r}", remedy="a size is a number of ranks: 1 or more")
    if len(lengths) > 1 and name not in (TILE, "pipeline", WIDTH):
        raise ConfigError(
            f"the mesh dimension {name!r} has size {size!r}",
            remedy='only tiles make a grid, {"tile": (2, 2)}, and only stages have unlike numbers of ranks, '
            '{"pipeline": (2, 1)} or {"pipeline": 2, "tensor": (2, 1)}',
        )
    if name == TILE and len(lengths) > len(TILES):
        raise ConfigError(f"a grid of tiles has {len(lengths)} dimensions: {size!r}", remedy="space has three dimensions at most")
    return lengths


def _ranks(name: str, lengths: Sequence[int]) -> int:
    """How many ranks stand along a mesh dimension."""
    return sum(lengths) if name == "pipeline" else max(lengths) if name == WIDTH else math.prod(lengths)


def _known(name: str) -> str:
    name = _SHORT_NAMES.get(name, name)
    if name not in (*DIMENSIONS, "auto"):
        raise ConfigError(f"there is no mode {name!r}", remedy=f"choose one of {', '.join(DIMENSIONS)}, auto")
    return name


def dimension_named(name: str) -> str:
    """The full name of a mesh dimension that may be said short (``"tp"``)."""
    return _SHORT_NAMES.get(name, name)


# -- a mode as one word ------------------------------------------------------------------------------------------------------------


REST = -1
"""The size of the one mesh dimension that takes what the others leave, as in ``tensor.reshape``."""

_GRID, _STAGES = "x", "+"


def _of_stages(name: str) -> bool:
    """Whether the sizes of a dimension are those of stages."""
    return dimension_named(name) in ("pipeline", WIDTH)


def mode_text(mode: str | Mapping[str, Any]) -> str:
    """A mode as text that ``parse_mode`` reads.

    >>> mode_text({"data": 2, "tile": (2, 2)}), mode_text({"pipeline": (2, 1)}), mode_text({"pipeline": 2, "tensor": (2, 1)})
    ('data=2,tile=2x2', 'pipeline=2+1', 'pipeline=2,tensor=2+1')
    """
    if isinstance(mode, str):
        return mode
    joined = {name: _STAGES if _of_stages(name) else _GRID for name in mode}
    return ",".join(
        f"{name}={joined[name].join(map(str, size)) if isinstance(size, tuple | list) else size}" for name, size in mode.items()
    )


def parse_mode(text: str) -> str | dict[str, Any]:
    """``"tensor"`` as it is; ``"data=2,tensor=2"`` as a mesh, ``"tile=2x2"`` with a grid, ``"data=-1,tensor=2"`` with the rest.

    ``"pipeline=2+1"`` has a replicated stage, ``"pipeline=2,tensor=2+1"`` a tensor-parallel degree for each stage.

    Raises:
        ConfigError: the mesh cannot be read.
    """
    if "=" not in text:
        return text
    mesh: dict[str, Any] = {}
    for dimension in text.split(","):
        name, _, written = dimension.partition("=")
        sizes = written.split(_STAGES if _of_stages(name) else _GRID)
        if not name or name in mesh or not (written == str(REST) or all(size.isdecimal() for size in sizes)):
            raise ConfigError(f"--mode {text} is no mesh", remedy="name each dimension once with its size: --mode data=2,tensor=2")
        mesh[name] = int(written) if len(sizes) == 1 else tuple(map(int, sizes))
    return mesh


def without_rest(mode: str | Mapping[str, Any], n_devices: int) -> str | dict[str, Any] | None:
    """The mesh for so many devices, its ``-1`` replaced; None where the devices do not divide or the mesh has another number of them.

    >>> without_rest({"pipeline": 2, "data": -1}, 8)
    {'pipeline': 2, 'data': 4}
    """
    if isinstance(mode, str):
        return mode
    open_names = [name for name, size in mode.items() if size == REST]
    if len(open_names) > 1:
        raise ConfigError(f"the mesh {mode_text(mode)} leaves two sizes open", remedy="write -1 for one dimension alone")
    known = ranks_of_mesh({name: size for name, size in mode.items() if size != REST})
    if not open_names:
        return dict(mode) if known == n_devices else None
    return {name: n_devices // known if size == REST else size for name, size in mode.items()} if n_devices % known == 0 else None
