"""Every mesh of so many devices: how many ranks cut rows, the graph, and axes of the parameters, and how these dimensions nest.

    8 devices    {"data": 8}, {"fsdp": 8}, {"pipeline": 8}, {"tensor": 8}, {"data": 4, "tensor": 2}, {"data": 4, "pipeline": 2}, ...

What sends most stands innermost, where links are fastest: tensor inside of rows. Stages send least; whether they stand outside of rows or
inside is a choice where links differ. ``"zero2"`` lies as ``"zero1"`` does and is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from passes.ir.mesh import TILE, WIDTH, Mesh

__all__ = ["MANY", "mesh_shapes", "tile_shapes", "unlike_shapes"]

ROW_KINDS = ("data", "zero1", "fsdp")
"""How replicas hold parameters: whole, in parts that are gathered once a microbatch, or gathered for every use."""

INNER = (("tensor",), ("sequence",), ("sequence", "tensor"))
"""What may be cut beside rows and stages, outermost first."""

MANY = 64
"""Devices above which only the commonest dimensions are combined: data or fsdp, pipeline, tensor."""


def mesh_shapes(n_devices: int, batch_size: int, *, levels: bool) -> Iterator[Mesh]:
    """The meshes, those with fewer dimensions first.

    Args:
        n_devices: ranks.
        batch_size: rows; the ranks that cut them must divide it.
        levels: whether links differ, so that the order of stages and rows matters.
    """
    found: dict[Mesh, None] = {}
    for rows, stages, inner in _factors(n_devices, 3):
        if batch_size % rows:
            continue
        kinds, inners = (ROW_KINDS, INNER) if n_devices <= MANY else (("data", "fsdp"), INNER[:1])
        for kind in kinds if rows > 1 else kinds[:1]:
            for within in _inner(inner, inners):
                outer = [(kind, rows), ("pipeline", stages)]
                for order in itertools.permutations(outer) if levels else (outer,):
                    dimensions = tuple((name, size) for name, size in (*order, *within) if size > 1)
                    found[Mesh(dimensions or (("pipeline", 1),))] = None
    yield from sorted(found, key=lambda mesh: (len(mesh.dimensions), mesh.names, mesh.dimensions))


def tile_shapes(n_devices: int, batch_size: int, *, tight: bool) -> Iterator[Mesh]:
    """The meshes of tiles, rows and stages outside of them: ``{"tile": 4}``, ``{"data": 2, "tile": 2}``, ``{"pipeline": 2, "tile": 2}``.

    Args:
        n_devices: ranks.
        batch_size: rows; the ranks that cut them must divide it.
        tight: for their memory: also where the batch could be cut into as many equal parts over the ranks of a stage, which is as little
            work for each, without halos.
    """
    for rows, stages, tiles in _factors(n_devices, 3):
        if tiles > 1 and batch_size % rows == 0 and (tight or batch_size % (rows * tiles)):
            for kind in ROW_KINDS if rows > 1 else ROW_KINDS[:1]:
                outer = ((kind, rows), ("pipeline", stages), (TILE, tiles))
                yield Mesh(tuple((name, size) for name, size in outer if size > 1))


def unlike_shapes(mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """The ways to give the places of a pipeline to fewer stages of unlike width: each stage on some ranks together, or some in turn.

    {"pipeline": 4}      2 | 1 | 1 together;  3 | 1 together;  2 in turn | 2 together;  ...

    Of more than four places two stages are made, on powers of two.

    Args:
        mesh: rows and a pipeline, no dimension of ``WIDTH``.

    Returns:
        Meshes, and how many ranks microbatches of each stage are dealt to; empty where one.
    """
    n_places = mesh.length(_PIPELINE)
    few = n_places <= _FEW
    for n_stages in range(2, n_places if few else 3):
        for ends in itertools.combinations(range(1, n_places), n_stages - 1):
            sizes = [end - start for start, end in itertools.pairwise((0, *ends, n_places))]
            if not few and any(size & (size - 1) for size in sizes):
                continue
            for turns in itertools.product(*([count for count in range(1, size + 1) if size % count == 0] for size in sizes)):
                widths = [size // count for size, count in zip(sizes, turns, strict=True)]
                if len(set(widths)) > 1:
                    of_places = tuple(width for width, count in zip(widths, turns, strict=True) for _ in range(count))
                    outer = tuple((name, len(of_places) if name == _PIPELINE else size) for name, size in mesh.dimensions)
                    yield Mesh((*outer, (WIDTH, max(widths))), of_places), turns if max(turns) > 1 else ()


_PIPELINE = "pipeline"

_FEW = 4
"""Places up to which all ways are tried."""


def _inner(count: int, inners: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, int], ...]]:
    """The ways to cut axes of the model over so many ranks."""
    if count == 1:
        yield ()
        return
    for names in inners:
        for sizes in _factors(count, len(names)):
            if 1 not in sizes:
                yield tuple(zip(names, sizes, strict=True))


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as an ordered product of so many others."""
    if count == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)
