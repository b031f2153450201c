"""Other axes that a mesh of named dimensions could cut, each as a user would ask for it: to be priced as whole plans.

Axes are chosen by a sum over calls (``axis_choice``), which leaves out what only a whole plan has: what stages wait for, bundles, the
parts that other dimensions leave. So the plan of that choice is compared with those of

    {"heads": "tensor"}                                   each name alone, the rest chosen beside it
    {"heads": "tensor", "ffn": "tensor", ...}             the axes that tensor parallelism usually cuts: together, and without one of them
    {"heads": "tensor", "ffn": "tensor", "hidden": ...}   all names
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from partitioner.options.constraints import TENSOR, Constraints
from partitioner.planner.constraints.axes import NAMED_FIRST, SEQUENCE
from partitioner.planner.sharding.model import CuttableModel
from passes.ir.layout import SPACE
from passes.ir.mesh import TILE, TILES, Mesh

__all__ = ["contending_axes"]

_NEVER = ("batch", "rest")
"""Names of axes that neither dimension cuts."""


def contending_axes(model: CuttableModel, mesh: Mesh, constraints: Constraints) -> Iterator[tuple[Constraints, bool]]:
    """Yield the constraints with other axes for the tensor, sequence or tile dimension of a mesh; none where a user named axes.

    Returns:
        Each with whether it is still what the mode means: a tensor dimension cuts axes of parameters, and the sequence beside them; tiles
        cut space.
    """
    if constraints.axes or constraints.tp_plan or mesh.widths:
        return
    first_tile = next((name for name in mesh.names if name in TILES), None)
    meant = {name: name for name in (TENSOR, SEQUENCE) if name in mesh.names} | ({TILE: first_tile} if first_tile else {})
    for dimension, of_mesh in meant.items():
        kinds = {name: held for name, held in model.kinds_of_axes(mesh.cutting, of_mesh).items() if name not in _NEVER}
        usual, alone = tuple(name for name in kinds if name in NAMED_FIRST), [(name,) for name in kinds]
        without_one = itertools.combinations(usual, len(usual) - 1) if usual else ()
        for chosen in dict.fromkeys([*alone, usual, *without_one, tuple(name for name in kinds if name != SEQUENCE)]):
            if chosen and set(chosen) != {dimension}:
                is_of_mode = all(_is_meant(dimension, name, of_parameters=kinds[name]) for name in chosen)
                yield dataclasses.replace(constraints, axes=dict.fromkeys(chosen, dimension)), is_of_mode


def _is_meant(dimension: str, name: str, *, of_parameters: bool) -> bool:
    if dimension == TILE:
        return name in (*SPACE, "length")
    return dimension == TENSOR and (of_parameters or name == SEQUENCE)
