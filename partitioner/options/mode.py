"""Read ``mode=``: a mesh of named dimensions, each of which cuts something.

"data"        the batch; parameters replicated, their gradients summed
"fsdp"        the batch; parameters, gradients and optimizer state sharded ("zero1", "zero2": gathered once a step)
"tensor"      axes of the parameters: heads, ffn, vocab, channels, experts; (2, 1) beside stages: over 2 ranks and over 1
"sequence"    the sequence
"tile"        height, width, depth: the number of tiles, or a grid of them, (2, 2)
"pipeline"    the graph, into stages with microbatches: one on each rank; (4, 2, 2): on 4, 2 and 2 ranks
"model"       the graph, into stages without microbatches
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.mesh import DIMENSIONS, STAGES, STORED, TILE, TILES, WIDTH, Mesh

SHORT_NAMES = {
    "dp": "data",
    "pp": "pipeline",
    "tp": "tensor",
    "sp": "sequence",
    "cp": "sequence",
    "dp_replicate": "data",
    "dp_shard": "fsdp",
}
"""Other names of mesh dimensions, the last three as torchtitan and accelerate have them."""


def resolve_mode(mode: str | Mapping[str, int | Sequence[int]], n_devices: int) -> Mesh | None:
    """Return the mesh of a mode, ``(("data", 2), ("tile0", 2), ("tile1", 2))`` for ``{"dp": 2, "tile": (2, 2), "tensor": 1}``.

    None for ``"auto"``, where the planner chooses it.

    Raises:
        ConfigError: a mode is unknown, or a mesh does not have as many ranks as there are devices.
    """
    if isinstance(mode, str):
        name = _full_name(mode)
        return None if name == "auto" else Mesh(((name, n_devices),))
    _check_names(mode)
    sizes = dimension_sizes(mode)
    widths = _widths(mode, sizes)
    n_ranks = ranks_of_mesh(mode)
    if n_ranks != n_devices:
        raise ConfigError(f"the mesh {dict(mode)} has {n_ranks} devices and {n_devices} were given", remedy=f"pass devices={n_ranks}")
    dimensions: list[tuple[str, int]] = []
    for name, size in sizes.items():
        is_grid = name == TILE and len(size) > 1
        dimensions += list(zip(TILES, size, strict=False)) if is_grid else [(name, _ranks_along(name, size))]
    single_rank = (next(iter(sizes)), 1)
    mesh = Mesh(tuple((name, length) for name, length in dimensions if length > 1) or (single_rank,), widths)
    if "pipeline" in mesh.names and "model" in mesh.names:
        raise ConfigError("a mesh has either a pipeline or a model dimension", remedy="leave one out")
    if len(stored := [name for name in mesh.names if name in STORED]) > 1:
        raise ConfigError(
            f"the mesh {dict(mode)} shards parameters and optimizer state in {len(stored)} ways: {', '.join(stored)}",
            remedy=f'keep one of them, and name the rest "data": {{"data": 2, "{stored[0]}": 2}}',
        )
    return mesh


def _check_names(mode: Mapping[str, int | Sequence[int]]) -> None:
    """Raise ConfigError for a mesh without dimensions, or with unknown ones, one that comes twice, or ``"auto"``."""
    if not mode:
        raise ConfigError("mode={} names no dimension", remedy='name each with its size: mode={"data": 2, "tensor": 2}')
    names = [_full_name(name) for name in mode]
    for name in names:
        if names.count(name) > 1 or name == "auto":
            problem = f"names {name!r} twice" if name != "auto" else 'names "auto", which is no dimension'
            raise ConfigError(f"the mesh {dict(mode)} {problem}", remedy='name each dimension once: {"data": 2, "tensor": 2}')


def ranks_of_mesh(mode: Mapping[str, int | Sequence[int]]) -> int:
    """Return the number of ranks of a mesh.

    >>> ranks_of_mesh({"data": 2, "pipeline": (2, 1)}), ranks_of_mesh({"data": 2, "pipeline": 2, "tensor": (2, 1)})
    (6, 6)
    """
    sizes = dimension_sizes(mode)
    widths = _widths(mode, sizes)
    if not widths:
        return math.prod(_ranks_along(name, size) for name, size in sizes.items())
    return sum(widths) * math.prod(_ranks_along(name, size) for name, size in sizes.items() if name not in (*STAGES, WIDTH))


def _widths(mode: Mapping[str, int | Sequence[int]], sizes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the degree of each pipeline position, ``(4, 4, 2)`` for ``{"pipeline": (2, 1), "tensor": (4, 2)}``; empty if all are equal."""
    degrees = sizes.get(WIDTH, (1,))
    if len(set(degrees)) == 1:
        return ()
    stages = next((sizes[name] for name in STAGES if name in sizes), (1,))
    replicas = tuple(stages) if len(stages) > 1 else (1,) * stages[0]
    if len(degrees) != len(replicas):
        raise ConfigError(
            f"the mesh {dict(mode)} gives {len(degrees)} stages a number of ranks, and has {len(replicas)}",
            remedy='give one number for each stage: {"pipeline": 2, "tensor": (2, 1)}',
        )
    return tuple(degree for degree, count in zip(degrees, replicas, strict=True) for _ in range(count))


