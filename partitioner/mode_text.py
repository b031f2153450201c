"""A mode as one word: ``"tensor"``, or a mesh written ``"data=2,tensor=2"``, for command lines, tables and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partitioner.meshes import dimension_named, ranks_of_mesh
from passes.ir.errors import ConfigError
from passes.ir.mesh import WIDTH

__all__ = ["REST", "mode_text", "parse_mode", "without_rest"]

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

    ``"pipeline=2+1"`` has stages on unlike numbers of ranks, ``"pipeline=2,tensor=2+1"`` stages of unlike width.

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
