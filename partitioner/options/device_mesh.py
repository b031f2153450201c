"""Read a ``DeviceMesh``: the processes, in its order, and the mode that its dimension names spell.

init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))       {"data": 2, "tensor": 2}
DeviceMesh("cpu", [3, 1, 0, 2])                                    rank 0 of the plan is process 3; the mode is that of mode=
mesh["tp"]                                                         {"tensor": 2} over the processes of this one's row
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from partitioner.options.mode import SHORT_NAMES, dimension_named, dimension_sizes
from passes.ir.errors import ConfigError
from passes.ir.mesh import DIMENSIONS, TILE, TILES, Mesh
from passes.ir.plan import Plan

_Mode = str | Mapping[str, int | Sequence[int]]


def processes_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the number of the process of each rank of the plan: those of the mesh, row by row."""
    return tuple(map(int, mesh.mesh.flatten().tolist()))


def mode_on(mesh: DeviceMesh, mode: _Mode) -> _Mode:
    """Return the mode of a call with this mesh: that of its names; for a mesh without names, ``mode``.

    Raises:
        ConfigError: a name is unknown, or the mode is not that of the names, or has not the shape of a mesh without names.
    """
    if mesh.mesh_dim_names is None:
        return _mode_by_shape(mesh, mode)
    sizes = dict(zip(_names(mesh), map(int, mesh.shape), strict=True))
    if mode == "auto":
        return dict(sizes)
    given = dict.fromkeys([dimension_named(mode)], mesh.size()) if isinstance(mode, str) else mode
    wanted = [(name, size) for name, size in _sizes_along(given) if size > 1]
    if wanted != [(name, size) for name, size in sizes.items() if size > 1]:
        raise ConfigError(
            f"mode={mode!r} is not that of {_text(mesh)}, whose names are those of the mode {sizes!r}",
            remedy="leave mode out, or name the dimensions by their modes, or pass a mesh without names, which gives the order alone",
        )
    return mode if not isinstance(mode, str) else dict(sizes)


def check_plan_on(mesh: DeviceMesh, plan: Plan) -> None:
    """Raise ConfigError where the dimensions of a plan are not those of the mesh, or have not the shape of a mesh without names."""
    grid = [(name, size) for name, size in _joined_tiles(plan.grid) if size > 1]
    names = (None,) * mesh.ndim if mesh.mesh_dim_names is None else _names(mesh)
    found = [(name, size) for name, size in zip(names, map(int, mesh.shape), strict=True) if size > 1]
    if mesh.mesh_dim_names is None and mesh.ndim == 1:
        return  # the order alone; how many ranks there are is checked with the devices
    if found != [(name if mesh.mesh_dim_names else None, size) for name, size in grid]:
        raise ConfigError(f"the plan is for the mesh {dict(grid)} and was given {_text(mesh)}", remedy="pass a mesh like the plan's")


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the full names of a mesh's dimensions; raise ConfigError for unknown ones, and one that comes twice."""
    assert mesh.mesh_dim_names is not None
    names = tuple(map(dimension_named, mesh.mesh_dim_names))
    unknown = [given for given, name in zip(mesh.mesh_dim_names, names, strict=True) if name not in DIMENSIONS]
    if unknown:
        short = ", ".join(f"{given} ({full})" for given, full in SHORT_NAMES.items())
        raise ConfigError(
            f"{_text(mesh)}: there is no mode {', '.join(map(repr, unknown))}",
            remedy=f"name each dimension by its mode: {', '.join(DIMENSIONS)}; or in short: {short}.\n"
            "A mesh without names gives the order of the ranks alone, and mode= says the rest",
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"{_text(mesh)} names a mode twice: {', '.join(names)}", remedy="name each dimension once")
    return names


def _mode_by_shape(mesh: DeviceMesh, mode: _Mode) -> _Mode:
    """Return the mode of a call with a mesh without names; a mode of several dimensions must have the shape of a mesh of several."""
    if mesh.ndim == 1 or isinstance(mode, str):
        return mode
    sizes = [size for _, size in _sizes_along(mode, by_grid=True) if size > 1]
    if sizes != [size for size in map(int, mesh.shape) if size > 1]:
        raise ConfigError(
            f"mode={dict(mode)!r} has not the shape of {_text(mesh)}",
            remedy=f"give the dimensions of the mode in the order and the sizes of the mesh, or flatten it: "
            f"DeviceMesh({mesh.device_type!r}, mesh.mesh.flatten())",
        )
    return mode


def _sizes_along(mode: Mapping[str, int | Sequence[int]], *, by_grid: bool = False) -> list[tuple[str, int]]:
    """Return the full name of each dimension of a mode and the ranks along it; ``by_grid``: those of a grid of tiles one by one."""
    sizes: list[tuple[str, int]] = []
    for name, lengths in dimension_sizes(mode).items():
        if name == TILE:
            sizes += [(name, length) for length in lengths] if by_grid else [(name, math.prod(lengths))]
        else:
            sizes.append((name, sum(lengths) if name == "pipeline" else max(lengths)))
    return sizes


def _joined_tiles(grid: Mesh) -> list[tuple[str, int]]:
    """Return the dimensions of a plan's mesh, those of a grid of tiles as one."""
    tiles = [size for name, size in grid.dimensions if name in TILES]
    joined: dict[str, int] = {}
    for name, size in grid.dimensions:
        joined[TILE if name in TILES else name] = math.prod(tiles) if name in TILES else size
    return list(joined.items())


def _text(mesh: DeviceMesh) -> str:
    """Return a mesh in words: ``the device mesh (dp=2, tp=2)``."""
    if mesh.mesh_dim_names is None:
        return f"the device mesh of shape {tuple(map(int, mesh.shape))}"
    return f"the device mesh ({', '.join(f'{name}={size}' for name, size in zip(mesh.mesh_dim_names, map(int, mesh.shape), strict=True))})"
