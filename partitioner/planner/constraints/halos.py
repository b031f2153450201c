"""Halo strategies of calls that the user fixed by names of modules.

halo="recompute"                                        all of them
halo={"": "exchange", "encoder.0": "recompute"}         those of one block, and all others
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

from partitioner.options.constraints import Constraints
from partitioner.planner.constraints.modules import check_module
from passes.graph.provenance import module_path, prefixes
from passes.ir.comm.halo_strategy import HaloStrategy
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import TILE, TILES, Mesh


def check_halos(constraints: Constraints, mesh: Mesh | None) -> None:
    """Raise ConfigError if the named mesh (None: none, or one device) exchanges no halos, or for an unknown strategy."""
    if constraints.halo is None:
        return
    if mesh is None or not any(name in (TILE, *TILES) for name in mesh.names):
        has = f"the mesh has {', '.join(mesh.names)}" if mesh is not None and mesh.names else "none were asked for"
        raise ConfigError(
            f"halo={constraints.halo!r} is about tiles over devices, and {has}",
            remedy='use mode "tile" on several devices, or leave it out',
        )
    for said in _entries(constraints).values():
        if said not in get_args(HaloStrategy):
            raise ConfigError(
                f"halo={constraints.halo!r}: there is no halo strategy {said!r}",
                remedy=f"choose one of {', '.join(get_args(HaloStrategy))}",
            )


def asked_strategies(constraints: Constraints, graph: ModelGraph, modules: Collection[str]) -> dict[str, HaloStrategy]:
    """Return the halo strategy of each call for which the user fixed one.

    Args:
        modules: names of the model's modules, also of those that no call comes from.

    Raises:
        ConfigError: a module is unknown.
    """
    paths = {node.name: module_path(node) for node in graph.computing_nodes()}
    known = {prefix for path in (*paths.values(), *modules) for prefix in prefixes(path)} | {""}
    entries = _entries(constraints)
    for name in entries:
        check_module(name, known, "halo names")
    found: dict[str, HaloStrategy] = {}
    for node, path in paths.items():
        entry = max((name for name in entries if name in ("", *prefixes(path))), key=len, default=None)
        if entry is not None:
            found[node] = entries[entry]
    return found


def _entries(constraints: Constraints) -> Mapping[str, HaloStrategy]:
    return {"": constraints.halo} if isinstance(constraints.halo, str) else constraints.halo or {}
