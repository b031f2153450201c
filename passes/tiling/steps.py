"""The steps of a tiled graph: regions that are computed together, and copies between tiles and whole values.

c2 = empty(..)                               Put            the memory of a whole value
x_piece = x[.., 0:19]                        Piece          a view of a part of a whole value
c1_tile0 = conv2d(x_piece, w1)               TiledRegion    one tile of one sweep
c2_tile0 = relu(c1_tile0)                    "
c2[.., 0:16].copy_(c2_tile0)                 Put            the tile in its place, by a slice and a copy
...
m = mean(c2)                                 TiledRegion    computed whole, between two sweeps
rows = batch * 4                             Size           an integer
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from passes.autograd.region_cache import RegionTemplates
from passes.autograd.regions import Region
from passes.graph.dependencies import boundary

aten = torch.ops.aten

TILE = "tile"
"""Key in ``meta`` of a node of a tiled graph: the name of its tile, ``"tile0_1_of_relu"``; nodes that compute whole values have none."""

TEMPLATES = "templates"
"""Key in ``meta`` of the module of a tiled graph: the templates of its regions."""

FOR_WHOLE = "for_whole"
"""Key in ``meta`` of the nodes that allocate a whole value and copy tiles into it."""


@dataclass(frozen=True)
class Piece:
    """A slice of a value from outside of its region."""

    node: fx.Node


@dataclass(frozen=True)
class Put:
    """One of the nodes that assemble a whole value: it allocates the memory, slices it, or copies a tile into a slice."""

    node: fx.Node

    @property
    def tile(self) -> fx.Node | None:
        """The tile that is copied; None if the node only allocates or slices the memory."""
        tile = self.node.args[1] if self.node.target is aten.copy_.default else None
        return tile if isinstance(tile, fx.Node) else None

    @property
    def place(self) -> tuple[fx.Node, list[tuple[int, int, int]]]:
        """The whole value that is written, and the slices that lead to the written part as (dimension, start, stop)."""
        return slices_of(self.node.all_input_nodes[0], lambda node: node.target is aten.slice.Tensor)


@dataclass(frozen=True)
class Size:
    """An integer that follows from the batch."""

    node: fx.Node


@dataclass(frozen=True)
class TiledRegion(Region):
    """Nodes that are computed together.

    Attributes:
        tile: name of the tile, see ``TILE``; empty: computed whole.
    """

    tile: str


Step: TypeAlias = Piece | Put | Size | TiledRegion
"""The graph of a tiled model is a sequence of these."""


def slices_of(node: fx.Node, is_slice: Callable[[fx.Node], bool]) -> tuple[fx.Node, list[tuple[int, int, int]]]:
    """Return the whole value that a node is sliced from, and the slices that lead to it as (dimension, start, stop)."""
    slices: list[tuple[int, int, int]] = []
    while is_slice(node):
        _, dimension, start, stop = node.args
        slices.insert(0, (dimension, start, stop))  # type: ignore[arg-type]
        (node, *_) = node.all_input_nodes
    return node, slices


def templates_of(module: fx.GraphModule) -> RegionTemplates:
    """Return the templates of the regions of a graph, which all its tilings share: their tiles may be equal."""
    templates: RegionTemplates = module.meta.setdefault(TEMPLATES, RegionTemplates(with_batch=False))
    return templates


def is_streamed(graph: fx.Graph) -> bool:
    """Return whether the graph computes tiles, one after the other."""
    return any(node.meta.get(TILE) for node in graph.nodes)


def steps_of(graph: fx.Graph) -> list[Step]:
    """Return the steps of a tiled graph in the order of its nodes; neighbours that compute for the same tile are one region."""
    steps: list[Step] = []
    pieces: set[fx.Node] = set()
    region: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        tile = node.meta.get(TILE, "")
        if region and tile != region[0].meta.get(TILE, ""):
            steps.append(_region(region))
            region = []
        if isinstance(node.meta.get("val"), int | torch.SymInt):
            steps.append(Size(node))
        elif tile and _is_piece(node, pieces):
            pieces.add(node)
            steps.append(Piece(node))
        elif node.meta.get(FOR_WHOLE):
            if region:
                steps.append(_region(region))
                region = []
            steps.append(Put(node))
        else:
            region.append(node)
    return [*steps, _region(region)] if region else steps


def _is_piece(node: fx.Node, pieces: Container[fx.Node]) -> bool:
    """Return whether a node of a tile slices a value from outside of the tile, or another piece."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4:  # with a step, it is a slice of the model
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and (source in pieces or source.meta.get(TILE) != node.meta[TILE])


def _region(nodes: Sequence[fx.Node]) -> TiledRegion:
    return TiledRegion(tuple(nodes), *boundary(nodes), nodes[0].meta.get(TILE, ""))