def dimensions_of_one(mode: str | Mapping[str, int | Sequence[int]]) -> frozenset[str]:
    """Return the dimensions of size 1, which a mesh leaves out: ``{"tensor"}`` for ``{"data": 2, "tensor": 1}``."""
    if isinstance(mode, str):
        return frozenset()
    return frozenset(name for name, size in dimension_sizes(mode).items() if _ranks_along(name, size) == 1)


def ranks_of_stages(mode: str | Mapping[str, int | Sequence[int]]) -> tuple[int, ...]:
    """Return how many ranks share each stage round-robin: ``(2, 1)`` for ``{"pipeline": (2, 1)}``; empty if no stage is shared."""
    if isinstance(mode, str):
        return ()
    counts = dimension_sizes(mode).get("pipeline", ())
    return counts if len(counts) > 1 and max(counts) > 1 else ()


def sequential_tiles(mode: str | Mapping[str, int | Sequence[int]], n_devices: int) -> int | tuple[int, ...] | None:
    """Return the number, or the grid, of the tiles that one device computes one after the other; None for any other mode.

    Raise ConfigError if the mesh has other dimensions beside the tiles.
    """
    if isinstance(mode, str) or n_devices != 1 or TILE not in map(_full_name, mode):
        return None
    sizes = dimension_sizes(mode)
    if any(_ranks_along(name, size) > 1 for name, size in sizes.items() if name != TILE):
        raise ConfigError(
            f"the mesh {dict(mode)} needs more than one device", remedy="one device computes tiles one after the other, and nothing else"
        )
    tiles = sizes[TILE]
    if math.prod(tiles) == 1:
        return None
    return tiles[0] if len(tiles) == 1 else tiles


