"""What ``mode=`` means: a mesh of named dimensions, and what each cuts.

"data"        the batch; parameters replicated, their gradients summed
"fsdp"        the batch; parameters, gradients and optimizer state held in parts ("zero1", "zero2": gathered once a step)
"tensor"      axes of the parameters: heads, ffn, vocab, channels, experts
"sequence"    the sequence
"pipeline"    the graph itself, into stages with microbatches
"model"       the graph itself, without microbatches
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from passes.ir.errors import ConfigError
from passes.ir.mesh import ROWS, Mesh

__all__ = ["dimension_named", "resolve_mode"]

MODES = ("model", "pipeline", "tensor", "sequence", *ROWS)
"""Every mode that stands for one mesh dimension."""

LATER = ("tile",)
"""Modes that are named already and come in a later version."""

_SHORT_NAMES = {"dp": "data", "pp": "pipeline", "tp": "tensor", "sp": "sequence"}


def resolve_mode(mode: str | Mapping[str, int], n_devices: int) -> Mesh | None:
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
    for name, size in mode.items():
        if not isinstance(size, int) or size < 1:  # type: ignore[redundant-expr]  # what a caller passes is not checked
            raise ConfigError(f"the mesh dimension {name!r} has size {size!r}", remedy="a size is a number of ranks: 1 or more")
    size = math.prod(mode.values())
    if size != n_devices:
        raise ConfigError(f"the mesh {dict(mode)} has {size} devices and {n_devices} were given", remedy=f"pass devices={size}")
    dimensions = tuple((name, length) for name, length in zip(names, mode.values(), strict=True) if length > 1)
    mesh = Mesh(dimensions or ((names[0] if names else "pipeline", 1),))
    if "pipeline" in mesh.names and "model" in mesh.names:
        raise ConfigError("a mesh has either a pipeline or a model dimension", remedy="leave one out")
    return mesh


def _known(name: str) -> str:
    name = _SHORT_NAMES.get(name, name)
    if name in LATER:
        raise ConfigError(f'mode "{name}" is not in this version', remedy=f"choose one of {', '.join(MODES)}, auto")
    if name not in (*MODES, "auto"):
        raise ConfigError(f"there is no mode {name!r}", remedy=f"choose one of {', '.join(MODES)}, auto")
    return name


def dimension_named(name: str) -> str:
    """The full name of a mesh dimension that may be said short (``"tp"``)."""
    return _SHORT_NAMES.get(name, name)
