"""Other axes that the dimensions of a mesh could shard, as constraints that a user could write: to be priced as whole plans.

Axes are chosen by a sum over calls (``axis_problem``), without the costs that only a whole plan has: waiting between stages, coalesced
collectives, sizes divided by other dimensions. So the plan of that choice is compared with those of

    {"heads": "tensor"}                                   each name alone, with the cheapest other axes
    {"heads": "tensor", "ffn": "tensor", ...}             the usual axes of tensor parallelism: together, and without one of them
    {"heads": "tensor", "ffn": "tensor", "hidden": ...}   all names but the sequence, which is sharded besides: a sequence dimension
                                                          always shards it, and extra axes (``MeshCut``) add it to a tensor dimension

Beside axes that the user named, which all contenders shard, the contenders name axes of the usual kinds, and the sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from partitioner.options.constraints import TENSOR, Constraints
from partitioner.options.mode import dimension_named
from partitioner.planner.constraints.axes import NAMED_FIRST
from partitioner.planner.sharding.model import CuttableModel
from passes.ir.layout import SPACE
from passes.ir.mesh import SEQUENCE, TILE, TILES, Mesh

_NEVER = ("batch", "rest")
"""Names of axes that no contender shards."""


def contending_axes(model: CuttableModel, mesh: Mesh, constraints: Constraints) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yield other axes for the tensor, sequence or tile dimension of a mesh, beside those that the user named; none beside ``tp_plan``.

    Returns:
        (names of axes, the mesh dimension that shards them, whether they are what the mode means: tensor dimensions shard axes of
        parameters, and the sequence with them; tiles shard space).
    """
    for dimension, kinds in _free_kinds(model, mesh, constraints).items():
        for names in _sets_of_names([name for name in kinds if not constraints.axes or name in (*NAMED_FIRST, SEQUENCE)]):
            if names == (dimension,):
                continue  # the sequence over "sequence": that mode shards it without constraints
            is_of_mode = all(_is_usual(dimension, name, of_parameters=kinds[name]) for name in names)
            yield names, dimension, is_of_mode


def n_sets_of_axes(model: CuttableModel, mesh: Mesh, constraints: Constraints) -> int:
    """Return how many sets of other axes a user could name beside those that are named: more than contend, if any are."""
    free = _free_kinds(model, mesh, constraints)
    return sum(2 ** len(kinds.keys() - {dimension}) - 1 for dimension, kinds in free.items())


def _free_kinds(model: CuttableModel, mesh: Mesh, constraints: Constraints) -> dict[str, dict[str, bool]]:
    """Return mesh dimension -> names of axes that it could shard and the user did not name -> whether parameters have such axes."""
    named = {name.partition("[")[0]: dimension_named(where) for name, where in (constraints.axes or {}).items()}
    if constraints.tp_plan or mesh.widths or TILE in named.values() or not named.keys().isdisjoint(_NEVER):
        return {}
    first_tile = next((name for name in mesh.names if name in TILES), None)
    dimensions = {name: name for name in (TENSOR, SEQUENCE) if name in mesh.names}
    dimensions |= {TILE: first_tile} if first_tile and not named else {}
    kinds = {dimension: model.kinds_of_axes(mesh.cutting, of_mesh) for dimension, of_mesh in dimensions.items()}
    return {dimension: {name: kind for name, kind in of.items() if name not in (*_NEVER, *named)} for dimension, of in kinds.items()}


def _sets_of_names(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return the sets of axis names to shard by one mesh dimension, each once, in the order of the module's docstring."""
    alone = [(name,) for name in names]
    usual = tuple(name for name in names if name in NAMED_FIRST)
    without_one = itertools.combinations(usual, len(usual) - 1) if usual else ()
    all_but_sequence = tuple(name for name in names if name != SEQUENCE)
    return [each for each in dict.fromkeys([*alone, usual, *without_one, all_but_sequence]) if each]


def _is_usual(dimension: str, name: str, *, of_parameters: bool) -> bool:
    """Return whether a mesh dimension usually shards axes of a name; ``of_parameters``: whether parameters have such an axis."""
    if dimension == TILE:
        return name in (*SPACE, "length")
    return dimension == TENSOR and (of_parameters or name == SEQUENCE)