def dimension_sizes(mode: Mapping[str, int | Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return full name of a dimension -> its size, as ``_size`` does."""
    return {_full_name(name): _size(_full_name(name), size) for name, size in mode.items()}


def _size(name: str, size: int | Sequence[int]) -> tuple[int, ...]:
    """Return the size of a mesh dimension as a tuple: ``(4,)``; a grid of tiles ``(2, 2)``; one number for each stage ``(2, 1)``."""
    lengths = (size,) if isinstance(size, int) else tuple(size)
    if not lengths or any(not isinstance(length, int) or length < 1 for length in lengths):  # type: ignore[redundant-expr]  # what a caller passes is not checked
        raise ConfigError(f"the mesh dimension {name!r} has size {size!r}", remedy="a size is a number of ranks: 1 or more")
    if len(lengths) > 1 and name not in (TILE, "pipeline", WIDTH):
        raise ConfigError(
            f"the mesh dimension {name!r} has size {size!r}",
            remedy='only tiles make a grid, {"tile": (2, 2)}, and only stages have different numbers of ranks, '
            '{"pipeline": (2, 1)} or {"pipeline": 2, "tensor": (2, 1)}',
        )
    if name == TILE and len(lengths) > len(TILES):
        raise ConfigError(f"a grid of tiles has {len(lengths)} dimensions: {size!r}", remedy="space has three dimensions at most")
    return lengths


def _ranks_along(name: str, size: Sequence[int]) -> int:
    """Return the number of ranks along a mesh dimension: of unequal tensor-parallel degrees the largest."""
    if name == "pipeline":
        return sum(size)
    return max(size) if name == WIDTH else math.prod(size)


def _full_name(name: str) -> str:
    """Return the full name of a mesh dimension, or ``"auto"``; raise ConfigError for an unknown one."""
    name = dimension_named(name)
    if name not in (*DIMENSIONS, "auto"):
        meant = did_you_mean(str(name), (*DIMENSIONS, "auto"))
        raise ConfigError(f"there is no mode {name!r}", remedy=f"{meant}choose one of {', '.join(DIMENSIONS)}, auto")
    return name


def dimension_named(name: str) -> str:
    """Return the full name of a mesh dimension: ``"tensor"`` for ``"tp"``."""
    return SHORT_NAMES.get(name, name)


# -- a mode as text, for the command line ------------------------------------------------------------------------------------------

REST = -1
"""The size of the one mesh dimension that is inferred from the number of devices, as in ``tensor.reshape``."""


def _separator(name: str) -> str:
    """Return the character between the sizes of a dimension: ``"2+1"`` for stages, ``"2x2"`` for a grid of tiles."""
    return "+" if dimension_named(name) in ("pipeline", WIDTH) else "x"


def mode_text(mode: str | Mapping[str, Any]) -> str:
    """Return a mode as text that ``parse_mode`` reads.

    >>> mode_text({"data": 2, "tile": (2, 2)}), mode_text({"pipeline": (2, 1)}), mode_text({"pipeline": 2, "tensor": (2, 1)})
    ('data=2,tile=2x2', 'pipeline=2+1', 'pipeline=2,tensor=2+1')
    """
    if isinstance(mode, str):
        return mode
    sizes = {name: size if isinstance(size, tuple | list) else (size,) for name, size in mode.items()}
    return ",".join(f"{name}={_separator(name).join(map(str, size))}" for name, size in sizes.items())


def parse_mode(text: str) -> str | dict[str, Any]:
    """Read a mode: ``"tensor"``, or a mesh such as ``"data=2,tensor=2"``, or ``"data=-1,tensor=2"`` for ``without_rest``.

    ``"tile=2x2"`` is a grid, ``"pipeline=2+1"`` has a replicated stage, ``"pipeline=2,tensor=2+1"`` a degree for each stage. A mesh may
    also be written as in JSON or Python: ``'{"data": 2, "tile": [2, 2]}'``.

    Raises:
        ConfigError: the mesh cannot be read.
    """
    if text.lstrip().startswith("{"):
        return _mesh_of_literal(text)
    if "=" not in text:
        return text
    mesh: dict[str, Any] = {}
    for dimension in text.split(","):
        name, _, size_text = dimension.partition("=")
        sizes = size_text.split(_separator(name))
        is_size = size_text == str(REST) or all(size.isdecimal() for size in sizes)
        if not name or name in mesh or not is_size:
            raise _no_mesh(text)
        mesh[name] = int(size_text) if len(sizes) == 1 else tuple(map(int, sizes))
    return mesh


def _no_mesh(text: str) -> ConfigError:
    """Return the error for a mesh that cannot be read."""
    return ConfigError(f"--mode {text} is no mesh", remedy="name each dimension once with its size: --mode data=2,tensor=2")


def _mesh_of_literal(text: str) -> dict[str, Any]:
    """Read a mesh that is written as an object of JSON or a dict of Python."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = zip(tree.keys, tree.values, strict=True) if isinstance(tree, ast.Dict) else ()
        entries = [(ast.literal_eval(name or ""), ast.literal_eval(size)) for name, size in nodes]
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise _no_mesh(text) from error
    mesh = {name: tuple(size) if isinstance(size, list) else size for name, size in entries if isinstance(name, str)}
    sizes = [size for each in mesh.values() for size in (each if isinstance(each, tuple) else (each,))]
    if not mesh or len(mesh) < len(entries) or any(type(size) is not int for size in sizes):
        raise _no_mesh(text)
    return mesh


def without_rest(mode: str | Mapping[str, Any], n_devices: int) -> str | dict[str, Any] | None:
    """Return a mode for a number of devices, its size ``-1`` replaced; None if the mesh does not fit this number.

    >>> without_rest({"pipeline": 2, "data": -1}, 8)
    {'pipeline': 2, 'data': 4}
    """
    if isinstance(mode, str):
        return mode
    open_names = [name for name, size in mode.items() if size == REST]
    if len(open_names) > 1:
        raise ConfigError(f"the mesh {mode_text(mode)} leaves two sizes open", remedy="write -1 for one dimension alone")
    n_ranks = ranks_of_mesh({name: size for name, size in mode.items() if size != REST})
    if not open_names:
        return dict(mode) if n_ranks == n_devices else None
    rest, left = divmod(n_devices, n_ranks)
    return None if left else {name: rest if size == REST else size for name, size in mode.items()}
