"""The diagram of a partitioned model: a lane for each rank with its modules as boxes; values, messages and collectives as arrows.

Boxes and values are read from the stages, communication from the programs that run. All gradient reductions of a rank end in one box below
its modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from cost_models.hardware.units import format_bytes
from partitioner.reports.communication.purpose import dimensions_of, items_of
from partitioner.reports.communication.value_layouts import change_of
from partitioner.reports.pictures.diagram import Arrow, ArrowKind, Box, Diagram, Lane
from partitioner.reports.pictures.modules import ModuleRun, module_runs, suitable_depth
from partitioner.reports.sources import Explained
from partitioner.reports.tables.devices import headline
from passes.autograd.staged_model import LoweredStages
from passes.emit.communication_plan import Message
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.primitives import COLLECTIVES, send
from passes.ir.mesh import homes, pipelines

__all__ = ["partition_diagram"]

_LANES = 8
"""Ranks that are drawn if nobody says which."""


def partition_diagram(explained: Explained, depth: int | None = None, ranks: Sequence[int] | None = None) -> Diagram:
    """Return the diagram of a partitioned model.

    Args:
        depth: module depth of the boxes, as in ``named_modules``; None: the deepest that fits a page.
        ranks: the ranks to draw; None: the first eight.
    """
    mesh = explained.mesh
    depth = depth or suitable_depth(explained.lowered)
    shown = tuple(range(min(mesh.size, _LANES))) if ranks is None else tuple(ranks)
    builder = _Builder(explained, depth, shown)
    for rank in shown:
        builder.boxes_of(rank)
    for rank in shown:
        builder.values_of(rank)
        builder.communication_of(rank)
    title = headline(explained.name, explained.plan, training=explained.graph.training)
    title += "" if len(shown) == mesh.size else f" - {len(shown)} of {mesh.size} ranks"
    return Diagram(title, tuple(map(builder.lane, shown)), tuple(builder.boxes), builder.arrows())


@dataclass
class _Moved:
    """The traffic between two boxes in a step."""

    bytes: int = 0
    back: int = 0
    names: dict[str, None] = field(default_factory=dict)


class _Builder:
    """Collects boxes and arrows."""

    def __init__(self, explained: Explained, depth: int, shown: Sequence[int]) -> None:
        self.explained = explained
        self.mesh = explained.mesh
        self.depth = depth
        self.shown = {rank: lane for lane, rank in enumerate(shown)}
        self.boxes: list[Box] = []
        each = pipelines(self.mesh)
        self.place = {rank: (number, each[number].index(rank)) for rank, number in homes(self.mesh).items()}
        self.producer: dict[tuple[int, str], str] = {}
        self.reader: dict[tuple[int, str], list[str]] = defaultdict(list)
        self.data: dict[tuple[str, str], None] = {}
        self.messages: defaultdict[tuple[str, str], _Moved] = defaultdict(_Moved)
        self.together: defaultdict[tuple[str, str, str], _Moved] = defaultdict(_Moved)

    def lane(self, rank: int) -> Lane:
        mesh, plan = self.mesh, self.explained.plan
        where = ", ".join(f"{name} {index}" for name, index in mesh.coordinate(rank).items()) if len(mesh.names) > 1 else ""
        return Lane(f"rank {rank}", "  ".join(part for part in (plan.devices[rank], where) if part))

    def _stages(self, rank: int) -> tuple[LoweredStages, int]:
        number, place = self.place[rank]
        return self.explained.pipelines[number], place

    # -- boxes ---------------------------------------------------------------------------------------------------------------------

    def boxes_of(self, rank: int) -> None:
        lowered, place = self._stages(rank)
        counts: defaultdict[int, int] = defaultdict(int)
        for run in module_runs(lowered, self.depth):
            if place not in lowered.stage_ranks[run.stage]:
                continue
            key = f"{rank}:{run.stage}:{counts[run.stage]}"
            counts[run.stage] += 1
            self.boxes.append(self._box(rank, key, run, lowered))
            for name in run.operations:
                self.producer.setdefault((rank, name), key)
                node = self._nodes(lowered, run.stage)[name]
                for source in node.all_input_nodes:
                    if key not in self.reader[rank, source.name]:
                        self.reader[rank, source.name].append(key)

    def _nodes(self, lowered: LoweredStages, stage: int) -> dict[str, fx.Node]:
        return {node.name: node for node in lowered.stages[stage].module.graph.nodes}

    def _box(self, rank: int, key: str, run: ModuleRun, lowered: LoweredStages) -> Box:
        nodes = self._nodes(lowered, run.stage)
        operations = list(dict.fromkeys(_operation(nodes[name]) for name in run.operations))
        held = {name: self.explained.blocks[name][rank] for name in run.parameters if rank in self.explained.blocks.get(name, {})}
        size = sum(bytes_of(nodes[name].meta["val"], None, 1) for name in held if name in nodes)
        names = [self.explained.graph.parameters[name] for name in run.parameters]
        label = run.module or ", ".join(operations[:2])
        detail = (format_bytes(size) if size else ", ".join(operations[:3])) if run.module else ""
        tooltip = "\n".join([run.module or "the model itself", f"stage {run.stage}", ", ".join(operations), *names])
        return Box(key, self.shown[rank], run.stage, label, detail, tooltip)

    # -- values --------------------------------------------------------------------------------------------------------------------

    def values_of(self, rank: int) -> None:
        """Arrows between the boxes of a rank."""
        for (owner, value), source in list(self.producer.items()):
            if owner == rank:
                for target in self.reader.get((rank, value), ()):
                    if target != source:
                        self.data[source, target] = None

    # -- communication -------------------------------------------------------------------------------------------------------------

    def communication_of(self, rank: int) -> None:
        program = self.explained.programs[rank]
        for node in program.module.graph.nodes:
            if node.target is send:
                self._message(rank, int(node.kwargs["destination"]), node.meta["message"], int(node.meta["bytes"]))
            elif node.target in COLLECTIVES and len(node.kwargs["group"]) > 1:
                self._collective(rank, node)

    def _message(self, rank: int, destination: int, message: Message, size: int) -> None:
        if destination not in self.shown or message.kind not in ("activation", "gradient"):
            return
        is_gradient = message.kind == "gradient"
        writer, readers = (destination, rank) if is_gradient else (rank, destination)
        source, targets = self.producer.get((writer, message.value)), self.reader.get((readers, message.value), ())
        if source is None or not targets:
            return
        moved = self.messages[source, targets[0]]
        moved.names[message.value] = None
        if is_gradient:
            moved.back += size
        else:
            moved.bytes += size

    def _collective(self, rank: int, node: fx.Node) -> None:
        """Between a rank and the next of its group."""
        group = [member for member in node.kwargs["group"] if member in self.shown]  # type: ignore[union-attr]
        if rank not in group[:-1]:
            return
        box = self._box_of(rank, node)
        if box is None:
            return
        function: Any = node.target
        over = " and ".join(dimensions_of(node.kwargs["group"], self.mesh))  # type: ignore[arg-type]
        after = group[group.index(rank) + 1]
        moved = self.together[box, f"{after}:{box.partition(':')[2]}", f"{function.__name__} over {over}"]
        moved.bytes += int(node.meta.get("bytes", 0))
        moved.back += 1

    def _box_of(self, rank: int, node: fx.Node) -> str | None:
        """Return the box of the communicated value: that of its module, or the gradient box of the rank."""
        reduces = node.meta.get("reduces")
        if reduces is not None and any(name in self.explained.graph.parameters for name in reduces):
            return self._gradients(rank, node.kwargs["group"])  # type: ignore[arg-type]
        for item in items_of(node):
            change = None if item is None else change_of(item)
            if change is not None:
                readers = self.reader.get((rank, change.value), ())
                found = self.producer.get((rank, change.value)) or (readers[0] if readers else None)
                if found is not None:
                    return found
        return None

    def _gradients(self, rank: int, group: Sequence[int]) -> str:
        """Return the box below a rank that stands for its reduced gradients; every rank of the group has one."""
        for member in group:
            key = f"{member}:gradients"
            if member in self.shown and all(box.key != key for box in self.boxes):
                self.boxes.append(Box(key, self.shown[member], None, "gradients", "of shared parameters", "sums over ranks"))
        return f"{rank}:gradients"

    # -- arrows --------------------------------------------------------------------------------------------------------------------

    def arrows(self) -> tuple[Arrow, ...]:
        known = {box.key for box in self.boxes}
        found = [Arrow(source, target, "data") for source, target in self.data]
        for (source, target), moved in self.messages.items():
            names = ", ".join(moved.names)
            label = f"\u2193 {format_bytes(moved.bytes)}" if moved.bytes else ""
            back = f"\u2191 {format_bytes(moved.back)}" if moved.back else ""
            found.append(Arrow(source, target, "message", "  ".join(part for part in (label, back) if part), f"{names}, in a step"))
        by_pair: dict[tuple[str, str], list[tuple[str, _Moved]]] = defaultdict(list)
        for (source, target, what), moved in self.together.items():
            if target in known:
                by_pair[source, target].append((what, moved))
        kind: ArrowKind = "collective"
        for (source, target), several in by_pair.items():
            total = format_bytes(sum(moved.bytes for _, moved in several))
            families = {what.partition(" ")[0].partition("_")[0] for what, _ in several}
            short = several[0][0].partition(" ")[0] if len(several) == 1 else f"{len(several)} kinds"
            short = families.pop() if families == {"halo"} else short
            words = "\n".join(f"{what}: {moved.back} a step, {format_bytes(moved.bytes)}" for what, moved in several)
            is_first = all(arrow.target != source or arrow.kind != kind for arrow in found)
            found.append(Arrow(source, target, kind, f"{short} {total}" if is_first else "", words))
        return tuple(found)


def _operation(node: fx.Node) -> str:
    """``"linear"`` of ``aten.linear.default``."""
    return str(node.target).removeprefix("aten.").split(".")[0] if "." in str(node.target) else getattr(node.target, "__name__", node.name)
