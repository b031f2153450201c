"""The sharded axis of each run of layers, if a mesh dimension shards different axes in different layers.

over   layers                          cut along
tile0  down.0.0 ... down.2.3           height
tile0  bottom.0, bottom.3              batch
tile0  grow.0 ... head                 height
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import Table
from passes.graph.provenance import module_path
from passes.ir.mesh import ROWS, TILES
from passes.spmd.shard_graph import CutModel

__all__ = ["regions_section"]

_WHOLE = "nothing: every rank computes all of it"


def regions_section(explained: Explained) -> Table | None:
    """Return the table of runs of weighted layers by sharded axis; None if every mesh dimension shards the same axis in all layers."""
    rows = [("over", "layers", "cut along")]
    for index, (name, _) in enumerate(explained.planned.widest.layouts.mesh):
        runs = [(words, tuple(modules)) for words, modules in _runs(explained, index)] if name in (*TILES, *ROWS) else []
        if len({words for words, _ in runs}) > 1:
            rows += [(name, _layers(modules), words) for words, modules in runs]
    return Table(rows, "<<<") if len(rows) > 1 else None


def _runs(explained: Explained, index: int) -> Iterator[tuple[str, list[str]]]:
    """Yield (sharded axis, modules) of consecutive weighted calls that mesh dimension ``index`` shards along the same axis."""
    cut, names = explained.planned.widest, explained.planned_axis_names
    calls = []
    for node in cut.graph.graph.nodes:
        if node.name in cut.layouts.cuts and node.name not in cut.layouts.casts and _reads_weights(cut, node.name):
            sharded = cut.layouts.cuts[node.name][index]
            calls.append((_WHOLE if sharded is None else names[sharded.axis].partition("[")[0], module_path(node)))
    for words, run in itertools.groupby(calls, key=lambda call: call[0]):
        yield words, list(dict.fromkeys(path for _, path in run if path))


def _reads_weights(cut: CutModel, name: str) -> bool:
    """Return whether a call reads a parameter of two or more dimensions, or a cast of one."""
    held = (cut.graph.parameters, cut.layouts.casts)
    return any(any(operand.name in names for names in held) and operand.meta["val"].dim() > 1 for operand in cut.axes.operands[name])


def _layers(modules: Sequence[str]) -> str:
    if len(modules) > 2:
        return f"{modules[0]} ... {modules[-1]}"
    return ", ".join(modules) or "(the model itself)"
