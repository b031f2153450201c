"""How a mesh shards a model: axes, regions of layers, halos, parameters, and the activations that ranks communicate.

axis             size         over    a rank has
heads               4         tensor  2
ffn                48         tensor  24
height, 6 of 8     64 to 512  tile0   32 to 256

blocks.*.up.weight    [ffn/tensor, hidden]    (48, 12)    (24, 12)

Layouts of parameters are read from the blocks that ranks hold.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cost_models.hardware.units import format_seconds
from partitioner.reports.communication.value_layouts import ValueLayouts, axes_text, changes_of
from partitioner.reports.module_names import module_range
from partitioner.reports.sources import Explained
from partitioner.reports.tables.table import Table
from passes.analysis.axis_names import axes_named
from passes.graph.provenance import module_path
from passes.ir.comm.primitives import COLLECTIVES, send
from passes.ir.errors import first_few
from passes.ir.layout import BATCH
from passes.ir.mesh import ROWS, STORED, TILES, WIDTH, Mesh
from passes.ir.plan import Plan
from passes.spmd.shard_graph import CutModel
from passes.spmd.shards import Block

_FEW = 3


def axes_section(explained: Explained) -> Table:
    """Return the table of sharded axes: name, size, mesh dimension, size of a rank's part."""
    plan, mesh, axes = explained.plan, explained.mesh, explained.planned.widest.axes
    names = explained.planned_axis_names
    rows = [("axis", "size", "over", "a rank has")]
    for (base, dimension), chosen in _group_by_base(plan.axes).items():
        sharded = {axis for name in chosen for axis in axes_named(name, names)}
        sizes = [plan.batch_size] if base == BATCH else sorted({axes.sizes[axis] for axis in sharded}, key=str)
        words = chosen[0] if len(chosen) == 1 else f"{base}, {len(sharded)} of {len(axes_named(base, names))}"
        has_stage_degrees = mesh.widths and dimension == WIDTH  # stages have their own tensor-parallel degrees
        degrees = sorted(set(mesh.widths), reverse=True) if has_stage_degrees else [mesh.length(dimension)]
        parts = [_any_of(_part_size(size, degree) for size in sizes) for degree in degrees]
        if len(degrees) > 1:
            parts = [f"{part} of a stage on {degree}" for part, degree in zip(parts, degrees, strict=True)]
        rows.append((words, _any_of(map(str, sizes)), dimension, "; ".join(parts)))
    stored = [name for name in mesh.names if name in STORED]
    rows += [("parameters", "", name, "a part of each, gathered where it is used") for name in stored]
    return Table(rows, "<><<")


def _group_by_base(sharded: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Group (axis, mesh dimension) by the axis name without its index; ``height[0]`` and ``height[1]`` are two axes ``height``."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, dimension in sharded:
        groups.setdefault((name.partition("[")[0], dimension), []).append(name)
    return groups


def _any_of(words: Iterable[str]) -> str:
    """Format ``"8 or 16"``; for more than ``_FEW`` different words, their smallest and largest number: ``"32 to 256"``."""
    different = list(dict.fromkeys(words))
    numbers = sorted(int(number) for word in different for number in word.split(" or ") if number.isdigit())
    return " or ".join(different) if len(different) <= _FEW or not numbers else f"{numbers[0]} to {numbers[-1]}"


def _part_size(size: object, count: int) -> str:
    """Format the size of one of ``count`` parts of an axis: ``"24"``, ``"3 or 2"`` for uneven parts, ``"batch/2"`` for symbols."""
    if not isinstance(size, int):
        return f"{size}/{count}"
    return str(size // count) if size % count == 0 else f"{size // count + 1} or {size // count}"


def parameters_section(explained: Explained) -> Table:
    """Return the table of the layouts of parameters; the same parameter of equal layers is one row: ``"blocks.*.up.weight"``."""
    groups: dict[tuple[str, ...], list[str]] = {}  # (pattern of names, layout, shape, shapes of parts) -> parameters
    for placeholder, name in explained.graph.parameters.items():
        if placeholder not in explained.blocks:
            continue
        blocks = explained.blocks[placeholder]
        shape = next(iter(blocks.values())).shape
        parts = " or ".join(dict.fromkeys(str(block.part) for block in blocks.values()))
        layout = tensor_layout(explained, placeholder)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
        groups.setdefault((pattern, layout, str(shape), parts), []).append(name)
    rows: list[tuple[str, ...]] = [("parameter", "", "layout", "shape", "a rank has")]
    for (pattern, *texts), members in groups.items():
        name, times = (pattern, f"x {len(members)}") if len(members) > 1 else (members[0], "")
        rows.append((name, times, *texts))
    return Table(rows, "<<<<<", "[axis/mesh dimension it is cut over, ...]; a*b is a dimension that holds two axes, a the outer one")


def tensor_layout(explained: Explained, placeholder: str) -> str:
    """Return the layout of a parameter or buffer: ``"[ffn/tensor, hidden]"``."""
    axes, blocks = explained.planned.widest.axes, explained.blocks[placeholder]
    in_blocks: list[int | None] = []  # for each axis its place in blocks, where a dimension of segments has one
    for of_dimension in axes.of(placeholder):
        first = sum(place is not None for place in in_blocks)
        has_segments = bool(axes.segments_of(of_dimension))
        in_blocks += [None if has_segments and index else first + index for index in range(len(of_dimension))]

    def over(position: int, _dimension: int) -> list[str]:
        place = in_blocks[position]
        return [] if place is None else _mesh_dimensions_of_axis(blocks, place, explained.mesh)

    names = explained.planned_axis_names
    return explained.once(("layout", placeholder), lambda: axes_text(axes, names, axes.of(placeholder), over))


def _mesh_dimensions_of_axis(blocks: Mapping[int, Block], position: int, mesh: Mesh) -> list[str]:
    """Return the mesh dimensions along which ranks hold different intervals of an axis, given by its position in the tensor."""
    intervals = {rank: None if block.is_whole else block.intervals[position] for rank, block in blocks.items()}
    groups = {name: _groups(mesh, name, tuple(intervals)) for name in mesh.cutting.names}
    return [name for name in groups if any(len({intervals[rank] for rank in group}) > 1 for group in groups[name])]


@functools.lru_cache(maxsize=64)
def _groups(mesh: Mesh, name: str, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of some ranks along a mesh dimension."""
    members = frozenset(ranks)
    return tuple(dict.fromkeys(tuple(other for other in mesh.group(rank, (name,)) if other in members) for rank in ranks))


_WHOLE = "nothing: every rank computes all of it"


def regions_section(explained: Explained) -> Table | None:
    """Return the table of runs of weighted layers by sharded axis; None if every mesh dimension shards the same axis in all layers.

    over   layers                          cut along
    tile0  down.0.0 ... down.2.3           height
    tile0  bottom.0, bottom.3              batch
    tile0  grow.0 ... head                 height
    """
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


def activations_section(explained: Explained) -> Table | None:
    """Return the table of communicated activations and gradients of activations, one row for each layout; None if there are none.

    value                layout                                         becomes
    add_4                [batch/data, sequence, hidden]                 sent
    linear_1 and 7 more  [batch, sequence, hidden] partial over tensor  [batch, sequence, hidden]
    """
    layouts = ValueLayouts(explained)
    stored = {*explained.graph.parameters, *explained.graph.buffers, *explained.graph.constants}
    names: dict[tuple[str, str, bool], dict[str, None]] = {}  # (layout, becomes, is a gradient) -> names of values
    for of_class in explained.classes:
        for node in of_class.program.module.graph.nodes:
            if node.target is send and node.meta["message"].kind in ("activation", "gradient"):
                message = node.meta["message"]
                is_gradient = message.kind == "gradient"
                names.setdefault((layouts.of(message.value, gradient=is_gradient), "sent", is_gradient), {})[message.value] = None
            if node.target in COLLECTIVES:
                for change, is_gradient in changes_of(node):
                    if change.value not in stored:
                        before, _, after = layouts.of_change(change, gradient=is_gradient).partition(" -> ")
                        names.setdefault((before, after, is_gradient), {})[change.value] = None
    rows = [("value", "layout", "becomes")]
    for (before, after, is_gradient), alike in names.items():
        rows.append((f"{'gradient of ' if is_gradient else ''}{first_few(list(alike), 1)}", before, after))
    return Table(rows, "<<<") if names else None


_WORDS = {"exchange": "in every layer", "overlap": "while it computes", "recompute": "once"}


def halos_section(plan: Plan) -> Table | None:
    """Return the table of the halo strategy of each segment of layers, beside the price of every other one; None if there are none.

    layers             a halo moves      layer by layer  meanwhile         once for all
    down.0 ... bottom  once            6 messages  812 us     790 us  1 message  302 us
    up.0               in every layer  2 messages  211 us     431 us  1 message  388 us
    """
    if not plan.halos:
        return None
    rows = [("layers", "a halo moves", "layer by layer", "", "meanwhile", "once for all", "")]
    rows += [
        (
            module_range(halo.modules) if len(halo.modules) < 2 else " ... ".join(name or "(the model itself)" for name in halo.modules),
            _WORDS[halo.strategy],
            _messages(halo.exchange_messages),
            format_seconds(halo.exchange_time),
            format_seconds(halo.overlap_time),
            _messages(halo.recompute_messages),
            format_seconds(halo.recompute_time),
        )
        for halo in plan.halos
    ]
    footnote = (
        "messages: of a forward; times: predicted, forward and backward; meanwhile: borders alone wait; once: the overlap is computed twice"
    )
    return Table(rows, "<<>>>>>", footnote)


def _messages(count: int) -> str:
    return f"{count} message{'' if count == 1 else 's'}"
